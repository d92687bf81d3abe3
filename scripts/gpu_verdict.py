"""What a check of gpu_check.py found: a verdict with the reason, and numbers. Standard library."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

PASSED: Literal["passed"] = "passed"
FAILED: Literal["failed"] = "failed"
NOT_HERE: Literal["not available here"] = "not available here"
Word = Literal["passed", "failed", "not available here"]


class NotHere(Exception):
    """A package or a device is missing; the message names it."""


@dataclass(frozen=True)
class Verdict:
    """``reasons``: what differs, or what is missing. ``notes``: what was seen. ``figures``: in the
    unit that the name ends with. ``seconds``: that the part took."""

    part: str
    verdict: Word
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> Verdict:
        """What ``json`` gave."""
        lists = {name: tuple(said[name]) for name in ("reasons", "notes")}
        return cls(**said | lists)

    def json(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return asdict(self)


@dataclass
class Found:
    """Filled by a check as it goes. It fails if there is any of ``failures``."""

    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def expect(self, true: bool, otherwise: str) -> None:
        """A failure ``otherwise``, unless ``true``."""
        if not true:
            self.failures.append(otherwise)

    def at_most(self, value: float, limit: float, what: str) -> None:
        """A failure where ``value`` is above ``limit``, or no number."""
        self.expect(value <= limit, f"{what} differs by {value:.2e}, allowed is {limit:.1e}")

    def keep_worst(self, name: str, value: float) -> None:
        """The largest of a figure that is seen many times; what is no number stays."""
        self.figures[name] = value if value != value else max(self.figures.get(name, 0.0), value)

    def verdict(self, part: str, seconds: float) -> Verdict:
        """The verdict of ``part``."""
        word = FAILED if self.failures else PASSED
        return Verdict(
            part, word, tuple(self.failures), tuple(self.notes), dict(self.figures), seconds
        )
