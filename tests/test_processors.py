"""Logits processors against transformers' own, and what only ours promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation import logits_process as reference

from specrun.errors import UsageError
from specrun.processors import (
    BadWords,
    Filter,
    LogitBias,
    MinNewTokens,
    MinP,
    NoRepeatNgram,
    Processor,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    TypicalP,
    UserProcessor,
    build,
    kth_largest,
)

Floats = NDArray[np.float32]
INF = float("inf")


def theirs(processor: Any, prefix: NDArray[np.int64], logits: NDArray[Any]) -> Floats:
    result = processor(torch.from_numpy(prefix[None].copy()), torch.from_numpy(logits[None].copy()))
    array: Floats = result[0].numpy()
    return array


def cases(
    vocab: int, lengths: tuple[int, ...] = (1, 2, 3, 7, 40), seed: int = 0
) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Prefixes and logits: plain, with ties, with -inf, almost all -inf, flat, peaked."""
    rng = np.random.default_rng(seed)
    for length in lengths:
        prefix = rng.integers(0, min(vocab, 6), length)
        plain = (rng.standard_normal(vocab) * 3).astype(np.float32)
        holes = np.where(rng.random(vocab) < 0.4, np.float32(-INF), plain)
        holes[0] = 1.0
        lonely = np.full(vocab, -INF, dtype=np.float32)
        lonely[vocab // 2] = -2.0
        for logits in (plain, np.round(plain), holes, lonely, plain / 50, plain * 20):
            yield prefix, logits.astype(np.float32)


PAIRS: dict[str, tuple[Callable[[], Processor], Callable[[], Any]]] = {
    "bias": (
        lambda: LogitBias({0: 2.5, 3: -100.0, 2: -INF}),
        lambda: reference.SequenceBiasLogitsProcessor({(0,): 2.5, (3,): -100.0, (2,): -INF}),
    ),
    "penalty": (
        lambda: RepetitionPenalty(1.5),
        lambda: reference.RepetitionPenaltyLogitsProcessor(1.5),
    ),
    "penalty below 1": (
        lambda: RepetitionPenalty(0.7),
        lambda: reference.RepetitionPenaltyLogitsProcessor(0.7),
    ),
    "words": (
        lambda: BadWords([[1], [2, 3], [0, 1, 2], [4, 4], [4], [3, 0]], end_ids=[4]),
        lambda: reference.NoBadWordsLogitsProcessor(
            [[1], [2, 3], [0, 1, 2], [4, 4], [4], [3, 0]], eos_token_id=[4]
        ),
    ),
    "new tokens": (
        lambda: MinNewTokens(3, 2, [1, 3]),
        lambda: reference.MinNewTokensLengthLogitsProcessor(2, 3, [1, 3]),
    ),
    "temperature": (lambda: Temperature(0.7), lambda: reference.TemperatureLogitsWarper(0.7)),
    "hot": (lambda: Temperature(31.0), lambda: reference.TemperatureLogitsWarper(31.0)),
} | {
    f"ngram {size}": (
        lambda size=size: NoRepeatNgram(size),  # type: ignore[misc]
        lambda size=size: reference.NoRepeatNGramLogitsProcessor(size),  # type: ignore[misc]
    )
    for size in (1, 2, 3, 8)
}


@pytest.mark.parametrize("vocab", [5, 7, 300])
@pytest.mark.parametrize("name", PAIRS)
def test_equals_transformers(name: str, vocab: int) -> None:
    ours, reference_of = PAIRS[name]
    changed = False
    for prefix, logits in cases(vocab):
        before = logits.copy()
        got = ours()(prefix, logits)
        np.testing.assert_array_equal(logits, before)
        np.testing.assert_array_equal(got, theirs(reference_of(), prefix, logits))
        assert got.dtype == np.float32
        changed |= not np.array_equal(got, before)
    assert changed or name == "ngram 8"


FILTERS: dict[str, tuple[Filter, Any]] = (
    {f"top_k {k}": (TopK(k), reference.TopKLogitsWarper(k)) for k in (1, 2, 4, 64, 10**6)}
    | {
        f"top_p {p}": (TopP(p), reference.TopPLogitsWarper(p))
        for p in (0.0, 0.1, 0.5, 0.83, 0.95, 0.999)
    }
    | {f"min_p {p}": (MinP(p), reference.MinPLogitsWarper(p)) for p in (0.0, 0.05, 0.3, 1.0)}
    | {
        f"typical {p}": (TypicalP(p), reference.TypicalLogitsWarper(p))
        for p in (0.05, 0.2, 0.9, 0.99)
    }
)


@pytest.mark.parametrize("vocab", [1, 2, 5, 7, 300, 20000])
@pytest.mark.parametrize("name", FILTERS)
def test_filters_keep_what_transformers_keeps(name: str, vocab: int) -> None:
    """Of equal logits at the border of top-p another one may stand, so values are compared.

    transformers computes in float64 here: its float32 sums move borders by themselves.
    """
    ours, reference_filter = FILTERS[name]
    for prefix, logits in cases(vocab, lengths=(1, 2)):
        got = ours(prefix, logits)
        wanted = theirs(reference_filter, prefix, logits.astype(np.float64)).astype(np.float32)
        np.testing.assert_array_equal(np.sort(got), np.sort(wanted))
        if not name.startswith("top_p") or np.unique(logits).size == logits.size:
            np.testing.assert_array_equal(got, wanted)
        stands = got > -INF
        np.testing.assert_array_equal(got[stands], logits[stands])
        assert stands[np.argmax(logits)] or isinstance(ours, TypicalP)
        kept = ours.keep(logits)
        assert np.array_equal(kept, np.sort(kept)) and set(np.flatnonzero(stands)) <= set(kept)


def test_of_equal_logits_the_lower_ids_stand() -> None:
    equal = np.zeros(4, dtype=np.float32)
    assert TopP(0.5).keep(equal).tolist() == [0, 1]
    assert TopP(0.0).keep(equal).tolist() == [0]
    assert TopP(1.0).keep(np.array([30, -INF, -100], dtype=np.float32)).tolist() == [0, 2]
    assert TopK(2).keep(equal).tolist() == [0, 1, 2, 3]
    assert TopP(0.75).keep(np.array([0, 1, 0, 0, 1], dtype=np.float32)).tolist() == [0, 1, 4]


@pytest.mark.parametrize("k", [1, 2, 64, 500, 3000, 20000, 30000])
@pytest.mark.parametrize("kind", ["normal", "ties", "holes", "equal"])
def test_kth_largest_is_exact(kind: str, k: int) -> None:
    values = np.random.default_rng(1).standard_normal(20011).astype(np.float32)
    if kind == "ties":
        values = np.round(values)
    if kind == "holes":
        values[50:] = -INF
    if kind == "equal":
        values[:] = 3
    assert kth_largest(values, k) == np.sort(values)[::-1][min(k, values.size) - 1]


@pytest.mark.parametrize("spread", [0.001, 0.3, 3.0])
def test_a_flat_vocabulary_is_cut_exactly(spread: float) -> None:
    """More than the first 1024 tokens are needed: against a plain sort in float64."""
    logits = (np.random.default_rng(2).standard_normal(70001) * spread).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    probs = np.exp(logits[order].astype(np.float64))
    mass_before = np.cumsum(probs / probs.sum()) - probs / probs.sum()
    wanted = np.sort(order[mass_before < 0.9])
    got = TopP(0.9).keep(logits)
    # float32 weights: the border may move by a few of the many tokens.
    assert abs(got.size - wanted.size) <= 3 and wanted.size > 1024
    assert np.array_equal(got[np.isin(got, wanted)], wanted[np.isin(wanted, got)])


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 5e-324])
def test_a_tiny_temperature_is_the_argmax_and_never_nan(temperature: float) -> None:
    """C19."""
    logits = np.array([1.0, 50.0, -INF, 49.5, -3e38], dtype=np.float32)
    scaled = Temperature(temperature)(np.array([0]), logits)
    assert not np.isnan(scaled).any() and np.isfinite(scaled[1])
    weights = np.exp(scaled - scaled.max())
    np.testing.assert_array_equal(weights, [0, 1, 0, 0, 0])


