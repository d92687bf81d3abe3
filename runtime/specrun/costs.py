"""What a round costs on one machine: drafting so many tokens, verifying so many rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MIN_SECONDS, MAX_SECONDS = 1e-9, 1e6  # of a step; less and more are no measurement


@dataclass(frozen=True)
class StepCosts:
    """Seconds, for one method at one length of context.

    ``draft_seconds``: tokens drafted -> all that the drafter does in such a round, 0 included.
    ``verify_seconds``: rows -> a step of the target. ``round_seconds``: what else a round takes.
    ``catch_up_seconds``: what drafting costs more for every token that was committed without it.
    """

    draft_seconds: Mapping[int, float]
    verify_seconds: Mapping[int, float]
    round_seconds: float = 0.0
    catch_up_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.verify_seconds:
            raise ValueError("verify_seconds must not be empty")
        extra = (self.round_seconds, self.catch_up_seconds)
        for value in (*self.draft_seconds.values(), *self.verify_seconds.values(), *extra):
            if not 0 <= value <= MAX_SECONDS:
                raise ValueError(f"seconds must be 0 or more, got {value}")
        if min(self.verify_seconds.values()) < MIN_SECONDS:
            raise ValueError(f"verify_seconds must be at least {MIN_SECONDS:g}")

    def draft(self, count: int) -> float:
        """Seconds of a round's drafting of ``count`` tokens."""
        return interpolate({0: 0.0, **self.draft_seconds}, [count])[0]

    def verify(self, rows: int) -> float:
        """Seconds of a target step over ``rows`` rows."""
        return interpolate(self.verify_seconds, [rows])[0]

    def rounds(self, most: int) -> list[float]:
        """Seconds of whole rounds with 0 to ``most`` drafts."""
        drafts = interpolate({0: 0.0, **self.draft_seconds}, range(most + 1))
        steps = interpolate(self.verify_seconds, range(1, most + 2))
        return [a + b + self.round_seconds for a, b in zip(drafts, steps, strict=True)]


def interpolate(points: Mapping[int, float], places: Iterable[int]) -> list[float]:
    """The values at ``places``, ascending: linear between ``points``; before the first one its
    value; beyond the last one on with the average slope, but never falling."""
    known = sorted(points.items())
    (first, least), (last, most) = known[0], known[-1]
    slope = max(0.0, (most - least) / (last - first)) if last > first else 0.0
    values: list[float] = []
    index = 0
    for place in places:
        while index < len(known) and known[index][0] < place:
            index += 1
        if index == len(known):
            values.append(most + slope * (place - last))
        elif index == 0:
            values.append(least)
        else:
            (low, below), (high, above) = known[index - 1], known[index]
            values.append(below + (above - below) * (place - low) / (high - low))
    return values
