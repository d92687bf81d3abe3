"""Memory that all runs of a session share, as only one of them is at work at a time.

Small inputs lie behind one another in pinned memory of the host and of the device, so that one copy
takes all of them; so do the small outputs. Each large output has memory of its own. All grow by
doubling: a run that was bound before keeps the smaller memory, all of which is less than the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrun.contract import DType
from specrun.trt_cuda import Cuda, Memory, Stream

ALIGNMENT = 256  # bytes; what the device's own memory has
Shape = tuple[int, ...]


class Place(NamedTuple):
    """Where a tensor lies in a block; ``offset`` in bytes."""

    dtype: DType
    shape: Shape
    offset: int


class Layout:
    """Tensors behind one another. ``nbytes``: of all together."""

    def __init__(self, tensors: Mapping[str, tuple[DType, Shape]]) -> None:
        self.places: dict[str, Place] = {}
        self.nbytes = 0
        for name, (dtype, shape) in tensors.items():
            self.places[name] = Place(dtype, shape, self.nbytes)
            size = nbytes_of(dtype, shape)
            self.nbytes += -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def nbytes_of(dtype: DType, shape: Shape) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


class Block:
    """Pinned memory of the host, and as much of the device."""

    def __init__(self, cuda: Cuda, name: str, nbytes: int) -> None:
        self.device = cuda.malloc(nbytes, name)
        self._pinned = cuda.malloc_pinned(nbytes, name)

    def views(self, layout: Layout) -> dict[str, NDArray[Any]]:
        """The tensors in the host's memory, as they are stored. Valid as long as this block."""
        return {
            name: self._pinned.array(place.offset, place.shape, np.dtype(place.dtype.numpy))
            for name, place in layout.places.items()
        }

    def to_device(self, stream: Stream, nbytes: int) -> None:
        """Copy the first bytes to the device."""
        stream.to_device(self.device.address, self._pinned.address, nbytes)

    def to_host(self, stream: Stream, nbytes: int) -> None:
        """Copy the first bytes to the host."""
        stream.to_host(self._pinned.address, self.device.address, nbytes)


class Shared:
    """The blocks of a session, and memory for its large outputs."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda, self._name = cuda, name
        self._blocks: dict[str, Block] = {}
        self._outputs: dict[str, Memory] = {}

    def block(self, kind: str, nbytes: int) -> Block:
        """The block called ``kind``, of at least ``nbytes``."""
        block = self._blocks.get(kind)
        if block is None or block.device.nbytes < nbytes:
            what = f"{self._name}: {kind}"
            block = self._blocks[kind] = Block(self._cuda, what, _grown(nbytes))
        return block

    def output(self, name: str, nbytes: int) -> Memory:
        """Memory of at least ``nbytes`` for an output."""
        memory = self._outputs.get(name)
        if memory is None or memory.nbytes < nbytes:
            what = f"{self._name}: {name}"
            memory = self._outputs[name] = self._cuda.malloc(_grown(nbytes), what)
        return memory

    def close(self) -> None:
        """Drop all of it."""
        self._blocks.clear()
        self._outputs.clear()


def _grown(nbytes: int) -> int:
    """The next power of two, at least a page."""
    return 1 << max(12, (nbytes - 1).bit_length())
