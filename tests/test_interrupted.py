"""Generations into which something breaks, wherever it does: the session goes on as a cold run.

Every kind of target (whole, in parts, in exact mode) with every kind of drafter: a run of an engine
that fails or that Ctrl-C follows, callbacks and drafters that raise, consumers that leave, and
Ctrl-C at any line of ours.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import exported
import pytest
from drafting import Failing, Noisy
from test_mtp_layers import DEEPSEEK, made  # noqa: F401  a fixture
from toys import Toy, toy_tokenizer

import specrun
from specexport.options import ExportOptions
from specrun import Engine, EngineError, Session, UsageError
from specrun.drafters.universal import UniversalDrafter
from specrun.drafters.vocabulary import VocabularyPair
from specrun.ort import PreparedRun
from specrun.target import Target
from specrun.text import Tokenizer

OpenToy = Callable[..., Engine]
TOY = Toy(history_weight=3, drafter=True, draft=Toy(history_weight=3), max_context=4096)
SHAPED = Toy(shaped=True, history_weight=3, drafter=True, draft=Toy(history_weight=3))
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 1]
NEW = 9
EXACT = {"exact": True, "exact_width": 4}


@dataclass
class Case:
    """An engine, how to draft on it, and a session that all goes wrong in."""

    engine: Engine
    options: dict[str, Any]
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.options = {"num_assistant_tokens": 3, "eos_token_ids": (), **self.options}
        self.session = self.engine.session()
        self.fresh()
        self.session.generate(max_new_tokens=NEW, **self.options)  # drafters are opened

    def fresh(self) -> None:
        """Back to the prompt, of which some rows stand."""
        self.session.replace(PROMPT)

    def generate(self, **options: Any) -> specrun.Result:
        """Another text behind the prompt."""
        self.fresh()
        return self.session.generate(max_new_tokens=NEW, **self.options | options)

    def check(self, partial: specrun.Result | None = None) -> None:
        """It is free, whole, and goes on as a cold run of the same tokens."""
        engine, session = self.engine, self.session
        engine.check_free()
        engine.check_integrity()
        session.check_integrity()
        text = session.tokens
        assert text[: len(PROMPT)] == PROMPT
        if partial is not None:
            assert PROMPT + partial.tokens == text
            assert partial.stats.emitted == len(partial.tokens)
        plain: dict[str, Any] = {"method": "plain", "eos_token_ids": (), "max_new_tokens": NEW}
        cold = engine.generate(PROMPT, **plain).tokens
        assert text[len(PROMPT) :] == cold[: len(text) - len(PROMPT)]
        cold = engine.generate(text, **plain).tokens
        assert session.generate(max_new_tokens=NEW, **self.options).tokens == cold
        session.check_integrity()


@pytest.fixture
def case(
    request: pytest.FixtureRequest, open_toy: OpenToy, once: Callable[..., Path]
) -> Iterator[Case]:
    kind, method = request.param
    exact = EXACT if kind.endswith("exact") else {}
    if kind.startswith("toy"):
        engine = open_toy(SHAPED if exact else TOY, prefill_chunk=4, **exact)
    elif kind == "layers":
        folder = request.getfixturevalue("made")(DEEPSEEK).folder
        engine = specrun.load(folder, threads=1, prefill_chunk=4)
    else:
        options = ExportOptions(num_draft=8, early_exit=1)
        pair = ("llama", None)  # as test_exact has it
        folder = once("exact-llama-1", lambda folder: exported.make(pair, folder, options=options))
        engine = exported.read(pair, folder).open(prefill_chunk=4, **exact)
    drafting = {"drafter": universal(engine)} if method == "universal" else {"method": method}
    with engine:
        yield Case(engine, drafting)


def universal(engine: Engine) -> UniversalDrafter:
    """The toy's draft model by way of its text."""
    resources = engine._resources
    model = Target(resources.session("draft"), engine.manifest.engines["draft"], max_context=512)
    words = Tokenizer.wrap(toy_tokenizer(TOY))
    pair = VocabularyPair(
        words, words, table_size=10, drafter_table_size=10, target_names={}, drafter_names={}
    )
    return UniversalDrafter(model, pair)


METHODS = ("plain", "prompt-lookup", "mtp-drafter", "draft")
CASES = [
    *(("toy", method) for method in (*METHODS, "universal")),
    *(("toy, exact", method) for method in METHODS),
    ("parts", "early-exit"),
    ("parts, exact", "early-exit"),
    ("layers", "mtp"),
]
every_case = pytest.mark.parametrize("case", CASES, indirect=True, ids=lambda pair: "-".join(pair))


