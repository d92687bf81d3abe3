"""Memory of a device, as ONNX Runtime allocates it: KV buffers, inputs and outputs of runs.

ONNX Runtime copies whole tensors between host and device. bfloat16, which NumPy does not have,
is allocated as uint16 and bound by its address.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from specrun.contract import DType
from specrun.errors import DeviceError
from specrun.memory import copy_rows, no_memory
from specrun.runner import Buffer


@dataclass(frozen=True)
class OrtDeviceMemory:
    """``kind``: as OrtDevice calls it (``cuda``; ``cpu`` drives the same code without a device).
    ``number``: which of the devices."""

    kind: str
    number: int = 0

    @property
    def device(self) -> str:
        """``cuda``, ``cuda:1``."""
        return f"{self.kind}:{self.number}" if self.number else self.kind

    def zeros(self, name: str, shape: tuple[int, ...], dtype: DType) -> DeviceBuffer:
        """A buffer of zeros. Raises ContextFull where memory runs out."""
        try:
            buffer = DeviceBuffer(self.allocate(shape, dtype), shape, dtype)
            buffer.write(np.zeros(shape, dtype=dtype.numpy))
        except (MemoryError, ValueError, RuntimeError) as error:
            raise no_memory(name, shape) from error
        return buffer

    def allocate(self, shape: Sequence[int], dtype: DType) -> Any:
        """An OrtValue of any content. Raises RuntimeError."""
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            list(shape), np.dtype(dtype.numpy).type, self.kind, self.number
        )

    def check(self) -> None:
        """Raise DeviceError where nothing can be allocated."""
        try:
            self.allocate((1,), DType.FLOAT32)
        except RuntimeError as error:
            raise DeviceError(
                f"device: {self.device!r}: onnxruntime allocates no memory there: {error}",
                hint="see what specrun doctor says of it, or use --device cpu",
            ) from error


class DeviceBuffer:
    """A KV buffer on a device. ``value``: the OrtValue, which owns the memory."""

    host = None

    def __init__(self, value: Any, shape: tuple[int, ...], dtype: DType) -> None:
        self.value = value
        self.shape = shape
        self.dtype = dtype

    def read(self) -> NDArray[Any]:
        """A copy of its values."""
        return read(self.value)

    def write(self, values: NDArray[Any]) -> None:
        """Replace all values by ``values``, of the same shape and dtype."""
        if math.prod(self.shape):
            self.value.update_inplace(values)

    def copy_rows(self, source: Buffer, lengths: Sequence[int]) -> None:
        """Take the first ``lengths[b]`` rows of every sequence b from a smaller buffer.

        Through the host: ONNX Runtime copies no parts of tensors.
        """
        values = np.zeros(self.shape, dtype=self.dtype.numpy)
        copy_rows(source.read(), values, lengths)
        self.write(values)


class DeviceOutput:
    """An output of a run that stays on the device until somebody looks at it; then it is copied
    whole, once per run. It slices like the array that it becomes."""

    def __init__(self, value: Any, shape: tuple[int, ...], dtype: Any) -> None:
        self._value = value
        self._copy: NDArray[Any] | None = None
        self.shape = shape
        self.dtype = np.dtype(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if self._copy is None:
            self._copy = read(self._value)
        array = self._copy if dtype is None else self._copy.astype(dtype, copy=False)
        return array.copy() if copy and array is self._copy else array

    def __getitem__(self, index: Any) -> Any:
        return self.__array__()[index]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def copied(self) -> bool:
        """Whether somebody has looked since the last run."""
        return self._copy is not None

    def forget(self) -> None:
        """The next run has written another value."""
        self._copy = None


def read(value: Any) -> NDArray[Any]:
    """A copy of an OrtValue, which the next run does not change."""
    array: NDArray[Any] = value.numpy()
    return array if array.flags.owndata else array.copy()
