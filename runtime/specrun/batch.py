"""Several texts at once: a piece of each in turn."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import NamedTuple

from specrun.cancel import EarlyEnd, EndedEarly
from specrun.generation import Generation
from specrun.judge import TokenLogprob
from specrun.lane import Lane
from specrun.loop import Commit, OnRound, Progress, Round
from specrun.origin import Origin, of_round
from specrun.process import Closing
from specrun.request import Request
from specrun.resources import Resources
from specrun.result import Result
from specrun.stopping import FinishReason


def in_turn(rows: Sequence[Row]) -> list[Result]:
    """Run all rows to their ends; the results in the order of ``rows``.

    When one raises, the others are closed.
    """
    running = list(rows)
    try:
        while running:
            running = [row for row in running if row.step() is not None]
    finally:
        for row in rows:
            row.close()
    return [row.partial for row in rows]


class Step(NamedTuple):
    """What a round of a row gave: tokens with where each came from, and text that is final.

    ``logprobs``: one per token where they were asked for. ``reason``: with the last step.
    """

    tokens: list[int]
    text: str
    origins: tuple[Origin, ...]
    logprobs: list[TokenLogprob]
    reason: FinishReason | None


class Rows(Closing):
    """Texts side by side on one engine, which nobody else uses as long as this is open.

    Rows come and go between any two steps, and each gives what it would give alone. There are as
    many lanes as there were rows at work at once: a row takes one that another has left, with its
    KV buffers. Made by :meth:`specrun.Engine.rows`.
    """

    def __init__(self, resources: Resources, turn: contextlib.AbstractContextManager[None]) -> None:
        self._resources = resources
        self._turn = contextlib.ExitStack()
        self._turn.enter_context(turn)
        self._free: list[Lane] = []

    def add(
        self, tokens: Sequence[int], request: Request, early_end: EarlyEnd | None = None
    ) -> Row:
        """A row that continues ``tokens``; nothing is run before its first step.

        From any thread. The time-out of the request runs from now on. ``early_end``: shared by
        several rows, in place of the request's own.
        """
        return Row(self, list(tokens), request, early_end or request.early_end())

    def close(self) -> None:
        """Free the lanes and the engine. No row may be at work any more."""
        self._free.clear()
        self._turn.close()

    def _take(self) -> Lane:
        if not self._free:
            return Lane(self._resources)
        lane = self._free.pop()
        lane.reset()
        return lane


class Row(Closing):
    """One text of several, a round at a time. Closed, or ended, it leaves its lane to others."""

    def __init__(
        self, rows: Rows, tokens: list[int], request: Request, early_end: EarlyEnd
    ) -> None:
        self._rows = rows
        self._tokens = tokens
        self._early_end = early_end
        self._early_end.start()
        watch = self._watch if request.on_round is None else _both(self._watch, request.on_round)
        self._generation = Generation(
            dataclasses.replace(request, on_round=watch), rows._resources, self._early_end
        )
        self._origins: tuple[Origin, ...] = ("plain",)  # of the token that the prompt gives
        self._lane: Lane | None = None
        self._commits: Generator[Commit, None, Result] | None = None
        self._progress: Progress | None = None
        self._seen = 0  # logprobs

    @property
    def partial(self) -> Result:
        """What was committed so far; see :attr:`specrun.TextStream.partial`."""
        return self._generation.partial

    def step(self) -> Step | None:
        """Run one round, the first time read the prompt. None when the text has ended.

        What is raised ends the row.
        """
        try:
            commit = next(self._started(), None)
        except BaseException as error:
            self._generation.abandon(error)
            self.close()
            raise
        if commit is None:
            self.close()
            return None
        assert self._progress is not None, "there are commits"
        logprobs = self._progress.logprobs[self._seen : self._seen + len(commit.tokens)]
        self._seen += len(logprobs)
        origins = self._origins[: len(commit.tokens)]
        return Step(commit.tokens, commit.text, origins, logprobs, commit.reason)

    def ended_early(self) -> bool:
        """Whether a row without a step is cancelled or out of time; then it is over."""
        try:
            self._early_end.check()
        except EndedEarly as ended:
            self._generation.skip(ended.reason)
            return True
        return False

    def close(self) -> None:
        """End the text here."""
        lane, self._lane = self._lane, None
        if self._commits is not None:
            self._commits.close()
        self._progress = None
        if lane is not None:
            self._rows._free.append(lane)

    def _started(self) -> Generator[Commit, None, Result]:
        if self._commits is None:
            self._lane = self._rows._take()
            self._progress = Progress(self._lane.target, self._tokens, behind=True)
            self._commits = self._generation.commits(self._lane, self._progress)
        return self._commits

    def _watch(self, done: Round) -> None:
        self._origins = of_round(done)


def _both(first: OnRound, second: OnRound) -> OnRound:
    def watch(done: Round) -> None:
        first(done)
        second(done)

    return watch
