"""A drafter that may fail: the loop goes on without it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from specrun.drafters.base import Drafter, Proposal, resume
from specrun.sampling import Sampler


class GuardedDrafter:
    """Passes the verbs on. When one raises, ``on_failure(error)`` is called once (it may raise
    in turn) and from then on nothing is proposed."""

    def __init__(
        self, drafter: Drafter, on_failure: Callable[[Exception], None], *, vocab_size: int
    ) -> None:
        self._drafter: Drafter | None = drafter
        self._vocab_size = vocab_size
        self._on_failure = on_failure

    @property
    def max_drafts(self) -> int | None:
        """The drafter's own limit; 0 after a failure."""
        if self._drafter is None:
            return 0
        try:
            most = self._drafter.max_drafts
            if most is not None and operator.index(most) < 0:
                raise ValueError(f"max_drafts must be None or at least 0, got {most}")
            return None if most is None else operator.index(most)
        except Exception as error:
            self._fail(error)
            return 0

    def begin(self, tokens: Sequence[int]) -> None:
        """See :class:`Drafter`."""
        self._call("begin", tokens)

    def resume(self, tokens: Sequence[int], most: int) -> int:
        """See :class:`specrun.drafters.base.Resuming`; ``most`` after a failure."""
        if self._drafter is None:
            return most
        try:
            rows = operator.index(resume(self._drafter, tokens, most))
            if not 0 <= rows <= most:
                raise ValueError(f"resume must return a number from 0 to {most}, got {rows}")
            return rows
        except Exception as error:
            self._fail(error)
            return most

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """See :class:`Drafter`."""
        self._call("observe", tokens, hidden)

    @property
    def needs_prompt_rows(self) -> bool:
        """The drafter's own; False where it says nothing of it."""
        try:
            return bool(getattr(self._drafter, "needs_prompt_rows", False))
        except Exception as error:
            self._fail(error)
            return False

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        """See :class:`Drafter`; at most ``count`` tokens, none after a failure."""
        drafter = self._drafter
        if drafter is None:
            return Proposal([])
        try:
            return _checked(drafter.propose(count, sampler), count, self._vocab_size)
        except Exception as error:
            self._fail(error)
            return Proposal([])

    def truncate(self, length: int) -> None:
        """See :class:`Drafter`."""
        self._call("truncate", length)

    def _call(self, verb: str, *arguments: Any) -> Any:
        if self._drafter is None:
            return None
        try:
            return getattr(self._drafter, verb)(*arguments)
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        self._drafter = None
        self._on_failure(error)


def _checked(given: Proposal | Sequence[int], count: int, vocab_size: int) -> Proposal:
    """Token ids, at most ``count``; every token can come from what it was drawn from."""
    tokens, q = given if isinstance(given, Proposal) else (given, None)
    drafts = [operator.index(token) for token in itertools.islice(tokens, count)]
    for token in drafts:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} was drafted, ids are 0 to {vocab_size - 1}")
    if q is None:
        return Proposal(drafts)
    distributions = list(itertools.islice(q, count))
    if len(distributions) != len(drafts):
        raise ValueError(f"{len(drafts)} tokens were drawn from {len(distributions)} distributions")
    for token, distribution in zip(drafts, distributions, strict=True):
        if not distribution.of(token) > 0:
            raise ValueError(f"token {token} was drafted and has probability 0")
    return Proposal(drafts, distributions)
