"""Acceptance, greedy and sampled, and the schedules: pure functions against exact laws."""

from __future__ import annotations

import doctest
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrun import accept, schedule
from specrun.accept import (
    Accepted,
    accept_ensemble,
    accept_greedy,
    accept_sampled,
    acceptance,
    mix,
    residual,
)
from specrun.errors import UsageError
from specrun.options import ScheduleName
from specrun.sampling import Distribution, Sampler
from specrun.schedule import next_num_draft

Floats = NDArray[np.float64]


def dist(*probs: float) -> Distribution:
    return Distribution(np.array(probs, dtype=np.float64))


def sparse(probs: dict[int, float]) -> Distribution:
    return Distribution(np.array(list(probs.values())), np.array(list(probs), dtype=np.int64))


def never(*_: object) -> float:
    raise AssertionError("called")


@pytest.mark.parametrize(
    ("proposal", "argmax", "count", "token"),
    [
        ([], [3], 0, 3),
        ([3], [3, 4], 1, 4),
        ([3], [5, 4], 0, 5),
        ([1, 2, 3], [1, 2, 3, 4], 3, 4),
        ([1, 2, 3], [1, 2, 9, 4], 2, 9),
        ([1, 2, 3], [1, 9, 3, 4], 1, 9),  # right again after a wrong one does not count
        ([1, 2, 3], [9, 2, 3, 4], 0, 9),
    ],
)
def test_accept_greedy(proposal: list[int], argmax: list[int], count: int, token: int) -> None:
    assert accept_greedy(proposal, argmax) == Accepted(count, token)


# Residual and mix


def test_the_residual_of_known_distributions() -> None:
    """C18."""
    exact = residual(dist(0.5, 0.3, 0.2), dist(0.2, 0.6, 0.2))
    assert exact.dense(3).tolist() == [1.0, 0.0, 0.0]
    shared = residual(dist(0.5, 0.25, 0.25), dist(0.25, 0.75, 0.0))
    assert shared.dense(3).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (dist(0.25, 0.75), dist(0.25, 0.75)),  # equal
        (dist(0.0, 1.0), dist(0.0, 1.0)),  # both one-hot
        (dist(0.0, 1.0), Distribution.one_hot(1)),
        (Distribution.one_hot(1), Distribution.one_hot(1)),
        (Distribution.one_hot(7), sparse({3: 0.0, 7: 1.0})),
    ],
)
def test_an_empty_residual_falls_back_to_p(p: Distribution, q: Distribution) -> None:
    """C19."""
    assert residual(p, q) is p


def test_the_residual_of_a_fixed_draft_is_p_without_it() -> None:
    """C17."""
    assert residual(dist(0.5, 0.3, 0.2), Distribution.one_hot(0)).dense(3).tolist() == [0, 0.6, 0.4]
    left = residual(sparse({2: 0.5, 9: 0.25, 11: 0.25}), Distribution.one_hot(9))
    np.testing.assert_allclose(left.dense(12)[[2, 9, 11]], [2 / 3, 0, 1 / 3])
    assert residual(dist(0.5, 0.5), Distribution.one_hot(8)).dense(2).tolist() == [0.5, 0.5]


@st.composite
def distributions(draw: st.DrawFn) -> Distribution:
    """Of 1 to 6 tokens with exact fractions, zeros among them, dense or sparse."""
    weights = draw(st.lists(st.integers(0, 8), min_size=1, max_size=6).filter(any))
    probs = np.array(weights, dtype=np.float64) / sum(weights)
    kind = draw(st.sampled_from(["dense", "sparse", "sparse with zeros"]))
    if kind == "dense":
        return Distribution(probs)
    ids = np.array(
        sorted(draw(st.sets(st.integers(0, 7), min_size=probs.size, max_size=probs.size))),
        dtype=np.int64,
    )
    listed = np.flatnonzero(probs) if kind == "sparse" else np.arange(probs.size)
    return Distribution(probs[listed], ids[listed])


SIZE = 8
WEIGHTS = st.sampled_from([1.0, 0.9, 0.7, 0.5, 0.01])


