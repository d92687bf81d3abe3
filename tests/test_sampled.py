"""Sampled generation through engines whose law is known in closed form.

The toys of this file have a table of five rows: the next token's probabilities after each token. So
the law of the first three tokens is exact, and a chi-square test compares what was drawn with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from drafting import Scripted
from numpy.typing import NDArray
from toys import Toy

import specrun
from specrun.drafters.base import Proposal
from specrun.errors import UsageError
from specrun.sampling import Distribution, Sampler

OpenToy = Callable[..., specrun.Engine]
FIVE = tuple("01234")
TABLE = (
    (0.10, 0.40, 0.20, 0.05, 0.25),
    (0.30, 0.05, 0.15, 0.40, 0.10),
    (0.25, 0.25, 0.10, 0.20, 0.20),
    (0.05, 0.15, 0.60, 0.10, 0.10),
    (0.20, 0.20, 0.20, 0.30, 0.10),
)
DRAFT = (
    (0.30, 0.10, 0.20, 0.30, 0.10),
    (0.10, 0.25, 0.15, 0.20, 0.30),
    (0.05, 0.55, 0.10, 0.20, 0.10),
    (0.25, 0.15, 0.20, 0.10, 0.30),
    (0.40, 0.10, 0.20, 0.10, 0.20),
)
PROMPT = [2, 0]
LENGTH = 3
# 5 ** 3 - 1 = 124 degrees of freedom: chi-square is below this in 99.9 % of the runs.
CHI_SQUARE_LIMIT = 180.0


def table_toy(**fields: Any) -> Toy:
    """A target with TABLE and a draft model with DRAFT in one folder."""
    draft = Toy(modulus=5, vocabulary=FIVE, table=DRAFT)
    return Toy(modulus=5, vocabulary=FIVE, table=TABLE, draft=draft, **fields)


def warped(row: Sequence[float], temperature: float, top_k: int | None) -> NDArray[np.float64]:
    """The row with temperature, then its ``top_k`` best alone; written out plainly."""
    p = np.array(row) ** (1 / temperature)
    if top_k is not None:
        p[p < np.sort(p)[-top_k]] = 0
    scaled: NDArray[np.float64] = p / p.sum()
    return scaled


def law(temperature: float = 1.0, top_k: int | None = None) -> dict[tuple[int, ...], float]:
    """Probability of every text of three tokens behind the prompt."""
    rows = [warped(row, temperature, top_k) for row in TABLE]
    found = {}
    for text in itertools.product(range(5), repeat=LENGTH):
        pairs = zip([PROMPT[-1], *text[:-1]], text, strict=True)
        found[text] = float(np.prod([rows[before][token] for before, token in pairs]))
    return found


def assert_follows(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> None:
    """Chi-square over texts with an expectation of 5 or more, the rest in one cell."""
    total = counts.total()
    assert all(exact[text] > 0 for text in counts), "a text that cannot be"
    large = [text for text, p in exact.items() if p * total >= 5]
    rest = 1 - sum(exact[text] for text in large)
    cells = [(counts[text], exact[text] * total) for text in large]
    if rest * total >= 5:
        cells.append((total - sum(count for count, _ in cells), rest * total))
    chi = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    limit = freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations above the mean
    assert chi < min(limit, CHI_SQUARE_LIMIT), f"chi-square {chi:.0f} with {freedom} degrees"


def draw_texts(engine: specrun.Engine, runs: int, **options: Any) -> Counter[tuple[int, ...]]:
    """``runs`` texts of three tokens, each with a seed of its own."""
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(runs):
        options = {"do_sample": True, "max_new_tokens": LENGTH, "strict": True, **options}
        counts[tuple(engine.generate(PROMPT, seed=seed, **options).tokens)] += 1
    return counts


@pytest.mark.parametrize("method", ["plain", "draft", "prompt-lookup"])
@pytest.mark.parametrize(
    "warp", [{}, {"temperature": 0.5, "top_k": 3}], ids=["as it is", "T 0.5 top 3"]
)
def test_the_law_is_the_targets(open_toy: OpenToy, method: str, warp: dict[str, Any]) -> None:
    engine = open_toy(table_toy())
    counts = draw_texts(engine, 1200, method=method, num_assistant_tokens=3, **warp)
    assert_follows(counts, law(**warp))


class TableDrafter(Scripted):
    """Draws from a table of its own; ``lies``: says it drew from another one."""

    def __init__(self, lies: bool = False) -> None:
        super().__init__(table_toy())
        self.lies = lies

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        self.tokens += tokens

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        drafts: list[int] = []
        q = []
        last = self.tokens[-1]
        for _ in range(count):
            d = Distribution(np.array(DRAFT[last]))
            last = sampler.draw_from(d)
            drafts.append(last)
            q.append(Distribution(np.full(5, 0.2)) if self.lies else d)
        self.held = len(self.tokens) + count
        return Proposal(drafts, q)


def test_a_drafter_of_ones_own(open_toy: OpenToy) -> None:
    engine = open_toy(table_toy())
    assert_follows(draw_texts(engine, 1200, drafter=TableDrafter()), law())


def test_a_padded_table(open_toy: OpenToy) -> None:
    """The target may say an id that its tokenizer lacks, and so may who draws from such a table:
    a draft of one is judged like any other, or the law would change."""
    toy = dataclasses.replace(table_toy(), vocabulary=FIVE[:3], padded_vocab=5, draft=None)
    engine = open_toy(toy)
    assert engine.manifest.tokenizer.vocab_size == 3
    assert_follows(draw_texts(engine, 2000, drafter=TableDrafter()), law())


def test_the_test_can_fail(open_toy: OpenToy) -> None:
    """A drafter that draws from something else than its q changes the law, and it shows."""
    engine = open_toy(table_toy())
    with pytest.raises(AssertionError, match="chi-square"):
        assert_follows(draw_texts(engine, 1200, drafter=TableDrafter(lies=True)), law())


class Impossible(TableDrafter):
    """Drafts what its q says cannot be."""

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        return Proposal([1], [Distribution.one_hot(2)])


def test_a_draft_that_cannot_be(open_toy: OpenToy) -> None:
    engine = open_toy(table_toy())
    with pytest.raises(specrun.EngineError, match="token 1 was drafted and has probability 0"):
        engine.generate(PROMPT, drafter=Impossible(), do_sample=True, strict=True)


def test_equal_models_accept_everything(open_toy: OpenToy) -> None:
    same = Toy(modulus=5, vocabulary=FIVE, table=TABLE)
    result = open_toy(dataclasses.replace(same, draft=same)).generate(
        PROMPT, method="draft", temperature=0.8, top_k=4, seed=3, max_new_tokens=60
    )
    assert result.stats.drafted > 30
    assert result.stats.acceptance == 1


def test_acceptance_is_one_minus_total_variation(open_toy: OpenToy) -> None:
    """C27 too: with weight w it is 1 - w * TV, whatever the text so far."""
    engine = open_toy(table_toy())
    for weight in (1.0, 0.6):
        accepted = drafted = 0
        expected = []
        for seed in range(200):
            result = engine.generate(
                PROMPT,
                method="draft",
                do_sample=True,
                seed=seed,
                num_assistant_tokens=1,
                max_new_tokens=20,
                ensemble_weight=weight,
            )
            accepted += result.stats.accepted
            drafted += result.stats.drafted
            assert result.stats.lossy == (weight < 1)
            text = [*PROMPT, *result.tokens]
            at = len(PROMPT)
            for count in result.stats.accepted_by_round:
                row = text[at]
                tv = np.abs(np.array(TABLE[row]) - np.array(DRAFT[row])).sum() / 2
                expected.append(1 - weight * tv)
                at += count + 1
        assert accepted / drafted == pytest.approx(np.mean(expected[:drafted]), abs=0.03)


def test_ensemble_of_weight_one_is_the_same_bit_for_bit(open_toy: OpenToy) -> None:
    engine = open_toy(table_toy())
    options: dict[str, Any] = {"method": "draft", "max_new_tokens": 40, "seed": 5}
    for sampling in ({"do_sample": True}, {"do_sample": False}):
        plain = engine.generate(PROMPT, **options | sampling)
        mixed = engine.generate(PROMPT, ensemble_weight=1.0, **options | sampling)
        assert plain.tokens == mixed.tokens and not mixed.stats.lossy


def test_greedy_ensemble_takes_the_argmax_of_the_mix(open_toy: OpenToy) -> None:
    engine = open_toy(table_toy())
    result = engine.generate(
        PROMPT,
        method="draft",
        do_sample=False,
        ensemble_weight=0.3,
        num_assistant_tokens=1,
        max_new_tokens=12,
    )
    text, at = [*PROMPT, *result.tokens], len(PROMPT)
    assert result.stats.lossy
    for accepted in result.stats.accepted_by_round[:-1]:
        row = text[at]
        mix = 0.3 * np.array(TABLE[row]) + 0.7 * np.array(DRAFT[row])
        assert text[at + 1] == int(mix.argmax())
        assert accepted == (int(mix.argmax()) == int(np.argmax(DRAFT[row])))
        if accepted:  # the token behind an accepted draft is the target's own
            assert text[at + 2] == int(np.argmax(TABLE[text[at + 1]]))
        at += accepted + 1


@pytest.mark.parametrize("method", ["plain", "prompt-lookup"])
def test_an_ensemble_needs_a_distribution(open_toy: OpenToy, method: Any) -> None:
    with pytest.raises(UsageError, match="ensemble_weight: needs the drafter's own distribution"):
        open_toy(table_toy()).generate(PROMPT, method=method, ensemble_weight=0.5)


@pytest.mark.parametrize("method", ["plain", "draft", "prompt-lookup"])
def test_a_seed_is_the_text(open_toy: OpenToy, method: Any) -> None:
    """C25: other calls in between change nothing, and numpy's own state is left alone."""
    engine = open_toy(table_toy())
    options = {"method": method, "do_sample": True, "max_new_tokens": 50}
    np.random.seed(1)
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    first = engine.generate(PROMPT, seed=11, **options)
    other = engine.generate(PROMPT, seed=12, **options)
    again = engine.generate(PROMPT, seed=11, **options)
    assert first.tokens == again.tokens != other.tokens
    assert (np.random.get_state()[1] == state).all()  # type: ignore[index]
    assert first.options.seed == 11
    drawn = engine.generate(PROMPT, **options)
    assert engine.generate(PROMPT, seed=drawn.options.seed, **options).tokens == drawn.tokens


