"""The drafter of plain decoding: proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from specrun.drafters.base import Proposal
from specrun.sampling import Sampler


class NoDrafter:
    """Plain decoding is the same loop with empty proposals."""

    max_drafts: int | None = 0
    needs_prompt_rows = False

    def begin(self, tokens: Sequence[int]) -> None:
        """Nothing to do."""

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """Nothing to do."""

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        """Nothing."""
        return Proposal([])

    def truncate(self, length: int) -> None:
        """Nothing to do."""
