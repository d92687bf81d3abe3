"""The schedule ``auto``: as many drafts as give most tokens per second, none where that is best.

A round with k drafts gives ``1 + E[accepted | k]`` tokens and takes ``d(k) + v(1 + k) + o``
seconds: drafting, the target's step over 1 + k rows, and what the loop adds. :class:`Acceptance`
estimates the former from the rounds so far, the costs are measured (``specrun tune``) or learned;
the k with the largest quotient is drafted. With measured costs nothing depends on the clock, so
the same text and seed give the same proposals.

What drafting may lose against plain decoding is bounded by two accounts, in plain steps:

* **credit** starts at a few steps, grows with every token by ``SHARE`` and by what a round gained
  over plain steps, shrinks by what it lost, and has a ceiling. A round may not risk more than the
  credit, so a text of n tokens loses at most ``FIRST_CREDIT + SHARE * n`` plain steps, whatever the
  drafter proposes: less than 3 % from 200 tokens on.
* **savings** for probes. While drafting is off, a share of every token is put by; when it covers
  the loss of a rejected draft, one token is drafted. What such a probe gains comes back, so that
  a text that has changed is noticed within a few rounds; until it changes, cheap drafters are
  tried every few rounds and expensive ones after dozens.

The constants were chosen by simulation over the cost tables and acceptance processes of
``tests/test_schedule.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from specrun.costs import StepCosts
from specrun.learned_costs import LearnedCosts
from specrun.outcome import Outcome

MOST = 32  # drafts, for a drafter that has no limit of its own

# Acceptance.
DECAY = 0.97  # of what was counted, per round
PRIOR = 0.6  # acceptance of a first draft before any was seen
PRIOR_WEIGHT = 2.0  # drafts; also of the first draft's rate as prior of the later ones
FIRST_WEIGHT = 4.0  # drafts, of the rate of all first drafts as prior of those behind either
PLACE_WEIGHT = 12.0  # drafts, of the rate of all later drafts as prior of each place's own

# Accounts, in plain steps.
SHARE = 0.02  # of plain decoding's time that may be spent on finding out
FIRST_CREDIT = 2.0
MOST_CREDIT = 8.0
SAVINGS = 1.5  # losses of one probe that can be put by
MARGIN = 0.01  # that drafting must be better than a plain step

FIRST_REACH = 8  # drafts, before it is known how many are accepted
LEAST_REACH = 4
HEAVY = 1e9  # weight of an observation at which counts are scaled down
NEGLIGIBLE = 0.01  # probability that a draft is reached, below which more need not be considered


class Acceptance:
    """How often drafts are accepted, place by place, and proposed at all.

    The rate of place i is that of drafts at i whose predecessors were accepted; a draft that was
    asked for and not proposed counts as rejected. The first draft has rates of its own, for where
    a text is copied the first draft is the doubtful one, above all after a rejection: one behind
    a proposal that stood entirely, one behind others. All later drafts share a rate, which is the
    prior of each place's. Counts decay by rounds, of plain steps too, so that old ones give way.
    """

    def __init__(self, most: int) -> None:
        places = most + 1  # entry 0 is not used
        self._tried, self._stood = [0.0] * places, [0.0] * places
        self._asked, self._proposed = [0.0] * places, [0.0] * places
        self._later_tried = self._later_stood = 0.0
        # Of first drafts behind a proposal that did not stand entirely, and one that did.
        self._first_tried, self._first_stood = [0.0, 0.0], [0.0, 0.0]
        self._entire = False
        # What a new observation counts. It grows by 1 / DECAY a round: the same as if all others
        # shrank, without touching them.
        self._weight = 1.0
        self._longest = float(FIRST_REACH)

    def skip(self) -> None:
        """A round without drafts."""
        self._weight /= DECAY

    def observe(self, asked: int, drafted: int, accepted: int) -> None:
        """A round that asked for so many drafts, got some, and had the first of them accepted."""
        self._weight /= DECAY
        if self._weight > HEAVY:
            self._rescale()
        weight = self._weight
        for place in range(1, min(asked, drafted + 1) + 1):
            self._asked[place] += weight
            self._proposed[place] += weight * (place <= drafted)
        for place in range(1, min(asked, accepted + 1) + 1):
            self._tried[place] += weight
            self._stood[place] += weight * (place <= accepted)
        self._first_tried[self._entire] += weight
        self._first_stood[self._entire] += weight * (accepted > 0)
        self._entire = 0 < drafted == accepted
        self._later_tried += weight * max(0, min(asked, accepted + 1) - 1)
        self._later_stood += weight * max(0, accepted - 1)
        self._longest = max(DECAY * self._longest, accepted)

    @property
    def reach(self) -> int:
        """Places worth considering: about twice as many as were accepted of late."""
        return max(LEAST_REACH, int(2 * self._longest) + 2)

    def rates(self, count: int) -> Iterator[tuple[float, float]]:
        """For places 1 to ``count``: the rate of acceptance, and that a draft is proposed there
        where there is one at the place before."""
        few, many = PRIOR_WEIGHT * self._weight, PLACE_WEIGHT * self._weight
        first = (self._stood[1] + few * PRIOR) / (self._tried[1] + few)
        later = (self._later_stood + few * first) / (self._later_tried + few)
        some = FIRST_WEIGHT * self._weight
        first = self._first_stood[self._entire] + some * first
        first /= self._first_tried[self._entire] + some
        for place in range(1, count + 1):
            rate = first
            if place > 1:
                rate = (self._stood[place] + many * later) / (self._tried[place] + many)
            proposed = self._proposed[place] + self._weight
            yield rate, proposed / (self._asked[place] + self._weight)

    def _rescale(self) -> None:
        places = (self._tried, self._stood, self._asked, self._proposed)
        for counts in (*places, self._first_tried, self._first_stood):
            counts[:] = [count / self._weight for count in counts]
        self._later_tried /= self._weight
        self._later_stood /= self._weight
        self._weight = 1.0


class AutoSchedule:
    """See the module. ``start``: drafts of the first round while the costs are not known;
    ``most``: of any round."""

    def __init__(
        self, costs: StepCosts | LearnedCosts, *, start: int, most: int | None = None
    ) -> None:
        self._most = MOST if most is None else most
        self._start = min(start, self._most)
        self._learned = costs if isinstance(costs, LearnedCosts) else None
        self._acceptance = Acceptance(self._most)
        self._priced = -1  # version of the learned costs in use
        self._credit = FIRST_CREDIT
        self._savings = 0.0
        self._off = False  # a plain step was found best; drafts are probes
        self._behind = 0  # plain steps since the drafter last drafted
        self._losses: list[float] = []  # [k]: plain steps lost by k drafts, all rejected
        self._behind_loss = 0.0  # per token that the drafter has to catch up
        if isinstance(costs, StepCosts):
            self._price(costs)
        self.num_draft = self._next(self._most)

    def update(self, outcome: Outcome) -> None:
        """See :class:`specrun.schedule.Schedule`."""
        asked = outcome.asked
        if self._learned is not None:
            self._learned.observe(outcome.drafted, outcome.draft_seconds, outcome.verify_seconds)
        if self._losses:
            self._book(asked, outcome.drafted, outcome.accepted)
        if asked:
            self._acceptance.observe(asked, outcome.drafted, outcome.accepted)
            self._behind = 0
        else:
            self._acceptance.skip()
            self._behind += 1
        self.num_draft = self._next(
            self._most if outcome.most is None else min(self._most, outcome.most)
        )

    def _next(self, most: int) -> int:
        if self._learned is not None:
            missing = self._learned.missing(self._start)
            if missing is not None:
                return min(missing, most)
            if self._priced != self._learned.version:
                self._priced = self._learned.version
                self._price(self._learned.estimate())
        if not self._off:
            best = self._best(most)
            if best:
                return best
            self._off = True
        elif self._behind == 0:  # the round before was a probe: does it pay again?
            best = self._best(most)
            self._off = best == 0
            if best:
                return best
        return self._probe(most)

    def _best(self, most: int) -> int:
        """The number of drafts with most tokens per second that the credit allows."""
        tokens, steps = 1.0, 1.0
        best, best_rate = 0, 1.0 + MARGIN
        reached = proposed = 1.0
        count = min(most, self._acceptance.reach)
        for k, (rate, proposes) in enumerate(self._acceptance.rates(count), 1):
            if self._losses[k] > self._credit:
                break
            reached *= rate
            proposed *= proposes
            tokens += reached
            steps += proposed * (self._losses[k] - self._losses[k - 1])
            if tokens / steps > best_rate:
                best, best_rate = k, tokens / steps
            if reached < NEGLIGIBLE:
                break
        return best

    def _probe(self, most: int) -> int:
        """1 where the savings cover a draft that is rejected, else 0."""
        if most < 1:
            return 0
        loss = self._losses[1] + self._behind * self._behind_loss
        self._savings = min(self._savings, SAVINGS * max(loss, SHARE))
        return int(loss <= self._savings and loss <= self._credit)

    def _book(self, asked: int, drafted: int, accepted: int) -> None:
        """Enter what a round gained or lost into the accounts."""
        gain = accepted - self._losses[drafted]
        if asked:
            gain -= self._behind * self._behind_loss
        share = SHARE * (1 + accepted)
        self._credit = min(MOST_CREDIT, self._credit + share + gain)
        self._savings = self._savings + share + (gain if asked else 0.0) if self._off else 0.0

    def _price(self, costs: StepCosts) -> None:
        """All costs in plain steps of the loop, beyond the one that every round is."""
        rounds = costs.rounds(self._most)
        self._losses = [seconds / rounds[0] - 1 for seconds in rounds]
        self._behind_loss = costs.catch_up_seconds / rounds[0]