def test_ids_that_an_engine_lacks_are_ignored() -> None:
    logits, prefix = np.array([1, 2, 3], dtype=np.float32), np.array([9, 1])
    assert LogitBias({1: 1.0, 7: 5.0})(prefix, logits).tolist() == [1, 3, 3]
    assert RepetitionPenalty(2.0)(prefix, logits).tolist() == [1, 1, 3]
    assert BadWords([[1, 8], [2]])(prefix, logits).tolist() == [1, 2, -INF]
    assert MinNewTokens(5, 0, [0, 7])(prefix, logits).tolist() == [-INF, 2, 3]
    assert NoRepeatNgram(1)(prefix, logits).tolist() == [1, -INF, 3]


# The user's own


def user(result: Any) -> UserProcessor:
    def mine(prefix: Any, logits: Any) -> Any:
        return result

    return UserProcessor(mine)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned None"),
        (np.zeros(4, dtype=np.float32), r"returned shape \(4,\) for logits of shape \(3,\)"),
        (np.zeros((1, 3)), r"returned shape \(1, 3\)"),
        (0.0, r"returned shape \(\)"),
        (["a", "b", "c"], "returned dtype <U1"),
        (np.zeros(3, dtype=complex), "returned dtype complex128"),
        (np.ones(3, dtype=bool), "returned dtype bool"),
        ([0.0, math.nan, 1.0], "returned NaN"),
        ([0.0, INF, 1.0], r"returned \+inf"),
        ([0.0, 1e300, 1.0], r"returned \+inf"),
        ([-INF, -INF, -INF], "returned -inf for every token"),
    ],
)
def test_what_a_user_processor_must_not_return(result: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"logits_processor .*mine: {message}") as error:
        user(result)(np.array([1]), np.array([1, 2, 3], dtype=np.float32))
    assert error.value.hint


