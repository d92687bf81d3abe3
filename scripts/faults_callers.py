"""Faults of whoever calls: drafters that lie, callbacks that raise, consumers that go away."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import small_vocabulary
from faults import (
    GREEDY,
    TEXT,
    Bench,
    Counted,
    Fault,
    Planted,
    Seen,
    generate,
    judge_stream,
    raising,
)
from faults_runs import runs_fail

import specrun


class Lying:
    """A drafter of the caller's that does ``lie`` in one of its verbs."""

    def __init__(self, verb: str, lie: Callable[[], Any], needs_rows: bool = False) -> None:
        self._verb, self._lie = verb, lie
        self.needs_prompt_rows = needs_rows

    @property
    def max_drafts(self) -> Any:
        return self._lie() if self._verb == "max_drafts" else 4

    def begin(self, tokens: Sequence[int]) -> None:
        self._do("begin")

    def observe(self, tokens: Sequence[int], hidden: Any) -> None:
        hidden[...] = 0 if self._verb == "overwrites" else hidden
        self._do("observe")

    def propose(self, count: int, sampler: Any) -> Any:
        return self._lie() if self._verb == "propose" else [0] * count

    def truncate(self, length: int) -> None:
        self._do("truncate")

    def _do(self, verb: str) -> None:
        if self._verb == verb:
            self._lie()


LIES: dict[str, Any] = {
    "None": None,
    "a text": "abc",
    "a number": 5,
    "ids that are not there": [10**6, 10**9],
    "negative ids": [-1, -5],
    "halves": [0.5, 1.5],
    "too many": list(range(8)) * 1000,
    "lists of lists": [[1], [2]],
    "a proposal without its q": (list(range(3)), [None]),
    "truth values": [True, False],
}


def drafter_faults() -> Iterator[Fault]:
    """What a drafter of the caller's may do wrong."""
    for what, lie in LIES.items():
        yield Fault(
            "drafter lies",
            f"proposes {what}",
            ("plain", "same"),
            lambda b, _, x=lie: lying(b, "propose", lambda: x),  # type: ignore[misc]
        )
    for verb in ("begin", "observe", "propose", "truncate", "max_drafts"):
        for error in (Planted("planted"), MemoryError("planted")):
            yield Fault(
                "drafter lies",
                f"{type(error).__name__} in {verb}",
                ("plain",),
                lambda b, _, v=verb, x=error: lying(b, v, raising(x)),  # type: ignore[misc]
            )
    yield Fault(
        "drafter lies",
        "raises while the prompt is read",
        ("plain",),
        lambda b, _: lying(b, "observe", raising(Planted("planted")), needs_rows=True),
    )
    yield Fault("drafter lies", "Ctrl-C in propose", ("error",), interrupted)


def lying(bench: Bench, verb: str, lie: Callable[[], Any], needs_rows: bool = False) -> Seen:
    """A generation with such a drafter, on a target that can give it hidden rows."""
    options = {"drafter": Lying(verb, lie, needs_rows)}
    return generate(bench, "mtp", contextlib.nullcontext, options=options)


def interrupted(bench: Bench, _: Path) -> Seen:
    """What is no failure of the drafter passes through."""
    return lying(bench, "propose", raising(KeyboardInterrupt()))


def callback_faults() -> Iterator[Fault]:
    """Callbacks that raise, at the first call and later; and consumers that go away."""
    errors: tuple[BaseException, ...] = (Planted("planted"), KeyboardInterrupt())
    for name in ("on_round", "logits_processor"):
        for first in (0, 3):
            for error in errors:
                yield Fault(
                    "callback",
                    f"{type(error).__name__} in {name}, call {first}",
                    ("error",),
                    lambda b, _, n=name, f=first, x=error: callback(b, n, f, x),  # type: ignore[misc]
                )
    yield Fault(
        "callback",
        "Planted in on_warning",
        ("error",),
        lambda b, _: generate(
            b,
            "mtp-drafter",
            runs_fail(["target"], 2, "raises"),
            options={"on_warning": Counted(0, raising(Planted("planted")))},
        ),
    )
    answers: dict[str, Any] = {
        "None": None,
        "a number": 1.0,
        "too few": np.zeros(3, np.float32),
        "NaN": np.full(small_vocabulary.SIZE, np.nan, np.float32),
        "texts": ["a"] * small_vocabulary.SIZE,
    }
    for what, answer in answers.items():
        yield Fault(
            "callback",
            f"logits_processor gives {what}",
            ("error",),
            lambda b, _, a=answer: generate(  # type: ignore[misc]
                b,
                "mtp-drafter",
                contextlib.nullcontext,
                options={"logits_processor": lambda tokens, logits: a},
            ),
        )
    for count in (0, 1, 3):
        yield Fault(
            "consumer",
            f"closes the stream after {count} pieces",
            ("error",),
            lambda b, _, n=count: closes(b, n),  # type: ignore[misc]
        )
        yield Fault(
            "consumer",
            f"cancels after {count} rounds",
            ("same",),
            lambda b, _, n=count: cancels(b, n),  # type: ignore[misc]
        )


def callback(bench: Bench, name: str, first: int, error: BaseException) -> Seen:
    """``name`` raises from call ``first`` on."""
    counted = Counted(first, raising(error))

    def process(tokens: Any, logits: Any) -> Any:
        counted()
        return logits

    value = counted if name == "on_round" else process
    return generate(bench, "mtp-drafter", contextlib.nullcontext, options={name: value})


def closes(bench: Bench, count: int) -> Seen:
    """The consumer has enough after ``count`` pieces; the engine is free at once."""
    right = bench.right["gemma4"]
    with bench.open("gemma4") as engine:
        stream = engine.stream(TEXT, **GREEDY)
        pieces = [piece for piece, _ in zip(stream, range(count), strict=False)] if count else []
        stream.close()
        seen = judge_stream(stream, pieces[:count], Planted("closed"), right)
        engine.check_integrity()
        if engine.generate(TEXT, **GREEDY).tokens != right:
            seen.wrong.append("afterwards another text")
        return seen


def cancels(bench: Bench, count: int) -> Seen:
    """A token that is cancelled in a callback; the result is the beginning of the text."""
    token = specrun.CancelToken()
    counted = Counted(count, token.cancel)
    options = {"cancel": token, "on_round": counted}
    if count == 0:
        token.cancel()
    return generate(bench, "mtp-drafter", contextlib.nullcontext, options=options)
