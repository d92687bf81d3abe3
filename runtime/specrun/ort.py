"""ONNX Runtime: sessions opened as the manifest says, and runs whose buffers are prepared once."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
from numpy.typing import NDArray

from specrun.contract import DType, TensorSpec
from specrun.errors import DeviceError, EngineError
from specrun.manifest import REEXPORT, EngineSpec
from specrun.memory import HOST, HostBuffer
from specrun.runner import Buffer, Memory

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
    "tensor(bfloat16)": DType.BFLOAT16,
    "tensor(int64)": DType.INT64,
    "tensor(int32)": DType.INT32,
}
# A worker that waits for its next share spins this long before it sleeps: about as fast as spinning
# all the time, and with another busy process on the same cores as fast as not spinning at all.
SPIN_MICROSECONDS = 50
BFLOAT16 = 16  # ONNX's number of the element type


def open_session(
    path: Path,
    engine: EngineSpec,
    *,
    threads: int,
    device: str = "cpu",
    mapped: bool = False,
    spin: bool = False,
) -> OrtSession:
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
    return OrtSession(session, engine)


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


class OrtSession:
    """An engine that ONNX Runtime runs; see :class:`specrun.runner.Session`.

    ``raw``: ONNX Runtime's own session.
    """

    def __init__(self, raw: Any, spec: EngineSpec) -> None:
        self.raw = raw
        self.spec = spec
        self.memory: Memory = HOST
        self.provider = str(raw.get_providers()[0])
        self._dtypes = {tensor.name: tensor.dtype for tensor in (*spec.inputs, *spec.outputs)}

    def prepare(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        past: Mapping[str, Buffer],
        present: Mapping[str, Buffer],
    ) -> PreparedRun:
        """See :class:`specrun.runner.Session`."""
        run = PreparedRun(self.raw, self.spec.file, inputs, outputs)
        bind_input, bind_output = run.binding.bind_ortvalue_input, run.binding.bind_ortvalue_output
        for name, array in inputs.items():
            bind_input(name, value_over(array, self._dtypes[name]))
        for name, array in outputs.items():
            bind_output(name, value_over(array, self._dtypes[name]))
        for name, buffer in past.items():
            bind_input(name, self._value(buffer))
        for name, buffer in present.items():
            bind_output(name, self._value(buffer))
        return run

    def _value(self, buffer: Buffer) -> Any:
        assert isinstance(buffer, HostBuffer), "checked when the engine was given its KV buffers"
        if buffer.handle is None:
            buffer.handle = value_over(buffer.host, self.spec.kv_dtype)
        return buffer.handle


def value_over(array: NDArray[Any], dtype: DType) -> Any:
    """An OrtValue over ``array``, which must outlive the runs that it is bound to."""
    if dtype is DType.BFLOAT16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


class PreparedRun:
    """One run of an engine with all its buffers bound; ``inputs`` are refilled, then ``run()``.

    ``outputs`` are overwritten by the next run. ``name`` is for messages. ``binding``: where
    OrtSession binds them.
    """

    def __init__(
        self,
        session: Any,
        name: str,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
    ) -> None:
        self.name = name
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.binding = session.io_binding()
        self._session = session

    def run(self) -> None:
        """Run the engine. Raises EngineError."""
        try:
            self._session.run_with_iobinding(self.binding)
        except Exception as error:
            raise EngineError(f"{self.name}: a run failed: {error}") from error
