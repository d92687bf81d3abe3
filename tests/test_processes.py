"""An engine in an app: threads, forks, copies, closing, memory, and what it leaves alone."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from toys import Toy, write_folder

import specrun
from specrun import CancelToken, ContextFull, Engine, UsageError
from specrun.kv import KvBuffers

OpenToy = Callable[..., Engine]
TOY = Toy(history_weight=3, drafter=True, draft=Toy(history_weight=3))
PROMPT = [1, 2, 3, 1, 2]
METHODS = ("plain", "prompt-lookup", "mtp-drafter", "draft")


def in_threads(*works: Callable[[], None]) -> None:
    """Run them at the same time; the first error of any comes out."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


# Threads.


class Held:
    """A callback that holds the generation which calls it, until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, _: Any) -> None:
        self.reached.set()
        assert self.go_on.wait(60)


def test_a_second_thread_is_refused(open_toy: OpenToy) -> None:
    """On a session, an engine, a stream; and the first goes on undisturbed."""
    engine, held = open_toy(TOY), Held()
    session, other = engine.session(), engine.session()
    session.append(PROMPT)
    other.append([1])
    stream = session.stream(on_round=held, max_new_tokens=20)
    found: list[Any] = []

    def first() -> None:
        found.append(stream.drain().tokens)

    def second() -> None:
        assert held.reached.wait(60)
        try:
            busy = "the engine is busy with another generation"
            for call, says in (
                (session.generate, busy),
                (other.generate, busy),
                (lambda: engine.generate([1]), busy),
                (lambda: engine.generate([[1], [2]]), busy),
                (lambda: session.append([1]), busy),
                (lambda: session.replace([1]), busy),
                (lambda: session.rewind(0), busy),
                (lambda: next(stream), "the stream is at work, in another thread"),
                (stream.close, "the stream is at work, in another thread"),
                (session.close, "the stream is at work, in another thread"),
                (engine.close, "the stream is at work, in another thread"),
            ):
                with pytest.raises(UsageError, match=says) as caught:
                    call()
                assert caught.value.hint
        finally:
            held.go_on.set()

    in_threads(first, second)
    assert found == [TOY.plain(PROMPT, 20)]
    assert other.generate(max_new_tokens=5).tokens == TOY.plain([1], 5)


def test_engines_in_threads(open_toy: OpenToy) -> None:
    """Each its own, sessions of one engine in turn."""

    def use(engine: Engine, seed: int) -> Callable[[], None]:
        def work() -> None:
            sessions = [engine.session() for _ in METHODS]
            for turn in range(6):
                for session, method in zip(sessions, METHODS, strict=True):
                    session.append([(seed + turn) % 10])
                    text = session.tokens
                    options: Any = {"method": method, "max_new_tokens": 12}
                    assert session.generate(**options).tokens == TOY.plain(text, 12)
                    session.check_integrity()

        return work

    in_threads(*(use(open_toy(TOY), seed) for seed in range(4)))


# Closing.


def test_closing_an_engine_ends_a_stream_that_waits(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    session = engine.session()
    session.append(PROMPT)
    waiting, new = session.stream(max_new_tokens=50), engine.stream([1])
    next(waiting)
    engine.close()
    assert waiting.partial.finish_reason == new.partial.finish_reason == "cancelled"
    assert waiting.partial.tokens == TOY.plain(PROMPT, len(waiting.partial.tokens)) != []
    assert session.tokens == PROMPT + waiting.partial.tokens
    assert list(waiting) == list(new) == []
    engine.close()  # again is nothing
    for call in (
        engine.session,
        session.generate,
        lambda: session.append([1]),
        lambda: engine.stream([1]),
        lambda: engine.generate([[1], [2]]),
    ):
        with pytest.raises(UsageError, match=r"the (engine|session) is closed"):
            call()


def test_an_error_is_not_hidden_by_closing(open_toy: OpenToy) -> None:
    with pytest.raises(ZeroDivisionError), open_toy(TOY) as engine, engine.session() as session:
        session.append(PROMPT)
        stream = session.stream()
        next(stream)
        raise ZeroDivisionError
    assert stream.partial.finish_reason == "cancelled"


def test_closing_a_session(open_toy: OpenToy) -> None:
    engine = open_toy(TOY)
    with engine.session() as session:
        session.append(PROMPT)
        session.generate(max_new_tokens=3)
    assert session.tokens == PROMPT + TOY.plain(PROMPT, 3)
    for call in (session.generate, session.check_integrity, lambda: session.rewind(0)):
        with pytest.raises(UsageError, match="the session is closed") as caught:
            call()
        assert "engine.session()" in str(caught.value.hint)
    session.close()
    assert engine.generate([1], max_new_tokens=3).tokens == TOY.plain([1], 3)


def test_a_stream_whose_session_was_closed(open_toy: OpenToy) -> None:
    session = open_toy(TOY).session()
    session.append(PROMPT)
    stream = session.stream()
    session.close()
    assert list(stream) == [] and stream.partial.finish_reason == "cancelled"


# Memory.


def buffers(lane: Any) -> list[weakref.ref[NDArray[Any]]]:
    """All KV buffers of a lane: of the target, and of its draft model."""
    kvs = [lane.target.kv]
    kvs += [d.reader.model.kv for d in lane._drafters.values() if hasattr(d, "reader")]
    return [weakref.ref(array) for kv in kvs for array in kv.arrays.values()]


@pytest.mark.parametrize("options", [{}, {"exact": True, "exact_width": 4}])
def test_buffers_are_freed_at_once(
    open_toy: OpenToy, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector: those of sessions, of batches, and of a closed engine."""
    engine = open_toy(TOY, **options)
    gc.collect()
    gc.disable()
    try:
        session = engine.session()
        session.append(PROMPT)
        stream = session.stream(method="draft", max_new_tokens=9)
        stream.drain()
        found = buffers(session._open()[0])
        assert len(found) == 4 and all(ref() is not None for ref in found)
        session.close()  # while session and stream are kept
        assert [ref() for ref in found] == [None] * 4

        session = engine.session()
        found = buffers(session._open()[0])
        del session
        assert not any(ref() is not None for ref in found)

        found = []
        allocate = KvBuffers._allocate

        def noted(self: KvBuffers, capacity: int) -> None:
            allocate(self, capacity)
            found.extend(weakref.ref(array) for array in self.arrays.values())

        with monkeypatch.context() as patch:
            patch.setattr(KvBuffers, "_allocate", noted)
            engine.generate([[1], [2]], method="draft", max_new_tokens=9)
        assert len(found) == 8 and not any(ref() is not None for ref in found)

        engine.generate([1], method="draft", max_new_tokens=9)
        found = buffers(engine._open_lane())
        engine.close()
        assert not any(ref() is not None for ref in found)
    finally:
        gc.enable()


