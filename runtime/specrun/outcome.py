"""What a round came to, as schedules see it."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """A round that drafted for ``Schedule.num_draft``, or a plain step.

    ``asked``: what the drafter was asked for, less than that where the text or the target's room
    ends. ``drafted``: tokens that were verified, of which the first ``accepted`` stood. ``most``:
    what the drafter can draft at most, now. Seconds: of the drafter (all its verbs) and of the
    target's step in that round.
    """

    asked: int
    drafted: int
    accepted: int
    most: int | None
    draft_seconds: float
    verify_seconds: float
