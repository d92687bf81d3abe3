"""What a grammar leaves no choice about is drafted without asking a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from specrun.constraint import Constraint
from specrun.drafters.base import Drafter, Proposal, resume
from specrun.sampling import Sampler


class ForcedDrafter:
    """Another drafter, which is not asked where ``constraint`` allows one token only.

    Such tokens are certain, and the target cannot reject them: a proposal of them costs no run of
    the drafter, and many a drafter would not have guessed them. Drafts of both kinds are not
    mixed, as a drafter cannot be told of tokens that are not committed.
    """

    def __init__(self, drafter: Drafter, constraint: Constraint) -> None:
        self._drafter = drafter
        self._constraint = constraint
        self._tokens: list[int] = []

    @property
    def max_drafts(self) -> int | None:
        """The other drafter's own limit."""
        return self._drafter.max_drafts

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether the other drafter must see all rows of the prompt."""
        return self._drafter.needs_prompt_rows

    def begin(self, tokens: Sequence[int]) -> None:
        """See :class:`Drafter`."""
        self._tokens = list(tokens)
        self._drafter.begin(tokens)

    def resume(self, tokens: Sequence[int], most: int) -> int:
        """See :class:`specrun.drafters.base.Resuming`."""
        rows = resume(self._drafter, tokens, most)
        self._tokens = list(tokens[: rows + 1])
        return rows

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """See :class:`Drafter`."""
        self._tokens += tokens
        self._drafter.observe(tokens, hidden)

    def propose(self, count: int, sampler: Sampler) -> Proposal | Sequence[int]:
        """The tokens that must come; where a choice is left, what the other drafter proposes."""
        forced = self._constraint.forced(self._tokens, count)
        return Proposal(forced) if forced else self._drafter.propose(count, sampler)

    def truncate(self, length: int) -> None:
        """See :class:`Drafter`."""
        del self._tokens[length:]
        self._drafter.truncate(length)
