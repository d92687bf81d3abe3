"""What drafts and target steps cost, learned from the rounds of generations as they run.

For where ``specrun tune`` was not run. Times vary with whatever else the machine does, and what is
learned decides what is drafted, so with learned costs two runs of one request may draft
differently; the text of a greedy request does not depend on it, that of a sampled one does.
"""

from __future__ import annotations

from collections import deque

from specrun.costs import StepCosts

WINDOW = 9  # samples per number of drafts
MEMORY = 512  # rounds after which a sample says nothing any more: the context has grown

FEW, EVERY = 3, 16  # samples of a width up to which each one counts; rounds, beyond
PLAIN_STEPS = (0, 8, 24)  # rounds from which on a first, second and third plain step is due


class LearnedCosts:
    """Seconds of the drafter and of the target's step by drafts of a round.

    An engine keeps one per method and gives it to every generation.
    """

    def __init__(self) -> None:
        self.version = 0  # changes when estimate() may say something else than before
        self._rounds = 0
        # Drafts -> (round, draft seconds, verify seconds), the latest last.
        self._samples: dict[int, deque[tuple[int, float, float]]] = {}

    def observe(self, drafted: int, draft_seconds: float, verify_seconds: float) -> None:
        """A round verified ``drafted`` drafts and took that long."""
        self._rounds += 1
        samples = self._samples.setdefault(drafted, deque(maxlen=WINDOW))
        samples.append((self._rounds, draft_seconds, verify_seconds))
        if len(samples) <= FEW or self._rounds % EVERY == 0:
            self.version += 1

    def missing(self, start: int) -> int | None:
        """Drafts to ask for so that costs are known, or None where they are.

        A proposal of ``start`` tokens first, then a plain step. Without a proposal there is nothing
        to pay for, so ``start`` is asked for until there is one. The first step of every width
        takes longer than others, so the plain step is repeated after a while.
        """
        if all(drafted == 0 for drafted in self._samples):
            return start
        plain = len(self._samples.get(0, ()))
        due = plain < len(PLAIN_STEPS) and self._rounds >= PLAIN_STEPS[plain]
        return 0 if due else None

    def estimate(self) -> StepCosts:
        """The costs as far as they are known. Call it when nothing is missing."""
        draft: dict[int, float] = {}
        verify: dict[int, float] = {}
        for drafted in sorted(self._samples, reverse=True):
            samples = self._samples[drafted]
            if drafted and samples[-1][0] < self._rounds - MEMORY and len(self._samples) > 2:
                continue
            draft[drafted] = _typical([sample[1] for sample in samples])
            # More rows never cost less: what says so is the first, slow run of a width.
            steps = _typical([sample[2] for sample in samples])
            verify[1 + drafted] = min([steps, *verify.values()])
        return StepCosts(draft, verify)


def _typical(samples: list[float]) -> float:
    """The median, of two the smaller: noise only ever adds time."""
    return sorted(samples)[(len(samples) - 1) // 2]
