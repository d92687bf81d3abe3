"""Parts an answer into thought, text for the user and tool calls, while its tokens come.

What :func:`transformers.PreTrainedTokenizer.parse_response` finds in the whole text, found piece by
piece; nothing is taken back. A mark that is a special token in the vocabulary counts only where the
model gave that token, not where it spells it; other marks may come in any tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specrun.response_format import Channel, ResponseFormat
from specrun.text import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from specrun.stream import TextStream

PROMPT_TAIL = 64  # tokens at the end of a prompt that may hold the start of a part

# A special token in the buffer: two halves of surrogate pairs, which no text has.
_TOKEN = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class Piece(NamedTuple):
    """A little more of one part of an answer."""

    channel: Channel
    text: str


class _Mark(NamedTuple):
    """A text to wait for, and the part that begins there; None: what is outside of all."""

    text: str
    opens: Channel | None


class ResponseReader:
    """Fed with the tokens of one answer as they are committed; made by
    :meth:`specrun.Engine.response_reader`.

    ``format``: None where the checkpoint's is not known; then all is content, as in
    :attr:`specrun.Result.text`. ``prompt``: what the answer continues, of which the end counts: a
    template may have begun the thought already. ``stop``: the stop strings of the generation.
    ``end_ids``: tokens that end a text and are part of none.

    Thought and content come without special tokens and without blanks at either end, as
    ``parse_response`` gives them; a tool call with its marks and every special token in it. Where a
    part comes more than once, its texts follow each other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: ResponseFormat | None,
        prompt: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        end_ids: Sequence[int] = (),
    ) -> None:
        self._strips = format is not None
        self._speller = _Speller(tokenizer, end_ids)
        regions = (format or ResponseFormat()).regions()
        spelled = self._speller.marked
        self._outside: Channel | None = None if "content" in regions else "content"
        self._opens: list[_Mark] = [
            _Mark(spelled(start), channel)
            for channel, region in regions.items()
            for start in region.starts
        ]
        self._closes: dict[Channel | None, list[_Mark]] = {
            channel: [_Mark(spelled(end), self._outside) for end in region.ends]
            for channel, region in regions.items()
        }
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = _StopStrings(stop)
        self._buffer = ""  # what may be the beginning of a mark
        self._at: Channel | None = self._beginning(prompt)
        self._texts: dict[Channel, list[str]] = {"thinking": [], "content": [], "tool_calls": []}
        self._blank: dict[Channel, str] = {}  # held back: it may be the end of the part

    @property
    def channel(self) -> Channel | None:
        """The part that it is in."""
        return self._at

    def text_of(self, channel: Channel) -> str:
        """All that came of one part so far."""
        return "".join(self._texts[channel])

    def feed(self, tokens: Sequence[int]) -> list[Piece]:
        """What ``tokens``, the next ones, make final; often a piece, sometimes none or more."""
        text = "".join(self._speller.push(token, self._detokenizer) for token in tokens)
        return self._parts(self._stop.take(text), last=False)

    def finish(self) -> list[Piece]:
        """What was held back, when no token comes any more."""
        text = self._stop.take(self._detokenizer.finish()) + self._stop.finish()
        return self._parts(text, last=True)

    def _beginning(self, prompt: Sequence[int]) -> Channel | None:
        """The part that the end of the prompt has opened."""
        tail = self._speller.spell(prompt[-PROMPT_TAIL:]).rstrip()
        for text, channel in self._opens:
            if channel != "tool_calls" and tail.endswith(text.rstrip()):
                return channel
        return self._outside

    def _parts(self, text: str, *, last: bool) -> list[Piece]:
        self._buffer += text
        found: list[Piece] = []
        for channel, part in self._split(last):
            if channel is not None and (released := self._released(channel, part)):
                self._texts[channel].append(released)
                if found and found[-1].channel == channel:
                    released = found.pop().text + released
                found.append(Piece(channel, released))
        return found

    def _split(self, last: bool) -> Iterator[tuple[Channel | None, str]]:
        """The buffer in parts, but for its end where that may begin a mark."""
        while True:
            marks = self._closes.get(self._at, []) if self._inside else self._opens
            pending = len(self._buffer) if last else _pending(self._buffer, marks)
            mark, start = _first(self._buffer, marks)
            if mark is None or start >= pending:
                yield self._at, self._buffer[:pending]
                self._buffer = self._buffer[pending:]
                return
            before, self._buffer = self._buffer[:start], self._buffer[start + len(mark.text) :]
            yield self._at, before
            if "tool_calls" in (self._at, mark.opens):
                yield "tool_calls", mark.text
            self._at = mark.opens

    @property
    def _inside(self) -> bool:
        return self._at != self._outside

    def _released(self, channel: Channel, part: str) -> str:
        if channel == "tool_calls":
            return self._speller.shown(part)
        text = _TOKEN.sub("", part)
        if not self._strips:
            return text
        if not self._texts[channel]:
            text = text.lstrip()
        text = self._blank.pop(channel, "") + text
        kept = text.rstrip()
        self._blank[channel] = text[len(kept) :]
        return kept


