"""The target engine: feeds tokens, returns what it says after each, keeps the KV and its length."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specrun.contract import (
    ARGMAX,
    FIRST_ROW,
    HIDDEN,
    LOGITS,
    MARGIN,
    PAST_LENGTH,
    TOKENS,
    Part,
    past,
    present,
)
from specrun.errors import EngineError
from specrun.kv import INITIAL_CAPACITY, KvBuffers, check_memory
from specrun.manifest import EngineSpec
from specrun.options import PREFILL_CHUNK
from specrun.runner import Run, Session
from specrun.runs import RunCache, zeros


class Rows(NamedTuple):
    """What the target says at the wanted rows; views that the next run overwrites.

    ``argmax`` int64 ``[batch, wanted]``; ``margin`` float32 ``[batch, wanted]``: its logit less the
    second largest; ``hidden`` ``[batch, wanted, hidden size]`` in the KV
    dtype; ``logits`` float32 ``[batch, wanted, vocabulary]`` where asked for.
    """

    argmax: NDArray[np.int64]
    hidden: NDArray[Any]
    logits: NDArray[np.float32] | None
    margin: NDArray[np.float32]


# Position of the first row, and hidden states [rows, hidden size]: a view, valid in the call only.
OnRows = Callable[[int, NDArray[Any]], None]
# Called while a prompt is read, whenever a part of it is in the KV and more is to come. It may
# raise, to end the reading there.
BetweenChunks = Callable[[], None]


class Verifier(Protocol):
    """What the loop asks of a target: one engine, or several that act as one."""

    @property
    def kv(self) -> KvBuffers:
        """The KV buffers that drafters may read."""
        ...

    @property
    def length(self) -> int:
        """Tokens in the KV buffers."""
        ...

    @property
    def room(self) -> int:
        """Rows that the next ``verify`` can take."""
        ...

    def prefill(
        self,
        tokens: NDArray[np.int64],
        *,
        want_logits: bool = False,
        on_rows: OnRows | None = None,
        between_chunks: BetweenChunks | None = None,
    ) -> Rows:
        """Feed ``tokens`` ``[1, n]``; returns the last row. ``on_rows`` gets every hidden row.

        Raises ContextFull before anything is written, EngineError, and what ``between_chunks``
        raises. ``length`` then counts the tokens that were read.
        """
        ...

    def verify(self, tokens: NDArray[np.int64], *, want_logits: bool = False) -> Rows:
        """Feed ``tokens`` ``[1, rows]``, at most ``room``; returns every row.

        Raises ContextFull, EngineError.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget KV rows from ``length`` on. Raises ValueError when there are fewer."""
        ...

    def check_integrity(self) -> None:
        """Raise RuntimeError unless lengths and buffers belong together."""
        ...


def at_most(count: int, limit: int | None) -> int:
    """``count``, or ``limit`` where that is less."""
    return count if limit is None else min(count, limit)


def in_chunks(tokens: NDArray[np.int64], most: int) -> list[NDArray[np.int64]]:
    """``tokens`` ``[batch, n]`` in as few pieces of at most ``most`` as there can be, all of about
    the same size: a short rest would cost nearly as much as a whole chunk. At least one piece."""
    return np.array_split(tokens, max(1, -(-tokens.shape[1] // most)), axis=1)


class KvEngine:
    """A session on KV buffers: arrays for its tensors, and runs that are bound to the buffers.

    Raises EngineError where the buffers are in another memory than the session's.
    """

    def __init__(self, session: Session, engine: EngineSpec, kv: KvBuffers) -> None:
        check_memory(session, kv)
        self.engine = engine
        self._session = session
        self._kv = kv
        self._specs = {spec.name: spec for spec in (*engine.inputs, *engine.outputs)}
        self._past = [name for name in kv.buffers if name in self._specs]
        self._present = {
            present(layer.layer, part): past(layer.layer, part)
            for layer in engine.kv
            for part in Part
        }

    def has(self, name: str) -> bool:
        """Whether it has an input or output of that name."""
        return name in self._specs

    def arrays(self, names: Sequence[str], **sizes: int) -> dict[str, NDArray[Any]]:
        """Arrays for some of its inputs or outputs."""
        return {name: zeros(self._specs[name], batch=self._kv.batch, **sizes) for name in names}

    def first_row(self, row: int) -> dict[str, NDArray[Any]]:
        """The input that says which rows are wanted: those from ``row`` on."""
        arrays = self.arrays((FIRST_ROW,))
        arrays[FIRST_ROW][0] = row
        return arrays

    def prepare(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]
    ) -> Run:
        """A run on these arrays and the KV buffers."""
        buffers = self._kv.buffers
        return self._session.prepare(
            inputs,
            outputs,
            {name: buffers[name] for name in self._past},
            {out: buffers[name] for out, name in self._present.items()},
        )


class KvTarget(abc.ABC):
    """A target on KV buffers that reads a prompt in chunks. Whose it is, ``_step`` knows."""

    kv: KvBuffers
    prefill_chunk: int
    all_hidden: bool  # whether a run gives the hidden state of every row
    most_wanted: int | None = None  # rows of a run whose logits can be had
    name: str  # for messages

    @property
    def length(self) -> int:
        """Tokens in the KV buffers."""
        return self.kv.length

    @property
    def room(self) -> int:
        """Rows that the next ``verify`` can take."""
        return at_most(self.kv.room, self.most_wanted)

    def prefill(
        self,
        tokens: NDArray[np.int64],
        *,
        want_logits: bool = False,
        on_rows: OnRows | None = None,
        between_chunks: BetweenChunks | None = None,
    ) -> Rows:
        """Feed ``tokens`` ``[batch, n]`` in chunks; returns the last row only.

        ``on_rows`` gets the hidden states of every chunk (first sequence).
        Raises ContextFull before anything is written, EngineError, and what ``between_chunks``
        raises.
        """
        if on_rows is not None and not self.all_hidden:
            raise EngineError(
                f"{self.name}: returns no hidden states of the prompt",
                hint="this drafter needs a target without layers that share KV",
            )
        self.kv.reserve(tokens.shape[1])
        *chunks, last = in_chunks(tokens, self.prefill_chunk)
        for chunk in chunks:
            self._step(chunk, chunk.shape[1] - 1, False, on_rows)
            if between_chunks is not None:
                between_chunks()
        return self._step(last, last.shape[1] - 1, want_logits, on_rows)

    def verify(self, tokens: NDArray[np.int64], *, want_logits: bool = False) -> Rows:
        """Feed ``tokens`` ``[batch, rows]``; returns every row."""
        self.kv.reserve(tokens.shape[1])
        return self._step(tokens, 0, want_logits)

    def truncate(self, length: int) -> None:
        """Forget KV rows from ``length`` on. Raises ValueError when there are fewer."""
        self.kv.truncate(length)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless lengths and buffers belong together."""
        self.kv.check_integrity()

    @abc.abstractmethod
    def _step(
        self,
        tokens: NDArray[np.int64],
        first_row: int,
        want_logits: bool,
        on_rows: OnRows | None = None,
    ) -> Rows:
        """Feed ``tokens`` ``[batch, rows]`` behind ``length``; the rows from ``first_row`` on.

        ``on_rows`` gets all. Raises EngineError.
        """


