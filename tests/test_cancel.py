"""Generations that end early: cancelled, out of time, closed, interrupted; what stays of them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from drafting import Failing, Oracle
from test_text import TOKENIZERS
from toys import Toy, scripted, write_folder

import specrun
from specrun import CancelToken, Engine, EngineError, Result, Round, UsageError
from specrun.cli import main
from specrun.ort import PreparedRun
from specrun.stats import Meter
from specrun.stopping import Stopping
from specrun.target import Target
from specrun.text import Tokenizer

OpenToy = Callable[..., Engine]
TOY = Toy(history_weight=3, drafter=True, draft=Toy(history_weight=3))
PROMPT = [1, 2, 3, 1, 2]
LONG = PROMPT * 8


def same(partial: Result, result: Result) -> None:
    """All of it but the times."""
    assert (partial.text, partial.tokens, partial.finish_reason) == (
        result.text,
        result.tokens,
        result.finish_reason,
    )
    assert partial.stats == result.stats


def check(result: Result, prompt: list[int], toy: Toy = TOY) -> None:
    """It begins as the whole text does, and its parts belong together."""
    assert result.tokens == toy.plain(prompt, len(result.tokens))
    assert result.text == "".join(map(str, result.tokens))
    assert result.stats.emitted == len(result.tokens)


# Cancelling.


@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "mtp-drafter", "draft"])
@pytest.mark.parametrize("at", [0, 2])
def test_cancelled_in_a_round(open_toy: OpenToy, method: Any, at: int) -> None:
    """No further round runs, and the stream's pieces are the text."""
    engine, token = open_toy(TOY), CancelToken()
    rounds: list[Round] = []

    def watch(done: Round) -> None:
        rounds.append(done)
        if done.index == at:
            token.cancel()

    stream = engine.stream(PROMPT, method=method, on_round=watch, cancel=token, max_new_tokens=99)
    text = "".join(stream)
    result = stream.result
    assert (result.finish_reason, len(rounds)) == ("cancelled", at + 1)
    assert result.text == text and result.stats.rounds == at + 1
    check(result, PROMPT)
    engine.check_integrity()
    assert engine.generate(PROMPT, max_new_tokens=5).tokens == TOY.plain(PROMPT, 5)


