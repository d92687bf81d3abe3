"""Sessions: generate, rewind, append and go on equals one cold run; and batches of prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from toys import Toy

import specrun
from specrun.errors import ContextFull, UsageError
from specrun.loop import Round

OpenToy = Callable[..., specrun.Engine]
METHODS = ("plain", "prompt-lookup", "mtp-drafter", "draft")
TOY = Toy(history_weight=3, drafter=True, draft=Toy(history_weight=3))
PROMPT = [1, 2, 3, 1, 2]


def cold(tokens: list[int], count: int) -> list[int]:
    """What a run over these tokens alone says."""
    return TOY.plain(tokens, count)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [0, 1, len(PROMPT), len(PROMPT) + 5, len(PROMPT) + 12])
def test_rewind_and_go_on(open_toy: OpenToy, method: Any, length: int) -> None:
    """C33: to nothing, to the first token, to the prompt's end, into a round, not at all."""
    session = open_toy(TOY).session()
    session.append(PROMPT)
    first = session.generate(method=method, num_assistant_tokens=4, max_new_tokens=12)
    assert first.tokens == cold(PROMPT, 12)
    text = [*PROMPT, *first.tokens]
    assert session.tokens == text

    session.rewind(length)
    session.check_integrity()
    session.append([7, 8])
    kept = [*text[:length], 7, 8]
    assert session.tokens == kept
    second = session.generate(method=method, num_assistant_tokens=4, max_new_tokens=9)
    assert second.tokens == cold(kept, 9)
    session.check_integrity()


@pytest.mark.parametrize("method", METHODS)
def test_only_what_is_new_is_read(open_toy: OpenToy, method: Any) -> None:
    session = open_toy(TOY).session()
    session.append(PROMPT)
    session.generate(method=method, max_new_tokens=6)
    held = len(PROMPT) + 6 - 1
    assert session._open()[1].target.length == held
    session.append([4])
    fed: list[int] = []
    prefill = session._open()[1].target.prefill

    def spy(tokens: Any, **options: Any) -> Any:
        fed.append(tokens.shape[1])
        return prefill(tokens, **options)

    session._open()[1].target.prefill = spy  # type: ignore[method-assign]
    session.generate(method=method, max_new_tokens=6)
    assert fed == [2]  # the last token of before, which no run has seen, and the new one


def test_two_turns_are_one_text(open_toy: OpenToy) -> None:
    """What a chat does: the whole conversation anew, of which only the end is new."""
    session = open_toy(TOY).session()
    session.replace(PROMPT)
    first = session.generate(max_new_tokens=5)
    whole = [*PROMPT, *first.tokens, 9, 9]
    session.replace(whole)
    assert session._open()[1].target.length == len(PROMPT) + 5 - 1
    assert session.generate(max_new_tokens=5).tokens == cold(whole, 5)
    session.replace([2, 2])  # another one altogether
    assert session.generate(max_new_tokens=5).tokens == cold([2, 2], 5)


def test_a_stream_that_was_closed(open_toy: OpenToy) -> None:
    session = open_toy(TOY).session()
    session.append(PROMPT)
    stream = session.stream(max_new_tokens=50)
    for _ in range(3):
        next(stream)
    stream.close()
    text = session.tokens
    assert len(PROMPT) < len(text) < len(PROMPT) + 50
    assert session.generate(max_new_tokens=5).tokens == cold(text, 5)


def test_text_after_the_first_prompt_stands_as_it_is(open_toy: OpenToy) -> None:
    session = open_toy(Toy(bos=9, add_bos=True)).session()
    session.append("12")
    session.append("34")
    assert session.tokens == [9, 1, 2, 3, 4]


def test_what_a_session_refuses(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(max_context=8))
    session = engine.session()
    with pytest.raises(UsageError, match="the session is empty"):
        session.generate()
    session.append([1, 2, 3])
    with pytest.raises(UsageError, match="length: must be from 0 to the session's 3 tokens, got 4"):
        session.rewind(4)
    with pytest.raises(ContextFull, match="8 tokens do not fit into the context of 8"):
        session.append([1, 2, 3, 4, 5])
    assert session.tokens == [1, 2, 3]
    with engine.stream([1]) as stream:
        next(stream)
        with pytest.raises(UsageError, match="busy"):
            session.append([1])
        with pytest.raises(UsageError, match="busy"):
            session.rewind(0)


