"""What a generation returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specrun.decode import encode
from specrun.judge import TokenLogprob
from specrun.options import GenerateOptions
from specrun.stats import Stats
from specrun.stopping import FinishReason


@dataclass(frozen=True)
class Result:
    """A finished generation, or what there is of one that was not.

    ``finish_reason``: ``eos`` (an end id), ``stop`` (a stop string), ``length`` (max_new_tokens or
    the context), ``cancelled`` (a CancelToken, a stream that was closed, Ctrl-C), ``timeout``; and
    in :attr:`specrun.TextStream.partial` also ``error`` and ``unfinished`` (it goes on).
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
