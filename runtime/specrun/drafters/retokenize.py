"""Text across two tokenizers: ids that follow a growing text, and tokens for what is drafted.

transformers' ``AssistedCandidateGeneratorDifferentTokenizers`` does the same with windows of ids
and the longest diagonal of their comparison; here tokens are compared with their places in the
text, so a repeated word is never taken for another one, and what does not fit is done anew from
further back instead of being appended.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from specrun.drafters.vocabulary import Surfaces
from specrun.text import Piece, Tokenizer

LOOKBEHIND = 16  # tokens before the end that are read again with new text
LEAST_RUN = 3  # tokens in which old and new must agree to be joined there

Key = tuple[int, int, int, int]


class Follower:
    """The ids of a text that grows at its end, the same as of the whole text at once, but that a
    Unigram model may break a tie otherwise: it sums scores from where it begins.

    New text changes the last tokens only, so it is encoded together with a window before it. The
    first tokens of a window may differ from what stands, as it begins inside the text, and the
    last ones that stood may differ from it, as they were the end; the two are joined in the
    longest run of tokens in which they agree, token and place::

        stood   … a b c d e f g h
        window        x d e f g i j k …      joined behind g

    Special tokens end a text and begin another.
    """

    def __init__(self, tokenizer: Tokenizer, lookbehind: int = LOOKBEHIND) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._lookbehind = lookbehind
        self._closed = 0  # of the ids; the others are those of the pieces
        self._pieces: list[Piece] = []
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bytes:
        """The bytes at the end that are no whole character yet. The ids stop before them."""
        return self._decoder.getstate()[0]

    def begin(self, ids: Sequence[int]) -> None:
        """Start over behind ``ids``."""
        self._decoder.reset()
        self._open(list(ids))

    def write(self, data: bytes) -> None:
        """The text goes on with ``data`` (UTF-8, which may end inside a character)."""
        text = self._decoder.decode(data)
        if text:
            self._extend(text)

    def special(self, id_: int) -> None:
        """A special token of this tokenizer stands behind the text."""
        text = self._decoder.decode(b"", final=True)
        if text:
            self._extend(text)
        self._open([*self.ids, id_])

    def _open(self, ids: list[int]) -> None:
        self.ids = ids
        self._closed = len(ids)
        self._pieces = []
        self._text = ""

    def _extend(self, text: str) -> None:
        self._text += text
        stands, new = self._encode(self._lookbehind)
        self._pieces[stands:] = new
        self.ids[self._closed + stands :] = [piece.id for piece in new]

    def _encode(self, lookbehind: int) -> tuple[int, list[Piece]]:
        """How many pieces stand, and those behind them."""
        first = self._clean_start(len(self._pieces) - lookbehind)
        start = self._pieces[first].start if first > 0 else 0
        new = [
            Piece(id_, start + begin, start + end)
            for id_, begin, end in self._tokenizer.split(self._text[start:])
        ]
        if first == 0:
            return 0, new
        old_end, new_end, length = _longest_run(self._pieces[first:], new)
        if length < LEAST_RUN:
            return self._encode(4 * lookbehind)
        return first + old_end, new[new_end:]

    def _clean_start(self, first: int) -> int:
        """The last piece up to ``first`` that begins a character; several may share one."""
        while first > 0 and self._pieces[first - 1].end > self._pieces[first].start:
            first -= 1
        return max(first, 0)


def _longest_run(old: Sequence[Piece], new: Sequence[Piece]) -> tuple[int, int, int]:
    """The longest run of equal tokens at equal places: its ends in both, and its length."""
    place = {key: index for index, key in enumerate(_keys(new))}
    best = (0, 0, 0)
    length, former = 0, -1
    for index, key in enumerate(_keys(old)):
        found = place.get(key, -1)
        length = 0 if found < 0 else length + 1 if found == former + 1 else 1
        former = found
        if length > best[2]:
            best = (index + 1, found + 1, length)
    return best


def _keys(pieces: Sequence[Piece]) -> Iterator[Key]:
    """Pieces, numbered where several are parts of the same characters."""
    former, number = (-1, -1), 0
    for id_, start, end in pieces:
        number = number + 1 if (start, end) == former else 0
        former = start, end
        yield start, end, number, id_


def continuation(surfaces: Surfaces, before: bytes, new: bytes) -> list[int]:
    """Tokens for ``new``, the text that follows ``before``; together they are whole characters.

    The border is between tokens that are committed and those that are not, so a token across it
    is replaced by tokens for its part behind it. Empty when the tokenizer gives other bytes than
    those of the text (it normalises, or knows no token for them).
    """
    text = (_from_boundary(before) + new).decode("utf-8", "replace")
    tokens = [piece.id for piece in surfaces.tokenizer.split(text)]
    found: list[int] = []
    left = len(new)
    while left > 0:
        surface = surfaces.of(tokens.pop()) if (last := tokens[-1:]) else None
        if surface is None:
            return []
        if len(surface) > left:
            return _joined(surfaces, [*_cut(surfaces, surface[-left:]), *found], new)
        found.insert(0, last[0])
        left -= len(surface)
    return _joined(surfaces, found, new)


def spelled(surfaces: Surfaces, data: bytes) -> list[int]:
    """Tokens for ``data`` (UTF-8) as it stands inside a text: the tokenizer's, or where it gives
    other bytes the longest ones that there are. Empty when no tokens spell it."""
    return continuation(surfaces, b"", data) or _cut(surfaces, data)


def _joined(surfaces: Surfaces, tokens: list[int], new: bytes) -> list[int]:
    """``tokens`` when they are ``new``."""
    return tokens if b"".join(surfaces.of(id_) or b"" for id_ in tokens) == new else []


def _cut(surfaces: Surfaces, part: bytes) -> list[int]:
    """The rest of a token as tokens of its own, each as long as there is one."""
    tokens: list[int] = []
    while part:
        lengths = range(len(part), 0, -1)
        id_ = next((id_ for n in lengths if (id_ := surfaces.find(part[:n])) is not None), None)
        if id_ is None:
            return []
        tokens.append(id_)
        part = part[len(surfaces.of(id_) or part) :]
    return tokens


def _from_boundary(data: bytes) -> bytes:
    """``data`` without the rest of a character at its start."""
    start = 0
    while start < len(data) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]


def whole_characters(data: bytes) -> bytes:
    """``data`` without an incomplete character at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    pending = decoder.getstate()[0]
    return data[: len(data) - len(pending)]