ENDS: dict[str, dict[str, Any]] = {
    "a stop string": {"stop": [str(TOY.plain(PROMPT, 6)[4])]},
    "an end id in a block": {"eos_token_ids": [TOY.plain(PROMPT, 6)[4]]},
    "the most tokens": {"max_new_tokens": 5},
    "cancelled": {},
    "an error": {},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("back", [None, 0, 1, len(PROMPT), len(PROMPT) + 2])
def test_however_it_ended(open_toy: OpenToy, method: Any, end: str, back: int | None) -> None:
    """Going on at once, or behind any token that it had, is a cold run of the same ids."""
    session = open_toy(TOY).session()
    session.append(PROMPT)
    token = specrun.CancelToken()

    def stop(done: Round) -> None:
        token.cancel()
        if end == "an error":
            raise ZeroDivisionError

    options = {"method": method, "num_assistant_tokens": 4, "max_new_tokens": 12} | ENDS[end]
    watch = stop if end in ("cancelled", "an error") else None
    with contextlib.suppress(ZeroDivisionError):
        session.generate(on_round=watch, cancel=token, **options)
    text = session.tokens
    assert text[len(PROMPT) :] == cold(PROMPT, len(text) - len(PROMPT)) != []
    if back is not None:
        session.rewind(min(back, len(text)))
        session.check_integrity()
        held = session._open()[1].target.length
        assert held == max(0, min(back, len(text)) - 1)  # what stands is not read again
        session.append([6])
    kept = session.tokens
    assert session.generate(method=method, max_new_tokens=9).tokens == cold(kept, 9)
    session.check_integrity()


PROMPTS = [[1], [1, 2, 3, 4, 1, 2], [9, 9], [3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.mark.parametrize("method", METHODS)
def test_every_row_of_a_batch_is_its_own_run(open_toy: OpenToy, method: Any) -> None:
    """C72: of different lengths, ending at different times and accepting different counts."""
    engine = open_toy(Toy(history_weight=1, eos=(5,), drafter=True, draft=Toy(history_weight=1)))
    options = {"method": method, "num_assistant_tokens": 4, "max_new_tokens": 20}
    rounds: list[Round] = []
    batch = engine.generate(PROMPTS, on_round=rounds.append, **options)
    single = [engine.generate(prompt, **options) for prompt in PROMPTS]
    assert [row.tokens for row in batch] == [row.tokens for row in single]
    assert [row.text for row in batch] == [row.text for row in single]
    assert [row.finish_reason for row in batch] == [row.finish_reason for row in single]
    for index, row in enumerate(batch):
        assert row.stats.accepted_by_round == single[index].stats.accepted_by_round
        assert row.stats.rounds == sum(done.sequence == index for done in rounds)


def test_a_sampled_batch(open_toy: OpenToy) -> None:
    """Row i has the seed of the batch and i more, so that it can be had alone."""
    table = tuple(tuple(float(x) for x in row) for row in ((0.2, 0.3, 0.5),) * 3)
    toy = Toy(modulus=3, vocabulary=tuple("012"), table=table)
    engine = open_toy(toy)
    batch = engine.generate([[0], [0], [1]], do_sample=True, seed=7, max_new_tokens=20)
    assert batch[0].tokens != batch[1].tokens
    for index, prompt in enumerate([[0], [0], [1]]):
        alone = engine.generate(prompt, do_sample=True, seed=7 + index, max_new_tokens=20)
        assert alone.tokens == batch[index].tokens
        assert batch[index].options.seed == 7 + index


def test_batches_of_text(open_toy: OpenToy) -> None:
    engine = open_toy(Toy())
    assert [row.text for row in engine.generate(["12", "8"], max_new_tokens=3)] == ["345", "901"]
    assert engine.generate([[1]], max_new_tokens=2)[0].tokens == [2, 3]


def test_a_batch_of_which_one_does_not_fit(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(max_context=8))
    with pytest.raises(ContextFull, match="9 tokens do not fit"):
        engine.generate([[1], [1] * 9])
    with pytest.raises(UsageError, match="drafter: follows one text and cannot draft for 2"):
        engine.generate([[1], [2]], drafter=object())  # type: ignore[call-overload]
    assert engine.generate([1], max_new_tokens=2).tokens == [2, 3]  # and it is free again
