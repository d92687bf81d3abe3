"""KV buffers of a target: allocated by the runtime, written in place by the engine.

``[batch, heads, capacity, head_size]`` per layer and part. Row ``i`` of sequence ``b`` is valid
when ``i < lengths[b]``; rows at and beyond the length hold whatever a rejected draft left there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from specrun.contract import DType, KvLayer, Part, past
from specrun.errors import ContextFull

INITIAL_CAPACITY = 256


class KvBuffers:
    """Arrays, the OrtValues over them, and how many of their rows are valid.

    ``capacity`` starts small and doubles up to ``max_context``: attention over a large empty
    buffer is slow. ``version`` counts allocations; a binding made for another version points at
    freed memory and must be made anew.
    """

    def __init__(
        self,
        layers: tuple[KvLayer, ...],
        dtype: DType,
        *,
        max_context: int,
        batch: int = 1,
        initial_capacity: int = INITIAL_CAPACITY,
    ) -> None:
        self.layers = layers
        self.dtype = np.dtype(dtype.value)
        self.batch = batch
        self.max_context = max_context
        self.capacity = min(initial_capacity, max_context)
        self.version = 0
        self.lengths: NDArray[np.int32] = np.zeros(batch, dtype=np.int32)
        self.arrays: dict[str, NDArray[Any]] = {}
        # An OrtValue does not own its memory: the arrays above must outlive these.
        self.values: dict[str, Any] = {}
        self._allocate(self.capacity)

    def _allocate(self, capacity: int) -> None:
        """Buffers of ``capacity`` rows with the rows there are. All of them or, when memory runs
        out or Ctrl-C comes, none."""
        arrays: dict[str, NDArray[Any]] = {}
        for layer in self.layers:
            for part in Part:
                name = past(layer.layer, part)
                shape = (self.batch, layer.heads, capacity, layer.head_size)
                array = arrays[name] = _zeros(name, shape, self.dtype)
                old = self.arrays.get(name)
                if old is not None:
                    for row, length in enumerate(self.lengths):
                        array[row, :, :length] = old[row, :, :length]
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        values = {name: make(array) for name, array in arrays.items()}
        version = self.version + (1 if self.arrays else 0)
        # In one step: runs that are prepared for a version rely on its buffers.
        self.arrays, self.values, self.capacity, self.version = arrays, values, capacity, version

    @property
    def length(self) -> int:
        """Valid rows, where all sequences have as many. Raises ValueError where they differ."""
        first = int(self.lengths[0])
        if self.batch > 1 and (self.lengths != first).any():
            raise ValueError(f"the sequences have different lengths: {self.lengths.tolist()}")
        return first

    @property
    def room(self) -> int:
        """Rows that every sequence can still take."""
        return self.max_context - self._longest

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(array.nbytes for array in self.arrays.values())

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more rows in every sequence. Raises ContextFull."""
        needed = self._longest + rows
        if needed <= self.capacity:
            return
        if needed > self.max_context:
            raise ContextFull(
                f"{needed} tokens do not fit into the context of {self.max_context}",
                hint="shorten the prompt, or export with a larger context",
            )
        capacity = self.capacity
        while capacity < needed:
            capacity = min(2 * capacity, self.max_context)
        self._allocate(capacity)

    def advance(self, rows: int) -> None:
        """``rows`` rows were written behind each length and are valid now."""
        self.lengths += rows
        self._check_lengths()

    def truncate(self, length: int | Sequence[int]) -> None:
        """Reach ``length`` (one for all sequences, or one each) by forgetting rows.

        Raises ValueError when a sequence is shorter than that: rows cannot be made up.
        """
        now = self.lengths.tolist()
        wanted = [length] * self.batch if isinstance(length, (int, np.integer)) else list(length)
        if len(wanted) != self.batch:
            raise ValueError(f"{len(wanted)} lengths for {self.batch} sequences")
        if not all(0 <= want <= had for want, had in zip(wanted, now, strict=True)):
            raise ValueError(f"cannot truncate from {now} to {length}")
        self.lengths[:] = wanted

    def check_integrity(self) -> None:
        """Raise RuntimeError unless lengths, capacity and buffers agree."""
        self._check_lengths()
        if self.capacity > self.max_context:
            raise RuntimeError(f"capacity {self.capacity} over the context {self.max_context}")
        for name, array in self.arrays.items():
            if array.shape[0] != self.batch or array.shape[2] != self.capacity:
                raise RuntimeError(f"{name} has shape {array.shape}, capacity {self.capacity}")

    # Lists below, as these run every round: NumPy takes tens of microseconds for so few numbers.

    @property
    def _longest(self) -> int:
        lengths: list[int] = self.lengths.tolist()
        return max(lengths)

    def _check_lengths(self) -> None:
        lengths = self.lengths.tolist()
        if min(lengths) < 0 or max(lengths) > self.capacity:
            raise RuntimeError(f"lengths {lengths} in capacity {self.capacity}")


def _zeros(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    try:
        return np.zeros(shape, dtype=dtype)
    except (MemoryError, ValueError) as error:
        raise ContextFull(
            f"{name}: there is no memory for a KV buffer of shape {list(shape)}",
            hint="open the folder with a smaller max_context",
        ) from error
