"""Draft lengths: the rules, and ``auto`` in closed loop over simulated texts and cost tables."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from toys import Toy

import specrun
from specrun.auto_schedule import FIRST_CREDIT, SHARE, Acceptance, AutoSchedule
from specrun.costs import StepCosts, interpolate
from specrun.learned_costs import LearnedCosts
from specrun.options import ScheduleName
from specrun.outcome import Outcome
from specrun.schedule import Schedule, make_schedule

# The rules with a name in transformers.


def after(schedule: Schedule, *rounds: tuple[int, int], most: int | None = None) -> list[int]:
    """``num_draft`` before and after rounds of (drafted, accepted)."""
    numbers = [schedule.num_draft]
    for drafted, accepted in rounds:
        schedule.update(
            Outcome(
                asked=schedule.num_draft,
                drafted=drafted,
                accepted=accepted,
                most=most,
                draft_seconds=0.0,
                verify_seconds=1.0,
            )
        )
        numbers.append(schedule.num_draft)
    return numbers


def test_constant_never_changes() -> None:
    assert after(make_schedule("constant", 5), (5, 5), (5, 0), (2, 2), (0, 0)) == [5] * 5


@pytest.mark.parametrize("name", ["heuristic", "heuristic_transient"])
def test_heuristic(name: ScheduleName) -> None:
    def start(num_draft: int) -> Schedule:
        return make_schedule(name, num_draft)

    assert after(start(5), (5, 5), (7, 7)) == [5, 7, 9]
    assert after(start(5), (5, 0), (4, 3), (3, 0), (2, 0), (1, 0)) == [5, 4, 3, 2, 1, 1]
    assert after(start(5), (3, 3), (0, 0)) == [5, 5, 5]  # short and right: nothing changes
    assert after(start(5), (3, 2)) == [5, 4]
    assert after(start(5), (5, 5), (6, 6), most=6) == [5, 6, 6]


@pytest.mark.parametrize("name", ["constant", "heuristic", "heuristic_transient", "auto"])
def test_nothing_is_drafted_where_nothing_may_be(name: ScheduleName) -> None:
    assert after(make_schedule(name, 0), (0, 0), (0, 0), (0, 0)) == [0] * 4


# Costs.


def test_interpolation() -> None:
    points = {1: 10.0, 5: 14.0, 9: 30.0}
    assert interpolate(points, range(1, 10)) == [10, 11, 12, 13, 14, 18, 22, 26, 30]
    assert interpolate(points, [13]) == [30 + 4 * 20 / 8]  # beyond: the average slope
    assert interpolate({1: 5.0, 3: 4.0}, [0, 2, 9]) == [5.0, 4.5, 4.0]  # never falling
    assert interpolate({4: 2.0}, [1, 4, 8]) == [2.0] * 3


def test_costs_of_rounds() -> None:
    costs = StepCosts({1: 1.0, 3: 3.0}, {1: 10.0, 3: 12.0}, round_seconds=0.5)
    assert costs.rounds(3) == [10.5, 12.5, 14.5, 16.5]
    assert costs.draft(2) == 2 and costs.verify(2) == 11


@pytest.mark.parametrize(
    ("draft", "verify"),
    [
        ({}, {}),
        ({1: -1.0}, {1: 1.0}),
        ({}, {1: 0.0}),
        ({}, {1: float("nan")}),
        ({1: 1e999}, {1: 1}),
    ],
)
def test_costs_that_no_clock_measured(draft: dict[int, float], verify: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"verify_seconds must|seconds must be 0 or more"):
        StepCosts(draft, verify)


def test_learned_costs() -> None:
    learned = LearnedCosts()
    assert learned.missing(5) == 5
    learned.observe(0, 0.0, 10.0)
    assert learned.missing(5) == 5  # nothing was proposed
    learned.observe(5, 3.0, 20.0)
    assert learned.missing(5) is None
    for _ in range(4):
        learned.observe(5, 2.0, 15.0)  # the first run of a width was slow
    learned.observe(7, 2.5, 14.0)
    estimate = learned.estimate()
    assert estimate.draft_seconds == {7: 2.5, 5: 2.0, 0: 0.0}
    assert estimate.verify_seconds == {8: 14.0, 6: 14.0, 1: 10.0}
    learned.observe(5, 2.0, 15.0)
    assert learned.missing(5) == 0  # the plain step once more


def test_learned_costs_follow_a_growing_context() -> None:
    learned = LearnedCosts()
    for seconds in (1.0, 2.0):
        for _ in range(20):
            learned.observe(0, 0.0, seconds)
            learned.observe(4, 0.1, 1.2 * seconds)
    assert learned.estimate().verify_seconds == {1: 2.0, 5: pytest.approx(2.4)}


# Acceptance.


def rates(acceptance: Acceptance, count: int) -> list[float]:
    return [rate for rate, _ in acceptance.rates(count)]


def test_acceptance_of_independent_drafts() -> None:
    acceptance, generator = Acceptance(8), random.Random(1)
    for _ in range(500):
        acceptance.observe(8, 8, run_of(generator, 0.8, 8))
    assert rates(acceptance, 8) == pytest.approx([0.8] * 8, abs=0.12)


def test_acceptance_of_copied_passages() -> None:
    """Half of the proposals are wrong from the first draft, half are right to the last."""
    acceptance, generator = Acceptance(8), random.Random(1)
    for _ in range(500):
        acceptance.observe(8, 8, 8 * generator.randrange(2))
    first, *later = rates(acceptance, 8)
    assert first == pytest.approx(0.5, abs=0.15)
    assert min(later) > 0.97


def test_acceptance_behind_a_rejection_is_another_one() -> None:
    """Four proposals stand entirely, four do not at all, and so on."""
    acceptance = Acceptance(8)
    for index in range(400):
        acceptance.observe(8, 8, 8 * (index // 4 % 2))
    assert rates(acceptance, 1)[0] == pytest.approx(0.75, abs=0.1)  # the last ones stood
    acceptance.observe(8, 8, 0)
    assert rates(acceptance, 1)[0] == pytest.approx(0.25, abs=0.1)


def test_places_that_are_not_proposed_are_not_paid_for() -> None:
    acceptance = Acceptance(4)
    for index in range(400):
        acceptance.observe(4, 4 * (index % 2), 4 * (index % 2))
    proposed = [proposes for _, proposes in acceptance.rates(4)]
    assert proposed == pytest.approx([0.5, 1.0, 1.0, 1.0], abs=0.05)


def test_counts_stay_finite() -> None:
    acceptance = Acceptance(4)
    for _ in range(100_000):
        acceptance.skip()
    acceptance.observe(4, 4, 4)
    assert rates(acceptance, 4)[0] == pytest.approx((1 + 0.6 * 2) / 3)


def run_of(generator: random.Random, rate: float, most: int) -> int:
    return next((i for i in range(most) if generator.random() >= rate), most)


# auto in closed loop. A text is a list of places; the drafter proposes there or not, and a draft
# for the place is right or not. Times in plain steps of the target.


class Place(NamedTuple):
    right: bool
    proposes: bool = True


Text = list[Place]
MakeText = Callable[[int, random.Random], Text]


def independent(rate: float) -> MakeText:
    return lambda length, r: [Place(r.random() < rate) for _ in range(length)]


def switching(period: int, low: float, high: float) -> MakeText:
    def make(length: int, r: random.Random) -> Text:
        return [Place(r.random() < (high if i // period % 2 else low)) for i in range(length)]

    return make


def copying(new: int, copied: int, matches: float = 0.4, hits: float = 0.15) -> MakeText:
    """Prompt lookup: gaps with few matches, few of them right, then a passage that stood before."""

    def make(length: int, r: random.Random) -> Text:
        text: Text = []
        while len(text) < length:
            for _ in range(max(1, int(r.expovariate(1 / new)))):
                text.append(Place(r.random() < hits, r.random() < matches))
            text += [Place(False)] * 2
            text += [Place(True)] * max(4, int(r.expovariate(1 / copied)))
        return text[:length]

    return make


TEXTS = {
    "wrong": independent(0.05),
    "doubtful": independent(0.2),
    "middling": independent(0.4),
    "good": independent(0.6),
    "better": independent(0.75),
    "very good": independent(0.9),
    "oracle": independent(1.1),
    "switching": switching(100, 0.05, 0.85),
    "switching fast": switching(25, 0.05, 0.85),
    "copying": copying(40, 30),
    "copying rarely": copying(200, 15),
    "copying, few matches": copying(40, 30, matches=0.1, hits=0.05),
}
# Rows -> milliseconds of SmolLM2-135M on two cores: in fp32, int4 and W8A8.
STEPS = {
    "flat": {1: 23.0, 5: 28.0, 8: 32.0, 16: 39.0, 64: 91.0},
    "steep": {1: 7.0, 5: 14.0, 8: 19.0, 16: 33.0, 64: 116.0},
    "flatter": {1: 8.0, 5: 10.0, 8: 12.0, 16: 14.0, 64: 36.0},
}
# Drafts -> plain steps.
DRAFTS = {
    "free": {0: 0.002, 32: 0.002},
    "one run": {1: 0.08, 32: 1.01},
    "light": {32: 3.2},
    "heavy": {32: 9.6},
}
OVERHEAD = 0.01
FIXED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


def costs_of(steps: str, drafts: str) -> StepCosts:
    plain = STEPS[steps][1]
    return StepCosts(
        DRAFTS[drafts], {rows: ms / plain for rows, ms in STEPS[steps].items()}, OVERHEAD
    )


@dataclass
class Simulated:
    """What a schedule took for a text, and the drafts it asked for."""

    seconds: float
    asked: list[int]


def simulate(text: Sequence[Place], costs: StepCosts, schedule: Schedule) -> Simulated:
    drafts = [costs.draft(k) for k in range(33)]
    steps = [costs.verify(1 + k) for k in range(33)]
    at, seconds, asked = 0, 0.0, []
    while at < len(text):
        wanted = min(schedule.num_draft, len(text) - at - 1)
        asked.append(schedule.num_draft)
        drafted = wanted if wanted and text[at].proposes else 0
        accepted = 0
        while accepted < drafted and text[at + accepted].right:
            accepted += 1
        seconds += drafts[drafted] + steps[drafted] + costs.round_seconds
        if wanted or not schedule.num_draft:
            schedule.update(
                Outcome(
                    asked=wanted,
                    drafted=drafted,
                    accepted=accepted,
                    most=None,
                    draft_seconds=drafts[drafted],
                    verify_seconds=steps[drafted],
                )
            )
        at += accepted + 1
    return Simulated(seconds, asked)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(("steps", "drafts"), itertools.product(STEPS, DRAFTS))
def test_auto_is_near_the_best(steps: str, drafts: str, learns: bool) -> None:
    """At most 3 % slower than plain decoding where that is best, else 5 % than the best fixed k."""
    costs = costs_of(steps, drafts)
    for name, make in TEXTS.items():
        if name.startswith("copying") and drafts != "free":
            continue
        plain = auto = 0.0
        fixed = dict.fromkeys(FIXED, 0.0)
        for seed in range(4):
            text = make(600, random.Random(seed))
            known = LearnedCosts() if learns else costs
            auto += simulate(text, costs, AutoSchedule(known, start=5)).seconds
            plain += simulate(text, costs, make_schedule("constant", 0)).seconds
            for k in FIXED:
                fixed[k] += simulate(text, costs, make_schedule("constant", k)).seconds
        if min(fixed.values()) >= plain:
            assert auto <= 1.03 * plain, name
        else:
            assert auto <= 1.05 * min(fixed.values()), (name, auto / min(fixed.values()))


class Lure:
    """Accepts single drafts and rejects longer proposals; or the other way round."""

    def __init__(self, accepts_short: bool) -> None:
        self.accepts_short = accepts_short

    def accepted(self, drafted: int) -> int:
        return drafted if (drafted == 1) == self.accepts_short else 0


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("seed", range(4))
def test_no_drafter_can_make_auto_lose_more_than_the_credit(drafts: str, seed: int) -> None:
    """Whatever is accepted when: here the worst that is found by moods of random length."""
    costs, generator = costs_of("steep", drafts), random.Random(seed)
    schedule = AutoSchedule(costs, start=5)
    rounds = costs.rounds(32)
    lost = 0.0
    tokens = left = 0
    mood: Callable[[int], int] = Lure(True).accepted
    while tokens < 2000:
        if left == 0:
            moods = [Lure(True).accepted, Lure(False).accepted, lambda k: k, lambda k: 0]
            mood, left = generator.choice(moods), generator.randrange(1, 30)
        left -= 1
        drafted = schedule.num_draft
        accepted = mood(drafted)
        lost += rounds[drafted] / rounds[0] - (1 + accepted)
        tokens += 1 + accepted
        schedule.update(
            Outcome(
                asked=drafted,
                drafted=drafted,
                accepted=accepted,
                most=None,
                draft_seconds=0.0,
                verify_seconds=1.0,
            )
        )
        assert lost <= FIRST_CREDIT + SHARE * tokens + 1e-9


def test_auto_leaves_off_and_comes_back() -> None:
    costs = costs_of("flat", "light")
    text = [Place(False)] * 300 + [Place(True)] * 100
    asked = simulate(text, costs, AutoSchedule(costs, start=5)).asked
    off = asked[10:290]
    assert set(off) == {0, 1} and off.count(1) < 0.2 * len(off)  # probes
    assert max(asked[-3:]) >= 8
    assert len(asked) < 300 + 30


def test_a_probe_waits_longer_where_the_drafter_must_catch_up() -> None:
    cheap = StepCosts({32: 3.2}, {1: 1.0, 33: 2.0})
    dear = StepCosts({32: 3.2}, {1: 1.0, 33: 2.0}, catch_up_seconds=0.01)
    text = [Place(False)] * 1000
    probes = [
        sum(simulate(text, costs, AutoSchedule(costs, start=5)).asked[10:])
        for costs in (cheap, dear)
    ]
    assert 0 < probes[1] < 0.75 * probes[0]


def test_auto_stays_within_what_the_drafter_can() -> None:
    costs = costs_of("flatter", "free")
    schedule = make_schedule("auto", 5, costs=costs, most=6)
    assert max(after(schedule, *[(6, 6)] * 20)) == 6
    assert after(schedule, (6, 6), (0, 0), most=0)[-1] == 0  # it failed


def test_auto_with_measured_costs_does_not_look_at_the_clock() -> None:
    costs = costs_of("flat", "one run")
    text = TEXTS["good"](300, random.Random(3))

    class Jittery:
        """Passes on other times."""

        def __init__(self) -> None:
            self.inner = AutoSchedule(costs, start=5)

        @property
        def num_draft(self) -> int:
            return self.inner.num_draft

        def update(self, outcome: Outcome) -> None:
            draft, verify = random.random(), random.random()
            self.inner.update(outcome._replace(draft_seconds=draft, verify_seconds=verify))

    plain = simulate(text, costs, AutoSchedule(costs, start=5)).asked
    assert simulate(text, costs, Jittery()).asked == plain


def test_auto_learns_from_a_start_of_its_own() -> None:
    """Without costs: the number given, a plain step, and then what pays."""
    costs = costs_of("flatter", "free")
    learned = LearnedCosts()
    asked = simulate([Place(True)] * 200, costs, make_schedule("auto", 5, costs=learned)).asked
    assert asked[:2] == [5, 0] and max(asked) == 32
    again = simulate([Place(True)] * 200, costs, make_schedule("auto", 5, costs=learned)).asked
    assert again[0] not in (0, 5)  # another generation knows the costs


def test_auto_in_the_loop(open_toy: Callable[..., specrun.Engine]) -> None:
    """The tokens are those of plain decoding."""
    toy = Toy(drafter=True)
    result = open_toy(toy).generate(
        [1], num_assistant_tokens_schedule="auto", max_new_tokens=120, strict=True
    )
    assert result.tokens == toy.plain([1], 120)
    assert result.stats.num_draft_by_round[:2] == (3, 0)
