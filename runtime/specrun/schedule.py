"""How many tokens to draft in the next round: one rule per name.

``constant``             always the same
``heuristic``            2 more after a proposal that was accepted entirely, 1 less after a
                         rejection; the engine keeps the number for the next generation
``heuristic_transient``  the same, from the given number in every generation
``auto``                 what gives most tokens per second, nothing included: see
                         :mod:`specrun.auto_schedule`

The heuristic is that of transformers (``update_candidate_strategy`` in
``generation/candidate_generator.py``) but for two things: a proposal shorter than asked for that
was accepted entirely changes nothing, where transformers adds 2 (an empty one, too); and the
number never exceeds what the drafter can draft.
"""

from __future__ import annotations

from typing import Protocol

from specrun.auto_schedule import AutoSchedule
from specrun.costs import StepCosts
from specrun.learned_costs import LearnedCosts
from specrun.options import ScheduleName
from specrun.outcome import Outcome


class Schedule(Protocol):
    """Decides the length of every proposal of a generation, from what came of those before."""

    @property
    def num_draft(self) -> int:
        """Tokens to draft in the coming round; 0: none, a plain step."""
        ...

    def update(self, outcome: Outcome) -> None:
        """A round that drafted for ``num_draft`` is over; called after plain steps, too."""
        ...


def make_schedule(
    name: ScheduleName,
    num_draft: int,
    *,
    costs: StepCosts | LearnedCosts | None = None,
    most: int | None = None,
) -> Schedule:
    """The schedule called ``name``, for one generation.

    ``num_draft``: where it starts, 0: nothing is ever drafted. ``most``: that can be drafted, None:
    any number. ``costs``, for ``auto``: as measured on this device, or those that earlier
    generations have learned, which it goes on to learn (None: it learns its own).
    """
    if name == "auto" and num_draft > 0:
        return AutoSchedule(costs or LearnedCosts(), start=num_draft, most=most)
    return _ByRule("constant" if num_draft == 0 else name, num_draft, most)


class _ByRule:
    """A number that :func:`next_num_draft` changes."""

    def __init__(self, name: ScheduleName, num_draft: int, most: int | None) -> None:
        self.name: ScheduleName = name
        self.num_draft = num_draft
        self._most = most

    def update(self, outcome: Outcome) -> None:
        """See :class:`Schedule`; the times do not matter."""
        limits = [most for most in (self._most, outcome.most) if most is not None]
        self.num_draft = next_num_draft(
            self.name,
            self.num_draft,
            drafted=outcome.drafted,
            accepted=outcome.accepted,
            most=min(limits, default=None),
        )


def next_num_draft(
    schedule: ScheduleName, num_draft: int, *, drafted: int, accepted: int, most: int | None
) -> int:
    """``num_draft`` of the next round, after one that drafted and accepted that many.

    ``constant`` keeps it. ``heuristic`` and ``heuristic_transient``: 2 more when a proposal of full
    length was accepted entirely, 1 less when a draft was rejected, never below 1 or above ``most``.
    A shorter proposal that was accepted entirely (an empty one too) tells nothing and changes
    nothing.

    >>> next_num_draft("heuristic", 5, drafted=5, accepted=5, most=None)
    7
    >>> next_num_draft("heuristic", 5, drafted=5, accepted=2, most=None)
    4
    """
    if schedule == "constant":
        return num_draft
    if accepted < drafted:
        return max(1, num_draft - 1)
    if drafted == 0 or drafted < num_draft:
        return num_draft
    return num_draft + 2 if most is None else min(most, num_draft + 2)
