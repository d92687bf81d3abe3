"""What a text that was read has in common with one that is wanted, where their tokens differ.

A model may give ``["Hel", "lo"]`` where its tokenizer writes ``["Hello"]``. In a chat both are the
same answer, so the ids that the model gave stay, and only what is new is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specrun.drafters.model import common_prefix
from specrun.text import BROKEN, Tokenizer

MOST_TOKENS = 64  # of one stretch that is spelled in other tokens


class Common(NamedTuple):
    """The first ``have`` ids of one text spell what the first ``want`` ids of the other do."""

    have: int
    want: int


def common_text(have: Sequence[int], want: Sequence[int], tokenizer: Tokenizer) -> Common:
    """The longest beginnings of the two that spell the same: ``have[:h] + want[w:]`` spells what
    ``want`` does.

    Special tokens must be the same ones; other tokens may be parted otherwise, in whole characters.
    """
    speller = _Speller(tokenizer)
    at = START
    while True:
        at = common_ids(have, want, at)
        if at.have == len(have) or at.want == len(want):
            return at
        respelled = speller.respelled(have, want, at)
        if respelled is None:
            return at
        at = respelled


START = Common(0, 0)


def common_ids(have: Sequence[int], want: Sequence[int], at: Common = START) -> Common:
    """The same from ``at`` on, with the same ids."""
    same = common_prefix(have[at.have :], want[at.want :])
    return Common(at.have + same, at.want + same)


class _Speller:
    """The text of some ids in the middle of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # In front of what is decoded: decoders trim the space of what begins a text.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._start = len(tokenizer.decode(self._before))

    def respelled(self, have: Sequence[int], want: Sequence[int], at: Common) -> Common | None:
        """The next place where both have spelled the same; None where they do not."""
        h, w = at.have + 1, at.want + 1
        while True:
            if not (self._may_go_on(have, at.have, h) and self._may_go_on(want, at.want, w)):
                return None
            ours, theirs = self._text(have[at.have : h]), self._text(want[at.want : w])
            if ours == theirs and ours and BROKEN not in ours:
                return Common(h, w)
            # The end of a text that has half a character is not compared yet.
            whole, other = ours.rstrip(BROKEN), theirs.rstrip(BROKEN)
            if not (whole.startswith(other) or other.startswith(whole)):
                return None
            if len(ours) <= len(theirs):
                h += 1
            else:
                w += 1

    def _may_go_on(self, ids: Sequence[int], start: int, end: int) -> bool:
        """Whether a stretch may end at ``end``: there are such ids, and its last is ordinary."""
        within = end <= len(ids) and end - start <= MOST_TOKENS
        return within and ids[end - 1] not in self._tokenizer.special_ids

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*self._before, *ids])[self._start :]
