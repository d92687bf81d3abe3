"""KV buffers in the memory of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.contract import DType
from specrun.memory import no_memory
from specrun.runner import Buffer
from specrun.trt_cuda import Memory, OutOfMemory, Stream


class DeviceMemory:
    """Gives KV buffers of the device behind ``stream``. Those of one device are equal: a run waits
    for its stream, so that the next one, on another, finds what it wrote."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def device(self) -> str:
        """``cuda``, ``cuda:1``."""
        number = self._stream.cuda.device
        return f"cuda:{number}" if number else "cuda"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeviceMemory)
            and other._stream.cuda.device == self._stream.cuda.device
        )

    def __hash__(self) -> int:
        return hash(self._stream.cuda.device)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: DType) -> DeviceBuffer:
        """A buffer of zeros. Raises ContextFull where memory runs out."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        try:
            memory = self._stream.cuda.malloc(nbytes, name)
        except OutOfMemory as error:
            raise no_memory(name, shape) from error
        self._stream.zero(memory.address, nbytes)
        self._stream.synchronize()  # sessions on other streams may be the first to use it
        return DeviceBuffer(name, shape, dtype, memory, self._stream)


class DeviceBuffer:
    """A KV buffer ``[batch, heads, capacity, head size]`` of the device."""

    host: NDArray[Any] | None = None

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: DType, memory: Memory, stream: Stream
    ) -> None:
        self.name, self.dtype = name, dtype
        self._shape = shape
        self._memory, self._stream = memory, stream

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        return self._shape

    @property
    def address(self) -> int:
        """Where it lies on the device."""
        return self._memory.address

    def read(self) -> NDArray[Any]:
        """A copy of its values."""
        self._stream.cuda.use()
        values = np.empty(self._shape, dtype=self.dtype.numpy)
        self._stream.to_host(values.ctypes.data, self.address, values.nbytes)
        self._stream.synchronize()
        return values

    def write(self, values: NDArray[Any]) -> None:
        """Replace all values. Raises ValueError for another shape or dtype."""
        want = np.dtype(self.dtype.numpy)
        if values.shape != self._shape or values.dtype != want:
            raise ValueError(
                f"{self.name}: must be {want.name} {list(self._shape)},"
                f" got {values.dtype.name} {list(values.shape)}"
            )
        self._stream.cuda.use()
        stored = np.ascontiguousarray(values)
        self._stream.to_device(self.address, stored.ctypes.data, stored.nbytes)
        self._stream.synchronize()

    def copy_rows(self, source: Buffer, lengths: Sequence[int]) -> None:
        """Take the first ``lengths[b]`` rows of every sequence b from another buffer."""
        if not isinstance(source, DeviceBuffer) or source.dtype != self.dtype:
            raise TypeError(f"{self.name}: takes rows of buffers of its device and dtype")
        self._stream.cuda.use()
        batch, heads, capacity, size = self._shape
        if source.shape != (batch, heads, source.shape[2], size) or len(lengths) != batch:
            raise ValueError(f"{self.name}: {list(source.shape)} has not the rows of {self._shape}")
        if max(lengths, default=0) > min(capacity, source.shape[2]):
            raise ValueError(f"{self.name}: has no room for {list(lengths)} rows")
        row = size * self.dtype.itemsize
        pitch, source_pitch = capacity * row, source.shape[2] * row  # from head to head
        for b, length in enumerate(lengths):
            if length:
                self._stream.copy_rows(
                    self.address + b * heads * pitch,
                    pitch,
                    source.address + b * heads * source_pitch,
                    source_pitch,
                    length * row,
                    heads,
                )
        self._stream.synchronize()