@pytest.mark.parametrize(
    "result",
    [
        [1, 2, 3],
        np.array([1, 2, 3], dtype=np.float64),
        np.array([1, 2, 3], dtype=np.float16),
        torch.tensor([1.0, 2.0, 3.0]),
    ],
)
def test_what_a_user_processor_may_return(result: Any) -> None:
    got = user(result)(np.array([1]), np.zeros(3, dtype=np.float32))
    assert got.dtype == np.float32 and got.tolist() == [1, 2, 3]


def test_a_user_processor_may_work_in_place_but_not_on_the_prefix() -> None:
    def in_place(prefix: Any, logits: Any) -> Any:
        logits[0] = -INF
        return logits

    logits, prefix = np.array([1, 2], dtype=np.float32), np.array([5])
    assert UserProcessor(in_place)(prefix, logits).tolist() == [-INF, 2]
    assert logits.tolist() == [1, 2]

    def on_prefix(prefix: Any, logits: Any) -> Any:
        prefix[0] = 1
        return logits

    with pytest.raises(ValueError, match="read-only"):
        UserProcessor(on_prefix)(prefix, logits)
    prefix[0] = 6  # the caller's stays writable

    with pytest.raises(UsageError, match="must be callable"):
        UserProcessor("no function")  # type: ignore[arg-type]


# Order and options