class Target(KvTarget):
    """A target session with its KV buffers."""

    def __init__(
        self,
        session: Session,
        engine: EngineSpec,
        *,
        max_context: int,
        batch: int = 1,
        prefill_chunk: int = PREFILL_CHUNK,
        initial_capacity: int = INITIAL_CAPACITY,
    ) -> None:
        self.engine = engine
        self.all_hidden, self.name = engine.all_hidden, engine.file
        self.prefill_chunk = at_most(prefill_chunk, session.most_rows)
        self.most_wanted = session.most_wanted
        self.kv = KvBuffers(
            engine.kv,
            session.spec.kv_dtype,
            max_context=max_context,
            batch=batch,
            initial_capacity=initial_capacity,
            memory=session.memory,
            fixed=engine.fixed,
        )
        self._on_kv = KvEngine(session, engine, self.kv)
        self._runs: RunCache[Run] = RunCache()

    def _step(
        self,
        tokens: NDArray[np.int64],
        first_row: int,
        want_logits: bool,
        on_rows: OnRows | None = None,
    ) -> Rows:
        rows = tokens.shape[1]
        run = self._runs.get(self._prepare, self.kv.version, rows, first_row, int(want_logits))
        run.inputs[TOKENS][:] = tokens
        run.inputs[PAST_LENGTH][:] = self.kv.lengths
        run.run()
        # [0, length) was valid; [length, length + rows) is written now, and kept or truncated
        # by the caller once it knows which of these tokens stand.
        self.kv.advance(rows)
        hidden = run.outputs[HIDDEN]
        if on_rows is not None:
            on_rows(int(self.kv.lengths[0]) - rows, hidden[0])
        wanted = hidden[:, first_row:] if self.all_hidden else hidden
        outputs = run.outputs
        return Rows(outputs[ARGMAX], wanted, outputs.get(LOGITS), outputs[MARGIN])

    def _prepare(self, rows: int, first_row: int, want_logits: int) -> Run:
        on_kv = self._on_kv
        inputs = on_kv.arrays((TOKENS, PAST_LENGTH), rows=rows) | on_kv.first_row(first_row)
        names = (ARGMAX, MARGIN, HIDDEN, *((LOGITS,) if want_logits else ()))
        return on_kv.prepare(inputs, on_kv.arrays(names, rows=rows, wanted=rows - first_row))
