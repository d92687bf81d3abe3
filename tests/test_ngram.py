"""Prompt lookup against an obviously correct twin, and against transformers."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from specrun.drafters.ngram import NgramDrafter

HIDDEN = np.zeros((1, 2))


def lookup(tokens: list[int], size: int, count: int) -> list[int]:
    """The first match of the longest n-gram, by search."""
    for n in range(min(size, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + count]
    return []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equals_the_search(size: int) -> None:
    rng = random.Random(size)
    for _ in range(50):
        drafter = NgramDrafter(size)
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        drafter.begin(tokens)
        for _ in range(10):
            assert drafter.propose(5) == lookup(tokens, size, 5)
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
        drafter = NgramDrafter(2)
        drafter.begin(tokens)
        assert drafter.propose(4) == ids[0, len(tokens) :].tolist()


def test_latest_takes_the_last_match() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    first, last = NgramDrafter(2), NgramDrafter(2, latest=True)
    for drafter in (first, last):
        drafter.begin(tokens)
    assert first.propose(2) == [3, 1]
    assert last.propose(2) == [4, 1]


def test_truncate_forgets() -> None:
    drafter = NgramDrafter(2)
    drafter.begin([1, 2, 3, 1, 2])
    drafter.truncate(9)
    assert drafter.propose(3) == [3, 1, 2]
    drafter.truncate(2)
    assert drafter.propose(3) == []


def test_nothing_to_find() -> None:
    drafter = NgramDrafter(2)
    for tokens in ([], [1], [1, 2]):
        drafter.begin(tokens)
        assert drafter.propose(5) == []


def test_fast_at_4k_tokens() -> None:
    rng = random.Random(0)
    drafter = NgramDrafter(2)
    drafter.begin([rng.randrange(500) for _ in range(4096)])
    times = []
    for _ in range(100):
        start = time.perf_counter()
        drafter.propose(10)
        drafter.observe([rng.randrange(500) for _ in range(3)], HIDDEN)
        times.append(time.perf_counter() - start)
    assert sorted(times)[50] < 1e-4