def test_a_seed_in_another_process(tmp_path: Path) -> None:
    folder = toys.write_folder(tmp_path / "engines", table_toy())
    with specrun.load(folder, threads=1) as engine:
        here = engine.generate(PROMPT, seed=4, do_sample=True, max_new_tokens=30).tokens
    code = (
        "import specrun, sys, json\n"
        "engine = specrun.load(sys.argv[1], threads=1)\n"
        f"r = engine.generate({PROMPT}, seed=4, do_sample=True, max_new_tokens=30)\n"
        "print(json.dumps(r.tokens))\n"
    )
    run = [sys.executable, "-c", code, str(folder)]
    out = subprocess.run(run, check=True, capture_output=True, text=True)
    assert json.loads(out.stdout) == here


def test_logprobs(open_toy: OpenToy) -> None:
    """Of the target's own distribution, whatever was done to it before drawing."""
    engine = open_toy(table_toy())
    for method in ("plain", "draft"):
        result = engine.generate(
            PROMPT,
            method=method,
            temperature=0.4,
            top_k=2,
            seed=1,
            logprobs=3,
            max_new_tokens=20,
        )
        assert result.logprobs is not None and len(result.logprobs) == len(result.tokens)
        before = PROMPT[-1]
        for token, entry in zip(result.tokens, result.logprobs, strict=True):
            row = np.log(TABLE[before])
            assert entry.token == token
            assert entry.logprob == pytest.approx(row[token], abs=1e-5)
            best = sorted(range(5), key=lambda i: -row[i])[:3]
            assert [p for _, p in entry.top] == pytest.approx([row[i] for i in best], abs=1e-5)
            before = token
    assert engine.generate(PROMPT, max_new_tokens=2).logprobs is None


