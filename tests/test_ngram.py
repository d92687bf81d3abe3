"""Prompt lookup against an obviously correct twin, and against transformers."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from specrun.drafters.ngram import NgramDrafter
from specrun.sampling import Sampler

GREEDY = Sampler()

HIDDEN = np.zeros((1, 2))


def lookup(tokens: list[int], size: int, count: int, first: bool) -> list[int]:
    """The first or last match of the longest n-gram, by search; the last repeats its period."""
    for n in range(min(size, len(tokens) - 1), 0, -1):
        starts = range(len(tokens) - n)
        for start in starts if first else reversed(starts):
            if tokens[start : start + n] == tokens[-n:]:
                behind = tokens[start + n :]
                return behind[:count] if first else (behind * count)[:count]
    return []


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_equals_the_search(size: int, first: bool) -> None:
    rng = random.Random(size)
    for _ in range(50):
        drafter = NgramDrafter(size, first_match=first)
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        drafter.begin(tokens)
        for _ in range(10):
            assert drafter.propose(5, GREEDY).tokens == lookup(tokens, size, 5, first)
            new = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
            tokens += new
            drafter.observe(new, HIDDEN)


def test_equals_transformers() -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.generation.candidate_generator")
    theirs = module.PromptLookupCandidateGenerator(
        num_output_tokens=4, max_matching_ngram_size=2, max_length=1000
    )
    rng = random.Random(0)
    for _ in range(100):
        tokens = [rng.randrange(5) for _ in range(rng.randrange(2, 20))]
        ids, _ = theirs.get_candidates(torch.tensor([tokens]))
        drafter = NgramDrafter(2, first_match=True)
        drafter.begin(tokens)
        assert drafter.propose(4, GREEDY).tokens == ids[0, len(tokens) :].tolist()


def test_first_and_last_match() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    first, last = NgramDrafter(2, first_match=True), NgramDrafter(2)
    for drafter in (first, last):
        drafter.begin(tokens)
    assert first.propose(2, GREEDY).tokens == [3, 1]
    assert last.propose(2, GREEDY).tokens == [4, 1]
    last.begin([7, 8, 9, 9])
    assert last.propose(4, GREEDY).tokens == [9, 9, 9, 9]  # as the text does
    last.begin([5, 7, 8, 7, 8])
    assert last.propose(5, GREEDY).tokens == [7, 8, 7, 8, 7]


def test_truncate_forgets() -> None:
    drafter = NgramDrafter(2)
    drafter.begin([1, 2, 3, 1, 2])
    drafter.truncate(9)
    assert drafter.propose(3, GREEDY).tokens == [3, 1, 2]
    drafter.truncate(2)
    assert drafter.propose(3, GREEDY).tokens == []


def test_nothing_to_find() -> None:
    drafter = NgramDrafter(2)
    for tokens in ([], [1], [1, 2]):
        drafter.begin(tokens)
        assert drafter.propose(5, GREEDY).tokens == []


def test_fast_at_4k_tokens() -> None:
    rng = random.Random(0)
    drafter = NgramDrafter(2)
    drafter.begin([rng.randrange(500) for _ in range(4096)])
    times = []
    for _ in range(100):
        start = time.perf_counter()
        drafter.propose(10, GREEDY)
        drafter.observe([rng.randrange(500) for _ in range(3)], HIDDEN)
        times.append(time.perf_counter() - start)
    assert sorted(times)[50] < 1e-4