def law(p: Distribution, q: Distribution, weight: float) -> Floats:
    """In closed form: the probability that a slot gives each token, accepted or corrected."""
    accepted = np.zeros(SIZE)
    for token in range(SIZE):
        if q.of(token) > 0:
            accepted[token] = q.of(token) * acceptance(token, p, q, weight)
    together: Floats = accepted + (1 - accepted.sum()) * residual(p, q).dense(SIZE)
    return together


@settings(deadline=None, max_examples=150)
@given(distributions(), distributions(), WEIGHTS)
def test_accepted_and_corrected_together_follow_the_mix(
    p: Distribution, q: Distribution, weight: float
) -> None:
    wanted = weight * p.dense(SIZE) + (1 - weight) * q.dense(SIZE)
    np.testing.assert_allclose(law(p, q, weight), wanted, atol=1e-12)
    np.testing.assert_allclose(mix(weight, p, q).dense(SIZE), wanted, atol=1e-15)


@settings(deadline=None, max_examples=150)
@given(distributions(), distributions())
def test_a_residual_is_a_distribution_within_p(p: Distribution, q: Distribution) -> None:
    left = residual(p, q)
    assert left.probs.sum() == pytest.approx(1, abs=1e-12) and (left.probs >= 0).all()
    assert not left.dense(SIZE)[p.dense(SIZE) == 0].any()
    if left is not p:
        assert not left.dense(SIZE)[p.dense(SIZE) <= q.dense(SIZE)].any()


@settings(deadline=None, max_examples=60)
@given(distributions(), distributions(), WEIGHTS)
def test_the_ensemble_has_the_residual_of_p(
    p: Distribution, q: Distribution, weight: float
) -> None:
    if np.abs(p.dense(SIZE) - q.dense(SIZE)).max() > 1e-9:
        mixed = residual(mix(weight, p, q), q)
        np.testing.assert_allclose(mixed.dense(SIZE), residual(p, q).dense(SIZE), atol=1e-10)


@settings(deadline=None, max_examples=60)
@given(distributions(), distributions())
def test_dense_and_sparse_say_the_same(p: Distribution, q: Distribution) -> None:
    dense_p, dense_q = Distribution(p.dense(SIZE)), Distribution(q.dense(SIZE))
    for left, right in ((p, dense_q), (dense_p, q), (p, q)):
        for one, other in (
            (residual(left, right), residual(dense_p, dense_q)),
            (mix(0.75, left, right), mix(0.75, dense_p, dense_q)),
        ):
            np.testing.assert_allclose(one.dense(SIZE), other.dense(SIZE), atol=1e-15, rtol=0)


# Which drafts stand

P, Q = dist(0.25, 0.25, 0.5, 0.0), dist(0.5, 0.125, 0.125, 0.25)


class Script:
    """p, random numbers and draws that write down what is asked of them."""

    def __init__(self, p: Distribution, uniforms: list[float]) -> None:
        self.p, self.uniforms = p, uniforms
        self.slots: list[int] = []
        self.drawn_from: list[Distribution] = []

    def at(self, slot: int) -> Distribution:
        self.slots.append(slot)
        return self.p

    def uniform(self) -> float:
        return self.uniforms.pop(0)

    def draw(self, distribution: Distribution) -> int:
        self.drawn_from.append(distribution)
        return distribution.argmax()


@pytest.mark.parametrize("rejected", range(4))
def test_nothing_behind_a_rejection_is_looked_at(rejected: int) -> None:
    """C21. Token 0 stands with probability p / q = 0.5."""
    script = Script(P, [0.49] * rejected + [0.5, 0.0, 0.0, 0.0])
    verdict = accept_sampled([0] * 4, [Q] * 4, script.at, script.uniform, script.draw)
    assert verdict == Accepted(rejected, 2)
    assert script.slots == list(range(rejected + 1))
    assert len(script.uniforms) == 3  # one for each draft that was looked at
    [left] = script.drawn_from
    assert left.dense(4).tolist() == [0, 0.25, 0.75, 0]