def test_memory_that_runs_out_while_buffers_grow(
    open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All buffers have grown, or none."""
    engine = open_toy(TOY)
    session = engine.session()
    session.append(PROMPT)
    session.generate(max_new_tokens=240)
    zeros = np.zeros
    calls = iter(range(99))

    def scarce(shape: Any, dtype: Any = float) -> Any:
        if np.prod(shape) > 1000 and next(calls) == 1:
            raise MemoryError
        return zeros(shape, dtype=dtype)

    with monkeypatch.context() as patch:
        patch.setattr("specrun.kv.np.zeros", scarce)
        with pytest.raises(ContextFull, match="no memory for a KV buffer"):
            session.generate(method="plain", max_new_tokens=90)
    session.check_integrity()
    text = session.tokens
    assert len(text) >= 245
    assert session.generate(max_new_tokens=90).tokens == TOY.plain(text, 90)


# Processes.


def in_fork(work: Callable[[], object]) -> str:
    """Run ``work`` in a fork of this process; what it raised there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error} / {getattr(error, 'hint', None)}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:  # noqa: PTH123  a descriptor
        said = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_loads_for_itself(tmp_path: Path, threads: int) -> None:
    folder = write_folder(tmp_path / "engines", TOY)
    engine = specrun.load(folder, threads=threads)
    session = engine.session()
    session.append(PROMPT)
    session.generate(max_new_tokens=4)
    stream = engine.stream([1], max_new_tokens=20)
    text = next(stream)
    here = os.getpid()

    uses: tuple[Callable[[], object], ...] = (
        lambda: engine.generate([1]),
        lambda: engine.generate([[1], [2]]),
        lambda: engine.stream([1]),
        lambda: next(stream),
        stream.drain,
        session.generate,
        lambda: session.append([1]),
        engine.session,
    )
    for use in uses:
        said = in_fork(use)
        assert said.startswith(f"UsageError: the engine was loaded in process {here} and this is")
        assert said.endswith("call specrun.load() in the child, after the fork")

    def close() -> None:
        engine.close()
        session.close()
        stream.close()

    assert in_fork(close) == ""

    def load() -> None:
        with specrun.load(folder, threads=threads) as own:
            assert own.generate(PROMPT, max_new_tokens=9).tokens == TOY.plain(PROMPT, 9)

    assert in_fork(load) == ""
    assert text + "".join(stream) == "".join(map(str, TOY.plain([1], 20)))
    kept = session.tokens
    assert session.generate(max_new_tokens=4).tokens == TOY.plain(kept, 4)
    engine.close()


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_is_not_copied(open_toy: OpenToy, how: Callable[[Any], Any]) -> None:
    engine = open_toy(TOY)
    for thing in (engine, engine.session(), engine.stream([1]), CancelToken()):
        name = type(thing).__name__
        with pytest.raises(UsageError, match=f"{name}: cannot be copied or pickled"):
            how(thing)
    options = specrun.GenerateOptions(timeout=3.0)
    assert copy.deepcopy(options) == pickle.loads(pickle.dumps(options)) == options
    result = engine.generate([1], max_new_tokens=2)
    assert pickle.loads(pickle.dumps(result)).tokens == [2 + 3, TOY.plain([1], 2)[1]]