@pytest.mark.parametrize("method", ["plain", "draft", "prompt-lookup"])
def test_processors_at_every_slot(open_toy: OpenToy, method: Any) -> None:
    """C23, C24: what is forbidden never comes and what is forced always does."""
    engine = open_toy(table_toy())
    common = {"method": method, "max_new_tokens": 40, "num_assistant_tokens": 4}
    for seed in (None, 3):
        drawn = {"do_sample": seed is not None, "seed": seed, **common}
        assert 3 not in engine.generate(PROMPT, logit_bias={3: -100.0}, **drawn).tokens
        assert set(engine.generate(PROMPT, logit_bias={3: 100.0}, **drawn).tokens) == {3}
        assert 1 not in engine.generate(PROMPT, bad_words_ids=((1,),), **drawn).tokens
        assert "2" not in engine.generate(PROMPT, bad_words=("2",), **drawn).text
        tokens = engine.generate(PROMPT, no_repeat_ngram_size=2, **drawn | {"max_new_tokens": 15})
        pairs = list(itertools.pairwise([*PROMPT, *tokens.tokens]))
        assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("method", ["plain", "draft", "prompt-lookup"])
def test_min_new_tokens(open_toy: OpenToy, method: Any) -> None:
    engine = open_toy(table_toy(eos=(1, 3)))
    for seed in range(5):
        result = engine.generate(
            PROMPT, method=method, do_sample=True, seed=seed, min_new_tokens=6, max_new_tokens=40
        )
        assert not {1, 3} & set(result.tokens[:6])
        assert result.finish_reason == "eos" and result.tokens[-1] in (1, 3)


