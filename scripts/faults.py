"""A fault, what may come of it, and how one generation with a fault in it is judged.

What :mod:`fault_injection` plants is in ``faults_runs``, ``faults_files`` and ``faults_callers``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import small_vocabulary
import torch
from small_vocabulary import FOLDERS, METHODS, PROMPT

import specrun
from specexport.sources import resolve
from specrun.errors import SpecrunError

Outcome = Literal["torch", "plain", "same", "refused", "error", "nothing"]
NEW = 20
TEXT = PROMPT * 3  # read in four chunks
CHUNK = 7
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": (), "do_sample": False}


@dataclass(frozen=True)
class Bench:
    """The engine folders and what transformers says behind TEXT, by pair."""

    root: Path
    right: dict[str, list[int]]

    def engines(self, pair: str) -> Path:
        """The engine folder of ``pair``."""
        return self.root / pair / small_vocabulary.ENGINES

    def checkpoint(self, pair: str) -> Path:
        """The checkpoint of its target."""
        return self.root / pair / FOLDERS[pair].target

    def open(self, pair: str, path: Path | None = None, **options: Any) -> specrun.Engine:
        """The folder, or a copy at ``path``, with the checkpoint for PyTorch."""
        given = {"threads": 1, "prefill_chunk": CHUNK, **options}
        if given.get("verify") != "engine":
            given.setdefault("target", str(self.checkpoint(pair)))
        return specrun.load(path or self.engines(pair), **given)


@dataclass
class Seen:
    """What came of a fault; ``wrong``: why that is not right."""

    outcome: str
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """``try_it(bench, place)``: plants it and says what came of it; ``place``: an empty folder."""

    seam: str
    name: str
    expected: tuple[Outcome, ...]
    try_it: Callable[[Bench, Path], Seen]

    @property
    def title(self) -> str:
        """Distinct for every fault."""
        return f"{self.seam}: {self.name}"


Plant = Callable[[], contextlib.AbstractContextManager[Any]]


def make_bench(root: Path) -> Bench:
    """Export every pair and ask transformers for the texts."""
    right: dict[str, list[int]] = {}
    for name, pair in FOLDERS.items():
        small_vocabulary.export(pair, root / name, check=False)
        model = resolve(root / name / pair.target).load_reference()
        ids = list(TEXT)
        with torch.no_grad():
            for _ in range(NEW):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        right[name] = ids[len(TEXT) :]
    return Bench(root, right)


# One generation with something wrong in it.


def generate(
    bench: Bench,
    method: str,
    plant: Plant,
    *,
    engine_options: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Seen:
    """Open, plant, generate; then, without the fault, generate on the same engine again."""
    pair = METHODS[method]
    right = bench.right[pair]
    given: dict[str, Any] = {"on_warning": silent, **GREEDY, **(options or {})}
    if "drafter" not in given:
        given["method"] = method
    with bench.open(pair, **(engine_options or {})) as engine:
        stream = engine.stream(TEXT, **given)
        pieces: list[str] = []
        raised: BaseException | None = None
        with plant():
            try:
                pieces += stream
            except (Exception, KeyboardInterrupt) as error:
                raised = error
        seen = judge_stream(stream, pieces, raised, right)
        engine.check_integrity()
        again = engine.generate(TEXT, method=method, on_warning=silent, **GREEDY)
        if again.tokens != right:
            seen.wrong.append(f"afterwards {again.tokens} instead of {right}")
        return seen


def judge_stream(
    stream: Any, pieces: Sequence[str], raised: BaseException | None, right: list[int]
) -> Seen:
    """What a stream gave, against the right text."""
    partial = stream.partial
    said = "".join(pieces)
    if raised is not None:
        seen = Seen("error")
        if partial.tokens != right[: len(partial.tokens)]:
            seen.wrong.append(f"committed {partial.tokens}, no beginning of {right}")
        if not partial.text.startswith(said):
            seen.wrong.append(f"streamed {said!r}, committed {partial.text!r}")
        if not isinstance(raised, (SpecrunError, Planted, KeyboardInterrupt)):
            seen.wrong.append(f"raised {raised!r}")
        return seen
    result, stats = stream.result, stream.result.stats
    outcome = "same"
    if stats.verifier_failure is not None:
        outcome = "torch"
    elif stats.mode == "fallback":
        outcome = "plain"
    seen = Seen(outcome)
    if result.tokens != right[: len(result.tokens)] or (
        result.finish_reason == "length" and len(result.tokens) != len(right)
    ):
        seen.wrong.append(f"got {result.tokens} instead of {right}")
    if said != result.text:
        seen.wrong.append(f"streamed {said!r}, the result has {result.text!r}")
    return seen


def silent(message: str) -> None:
    """Warnings are expected."""


class Planted(Exception):
    """An error of somebody else's code."""


class Counted:
    """Does ``fail()`` in place of a call, from call number ``first`` on, at most ``times``."""

    def __init__(self, first: int, fail: Callable[[], Any], times: int = 1 << 30) -> None:
        self._first, self._fail, self._times = first, fail, times
        self._calls = 0

    def due(self) -> bool:
        """Whether this call is one of those."""
        self._calls += 1
        return self._first < self._calls <= self._first + self._times

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._fail() if self.due() else None


def raising(error: BaseException) -> Callable[[], Any]:
    """A function that raises it."""

    def fail() -> Any:
        raise error

    return fail


def open_copy(bench: Bench, copy: Path) -> Seen:
    """Generate from a copy of the folder, if it opens."""
    right = bench.right["gemma4"]
    try:
        engine = bench.open("gemma4", copy)
    except SpecrunError as error:
        return Seen("refused", [] if error.hint else ["no hint"])
    with engine:
        stream = engine.stream(TEXT, on_warning=silent, **GREEDY)
        return judge_stream(stream, list(stream), None, right)
