"""Where a text ends: end ids, stop strings, number of tokens. It may be inside a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from specrun.text import BROKEN, Detokenizer, Tokenizer

# By itself; from outside, see specrun.cancel and specrun.generation; and not yet.
FinishReason = Literal["eos", "stop", "length", "cancelled", "timeout", "error", "unfinished"]


class Cut(NamedTuple):
    """``kept`` tokens of the block stand; ``text`` is final; ``reason`` when the text ends."""

    kept: int
    text: str
    reason: FinishReason | None


class Stopping:
    """Takes committed blocks token by token, so the result does not depend on the blocks.

    A stop string ends the text at its first character and the tokens at the one that completes
    it. Text that may be the beginning of a stop string is held back. Of several that one token
    completes, the one that begins first counts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        stop: Sequence[str],
        max_tokens: int,
    ) -> None:
        self.remaining = max_tokens  # tokens that may still come
        self._eos = frozenset(eos_token_ids)
        self._stop = tuple(stop)
        self._detokenizer = Detokenizer(tokenizer)
        self._held = ""  # final text, held back as a possible beginning of a stop string

    def take(self, block: Sequence[int]) -> Cut:
        """The part of ``block`` that stands. Call it no more once there is a reason."""
        pieces: list[str] = []
        for index, token in enumerate(block):
            self.remaining -= 1
            text = self._held + self._detokenizer.push(token)
            tentative = text + self._detokenizer.pending.rstrip(BROKEN)
            if (at := self._find(tentative)) is not None:
                return Cut(index + 1, "".join(pieces) + tentative[:at], "stop")
            if token in self._eos or self.remaining == 0:
                reason: FinishReason = "eos" if token in self._eos else "length"
                return self._end(index + 1, "".join(pieces) + text, reason)
            safe = len(text) - self._beginning(text)
            pieces.append(text[:safe])
            self._held = text[safe:]
        return Cut(len(block), "".join(pieces), None)

    def finish(self) -> str:
        """What was held back, when the text ends here for another reason."""
        held, self._held = self._held, ""
        return held + self._detokenizer.finish()

    def _end(self, kept: int, text: str, reason: FinishReason) -> Cut:
        return Cut(kept, text + self._detokenizer.finish(), reason)

    def _find(self, text: str) -> int | None:
        """Index of the first stop string in ``text``."""
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _beginning(self, text: str) -> int:
        """Characters at the end of ``text`` that a stop string begins with, the most."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