def test_order_is_that_of_transformers() -> None:
    chain = build(
        vocab_size=300,
        prompt_length=2,
        end_ids=[4],
        do_sample=True,
        logit_bias={1: 1.0},
        repetition_penalty=1.3,
        no_repeat_ngram_size=3,
        bad_words_ids=[[5]],
        min_new_tokens=4,
        logits_processors=[lambda prefix, logits: logits + 1],
        temperature=0.5,
        top_k=50,
        top_p=0.9,
        min_p=0.05,
        typical_p=0.8,
    )
    assert [type(each) for each in chain.processors] == [
        LogitBias,
        RepetitionPenalty,
        NoRepeatNgram,
        BadWords,
        MinNewTokens,
        UserProcessor,
    ]
    assert [type(each) for each in chain.warpers] == [Temperature, TopK, TopP, MinP, TypicalP]


def test_a_whole_chain_equals_transformers() -> None:
    """The order as its ``generate`` builds it, on a model that is not there."""
    from transformers import GenerationConfig
    from transformers.generation.utils import GenerationMixin

    class Bare(GenerationMixin):  # type: ignore[misc]
        config = type("Config", (), {"is_encoder_decoder": False})()

    options: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[5], [1, 2]],
        "min_new_tokens": 6,
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.85,
    }
    config = GenerationConfig(do_sample=True, sequence_bias={(3,): 1.5}, **options)
    config._eos_token_tensor = torch.tensor([0, 2])
    chain = Bare()._get_logits_processor(config, input_ids_seq_length=3)
    ours = build(
        vocab_size=300,
        prompt_length=3,
        end_ids=[0, 2],
        do_sample=True,
        logit_bias={3: 1.5},
        **options,
    )
    rng = np.random.default_rng(3)
    for length in (3, 5, 8, 9, 12):
        for _ in range(10):
            prefix = rng.integers(0, 6, length)
            logits = (rng.standard_normal(300) * 2).astype(np.float32)
            got: Floats = logits
            for processor in (*ours.processors, *ours.warpers):
                got = processor(prefix, got)
            wanted = theirs(chain, prefix, logits)
            np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_what_changes_nothing_is_left_out() -> None:
    assert build(vocab_size=9, prompt_length=1, end_ids=[1], do_sample=True) == ((), ())
    greedy = build(vocab_size=9, prompt_length=1, temperature=0.5, top_k=3, top_p=0.5)
    assert greedy == ((), ())
    assert build(vocab_size=9, prompt_length=1, min_new_tokens=3) == ((), ())  # no end ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {9: 1.0}}, "logit_bias: must be token ids of 0 or more below 9, got 9"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: .*got -1"),
        ({"logit_bias": {1: math.nan}}, "logit_bias: must be finite or -inf, got nan"),
        ({"logit_bias": {1: INF}}, "logit_bias: must be finite or -inf, got inf"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias: must be token ids.*got 'a'"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: must be above 0, got 0.0"),
        ({"repetition_penalty": -1}, "repetition_penalty: must be above 0, got -1"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size: must be a whole number"),
        ({"bad_words_ids": [[1], []]}, "bad_words_ids: must be lists of token ids"),
        ({"bad_words_ids": [3]}, "bad_words_ids: must be lists of token ids"),
        ({"bad_words_ids": [[1, 12]]}, "bad_words_ids: .* below 9, got 12"),
        ({"min_new_tokens": -1}, "min_new_tokens: must be a whole number of at least 0"),
        ({"temperature": 0.0}, "temperature: must be above 0 to sample, got 0.0"),
        ({"temperature": INF}, "temperature: must be above 0"),
        ({"temperature": "hot"}, "temperature: must be above 0 to sample, got 'hot'"),
        ({"top_k": -1}, "top_k: must be a whole number of at least 1, got -1"),
        ({"top_k": 2.5}, "top_k: must be a whole number"),
        ({"top_p": 1.5}, "top_p: must be from 0 to 1, got 1.5"),
        ({"top_p": math.nan}, "top_p: must be from 0 to 1, got nan"),
        ({"min_p": -0.1}, "min_p: must be from 0 to 1, got -0.1"),
        ({"typical_p": 0.0}, "typical_p: must be above 0, below 1, got 0.0"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        build(vocab_size=9, prompt_length=1, end_ids=[0], do_sample=True, **options)
    assert error.value.hint