# Engines.


@every_case
@pytest.mark.parametrize(
    ("error", "after"), [(RuntimeError, False), (KeyboardInterrupt, True), (SystemExit, False)]
)
def test_any_run_may_fail(
    case: Case, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], after: bool
) -> None:
    """Of the target in a chunk of the prompt or in a round, or of a drafter."""
    run, count, at = PreparedRun.run, 0, -1

    def failing(self: PreparedRun) -> None:
        nonlocal count
        count += 1
        if count - 1 != at:
            run(self)
            return
        if after:
            run(self)
        raise error("broken")

    with monkeypatch.context() as patch:
        patch.setattr(PreparedRun, "run", failing)
        case.generate()
    total = count
    assert total >= 4
    for place in range(total):
        at = place
        case.fresh()
        stream = case.session.stream(max_new_tokens=NEW, on_warning=lambda _: None, **case.options)
        count = 0
        with monkeypatch.context() as patch:
            patch.setattr(PreparedRun, "run", failing)
            try:
                stream.drain()
            except error:
                pass
            else:  # it was the drafter's, and the text went on without
                assert error is RuntimeError
                assert stream.result.stats.mode == "fallback"
        case.check(stream.partial)


@every_case
def test_cancelled_at_any_run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before the next chunk of the prompt, of whoever reads it, or the next round."""
    run, count, at = PreparedRun.run, 0, -1
    token = specrun.CancelToken()

    def cancelling(self: PreparedRun) -> None:
        nonlocal count
        if count == at:
            token.cancel()
        count += 1
        run(self)

    monkeypatch.setattr(PreparedRun, "run", cancelling)
    whole = case.generate()
    total, ends = count, 0
    for place in range(total):
        at, count, token = place, 0, specrun.CancelToken()
        case.fresh()
        result = case.session.generate(max_new_tokens=NEW, cancel=token, **case.options)
        assert result.finish_reason in ("cancelled", "length")
        assert result.tokens == whole.tokens[: len(result.tokens)]
        ends += result.finish_reason == "cancelled"
        at = -1
        case.check(result)
    assert ends >= total // 2


# Callbacks.

ERRORS = (ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit)


def raiser(error: type[BaseException], at: int, give: Callable[..., Any]) -> Callable[..., Any]:
    """Raises when it is called for the time ``at``."""
    calls = iter(range(1000))

    def callback(*arguments: Any) -> Any:
        if next(calls) == at:
            raise error
        return give(*arguments)

    return callback


@every_case
@pytest.mark.parametrize("error", ERRORS)
def test_callbacks_that_raise(case: Case, error: type[BaseException]) -> None:
    def nothing(_: Any) -> None:
        pass

    def same(_: Any, logits: Any) -> Any:
        return logits

    raised = 0
    for name, give in (("on_round", nothing), ("logits_processor", same)):
        for at in (0, 1, 4):
            case.fresh()
            callback: Any = {name: raiser(error, at, give)}
            stream = case.session.stream(
                max_new_tokens=NEW, on_warning=nothing, **callback, **case.options
            )
            try:
                stream.drain()
            except error:
                raised += 1
                stopped = issubclass(error, (KeyboardInterrupt, GeneratorExit))
                assert stream.partial.finish_reason == ("cancelled" if stopped else "error")
                if name == "on_round":
                    assert stream.partial.stats.rounds == at + 1
            case.check(stream.partial)
    assert raised >= 3


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("at", [0, 2])
def test_warnings_that_raise(open_toy: OpenToy, error: type[BaseException], at: int) -> None:
    case = Case(open_toy(TOY, prefill_chunk=4), {"method": "draft"})
    case.fresh()
    stream = case.session.stream(
        drafter=Failing(TOY, at),
        on_warning=raiser(error, 0, print),
        max_new_tokens=NEW,
        num_assistant_tokens=1,
    )
    with pytest.raises(error):
        stream.drain()
    case.check(stream.partial)


class Raising(Noisy):
    """Raises in a verb, when that is called for the time ``at``."""

    def __init__(self, toy: Toy, verb: str, at: int, error: type[BaseException]) -> None:
        super().__init__(toy)
        self.verb, self.at, self.error = verb, at, error

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name != "verb" and name == self.verb:
            self.at -= 1
            if self.at < 0:
                raise self.error("the drafter broke")
        return found


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    "verb", ["begin", "observe", "propose", "truncate", "max_drafts", "needs_prompt_rows"]
)
def test_drafters_that_raise(
    open_toy: OpenToy, verb: str, error: type[BaseException], exact: bool
) -> None:
    case = Case(open_toy(TOY, prefill_chunk=4, **(EXACT if exact else {})), {"method": "draft"})
    for at in (0, 1, 2):
        for strict in (False, True):
            case.fresh()
            stream = case.session.stream(
                drafter=Raising(TOY, verb, at, error),
                strict=strict,
                on_warning=lambda _: None,
                max_new_tokens=NEW,
            )
            try:
                result = stream.drain()
                # It was called less often, or the text went on without it.
                assert result.stats.mode == "speculative" or error is ZeroDivisionError
            except (error, EngineError) as caught:
                assert isinstance(caught, EngineError) == (error is ZeroDivisionError and strict)
            case.check(stream.partial)


# Consumers.


@every_case
def test_consumers_that_leave(case: Case) -> None:
    for pieces in range(5):
        case.fresh()
        stream = case.session.stream(max_new_tokens=NEW, **case.options)
        for _ in range(pieces):
            next(stream, None)
        stream.close()
        case.check(stream.partial)
        case.fresh()
        stream = case.session.stream(max_new_tokens=NEW, **case.options)
        for _ in range(pieces):
            next(stream, None)
        with pytest.raises(SystemExit):
            stream._pieces.throw(SystemExit)
        case.check(stream.partial if pieces else None)


def test_callbacks_cannot_use_the_engine(open_toy: OpenToy) -> None:
    """A clear error where a lock would wait for itself, and the text goes on."""
    engine = open_toy(TOY)
    session = engine.session()
    session.append(PROMPT)
    seen: list[str] = []

    def use(*_: Any) -> None:
        for call in (
            lambda: engine.generate([1]),
            lambda: engine.generate([[1], [2]]),
            lambda: next(engine.stream([1])),
            lambda: session.append([1]),
            lambda: session.replace([1]),
            lambda: session.rewind(0),
            lambda: session.generate(),
            lambda: next(stream),
            stream.drain,
            stream.close,
            session.close,
            engine.close,
        ):
            with pytest.raises(UsageError, match=r"busy with another|stream is at work") as caught:
                call()
            assert "callback" in f"{caught.value} {caught.value.hint}"
            seen.append(str(caught.value))

    def processor(tokens: Any, logits: Any) -> Any:
        use()
        return logits

    class Calling(Noisy):
        def propose(self, count: int, sampler: Any) -> Any:
            use()
            return super().propose(count, sampler)

    stream = session.stream(
        on_round=use,
        logits_processor=processor,
        drafter=Calling(TOY),
        max_new_tokens=NEW,
        strict=True,
    )
    assert stream.drain().tokens == TOY.plain(PROMPT, NEW)
    assert len(seen) > 60
    assert engine.generate(PROMPT, max_new_tokens=3).tokens == TOY.plain(PROMPT, 3)


# Ctrl-C.

OURS = str(Path(specrun.__file__).parent)
# Where locks are let go: a signal never comes in between there, but this trace would.
SPARED = ("process.py", "text.py")


def interrupted_at(line: int, work: Callable[[], object]) -> tuple[int, bool]:
    """Raise KeyboardInterrupt at that line of ours, counted from 0.

    Returns how many lines there were, and whether it came out.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        name = frame.f_code.co_filename
        if not name.startswith(OURS) or name.endswith(SPARED):
            return None
        if event == "line":
            count += 1
            if count - 1 == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return count, True
    finally:
        sys.settrace(before)
    return count, False


@every_case
def test_ctrl_c_at_any_line(case: Case) -> None:
    case.fresh()
    stream = case.session.stream(max_new_tokens=NEW, **case.options)
    total, _ = interrupted_at(-1, stream.drain)
    assert total > 300
    drawn = random.Random(total).sample(range(total), 30)
    for line in [*range(0, total, total // 12), *drawn]:
        case.fresh()
        stream = case.session.stream(max_new_tokens=NEW, **case.options)
        _, raised = interrupted_at(line, stream.drain)
        stream.close()  # it may have come before the stream's own code
        case.check(stream.partial)
        assert raised or stream.result