def test_all_stand_and_the_bonus_is_drawn_from_p() -> None:
    script = Script(P, [0.49, 0.999, 0.999])  # tokens 1 and 2 are more probable in p than in q
    verdict = accept_sampled([0, 1, 2], [Q] * 3, script.at, script.uniform, script.draw)
    assert verdict == Accepted(3, 2)
    assert script.slots == [0, 1, 2, 3] and script.drawn_from == [P]


def test_no_draft_is_a_plain_draw() -> None:
    proposals: list[list[Distribution] | None] = [None, []]
    for q in proposals:
        script = Script(P, [])
        assert accept_sampled([], q, script.at, never, script.draw) == Accepted(0, 2)
        assert script.drawn_from == [P]


def test_what_p_forbids_never_stands() -> None:
    script = Script(P, [0.0])
    verdict = accept_sampled([3], [Q], script.at, script.uniform, script.draw)
    assert verdict.count == 0


def test_a_fixed_draft_stands_with_its_probability() -> None:
    """C17."""
    for uniform, count in ((0.24, 1), (0.25, 0)):
        script = Script(P, [uniform])
        verdict = accept_sampled([0], None, script.at, script.uniform, script.draw)
        assert verdict.count == count
    assert script.drawn_from[0].dense(4) == pytest.approx([0, 1 / 3, 2 / 3, 0])


@pytest.mark.parametrize("q", [None, [dist(0.0, 1.0)]])
def test_a_certain_target(q: list[Distribution] | None) -> None:
    """C19: p and q one-hot. The only token stands for every random number; another never does."""
    certain = dist(0.0, 1.0)
    for uniform in (0.0, 1 - 2**-53):
        script = Script(certain, [uniform])
        verdict = accept_sampled([1], q, script.at, script.uniform, script.draw)
        assert verdict == Accepted(1, 1)
    script = Script(certain, [0.0])
    assert accept_sampled([0], None, script.at, script.uniform, script.draw) == Accepted(0, 1)


def test_a_draft_that_its_q_cannot_give_is_an_error() -> None:
    with pytest.raises(ValueError, match="token 2 has probability 0"):
        accept_sampled([2], [dist(0.5, 0.5, 0.0)], lambda slot: P, lambda: 0.0, never_draw)


def never_draw(distribution: Distribution) -> int:
    raise AssertionError(distribution)


# The static ensemble


@pytest.mark.parametrize("weight", [1.0, 0.7, 0.25])
def test_the_share_that_stands(weight: float) -> None:
    """C27: 1 - w * TV(p, q), in closed form and by draws (4 standard deviations)."""
    rng = np.random.default_rng(5)
    p, q = Distribution(rng.dirichlet(np.ones(5))), Distribution(rng.dirichlet(np.ones(5)))
    distance = np.abs(p.probs - q.probs).sum() / 2
    exact = sum(q.of(x) * acceptance(x, p, q, weight) for x in range(5))
    assert exact == pytest.approx(1 - weight * distance, abs=1e-12)
    sampler, runs = Sampler(do_sample=True, seed=3), 20000
    stood = sum(
        accept_sampled(
            [sampler.draw_from(q)],
            [q],
            lambda slot: p,
            sampler.uniform,
            sampler.draw_from,
            weight,
        ).count
        for _ in range(runs)
    )
    assert abs(stood / runs - exact) < 4 * np.sqrt(exact * (1 - exact) / runs) < 0.015


def test_weight_1_is_the_same_computation() -> None:
    """C27: the same random numbers, bitwise the same result."""

    def tokens(**options: Any) -> list[Accepted]:
        sampler = Sampler(do_sample=True, seed=8)
        return [
            accept_sampled(
                [sampler.draw_from(Q) for _ in range(3)],
                [Q] * 3,
                lambda slot: P,
                sampler.uniform,
                sampler.draw_from,
                **options,
            )
            for _ in range(300)
        ]

    assert tokens(weight=1.0) == tokens()
    assert tokens(weight=0.7) != tokens()
    assert mix(1.0, P, Q) is P


