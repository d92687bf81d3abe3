"""One generation at work: what it gives, and at any time what it has given so far."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from specrun.cancel import EarlyEnd, EarlyReason, EndedEarly
from specrun.judge import TokenLogprob
from specrun.lane import Lane
from specrun.loop import Commit, Progress
from specrun.request import Request
from specrun.resources import Resources
from specrun.result import Result
from specrun.stats import Meter
from specrun.stopping import FinishReason
from specrun.verification import Verification


class _Place(NamedTuple):
    """Where it works: behind the first ``start`` tokens of ``progress``."""

    progress: Progress
    start: int


class Generation:
    """Runs a request, once.

    What it has given is counted round by round, and ``partial`` takes everything from that count.
    So tokens, text and statistics belong together wherever an error, or another thread, finds them.
    ``early_end``: shared by the rows of a batch.
    """

    def __init__(
        self, request: Request, resources: Resources, early_end: EarlyEnd | None = None
    ) -> None:
        self._request = request
        self._resources = resources
        self._early_end = early_end or request.early_end()
        self._meter = Meter()
        self._place: _Place | None = None
        self._verification: Verification | None = None
        self._result: Result | None = None
        self.finished = False

    @property
    def partial(self) -> Result:
        """What was committed so far; its ``finish_reason`` is "unfinished" until there is one."""
        taken = self._result or self._snapshot("unfinished")
        return self._result or taken  # it may have ended meanwhile, in another thread

    @property
    def tokens(self) -> list[int]:
        """The new ids of ``partial``, without the rest of it."""
        place = self._place
        if place is None:
            return [] if self._result is None else list(self._result.tokens)
        return place.progress.committed[place.start : place.start + self._meter.emitted]

    def run(self, lane: Lane, progress: Progress) -> Generator[str, None, Result]:
        """Continue ``progress`` on ``lane``: text pieces as they are committed, then the result.

        ``finished`` says whether it came to one: at an end of the text, or at an early one.
        """
        commits = self.commits(lane, progress)
        try:
            while True:
                text = next(commits).text
                if text:
                    yield text
        except StopIteration as stop:
            result: Result = stop.value
            return result
        except BaseException as error:  # were it between two commits
            self.abandon(error)
            raise
        finally:
            commits.close()

    def commits(self, lane: Lane, progress: Progress) -> Generator[Commit, None, Result]:
        """The same round by round, with the tokens of each; the last one has the reason.

        Together they have the tokens and the text of the result.
        """
        text, last = "", Commit([], "", "length")
        yielded = 0
        try:
            for commit in self._commits(lane, progress):
                text += commit.text
                if commit.reason is not None:
                    last = commit
                    break  # the last one comes when the generation is over
                yielded = len(text)
                yield commit
            result = self._end(last.reason or "length", text)
        except EndedEarly as ended:
            result = self._end(ended.reason)
        except BaseException as error:
            self.abandon(error)
            raise
        self.finished = True
        yield Commit(last.tokens, result.text[yielded:], result.finish_reason)
        return result

    def skip(self, reason: EarlyReason) -> Result:
        """It ends before it begins."""
        self.finished = True
        return self._end(reason)

    def abandon(self, error: BaseException) -> None:
        """It does not go on, because of ``error``: ``partial`` stays what it is."""
        if self._result is None:
            if self._place is not None:
                self._place.progress.behind = True
            stopped = isinstance(error, (GeneratorExit, KeyboardInterrupt))
            self._end("cancelled" if stopped else "error")

    def _commits(self, lane: Lane, progress: Progress) -> Generator[Commit, None, None]:
        request, start = self._request, len(progress.committed)
        room = lane.resources.max_context - start
        most = min(request.options.max_new_tokens or 0, room)
        self._meter.prompt_tokens = start
        progress.begin()
        self._place = _Place(progress, start)
        self._early_end.start()
        self._early_end.check()
        options = request.options
        verified = lane.watch(strict=options.strict, on_warning=request.on_warning)
        self._verification = verified
        if most > 0:
            with verified:
                yield from request.rounds(lane, progress, self._meter, most, self._early_end.check)

    def _end(self, reason: FinishReason, text: str | None = None) -> Result:
        """Leave tokens and KV as they belong together, and keep what there is."""
        self._meter.switch(None)
        place = self._place
        if place is not None:
            place.progress.rewind(place.start + self._meter.emitted)
        result = self._result = self._snapshot(reason, text)
        self._place = self._verification = None  # who keeps the stream keeps no buffers
        return result

    def _snapshot(self, reason: FinishReason, text: str | None = None) -> Result:
        request, resources = self._request, self._resources
        options, verified = request.options, self._verification
        stats = self._meter.freeze(
            request.method,
            lossy=options.ensemble_weight < 1,
            exact_width=resources.options.fixed_width,
            providers=resources.providers(),
            **({} if verified is None else verified.statistics(len(self._meter.rounds))),
        )
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        # After the counts: nothing is counted before there is a place, and none is left in the end.
        if (place := self._place) is not None:
            tokens = place.progress.committed[place.start : place.start + stats.emitted]
            logprobs = place.progress.logprobs[: stats.emitted]
        if text is None:
            text = self._text_of(tokens, ended=reason != "unfinished")
        asked = options.logprobs is not None
        return Result(text, tokens, reason, stats, options, logprobs if asked else None)

    def _text_of(self, tokens: list[int], *, ended: bool) -> str:
        """What a stream gives for ``tokens``; ``ended``: with what it would still hold back."""
        stopping = self._request.stopping(self._resources, len(tokens) + 1)
        cut = stopping.take(tokens)
        return cut.text + (stopping.finish() if ended and cut.reason is None else "")
