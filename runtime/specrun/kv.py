"""KV buffers of a target: allocated by the runtime, written in place by the engine.

``[batch, heads, capacity, head_size]`` per layer and part. Row ``i`` of sequence ``b`` is valid
when ``i < lengths[b]``; rows at and beyond the length hold whatever a rejected draft left there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.contract import DType, FixedSizes, KvLayer, Part, past
from specrun.errors import ContextFull, EngineError
from specrun.memory import HOST
from specrun.runner import Buffer, Memory, Session

INITIAL_CAPACITY = 256


class KvBuffers:
    """The buffers, by the name of the input that each is bound as, and how many rows are valid.

    ``memory``: of the sessions that are to run on them. ``arrays``: the buffers as NumPy arrays,
    where that is the host's memory, else none: then ``read_rows`` and ``write_rows`` copy.
    ``capacity`` starts small and doubles up to ``max_context``: attention over a large empty
    buffer is slow; with ``fixed`` sizes it is that of the engine for good. ``version`` counts
    allocations; a binding made for another version points at freed memory and must be made anew.
    """

    def __init__(
        self,
        layers: tuple[KvLayer, ...],
        dtype: DType,
        *,
        max_context: int,
        batch: int = 1,
        initial_capacity: int = INITIAL_CAPACITY,
        memory: Memory = HOST,
        fixed: FixedSizes | None = None,
    ) -> None:
        self.layers = layers
        self.dtype = dtype
        self.memory = memory
        self.batch = batch
        self.max_context = max_context
        self._fixed = fixed
        self.capacity = min(initial_capacity, max_context) if fixed is None else fixed.capacity
        self.version = -1  # before the first
        self.lengths: NDArray[np.int32] = np.zeros(batch, dtype=np.int32)
        self.buffers: dict[str, Buffer] = {}
        self.arrays: dict[str, NDArray[Any]] = {}
        self._allocate(self.capacity)

    def _allocate(self, capacity: int) -> None:
        """Buffers of ``capacity`` rows with the rows there are. All of them or, when memory runs
        out or Ctrl-C comes, none."""
        buffers: dict[str, Buffer] = {}
        lengths: list[int] = self.lengths.tolist()
        for layer in self.layers:
            for part in Part:
                name = past(layer.layer, part)
                shape = (self.batch, layer.heads, capacity, layer.head_size)
                buffer = buffers[name] = self.memory.zeros(name, shape, self.dtype)
                if name in self.buffers:
                    buffer.copy_rows(self.buffers[name], lengths)
        hosts = {name: buffer.host for name, buffer in buffers.items()}
        arrays = {name: host for name, host in hosts.items() if host is not None}
        # In one step: runs that are prepared for a version rely on its buffers.
        self.buffers, self.arrays = buffers, arrays
        self.capacity, self.version = capacity, self.version + 1

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows ``start .. stop - 1`` of a buffer; a view where it is the host's memory."""
        return self.buffers[name].read()[:, :, start:stop]

    def write_rows(self, name: str, start: int, rows: NDArray[Any]) -> None:
        """Write ``rows`` ``[batch, heads, n, head size]`` into a buffer, from row ``start`` on.

        Other memory than the host's is copied whole, there and back.
        """
        buffer = self.buffers[name]
        values = buffer.read()
        values[:, :, start : start + rows.shape[2]] = rows
        if buffer.host is None:
            buffer.write(values)

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
        sizes = [math.prod(buffer.shape) for buffer in self.buffers.values()]
        return sum(sizes) * self.dtype.itemsize

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more rows in every sequence. Raises ContextFull."""
        needed = self._longest + rows
        if needed > self.max_context:
            raise ContextFull(
                f"{needed} tokens do not fit into the context of {self.max_context}",
                hint="shorten the prompt, or export with a larger context",
            )
        if needed <= self.capacity:
            return
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
        if self.capacity > self.max_context and self._fixed is None:
            raise RuntimeError(f"capacity {self.capacity} over the context {self.max_context}")
        for name, buffer in self.buffers.items():
            shape = buffer.shape
            if shape[0] != self.batch or shape[2] != self.capacity:
                raise RuntimeError(f"{name} has shape {shape}, capacity {self.capacity}")

    # Lists below, as these run every round: NumPy takes tens of microseconds for so few numbers.

    @property
    def _longest(self) -> int:
        lengths: list[int] = self.lengths.tolist()
        return max(lengths)

    def _check_lengths(self) -> None:
        lengths = self.lengths.tolist()
        if min(lengths) < 0 or max(lengths) > self.capacity:
            raise RuntimeError(f"lengths {lengths} in capacity {self.capacity}")


def check_memory(session: Session, kv: KvBuffers) -> None:
    """Raise EngineError where an engine cannot run on buffers in that memory."""
    if session.memory == kv.memory:
        return
    raise EngineError(
        f"{session.spec.file}: runs with {session.provider} on KV buffers in its own memory"
        f" ({session.memory.device}), those given are in another one ({kv.memory.device})",
        hint="run target and drafter on the same device with the same backend",
    )
