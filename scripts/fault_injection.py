"""Faults at every seam: no committed token may be lost, no wrong one come, nothing may hang.

    python scripts/fault_injection.py [--only WORD ...] [--list]

Builds tiny pairs of every drafting method (``tests/small_vocabulary.py``), exports them, and
generates the same texts again and again, each time with one fault planted: engine files that are
damaged, runs of an engine that raise or answer with NaN, at the first run, in the middle of the
prompt and later; drafters that lie; callbacks that raise; PyTorch failing too; disks that are full
or cannot be read while a folder is written; processes that are killed. What must come of it::

    torch      the right text, PyTorch standing in for the target's engine
    plain      the right text, the drafter given up
    same       the right text, however
    refused    an error of ours before anything is generated
    error      an error, with all that was committed before it a beginning of the right text
    nothing    an export that fails leaves no folder, and an older one as it was

and after each, with the fault gone, the same engine gives the right text again where it is open.
The right text is transformers' own greedy one. A table for people, one JSON line last; exit status
1 where anything was not so. About four minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import onnxruntime
import small_vocabulary
import torch
from small_vocabulary import NUM_DRAFT, PROMPT, Pair

import specrun
from specexport import exporter, verification
from specexport.datafile import DataFile
from specexport.errors import SourceError
from specexport.exporter import ExportOptions
from specexport.sources import resolve
from specrun import manifest as manifests
from specrun.errors import SpecrunError
from specrun.ort import PreparedRun

Outcome = Literal["torch", "plain", "same", "refused", "error", "nothing"]
NEW = 20
TEXT = PROMPT * 3  # read in four chunks
CHUNK = 7
HANGS_AFTER = 60  # seconds
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": (), "do_sample": False}

PAIRS = {
    "llama": Pair("llama", ("llama-draft", "llama-other"), early_exit=1),
    "mtp": Pair("deepseek-dense"),
    "gemma4": Pair("gemma4", ("assistant-centroid",)),
}
# Method -> its pair, the engines of its target, and that of its drafter.
METHODS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "plain": ("llama", ("front", "back", "head"), None),
    "prompt-lookup": ("llama", ("front", "back", "head"), None),
    "draft": ("llama", ("front", "back", "head"), "draft"),
    "universal": ("llama", ("front", "back", "head"), "universal"),
    "early-exit": ("llama", ("front", "back", "head"), None),
    "mtp": ("mtp", ("target",), "mtp.0"),
    "mtp-drafter": ("gemma4", ("target",), "mtp_drafter"),
}


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
        return self.root / pair / PAIRS[pair].target

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
    for name, pair in PAIRS.items():
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
    pair = METHODS[method][0]
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


# Runs of engines.

RUN_ERRORS: dict[str, Callable[[], BaseException]] = {
    "raises": lambda: RuntimeError("planted"),
    "runs out of memory": MemoryError,
}
ANSWERS = {"answers NaN": np.nan, "answers infinity": np.inf}


def runs_fail(engines: Sequence[str], first: int, kind: str) -> Plant:
    """Runs of ``engines`` fail from number ``first`` on."""
    files = {f"{name}.onnx" for name in engines}

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        counted = Counted(first, lambda: None)
        real = PreparedRun.run

        def run(prepared: PreparedRun) -> None:
            if prepared.name not in files or not counted.due():
                return real(prepared)
            if kind in RUN_ERRORS:
                broken = mock.Mock()
                broken.run_with_iobinding.side_effect = RUN_ERRORS[kind]()
                with mock.patch.object(prepared, "_session", broken):
                    return real(prepared)
            real(prepared)
            for array in prepared.outputs.values():
                if array.dtype.kind == "f":
                    array[...] = ANSWERS[kind]
            return None

        with mock.patch.object(PreparedRun, "run", run):
            yield

    return plant


def run_faults() -> Iterator[Fault]:
    """Every method's target and drafter, at the first run, in the prompt, and later."""
    for method, (_, targets, drafter) in METHODS.items():
        per_chunk = len(targets)
        places = {"first run": 0, "mid-prefill": 2 * per_chunk, "run n": 6 * per_chunk + 1}
        for seam, first in places.items():
            for kind in (*RUN_ERRORS, *ANSWERS):
                if kind in ANSWERS and method in ("plain", "universal"):
                    continue  # as prompt-lookup and draft
                # NaN on its way between parts shows in what the last of them says, which runs once
                # for the prompt.
                engines = targets[-1:] if kind in ANSWERS else targets
                at = min(first // per_chunk, 2) if kind in ANSWERS else first
                plant = runs_fail(engines, at, kind)
                yield Fault(
                    seam,
                    f"{method}, target {kind}",
                    ("torch",),
                    lambda b, _, m=method, p=plant: generate(b, m, p),  # type: ignore[misc]
                )
        if drafter is None:
            continue
        for first in (0, 3):
            for kind in (*RUN_ERRORS, *ANSWERS):
                plant = runs_fail([drafter], first, kind)
                expected: tuple[Outcome, ...] = ("plain",)
                if kind in ANSWERS:
                    expected = ("plain", "same")  # its tokens may be right or wrong all the same
                yield Fault(
                    "drafter only",
                    f"{method}, run {first} {kind}",
                    expected,
                    lambda b, _, m=method, p=plant: generate(b, m, p),  # type: ignore[misc]
                )
    for name, options, expected in (
        ("strict", {"options": {"strict": True}}, ("error",)),
        ("verify engine", {"engine_options": {"verify": "engine"}}, ("error",)),
        ("exact", {"engine_options": {"exact": True, "prefill_chunk": 256}}, ("error",)),
    ):
        for first in (0, 2):
            plant = runs_fail(["target"], first, "raises")
            yield Fault(
                "nobody stands in",
                f"{name}, run {first}",
                expected,
                lambda b, _, p=plant, o=options: generate(b, "mtp-drafter", p, **o),  # type: ignore[misc]
            )
    for first in (0, 5):
        yield Fault(
            "both fail",
            f"no checkpoint, run {first}",
            ("error",),
            lambda b, _, n=first: generate(b, "mtp-drafter", lost_checkpoint(n)),  # type: ignore[misc]
        )
        yield Fault(
            "both fail",
            f"PyTorch raises too, run {first}",
            ("error",),
            lambda b, _, n=first: generate(b, "mtp-drafter", broken_torch(n)),  # type: ignore[misc]
        )
    for first in (0, 4):
        yield Fault(
            "PyTorch alone",
            f"raises in attention {first}",
            ("error",),
            lambda b, _, n=first: generate(  # type: ignore[misc]
                b, "mtp-drafter", attention_fails(n), engine_options={"verify": "torch"}
            ),
        )


def lost_checkpoint(first: int) -> Plant:
    """The target fails and its checkpoint cannot be found."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        lost = mock.patch.object(verification, "find", Counted(0, raising(SourceError("lost"))))
        with runs_fail(["target"], first, "raises")(), lost:
            yield

    return plant


def broken_torch(first: int) -> Plant:
    """The target fails, and so does PyTorch when it reads what was committed, or goes on."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with runs_fail(["target"], first, "raises")(), attention_fails(1)():
            yield

    return plant


def attention_fails(first: int) -> Plant:
    """PyTorch's attention raises from call ``first`` on."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        real = torch.nn.functional.scaled_dot_product_attention
        counted = Counted(first, raising(RuntimeError("planted")))

        def attend(*arguments: Any, **named: Any) -> Any:
            counted()
            return real(*arguments, **named)

        with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend):
            yield

    return plant


# Loading.

DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: fill(path, b""),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte longer": lambda path: append(path, b"x"),
    "zeros": lambda path: fill(path, bytes(path.stat().st_size)),
    "noise": lambda path: fill(path, random.Random(0).randbytes(path.stat().st_size)),
    "a bit flipped": lambda path: flip(path),
    "a folder": lambda path: turn_into_folder(path),
    "a link out of the folder": lambda path: link_out(path),
}


def append(path: Path, data: bytes) -> None:
    """Add bytes at the end."""
    with path.open("ab") as file:
        file.write(data)


def fill(path: Path, data: bytes) -> None:
    """Other contents."""
    path.write_bytes(data)


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def turn_into_folder(path: Path) -> None:
    """No file any more."""
    path.unlink()
    path.mkdir()


def link_out(path: Path) -> None:
    """The same bytes, but elsewhere."""
    outside = path.parent.parent / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def rehash(engines: Path) -> None:
    """Let the manifest agree with the files, as if they had been exported so."""
    file = engines / manifests.MANIFEST
    data = json.loads(file.read_text())
    changed: dict[str, str] = {}
    for entry in data["files"]:
        path = engines / entry["path"]
        entry["size"] = path.stat().st_size
        changed[entry["sha256"]] = manifests.sha256_of(path)
    hashes = re.compile("|".join(changed))
    file.write_text(hashes.sub(lambda found: changed[found[0]], json.dumps(data)))


def load_faults() -> Iterator[Fault]:
    """Files that are not what was exported, with and without a manifest that agrees with them."""
    for damage in DAMAGES:
        for file in ("target.onnx", "weights.data", "tokenizer.json", manifests.MANIFEST):
            yield Fault(
                "load",
                f"{file} {damage}",
                ("refused",),
                lambda b, p, f=file, d=damage: load_damaged(b, p, f, d),  # type: ignore[misc]
            )
    for damage in ("empty", "cut in half", "zeros", "noise"):
        for file, expected in (("target.onnx", "torch"), ("mtp_drafter.onnx", "plain")):
            yield Fault(
                "load",
                f"{file} {damage}, and the manifest agrees",
                (expected,),  # type: ignore[arg-type]
                lambda b, p, f=file, d=damage: load_damaged(b, p, f, d, agreeing=True),  # type: ignore[misc]
            )
    yield Fault("load", "mtp_drafter.onnx missing", ("plain",), drafter_missing)
    yield Fault("load", "engines swapped, and the manifest agrees", ("torch",), swapped)
    for error in (MemoryError("planted"), RuntimeError("planted"), OSError(errno.EIO, "planted")):
        for engine, expected in (("target", "torch"), ("mtp_drafter", "plain")):
            yield Fault(
                "load",
                f"{type(error).__name__} while {engine} opens",
                (expected,),  # type: ignore[arg-type]
                lambda b, _, e=engine, x=error: opening_fails(b, e, x),  # type: ignore[misc]
            )


def load_damaged(
    bench: Bench, place: Path, file: str, damage: str, *, agreeing: bool = False
) -> Seen:
    """Open a copy with a damaged file."""
    copy = place / "engines"
    shutil.copytree(bench.engines("gemma4"), copy)
    DAMAGES[damage](copy / file)
    if agreeing:
        rehash(copy)
    return open_copy(bench, copy)


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


def drafter_missing(bench: Bench, place: Path) -> Seen:
    """A folder whose drafter was taken out."""
    copy = place / "engines"
    shutil.copytree(bench.engines("gemma4"), copy)
    (copy / "mtp_drafter.onnx").unlink()
    return open_copy(bench, copy)


def swapped(bench: Bench, place: Path) -> Seen:
    """Target and drafter have changed places."""
    copy = place / "engines"
    shutil.copytree(bench.engines("gemma4"), copy)
    one, other = (copy / name for name in ("target.onnx", "mtp_drafter.onnx"))
    keep = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(keep)
    rehash(copy)
    return open_copy(bench, copy)


def opening_fails(bench: Bench, engine: str, error: Exception) -> Seen:
    """ONNX Runtime raises when it opens one of the engines."""
    real = onnxruntime.InferenceSession

    def session(path: str, *rest: Any, **named: Any) -> Any:
        if Path(path).name == f"{engine}.onnx":
            raise error
        return real(path, *rest, **named)

    with mock.patch.object(onnxruntime, "InferenceSession", session):
        return open_copy(bench, bench.engines("gemma4"))


# Drafters that lie, and callbacks that raise.


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


# Disks and children.


def disk_faults() -> Iterator[Fault]:
    """An export whose disk fills up or cannot be read, where an older folder stands or not."""
    codes = {"full": errno.ENOSPC, "broken": errno.EIO, "read-only": errno.EROFS}
    for older in (False, True):
        over = " over an older folder" if older else ""
        for what, code in codes.items():
            for call in (0, 4, 9):
                yield Fault(
                    "disk",
                    f"{what} at write {call}{over}",
                    ("nothing",),
                    lambda b, p, c=code, n=call, o=older: export_fails(b, p, writes_fail(n, c), o),  # type: ignore[misc]
                )
            for call in range(1 + older):
                yield Fault(
                    "disk",
                    f"{what} at rename {call}{over}",
                    ("nothing",),
                    lambda b, p, c=code, n=call, o=older: export_fails(  # type: ignore[misc]
                        b, p, renames_fail(n, c), o
                    ),
                )
        yield Fault(
            "disk",
            f"weights cannot be read{over}",
            ("nothing",),
            lambda b, p, o=older: export_fails(b, p, reads_fail(4), o),  # type: ignore[misc]
        )
    yield Fault("disk", "exported anew while it is open", ("same",), replaced_while_open)


def writes_fail(first: int, code: int) -> Plant:
    """Pieces of weights cannot be written from number ``first`` on."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        counted = Counted(first, raising(OSError(code, os.strerror(code))))
        add, fill = DataFile.add, DataFile.fill

        def failing_add(self: DataFile, *arguments: Any) -> Any:
            counted()
            return add(self, *arguments)

        def failing_fill(self: DataFile, *arguments: Any) -> Any:
            counted()
            return fill(self, *arguments)

        with mock.patch.multiple(DataFile, add=failing_add, fill=failing_fill):
            yield

    return plant


def renames_fail(call: int, code: int) -> Plant:
    """The finished folder cannot take its place."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        counted = Counted(call, raising(OSError(code, os.strerror(code))), times=1)
        real = Path.rename

        def rename(self: Path, target: Any) -> Any:
            counted()
            return real(self, target)

        with mock.patch.object(Path, "rename", rename):
            yield

    return plant


def reads_fail(first: int) -> Plant:
    """Weights of the checkpoint cannot be read from piece ``first`` on."""
    from specexport.weights import Weights

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        real = Weights.chunks
        counted = Counted(first, raising(OSError(errno.EIO, os.strerror(errno.EIO))))

        def chunks(self: Weights, *arguments: Any) -> Any:
            counted()
            return real(self, *arguments)

        with mock.patch.object(Weights, "chunks", chunks):
            yield

    return plant


def export_fails(bench: Bench, place: Path, plant: Plant, older: bool) -> Seen:
    """Export with the fault; then without it."""
    out = place / "engines"
    source = resolve(bench.checkpoint("gemma4"))
    options = ExportOptions(num_draft=NUM_DRAFT, check=False)
    if older:
        shutil.copytree(bench.engines("gemma4"), out)
    before = contents(place)
    seen = Seen("nothing")
    try:
        with plant():
            exporter.export(source, None, out, options)
        seen.outcome = "same"
    except (SpecrunError, OSError):
        pass
    if seen.outcome == "nothing" and contents(place) != before:
        seen.wrong.append(f"left {sorted(contents(place).keys() ^ before.keys())}")
    exporter.export(source, None, out, options)
    if {path.name for path in place.iterdir()} != {"engines"}:
        seen.wrong.append(f"afterwards there are {sorted(p.name for p in place.iterdir())}")
    return seen


def contents(place: Path) -> dict[str, str]:
    """Path below ``place`` -> hash of the file, folders too."""
    return {
        str(path.relative_to(place)): manifests.sha256_of(path) if path.is_file() else "folder"
        for path in sorted(place.rglob("*"))
    }


def replaced_while_open(bench: Bench, place: Path) -> Seen:
    """The folder is exported again in the middle of a generation."""
    out = place / "engines"
    source = resolve(bench.checkpoint("gemma4"))
    options = ExportOptions(num_draft=NUM_DRAFT, check=False)
    exporter.export(source, None, out, options)
    with bench.open("gemma4", out) as engine:
        stream = engine.stream(TEXT, method="plain", **GREEDY)
        pieces = [next(stream)]
        exporter.export(source, None, out, options)
        pieces += stream
        return judge_stream(stream, pieces, None, bench.right["gemma4"])


def child_faults() -> Iterator[Fault]:
    """Processes that are killed while they generate or tune."""
    for command in ("run", "tune"):
        for delay in (0.0, 0.2, 0.5, 0.8):
            yield Fault(
                "killed",
                f"specrun {command} after {delay} s of work",
                ("same",),
                lambda b, p, c=command, d=delay: killed(b, p, c, d),  # type: ignore[misc]
            )


def killed(bench: Bench, place: Path, command: str, delay: float) -> Seen:
    """SIGKILL to a child that is at work on a folder, which is as good as before."""
    copy = place / "engines"
    shutil.copytree(bench.engines("gemma4"), copy)
    before = contents(place)
    arguments = {
        "run": ["run", str(copy), "--prompt", "abcabca", "-n", "40", "--ignore-eos"],
        "tune": ["tune", str(copy)],
    }[command]
    child = subprocess.Popen(
        [sys.executable, "-m", "specrun.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(0.5 + delay)  # half a second to start
    child.send_signal(signal.SIGKILL)
    child.communicate()
    seen = open_copy(bench, copy)
    left = {name for name in contents(place).keys() - before.keys() if "tuning" not in name}
    if left or any(contents(place).get(name) != value for name, value in before.items()):
        seen.wrong.append(f"the folder changed: {sorted(left)}")
    auto = bench.open("gemma4", copy).generate(TEXT, num_assistant_tokens_schedule="auto", **GREEDY)
    if auto.tokens != bench.right["gemma4"]:
        seen.wrong.append("the schedule auto gives another text")
    return seen


def all_faults() -> list[Fault]:
    """Every fault there is, none twice."""
    found = [
        *run_faults(),
        *load_faults(),
        *drafter_faults(),
        *callback_faults(),
        *disk_faults(),
        *child_faults(),
    ]
    twice = [title for title, count in Counter(fault.title for fault in found).items() if count > 1]
    assert not twice, twice
    return found


def try_fault(fault: Fault, bench: Bench, place: Path) -> Seen:
    """What came of it; what it raises is wrong too."""
    place.mkdir(parents=True)
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = fault.try_it(bench, place)
    except Exception as error:
        seen = Seen("raised", [f"{type(error).__name__}: {error}"])
    finally:
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(place, ignore_errors=True)
    if seen.outcome not in fault.expected:
        seen.wrong.append(f"expected {' or '.join(fault.expected)}")
    return seen


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="faults that have one of these words")
    parser.add_argument("--list", action="store_true", help="show them and do nothing")
    given = parser.parse_args()
    faults = [f for f in all_faults() if not given.only or any(w in f.title for w in given.only)]
    if given.list:
        print("\n".join(fault.title for fault in faults))
        return
    counts: dict[str, Counter[str]] = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as root:
        bench = make_bench(Path(root) / "pairs")
        for number, fault in enumerate(faults):
            seen = try_fault(fault, bench, Path(root) / f"fault{number}")
            counts.setdefault(fault.seam, Counter())[seen.outcome] += 1
            if seen.wrong:
                wrong += 1
                print(f"WRONG {fault.title}: {seen.outcome}; {'; '.join(seen.wrong)}", flush=True)
    for seam, outcomes in counts.items():
        listed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(f"{seam:<18}{sum(outcomes.values()):>4}  {listed}")
    print(f"{len(faults)} faults, {wrong} wrong")
    seams = {seam: dict(outcomes) for seam, outcomes in counts.items()}
    print(json.dumps({"faults": len(faults), "wrong": wrong, "seams": seams}))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
