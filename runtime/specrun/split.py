"""A target in three engines, front, back and head, of which the front may be ahead.

Elhoushi et al., "LayerSkip" (2024). The front's layers run once per token: what they computed for
a draft stays, in their KV rows and in ``exit_rows``, and verification goes on from there::

    KV rows   [0, length)               of all layers
              [length, front_length)    of the front's layers only: the last committed token, then
                                        drafts; the back has not seen them
    rows[i]   hidden state of the token at position length + i, for i < front_length - length
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.contract import (
    ARGMAX,
    BACK_ENGINE,
    EXIT_ROWS,
    FIRST_ROW,
    FRONT_ENGINE,
    HEAD_ENGINE,
    HEAD_ROWS,
    HIDDEN,
    LAST_ROWS,
    LOGITS,
    MARGIN,
    PAST_LENGTH,
    PER_LAYER,
    TOKENS,
)
from specrun.errors import EngineError
from specrun.kv import INITIAL_CAPACITY, KvBuffers
from specrun.manifest import EngineSpec
from specrun.options import PREFILL_CHUNK
from specrun.runner import Run, Session
from specrun.runs import RunCache
from specrun.target import BetweenChunks, KvEngine, OnRows, Rows, at_most, in_chunks

INITIAL_ROWS = 16  # hidden states that the buffers between the engines hold at first


class SplitTarget:
    """Front, back and head as one target, for one sequence. Without a back the front is all layers.

    ``sessions`` and ``engines`` by engine name, as the manifest has them.
    """

    def __init__(
        self,
        sessions: Mapping[str, Session],
        engines: Mapping[str, EngineSpec],
        *,
        max_context: int,
        prefill_chunk: int = PREFILL_CHUNK,
        initial_capacity: int = INITIAL_CAPACITY,
    ) -> None:
        front, back = engines[FRONT_ENGINE], engines.get(BACK_ENGINE)
        self.engine = engines[HEAD_ENGINE]
        self.prefill_chunk = at_most(prefill_chunk, sessions[FRONT_ENGINE].most_rows)
        self._most_wanted = sessions[HEAD_ENGINE].most_wanted
        owned = (*front.kv, *(back.kv if back is not None else ()))
        self.kv = KvBuffers(
            owned,
            sessions[FRONT_ENGINE].spec.kv_dtype,
            max_context=max_context,
            initial_capacity=initial_capacity,
            memory=sessions[FRONT_ENGINE].memory,
            fixed=front.fixed,
        )
        self._front = _Stage(sessions[FRONT_ENGINE], front, self.kv)
        self._back = None if back is None else _Stage(sessions[BACK_ENGINE], back, self.kv)
        self._head = _Stage(sessions[HEAD_ENGINE], self.engine, self.kv)
        self._last_rows = EXIT_ROWS if back is None else LAST_ROWS
        # Where layers share KV they run on the wanted rows only, so the others are not returned.
        self._all_hidden = not (self._front.picks or (self._back is not None and self._back.picks))
        self._rows = _RowBuffers(_between(engines))
        self._ahead: list[int] = []  # tokens of the rows [length, front_length)
        self._runs_front: RunCache[Run] = RunCache()
        self._runs_back: RunCache[Run] = RunCache()
        self._runs_head: RunCache[Run] = RunCache()

    @property
    def length(self) -> int:
        """Tokens in the KV buffers of all layers."""
        return self.kv.length

    @property
    def room(self) -> int:
        """Rows that the next ``verify`` can take."""
        return at_most(self.kv.room, self._most_wanted)

    @property
    def front_length(self) -> int:
        """Tokens in the KV buffers of the front's layers."""
        return self.kv.length + len(self._ahead)

    def prefill(
        self,
        tokens: NDArray[np.int64],
        *,
        want_logits: bool = False,
        on_rows: OnRows | None = None,
        between_chunks: BetweenChunks | None = None,
    ) -> Rows:
        """Feed ``tokens`` ``[1, n]`` in chunks; returns the last row only.

        ``on_rows`` gets the hidden states of every chunk. Raises ContextFull before anything is
        written, EngineError, and what ``between_chunks`` raises.
        """
        if on_rows is not None and not self._all_hidden:
            raise EngineError(
                f"{self.engine.file}: returns no hidden states of the prompt",
                hint="this drafter needs a target without layers that share KV",
            )
        self._ahead.clear()
        count = tokens.shape[1]
        self._reserve(count, min(count, self.prefill_chunk))
        *chunks, last = in_chunks(tokens, self.prefill_chunk)
        for chunk in chunks:
            if on_rows is None:
                self._feed(chunk, chunk.shape[1] - 1, None)
            else:
                self._step(chunk, chunk.shape[1] - 1, False, on_rows)
            if between_chunks is not None:
                between_chunks()
        return self._step(last, last.shape[1] - 1, want_logits, on_rows)

    def verify(self, tokens: NDArray[np.int64], *, want_logits: bool = False) -> Rows:
        """Feed ``tokens`` ``[1, rows]``; returns every row. The front is fed what it has not seen.

        Raises ContextFull, EngineError.
        """
        self._reserve(tokens.shape[1], tokens.shape[1])
        return self._step(tokens, 0, want_logits)

    def draft(self, token: int, *, want_logits: bool = False) -> Rows:
        """Feed one token to the front only; what the head says of its hidden state, one row.

        Raises ContextFull, EngineError.
        """
        tokens = [*self._ahead, token]
        self._reserve(len(tokens), len(tokens))
        seen = len(self._ahead)  # all but the new one, unless buffers moved
        self._feed_front(np.array([tokens[seen:]], dtype=np.int64), seen, seen)
        self._ahead = tokens
        row = len(tokens) - 1
        return self._say(EXIT_ROWS, row, row + 1, row, want_logits)

    def start_drafting(self, rows: int) -> int:
        """The front is ahead by nothing and no buffer moves while it gets ahead by ``rows``.

        Returns how many of them fit, which is fewer at the end of the context.
        """
        self._ahead.clear()
        fitting = min(rows, self.room)
        self._reserve(fitting, fitting)
        return fitting

    def truncate(self, length: int) -> None:
        """Forget KV rows from ``length`` on, and that the front is ahead.

        Raises ValueError when there are fewer.
        """
        self.kv.truncate(length)
        self._ahead.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless lengths and buffers belong together."""
        self.kv.check_integrity()
        if not self.length <= self.front_length <= self.kv.capacity:
            raise RuntimeError(f"the front has {self.front_length} rows, others {self.length}")
        if len(self._ahead) > self._rows.capacity:
            raise RuntimeError(f"{len(self._ahead)} rows ahead, {self._rows.capacity} are kept")

    def _reserve(self, rows: int, kept: int) -> None:
        """Room for ``rows`` KV rows from ``length`` on, and hidden states of ``kept`` of them.

        Buffers that move keep only what all layers have, so then the front is ahead no more.
        Raises ContextFull.
        """
        before = self._version
        self.kv.reserve(rows)
        self._rows.reserve(kept)
        if self._version != before:
            self._ahead.clear()

    @property
    def _version(self) -> int:
        """Grows whenever a buffer moves, KV or rows."""
        return self.kv.version + self._rows.version

    def _step(
        self,
        tokens: NDArray[np.int64],
        first_row: int,
        want_logits: bool,
        on_rows: OnRows | None = None,
    ) -> Rows:
        """All layers over ``tokens``, and the head over those from ``first_row`` on."""
        count = tokens.shape[1]
        start = first_row if on_rows is None else 0
        self._feed(tokens, first_row, start)
        rows = self._say(self._last_rows, start, count, first_row, want_logits)
        if on_rows is None:
            return rows
        on_rows(self.length - count, rows.hidden[0])
        return rows._replace(hidden=rows.hidden[:, first_row:])

    def _feed(self, tokens: NDArray[np.int64], first_row: int, start: int | None) -> None:
        """All layers over ``tokens``. ``start``: the first row that the last layer must give, which
        in layers that share KV is ``first_row``; None: none, only the KV counts."""
        count = tokens.shape[1]
        seen = _common(self._ahead, tokens[0])
        if seen < count:
            self._feed_front(tokens[:, seen:], seen, max(seen, first_row))
        back = self._back
        if back is not None and (back.writes or start is not None):
            begin = 0 if back.writes or start is None else start
            run = self._runs_back.get(self._prepare_back, self._version, begin, count, first_row)
            run.inputs[PAST_LENGTH][:] = self.kv.lengths + begin
            run.run()
        # [0, length) was valid; [length, length + count) is written in all layers now, and kept
        # or truncated by the caller once it knows which of these tokens stand.
        self.kv.advance(count)
        self._ahead.clear()

    def _feed_front(self, tokens: NDArray[np.int64], start: int, first_row: int) -> None:
        """``tokens`` at position ``length + start``, whose rows are kept from ``start`` on."""
        count = tokens.shape[1]
        run = self._runs_front.get(self._prepare_front, self._version, start, count, first_row)
        run.inputs[TOKENS][:] = tokens
        run.inputs[PAST_LENGTH][:] = self.kv.lengths + start
        # The front writes [length + start, ...): what was ahead behind that is no more.
        del self._ahead[start:]
        run.run()

    def _say(self, name: str, start: int, stop: int, first_row: int, want_logits: bool) -> Rows:
        """The head over the rows ``start .. stop - 1`` of a buffer."""
        key = (int(name == LAST_ROWS), start, stop, first_row, int(want_logits))
        run = self._runs_head.get(self._prepare_head, self._version, *key)
        run.run()
        outputs = run.outputs
        return Rows(outputs[ARGMAX], outputs[HIDDEN], outputs.get(LOGITS), outputs[MARGIN])

    def _prepare_front(self, start: int, count: int, first_row: int) -> Run:
        stage, stop = self._front, start + count
        inputs = stage.arrays((TOKENS, PAST_LENGTH), rows=count)
        kept = start
        if stage.picks:
            inputs |= stage.first_row(first_row - start)
            kept = first_row
        outputs = {name: self._rows.view(name, kept, stop) for name in stage.between_out}
        return stage.prepare(inputs, outputs)

    def _prepare_back(self, start: int, count: int, first_row: int) -> Run:
        stage = self._back
        assert stage is not None
        inputs = stage.arrays((PAST_LENGTH,))
        kept = start
        if stage.picks:
            inputs |= stage.first_row(first_row - start)
            kept = first_row
        inputs |= {name: self._rows.view(name, start, count) for name in stage.between_in}
        return stage.prepare(inputs, {LAST_ROWS: self._rows.view(LAST_ROWS, kept, count)})

    def _prepare_head(
        self, last: int, start: int, stop: int, first_row: int, want_logits: int
    ) -> Run:
        stage = self._head
        rows = self._rows.view(LAST_ROWS if last else EXIT_ROWS, start, stop)
        inputs = {HEAD_ROWS: rows, **stage.first_row(first_row - start)}
        names = (ARGMAX, MARGIN, HIDDEN, *((LOGITS,) if want_logits else ()))
        return stage.prepare(
            inputs, stage.arrays(names, rows=stop - start, wanted=stop - first_row)
        )


class _Stage(KvEngine):
    """One of the engines, its KV buffers and what it hands on."""

    def __init__(self, session: Session, engine: EngineSpec, kv: KvBuffers) -> None:
        super().__init__(session, engine, kv)
        names = (EXIT_ROWS, PER_LAYER, LAST_ROWS)
        self.between_in = [spec.name for spec in engine.inputs if spec.name in names]
        self.between_out = [spec.name for spec in engine.outputs if spec.name in names]

    @property
    def writes(self) -> bool:
        """Whether layers of it own KV; otherwise it may be fed the wanted rows only."""
        return bool(self.engine.kv)

    @property
    def picks(self) -> bool:
        """Whether it returns the wanted rows only."""
        return self.has(FIRST_ROW)


class _RowBuffers:
    """Hidden states on their way from engine to engine, ``[1, capacity, ...]`` by tensor name.

    An engine writes into a view of them and the next one reads from a view, so nothing is copied.
    ``version`` counts allocations, which keep nothing.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        self._shapes = dict(shapes)
        self.capacity = 0
        self.version = 0
        self.arrays: dict[str, NDArray[Any]] = {}
        self.reserve(INITIAL_ROWS)

    def reserve(self, rows: int) -> None:
        """Room for ``rows`` rows."""
        if rows <= self.capacity:
            return
        capacity = max(rows, 2 * self.capacity)
        arrays: dict[str, NDArray[Any]] = {
            name: np.zeros((1, capacity, *shape), dtype=dtype)
            for name, (shape, dtype) in self._shapes.items()
        }
        self.arrays, self.capacity, self.version = arrays, capacity, self.version + 1

    def view(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows ``start .. stop - 1``, contiguous."""
        return self.arrays[name][:, start:stop]


def _between(engines: Mapping[str, EngineSpec]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """What front and back return beside the KV: name -> sizes of a row, and dtype."""
    specs = [
        spec
        for name in (FRONT_ENGINE, BACK_ENGINE)
        if name in engines
        for spec in engines[name].outputs
        if spec.name in (EXIT_ROWS, PER_LAYER, LAST_ROWS)
    ]
    return {
        spec.name: (tuple(int(size) for size in spec.shape[2:]), spec.dtype.numpy) for spec in specs
    }


def _common(seen: Sequence[int], tokens: NDArray[np.int64]) -> int:
    """How many tokens at the start are the same."""
    count = min(len(seen), len(tokens))
    differ = np.flatnonzero(np.asarray(seen[:count], dtype=np.int64) != tokens[:count])
    return int(differ[0]) if differ.size else count
