"""What the loop asks of a drafter: four verbs and a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray


class Drafter(Protocol):
    """Proposes tokens that may follow the committed ones. It is told everything committed.

    Per call: ``begin`` once, ``observe`` with the first token; then in every round ``propose``
    (unless nothing may be drafted), ``truncate`` and ``observe``.
    """

    @property
    def max_drafts(self) -> int | None:
        """Most tokens that one proposal can hold; None: any number."""
        ...

    def begin(self, tokens: Sequence[int]) -> None:
        """Start over with a prompt; the target has it in its KV."""
        ...

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """``tokens`` are committed now; the last of them is not in the target's KV yet.

        ``hidden`` ``[1, hidden size]``: the target's hidden state at the row that gave the last
        token, a view that the next target run overwrites.
        """
        ...

    def propose(self, count: int) -> Sequence[int]:
        """Up to ``count`` tokens (at least 1) that may follow; fewer or none is fine."""
        ...

    def truncate(self, length: int) -> None:
        """Only the first ``length`` tokens of what was committed and proposed stand."""
        ...