def read_stream(stream: TextStream, reader: ResponseReader) -> Iterator[Piece]:
    """The pieces of a stream by their parts."""
    read = 0
    for _ in stream:
        tokens = stream.tokens
        yield from reader.feed(tokens[read:])
        read = len(tokens)
    yield from reader.feed(stream.tokens[read:])
    yield from reader.finish()


def _pending(buffer: str, marks: Sequence[_Mark]) -> int:
    """Where a mark may have begun that is not complete; the buffer's length where none has."""
    earliest = len(buffer)
    for text, _ in marks:
        for size in range(min(len(text) - 1, len(buffer)), 0, -1):
            if buffer.endswith(text[:size]):
                earliest = min(earliest, len(buffer) - size)
                break
    return earliest


def _first(buffer: str, marks: Sequence[_Mark]) -> tuple[_Mark | None, int]:
    """The mark that comes first, the longest of those at one place, and where it starts."""
    found = [
        (start, -len(mark.text), mark) for mark in marks if (start := buffer.find(mark.text)) >= 0
    ]
    if not found:
        return None, len(buffer)
    start, _, mark = min(found, key=lambda each: each[:2])
    return mark, start


class _Speller:
    """Ids as text in which a special token is one that no text can spell."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._tokens: dict[int, str] = {}
        self._ids: dict[str, int] = {}

    def push(self, token: int, detokenizer: Detokenizer) -> str:
        """The text that ``token`` makes final."""
        if token not in self._tokenizer.special_ids:
            return detokenizer.push(token)
        return detokenizer.finish() + self._token(token)

    def spell(self, ids: Sequence[int]) -> str:
        """The same for a whole text."""
        detokenizer = Detokenizer(self._tokenizer)
        return "".join(self.push(id_, detokenizer) for id_ in ids) + detokenizer.finish()

    def marked(self, text: str) -> str:
        """A text whose special tokens are meant as such."""
        parts, place = [], 0
        for start, end in self._tokenizer.special_spans(text):
            id_ = self._tokenizer.id_of(text[start:end])
            if id_ is not None and id_ in self._tokenizer.special_ids:  # not in other capitals
                parts += [text[place:start], self._token(id_)]
                place = end
        return "".join([*parts, text[place:]])

    def shown(self, text: str) -> str:
        """A text with special tokens as the vocabulary writes them, but for those at an end."""
        return _TOKEN.sub(lambda found: self._name(self._ids[found[0]]), text)

    def _name(self, id_: int) -> str:
        return "" if id_ in self._end_ids else self._tokenizer.name_of(id_) or ""

    def _token(self, id_: int) -> str:
        if id_ not in self._tokens:
            high, low = divmod(len(self._tokens), 0x400)
            self._tokens[id_] = chr(0xD800 + high) + chr(0xDC00 + low)
            self._ids[self._tokens[id_]] = id_
        return self._tokens[id_]


class _StopStrings:
    """Ends the text where :class:`specrun.stopping.Stopping` does, special tokens left out."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._ended = False

    def take(self, text: str) -> str:
        """What of it no stop string can cut any more."""
        if not self._stop:
            return text
        if self._ended:
            return ""
        self._held += text
        visible = _TOKEN.sub("", self._held)
        found = [at for stop in self._stop if (at := visible.find(stop)) >= 0]
        self._ended = bool(found)
        stops = [_Mark(stop, None) for stop in self._stop]
        cut = min(found) if found else _pending(visible, stops)
        kept = len(self._held) if cut == len(visible) else _place(self._held, cut)
        released, self._held = self._held[:kept], "" if found else self._held[kept:]
        return released

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _place(text: str, count: int) -> int:
    """Where the visible character number ``count`` stands in a text with special tokens."""
    for token in _TOKEN.finditer(text):
        if token.start() >= count:
            break
        count += len(token[0])
    return count