def test_cancelled_before_it_begins(open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, token = open_toy(TOY), CancelToken()
    before = token.cancelled
    token.cancel()
    assert (before, token.cancelled) == (False, True)
    monkeypatch.setattr("specrun.ort.PreparedRun.run", None)  # nothing is run
    for result in (
        engine.generate(PROMPT, cancel=token),
        *engine.generate([PROMPT, [1]], cancel=token),
        engine.generate(PROMPT, cancel=token, max_new_tokens=0),
    ):
        assert (result.text, result.tokens, result.finish_reason) == ("", [], "cancelled")
        assert result.stats.emitted == 0
    engine.check_integrity()


@pytest.mark.parametrize("options", [{}, {"exact": True, "exact_width": 4}])
@pytest.mark.parametrize("chunks", [1, 3])
def test_cancelled_while_the_prompt_is_read(
    open_toy: OpenToy, options: dict[str, Any], chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between two chunks, and a session reads on from there."""
    engine, token = open_toy(TOY, prefill_chunk=4, **options), CancelToken()
    session = engine.session()
    session.append(LONG)
    target: Any = session._open()[1].target
    inner = getattr(target, "target", target)._target  # the engine behind its guard
    step, fed = inner._step, [0]

    def counted(*arguments: Any) -> Any:
        fed[0] += 1
        if fed[0] == chunks:
            token.cancel()
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(inner, "_step", counted)
        result = session.generate(cancel=token, max_new_tokens=9)
        assert (result.finish_reason, result.tokens, fed[0]) == ("cancelled", [], chunks)
        assert target.length == 4 * chunks
        session.check_integrity()
        fed[0] = -99
        result = session.generate(max_new_tokens=9, method="plain")
        assert result.tokens == TOY.plain(LONG, 9)
        assert fed[0] + 99 == (len(LONG) - 4 * chunks) // 4 + 8  # nothing is read twice


def test_cancelled_while_the_draft_model_reads(open_toy: OpenToy) -> None:
    """A draft model reads the prompt too, and may be as slow."""
    engine, token = open_toy(TOY, prefill_chunk=4), CancelToken()
    session = engine.session()
    session.append(LONG)
    session.generate(method="plain", max_new_tokens=1)
    lane, _ = session._open()
    drafter: Any = lane.drafter(engine.resolve(specrun.GenerateOptions(method="draft")))
    step, fed = drafter.reader.model._step, []

    def counted(*arguments: Any) -> Any:
        fed.append(1)
        token.cancel()
        return step(*arguments)

    drafter.reader.model._step = counted
    result = session.generate(method="draft", cancel=token, max_new_tokens=9)
    assert (result.finish_reason, len(result.tokens), len(fed)) == ("cancelled", 1, 1)
    text = session.tokens
    assert session.generate(method="draft", max_new_tokens=9).tokens == TOY.plain(text, 9)


def test_cancelled_from_another_thread(open_toy: OpenToy) -> None:
    toy, token = Toy(max_context=100_000), CancelToken()
    engine = open_toy(toy)
    seen = threading.Event()
    results: list[Result] = []

    def work() -> None:
        options: Any = {"max_new_tokens": 90_000, "method": "plain"}
        results.append(engine.generate([1], cancel=token, on_round=lambda _: seen.set(), **options))

    thread = threading.Thread(target=work)
    thread.start()
    assert seen.wait(30)
    token.cancel()
    thread.join(30)
    assert not thread.is_alive()
    (result,) = results
    assert result.finish_reason == "cancelled" and 0 < len(result.tokens) < 90_000
    check(result, [1], toy)


def test_a_batch_ends_as_a_whole(open_toy: OpenToy) -> None:
    engine, token = open_toy(TOY), CancelToken()
    prompts = [[1], [1, 2, 3, 4], [9, 9]]

    def watch(done: Round) -> None:
        if (done.index, done.sequence) == (1, 1):
            token.cancel()

    rows = engine.generate(prompts, cancel=token, on_round=watch, max_new_tokens=50)
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.finish_reason == "cancelled" and 0 < len(row.tokens) < 50
        check(row, prompt)


def test_a_token_is_a_token(open_toy: OpenToy) -> None:
    with pytest.raises(UsageError, match="cancel: must be a CancelToken, got True") as caught:
        open_toy(TOY).generate([1], cancel=True)  # type: ignore[call-overload]
    assert "specrun.CancelToken()" in str(caught.value.hint)


def test_held_back_text_is_released(open_toy: OpenToy) -> None:
    """What may begin a stop string, and the first bytes of a character."""
    engine, token = open_toy(Toy()), CancelToken()
    stream = engine.stream([0], stop=["23x"], cancel=token, method="plain", max_new_tokens=20)
    assert next(stream) == "1"
    token.cancel()
    assert stream.partial.text == "1"
    assert (list(stream), stream.result.text, stream.result.tokens) == ([], "1", [1])

    token = CancelToken()
    stop = {1: token.cancel}
    rest = list(
        engine.stream(
            [0],
            stop=["23x"],
            cancel=token,
            method="plain",
            on_round=lambda done: stop.get(done.index, lambda: None)(),
        )
    )
    assert rest == ["1", "23"]

    fox = TOKENIZERS["byte-level"].encode("a🦊").ids
    token = CancelToken()
    toy = scripted(fox, tokenizer=TOKENIZERS["byte-level"])
    stream = open_toy(toy).stream(
        [0],
        cancel=token,
        method="plain",
        max_new_tokens=len(fox),
        on_round=lambda done: token.cancel() if done.index == 1 else None,
    )
    pieces = list(stream)
    result = stream.result
    assert (result.tokens, result.finish_reason) == (fox[:3], "cancelled")
    assert "".join(pieces) == result.text == TOKENIZERS["byte-level"].decode(fox[:3])
    assert pieces[0] == "a" and "\ufffd" in pieces[1]


def test_finish_gives_what_is_held_once() -> None:
    tokenizer = Tokenizer.wrap(TOKENIZERS["byte-level"])
    stopping = Stopping(tokenizer, eos_token_ids=(), stop=["abc"], max_tokens=9)
    ids = tokenizer.encode("xab", add_special_tokens=False)
    assert stopping.take(ids).text == "x"
    assert (stopping.finish(), stopping.finish()) == ("ab", "")


# Time.


class Clock:
    """Stands in for the time that passes; ``tick`` in place of a callback or a run takes 1 s."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def tick(self, *_: Any) -> None:
        self.now += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("specrun.cancel.time", clock)
    return clock


def test_time_is_up(open_toy: OpenToy, clock: Clock) -> None:
    """Within a round; each row of a batch by the same clock."""
    engine = open_toy(TOY)
    options: Any = {"method": "plain", "timeout": 2.5, "on_round": clock.tick}
    result = engine.generate(PROMPT, **options)
    assert result.finish_reason == "timeout" and result.stats.rounds == 3
    check(result, PROMPT)
    rows = engine.generate([PROMPT, [1], [2]], **options)
    assert {row.finish_reason for row in rows} == {"timeout"}
    assert [row.stats.rounds for row in rows] == [1, 1, 1]
    session = engine.session()
    session.append(PROMPT)
    first = session.generate(**options)
    assert first.finish_reason == "timeout"
    text = session.tokens
    assert text == PROMPT + first.tokens
    assert session.generate(max_new_tokens=9).tokens == TOY.plain(text, 9)
    assert engine.generate(PROMPT, timeout=1000, max_new_tokens=9).finish_reason == "length"


def test_time_is_up_while_the_prompt_is_read(
    open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    engine = open_toy(TOY, prefill_chunk=4)

    def slow(self: PreparedRun) -> None:
        clock.tick()
        run(self)

    run = PreparedRun.run
    monkeypatch.setattr(PreparedRun, "run", slow)
    session = engine.session()
    session.append(LONG)
    assert session.generate(timeout=1.5).finish_reason == "timeout"
    assert session._open()[1].target.length == 8
    assert session.tokens == LONG


@pytest.mark.parametrize("value", [0, -1, "soon", float("nan"), float("inf"), True])
def test_times_that_cannot_be_meant(open_toy: OpenToy, value: Any) -> None:
    with pytest.raises(UsageError, match="timeout: must be a number above 0, got"):
        open_toy(TOY).generate([1], timeout=value)


# What is left.


def test_partial_at_any_time(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    stream = engine.stream(PROMPT, max_new_tokens=12, logprobs=1, method="mtp-drafter")
    before = stream.partial
    assert (before.text, before.tokens, before.finish_reason) == ("", [], "unfinished")
    assert before.logprobs == [] and before.stats.emitted == 0
    text = ""
    for piece in stream:
        text += piece
        partial = stream.partial
        if partial.finish_reason == "unfinished":
            assert partial.text == text
        check(partial, PROMPT)
        assert [entry.token for entry in partial.logprobs or ()] == partial.tokens
        assert partial.stats.prompt_tokens == len(PROMPT)
    assert stream.partial is stream.result
    same(stream.result, stream.partial)
    assert stream.result.finish_reason == "length"


def test_partial_after_close(open_toy: OpenToy) -> None:
    session = open_toy(TOY).session()
    session.append(PROMPT)
    with session.stream(max_new_tokens=50) as stream:
        text = "".join(next(stream) for _ in range(3))
    partial = stream.partial
    assert (partial.text, partial.finish_reason) == (text, "cancelled")
    assert PROMPT + partial.tokens == session.tokens
    session.rewind(0)
    assert stream.partial is partial  # it is not the session's any more
    with pytest.raises(UsageError, match="closed, or an error ended it") as caught:
        _ = stream.result
    assert "partial" in str(caught.value.hint)
    assert list(stream) == []


def test_partial_of_what_never_began(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    stream = engine.stream(PROMPT)
    stream.close()
    assert (stream.partial.tokens, stream.partial.finish_reason) == ([], "cancelled")
    busy = engine.stream(PROMPT)
    with engine.stream([1]) as other:
        next(other)
        with pytest.raises(UsageError, match="busy"):
            next(busy)
    assert busy.partial.finish_reason == "error"


def test_a_stream_closed_at_its_last_piece(open_toy: OpenToy) -> None:
    """The text had come to its end by then."""
    with open_toy(Toy()).stream([1], max_new_tokens=1) as stream:
        assert next(stream) == "2"
    assert stream.partial.finish_reason == "length"
    assert stream.result.tokens == [2]


def test_partial_after_an_error(open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy()
    engine = open_toy(toy)
    stream = engine.stream([1], drafter=Failing(toy, 2), strict=True, num_assistant_tokens=3)
    text = ""
    with pytest.raises(EngineError, match="the drafter broke"):
        for piece in stream:
            text += piece
    partial = stream.partial
    assert (partial.text, partial.finish_reason) == (text, "error")
    assert partial.stats.drafted == 6
    check(partial, [1], toy)
    engine.check_integrity()


def test_partial_after_a_callback_that_raised(open_toy: OpenToy) -> None:
    """The round it was told of is committed, its text was not given yet, and none is held back."""
    engine = open_toy(Toy())

    def fail(done: Round) -> None:
        if done.index == 2:
            raise ZeroDivisionError

    stream = engine.stream([1], on_round=fail, method="plain", stop=["5x"])
    with pytest.raises(ZeroDivisionError):
        list(stream)
    assert (stream.partial.text, stream.partial.tokens) == ("2345", [2, 3, 4, 5])
    assert (stream.partial.finish_reason, stream.partial.stats.rounds) == ("error", 3)

    stream = engine.stream([1], on_round=fail, method="plain", stop=["45"])
    with pytest.raises(ZeroDivisionError):
        list(stream)
    assert (stream.partial.text, stream.partial.tokens) == ("23", [2, 3, 4, 5])


def test_partial_from_another_thread(open_toy: OpenToy) -> None:
    """Tokens, text and statistics belong together at every moment."""
    toy = Toy(max_context=4000)
    stream = open_toy(toy).stream([1], max_new_tokens=3000, method="prompt-lookup")
    done, found = threading.Event(), []

    def watch() -> None:
        while not done.is_set():
            found.append(stream.partial)

    thread = threading.Thread(target=watch)
    thread.start()
    result = stream.drain()
    done.set()
    thread.join()
    for partial in found:
        check(partial, [1], toy)
    counts = [len(partial.tokens) for partial in found]
    assert counts == sorted(counts) and len(set(counts)) > 2
    assert result.finish_reason == "length"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("pieces", [1, 100])
def test_partial_while_it_goes_on(
    open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch, when: str, pieces: int
) -> None:
    """The same, however far another thread gets while the counts are taken: to the end too."""
    toy = Toy(max_context=100)
    stream = open_toy(toy).stream([1], max_new_tokens=60, method="prompt-lookup")
    freeze = Meter.freeze

    def meanwhile() -> None:
        monkeypatch.setattr(Meter, "freeze", freeze)
        for _ in range(pieces):
            next(stream, None)

    def slow(self: Meter, *arguments: Any, **options: Any) -> Any:
        if when == "before":
            meanwhile()
        found = freeze(self, *arguments, **options)
        if when == "after":
            meanwhile()
        return found

    monkeypatch.setattr(Meter, "freeze", slow)
    check(stream.partial, [1], toy)
    check(stream.partial, [1], toy)
    result = stream.drain()
    assert (len(result.tokens), stream.partial) == (60, result)


# The command.


def test_the_command_runs_out_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    folder = write_folder(tmp_path / "engines", Toy())

    def slow(self: Target, *arguments: Any, **options: Any) -> Any:
        clock.tick()
        return verify(self, *arguments, **options)

    verify = Target.verify
    monkeypatch.setattr(Target, "verify", slow)
    ask = [str(folder), "--prompt", "1", "--method", "plain", "--timeout", "0.5"]
    done = CliRunner().invoke(main, ask)
    assert (done.exit_code, done.stdout) == (0, "23\n")
    assert done.stderr == "warning: the text is not finished: --timeout 0.5 was up\n"
    assert CliRunner().invoke(main, [*ask, "--quiet"]).stderr == ""
    data = json.loads(CliRunner().invoke(main, [*ask, "--json"]).stdout)
    assert (data["finish_reason"], data["tokens"]) == ("timeout", [2, 3])
    done = CliRunner().invoke(main, [*ask[:-1], "0"])
    assert (done.exit_code, done.stderr.splitlines()[0]) == (
        2,
        "Error: --timeout: must be a number above 0, got 0.0",
    )


# The command, to which Ctrl-C comes in its third round.
PRESSED = """
import os, signal, sys
from specrun.cli import main
from specrun.target import Target
verify, rounds = Target.verify, []
def pressed(*arguments, **options):
    rounds.append(1)
    if len(rounds) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return verify(*arguments, **options)
Target.verify = pressed
main(sys.argv[1:])
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c(tmp_path: Path, as_json: bool) -> None:
    folder = write_folder(tmp_path / "engines", Toy())
    ask = [str(folder), "--prompt", "1", "--method", "plain", "--stats"]
    done = subprocess.run(
        [sys.executable, "-c", PRESSED, *ask, *(["--json"] if as_json else [])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "interrupted" and "Traceback" not in done.stderr
    assert "1 prompt, 3 new" in done.stderr
    if as_json:
        data = json.loads(done.stdout)
        assert (data["finish_reason"], data["tokens"]) == ("cancelled", [2, 3, 4])
    else:
        assert done.stdout == "234\n"


# An oracle that cancels, so that a drafter of one's own can.


class Canceller(Oracle):
    def __init__(self, toy: Toy, token: CancelToken) -> None:
        super().__init__(toy)
        self.token = token

    def propose(self, count: int, sampler: Any) -> Any:
        self.token.cancel()
        return super().propose(count, sampler)


def test_cancelled_by_a_drafter_or_a_processor(open_toy: OpenToy) -> None:
    engine, token = open_toy(TOY, exact=True, exact_width=4), CancelToken()
    result = engine.generate(PROMPT, drafter=Canceller(TOY, token), cancel=token)
    assert (result.finish_reason, result.stats.rounds) == ("cancelled", 1)
    check(result, PROMPT)
    token = CancelToken()

    def processor(tokens: Any, logits: np.ndarray[Any, Any]) -> Any:
        token.cancel()
        return logits

    result = engine.generate(PROMPT, logits_processor=processor, cancel=token)
    assert (result.finish_reason, len(result.tokens)) == ("cancelled", 1)
