"""Where tokens came from, against exact patterns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from drafting import RightFor
from toys import Toy

from specrun import Engine, Round
from specrun.origin import ORIGINS, of_round, origins

OpenToy = Callable[..., Engine]


def done(proposal: list[int], accepted: int, emitted: int) -> Round:
    tokens = (*proposal[:accepted], 9)
    return Round(0, len(proposal), tuple(proposal), accepted, 9, tokens[:emitted], 20)


@pytest.mark.parametrize(
    ("proposal", "accepted", "emitted", "expected"),
    [
        ([], 0, 1, ["plain"]),
        ([1, 2], 0, 1, ["correction"]),
        ([1, 2], 1, 2, ["accepted", "correction"]),
        ([1, 2], 2, 3, ["accepted", "accepted", "bonus"]),
        ([1, 2], 2, 2, ["accepted", "accepted"]),  # an end id or a stop string cut it
        ([1, 2], 2, 1, ["accepted"]),
    ],
)
def test_of_round(proposal: list[int], accepted: int, emitted: int, expected: list[str]) -> None:
    assert list(of_round(done(proposal, accepted, emitted))) == expected


def test_of_a_generation(open_toy: OpenToy) -> None:
    """One for each token, as many of a kind as the statistics count."""
    rounds: list[Round] = []
    toy = Toy(max_context=100)
    engine = open_toy(toy)
    drafter = RightFor(toy, [2, 0, 3])
    result = engine.generate(
        [1], max_new_tokens=30, drafter=drafter, num_assistant_tokens=3, on_round=rounds.append
    )
    found = origins(rounds)
    assert len(found) == len(result.tokens)
    counts = Counter(found)
    assert counts["accepted"] == result.stats.accepted > 0
    assert set(found) <= set(ORIGINS)
    assert found[0] == "plain"


def test_plain_text_is_plain(open_toy: OpenToy) -> None:
    rounds: list[Round] = []
    open_toy(Toy()).generate([1], max_new_tokens=8, method="plain", on_round=rounds.append)
    assert origins(rounds) == ["plain"] * 8
