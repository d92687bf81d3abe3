"""I3 on engines: texts sampled through real exports follow the exact law of their target.

The small, seeded form of ``scripts/check_sampling.py``: every method, 400 texts of five tokens of a
vocabulary of 8, with up to three drafts a round. Compared are pairs of tokens, whose 64 cells
hold enough of so few texts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import small_vocabulary
from exact_law import Sampling, Tally, exact_law, fit, windows
from small_vocabulary import PROMPT, Pair

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

# In parts, so that one folder has early exit too: an export takes seconds.
LLAMA = Pair("llama", ("llama-draft", "llama-other"), early_exit=1)
FOLDERS = {
    "llama": LLAMA,
    "mtp": Pair("deepseek-dense"),
    "gemma4": Pair("gemma4", ("assistant-centroid",)),
}
METHODS = {
    "plain": "llama",
    "prompt-lookup": "llama",
    "draft": "llama",
    "universal": "llama",
    "early-exit": "llama",
    "mtp": "mtp",
    "mtp-drafter": "gemma4",
}


@pytest.fixture
def folder(once: Callable[..., Path]) -> Callable[[str], Path]:
    """``folder(name)``: the checkpoints and engines of one of FOLDERS."""

    def make(name: str) -> Path:
        def export(path: Path) -> None:
            small_vocabulary.export(FOLDERS[name], path, check=False)

        return once(f"small-vocabulary-{name}", export)

    return make


@pytest.fixture
def open_engine(folder: Callable[[str], Path]) -> Iterator[Callable[[str], specrun.Engine]]:
    """``open_engine(name)``: one of FOLDERS, opened."""
    engines: list[specrun.Engine] = []

    def make(name: str) -> specrun.Engine:
        engines.append(specrun.load(folder(name) / small_vocabulary.ENGINES, threads=1))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


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
    open_engine: Callable[[str], specrun.Engine], folder: Callable[[str], Path], method: str
) -> None:
    name = METHODS[method]
    tally, acceptance = draw(open_engine(name), method, WARM)
    assert_follows(tally, law(folder(name) / FOLDERS[name].target, WARM))
    assert method == "plain" or 0.03 < acceptance < 0.97


@pytest.mark.parametrize(("method", "kind"), [("draft", ModelDrafter), ("mtp-drafter", MtpDrafter)])
def test_the_test_can_fail(
    open_engine: Callable[[str], specrun.Engine],
    folder: Callable[[str], Path],
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
    tally, _ = draw(open_engine(name), method, Sampling())
    with pytest.raises(AssertionError, match="not the law"):
        assert_follows(tally, law(folder(name) / FOLDERS[name].target, Sampling()))
