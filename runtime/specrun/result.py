"""What a generation returns, at once or as a stream."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from specrun.decode import encode
from specrun.errors import UsageError
from specrun.judge import TokenLogprob
from specrun.options import GenerateOptions
from specrun.stats import Stats
from specrun.stopping import FinishReason


@dataclass(frozen=True)
class Result:
    """A finished generation.

    ``text``: without special tokens, and without the stop string that ended it. ``tokens``: the
    new ids, an end id included; with a stop string, up to the token that completes it.
    ``options``: as they took effect, nothing left to be decided. ``logprobs``: one entry per
    token where they were asked for.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    options: GenerateOptions
    logprobs: list[TokenLogprob] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "stats": self.stats.as_dict(),
            "options": encode(self.options),
            "logprobs": encode(self.logprobs),
        }


class TextStream(Iterator[str]):
    """Pieces of text as they are committed; ``result`` when they are through.

    The engine is busy from the first piece until the stream ends or is closed.
    """

    def __init__(self, pieces: Generator[str, None, Result]) -> None:
        self._pieces = pieces
        self._result: Result | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as stop:
            if stop.value is not None:
                self._result = stop.value
            raise StopIteration from None

    @property
    def result(self) -> Result:
        """The whole generation. Raises UsageError before the stream has ended."""
        if self._result is None:
            raise UsageError("result: the stream has not ended", hint="iterate over it first")
        return self._result

    def drain(self) -> Result:
        """Take all pieces that are left and return the result."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """End the generation here and free the engine."""
        self._pieces.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
