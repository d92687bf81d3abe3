"""How many tokens to draft in the next round. Pure: the loop holds the number."""

from __future__ import annotations

from specrun.options import ScheduleName


def next_num_draft(
    schedule: ScheduleName, num_draft: int, *, drafted: int, accepted: int, most: int | None
) -> int:
    """``num_draft`` of the next round, after one that drafted and accepted that many.

    ``constant`` keeps it. ``heuristic``: 2 more when a proposal of full length was accepted
    entirely, 1 less when a draft was rejected, never below 1 or above ``most``. A shorter
    proposal that was accepted entirely (an empty one too) tells nothing and changes nothing.

    >>> next_num_draft("heuristic", 5, drafted=5, accepted=5, most=None)
    7
    >>> next_num_draft("heuristic", 5, drafted=5, accepted=2, most=None)
    4
    """
    if schedule == "constant":
        return num_draft
    if accepted < drafted:
        return max(1, num_draft - 1)
    if drafted < num_draft:
        return num_draft
    return num_draft + 2 if most is None else min(most, num_draft + 2)
