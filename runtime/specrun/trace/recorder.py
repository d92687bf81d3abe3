"""Watches generations, round by round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specrun.errors import UsageError
from specrun.loop import Round
from specrun.trace.page import write_page
from specrun.trace.record import Trace, make

if TYPE_CHECKING:
    from specrun.engine import Engine
    from specrun.result import Result


class Recorder:
    """Given to a generation as ``on_round=recorder``; of a batch it keeps every row.

    It may be given to one generation after another and then knows the last one.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, list[Round]] = {}

    def __call__(self, done: Round) -> None:
        """Keep a round."""
        if done.index == 0:
            self._rounds[done.sequence] = []
        self._rounds.setdefault(done.sequence, []).append(done)

    def trace(
        self,
        engine: Engine,
        result: Result,
        *,
        prompt: str | None = None,
        error: str | None = None,
        sequence: int = 0,
    ) -> Trace:
        """What ``engine`` did for ``result``, also the ``partial`` one of a stream.

        ``prompt``: shown as it is; ``error``: what ended it; ``sequence``: of a batch, which row.
        Raises UsageError where the result is not that of the rounds.
        """
        rounds = self._rounds.get(sequence, []) if result.stats.rounds else []
        emitted = [token for done in rounds for token in done.emitted]
        # A generation may break off between the count of its last round and this callback.
        missing = result.stats.rounds - len(rounds)
        if missing not in (0, 1) or result.tokens[1 : 1 + len(emitted)] != emitted:
            raise UsageError(
                "result: its tokens are not those of the rounds that were recorded",
                hint="give the recorder as on_round= of the generation whose result this is",
            )
        return make(engine, result, tuple(rounds), prompt=prompt, error=error)

    def write_page(
        self,
        path: str | Path,
        engine: Engine,
        result: Result,
        *,
        prompt: str | None = None,
        error: str | None = None,
        sequence: int = 0,
    ) -> None:
        """Write the page of :meth:`trace`, at once. Raises UsageError, also where it cannot."""
        found = self.trace(engine, result, prompt=prompt, error=error, sequence=sequence)
        write_page(path, found)
