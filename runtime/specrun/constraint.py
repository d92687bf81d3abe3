"""A grammar at work on one text: which tokens may stand behind a prefix.

It is a processor like the others (:mod:`specrun.processors`) and comes last of them, so that
nothing behind it allows again what it forbids, and before the warpers, which choose among what is
left. Slots are asked for in any order, and again: it goes forward and back to the prefix that it is
asked about, and keeps what it said about the last ones::

    prompt              not looked at
    [prompt, reached)   the matcher stands behind these
    masks               of the last places up to there, each computed once

An end id may come where the text is complete, so it must where nothing else may. What stands
behind an end id or a token that is forbidden is never kept, and nothing is said about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.errors import UsageError
from specrun.processors import Logits, Prefix

Mask = NDArray[np.bool_]
KEPT = 64  # masks of places before the last one; proposals are shorter
MAX_REASON = 300  # characters of what the library says


class Constraint:
    """Follows one text. Not for several threads.

    ``name``: of the option with the grammar. ``matcher``: llguidance's ``LLMatcher`` at its start.
    ``texts``: bytes of every token, none where it never stands in a text; ``spell``: tokens for
    bytes. ``not_first``: tokens that the decoder would show otherwise at the beginning.
    ``vocab_size``: of the logits; tokens that have a logit and no entry in ``texts`` are forbidden.
    """

    def __init__(
        self,
        name: str,
        matcher: Any,
        texts: Sequence[bytes],
        spell: Callable[[bytes], list[int]],
        *,
        prompt_length: int,
        end_ids: Sequence[int],
        vocab_size: int,
        not_first: Sequence[int] = (),
    ) -> None:
        self._name = name
        self._matcher = matcher
        self._texts = texts
        self._spell = spell
        self._size = len(texts)
        self._prompt_length = prompt_length
        self._vocab_size = vocab_size
        known = [id_ for id_ in dict.fromkeys(end_ids) if id_ < vocab_size]
        self._ends = frozenset(known)
        self._plain_ends = [id_ for id_ in known if id_ >= self._size or not texts[id_]]
        self._written_ends = [id_ for id_ in known if id_ not in self._plain_ends]
        none = [id_ for id_, text in enumerate(texts[:vocab_size]) if not text]
        self._no_text = np.array(none, dtype=np.int64)
        self._not_first = np.array([i for i in not_first if i < vocab_size], dtype=np.int64)
        self._reached: NDArray[np.int64] = np.empty(256, dtype=np.int64)
        self._length = 0  # of what is reached
        self._masks: dict[int, Mask] = {}

    def __call__(self, prefix: Prefix, logits: Logits) -> Logits:
        """See :class:`specrun.processors.Processor`. Raises UsageError where the library gives up,
        or no token of the target goes on with the text."""
        if not self._reach(prefix[self._prompt_length :]):
            return logits
        allowed = self._mask()[: logits.size]
        left: Logits = np.full_like(logits, -np.inf)
        left[: allowed.size][allowed] = logits[: allowed.size][allowed]
        return left

    def check_start(self) -> None:
        """Raise UsageError unless some text can begin, and end."""
        if not self._ends:
            raise UsageError(
                f"{self._name}: needs an end id, which says that the text is complete; there is"
                " none here",
                hint="give eos_token_ids",
            )
        self._mask()

    def count_allowed(self, committed: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of ``drafts`` may stand, one behind the other, behind ``committed``.

        None that comes behind an end id. Raises as a call does.
        """
        text = np.array([*committed[self._prompt_length :], *drafts], dtype=np.int64)
        start = len(text) - len(drafts)
        for count in range(len(drafts)):
            if not self._reach(text[: start + count]) or not self._may_follow(text[start + count]):
                return count
        return len(drafts)

    def forced(self, committed: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens for the text that must follow ``committed``, or its only end.

        The text is certain; other tokens may spell the end of it, together with what comes then.
        """
        text = np.array(committed[self._prompt_length :], dtype=np.int64)
        if not self._reach(text):
            return []
        found: list[int] = list(self._matcher.compute_ff_tokens())
        certain = b"".join(self._texts[token] for token in found)
        found += self._spell(self._matcher.compute_ff_bytes()[len(certain) :])
        self._check()
        if not found and self._reach(text) and np.count_nonzero(self._mask()) == 1:
            found = [int(self._mask().argmax())]
        return found[:most]

    def _reach(self, text: NDArray[np.int64]) -> bool:
        """Stand behind ``text``. False where that cannot be: it goes on behind an end, or holds
        what is forbidden; then it stands before that."""
        same = self._in_common(text)
        if same < self._length:
            if not self._matcher.rollback(self._length - same):
                self._check()
            self._length = same
        for token in text[same:]:
            if not self._may_follow(token) or token in self._ends:
                return False
            self._consume(int(token))
        return True

    def _in_common(self, text: NDArray[np.int64]) -> int:
        shorter = min(self._length, len(text))
        differs = self._reached[:shorter] != text[:shorter]
        return int(differs.argmax()) if differs.any() else shorter

    def _may_follow(self, token: np.int64 | int) -> bool:
        mask = self._mask()
        return bool(token < mask.size and mask[token])

    def _consume(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._check()
        if self._length == len(self._reached):
            self._reached = np.concatenate([self._reached, np.empty_like(self._reached)])
        self._reached[self._length] = token
        self._length += 1
        # What was said about this place was said behind another token.
        for place in [p for p in self._masks if p >= self._length or p < self._length - KEPT]:
            del self._masks[place]

    def _mask(self) -> Mask:
        """What may come where it stands; of every token that has a logit."""
        mask = self._masks.get(self._length)
        if mask is None:
            mask = self._masks[self._length] = self._computed()
        return mask

    def _computed(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        both = min(self._size, self._vocab_size)
        mask[:both] = np.unpackbits(bits, count=both, bitorder="little")
        mask[self._no_text] = False  # rules can ask for special tokens, which are no text
        if self._length == 0:
            mask[self._not_first] = False
        for token in self._written_ends:
            mask[token] = mask[token] and self._completes(token)
        mask[self._plain_ends] = self._matcher.is_accepting()
        if not mask.any():
            raise UsageError(
                f"{self._name}: no token can follow after {self._length} of the text",
                hint="the target's tokens cannot spell what it asks for, or no end id may come",
            )
        return mask

    def _completes(self, token: int) -> bool:
        """Whether the text is complete with ``token``, which has a text and ends it."""
        self._matcher.consume_token(token)
        complete: bool = self._matcher.is_accepting()
        self._matcher.rollback(1)
        self._check()
        return complete

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(
                f"{self._name}: the grammar cannot go on after {self._length} tokens of the text:"
                f" {said(self._matcher.get_error())}",
                hint="nothing matches it, or it is too large: fewer alternatives, properties and"
                " repetitions make it simpler",
            )


def said(reason: str) -> str:
    """The library's reason in one line."""
    line = " ".join(re.split("<state>|<non-verbose", reason)[0].split()).rstrip(".;, ")
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 3] + "..."
