"""KV buffers in the host's memory; those of other memories are where the engines for them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.contract import DType
from specrun.errors import ContextFull
from specrun.runner import Buffer


class HostBuffer:
    """A NumPy array ``[batch, heads, capacity, head size]``.

    ``handle``: what a runner made to bind it, kept for the next run that does.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self.handle: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        return self._array.shape

    @property
    def host(self) -> NDArray[Any]:
        """The array."""
        return self._array

    def read(self) -> NDArray[Any]:
        """The array, no copy."""
        return self._array

    def write(self, values: NDArray[Any]) -> None:
        """Replace all values."""
        self._array[...] = values

    def copy_rows(self, source: Buffer, lengths: Sequence[int]) -> None:
        """Take the first ``lengths[b]`` rows of every sequence b from a smaller buffer."""
        copy_rows(source.read(), self._array, lengths)


@dataclass(frozen=True)
class HostMemory:
    """Memory that NumPy allocates."""

    device: str = "cpu"

    def zeros(self, name: str, shape: tuple[int, ...], dtype: DType) -> HostBuffer:
        """A buffer of zeros. Raises ContextFull where memory runs out."""
        try:
            return HostBuffer(np.zeros(shape, dtype=dtype.numpy))
        except (MemoryError, ValueError) as error:
            raise no_memory(name, shape) from error


HOST = HostMemory()


def copy_rows(source: NDArray[Any], into: NDArray[Any], lengths: Sequence[int]) -> None:
    """The first ``lengths[b]`` rows of every sequence b."""
    for row, length in enumerate(lengths):
        into[row, :, :length] = source[row, :, :length]


def no_memory(name: str, shape: Sequence[int]) -> ContextFull:
    """The buffer called ``name`` cannot be allocated."""
    return ContextFull(
        f"{name}: there is no memory for a KV buffer of shape {list(shape)}",
        hint="open the folder with a smaller max_context",
    )
