"""Greedy acceptance and the schedules: pure functions."""

from __future__ import annotations

import doctest

import pytest

from specrun import accept, schedule
from specrun.accept import Accepted, accept_greedy
from specrun.options import ScheduleName
from specrun.schedule import next_num_draft


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
