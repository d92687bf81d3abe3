"""Feeds hostile files, templates and prompts to everything that reads some, and counts what breaks.

    python scripts/fuzz.py                                  # 20,000 cases, some minutes
    python scripts/fuzz.py --count 500 --only template
    python scripts/fuzz.py --only gguf --seed 3 --first 1234 --count 1 --verbose   # one case again

Every case must end within 5 seconds in a result or in an error raised on purpose. Cases run in
child processes, so that a crash of the interpreter is seen. What is counted: crashes; exceptions
that are none of ours; files that were opened outside of the case's folder, of Python and of the
system's /proc and /sys; hangs; memory above 400 MB beside what the process had. Engines (changed
graphs in a folder that vouches for them) are run with --only engine. A table for people, one JSON
line last; exit status 1 when anything was found.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import sysconfig
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fuzz_cases

from specrun.errors import SpecrunError

SECONDS = 5.0
MEMORY = 400 << 20  # bytes
BATCH = 500  # cases of one child
SHARES = {  # of the cases, where none is chosen: many are cheap, and some find more
    "manifest": 0.3,
    "template": 0.25,
    "prompt": 0.1,
    "tokenizer": 0.1,
    "gguf": 0.1,
    "safetensors": 0.1,
    "tuning": 0.05,
}
FOUND = ("crashes", "tracebacks", "outside", "hangs", "memory")


@dataclass
class Tally:
    """What became of the cases of one kind. ``findings``: number of the case, and what happened."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, str, str]] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, number: int, what: str, detail: str = "") -> None:
        """Count one more."""
        self.counts[what] += 1
        if what in FOUND:
            self.findings.append((number, what, detail))


class Watch:
    """Notes every file that is opened outside of the places that a case may read."""

    def __init__(self, root: Path) -> None:
        paths = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *sys.path]
        paths += [str(root), str(fuzz_cases.ROOT), "/proc", "/sys"]
        self._inside = tuple({os.path.realpath(path) + os.sep for path in paths if path})
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if path != os.devnull and not (path + os.sep).startswith(self._inside):
                self.seen.append(path)
        elif event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect"):
            self.seen.append(event)


def child(kind: str, seed: int, first: int, last: int, pipe: Connection, quiet: bool) -> None:
    """Run cases and say of each that it begins, and what became of it."""
    if quiet:  # the library for tokenizers writes its panics to stderr, ONNX Runtime its errors
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    root = Path(tempfile.mkdtemp(prefix="specrun-fuzz-"))
    try:
        cases = fuzz_cases.KINDS[kind](fuzz_cases.fresh(root / "case"))
        warm(cases, kind, seed)
        watch = Watch(root)
        for number in range(first, last):
            pipe.send((number, "begins", "", 0.0))
            pipe.send((number, *one(cases, kind, seed, number, watch)))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def warm(cases: Any, kind: str, seed: int) -> None:
    """Import what cases import, before anything is measured."""
    for number in range(-20, 0):
        try:
            cases.run(fuzz_cases.rng_of(kind, seed, number))
        except Exception:
            continue


def one(cases: Any, kind: str, seed: int, number: int, watch: Watch) -> tuple[str, str, float]:
    """What became of a case, details, and seconds."""
    before, start = _memory(), time.monotonic()
    watch.seen.clear()
    what, detail = "accepted", ""
    try:
        cases.run(fuzz_cases.rng_of(kind, seed, number))
    except SpecrunError as error:
        what, detail = "refused", str(error)
        if not detail:
            what = "tracebacks"
    except BaseException:
        what, detail = "tracebacks", traceback.format_exc()
    seconds = time.monotonic() - start
    if watch.seen:
        what, detail = "outside", watch.seen[0]
    elif _memory() - before > MEMORY:
        what, detail = "memory", f"{(_memory() - before) >> 20} MB"
    return what, detail, seconds


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_batch(
    kind: str, seed: int, first: int, last: int, tally: Tally, *, quiet: bool, again: bool = True
) -> None:
    """Run cases in child processes, a new one behind each that ended one."""
    context = multiprocessing.get_context("spawn")
    while first < last:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(kind, seed, first, last, theirs, quiet))
        process.start()
        theirs.close()
        current, patience = None, 120.0  # of the start, which imports much
        what = "crashes"
        try:
            while True:
                if not ours.poll(patience):
                    what = "hangs"
                    break
                number, event, detail, seconds = ours.recv()
                patience = SECONDS + 1
                if event == "begins":
                    current = number
                    continue
                if seconds > SECONDS:
                    what = "hangs"
                    break
                current, first = None, number + 1
                tally.slowest = max(tally.slowest, seconds)
                tally.add(number, event, detail)
        except EOFError:
            pass
        process.kill()
        process.join()
        if current is None and first < last:
            raise SystemExit(f"Error: {kind}: the child ended before its first case")
        if current is None:
            return
        first = current + 1
        if what == "hangs" and again:  # a machine that stood still is no hang
            run_batch(kind, seed, current, current + 1, tally, quiet=quiet, again=False)
        else:
            tally.add(current, what, f"exit code {process.exitcode}")


def table(tallies: dict[str, Tally], seconds: dict[str, float]) -> str:
    """What was counted, for people."""
    columns = ("cases", "accepted", "refused", *FOUND, "slowest s", "s")
    rows: list[tuple[str, ...]] = [("", *columns)]
    for kind, tally in tallies.items():
        counts = [tally.counts[name] for name in ("accepted", "refused", *FOUND)]
        cells = [sum(counts), *counts, f"{tally.slowest:.2f}", f"{seconds[kind]:.0f}"]
        rows.append((kind, *map(str, cells)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells_of = zip(row, widths, strict=True)
        lines.append("  ".join(cell.rjust(width) for cell, width in cells_of))
    return "\n".join(lines)


def main() -> int:
    """Run and report; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="cases in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", choices=sorted(fuzz_cases.KINDS))
    parser.add_argument("--verbose", action="store_true", help="show what the libraries write")
    options = parser.parse_args()
    shares = {options.only: 1.0} if options.only else SHARES
    tallies = {kind: Tally() for kind in shares}
    seconds = {}
    for kind, share in shares.items():
        start = time.monotonic()
        last = options.first + max(1, round(options.count * share))
        for first in range(options.first, last, BATCH):
            end = min(first + BATCH, last)
            run_batch(kind, options.seed, first, end, tallies[kind], quiet=not options.verbose)
        seconds[kind] = time.monotonic() - start
        for number, what, detail in tallies[kind].findings[:20]:
            print(f"{kind} {number}: {what}: {detail.strip()}\n", file=sys.stderr)
    print(table(tallies, seconds))
    found = {
        kind: {name: tally.counts[name] for name in ("accepted", "refused", *FOUND)}
        for kind, tally in tallies.items()
    }
    print(json.dumps({"seed": options.seed, "kinds": found}))
    return int(any(tally.findings for tally in tallies.values()))


if __name__ == "__main__":
    raise SystemExit(main())
