"""I3 on engines: texts sampled through real exports follow the exact law of their target.

The small, seeded form of ``scripts/check_sampling.py``: every method, 400 texts of five tokens of a
vocabulary of 8, with up to three drafts a round. Compared are pairs of tokens, whose 64 cells
hold enough of so few texts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import small_vocabulary
from exact_law import Sampling, Tally, exact_law, fit, windows
from small_vocabulary import FOLDERS, METHODS, PROMPT

import specrun
from specexport.sources import resolve
from specrun.drafters.base import Proposal
from specrun.drafters.model import ModelDrafter
from specrun.drafters.mtp import MtpDrafter
from specrun.sampling import Sampler

RUNS = 400
LENGTH, WINDOW, DRAFTS = 5, 2, 3
LEAST_P = 1e-4  # chance of a chi-square as large as a perfect sampler's
WARM = Sampling(temperature=0.9, top_k=7, top_p=0.97, end=7)


@functools.cache
def law(checkpoint: Path, sampling: Sampling) -> Any:
    """The exact law of a checkpoint, from transformers alone."""
    return exact_law(resolve(checkpoint).load_reference(), PROMPT, LENGTH, sampling)


def draw(engine: specrun.Engine, method: Any, sampling: Sampling) -> tuple[Tally, float]:
    """RUNS texts, each with a seed of its own, and the acceptance of all drafts."""
    tally = Tally(small_vocabulary.SIZE, LENGTH, sampling.end)
    drafted = accepted = 0
    for seed in range(RUNS):
        result = engine.generate(
            PROMPT,
            method=method,
            seed=seed,
            max_new_tokens=LENGTH,
            num_assistant_tokens=DRAFTS,
            num_assistant_tokens_schedule="constant",
            strict=True,
            **sampling.options(),
        )
        tally.add(result.tokens)
        drafted += result.stats.drafted
        accepted += result.stats.accepted
    return tally, accepted / max(1, drafted)


def assert_follows(tally: Tally, exact: Any) -> None:
    """Total variation within what a perfect sampler shows, and chi-square."""
    for (places, counts), (_, wanted) in zip(
        windows(tally.counts, WINDOW), windows(exact, WINDOW), strict=True
    ):
        found = fit(counts, wanted)
        assert found.good and found.p_value > LEAST_P, f"not the law at {places}: {found}"


@pytest.mark.parametrize("method", METHODS)
def test_the_law_is_the_targets(
    open_small: Callable[[str], specrun.Engine], small_folder: Callable[[str], Path], method: str
) -> None:
    name = METHODS[method]
    tally, acceptance = draw(open_small(name), method, WARM)
    assert_follows(tally, law(small_folder(name) / FOLDERS[name].target, WARM))
    assert method == "plain" or 0.03 < acceptance < 0.97


@pytest.mark.parametrize(("method", "kind"), [("draft", ModelDrafter), ("mtp-drafter", MtpDrafter)])
def test_the_test_can_fail(
    open_small: Callable[[str], specrun.Engine],
    small_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kind: Any,
) -> None:
    """A drafter that drafts its argmax and says that it drew it from the softmax is found out."""
    propose = kind.propose

    def lie(self: Any, count: int, sampler: Sampler) -> Proposal:
        told: Proposal = propose(self, count, Sampler(keep_q=True))
        assert told.q is not None
        return told

    monkeypatch.setattr(kind, "propose", lie)
    name = METHODS[method]
    tally, _ = draw(open_small(name), method, Sampling())
    with pytest.raises(AssertionError, match="not the law"):
        assert_follows(tally, law(small_folder(name) / FOLDERS[name].target, Sampling()))