@pytest.mark.parametrize("weight", [0.0, -0.5, 1.01, float("nan")])
def test_weights_outside_are_refused(weight: float) -> None:
    calls: list[Callable[[], object]] = [
        lambda: accept_sampled([0], [Q], lambda slot: P, lambda: 0.0, never_draw, weight),
        lambda: accept_ensemble([0], [Q], lambda slot: P, weight),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="assistant_ensemble_weight: must be above 0 and at"):
            call()


def test_the_ensemble_needs_q() -> None:
    with pytest.raises(
        UsageError, match=r"needs the probabilities of the drafts, got 0\.5"
    ) as error:
        accept_sampled([0], None, lambda slot: P, lambda: 0.0, never_draw, 0.5)
    assert error.value.hint is not None and "prompt lookup has none" in error.value.hint


def test_the_greedy_ensemble_compares_with_the_argmax_of_the_mix() -> None:
    """C27. w = 0.5: [.375, .1875, .3125, .125], so token 0 stands though p prefers 2."""
    script = Script(P, [])
    assert accept_ensemble([0, 0], [Q, Q], script.at, 0.5) == Accepted(2, 2)
    assert script.slots == [0, 1, 2]
    script = Script(P, [])
    # w = 0.9: the mix prefers 2, which is the correction, and nothing behind it is looked at.
    assert accept_ensemble([0, 0], [Q, Q], script.at, 0.9) == Accepted(0, 2)
    assert script.slots == [0]


def test_the_greedy_ensemble_of_weight_1_is_greedy() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        p = [Distribution(rng.dirichlet(np.ones(3))) for _ in range(4)]
        q = [Distribution(rng.dirichlet(np.ones(3))) for _ in range(3)]
        proposal = [each.argmax() for each in q]
        wanted = accept_greedy(proposal, [each.argmax() for each in p])
        assert accept_ensemble(proposal, q, p.__getitem__, 1.0) == wanted


# Schedules


def trace(
    kind: ScheduleName, start: int, pattern: list[float], most: int | None = None
) -> list[int]:
    """Draft lengths when the share ``pattern[i]`` of round i is accepted."""
    lengths = [start]
    for share in pattern:
        k = lengths[-1]
        accepted = int(share * k)
        lengths.append(next_num_draft(kind, k, drafted=k, accepted=accepted, most=most))
    return lengths


def test_heuristic_grows_by_two_and_shrinks_by_one_to_one() -> None:
    assert trace("heuristic", 5, [1, 1, 1]) == [5, 7, 9, 11]
    assert trace("heuristic", 5, [0, 0, 0, 0, 0]) == [5, 4, 3, 2, 1, 1]
    assert trace("heuristic", 5, [1, 1, 1], most=8) == [5, 7, 8, 8]


def test_constant_never_changes() -> None:
    assert trace("constant", 5, [1, 0, 1]) == [5, 5, 5, 5]


def test_a_short_proposal_that_was_right_tells_nothing() -> None:
    assert next_num_draft("heuristic", 5, drafted=2, accepted=2, most=None) == 5
    assert next_num_draft("heuristic", 5, drafted=0, accepted=0, most=None) == 5
    assert next_num_draft("heuristic", 5, drafted=2, accepted=1, most=None) == 4


def test_examples_in_docstrings() -> None:
    for module in (accept, schedule):
        assert doctest.testmod(module).failed == 0


def test_what_must_not_come_is_never_mixed_in() -> None:
    """Behind ``mixed`` drafts p alone decides, also where q has all the mass; greedy, what p
    forbids never comes."""
    p, q = Distribution(np.array([0.5, 0.5, 0.0])), Distribution(np.array([0.1, 0.0, 0.9]))
    for place in (0.0, 0.5, 0.99):
        uniform = functools.partial(float, place)
        found = accept_sampled(
            [0, 2], [q, q], lambda slot: p, uniform, Distribution.argmax, 0.05, mixed=1
        )
        assert found == Accepted(1, 1)
    assert accept_ensemble([2, 2], [q, q], lambda slot: p, 0.05) == Accepted(0, 0)