# What belongs to the app.

STATE = """
import decimal, faulthandler, gc, json, locale, logging, os, random, resource, signal, socket, sys
import threading, time, warnings
from pathlib import Path
import click, jinja2, numpy as np, onnxruntime, tokenizers  # theirs is not ours to keep

def state():
    return {
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "wakeup": signal.set_wakeup_fd(-1),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "timers": [signal.getitimer(timer) for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF)],
        "locale": locale.setlocale(locale.LC_ALL),
        "random": repr(random.getstate()),
        "numpy random": repr(np.random.get_state()),
        "numpy errors": [np.geterr(), str(np.geterrcall()), np.get_printoptions()],
        "environment": dict(os.environ),
        "warnings": repr(warnings.filters),
        "logging": [repr(logging.root.handlers), logging.root.level, logging.root.manager.disable],
        "traces": repr([sys.gettrace(), sys.getprofile(), threading.gettrace()]),
        "hooks": repr([sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook]),
        "directory": os.getcwd(),
        "umask": (os.umask(0o22), os.umask(0o22))[0],
        "decimal": repr(decimal.getcontext()),
        "recursion": [sys.getrecursionlimit(), sys.getswitchinterval(), threading.stack_size()],
        "path": sys.path,
        "gc": [gc.isenabled(), gc.get_threshold()],
        "cpus": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "limits": [resource.getrlimit(n) for n in range(16)],
        "sockets": socket.getdefaulttimeout(),
        "faulthandler": faulthandler.is_enabled(),
        "streams": [repr(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "torch": "torch" in sys.modules,
        "time": list(time.tzname),
    }

signal.signal(signal.SIGUSR1, lambda *_: None)
random.seed(5); np.random.seed(6); np.seterr(all="raise"); decimal.getcontext().prec = 7
warnings.simplefilter("error"); os.environ["OMP_NUM_THREADS"] = "3"
before = json.dumps(state(), default=repr)
import specrun
engine = specrun.load(sys.argv[1], threads=2)
for method in ("plain", "prompt-lookup", "mtp-drafter", "draft"):
    session = engine.session()
    session.append([1, 2, 3, 1, 2])
    session.generate(method=method, max_new_tokens=9)
    session.generate(method=method, max_new_tokens=9, do_sample=True, top_p=0.9, logprobs=2)
    session.generate(method=method, timeout=1e-9)
    with session.stream() as stream:
        next(stream)
engine.generate(["12", "3"], max_new_tokens=5, num_assistant_tokens_schedule="auto")
engine.close()
after = json.dumps(state(), default=repr)
before, after = json.loads(before), json.loads(after)
print(json.dumps([name for name in before if before[name] != after[name]]))
"""


def test_nothing_of_the_app_is_touched(tmp_path: Path) -> None:
    """Neither by importing nor by loading, generating, timing out or closing."""
    folder = write_folder(tmp_path / "engines", TOY)
    done = subprocess.run(
        [sys.executable, "-c", STATE, str(folder)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert done.stderr == ""


def test_a_touch_would_be_seen(tmp_path: Path) -> None:
    """The control: each of these is found."""
    touches = """
random.random(); np.random.random(); os.environ["X"] = "y"; np.seterr(all="ignore")
warnings.simplefilter("ignore"); os.chdir("/"); signal.signal(signal.SIGINT, signal.SIG_IGN)
decimal.getcontext().prec = 8; locale.setlocale(locale.LC_ALL, "C"); logging.basicConfig()
import specrun
"""
    folder = write_folder(tmp_path / "engines", TOY)
    done = subprocess.run(
        [sys.executable, "-c", STATE.replace("\nimport specrun\n", touches, 1), str(folder)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = set(json.loads(done.stdout))
    assert found >= {"random", "numpy random", "environment", "numpy errors", "warnings"}
    assert found >= {"directory", "signals", "decimal", "logging"}
