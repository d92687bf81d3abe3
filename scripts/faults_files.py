"""Faults of files: engine folders that are damaged, disks that fail, processes that are killed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import onnxruntime
import toys
from faults import (
    GREEDY,
    TEXT,
    Bench,
    Counted,
    Fault,
    Plant,
    Seen,
    judge_stream,
    open_copy,
    raising,
)
from small_vocabulary import NUM_DRAFT

from specexport import exporter
from specexport.datafile import DataFile
from specexport.options import ExportOptions
from specexport.sources import resolve
from specrun import manifest as manifests
from specrun.errors import SpecrunError

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
        toys.agree(copy)
    return open_copy(bench, copy)


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
    toys.agree(copy)
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
