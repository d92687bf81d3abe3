"""A target whose answers are looked at, and for which another one stands in when it fails.

No committed token is lost: they are kept here, the other target reads them again, and what was
asked of the one that failed is asked of it. Whoever calls sees nothing but the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.bits import all_finite
from specrun.errors import EngineError, without_frames
from specrun.kv import KvBuffers
from specrun.target import BetweenChunks, OnRows, Rows, Verifier

OpenOther = Callable[[KvBuffers, EngineError], Verifier]


@dataclass(frozen=True)
class Watch:
    """What a generation says to a failure: ``refuse(error)`` may raise, ``tell(error)`` is called
    once the other target has taken over."""

    refuse: Callable[[EngineError], None]
    tell: Callable[[EngineError], None]


class GuardedTarget:
    """``target`` until it fails in a generation that allows it, then what ``open_other`` gives.

    ``open_other``: gets the KV buffers, on which the other target goes on, so that drafters that
    read them need not know, and what happened; None: nobody stands in. Failures are errors of a
    run and answers that are not finite. Without ``watch`` they are raised.
    """

    def __init__(self, target: Verifier, open_other: OpenOther | None) -> None:
        self._target: Any = target
        self._open_other = open_other
        self.watch: Watch | None = None  # of the generation that runs
        self._tokens: list[int] = []  # those of the KV rows, and more after a truncation
        self._ahead: list[int] = []  # those that ``draft`` was given since ``start_drafting``
        self._seen_logits = False
        self.steps = 0  # runs of ``verify`` that the other target did
        self.failure: EngineError | None = None

    @property
    def kv(self) -> KvBuffers:
        """The KV buffers that drafters may read; the same before and after a failure."""
        kv: KvBuffers = self._target.kv
        return kv

    @property
    def length(self) -> int:
        """Tokens in the KV buffers."""
        return self.kv.length

    @property
    def room(self) -> int:
        """Rows that the next ``verify`` can take."""
        room: int = self._target.room
        return room

    def prefill(
        self,
        tokens: NDArray[np.int64],
        *,
        want_logits: bool = False,
        on_rows: OnRows | None = None,
        between_chunks: BetweenChunks | None = None,
    ) -> Rows:
        """See :class:`specrun.target.Verifier`. No hidden row is given to ``on_rows`` twice."""
        once = None if on_rows is None else _Once(on_rows, self.length)
        first = not self._seen_logits

        def run() -> Rows:
            return self._target.prefill(  # type: ignore[no-any-return]
                tokens,
                want_logits=want_logits or first,
                on_rows=once,
                between_chunks=between_chunks,
            )

        return self._answer(run, tokens, own=once)

    def verify(self, tokens: NDArray[np.int64], *, want_logits: bool = False) -> Rows:
        """See :class:`specrun.target.Verifier`."""
        first = not self._seen_logits

        def run() -> Rows:
            return self._target.verify(tokens, want_logits=want_logits or first)  # type: ignore[no-any-return]

        rows = self._answer(run, tokens)
        self.steps += self.failure is not None
        return rows

    def draft(self, token: int, *, want_logits: bool = False) -> Rows:
        """Of targets whose first layers draft; see :class:`specrun.split.SplitTarget`."""
        rows = self._answer(lambda: self._target.draft(token, want_logits=want_logits), None)
        self._ahead.append(token)
        return rows

    def start_drafting(self, rows: int) -> int:
        """See :class:`specrun.split.SplitTarget`."""
        self._ahead = []
        fitting: int = self._target.start_drafting(rows)
        return fitting

    def truncate(self, length: int) -> None:
        """Forget KV rows from ``length`` on. Raises ValueError when there are fewer."""
        self._target.truncate(length)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless lengths, tokens and buffers belong together."""
        self._target.check_integrity()
        if self.length > len(self._tokens):
            raise RuntimeError(f"{self.length} rows of {len(self._tokens)} tokens")

    def _answer(
        self, run: Callable[[], Rows], tokens: NDArray[np.int64] | None, own: _Once | None = None
    ) -> Rows:
        """What ``run`` returns, asked again of the other target where it fails. ``tokens``: those
        that are in the KV afterwards."""
        before = self.length
        try:
            try:
                rows = run()
                if self.failure is None:
                    self._check(rows)
            except EngineError as error:
                if own is not None and own.raised is error:
                    raise  # the caller's own, not the target's
                self.kv.truncate(before)  # what it wrote is not to be trusted
                rows = self._ask_other(error, before, run, drafting=tokens is None)
        finally:
            # Whatever was raised, the chunks of a prompt that were read are known.
            if tokens is not None and self.length >= before:
                self._tokens[before:] = tokens[0, : self.length - before].tolist()
        return rows

    def _check(self, rows: Rows) -> None:
        """Raise EngineError for what is not finite. All logits are looked at in the first answer,
        later the lead of the best one and the hidden states, which a NaN reaches."""
        looked_at = [rows.margin, rows.hidden]
        if not self._seen_logits and rows.logits is not None:
            looked_at.append(rows.logits)
        if not all(all_finite(array) for array in looked_at):
            raise not_finite()
        self._seen_logits = True

    def _ask_other(
        self, error: EngineError, before: int, run: Callable[[], Rows], *, drafting: bool
    ) -> Rows:
        """The other target takes over behind ``before`` tokens and does ``run``.

        Raises ``error`` where none may, EngineError where the other one fails too.
        """
        watch = self.watch
        if self._open_other is None or watch is None or self.failure is not None:
            raise error
        watch.refuse(error)
        other = self._open_other(self.kv, error)
        engine, self._target, self.failure = self._target, other, without_frames(error)
        try:
            self._read_again(before, drafting=drafting)
            rows = run()
        except EngineError as second:
            self._target, self.failure = engine, None
            self.kv.truncate(0)  # the engine's buffers need not have the other one's rows
            raise EngineError(f"{error}; and then {second}", hint=second.hint) from second
        watch.tell(error)
        return rows

    def _read_again(self, count: int, *, drafting: bool) -> None:
        """The first ``count`` tokens, and what was drafted behind them in this round."""
        self.kv.truncate(0)
        if count:
            known: NDArray[np.int64] = np.array([self._tokens[:count]], dtype=np.int64)
            self._target.prefill(known)
        if drafting:
            self._target.start_drafting(len(self._ahead) + 1)
            for token in self._ahead:
                self._target.draft(token)


def not_finite() -> EngineError:
    """What the target says cannot be used."""
    return EngineError(
        "the target's logits are not finite (nan or inf)",
        hint="export again, with --precision fp32 if it was fp16",
    )


class _Once:
    """Passes hidden rows on to ``on_rows``, each position once, from ``start`` on."""

    def __init__(self, on_rows: OnRows, start: int) -> None:
        self._on_rows = on_rows
        self._next = start
        self.raised: BaseException | None = None

    def __call__(self, start: int, hidden: NDArray[Any]) -> None:
        new = hidden[max(0, self._next - start) :]
        if not len(new):
            return
        if not all_finite(new):
            raise not_finite()  # before a drafter keeps it
        at = max(start, self._next)
        self._next = at + len(new)
        try:
            self._on_rows(at, new)
        except BaseException as error:
            self.raised = error
            raise
