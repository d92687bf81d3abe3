"""The process that builds one plan: ``python -m specexport.trt.child REQUEST ANSWER``.

A process of its own, as TensorRT may end it, writes to stderr whatever it likes, and keeps memory.
REQUEST is a :class:`Request` as JSON; ANSWER gets an :class:`Answer`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from specexport.trt import addresses, flavours
from specexport.trt.bindings import trt, use
from specexport.trt.messages import Messages, logger
from specexport.trt.network import Parsed, check_borders, parse
from specexport.trt.plans import BuildSettings
from specrun.contract import TensorSpec
from specrun.decode import decode
from specrun.errors import DeviceError, EngineError, SpecrunError
from specrun.plans import ProfileSpec


@dataclass(frozen=True)
class Request:
    """What to build. ``onnx``, ``out``: paths; ``timing_cache``: path of a file, read and written
    again, None for none."""

    onnx: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    settings: BuildSettings
    out: str
    timing_cache: str | None = None


@dataclass(frozen=True)
class Answer:
    """What came of it; ``error`` is None if ``out`` is written. ``device``: the error is one of
    what is not there."""

    error: str | None = None
    hint: str | None = None
    device: bool = False
    size: int = 0
    sha256: str = ""
    activation_bytes: int | None = None
    reproducible: bool = False


def build(request: Request, graph: Path, out: IO[bytes]) -> Answer:
    """Parse, check, build and write; raises EngineError. ``graph``: a name in this folder."""
    messages = Messages()
    log = logger(messages)
    parsed = parse(graph, log, messages)
    check_borders(parsed.network, request.inputs, request.outputs)
    config = configure(parsed, request.settings, messages)
    timing = _timing_cache(config, request.timing_cache)
    sink = write(parsed, config, out, messages)
    if timing is not None and request.timing_cache is not None:
        Path(request.timing_cache).write_bytes(bytes(timing.serialize()))
    return Answer(
        size=sink.size,
        sha256=sink.hash.hexdigest(),
        activation_bytes=messages.activation_bytes,
        reproducible=addresses.are_fixed(),
    )


def configure(parsed: Parsed, settings: BuildSettings, messages: Messages) -> trt.IBuilderConfig:
    """The builder's settings and profiles; raises EngineError for each that is not taken."""
    config = parsed.builder.create_builder_config()
    config.builder_optimization_level = settings.level
    if settings.flavour == "tensorrt_rtx":  # full TensorRT builds for the GPU that is present
        config.num_compute_capabilities = 1
        capability = trt.ComputeCapability.__members__[f"SM{settings.compute_capability}"]
        if not config.set_compute_capability(capability, 0):
            raise EngineError(f"{capability.name} is refused: {messages.told()}")
    for profile in settings.profiles:
        add_profile(parsed.builder, config, profile, messages)
    return config


def add_profile(
    builder: trt.Builder, config: trt.IBuilderConfig, profile: ProfileSpec, messages: Messages
) -> None:
    """One optimization profile: the range of every input in it."""
    made = builder.create_optimization_profile()
    for name, shapes in profile.inputs.items():
        made.set_shape(name, *map(trt.Dims, (shapes.min, shapes.opt, shapes.max)))
    # TensorRT says no by a negative index, and why in its log only.
    if config.add_optimization_profile(made) < 0 or messages.errors:
        raise EngineError(
            f"profile {profile.name!r} is refused: {messages.told()}",
            hint="every dynamic size needs min <= opt <= max",
        )


class _File:
    """Takes the plan in pieces, so that one beyond 2 GB never stands in memory whole."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.hash = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Bytes taken; 0 ends the build."""
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            return 0
        self.hash.update(data)
        self.size += len(data)
        return len(data)


def _stream(sink: _File) -> trt.IStreamWriter:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]  # see messages.logger
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes) -> int:
            return sink.write(data)

    return Writer()


def write(parsed: Parsed, config: trt.IBuilderConfig, out: IO[bytes], messages: Messages) -> _File:
    """Build, and write the plan; raises EngineError if nothing came of it."""
    sink = _File(out)
    built = _build_into(sink, parsed, config)
    if sink.error is not None:
        raise EngineError(f"the plan cannot be written: {sink.error}", hint="free some disk space")
    if not built or messages.errors or not sink.size:
        raise EngineError(
            f"TensorRT does not build the graph: {messages.told()}",
            hint="specgraphs.static_rules says what TensorRT takes",
        )
    os.fsync(out.fileno())
    return sink


def _build_into(sink: _File, parsed: Parsed, config: trt.IBuilderConfig) -> bool:
    if hasattr(parsed.builder, "build_serialized_network_to_stream"):
        writer = _stream(sink)
        build = parsed.builder.build_serialized_network_to_stream
        return bool(build(parsed.network, config, writer))
    plan = parsed.builder.build_serialized_network(parsed.network, config)
    return plan is not None and sink.write(bytes(plan)) > 0


def _timing_cache(config: trt.IBuilderConfig, path: str | None) -> trt.ITimingCache | None:
    """The tactics measured before. One of another version or GPU is started anew."""
    if path is None:
        return None
    file = Path(path)
    cache = config.create_timing_cache(file.read_bytes() if file.exists() else b"")
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def main(request: str, answer: str) -> None:
    """Build what the file ``request`` asks for; whatever comes of it stands in ``answer``."""
    addresses.start_again_fixed()
    asked = decode(Request, json.loads(Path(request).read_text(encoding="utf-8")))
    try:
        found = _answer(asked)
    except OSError as error:
        found = _of_the_system(error)
    Path(answer).write_text(json.dumps(asdict(found)), encoding="utf-8")


def _answer(asked: Request) -> Answer:
    found = Answer(error="the build ended without a result")

    def work() -> None:
        nonlocal found
        try:
            found = build(asked, graph, out)
        except SpecrunError as error:
            device = isinstance(error, DeviceError)
            found = Answer(error=str(error), hint=error.hint, device=device)
        except OSError as error:
            found = _of_the_system(error)

    # All that depends on the length of a path comes before, so that it moves nothing in memory.
    use(flavours.load(asked.settings.flavour))
    graph = Path(Path(asked.onnx).name)
    # Unbuffered, so that a full disk is seen while the plan is written.
    with Path(asked.out).open("wb", buffering=0) as out:
        os.chdir(Path(asked.onnx).parent)
        addresses.in_new_heap(work)
    return found


def _of_the_system(error: OSError) -> Answer:
    return Answer(error=str(error), hint="the folder must be there, take files and have room")


if __name__ == "__main__":
    main(*sys.argv[1:])
