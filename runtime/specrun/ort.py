"""ONNX Runtime: sessions opened as the manifest says, and runs whose buffers are prepared once."""

from __future__ import annotations

import platform
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from specrun.contract import DType, TensorSpec
from specrun.errors import DeviceError, EngineError
from specrun.manifest import REEXPORT, EngineSpec

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "dml": "DmlExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
TYPES = {
    "tensor(float)": DType.FLOAT32,
    "tensor(float16)": DType.FLOAT16,
    "tensor(int64)": DType.INT64,
    "tensor(int32)": DType.INT32,
}
# A worker that waits for its next share spins this long before it sleeps: about as fast as spinning
# all the time, and with another busy process on the same cores as fast as not spinning at all.
SPIN_MICROSECONDS = 50
MAX_PREPARED_RUNS = 64  # block widths kept ready per engine

R = TypeVar("R")


def open_session(
    path: Path,
    engine: EngineSpec,
    *,
    threads: int,
    device: str = "cpu",
    mapped: bool = False,
    spin: bool = False,
) -> Any:
    """Open an engine and check that its inputs and outputs are those of the manifest.

    ``mapped``: run on the weights as they are mapped from the file, without ONNX Runtime's own
    reordered copy of them: slower, in little memory. ``spin``: threads wait for work without
    sleeping while a run lasts; between runs they always sleep.
    Raises EngineError: the device or the onnxruntime is not there, the file does not load, or
    its tensors are others than declared.
    """
    provider = _provider(device)
    _check_version(path.name, engine.requires.onnxruntime)
    if engine.precision == "w8a8" and device == "cpu" and lacks_integer_products():
        raise EngineError(
            f"{path.name}: w8a8 needs 8-bit products of the processor that do not overflow"
            " (VNNI), this one has none",
            hint="export with --precision int8 for this machine",
        )
    options = _session_options(threads, spin=spin)
    if mapped:
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_cpu_mem_arena = False  # which keeps what it ever took
    try:
        # Its fallback to other providers, which it would print, is none that we would take.
        session = onnxruntime.InferenceSession(
            str(path), options, providers=[provider], enable_fallback=0
        )
    except Exception as error:
        raise EngineError(f"{path}: does not load: {error}", hint=REEXPORT) from error
    used = session.get_providers()[0]
    if used != provider:
        raise DeviceError(f"{path}: runs on {used} instead of {provider}", hint="use --device cpu")
    try:
        check_io(session, engine, path.name)
    except UnicodeDecodeError as error:  # in a name
        raise EngineError(f"{path}: does not load: {error}", hint=REEXPORT) from error
    return session


def session_of_bytes(model: bytes, *, threads: int) -> Any:
    """A session on the CPU of a model that is no engine, with the settings of engines."""
    return onnxruntime.InferenceSession(
        model, _session_options(threads, spin=False), providers=[PROVIDERS["cpu"]]
    )


def _session_options(threads: int, *, spin: bool) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Sessions of a folder never run at the same time. Each has workers of its own, which sleep
    # between its runs, so that no more than ``threads`` are ever busy.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if not spin:
        options.add_session_config_entry(
            "session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS)
        )
    return options


def lacks_integer_products() -> bool:
    """Whether this is a processor whose 8-bit products overflow: x86 without VNNI.

    Without them ONNX Runtime adds pairs of products in 16 bits (vpmaddubsw), which saturates.
    """
    if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return not re.search(r"\b(avx512_?vnni|avx_vnni|avxvnni|amx_int8)\b", flags)


def _provider(device: str) -> str:
    available = onnxruntime.get_available_providers()
    provider = PROVIDERS.get(device)
    if provider is not None and provider in available:
        return provider
    devices = [name for name, value in PROVIDERS.items() if value in available]
    raise DeviceError(
        f"device: {device!r} is not available, this onnxruntime has {', '.join(devices)}",
        hint="use --device cpu, or install the onnxruntime package of that device",
    )


