"""One run of a plan: tensors bound in a context, small ones copied with every run.

::

    bind     shapes and addresses, again only when another run of the context came between
    run      inputs -> pinned -> device, execute, device -> pinned -> outputs, one wait
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from specrun.contract import HIDDEN, LOGITS, DType, TensorSpec
from specrun.errors import EngineError, UsageError
from specrun.plans import Shape
from specrun.trt_arrays import Output, RunCount
from specrun.trt_cuda import Graph, Memory, Stream
from specrun.trt_library import Messages
from specrun.trt_memory import DeviceBuffer
from specrun.trt_staging import Block, Layout, Shared, nbytes_of

if TYPE_CHECKING:
    import tensorrt_rtx as trt

# Large, and seldom looked at whole: copied when somebody does. All else is copied by every run.
LEFT_ON_DEVICE = frozenset({LOGITS, HIDDEN})


@dataclass
class Machine:
    """What the runs of a plan use in turn.

    ``captures``: put a run into a CUDA graph once it ran twice with the same bindings.
    ``unfinished``: a run broke off, so that the device may still read what the host would write.
    """

    name: str
    stream: Stream
    shared: Shared
    messages: Messages
    captures: bool
    count: RunCount = field(default_factory=RunCount)
    unfinished: bool = False


@dataclass
class Slot:
    """A context and what is bound in it: a mark of the run, not the run, which holds buffers."""

    profile: str
    context: trt.IExecutionContext | None
    bound: object | None = None

    @property
    def open_context(self) -> trt.IExecutionContext:
        """The context. Raises UsageError after the session was closed."""
        if self.context is None:
            raise UsageError("the engine is closed", hint="load the folder again")
        return self.context


@dataclass(frozen=True)
class Tensors:
    """What a run is bound to: arrays of the host by name, and KV buffers by name."""

    specs: Mapping[str, TensorSpec]
    inputs: Mapping[str, NDArray[Any]]
    outputs: Mapping[str, NDArray[Any]]
    past: Mapping[str, DeviceBuffer]
    present: Mapping[str, DeviceBuffer]

    def dtype(self, name: str) -> DType:
        """Element type on the device."""
        return self.specs[name].dtype

    def others(self, outputs: Sequence[TensorSpec]) -> list[str]:
        """Outputs in memory that is shared: large ones, and those that nobody asked for."""
        bound = {*self.present, *self.copied}
        return [spec.name for spec in outputs if spec.name not in bound]

    @property
    def copied(self) -> list[str]:
        """Outputs that every run copies to the host."""
        return [name for name in self.outputs if name not in LEFT_ON_DEVICE]


class TrtRun:
    """See :class:`specrun.runner.Run`. Outputs are valid until the next run of the session."""

    # Set by every bind.
    _in_block: Block
    _out_block: Block
    _memories: dict[str, Memory]
    _staged: dict[str, NDArray[Any]]  # views of pinned memory
    _results: dict[str, NDArray[Any]]
    _graph: Graph | None
    _ran: bool

    def __init__(
        self, machine: Machine, slot: Slot, tensors: Tensors, outputs: Sequence[TensorSpec]
    ) -> None:
        self.name = machine.name
        self.inputs: Mapping[str, NDArray[Any]] = dict(tensors.inputs)
        self.outputs: dict[str, NDArray[Any]] = dict(tensors.outputs)
        self._machine, self._slot, self._tensors = machine, slot, tensors
        self._on_device = tensors.others(outputs)
        self._mark = object()
        self._in = Layout({n: (tensors.dtype(n), a.shape) for n, a in self.inputs.items()})
        self._out = Layout({n: (tensors.dtype(n), self.outputs[n].shape) for n in tensors.copied})
        self._bind()

    def run(self) -> None:
        """Run the plan. Raises EngineError."""
        machine = self._machine
        stream = machine.stream
        stream.cuda.use()
        context = self._slot.open_context
        try:
            if machine.unfinished:
                stream.synchronize()
            if self._slot.bound is not self._mark:
                self._bind()
            for name, view in self._staged.items():
                np.copyto(view, self.inputs[name])
            machine.unfinished = True
            machine.count.value += 1
            self._enqueue(context)
            stream.synchronize()
        except EngineError as error:
            raise EngineError(f"{self.name}: a run failed: {error}", hint=error.hint) from error
        machine.unfinished = False
        self._ran = True
        self._hand_out()

    def _enqueue(self, context: trt.IExecutionContext) -> None:
        """Give the device everything there is to do."""
        machine = self._machine
        if machine.captures and self._ran and self._graph is None:
            self._graph = machine.stream.capture(lambda: self._work(context))
        if self._graph is None:
            self._work(context)
        else:
            self._graph.launch()

    def _work(self, context: trt.IExecutionContext) -> None:
        machine = self._machine
        stream = machine.stream
        self._in_block.to_device(stream, self._in.nbytes)
        machine.messages.clear()
        if not context.execute_async_v3(stream.handle):
            machine.messages.fail("execute_async_v3")
        if self._out.nbytes:
            self._out_block.to_host(stream, self._out.nbytes)

    def _hand_out(self) -> None:
        """Small outputs into the caller's arrays, large ones as they lie on the device."""
        machine = self._machine
        for name, view in self._results.items():
            np.copyto(self.outputs[name], view)
        for name, memory in self._memories.items():
            if name in self.outputs:
                shape, dtype = self.outputs[name].shape, self._tensors.dtype(name)
                output = Output(name, memory, dtype, machine.stream, machine.count)
                self.outputs[name] = cast(Any, output.view(shape))

    def _bind(self) -> None:
        """Shapes and addresses of all tensors. Raises EngineError."""
        context, shared = self._slot.open_context, self._machine.shared
        self._slot.bound = None  # until all is done
        self._graph = None
        self._ran = False
        self._set_shapes(context)
        self._in_block = shared.block("inputs", self._in.nbytes)
        self._out_block = shared.block("outputs", self._out.nbytes)
        self._memories = {
            name: shared.output(
                name, nbytes_of(self._tensors.dtype(name), self._shape(context, name))
            )
            for name in self._on_device
        }
        self._staged = self._in_block.views(self._in)
        self._results = self._out_block.views(self._out)
        self._set_addresses(context)
        self._slot.bound = self._mark

    def _set_shapes(self, context: trt.IExecutionContext) -> None:
        """Give all shapes of inputs; what follows from them must be what the caller expects."""
        machine, tensors = self._machine, self._tensors
        given = {name: array.shape for name, array in self.inputs.items()}
        given |= {name: buffer.shape for name, buffer in tensors.past.items()}
        machine.messages.clear()
        for name, shape in given.items():
            if not context.set_input_shape(name, shape):
                machine.messages.fail(f"{self.name}: {name} cannot have shape {list(shape)}")
        missing = machine.messages.attempt(f"{self.name}: shapes", context.infer_shapes)
        if missing:
            machine.messages.fail(f"{self.name}: shapes of {sorted(missing)} are not known")
        for name, array in self.outputs.items():
            shape = self._shape(context, name)
            if array.shape != shape:
                raise EngineError(
                    f"{self.name}: output {name!r} has shape {list(shape)} for these inputs,"
                    f" not {list(array.shape)}"
                )

    def _set_addresses(self, context: trt.IExecutionContext) -> None:
        kv = {**self._tensors.past, **self._tensors.present}
        addresses = {name: buffer.address for name, buffer in kv.items()}
        addresses |= {name: memory.address for name, memory in self._memories.items()}
        for block, layout in ((self._in_block, self._in), (self._out_block, self._out)):
            start = block.device.address
            addresses |= {name: start + place.offset for name, place in layout.places.items()}
        self._machine.messages.clear()
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                self._machine.messages.fail(f"{self.name}: {name} cannot be bound")

    def _shape(self, context: trt.IExecutionContext, name: str) -> Shape:
        return tuple(int(size) for size in context.get_tensor_shape(name))
