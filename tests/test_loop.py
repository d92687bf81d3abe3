"""The loop on toys: lossless for every drafter, exact accept patterns, lengths after every round.

The twin is ``Toy.plain``: one token at a time, in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from drafting import CorruptEvery, Noisy, Oracle, Replay, RightFor, Scripted, Wrong
from toys import Toy, scripted

from specrun import Engine, Result, Round
from specrun.contract import Part, past
from specrun.errors import UsageError
from specrun.options import GenerateOptions

OpenToy = Callable[..., Engine]

HISTORY = Toy(history_weight=3, modulus=7, max_context=256)  # any wrong KV row shows
FIXED = Toy(fixed_from=12, history_weight=1, max_context=256)
PROMPTS = [[1], [2, 5], [3, 1, 4], list(range(7)) * 3]


def watched(engine: Engine, prompt: list[int], **options: Any) -> tuple[Result, list[Round]]:
    """Generate with the invariants checked after every round."""
    rounds: list[Round] = []

    def check(round_: Round) -> None:
        rounds.append(round_)
        engine.check_integrity()
        assert engine.target.length == round_.committed_length - 1
        assert len(round_.emitted) <= round_.accepted + 1

    result = engine.generate(prompt, on_round=check, strict=True, **options)
    check_statistics(result, rounds)
    return result, rounds


def check_statistics(result: Result, rounds: list[Round]) -> None:
    """Invariant I4, cut or not."""
    stats = result.stats
    assert stats.accepted + stats.rejected == stats.drafted
    assert stats.emitted == len(result.tokens) == stats.accepted + stats.rounds + 1
    assert stats.rounds == stats.target_steps == len(rounds)
    assert stats.drafted + stats.discarded == sum(len(round_.proposal) for round_ in rounds)
    assert sum(stats.drafted_by_position) == stats.drafted
    assert sum(stats.accepted_by_position) == stats.accepted
    assert sum(stats.accepted_by_round) == stats.accepted


def kv_rows(engine: Engine) -> list[list[int]]:
    """Token and position of every valid KV row."""
    array = engine.target.kv.arrays[past(0, Part.KEY)]
    rows: list[list[int]] = array[0, 0, : engine.target.length].astype(int).tolist()
    return rows


@pytest.mark.parametrize("toy", [HISTORY, FIXED], ids=["history", "fixed"])
@pytest.mark.parametrize("kind", [Oracle, Wrong, Noisy])
def test_lossless_for_every_drafter(open_toy: OpenToy, toy: Toy, kind: type[Scripted]) -> None:
    engine = open_toy(toy)
    for prompt in PROMPTS:
        plain = toy.plain(prompt, 40)
        assert engine.generate(prompt, method="plain", max_new_tokens=40).tokens == plain
        for k in range(9):
            result, _ = watched(
                engine,
                prompt,
                drafter=kind(toy),
                num_assistant_tokens=k,
                max_new_tokens=40,
            )
            assert result.tokens == plain
            if kind is not Noisy and k:
                assert result.stats.acceptance == float(kind is Oracle)


@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "mtp-drafter", "auto"])
@pytest.mark.parametrize("k", [0, 1, 2, 5, 8])
def test_lossless_for_every_method(open_toy: OpenToy, method: str, k: int) -> None:
    toy = Toy(drafter=True, fixed_from=30)
    engine = open_toy(toy)
    for prompt in PROMPTS:
        result, _ = watched(
            engine, prompt, method=method, num_assistant_tokens=k, max_new_tokens=50
        )
        assert result.tokens == toy.plain(prompt, 50)


def test_kv_holds_the_committed_prefix(open_toy: OpenToy) -> None:
    """Rows are token and position, whatever was rejected before; what is behind never matters."""
    engine = open_toy(HISTORY)
    prompt = [1, 2, 3]
    committed: list[int] = [*prompt, *HISTORY.plain(prompt, 1)]

    def check(round_: Round) -> None:
        committed.extend(round_.emitted)
        rows = [[token, position] for position, token in enumerate(committed[:-1])]
        assert kv_rows(engine) == rows
        for array in engine.target.kv.arrays.values():
            array[:, :, engine.target.length :] = np.nan

    result = engine.generate(prompt, drafter=Noisy(HISTORY), max_new_tokens=60, on_round=check)
    assert result.tokens == HISTORY.plain(prompt, 60)


def test_exact_accept_pattern(open_toy: OpenToy) -> None:
    engine = open_toy(HISTORY)
    drafter = RightFor(HISTORY, [2, 0, 3, 1])
    result, rounds = watched(
        engine, [1, 2], drafter=drafter, num_assistant_tokens=3, max_new_tokens=11
    )
    assert [round_.accepted for round_ in rounds] == [2, 0, 3, 1]
    assert [len(round_.emitted) for round_ in rounds] == [3, 1, 4, 2]
    assert [round_.committed_length for round_ in rounds] == [6, 7, 11, 13]
    # Two tokens remained before the last round, so it drafted one.
    assert result.stats.drafted_by_position == (4, 3, 3)
    assert result.stats.accepted_by_position == (3, 2, 1)
    assert result.stats.tokens_per_target_step == 10 / 4


@pytest.mark.parametrize("accepted", [0, 1, 4, 5])
def test_a_round_emits_one_more_than_it_accepts(open_toy: OpenToy, accepted: int) -> None:
    engine = open_toy(HISTORY)
    drafter = RightFor(HISTORY, [accepted])
    _, rounds = watched(engine, [1, 2], drafter=drafter, max_new_tokens=1 + 3 * (accepted + 1))
    for round_ in rounds[:-1]:
        assert (round_.accepted, len(round_.emitted)) == (accepted, accepted + 1)


def test_prompt_lookup_repeats_a_list(open_toy: OpenToy) -> None:
    toy = Toy(modulus=4)
    prompt = [0, 1, 2, 3] * 3
    result, rounds = watched(open_toy(toy), prompt, method="prompt-lookup", max_new_tokens=20)
    assert result.tokens == toy.plain(prompt, 20)
    assert [round_.accepted for round_ in rounds] == [5, 5, 5, 0]


def test_every_fourth_draft_corrupted(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(history_weight=3, modulus=7))
    toy = Toy(history_weight=3, modulus=7)
    drafter = CorruptEvery(toy, 4)
    result, rounds = watched(engine, [1, 2], drafter=drafter, max_new_tokens=200)
    assert result.tokens == toy.plain([1, 2], 200)
    drafted = 0
    for round_ in rounds:
        first_wrong = next(
            (i for i in range(len(round_.proposal)) if (drafted + i + 1) % 4 == 0),
            len(round_.proposal),
        )
        drafted += len(round_.proposal)
        assert round_.accepted == first_wrong


# End ids.


@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "mtp-drafter", "oracle"])
def test_drafts_behind_the_end(open_toy: OpenToy, method: str) -> None:
    """The 4th token is the end: four tokens, nothing behind it in stream or KV."""
    toy = Toy(drafter=True)
    engine = open_toy(toy)
    choice: dict[str, Any] = {"method": method}
    if method == "oracle":
        choice = {"drafter": Oracle(toy)}
    result, rounds = watched(
        engine, [1, 2], num_assistant_tokens=5, eos_token_ids=[6], max_new_tokens=20, **choice
    )
    assert result.tokens == [3, 4, 5, 6]
    assert result.text == "3456"
    assert result.finish_reason == "eos"
    assert kv_rows(engine) == [[token, i] for i, token in enumerate([1, 2, 3, 4, 5])]
    if method == "oracle":
        assert [round_.emitted for round_ in rounds] == [(4, 5, 6)]
        assert rounds[0].proposal == (4, 5, 6)  # nothing is verified behind an end id


@pytest.mark.parametrize(("eos", "last"), [([8, 6], 6), ([6, 8], 6), (6, 6), ((8,), 8), ([3], 3)])
def test_lists_of_end_ids(open_toy: OpenToy, eos: Any, last: int) -> None:
    toy = Toy()
    result, _ = watched(
        open_toy(toy), [1, 2], drafter=Oracle(toy), eos_token_ids=eos, max_new_tokens=20
    )
    assert result.tokens == list(range(3, last + 1))
    assert result.finish_reason == "eos"


def test_end_ids_of_the_manifest_and_none(open_toy: OpenToy) -> None:
    toy = Toy(eos=(9, 6))
    engine = open_toy(toy)
    assert engine.generate([1, 2], max_new_tokens=20).tokens == [3, 4, 5, 6]
    result = engine.generate([1, 2], max_new_tokens=20, eos_token_ids=[])
    assert result.tokens == toy.plain([1, 2], 20)
    assert result.finish_reason == "length"


def test_no_end_id_and_a_repeating_prompt(open_toy: OpenToy) -> None:
    toy = Toy(vocabulary=tuple("0123456789ab"), modulus=12)
    prompt = [5, 6, 7, 8, 9, 10, 11, 7, 8]
    result, _ = watched(
        open_toy(toy), prompt, method="prompt-lookup", num_assistant_tokens=3, max_new_tokens=15
    )
    assert result.tokens == toy.plain(prompt, 15)


def test_special_end_token_is_a_token_and_no_text(open_toy: OpenToy) -> None:
    words: dict[str, Any] = {
        "vocabulary": tuple("0123456789"),
        "specials": ("</s>",),
        "padded_vocab": 11,
    }
    toy = scripted([1, 2, 10, 3], eos=(10,), **words)
    result, _ = watched(open_toy(toy), [0], drafter=Oracle(toy))
    assert (result.tokens, result.text, result.finish_reason) == ([1, 2, 10], "12", "eos")


# Stop strings.

WORDS = ("<", "ab", "bc", "cab", "d", " e", "fab", "\n\n")


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        (["abb"], "cab", 3),  # of "cababbcd…": inside a block
        (["cabab"], "", 2),
        (["bc"], "cabab", 3),
        (["d e"], "cababbc", 5),  # across two tokens, and rounds
        (["d"], "cababbc", 4),
        (["fa"], "cababbcd e", 6),  # ends inside a token: its rest is not shown
        (["zzz"], "cababbcd efab\n\n", 8),
        (["zzz", "e"], "cababbcd ", 5),
        (["\n\n"], "cababbcd efab", 7),
    ],
)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 5])
def test_stop_strings(open_toy: OpenToy, stop: list[str], text: str, count: int, k: int) -> None:
    tokens = [3, 1, 2, 4, 5, 6, 7, 0]  # cab ab bc d " e" fab \n\n <
    toy = scripted(tokens, vocabulary=WORDS, eos=(0,))
    engine = open_toy(toy)
    drafter = Oracle(toy)
    stream = engine.stream([0], drafter=drafter, num_assistant_tokens=k, stop=stop, strict=True)
    pieces = list(stream)
    result = stream.result
    found = stop != ["zzz"]
    assert "".join(pieces) == result.text == text + ("" if found else "<")
    assert result.tokens == tokens[:count]
    assert result.finish_reason == ("stop" if found else "eos")
    assert result.stats.emitted == count
    assert engine.target.length == count  # prompt of one, less the token not fed


def test_text_that_may_be_a_stop_string_is_held_back(open_toy: OpenToy) -> None:
    toy = scripted([1, 2, 3, 1, 2, 4, 5], vocabulary=("0", "a", "b", "x", "c", "d"))
    stream = open_toy(toy).stream([0], method="plain", stop=["abc"], max_new_tokens=7)
    assert list(stream) == ["abx"]
    assert stream.result.text == "abx"
    held = open_toy(toy).stream([0], method="plain", stop=["abc"], max_new_tokens=2)
    assert list(held) == ["ab"]  # the end shows that it was none
    assert held.result.finish_reason == "length"


def test_drafter_never_sees_the_stop_strings(open_toy: OpenToy) -> None:
    toy = Toy()
    engine = open_toy(toy)
    free, stopped = Oracle(toy), Oracle(toy)
    engine.generate([0], drafter=free, max_new_tokens=7)
    engine.generate([0], drafter=stopped, max_new_tokens=7, stop=["6"])
    assert stopped.proposals == free.proposals[: len(stopped.proposals)]


# Lengths.


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("extra", [-3, 0, 1, 2])
def test_max_new_tokens(open_toy: OpenToy, k: int, extra: int) -> None:
    toy = Toy()
    count = max(1, k + extra)
    drafter = Oracle(toy)
    result, _ = watched(
        open_toy(toy), [1], drafter=drafter, num_assistant_tokens=k, max_new_tokens=count
    )
    assert result.tokens == toy.plain([1], count)
    assert result.finish_reason == "length"
    assert result.stats.discarded == 0
    left = count - 1
    for asked in drafter.asked:
        assert asked <= left - 1
        left -= asked + 1


def test_nothing_wanted_is_nothing_run(open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_toy(Toy())
    monkeypatch.setattr(engine.target, "prefill", None)
    result = engine.generate([1, 2], max_new_tokens=0)
    assert (result.text, result.tokens, result.finish_reason) == ("", [], "length")
    assert result.stats.target_steps == result.stats.emitted == 0


@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "mtp-drafter"])
def test_the_context_is_a_limit(open_toy: OpenToy, method: str) -> None:
    toy = Toy(max_context=32, drafter=True)
    prompt = [i % 10 for i in range(28)]
    result, _ = watched(open_toy(toy), prompt, method=method, num_assistant_tokens=5)
    assert result.tokens == toy.plain(prompt, 4)
    assert result.finish_reason == "length"


def test_buffers_grow_and_keep_what_they_hold(open_toy: OpenToy) -> None:
    toy = Toy(history_weight=3, modulus=7, max_context=700)
    engine = open_toy(toy)
    capacities = set()

    def note(round_: Round) -> None:
        capacities.add(engine.target.kv.capacity)

    result = engine.generate([1], drafter=Noisy(toy), max_new_tokens=999, on_round=note)
    assert result.tokens == toy.plain([1], 699)
    assert sorted(capacities) == [256, 512, 700]


def test_mtp_drafter_follows_the_buffers(open_toy: OpenToy) -> None:
    toy = Toy(drafter=True)
    result = open_toy(toy).generate([1], max_new_tokens=600)
    assert result.stats.method == "mtp-drafter"
    assert result.stats.acceptance == 1.0


def test_chunked_prefill(open_toy: OpenToy) -> None:
    prompt = [i % 7 for i in range(23)]
    for chunk in (1, 3, 7, 22, 23, 24):
        engine = open_toy(HISTORY, prefill_chunk=chunk)
        result, _ = watched(engine, prompt, drafter=Oracle(HISTORY), max_new_tokens=10)
        assert result.tokens == HISTORY.plain(prompt, 10)


# Schedules.


def test_schedules_in_the_loop(open_toy: OpenToy) -> None:
    toy = Toy()
    engine = open_toy(toy)

    def lengths(kind: type[Scripted], schedule: str, count: int) -> list[int]:
        result, _ = watched(
            engine,
            [1],
            drafter=kind(toy),
            num_assistant_tokens=5,
            num_assistant_tokens_schedule=schedule,
            max_new_tokens=count,
        )
        return list(result.stats.num_draft_by_round)

    assert lengths(Oracle, "heuristic", 40)[:3] == [5, 7, 9]
    assert lengths(Oracle, "heuristic", 40)[0] == 5  # nothing of a drafter of one's own is kept
    assert lengths(Oracle, "heuristic_transient", 40)[:3] == [5, 7, 9]
    assert lengths(Oracle, "heuristic_transient", 40)[0] == 5  # a new call starts over
    assert lengths(Wrong, "heuristic_transient", 20)[:6] == [5, 4, 3, 2, 1, 1]
    assert set(lengths(Oracle, "constant", 40)) == {5}


def test_a_schedule_that_outlasts_a_generation(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(draft=Toy()))
    options: dict[str, Any] = {"method": "draft", "num_assistant_tokens": 5, "max_new_tokens": 40}

    def lengths(schedule: str) -> tuple[int, ...]:
        result = engine.generate([1], num_assistant_tokens_schedule=schedule, **options)
        counts: tuple[int, ...] = result.stats.num_draft_by_round
        return counts

    first = lengths("heuristic")
    assert first[:3] == (5, 7, 9)
    assert lengths("heuristic")[0] >= first[-1]  # goes on where the call before ended
    assert lengths("heuristic_transient")[:3] == (5, 7, 9)
    assert engine.resolve(GenerateOptions(method="draft")).num_assistant_tokens == 3


def test_draft_length_stays_within_the_drafter(open_toy: OpenToy) -> None:
    toy = Toy(drafter=True, max_num_draft=6, num_assistant_tokens=4)
    engine = open_toy(toy)
    result, rounds = watched(
        engine, [1], num_assistant_tokens_schedule="heuristic_transient", max_new_tokens=60
    )
    assert list(result.stats.num_draft_by_round[:3]) == [4, 6, 6]
    assert max(len(round_.proposal) for round_ in rounds) == 6
    with pytest.raises(UsageError, match="num_assistant_tokens: the drafter was exported for at"):
        engine.generate([1], num_assistant_tokens=99)


def test_no_draft_outside_the_tokenizer(open_toy: OpenToy) -> None:
    """The target's table is padded; ids behind the tokenizer's are cut from a proposal."""
    toy = Toy(padded_vocab=16)
    engine = open_toy(toy)
    drafter = Replay(toy, [4, 5, 12, 7, 8], prompt_length=4)
    result, rounds = watched(engine, [0, 1, 2, 3], drafter=drafter, max_new_tokens=8)
    assert result.tokens == toy.plain([0, 1, 2, 3], 8)
    assert rounds[0].proposal == (5,)


# Streams.


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_streamed_text_is_the_text(open_toy: OpenToy, k: int) -> None:
    """C70: emoji, Hangul, CJK and spaces in parts, a tail that is cut; nothing is taken back."""
    from test_text import TEXTS, TOKENIZERS

    for tokenizer in TOKENIZERS.values():
        ids = [id_ for text in TEXTS[:4] for id_ in tokenizer.encode(text).ids]
        ids = ids[:-1]  # may end inside a character
        toy = scripted(ids, tokenizer=tokenizer)
        stream = open_toy(toy).stream(
            [0],
            drafter=Replay(toy, ids, prompt_length=1),
            num_assistant_tokens=k,
            max_new_tokens=len(ids),
            strict=True,
        )
        pieces = list(stream)
        assert stream.result.tokens == ids
        assert "".join(pieces) == stream.result.text == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        assert "" not in pieces
