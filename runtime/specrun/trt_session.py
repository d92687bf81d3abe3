"""TensorRT: plans opened as the manifest says, and runs of them on KV buffers of the device.

One context per profile; they take turns on one stream and share the memory for what is between
layers. A run copies its small inputs to the device, runs, copies back what the host always needs,
and waits once. Logits and hidden states stay on the device until somebody looks at them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from specrun import plans, trt_library
from specrun.contract import ROWS, WANTED
from specrun.errors import EngineError
from specrun.manifest import EngineSpec
from specrun.plans import PlanSpec, Shape
from specrun.process import Closing
from specrun.runner import Buffer
from specrun.trt_checks import aliases, check_aliases, check_io, check_profiles, check_valid
from specrun.trt_cuda import Cuda, Memory
from specrun.trt_library import KernelCache, Messages
from specrun.trt_memory import DeviceBuffer, DeviceMemory
from specrun.trt_run import Machine, Slot, Tensors, TrtRun
from specrun.trt_staging import Shared

if TYPE_CHECKING:
    # The package has no types of its own.
    from tensorrt_rtx import (  # pyright: ignore
        ICudaEngine,  # pyright: ignore
        IExecutionContext,  # pyright: ignore
        IRuntimeConfig,  # pyright: ignore
        Runtime,  # pyright: ignore
    )


def open_plan(
    path: Path, spec: EngineSpec, plan: PlanSpec, *, device: int = 0, graphs: bool = False
) -> TrtSession:
    """Open a plan, whose size and sha256 were checked, on a GPU.

    ``spec``: the engine's entry in the manifest, whose inputs and outputs the plan must have.
    ``device``: number of the GPU. ``graphs``: put every run that is prepared into a CUDA graph.
    Raises DeviceError: a package, the driver or the GPU is not there; EngineError: the plan is of
    another release, flavour or device, which is seen before TensorRT gets it, it does not load, or
    its tensors and profiles are others than declared; UsageError in a fork of the process that
    uses the GPU.
    """
    library = trt_library.load(plan.flavour)
    cuda = Cuda(device)
    found = trt_library.trt_device(plan.flavour, library, cuda)
    if (reason := plans.why_not(plan, found)) is not None:
        plans.refuse(plan.file, reason, path.parent, found.flavour)
    opened = Opened(library, cuda, plan, path, graphs=graphs)
    problem = _problem(opened, spec)
    if problem is not None:
        opened.close()
        raise problem
    return TrtSession(opened, spec, str(found))


def _problem(opened: Opened, spec: EngineSpec) -> BaseException | None:
    """What is wrong with a plan, without the frames of the checks: whoever keeps the error would
    keep the engine, and its weights on the GPU."""
    try:
        opened.check(spec)
        opened.make_contexts()
    except BaseException as error:
        return error.with_traceback(None)
    return None


class Opened:
    """What must be freed in an order: contexts, engine, runtime, memory, stream."""

    def __init__(
        self, library: Any, cuda: Cuda, plan: PlanSpec, path: Path, *, graphs: bool
    ) -> None:
        self.plan = plan
        self.process = cuda.process
        self.slots: list[Slot] = []
        self._library, self._graphs = library, graphs
        self._hint = plans.build_hint(path.parent, plan.flavour)
        self._messages = Messages()
        self._cache: KernelCache | None = None
        self._between_layers: Memory | None = None
        self._runtime: Runtime | None = None
        self._logger = trt_library.logger(library, self._messages)
        self._load(path)
        self.machine = Machine(
            plan.file,
            cuda.stream(),
            Shared(cuda, plan.file),
            self._messages,
            captures=graphs and plan.flavour == "tensorrt",
        )

    def check(self, spec: EngineSpec) -> None:
        """Raise EngineError unless the plan is what the manifest says."""
        check_io(self._library, self.engine, spec, self.plan)
        check_aliases(self.engine, spec, self.plan)
        check_profiles(self.engine, self.plan)

    def make_contexts(self) -> None:
        """One per profile, on the same memory. Raises EngineError."""
        stream = self.machine.stream
        size = int(self.engine.device_memory_size_v2)
        if size:
            self._between_layers = stream.cuda.malloc(size, f"{self.plan.file}: between layers")
        config = self._config()
        for number, profile in enumerate(self.plan.profiles):
            what = f"{self.plan.file}: profile {profile.name}"
            context: IExecutionContext = self._messages.attempt(
                what, lambda: self.engine.create_execution_context(runtime_config=config)
            )
            if self._between_layers is not None:
                context.set_device_memory(self._between_layers.address, size)
            if not context.set_optimization_profile_async(number, stream.handle):
                self._messages.fail(f"{what} cannot be used")
            self.slots.append(Slot(profile.name, context))
        stream.synchronize()

    def close(self) -> None:
        """Free everything; a second call does nothing. In a fork nothing is freed, ever."""
        if os.getpid() != self.process:
            _never_free(self)
            return
        if self._runtime is None:
            return
        stream = self.machine.stream
        with contextlib.suppress(EngineError):  # of a run that failed, which said so
            stream.cuda.use()
            stream.synchronize()
        if self._cache is not None:
            self._cache.save()
        for slot in self.slots:
            slot.context = None
        self._cache = self._between_layers = None
        del self.engine
        self._runtime = None
        self.machine.shared.close()

    def _load(self, path: Path) -> None:
        name, messages, library = self.plan.file, self._messages, self._library
        runtime: Runtime = messages.attempt(name, lambda: library.Runtime(self._logger))
        with _mapped(path, self._hint) as blob:
            check_valid(library, runtime, blob, messages, name, self._hint)
            self.engine: ICudaEngine = messages.attempt(
                f"{name}: does not load", lambda: runtime.deserialize_cuda_engine(blob), self._hint
            )
        self._runtime = runtime

    def _config(self) -> IRuntimeConfig:
        """Contexts are given their memory; TensorRT-RTX keeps what it compiles for them."""
        library = self._library
        config: IRuntimeConfig = self.engine.create_runtime_config()
        strategy = library.ExecutionContextAllocationStrategy.USER_MANAGED
        config.set_execution_context_allocation_strategy(strategy)
        if self.plan.flavour == "tensorrt_rtx":
            self._cache = KernelCache(self.plan.sha256, config, self._messages)
            self._cache.use(config)
            if self._graphs:
                config.cuda_graph_strategy = library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return config


class TrtSession(Closing):
    """See :class:`specrun.runner.Session`. Belongs to the process that opened it."""

    def __init__(self, opened: Opened, spec: EngineSpec, provider: str) -> None:
        self.spec = spec
        self.provider = provider  # with the release and the device
        self.memory = DeviceMemory(opened.machine.stream)
        self._opened = opened
        self._aliases = aliases(spec)
        # Also when nobody closes it: an interpreter at its end frees things in no order.
        self._close = weakref.finalize(self, opened.close)

    @property
    def plan(self) -> PlanSpec:
        """The plan's entry in the manifest."""
        return self._opened.plan

    @property
    def most_rows(self) -> int | None:
        """Most rows of a run."""
        return plans.most(self.plan, self.spec.file_io[0], ROWS)

    @property
    def most_wanted(self) -> int | None:
        """Most of them whose logits can be had."""
        return plans.most(self.plan, self.spec.file_io[0], WANTED)

    def prepare(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        past: Mapping[str, Buffer],
        present: Mapping[str, Buffer],
    ) -> TrtRun:
        """A run on these arrays and buffers, under the profile that its shapes fit.

        Raises EngineError: a tensor is missing, unknown or of another dtype or shape, the sizes fit
        no profile, or a KV buffer is not where the plan needs it; UsageError after ``close``.
        """
        machine, plan = self._opened.machine, self.plan
        machine.stream.cuda.use()
        self._check_names(inputs.keys() | past.keys(), outputs.keys(), present.keys())
        tensors = Tensors(
            {tensor.name: tensor for tensor in (*self.spec.file_io[0], *self.spec.file_io[1])},
            inputs,
            outputs,
            {name: self._on_device(name, buffer) for name, buffer in past.items()},
            {name: self._on_device(name, buffer) for name, buffer in present.items()},
        )
        self._check_arrays(tensors)
        shapes: dict[str, Shape] = {name: array.shape for name, array in inputs.items()}
        shapes |= {name: buffer.shape for name, buffer in past.items()}
        slot = self._opened.slots[plans.fitting_profile(plan, shapes)]
        return TrtRun(machine, slot, tensors, self.spec.file_io[1])

    def close(self) -> None:
        """Free the plan and its contexts; a second call does nothing. Buffers go with their owners.

        In a fork nothing is freed: the device's context is that of another process.
        """
        self._close()

    def _check_names(self, given: Set[str], outputs: Set[str], present: Set[str]) -> None:
        needed = {tensor.name for tensor in self.spec.file_io[0]}
        wanted = {tensor.name for tensor in self.spec.file_io[1]}
        for what, wrong in (
            ("is not given", needed - given),
            ("is no input", given - needed),
            ("is no output", (outputs | present) - wanted),
            ("is not given", self._aliases.keys() - present),
        ):
            if wrong:
                raise EngineError(f"{self.plan.file}: {min(wrong)!r} {what}")

    def _check_arrays(self, tensors: Tensors) -> None:
        for name, array in tensors.inputs.items():
            want = tensors.dtype(name).numpy
            if array.dtype != want:
                raise EngineError(
                    f"{self.plan.file}: {name!r} must be {want}, is {array.dtype.name}"
                )
        for output, source in self._aliases.items():
            if tensors.present[output].address != tensors.past[source].address:
                raise EngineError(
                    f"{self.plan.file}: {output!r} must be the buffer of {source!r}, is another"
                )

    def _on_device(self, name: str, buffer: Buffer) -> DeviceBuffer:
        if not isinstance(buffer, DeviceBuffer):
            raise EngineError(f"{self.plan.file}: the KV buffer {name!r} is not on the GPU")
        return buffer


def _never_free(thing: object) -> None:
    """Keep ``thing`` past the end: to free it would use the device of another process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@contextlib.contextmanager
def _mapped(path: Path, hint: str) -> Iterator[memoryview]:
    """The bytes of a file without reading them all at once. Raises EngineError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            view = memoryview(data)
            try:
                yield view
            finally:
                view.release()
    except (OSError, ValueError) as error:  # ValueError: an empty file
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise EngineError(f"{path}: cannot be read: {reason}", hint=hint) from error
