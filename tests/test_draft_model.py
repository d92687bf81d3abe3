"""A draft model with the target's tokenizer: what it reads, what it draws from, what stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_loop import watched
from toys import Toy

import specrun
from specrun.contract import Part, past
from specrun.drafters.base import Proposal
from specrun.drafters.model import ModelDrafter, Reader, common_prefix
from specrun.sampling import Sampler
from specrun.target import Target

OpenToy = Callable[..., specrun.Engine]
HISTORY = Toy(history_weight=3, modulus=7, max_context=512)
PROMPTS = [[1], [2, 5], [3, 1, 4], list(range(7)) * 3]


class Watched(ModelDrafter):
    """Notes how many rows every run feeds, and checks after each round what the KV holds."""

    def __init__(self, toy: Toy, model: Target) -> None:
        super().__init__(model, vocab_size=toy.vocab_size, table_size=toy.vocab_size)
        self.fed: list[int] = []
        self.wanted: list[bool] = []
        prefill = model.prefill

        def counted(tokens: NDArray[np.int64], **options: Any) -> Any:
            self.fed.append(tokens.shape[1])
            self.wanted.append(bool(options["want_logits"]))
            return prefill(tokens, **options)

        model.prefill = counted  # type: ignore[method-assign]

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        super().observe(tokens, hidden)
        assert self.reader.length <= len(self._tokens) - 1
        assert held(self) == self._tokens[: self.reader.length]


class CorruptEvery(Watched):
    """Every fourth proposed token, over all rounds, is another one than drafted."""

    drafted = 0

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        tokens = []
        for token in super().propose(count, sampler).tokens:
            self.drafted += 1
            tokens.append((token + 1) % 7 if self.drafted % 4 == 0 else token)
        return Proposal(tokens)


def held(drafter: ModelDrafter) -> list[int]:
    """The tokens in the KV of a toy that has not started over."""
    model = drafter.reader.model
    rows = model.kv.arrays[past(0, Part.KEY)][0, 0, : model.length].astype(int)
    assert rows[:, 1].tolist() == list(range(model.length))
    tokens: list[int] = rows[:, 0].tolist()
    return tokens


def model_of(open_toy: OpenToy, toy: Toy) -> Target:
    """The target engine of a toy, to draft with."""
    guarded: Any = open_toy(toy).target
    model = guarded._target  # the engine behind its guard
    assert isinstance(model, Target)
    return model


# In the loop.


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_target_as_its_own_draft_model(open_toy: OpenToy, k: int) -> None:
    engine = open_toy(HISTORY)
    drafter = Watched(HISTORY, model_of(open_toy, HISTORY))
    for prompt in PROMPTS:
        drafter.fed.clear()
        result, rounds = watched(
            engine, prompt, drafter=drafter, num_assistant_tokens=k, max_new_tokens=1 + 4 * (k + 1)
        )
        assert result.tokens == HISTORY.plain(prompt, 1 + 4 * (k + 1))
        assert [round_.accepted for round_ in rounds] == [k] * 4
        # The prompt's new part, then a token per draft; later rounds begin with two: the last
        # draft, which was never fed, and the target's own token.
        first = drafter.fed[0]
        assert drafter.fed == [first, *[1] * (k - 1)] + [2, *[1] * (k - 1)] * 3
        assert not any(drafter.wanted)


def test_every_fourth_draft_corrupted(open_toy: OpenToy) -> None:
    engine = open_toy(HISTORY)
    drafter = CorruptEvery(HISTORY, model_of(open_toy, HISTORY))
    result, rounds = watched(engine, [1, 2], drafter=drafter, max_new_tokens=200)
    assert result.tokens == HISTORY.plain([1, 2], 200)
    drafted = 0
    for round_ in rounds:
        wrong = [i for i in range(len(round_.proposal)) if (drafted + i + 1) % 4 == 0]
        drafted += len(round_.proposal)
        assert round_.accepted == (wrong[0] if wrong else len(round_.proposal))
    assert drafted == drafter.drafted
    assert set(drafter.fed[1:]) == {1}


def test_kv_length_after_a_rejection(open_toy: OpenToy) -> None:
    """Committed less one; less two when all was accepted, as the last draft is never fed."""
    drafter = Watched(HISTORY, model_of(open_toy, HISTORY))
    drafter.begin([1, 2])
    drafter.observe(HISTORY.plain([1, 2], 1), np.empty((1, 2)))
    sampler = Sampler()
    tokens = [1, 2, *HISTORY.plain([1, 2], 1)]
    for accepted in (0, 1, 3, 4, 2, 4, 0):
        proposal = drafter.propose(4, sampler).tokens
        assert proposal == HISTORY.plain(tokens, 4)
        drafter.truncate(len(tokens) + accepted)
        tokens += [*proposal[:accepted], 6]
        drafter.observe(tokens[-accepted - 1 :], np.empty((accepted + 1, 2)))
        assert drafter.reader.length == len(tokens) - (2 if accepted == 4 else 1)


def test_rounds_without_a_proposal(open_toy: OpenToy) -> None:
    """What was committed meanwhile is read in one run."""
    drafter = Watched(HISTORY, model_of(open_toy, HISTORY))
    tokens = [3, 1]
    drafter.begin(tokens)
    for _ in range(5):
        new = HISTORY.plain(tokens, 1)
        drafter.observe(new, np.empty((1, 2)))
        tokens += new
        drafter.truncate(len(tokens))
    assert drafter.propose(3, Sampler()).tokens == HISTORY.plain(tokens, 3)
    assert drafter.fed == [7, 1, 1]


def test_the_next_turn_reads_what_is_new(open_toy: OpenToy) -> None:
    drafter = Watched(HISTORY, model_of(open_toy, HISTORY))
    first = [1, 2, 3, 4, 5, 6]
    drafter.begin(first)
    drafter.propose(2, Sampler())
    for prompt, fed in [([*first, 1, 1], 2), ([1, 2, 0, 0], 2), ([4], 1)]:
        drafter.fed.clear()
        drafter.begin(prompt)
        assert drafter.propose(2, Sampler()).tokens == HISTORY.plain(prompt, 2)
        assert drafter.fed == [fed, 1]


# Texts longer than the draft model's context.


@pytest.mark.parametrize("context", [2, 3, 5, 16])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_a_draft_model_with_a_short_context(open_toy: OpenToy, context: int, k: int) -> None:
    toy = Toy(max_context=64)
    engine = open_toy(toy)
    draft = Toy(max_context=context)
    drafter = ModelDrafter(model_of(open_toy, draft), vocab_size=10, table_size=10)
    for prompt in ([7], [i % 10 for i in range(20)]):
        result, rounds = watched(
            engine, prompt, drafter=drafter, num_assistant_tokens=k, max_new_tokens=99
        )
        assert result.tokens == toy.plain(prompt, 64 - len(prompt))
        assert result.finish_reason == "length"
        # It goes on drafting behind its own context, all of it right.
        assert result.stats.acceptance == 1.0
        assert all(round_.proposal for round_ in rounds[:-1])
        if context >= 2 * k:
            assert {len(round_.proposal) for round_ in rounds[:-1]} == {k}


def test_starting_over_keeps_the_first_and_the_last_tokens(open_toy: OpenToy) -> None:
    reader = Reader(model_of(open_toy, Toy(max_context=16)))
    tokens = [i % 10 for i in range(14)]
    assert reader.room(14, 3) == 3
    assert int(reader.read(tokens).argmax[0, 0]) == 4
    assert (reader.length, reader.model.length) == (14, 14)
    tokens += [4, 5]
    assert reader.room(16, 3) == 3  # 18 rows for 16: it starts over with 8 tokens
    assert int(reader.read(tokens).argmax[0, 0]) == 6
    rows = reader.model.kv.arrays[past(0, Part.KEY)][0, 0, :8].astype(int).tolist()
    assert rows == [[token, i] for i, token in enumerate([0, 9, 0, 1, 2, 3, 4, 5])]
    assert (reader.length, reader.model.length) == (16, 8)
    reader.truncate(20)
    assert reader.length == 16
    reader.truncate(12)
    assert (reader.length, reader.model.length) == (12, 4)
    reader.truncate(5)  # among those that were skipped: nothing is left to go on from
    assert (reader.length, reader.model.length) == (0, 0)
    assert int(reader.read(tokens[:3]).argmax[0, 0]) == 3


# Vocabularies padded differently.


def test_common_prefix() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([1, 2, 4], [1, 2, 3]) == 2


@pytest.mark.parametrize("size", [60, 64, 72])
def test_no_draft_outside_the_tokenizer(open_toy: OpenToy, size: int) -> None:
    """The tokenizer has 58 tokens, the target's table 64, the draft model's another size."""
    words = tuple(chr(0x41 + i) for i in range(58))
    target = Toy(modulus=58, vocabulary=words, padded_vocab=64)
    engine = open_toy(target)
    draft = Toy(modulus=size, vocabulary=words, padded_vocab=size)
    drafter = ModelDrafter(model_of(open_toy, draft), vocab_size=58, table_size=64)
    result, rounds = watched(engine, [50], drafter=drafter, max_new_tokens=30)
    assert result.tokens == target.plain([50], 30)
    # 51 is the target's; 57 by itself is the last token that exists, so nothing is drafted then.
    assert [round_.proposal for round_ in rounds][:3] == [(52, 53, 54, 55, 56), (), (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("size", [4, 6, 9])
def test_what_a_draft_was_drawn_from(open_toy: OpenToy, size: int) -> None:
    """q is the softmax over what target, tokenizer and draft model have; 0 elsewhere."""
    rng = np.random.default_rng(1)
    table = rng.dirichlet(np.ones(size), size)
    toy = Toy(vocabulary=tuple("01234567")[:size], padded_vocab=size, table=totuple(table))
    drafter = ModelDrafter(model_of(open_toy, toy), vocab_size=5, table_size=7)
    sampler = Sampler(do_sample=True, seed=0)
    for start in range(4):
        drafter.begin([start])
        tokens, q = drafter.propose(6, sampler)
        assert q is not None and len(tokens) == len(q) == 6
        for before, token, drawn in zip([start, *tokens], tokens, q, strict=False):
            row = table[before][: min(5, size)]
            np.testing.assert_allclose(drawn.dense(7)[: len(row)], row / row.sum(), rtol=1e-5)
            assert drawn.dense(7)[len(row) :].sum() == 0
            assert token < min(5, size)


def totuple(table: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in table.tolist())


def test_a_token_that_the_draft_model_lacks(open_toy: OpenToy) -> None:
    """The target said or was given it; the draft model reads another one in its place."""
    toy = Toy(vocabulary=tuple("01234567"), modulus=8)
    small = Toy(vocabulary=tuple("01234"), modulus=5)
    drafter = ModelDrafter(model_of(open_toy, small), vocab_size=8, table_size=8)
    result, _ = watched(open_toy(toy), [6, 7], drafter=drafter, max_new_tokens=40)
    assert result.tokens == toy.plain([6, 7], 40)
    assert result.stats.accepted > 0


# Options of the sampler.


def test_processors_see_the_drafts_before(open_toy: OpenToy) -> None:
    seen: list[list[int]] = []

    def spy(prefix: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(prefix.tolist())
        banned = logits.copy()
        banned[6] = -np.inf
        return banned

    toy = Toy()
    drafter = Watched(toy, model_of(open_toy, toy))
    drafter.begin([4])
    proposal = drafter.propose(3, Sampler(processors=[spy]))
    assert proposal == Proposal([5, 0, 1])  # without 6 all others are equally likely
    assert seen == [[4], [4, 5], [4, 5, 0]]
    assert all(drafter.wanted)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_that_is_not_confident_is_the_last(open_toy: OpenToy, do_sample: bool) -> None:
    """It is kept: dropping it by its value would change what is sampled."""
    table = ((0.0, 0.95, 0.05), (0.0, 0.0, 1.0), (0.6, 0.4, 0.0))
    toy = Toy(vocabulary=tuple("012"), table=table)
    drafter = Watched(toy, model_of(open_toy, toy))
    sampler = Sampler(do_sample=do_sample, seed=3, confidence_threshold=0.7)
    lengths = set()
    for _ in range(20):
        drafter.begin([0])
        tokens, q = drafter.propose(8, sampler)
        lengths.add(len(tokens))
        probabilities = [table[a][b] for a, b in zip([0, *tokens], tokens, strict=False)]
        assert all(p >= 0.7 for p in probabilities[:-1])
        assert probabilities[-1] < 0.7
        assert (q is None) is not do_sample
    assert lengths == ({1, 3} if do_sample else {3})


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}])
def test_a_text_longer_than_the_draft_models_context_is_the_same_again(
    open_toy: Callable[..., specrun.Engine], options: dict[str, Any]
) -> None:
    """What was left out of one text must not be left out of the next."""
    table = tuple(tuple(float(x) for x in row) for row in np.full((10, 10), 0.1))
    toy = Toy(table=table, draft=Toy(table=table, max_context=16))
    engine = open_toy(toy)
    runs = [
        engine.generate(
            [1, 2, 3] * 4,
            method="draft",
            num_assistant_tokens=5,
            max_new_tokens=30,
            strict=True,
            **options,
        )
        for _ in range(3)
    ]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    assert runs[0].stats.accepted_by_round == runs[1].stats.accepted_by_round
    session = engine.session()
    for _ in range(2):
        session.rewind(0)
        session.append([1, 2, 3] * 4)
        again = session.generate(
            method="draft", num_assistant_tokens=5, max_new_tokens=30, **options
        )
        assert again.tokens == runs[0].tokens
