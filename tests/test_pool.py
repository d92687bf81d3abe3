"""Requests on one engine: rows that come and go, a queue, cancelling, time, faults, lanes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from toys import Toy

import specrun
from specrun import Engine, GenerateOptions, Result, UsageError
from specrun.batch import Step
from specrun.errors import EngineError, QueueFull
from specrun.lane import Lane
from specrun.pool import Ask, Ended, Event, Pool, Ticket

OpenToy = Callable[..., Engine]
TOY = Toy(history_weight=3, drafter=True, draft=Toy(history_weight=3))
PROMPT = [1, 2, 3, 1, 2]
METHODS = ("plain", "prompt-lookup", "mtp-drafter", "draft")


class Heard:
    """A listener that keeps what it hears. ``gate``: every step waits for it."""

    def __init__(self, gate: threading.Semaphore | None = None) -> None:
        self.events: list[Event] = []
        self.threads: set[str] = set()
        self._ended: queue.Queue[Ended] = queue.Queue()
        self._gate = gate
        self.at_work = threading.Event()

    def __call__(self, ticket: Ticket, event: Event) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread().name)
        if isinstance(event, Ended):
            self._ended.put(event)
        else:
            self.at_work.set()
            if self._gate is not None:
                assert self._gate.acquire(timeout=30)

    def wait(self) -> Ended:
        """The end."""
        return self._ended.get(timeout=30)

    @property
    def steps(self) -> list[Step]:
        """All but the end."""
        return [event for event in self.events if isinstance(event, Step)]

    def check(self) -> Result:
        """The steps are the result, and the end came once and last."""
        ended = self.wait()
        assert [event for event in self.events if isinstance(event, Ended)] == [ended]
        assert self.events[-1] is ended
        result, steps = ended.result, self.steps
        assert [token for step in steps for token in step.tokens] == result.tokens
        assert "".join(step.text for step in steps) == result.text
        origins = [origin for step in steps for origin in step.origins]
        assert len(origins) == len(result.tokens)
        assert origins.count("accepted") == result.stats.accepted
        if result.logprobs is not None:
            assert [entry for step in steps for entry in step.logprobs] == result.logprobs
        return result


def ask(
    engine: Engine,
    prompt: list[int],
    heard: Heard,
    cancel: specrun.CancelToken | None = None,
    **changes: Any,
) -> Ask:
    return Ask(prompt, engine.request(GenerateOptions(**changes), cancel=cancel), heard)


def same(found: Result, wanted: Result) -> None:
    """All of it but the times."""
    assert (found.text, found.tokens, found.finish_reason) == (
        wanted.text,
        wanted.tokens,
        wanted.finish_reason,
    )
    assert found.logprobs == wanted.logprobs
    counts = ("rounds", "drafted", "accepted", "discarded", "accepted_by_round")
    for name in counts:
        assert getattr(found.stats, name) == getattr(wanted.stats, name)


# Rows: what each gives.


def test_rows_of_every_method_give_what_they_give_alone(open_toy: OpenToy) -> None:
    engine, alone = open_toy(TOY), open_toy(TOY)
    wishes: list[tuple[list[int], dict[str, Any]]] = [
        ([*PROMPT, index % 10], {"method": method, "max_new_tokens": 3 + 5 * index, "logprobs": 1})
        for index, method in enumerate(METHODS * 3)
    ]
    wishes.append((PROMPT, {"stop": ("44", "7"), "max_new_tokens": 50, "method": "draft"}))
    wishes.append((PROMPT, {"temperature": 2.0, "seed": 5, "max_new_tokens": 20}))
    wishes.append((PROMPT, {"max_new_tokens": 0}))
    with Pool(engine, max_batch=3, max_waiting=99) as pool:
        heard = [Heard() for _ in wishes]
        pool.submit([ask(engine, p, h, **o) for (p, o), h in zip(wishes, heard, strict=True)])
        for (prompt, options), listener in zip(wishes, heard, strict=True):
            same(listener.check(), alone.generate(prompt, **options))
            assert listener.threads == {"specrun-pool"}
        assert (pool.running, pool.waiting) == (0, 0)


def test_rows_take_turns_round_by_round(open_toy: OpenToy) -> None:
    """Whoever comes later begins at the next round, and a short one ends before a long one."""
    engine, gate = open_toy(TOY), threading.Semaphore(0)
    order: list[str] = []

    class Named(Heard):
        def __init__(self, name: str) -> None:
            super().__init__(gate if name == "a" else None)
            self.name = name

        def __call__(self, ticket: Ticket, event: Event) -> None:
            order.append(self.name if isinstance(event, Step) else f"{self.name} ends")
            super().__call__(ticket, event)

    a, b = Named("a"), Named("b")
    with Pool(engine) as pool:
        pool.submit([ask(engine, PROMPT, a, method="plain", max_new_tokens=5)])
        assert a.at_work.wait(30)
        pool.submit([ask(engine, PROMPT, b, method="plain", max_new_tokens=2)])
        gate.release(9)
        a.check(), b.check()
    assert order == ["a", "a", "b", "a", "b", "b ends", "a", "a", "a ends"]


def test_lanes_are_used_again(open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_toy(TOY)
    made: list[Lane] = []
    opened = Lane.__init__

    def counted(self: Lane, *arguments: Any) -> None:
        made.append(self)
        opened(self, *arguments)

    monkeypatch.setattr(Lane, "__init__", counted)
    with Pool(engine, max_batch=2) as pool:
        for wave in range(3):
            heard = [Heard() for _ in range(6)]
            method: Any = METHODS[wave]
            pool.submit([ask(engine, PROMPT, h, method=method, max_new_tokens=9) for h in heard])
            for listener in heard:
                assert listener.check().tokens == TOY.plain(PROMPT, 9)
    assert len(made) == 2


def test_rows_of_an_engine_without_a_pool(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    with engine.rows() as rows:
        with pytest.raises(UsageError, match="the engine is busy"):
            engine.generate(PROMPT)
        rounds: list[specrun.Round] = []
        request = engine.request(GenerateOptions(max_new_tokens=7), on_round=rounds.append)
        row = rows.add(PROMPT, request)
        assert row.partial.finish_reason == "unfinished"
        steps = list(iter(row.step, None))
        assert [token for step in steps for token in step.tokens] == TOY.plain(PROMPT, 7)
        assert sum(len(done.emitted) for done in rounds) == 6
        with rows.add(PROMPT, request) as closed:
            closed.step()
        assert closed.partial.finish_reason == "cancelled"
        assert closed.partial.tokens == TOY.plain(PROMPT, 1)
    assert engine.generate(PROMPT, max_new_tokens=4).tokens == TOY.plain(PROMPT, 4)


# The queue.


def held_up(engine: Engine, pool: Pool) -> tuple[Heard, Ticket, threading.Semaphore]:
    """A request at work that does not get on before the semaphore is released."""
    gate = threading.Semaphore(0)
    heard = Heard(gate)
    (ticket,) = pool.submit([ask(engine, PROMPT, heard, max_new_tokens=9)])
    assert heard.at_work.wait(30)
    return heard, ticket, gate


def test_a_full_queue_refuses(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    with Pool(engine, max_batch=1, max_waiting=2) as pool:
        first, _, gate = held_up(engine, pool)
        others = [Heard() for _ in range(3)]
        wish = [ask(engine, PROMPT, heard, max_new_tokens=3) for heard in others]
        with pytest.raises(QueueFull, match=r"^1 requests run and 0 wait, more are not taken") as e:
            pool.submit(wish)
        assert e.value.retry_after >= 1 and not any(heard.events for heard in others)
        pool.submit(wish[:2])
        assert (pool.running, pool.waiting) == (1, 2)
        with pytest.raises(QueueFull, match="1 requests run and 2 wait"):
            pool.check_room()
        gate.release(99)
        for heard in (first, *others[:2]):
            heard.check()
        pool.submit(wish[2:])
        others[2].check()
        with pytest.raises(UsageError, match="4 texts at once are more than the 1 that run and"):
            pool.submit([*wish, *wish[:1]])


def test_whoever_was_told_of_an_end_finds_room(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    with Pool(engine, max_batch=1, max_waiting=0) as pool:
        for _ in range(20):
            heard = Heard()
            pool.submit([ask(engine, PROMPT, heard, max_new_tokens=1)])
            heard.check()


# Ending early.


def test_cancelled_while_it_waits(open_toy: OpenToy) -> None:
    """It makes room at once, and is told in the thread that cancels."""
    engine = open_toy(TOY)
    with Pool(engine, max_batch=1, max_waiting=1) as pool:
        first, _, gate = held_up(engine, pool)
        heard = Heard()
        (ticket,) = pool.submit([ask(engine, PROMPT, heard)])
        ticket.cancel()
        ticket.cancel()
        result = heard.check()
        assert (result.finish_reason, result.tokens, heard.steps) == ("cancelled", [], [])
        assert ticket.started is None and ticket.ended is not None and pool.waiting == 0
        pool.check_room()
        gate.release(99)
        assert first.check().tokens == TOY.plain(PROMPT, 9)


def test_cancelled_at_work(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    with Pool(engine, max_batch=2) as pool:
        first, ticket, gate = held_up(engine, pool)
        other = Heard()
        pool.submit([ask(engine, PROMPT, other, max_new_tokens=9)])
        ticket.cancel()
        gate.release(99)
        result = first.check()
        assert result.finish_reason == "cancelled"
        assert result.tokens == TOY.plain(PROMPT, len(result.tokens)) and len(result.tokens) < 9
        assert other.check().tokens == TOY.plain(PROMPT, 9)


def test_cancelled_by_a_token_of_the_request(open_toy: OpenToy) -> None:
    engine, token, heard = open_toy(TOY), specrun.CancelToken(), Heard()
    token.cancel()
    with Pool(engine) as pool:
        pool.submit([ask(engine, PROMPT, heard, cancel=token)])
        assert heard.check().finish_reason == "cancelled"


def test_time_out_counts_from_the_arrival(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    with Pool(engine, max_batch=1) as pool:
        first, _, gate = held_up(engine, pool)
        heard = Heard()
        (ticket,) = pool.submit([ask(engine, PROMPT, heard, timeout=0.01, max_new_tokens=9)])
        time.sleep(0.02)
        gate.release(99)
        result = heard.check()
        assert (result.finish_reason, result.tokens, ticket.started) == ("timeout", [], None)
        first.check()


# Faults.


class Broken(Exception):
    """What a listener, or an engine, is made to raise."""


def test_a_listener_that_raises_ends_its_own_request(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    bad, good = Heard(), Heard()

    def raising(ticket: Ticket, event: Event) -> None:
        bad(ticket, event)
        if isinstance(event, Step) or len(bad.events) > 1:
            raise Broken

    with Pool(engine) as pool:
        wish = ask(engine, PROMPT, bad, max_new_tokens=9)
        pool.submit(
            [Ask(wish.tokens, wish.request, raising), ask(engine, PROMPT, good, max_new_tokens=9)]
        )
        ended = bad.wait()
        assert isinstance(ended.error, Broken) and ended.result.finish_reason == "cancelled"
        assert good.check().tokens == TOY.plain(PROMPT, 9)
        assert isinstance(pool.listener_failure, Broken)


def test_an_engine_that_fails_ends_its_own_request(
    open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_toy(TOY, verify="engine")
    bad, good, later = Heard(), Heard(), Heard()
    with Pool(engine, max_batch=2) as pool:
        with monkeypatch.context() as patch:

            def fails(self: object, *arguments: Any, **named: Any) -> None:
                raise EngineError("it broke")

            patch.setattr("specrun.guarded_target.GuardedTarget.prefill", fails)
            pool.submit([ask(engine, PROMPT, bad, max_new_tokens=9)])
            ended = bad.wait()
        assert isinstance(ended.error, EngineError) and ended.result.finish_reason == "error"
        pool.submit([ask(engine, PROMPT, heard, max_new_tokens=9) for heard in (good, later)])
        assert good.check().tokens == later.check().tokens == TOY.plain(PROMPT, 9)


# Closing.


def test_closing_ends_everything_and_frees_the_engine(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    pool = Pool(engine, max_batch=1)
    first, _, gate = held_up(engine, pool)
    second = Heard()
    pool.submit([ask(engine, PROMPT, second)])
    with pytest.raises(UsageError, match="the engine is busy"):
        engine.close()
    closing = threading.Thread(target=pool.close)
    closing.start()
    assert second.wait().result.finish_reason == "cancelled"
    gate.release(99)
    closing.join(30)
    assert first.check().finish_reason == "cancelled" and not pool.alive
    with pytest.raises(UsageError, match="the pool is closed"):
        pool.submit([])
    pool.close()
    assert engine.generate(PROMPT, max_new_tokens=3).tokens == TOY.plain(PROMPT, 3)


def test_those_that_are_there_go_on_while_no_more_are_taken(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    with Pool(engine) as pool:
        first, _, gate = held_up(engine, pool)
        pool.stop_taking()
        with pytest.raises(UsageError, match="the pool is closed"):
            pool.check_room()
        gate.release(99)
        assert first.check().tokens == TOY.plain(PROMPT, 9)


def test_a_listener_cannot_close_the_pool(open_toy: OpenToy) -> None:
    engine, heard = open_toy(TOY), Heard()
    with Pool(engine) as pool:

        def closes(ticket: Ticket, event: Event) -> None:
            heard(ticket, event)
            if isinstance(event, Step):
                pool.close()

        pool.submit([Ask(PROMPT, engine.request(GenerateOptions(max_new_tokens=2)), closes)])
        error = heard.wait().error
        assert isinstance(error, UsageError) and "cannot be closed by a listener" in str(error)


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"max_waiting": -1}, {"max_batch": True}])
def test_sizes_are_checked(open_toy: OpenToy, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: must be a whole number"):
        Pool(open_toy(TOY), **wrong)
