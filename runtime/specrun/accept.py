"""Acceptance: which drafts stand, and the target's own token behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    """``count`` drafts stand, then comes ``token``: the correction, or the bonus after all."""

    count: int
    token: int


def accept_greedy(proposal: Sequence[int], argmax: Sequence[int]) -> Accepted:
    """Accept while the draft equals the target's argmax.

    ``argmax[i]`` is the target's token after the last committed one and ``proposal[:i]``, for
    ``i`` in ``0 .. len(proposal)``::

        count = first i with proposal[i] != argmax[i], or len(proposal)
        token = argmax[count]

    >>> accept_greedy([7, 8, 9], [7, 8, 1, 4])
    Accepted(count=2, token=1)
    """
    count = 0
    for draft, wanted in zip(proposal, argmax, strict=False):
        if draft != wanted:
            break
        count += 1
    return Accepted(count, argmax[count])
