"""A drafter that may fail: the loop goes on without it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from specrun.drafters.base import Drafter


class GuardedDrafter:
    """Passes the verbs on. When one raises, ``on_failure(error)`` is called once (it may raise
    in turn) and from then on nothing is proposed."""

    def __init__(self, drafter: Drafter, on_failure: Callable[[Exception], None]) -> None:
        self._drafter: Drafter | None = drafter
        self._on_failure = on_failure

    @property
    def max_drafts(self) -> int | None:
        """The drafter's own limit; 0 after a failure."""
        if self._drafter is None:
            return 0
        try:
            most = self._drafter.max_drafts
            return None if most is None else operator.index(most)
        except Exception as error:
            self._fail(error)
            return 0

    def begin(self, tokens: Sequence[int]) -> None:
        """See :class:`Drafter`."""
        self._call("begin", tokens)

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """See :class:`Drafter`."""
        self._call("observe", tokens, hidden)

    def propose(self, count: int) -> Sequence[int]:
        """See :class:`Drafter`; nothing after a failure."""
        proposal = self._call("propose", count)
        if proposal is None:
            return ()
        try:
            return [operator.index(token) for token in itertools.islice(proposal, count)]
        except Exception as error:
            self._fail(error)
            return ()

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
