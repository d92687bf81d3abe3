"""ONNX Runtime: sessions opened as the manifest says, and runs whose buffers are prepared once."""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
from numpy.typing import NDArray

from specrun.contract import DType, Part, TensorSpec, past
from specrun.devices import Place
from specrun.errors import DeviceError, EngineError
from specrun.fixed import as_contract
from specrun.manifest import REEXPORT, EngineSpec
from specrun.memory import HOST
from specrun.ort_binding import Binder, Bound, DeviceBinder, HostBinder, read_on_host
from specrun.ort_devices import check_device, create, memory_of
from specrun.ort_memory import OrtDeviceMemory
from specrun.runner import Buffer, Memory, Session

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
CPU = Place()


def open_session(
    path: Path,
    engine: EngineSpec,
    *,
    threads: int,
    place: Place = CPU,
    mapped: bool = False,
    spin: bool = False,
) -> Session:
    """Open an engine and check that its inputs and outputs are those of the manifest.

    ``mapped``: run on the weights as they are mapped from the file, without ONNX Runtime's own
    reordered copy of them: slower, in little memory. ``spin``: threads wait for work without
    sleeping while a run lasts; between runs they always sleep.
    Raises EngineError: the device or the onnxruntime is not there, the file does not load, or
    its tensors are others than declared.
    """
    check_device(place)
    _check_version(path.name, engine.requires.onnxruntime)
    if engine.precision == "w8a8" and place.device == "cpu" and lacks_integer_products():
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
        session = create(path, options, place)
    except DeviceError:
        raise
    except Exception as error:
        if engine.kv_dtype is DType.BFLOAT16 and place.device == "cpu":
            raise EngineError(
                f"{path}: does not load: it computes in bf16, for which ONNX Runtime has few"
                f" operators on a CPU: {error}",
                hint="run it on a GPU with --device tensorrt or tensorrt-rtx, or export with"
                " --precision fp16 or fp32 (beside int8 and int4: --activations)",
            ) from error
        raise EngineError(f"{path}: does not load: {error}", hint=REEXPORT) from error
    try:
        check_io(session, engine, path.name)
    except UnicodeDecodeError as error:  # in a name
        raise EngineError(f"{path}: does not load: {error}", hint=REEXPORT) from error
    memory = memory_of(place)
    opened = OrtSession(session, engine, memory, in_host_memory=place.device == "cpu")
    if place.cuda_graph:
        opened.record_runs()
    return as_contract(opened)


def session_of_bytes(model: bytes, *, threads: int) -> Any:
    """A session on the CPU of a model that is no engine, with the settings of engines."""
    return create(model, _session_options(threads, spin=False), CPU)


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
        ("input", engine.file_io[0], session.get_inputs()),
        ("output", engine.file_io[1], session.get_outputs()),
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

    ``raw``: ONNX Runtime's own session. ``in_host_memory``: its graph reads all inputs there.
    Raises EngineError where the engine is on a device and its KV buffers cannot be.
    """

    most_rows: int | None = None
    most_wanted: int | None = None

    def __init__(
        self, raw: Any, spec: EngineSpec, memory: Memory = HOST, *, in_host_memory: bool = True
    ) -> None:
        self.raw = raw
        self.spec = spec
        self.memory = memory
        self.provider = str(raw.get_providers()[0])
        self._numbers: itertools.count[int] | None = None  # of recorded runs
        names = [node.name for node in raw.get_inputs()]
        self._on_host = frozenset(names) if in_host_memory else read_on_host(raw)
        self._binder = self._make_binder(names)

    def prepare(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        past: Mapping[str, Buffer],
        present: Mapping[str, Buffer],
    ) -> PreparedRun:
        """See :class:`specrun.runner.Session`."""
        bound, binder = Bound(self.raw.io_binding(), dict(outputs)), self._binder
        for name, array in inputs.items():
            binder.input(bound, name, array)
        for name, array in outputs.items():
            binder.output(bound, name, array)
        for name, buffer in past.items():
            binder.past(bound, name, buffer)
        for name, buffer in present.items():
            binder.present(bound, name, buffer)
        return PreparedRun(self.raw, self.spec.file, inputs, bound, self._recorded())

    def record_runs(self) -> None:
        """Every prepared run is recorded as a CUDA graph and replayed. Raises EngineError."""
        if self._on_host:
            raise EngineError(
                f"{self.spec.file}: runs cannot be recorded as a CUDA graph: input"
                f" {min(self._on_host)!r} is read on the host",
                hint="leave --cuda-graph out",
            )
        self._numbers = itertools.count(1)

    def _make_binder(self, names: Sequence[str]) -> Binder:
        dtypes = {tensor.name: tensor.dtype for io in self.spec.file_io for tensor in io}
        if not isinstance(self.memory, OrtDeviceMemory):
            return HostBinder(dtypes, frozenset(names) - self._on_host)
        on_device = self.memory.kind != "cpu"
        on_host = self._on_host if on_device else frozenset()
        for name in sorted(on_host.intersection(_kv_inputs(self.spec))):
            raise EngineError(
                f"{self.spec.file}: input {name!r} is read on the host, as {self.provider} does not"
                " run the attention of this engine",
                hint="export with --precision fp16, or use --device cpu",
            )
        return DeviceBinder(dtypes, self.memory, on_host)

    def _recorded(self) -> Any:
        """Options of a run that is recorded under a number of its own, None where none is."""
        if self._numbers is None:
            return None
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("gpu_graph_annotation_id", str(next(self._numbers)))
        return options


def _kv_inputs(spec: EngineSpec) -> set[str]:
    return {past(layer.layer, part) for layer in spec.kv for part in Part}


class PreparedRun:
    """One run of an engine with all its buffers bound; ``inputs`` are refilled, then ``run()``.

    ``outputs`` are overwritten by the next run. ``name`` is for messages.
    """

    def __init__(
        self,
        session: Any,
        name: str,
        inputs: Mapping[str, NDArray[Any]],
        bound: Bound,
        options: Any = None,
    ) -> None:
        self.name = name
        self.inputs = dict(inputs)
        self.outputs = bound.outputs
        self._session = session
        self._bound = bound
        self._arguments = (bound.binding,) if options is None else (bound.binding, options)

    def run(self) -> None:
        """Run the engine. Raises EngineError."""
        try:
            for step in self._bound.before:
                step()
            self._session.run_with_iobinding(*self._arguments)
            for step in self._bound.after:
                step()
        except Exception as error:
            raise EngineError(f"{self.name}: a run failed: {error}") from error