def _check_version(name: str, least: str) -> None:
    installed = onnxruntime.__version__
    if _release(installed) < _release(least):
        raise EngineError(
            f"{name}: requires onnxruntime {least} or newer, {installed} is installed",
            hint=f"pip install -U 'onnxruntime>={least}'",
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_io(session: Any, engine: EngineSpec, name: str) -> None:
    """Compare a session's inputs and outputs with the manifest's. Raises EngineError."""
    for what, declared, found in (
        ("input", engine.inputs, session.get_inputs()),
        ("output", engine.outputs, session.get_outputs()),
    ):
        nodes = {node.name: node for node in found}
        if extra := sorted(nodes.keys() - {spec.name for spec in declared}):
            raise EngineError(f"{name}: {what} {extra[0]!r} is not in the manifest", hint=REEXPORT)
        for spec in declared:
            if spec.name not in nodes:
                raise EngineError(f"{name}: has no {what} {spec.name!r}", hint=REEXPORT)
            _check_tensor(nodes[spec.name], spec, f"{name}: {what} {spec.name!r}")


def _check_tensor(node: Any, spec: TensorSpec, where: str) -> None:
    if (dtype := TYPES.get(node.type)) is not spec.dtype:
        got = dtype.value if dtype is not None else node.type
        raise EngineError(f"{where}: must be {spec.dtype.value}, is {got}", hint=REEXPORT)
    shape = tuple(node.shape)
    # A symbolic size may be called anything in the file; a fixed one must be fixed in both.
    same = len(shape) == len(spec.shape) and all(
        got == want if isinstance(want, int) else not isinstance(got, int)
        for got, want in zip(shape, spec.shape, strict=True)
    )
    if not same:
        raise EngineError(
            f"{where}: must have shape {list(spec.shape)}, has {list(shape)}", hint=REEXPORT
        )


class PreparedRun:
    """One run of an engine with all its buffers bound; ``inputs`` are refilled, then ``run()``.

    ``outputs`` are overwritten by the next run. ``shared`` are OrtValues of somebody else, bound
    as they are (KV buffers); ``shared_outputs`` likewise, for results written in place. ``name`` is
    for messages.
    """

    def __init__(
        self,
        session: Any,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        shared: Mapping[str, Any],
        shared_outputs: Mapping[str, Any],
        name: str,
    ) -> None:
        self.name = name
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self._session = session
        self._binding = session.io_binding()
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        for name, array in self.inputs.items():
            self._binding.bind_ortvalue_input(name, make(array))
        for name, value in shared.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, array in self.outputs.items():
            self._binding.bind_ortvalue_output(name, make(array))
        for name, value in shared_outputs.items():
            self._binding.bind_ortvalue_output(name, value)

    def run(self) -> None:
        """Run the engine. Raises EngineError."""
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise EngineError(f"{self.name}: a run failed: {error}") from error


class RunCache(Generic[R]):
    """Prepared runs by block width, dropped together when the KV buffers move.

    It does not keep what makes them, which has the cache: buffers are freed at once, not when the
    garbage collector comes round.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, R] = OrderedDict()
        self._version = -1

    def get(self, make: Callable[..., R], version: int, *key: int) -> R:
        """The run for ``key``, made by ``make(*key)`` when there is none for this ``version``."""
        if version != self._version:
            self._runs.clear()
            self._version = version
        run = self._runs.get(key)
        if run is not None:
            self._runs.move_to_end(key)
            return run
        run = self._runs[key] = make(*key)
        if len(self._runs) > MAX_PREPARED_RUNS:
            self._runs.popitem(last=False)  # the one that was not used for longest
        return run


def zeros(spec: TensorSpec, **sizes: int) -> NDArray[Any]:
    """An array for ``spec`` with its symbolic sizes as given."""
    shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape)
    return np.zeros(shape, dtype=spec.dtype.value)
