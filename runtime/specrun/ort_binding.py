"""Binding arrays and KV buffers to a run of ONNX Runtime, on the host or a device.

ONNX Runtime copies an input at once, when it is bound, where the graph reads it in another memory.
What the caller refills must therefore be where the graph reads it, or be bound again for each run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from specrun.contract import DRAFT_CANDIDATES, DRAFT_LOGITS, HIDDEN, LOGITS, NEXT_HIDDEN, DType
from specrun.memory import HostBuffer
from specrun.ort_memory import DeviceBuffer, DeviceOutput, OrtDeviceMemory, read
from specrun.runner import Buffer

BFLOAT16 = 16  # ONNX's number of the element type
# Outputs that are large, and not looked at in every run.
LAZY = (LOGITS, HIDDEN, NEXT_HIDDEN, DRAFT_LOGITS, DRAFT_CANDIDATES)


@dataclass
class Bound:
    """A binding, what is done before and after each run with it, and the host's outputs.

    ``kept``: memory that the binding refers to without owning it.
    """

    binding: Any
    outputs: dict[str, Any]
    before: list[Callable[[], object]] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


class Binder(Protocol):
    """Binds by the name of a tensor."""

    def input(self, bound: Bound, name: str, array: NDArray[Any]) -> None:
        """An array that is refilled for each run."""
        ...

    def output(self, bound: Bound, name: str, array: NDArray[Any]) -> None:
        """An array that each run fills, or stands for what it gives instead."""
        ...

    def past(self, bound: Bound, name: str, buffer: Buffer) -> None:
        """A KV buffer that is read."""
        ...

    def present(self, bound: Bound, name: str, buffer: Buffer) -> None:
        """A KV buffer that is written in place."""
        ...


@dataclass(frozen=True)
class HostBinder:
    """Everything in the host's memory. ``elsewhere``: inputs that the graph reads on a device."""

    dtypes: Mapping[str, DType]
    elsewhere: frozenset[str] = frozenset()

    def input(self, bound: Bound, name: str, array: NDArray[Any]) -> None:
        """See :class:`Binder`."""
        self._input(bound, name, value_over(array, self.dtypes[name]))

    def output(self, bound: Bound, name: str, array: NDArray[Any]) -> None:
        """See :class:`Binder`."""
        bound.binding.bind_ortvalue_output(name, value_over(array, self.dtypes[name]))

    def past(self, bound: Bound, name: str, buffer: Buffer) -> None:
        """See :class:`Binder`."""
        self._input(bound, name, self._value(name, buffer))

    def present(self, bound: Bound, name: str, buffer: Buffer) -> None:
        """See :class:`Binder`."""
        bound.binding.bind_ortvalue_output(name, self._value(name, buffer))

    def _input(self, bound: Bound, name: str, value: Any) -> None:
        bound.binding.bind_ortvalue_input(name, value)
        if name in self.elsewhere:
            bound.before.append(partial(bound.binding.bind_ortvalue_input, name, value))

    def _value(self, name: str, buffer: Buffer) -> Any:
        assert isinstance(buffer, HostBuffer), "the memory of session and buffers is the same"
        if buffer.handle is None:
            buffer.handle = value_over(buffer.host, self.dtypes[name])
        return buffer.handle


@dataclass(frozen=True)
class DeviceBinder:
    """KV buffers, inputs and outputs on a device. ``on_host``: inputs that the graph reads on the
    host all the same."""

    dtypes: Mapping[str, DType]
    memory: OrtDeviceMemory
    on_host: frozenset[str] = frozenset()

    def input(self, bound: Bound, name: str, array: NDArray[Any]) -> None:
        """Copied to the device before each run."""
        dtype = self.dtypes[name]
        if name in self.on_host:
            bound.binding.bind_ortvalue_input(name, value_over(array, dtype))
            return
        value = self.memory.allocate(array.shape, dtype)
        self._bind_input(bound, name, value)
        if array.size:
            bound.before.append(partial(value.update_inplace, array))

    def output(self, bound: Bound, name: str, array: NDArray[Any]) -> None:
        """Copied to the array after each run, or when it is looked at."""
        value = self.memory.allocate(array.shape, self.dtypes[name])
        self._bind_output(bound, name, value)
        if name in LAZY:
            lazy = bound.outputs[name] = DeviceOutput(value, array.shape, array.dtype)
            bound.after.append(lazy.forget)
        elif array.size:
            bound.after.append(lambda: np.copyto(array, read(value)))

    def past(self, bound: Bound, name: str, buffer: Buffer) -> None:
        """See :class:`Binder`."""
        assert isinstance(buffer, DeviceBuffer), "the memory of session and buffers is the same"
        self._bind_input(bound, name, buffer.value)

    def present(self, bound: Bound, name: str, buffer: Buffer) -> None:
        """See :class:`Binder`."""
        assert isinstance(buffer, DeviceBuffer), "the memory of session and buffers is the same"
        self._bind_output(bound, name, buffer.value)

    def _bind_input(self, bound: Bound, name: str, value: Any) -> None:
        if self.dtypes[name] is DType.BFLOAT16:
            bound.binding.bind_input(name, *self._address(value))
        else:
            bound.binding.bind_ortvalue_input(name, value)
        bound.kept.append(value)

    def _bind_output(self, bound: Bound, name: str, value: Any) -> None:
        if self.dtypes[name] is DType.BFLOAT16:
            bound.binding.bind_output(name, *self._address(value))
        else:
            bound.binding.bind_ortvalue_output(name, value)
        bound.kept.append(value)

    def _address(self, value: Any) -> tuple[str, int, int, Any, int]:
        return self.memory.kind, self.memory.number, BFLOAT16, value.shape(), value.data_ptr()


def value_over(array: NDArray[Any], dtype: DType) -> Any:
    """An OrtValue over ``array``, which must outlive the runs that it is bound to."""
    if dtype is DType.BFLOAT16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def read_on_host(session: Any) -> frozenset[str]:
    """Inputs that the graph reads in the host's memory, pinned or not."""
    infos = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return frozenset(
        node.name for node, info in infos if re.search("cpu|pinned", info.name, re.IGNORECASE)
    )