@pytest.mark.parametrize("method", ["plain", "draft", "prompt-lookup"])
def test_a_processor_sees_exactly_its_prefix(open_toy: OpenToy, method: Any) -> None:
    """C22: a grammar of one's own: after every token only the one three places further on."""
    engine = open_toy(table_toy())
    prefixes: list[list[int]] = []

    def grammar(prefix: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        assert not prefix.flags.writeable
        prefixes.append(prefix.tolist())
        allowed = np.full_like(logits, -np.inf)
        allowed[(prefix[-1] + len(prefix)) % 5] = 0
        return allowed

    for do_sample in (False, True):
        prefixes.clear()
        result = engine.generate(
            PROMPT,
            method=method,
            do_sample=do_sample,
            logits_processor=grammar,
            num_assistant_tokens=3,
            max_new_tokens=24,
        )
        text = list(PROMPT)
        for token in result.tokens:
            assert token == (text[-1] + len(text)) % 5
            text.append(token)
        # Everything asked about is a prefix of the text, or of it and drafts behind it.
        assert all(p[: len(PROMPT)] == PROMPT for p in prefixes)
        assert {tuple(text[:n]) for n in range(len(PROMPT), len(text))} <= set(map(tuple, prefixes))


def test_repetition_penalty_is_lossless(open_toy: OpenToy) -> None:
    engine = open_toy(table_toy())
    options: dict[str, Any] = {"repetition_penalty": 1.5, "max_new_tokens": 30, "do_sample": False}
    plain = engine.generate(PROMPT, method="plain", **options)
    for method in ("draft", "prompt-lookup"):
        for k in range(9):
            drafted = engine.generate(PROMPT, method=method, num_assistant_tokens=k, **options)
            assert drafted.tokens == plain.tokens


def test_generation_defaults_are_honoured_and_shown(open_toy: OpenToy) -> None:
    defaults = (("do_sample", True), ("temperature", 0.7), ("top_k", 2), ("max_new_tokens", 9))
    engine = open_toy(table_toy(defaults=defaults))
    result = engine.generate(PROMPT, seed=1)
    shown = result.options
    assert (shown.do_sample, shown.temperature, shown.top_k) == (True, 0.7, 2)
    assert len(result.tokens) == 9
    asked = engine.generate(PROMPT, seed=1, temperature=0.7, top_k=2, max_new_tokens=9)
    assert asked.tokens == result.tokens
    greedy = engine.generate(PROMPT, do_sample=False)
    assert (greedy.options.do_sample, greedy.options.temperature) == (False, None)
    assert engine.generate(PROMPT, temperature=0).tokens == greedy.tokens
    assert engine.generate(PROMPT, top_k=0, seed=1).options.top_k is None


def test_bad_words_of_the_checkpoint(open_toy: OpenToy) -> None:
    engine = open_toy(table_toy(defaults=(("bad_words_ids", [[3], [1, 2]]),)))
    tokens = engine.generate(PROMPT, do_sample=True, seed=2, max_new_tokens=80).tokens
    assert 3 not in tokens and (1, 2) not in itertools.pairwise(tokens)
    assert 3 in engine.generate(PROMPT, do_sample=True, bad_words_ids=(), max_new_tokens=80).tokens


def test_defaults_that_are_not_supported_are_said(open_toy: OpenToy) -> None:
    engine = open_toy(table_toy(defaults=(("num_beams", 4), ("length_penalty", 1.0))))
    said: list[str] = []
    engine.generate(PROMPT, max_new_tokens=2, on_warning=said.append)
    engine.generate(PROMPT, max_new_tokens=2, on_warning=said.append)
    assert said == [
        "the checkpoint's generation defaults are not all supported; ignored: num_beams 4"
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -1}, "temperature: must be a number of at least 0, got -1"),
        ({"top_p": 0}, "top_p: must be a number above 0 and at most 1, got 0"),
        ({"top_p": 1.5}, "top_p: must be a number above 0 and at most 1, got 1.5"),
        ({"ensemble_weight": 0}, "ensemble_weight: must be a number above 0 and at most 1, got 0"),
        ({"top_k": 2.5}, "top_k: must be a whole number of at least 0, got 2.5"),
        ({"seed": -1}, "seed: must be a whole number of at least 0, got -1"),
        ({"do_sample": False, "top_k": 3}, "top_k: has no effect with do_sample False, got 3"),
        ({"logit_bias": {9: 1.0}}, "logit_bias: must hold token ids below 5, got 9"),
        ({"bad_words_ids": ((7,),)}, "bad_words_ids: must hold token ids below 5, got 7"),
        ({"num_beams": 2}, "num_beams: no such option, got 2"),
    ],
)
def test_options_that_cannot_be(open_toy: OpenToy, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        open_toy(table_toy()).generate(PROMPT, **options)
    assert says in str(error.value)
    assert error.value.hint
