"""One answer while its tokens come: parts of text, where each came from, log-probabilities."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from specrun.batch import Step
from specrun.judge import TokenLogprob
from specrun.origin import Origin
from specrun.response import ResponseReader
from specrun.response_format import Channel
from specrun.spelling import names
from specrun.text import Tokenizer


class Part(NamedTuple):
    """A little more of one channel, and the origin of the token that made it final."""

    channel: Channel
    text: str
    origin: Origin


class Gain(NamedTuple):
    """What a step adds to an answer; ``logprobs``: of its tokens, an end id left out."""

    parts: list[Part]
    logprobs: list[TokenLogprob]

    def text_of(self, *channels: Channel) -> str:
        """The text of these channels."""
        return "".join(part.text for part in self.parts if part.channel in channels)


class Answer:
    """Reads the steps of a row. ``end_ids``: that have no text of their own."""

    def __init__(self, reader: ResponseReader, end_ids: frozenset[int]) -> None:
        self._reader = reader
        self._end_ids = end_ids
        self._last: Origin = "plain"
        self.reasoning_tokens = 0

    def take(self, step: Step) -> Gain:
        """What ``step`` adds."""
        parts: list[Part] = []
        for token, origin in zip(step.tokens, step.origins, strict=True):
            self.reasoning_tokens += self._reader.channel == "thinking"
            self._last = origin
            parts += [Part(*piece, origin) for piece in self._reader.feed([token])]
        if step.reason is not None:
            parts += [Part(*piece, self._last) for piece in self._reader.finish()]
        logprobs = [entry for entry in step.logprobs if entry.token not in self._end_ids]
        return Gain(parts, logprobs)


class Spelling:
    """How tokens are written where they stand alone, in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(maxsize=1 << 16)(self._of)

    def _of(self, token: int) -> str:
        return names(self._tokenizer, [token])[token]

    def chat(self, entry: TokenLogprob) -> dict[str, Any]:
        """As in ``choices[].logprobs.content`` of a chat."""
        top = [self._one(token, logprob) for token, logprob in entry.top]
        return {**self._one(entry.token, entry.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class Logprobs:
    """The four lists of a completion's log-probabilities, each as long as there are tokens."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._offset = 0

    def of(self, entries: list[TokenLogprob]) -> dict[str, list[Any]]:
        """Of the next tokens. ``text_offset``: where each begins in the tokens' texts together."""
        spell = self._spelling.of
        texts = [spell(entry.token) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {spell(token): logprob for token, logprob in entry.top}
                or {spell(entry.token): entry.logprob}
                for entry in entries
            ],
            "text_offset": offsets,
        }
