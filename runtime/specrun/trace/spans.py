"""Which part of a text each of its tokens gave, and how what cannot be seen is shown."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from specrun.text import Detokenizer, Tokenizer

MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣"}


@dataclass(frozen=True)
class Span:
    """``text``: what the token added to the text. ``group``: the first token of those that became
    text together, as the bytes of one character do; the last of them has all of their text."""

    text: str
    group: int


def spans(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[Span]:
    """One span for each token; their texts together are ``text``, which a stop string may have cut.

    Raises ValueError where ``text`` is not the beginning of what the tokens say.
    """
    detokenizer = Detokenizer(tokenizer)
    pieces: list[str] = []
    groups: list[int] = []
    open_group: int | None = None
    for index, token in enumerate(tokens):
        pieces.append(detokenizer.push(token))
        groups.append(index if open_group is None else open_group)
        held = bool(detokenizer.pending)
        open_group = groups[-1] if held else None
    if open_group is not None:
        pieces[-1] += detokenizer.finish()
    return [Span(*both) for both in zip(_cut(pieces, text), groups, strict=True)]


def _cut(pieces: list[str], text: str) -> list[str]:
    """``pieces`` as far as ``text`` goes."""
    if not "".join(pieces).startswith(text):
        raise ValueError("the text is not that of the tokens")
    left = len(text)
    found = []
    for piece in pieces:
        found.append(piece[:left])
        left -= len(found[-1])
    return found


def hidden(char: str) -> bool:
    """Whether ``char`` cannot be seen, or changes how others are shown; spaces and line ends not.

    Controls, formats such as zero-width spaces and changes of direction, other spaces, what is no
    character.
    """
    return char not in " \n" and unicodedata.category(char) in _HIDDEN


_HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"}


def code(char: str) -> str:
    """A character that cannot be seen, as it is shown."""
    return MARKS.get(char) or f"U+{ord(char):04X}"


def visible(text: str) -> str:
    """``text`` with marks for spaces, line ends and whatever cannot be seen."""
    return "".join(code(char) if char in MARKS or hidden(char) else char for char in text)
