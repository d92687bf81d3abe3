"""Sampling: distributions, draws, and that speculation changes nothing about the joint law.

A small loop in plain Python stands for the engines: ``TARGET`` and ``DRAFT`` are tables of
vocabulary 5, so the exact law of the first tokens is known. Its chi-square test is also shown to
fail for rules that are wrong.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specrun.accept import accept_greedy, accept_sampled
from specrun.errors import EngineError, UsageError
from specrun.processors import build
from specrun.sampling import Distribution, Draw, Sampler, softmax

Floats = NDArray[np.float64]
Tokens = tuple[int, ...]
INF = float("inf")
VOCAB = 5
LENGTH = 3  # of the joint law
RUNS = 2500


def table(seed: int) -> Floats:
    """[5, 5]: next-token probabilities after each token, one of them 0."""
    rows = np.random.default_rng(seed).dirichlet(np.full(VOCAB, 0.8), VOCAB)
    rows[1, 3] = 0.0
    normal: Floats = rows / rows.sum(axis=1, keepdims=True)
    return normal


TARGET, DRAFT = table(1), table(2)


def logits_of(rows: Floats) -> Callable[[Tokens], NDArray[np.float32]]:
    with np.errstate(divide="ignore"):
        logs = np.log(rows).astype(np.float32) + np.float32(2.5)
    return lambda prefix: logs[prefix[-1]]


# Distribution


def test_dense_and_sparse_access() -> None:
    full = Distribution(np.array([0.5, 0.0, 0.5]))
    part = Distribution(np.array([0.25, 0.75]), np.array([3, 8]))
    assert [full.of(token) for token in (-1, 0, 1, 3)] == [0, 0.5, 0, 0]
    assert [part.of(token) for token in (-1, 0, 3, 5, 8, 9)] == [0, 0, 0.25, 0, 0.75, 0]
    assert full.at(np.array([2, 7])).tolist() == [0.5, 0]
    assert part.at(np.array([0, 3, 8, 9])).tolist() == [0, 0.25, 0.75, 0]
    assert part.dense(10).tolist() == [0, 0, 0, 0.25, 0, 0, 0, 0, 0.75, 0]
    assert full.dense(4).tolist() == [0.5, 0, 0.5, 0]
    assert (full.size, part.size, full.argmax(), part.argmax()) == (3, 9, 0, 8)
    with pytest.raises(ValueError, match="up to 8 do not fit into 8"):
        part.dense(8)
    assert Distribution(np.array([1.0, 0.0])).dense(1).tolist() == [1]


@pytest.mark.parametrize(
    ("probs", "ids"),
    [
        ([0.5, 0.4], None),
        ([1.5, -0.5], None),
        ([math.nan, 1.0], None),
        ([0.5, 0.5], [3, 3]),
        ([0.5, 0.5], [4, 3]),
        ([0.5, 0.5], [-1, 3]),
        ([0.5, 0.5], [1, 2, 3]),
    ],
)
def test_what_is_no_distribution(probs: list[float], ids: list[int] | None) -> None:
    with pytest.raises(ValueError, match=r"ids|probabilities"):
        Distribution(np.array(probs), None if ids is None else np.array(ids))


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.25, 0.5, 0.75, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        weights = rng.random(20) * (rng.random(20) < 0.5) * 10.0 ** rng.integers(-18, 1, 20)
        weights[7] = 1e-17
        weights[-3:] = 0
        drawn = Distribution(weights / weights.sum())
        assert drawn.of(drawn.pick(uniform)) > 0


def test_drawing_inverts_the_cumulative_sum() -> None:
    part = Distribution(np.array([0.25, 0.0, 0.5, 0.25]), np.array([2, 4, 6, 9]))
    places = [0.0, 0.2499, 0.25, 0.7499, 0.75, 0.999]
    assert [part.pick(place) for place in places] == [2, 2, 6, 6, 9, 9]


def test_drawing_from_a_large_vocabulary() -> None:
    """In blocks, with blocks of zeros, against one cumulative sum."""
    rng = np.random.default_rng(3)
    weights = rng.random(5000) ** 20 * (rng.random(5000) < 0.3)
    weights[512:1536] = 0
    weights[4600:] = 0
    large = Distribution(weights / weights.sum())
    plain = np.cumsum(large.probs)
    places = [0.0, *rng.random(2000), 1 - 2**-53]
    picked = np.array([large.pick(place) for place in places])
    wanted = np.searchsorted(plain, np.array(places) * plain[-1], side="right")
    assert (large.probs[picked] > 0).all()
    # The sums round differently: a place at a border may fall on its other side.
    assert np.count_nonzero(picked != wanted) <= 1


# Sampler


def sampler_of(
    do_sample: bool = True, seed: int | None = 0, vocab_size: int = VOCAB, **options: Any
) -> Sampler:
    own = {
        name: options.pop(name) for name in ("confidence_threshold", "keep_q") if name in options
    }
    common = {"prompt_length": 1} | options
    chain = build(vocab_size=vocab_size, do_sample=do_sample, **common)
    return Sampler(do_sample=do_sample, seed=seed, **chain._asdict(), **own)


PREFIX = np.array([0])


def test_greedy_is_the_first_argmax() -> None:
    logits = np.array([1, 3, 3, -INF], dtype=np.float32)
    greedy = Sampler()
    assert not greedy.needs_logits and not greedy.needs_draft_logits
    assert greedy.draw(PREFIX, logits) == Draw(1, None, True)
    assert greedy.distribution(PREFIX, logits).dense(4).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_a_tiny_temperature_is_greedy_without_nan(temperature: float) -> None:
    """C19."""
    cold = sampler_of(vocab_size=4, temperature=temperature)
    logits = np.array([1.0, -INF, 30.0, 29.0], dtype=np.float32)
    for _ in range(20):
        draw = cold.draw(PREFIX, logits)
        assert draw.token == 2 and draw.q is not None
        assert draw.q.dense(4).tolist() == [0, 0, 1, 0]


def test_needs_logits() -> None:
    assert sampler_of().needs_logits
    assert sampler_of(do_sample=False, repetition_penalty=1.5).needs_logits
    assert sampler_of(do_sample=False, keep_q=True).needs_logits
    drafting = sampler_of(do_sample=False, confidence_threshold=0.5)
    assert not drafting.needs_logits and drafting.needs_draft_logits


def naive(rows: Floats, temperature: float, top_k: int, top_p: float, min_p: float = 0) -> Floats:
    """The warpers one after the other in float64, with plain sorts."""
    out = np.zeros_like(rows)
    for index, row in enumerate(rows):
        probs = row ** (1 / temperature)
        order = np.argsort(-probs, kind="stable")
        probs[order[top_k or VOCAB :]] = 0
        probs /= probs.sum()
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= top_p]] = 0
        probs[probs < min_p * probs.max()] = 0
        out[index] = probs / probs.sum()
    return out


WARPED: dict[str, Any] = {"temperature": 0.5, "top_k": 2, "top_p": 0.7}
PENALISED: dict[str, Any] = {"repetition_penalty": 1.5, "temperature": 1.2, "typical_p": 0.9}
SOFT: dict[str, Any] = {"temperature": 1.5, "top_k": 4, "top_p": 0.95, "min_p": 0.2}


@pytest.mark.parametrize("options", [WARPED, SOFT])
def test_q_is_what_was_drawn_from(options: dict[str, Any]) -> None:
    """C16: it sums to 1, is 0 outside, and has the values of the naive rule."""
    sampler = sampler_of(**options)
    wanted = naive(DRAFT, **options)
    for token in range(VOCAB):
        logits = logits_of(DRAFT)((token,))
        draw = sampler.draw(np.array([token]), logits)
        assert draw.q is not None and draw.q.of(draw.token) > 0
        assert draw.q.probs.sum() == pytest.approx(1, abs=1e-12)
        np.testing.assert_allclose(draw.q.dense(VOCAB), wanted[token], atol=1e-6)
        np.testing.assert_array_equal(draw.q.dense(VOCAB) == 0, wanted[token] == 0)
        processed = sampler.process(np.array([token]), logits)
        np.testing.assert_array_equal(processed == -INF, wanted[token] == 0)


def test_the_object_drawn_from_is_the_object_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """C20, with float16 logits: their float32 values are used for both."""
    sampler, seen = sampler_of(), []
    draw_from = sampler.draw_from

    def spy(distribution: Distribution) -> int:
        seen.append(distribution)
        return draw_from(distribution)

    monkeypatch.setattr(sampler, "draw_from", spy)
    half: Any = logits_of(DRAFT)((0,)).astype(np.float16)
    draw = sampler.draw(PREFIX, half)
    assert draw.q is seen[0] and draw.q.probs.dtype == np.float64
    np.testing.assert_array_equal(draw.q.probs, softmax(half.astype(np.float32)).probs)


def test_confidence() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.1])).astype(np.float32)
    for threshold, confident in ((0.0, True), (0.59, True), (0.61, False)):
        greedy = sampler_of(do_sample=False, confidence_threshold=threshold)
        assert greedy.draw(PREFIX, logits) == Draw(0, None, confident)
    drawn = [sampler_of(seed=seed, confidence_threshold=0.2) for seed in range(30)]
    draws = [sampler.draw(PREFIX, logits) for sampler in drawn]
    assert {draw.token for draw in draws} == {0, 1, 2}
    assert all(draw.confident == (draw.token < 2) for draw in draws)


def test_greedy_drafts_with_q_for_the_ensemble() -> None:
    """The whole softmax after the processors, not a one-hot."""
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    sampler = sampler_of(do_sample=False, keep_q=True, bad_words_ids=[[0]], vocab_size=3)
    draw = sampler.draw(PREFIX, logits)
    assert draw.token == 1 and draw.q is not None
    np.testing.assert_allclose(draw.q.dense(3), [0, 0.6, 0.4], atol=1e-6)
    # Neighbouring floats near the largest stay apart, so its argmax is that of the logits.
    close = np.array([0.1, np.nextafter(np.float32(0.1), np.float32(1))], dtype=np.float32)
    assert softmax(close).argmax() == 1


def test_logits_are_left_as_they_are() -> None:
    logits = np.array([1, 2, 3, 4, 5], dtype=np.float32)
    logits.flags.writeable = False
    sampler = sampler_of(
        logit_bias={1: 3.0},
        repetition_penalty=1.5,
        no_repeat_ngram_size=1,
        bad_words_ids=[[4]],
        logits_processors=[lambda prefix, logits: logits],
        **SOFT,
    )
    assert sampler.draw(PREFIX, logits).token in range(1, 4)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("do_sample", [False, True])
def test_nothing_left_to_choose(do_sample: bool) -> None:
    sampler = sampler_of(do_sample, bad_words_ids=[[0], [1]], vocab_size=2)
    with pytest.raises(UsageError, match="no token is left to choose after 1 tokens") as error:
        sampler.draw(PREFIX, np.array([1, 2], dtype=np.float32))
    assert error.value.hint is not None and "bad_words_ids" in error.value.hint


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_an_engine_without_numbers_is_an_error(bad: float) -> None:
    for sampler in (sampler_of(), sampler_of(do_sample=False)):
        with pytest.raises(EngineError, match="the largest logit after 1 tokens is"):
            sampler.draw(PREFIX, np.array([1, bad, -INF, 0, 0], dtype=np.float32))


def test_options_of_a_sampler() -> None:
    for seed in (-1, 1.5, True, "x"):
        with pytest.raises(UsageError, match="seed: must be a whole number of at least 0"):
            Sampler(seed=seed)  # type: ignore[arg-type]
    for threshold in (-0.1, 1.1, math.nan):
        with pytest.raises(UsageError, match="confidence_threshold: must be from 0 to 1"):
            Sampler(confidence_threshold=threshold)
    with pytest.raises(ValueError, match="warpers are for sampling"):
        Sampler(warpers=build(vocab_size=5, prompt_length=1, do_sample=True, top_k=2).warpers)


# Random numbers

DRAWS = """
import numpy as np
from specrun.sampling import Sampler
sampler = Sampler(do_sample=True, seed=11)
logits = np.arange(5, dtype=np.float32) / 2
tokens = [sampler.draw(np.array([0]), logits).token for _ in range(40)]
"""


def test_a_seed_says_everything() -> None:
    """C25: the same process, a fresh one, other samplers in between, global state untouched."""

    def state() -> str:
        return repr(np.random.get_state())

    logits = (np.arange(5) / 2).astype(np.float32)
    before = state()
    first, second, other = (Sampler(do_sample=True, seed=seed) for seed in (11, 11, 12))
    tokens = [first.draw(PREFIX, logits).token for _ in range(40)]
    again = []
    for _ in range(40):
        other.draw(PREFIX, logits)
        Sampler(do_sample=True).draw(PREFIX, logits)
        again.append(second.draw(PREFIX, logits).token)
    assert tokens == again != [other.draw(PREFIX, logits).token for _ in range(40)]
    assert state() == before
    fresh = subprocess.run(
        [sys.executable, "-c", DRAWS + "print(tokens)"], capture_output=True, text=True, check=True
    )
    assert fresh.stdout.strip() == str(tokens)


# Speculation


class Slots:
    """The processed distributions of a table, computed once for each prefix."""

    def __init__(self, rows: Floats, sampler: Sampler) -> None:
        self.logits, self.sampler = logits_of(rows), sampler
        self.known: dict[Tokens, Distribution] = {}

    def __call__(self, prefix: Tokens) -> Distribution:
        if prefix not in self.known:
            tokens = np.array(prefix, dtype=np.int64)
            self.known[prefix] = self.sampler.distribution(tokens, self.logits(prefix))
        return self.known[prefix]

    def after(self, before: Tokens, proposal: list[int]) -> Callable[[int], Distribution]:
        """By slot of a proposal behind ``before``."""
        return lambda slot: self((*before, *proposal[:slot]))


Drafts = Callable[[Tokens, int], tuple[list[int], list[Distribution] | None]]


def drawn(slots: Slots, sampler: Sampler, end: int | None = None) -> Drafts:
    """A draft model. It stops behind ``end``."""

    def propose(prefix: Tokens, count: int) -> tuple[list[int], list[Distribution] | None]:
        tokens: list[int] = []
        q: list[Distribution] = []
        for _ in range(count):
            q.append(slots((*prefix, *tokens)))
            tokens.append(sampler.draw_from(q[-1]))
            if tokens[-1] == end:
                break
        return tokens, q

    return propose


def fixed(slots: Slots) -> Drafts:
    """The argmax of a draft model: a one-hot q."""

    def propose(prefix: Tokens, count: int) -> tuple[list[int], list[Distribution] | None]:
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(slots((*prefix, *tokens)).argmax())
        return tokens, None

    return propose


def argmax_with_softmax(slots: Slots) -> Drafts:
    """Wrong on purpose: a fixed draft that claims to be drawn from the softmax."""

    def propose(prefix: Tokens, count: int) -> tuple[list[int], list[Distribution] | None]:
        tokens, _ = fixed(slots)(prefix, count)
        return tokens, [slots((*prefix, *tokens[:index])) for index in range(count)]

    return propose


def speculate(
    target: Slots, drafts: Drafts, k: int, sampler: Sampler, end: int | None = None
) -> Tokens:
    """The first tokens behind the prompt (0,); what follows ``end`` is ``end``."""
    new: Tokens = ()
    while len(new) < LENGTH and end not in new:
        before = (0, *new)
        proposal, q = drafts(before, k)
        p = target.after(before, proposal)
        verdict = accept_sampled(proposal, q, p, sampler.uniform, sampler.draw_from)
        new = (*new, *proposal[: verdict.count], verdict.token)
    if end in new:
        new = new[: new.index(end)] + (end,) * LENGTH
    return new[:LENGTH]


def exact_law(target: Slots, end: int | None = None) -> dict[Tokens, float]:
    law: dict[Tokens, float] = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for index, token in enumerate(tokens):
            done = end is not None and end in tokens[:index]
            before = (0, *tokens[:index])
            probability *= float(token == end) if done else target(before).of(token)
        law[tokens] = probability
    return law


def chi_square(law: dict[Tokens, float], counts: Counter[Tokens]) -> tuple[float, float]:
    """The statistic, and what it exceeds once in 10,000 times (Wilson and Hilferty 1931).

    Outcomes that are expected fewer than 5 times are one cell.
    """
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    runs = sum(counts.values())
    assert not [tokens for tokens in counts if law[tokens] == 0], "an impossible outcome"
    cells: dict[Tokens, list[float]] = {}
    for tokens, probability in law.items():
        cell = cells.setdefault(tokens if probability * runs >= 5 else (), [0.0, 0.0])
        cell[0] += probability * runs
        cell[1] += counts[tokens]
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in cells.values() if wanted > 0)
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic, limit


def check(
    make: Callable[[Slots, Sampler], Drafts], k: int, seed: int, end: int | None = None, **o: Any
) -> tuple[float, float]:
    sampler = sampler_of(seed=seed, **o)
    target, draft = Slots(TARGET, sampler), Slots(DRAFT, sampler)
    drafts = make(draft, sampler)
    counts = Counter(speculate(target, drafts, k, sampler, end) for _ in range(RUNS))
    return chi_square(exact_law(target, end), counts)


KINDS: dict[str, Callable[[Slots, Sampler], Drafts]] = {
    "draft model": drawn,
    "one-hot": lambda slots, sampler: fixed(slots),
}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_joint_law_is_the_targets(kind: str, k: int) -> None:
    """I3."""
    statistic, limit = check(KINDS[kind], k, seed=20 + k)
    assert statistic < limit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [WARPED, SOFT, PENALISED])
def test_the_joint_law_with_processors(kind: str, options: dict[str, Any]) -> None:
    """C16, C17, C22, C23: sparse p and q, and a p that depends on the drafts before the slot."""
    statistic, limit = check(KINDS[kind], 3, seed=30, **options)
    assert statistic < limit


def test_the_joint_law_when_an_end_is_drafted() -> None:
    """C18: the proposal is short, and what is behind the end does not count."""

    def make(slots: Slots, sampler: Sampler) -> Drafts:
        return drawn(slots, sampler, end=2)

    statistic, limit = check(make, 3, seed=40, end=2)
    assert statistic < limit


def test_the_exact_law_of_the_tables_is_that_of_the_naive_rule() -> None:
    """The law that the tests compare with is not only what the sampler says."""
    target = Slots(TARGET, sampler_of(**WARPED))
    rows = naive(TARGET, **WARPED)
    for tokens, probability in exact_law(target).items():
        path = zip((0, *tokens), tokens, strict=False)
        assert probability == pytest.approx(math.prod(rows[a, b] for a, b in path), abs=1e-6)


def test_wrong_rules_are_found() -> None:
    """The chi-square test sees a fixed draft with a softmax q, and a residual that is p."""
    statistic, limit = check(lambda slots, sampler: argmax_with_softmax(slots), 2, seed=50)
    assert statistic > 2 * limit

    sampler = sampler_of(seed=51)
    target, draft = Slots(TARGET, sampler), Slots(DRAFT, sampler)

    def from_p() -> Tokens:
        new: Tokens = ()
        while len(new) < LENGTH:
            p, q = target((0, *new)), draft((0, *new))
            token = sampler.draw_from(q)
            stands = sampler.uniform() < p.of(token) / q.of(token)
            new = (*new, token if stands else sampler.draw_from(p))
        return new

    statistic, limit = chi_square(exact_law(target), Counter(from_p() for _ in range(RUNS)))
    assert statistic > 2 * limit


# Processors at each slot, greedy

WIDE = 12
SCORES = np.random.default_rng(6).standard_normal((WIDE, WIDE)).astype(np.float32)
FAVOURITE = int(SCORES[0].argmax())
SECOND = int(SCORES[FAVOURITE].argmax())
LONG = 20
Guess = Callable[[Tokens, int], list[int]]


def run_greedy(
    sampler: Sampler, guess: Guess, k: int, end: int | None = None, peek: int = 0
) -> list[int]:
    """LONG greedy tokens, processed at each slot; k = 0 is plain decoding.

    ``peek``: how many later drafts a slot's processors see, which is wrong above 0.
    """
    tokens: list[int] = [0]
    while len(tokens) <= LONG:
        proposal = guess(tuple(tokens), k)
        rows = [*tokens[-1:], *proposal]
        argmax = [
            sampler.draw(np.array([*tokens, *proposal[: slot + peek]]), SCORES[row]).token
            for slot, row in enumerate(rows)
        ]
        verdict = accept_greedy(proposal, argmax)
        tokens += [*proposal[: verdict.count], verdict.token]
        if end in tokens[1:]:
            return tokens[1 : tokens.index(end, 1) + 1]
    return tokens[1 : LONG + 1]


def nothing(prefix: Tokens, count: int) -> list[int]:
    return []


def guesses(plain: list[int]) -> list[Guess]:
    """Oracle, noisy (wrong with probability 0.3) and wrong drafters for the text ``plain``."""
    rng = np.random.default_rng(7)
    padded = [*plain, *[plain[-1]] * LONG]

    def guess(wrong: float) -> Guess:
        return lambda prefix, count: [
            (token + (rng.random() < wrong)) % WIDE for token in padded[len(prefix) - 1 :][:count]
        ]

    return [guess(0.0), guess(0.3), guess(1.0)]


def raise_one(prefix: Any, logits: Any) -> Any:
    """Depends on the last token and on how many there are."""
    return logits + 2 * (np.arange(WIDE) == (prefix[-1] + len(prefix)) % WIDE)


RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "penalty": {"repetition_penalty": 1.5},
    "no repeated 2-gram": {"no_repeat_ngram_size": 2},
    "both": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "favourite banned": {"logit_bias": {FAVOURITE: -100.0}},
    "forced": {"logit_bias": {4: 100.0}},
    "bad word": {"bad_words_ids": [[FAVOURITE, SECOND]]},
    "not ended": {"min_new_tokens": 6, "end_ids": [SECOND]},
    "own": {"logits_processors": [raise_one]},
}


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("name", RULES)
def test_every_slot_sees_exactly_its_prefix(name: str, k: int) -> None:
    """C22, C23, C24: the tokens of plain decoding with the same rule, for every drafter."""
    sampler = sampler_of(do_sample=False, vocab_size=WIDE, **RULES[name])
    end = SECOND if name == "not ended" else None
    plain = run_greedy(sampler, nothing, 0, end)
    for guess in guesses(plain):
        assert run_greedy(sampler, guess, k, end) == plain

    assert (plain == run_greedy(Sampler(), nothing, 0, end)) == (name == "none")
    if name == "favourite banned":
        assert FAVOURITE not in plain
    if name == "forced":
        assert plain == [4] * LONG
    if name == "not ended":
        assert len(plain) >= 6 and SECOND not in plain[:5]
        assert run_greedy(Sampler(), nothing, 0, end) == [FAVOURITE, SECOND]


@pytest.mark.parametrize("name", ["penalty", "no repeated 2-gram", "own"])
def test_a_slot_that_sees_later_drafts_is_found(name: str) -> None:
    """The test above can fail: one draft too many changes the tokens."""
    sampler = sampler_of(do_sample=False, vocab_size=WIDE, **RULES[name])
    plain = run_greedy(sampler, nothing, 0)
    assert run_greedy(sampler, guesses(plain)[0], 5, peek=1) != plain


@pytest.mark.parametrize("token", range(VOCAB))
def test_a_bias_holds_when_sampling(token: int) -> None:
    """C23."""
    for bias, share in ((-100.0, 0), (100.0, 50)):
        sampler = sampler_of(seed=1, logit_bias={token: bias}, temperature=2.0)
        draws = [sampler.draw(PREFIX, logits_of(TARGET)((0,))).token for _ in range(50)]
        assert draws.count(token) == share
