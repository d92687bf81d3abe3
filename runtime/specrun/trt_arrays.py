"""Outputs that stay on the device until somebody looks at them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.contract import DType
from specrun.trt_cuda import Memory, Stream

Shape = tuple[int, ...]


class RunCount:
    """Counts the runs that overwrite the outputs of a session."""

    def __init__(self) -> None:
        self.value = 0


class Output:
    """Memory that a run wrote: ``name`` for messages, valid until the next run.

    Once all of it was copied, views take their rows from the copy.
    """

    def __init__(
        self, name: str, memory: Memory, dtype: DType, stream: Stream, count: RunCount
    ) -> None:
        self.name, self.dtype = name, dtype
        self._memory, self._stream = memory, stream
        self._count, self._written_by = count, count.value
        self._copy: NDArray[Any] | None = None  # of all values, flat

    def view(self, shape: Shape) -> DeviceArray:
        """All of it."""
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return DeviceArray(self, math.prod(shape), 0, shape, strides)

    def read(self, start: int, count: int, total: int) -> NDArray[Any]:
        """``count`` values from ``start`` on, of ``total``. Raises RuntimeError if overwritten."""
        if self._copy is not None:
            return self._copy[start : start + count].copy()
        if self._count.value != self._written_by:
            raise RuntimeError(f"{self.name}: its values were overwritten by a later run")
        values = np.empty(count, dtype=self.dtype.numpy)
        self._stream.cuda.use()
        source = self._memory.address + start * values.itemsize
        self._stream.to_host(values.ctypes.data, source, values.nbytes)
        self._stream.synchronize()
        if count < total:
            return values
        self._copy = values
        return values.copy()


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """Some rows of an output. ``np.asarray`` copies them; so does a single row, at once.

    Integers and slices of the leading axes give another view, any other index, attribute or
    operation that arrays have works on a copy.
    """

    def __init__(
        self, output: Output, total: int, start: int, shape: Shape, strides: Shape
    ) -> None:
        self._output, self._total = output, total
        self._start, self._strides = start, strides  # in values
        self.shape = shape
        self.dtype = np.dtype(output.dtype.numpy)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a copy."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"DeviceArray({self._output.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > self.ndim or not all(map(_is_plain, parts)):
            return np.asarray(self)[index]
        start, shape, strides = self._start, list[int](), list[int]()
        for part, size, stride in zip(parts, self.shape, self._strides, strict=False):
            first, count = _span(part, size)
            start += first * stride
            if count is not None:
                shape.append(count)
                strides.append(stride)
        rest = len(parts)
        view = DeviceArray(
            self._output,
            self._total,
            start,
            (*shape, *self.shape[rest:]),
            (*strides, *self._strides[rest:]),
        )
        return view if view.ndim > 1 else np.asarray(view)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self._output.name}: is on the device, so only a copy can be had")
        values = self._copied()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = (np.asarray(x) if isinstance(x, DeviceArray) else x for x in inputs)
        return getattr(ufunc, method)(*arrays, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(np.asarray(self), name)

    def _copied(self) -> NDArray[Any]:
        """A copy of all values; one of the device's for as much as lies together."""
        if self._together:
            values = self._output.read(self._start, self.size, self._total)
            return values.reshape(self.shape)
        return np.stack([np.asarray(part) for part in self])

    @property
    def _together(self) -> bool:
        """Whether the values lie one behind the other."""
        if not self.size:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def _is_plain(part: Any) -> bool:
    if isinstance(part, slice):
        return part.step in (None, 1)
    return isinstance(part, (int, np.integer)) and not isinstance(part, bool)


def _span(part: Any, size: int) -> tuple[int, int | None]:
    """First place along an axis, and how many; None: the axis goes. Raises IndexError."""
    if isinstance(part, slice):
        first, stop, _ = part.indices(size)
        return first, max(0, stop - first)
    if not -size <= part < size:
        raise IndexError(f"index {part} is out of bounds for axis of size {size}")
    return int(part) % size, None
