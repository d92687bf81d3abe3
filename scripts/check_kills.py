"""Exports that are killed, or whose disk runs full, leave nothing that could be taken for engines.

    python scripts/check_kills.py [--source SOURCE] [--kills 10] [--seed 0] [-- specexport options]

First an undisturbed export, whose time and bytes count. Then exports to one place are killed with
SIGKILL at moments drawn over that time, half of them where an older engine folder stands: no
folder may be there that loads, the older one must be the same byte for byte. One more run must
give the bytes of the undisturbed one and clear up. Then exports to a small disk of its own (tmpfs,
which needs the right to mount; else a limit on the size of files): exit status 1, one line that
says why, nothing left. A table for people, one JSON line last; exit status 1 where anything was
not so. Without options, ``--precision int8``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specexport.folder import HEADROOM
from specrun import manifest as manifests
from specrun.errors import SpecrunError

OUT = "engines"
SOURCE, OPTIONS = "gemma4-tiny", ("--precision", "int8")
POLL_SECONDS = 0.005
DATA, MANIFEST = "weights.data", manifests.MANIFEST
PAGE = 4096  # bytes; files on a small disk take whole ones

Contents = dict[str, str]  # path below a folder -> hash of the file


@dataclass(frozen=True)
class Outcome:
    """A line of the table: what was done and what was wrong, nothing if all was right."""

    what: str
    saw: str
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Command:
    """``specexport`` as a child."""

    source: str
    options: tuple[str, ...]

    def start(self, out: Path, *, most_bytes: int | None = None) -> subprocess.Popen[str]:
        """Begin an export to ``out``; no file of it may grow beyond ``most_bytes``."""

        def limit() -> None:
            if most_bytes is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails instead
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

        command = [sys.executable, "-m", "specexport.cli", self.source, "--out", str(out)]
        return subprocess.Popen(
            [*command, *self.options, "--quiet"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )

    def run(self, out: Path) -> Times:
        """An export that must succeed. Raises SystemExit where it does not."""
        started = time.monotonic()
        child = self.start(out)
        wait_for_data(child, out)
        begun = time.monotonic()
        _, errors = child.communicate()
        if child.returncode:
            raise SystemExit(f"an undisturbed export failed:\n{errors}")
        return Times(time.monotonic() - started, time.monotonic() - begun)


@dataclass(frozen=True)
class Times:
    """Seconds of an export: all of it, and from the first byte of the weights on."""

    whole: float
    from_writing: float


def wait_for_data(child: subprocess.Popen[str], out: Path) -> None:
    """Until ``child`` writes the weights of ``out``, or has ended."""
    while child.poll() is None:
        for data in out.parent.glob(f".{OUT}.*.partial/{DATA}"):
            if f".{child.pid}." in data.parent.name:
                return
        time.sleep(POLL_SECONDS)


def contents(folder: Path) -> Contents:
    """Every file of ``folder``."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def loads(folder: Path) -> bool:
    """Whether anyone would take ``folder`` for an engine folder."""
    try:
        manifests.read(folder, integrity="full")
    except SpecrunError:
        return False
    return True


def unharmed(out: Path, before: Contents | None) -> list[str]:
    """What is wrong at ``out``, where ``before`` stood (None: nothing did)."""
    if before is not None:
        return [] if out.is_dir() and contents(out) == before else ["the older folder is not whole"]
    return ["there is something under the output's name"] if out.exists() else []


def beside(out: Path) -> list[str]:
    """Names of what stands in the folder of ``out`` but ``out`` itself."""
    return sorted(path.name for path in out.parent.iterdir() if path != out)


# Kills.


def kill(
    command: Command, out: Path, after: float, before: Contents | None, *, writing: bool
) -> Outcome:
    """Kill an export ``after`` so many seconds, of ``writing`` or of all, and look."""
    child = command.start(out)
    if writing:
        wait_for_data(child, out)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(after)
    finished = child.poll() is not None
    child.kill()
    child.communicate()
    left = [path for path in out.parent.iterdir() if path != out]
    where = "over a folder" if before else "to a new place"
    what = f"killed after {after:.2f} s{' of writing' if writing else ''}, {where}"
    finished |= before is None and out.exists()  # it was about to end
    if finished:  # before its time; then the folder must be whole
        return Outcome(what, "had finished", [] if loads(out) else ["the folder does not load"])
    wrong = unharmed(out, before)
    wrong += [f"{path.name} loads" for path in left if path.suffix == ".partial" and loads(path)]
    wrong += ["parts of more than one export are left"] if len(left) > 1 else []
    inside = sorted(path.name for folder in left for path in folder.iterdir())
    return Outcome(
        what, f"left: {', '.join(inside) or ('an empty folder' if left else '-')}", wrong
    )


def kills(
    command: Command, place: Path, whole: Path, times: Times, moments: list[float]
) -> Iterator[Outcome]:
    """Kill at each of ``moments`` (shares of the time), then run once more.

    Every other pair of kills is within the writing, which is the shorter part of an export.
    """
    out = place / OUT
    older = contents(whole)
    for index, share in enumerate(moments):
        over, writing = index % 2 == 1, index % 4 >= 2
        shutil.rmtree(out, ignore_errors=True)
        if over:
            shutil.copytree(whole, out)
        after = share * (times.from_writing if writing else times.whole)
        yield kill(command, out, after, older if over else None, writing=writing)
    command.run(out)
    got = contents(out)
    wrong = [
        f"{name} differs" for name in sorted(got.keys() | older) if got.get(name) != older.get(name)
    ]
    wrong += [f"{name} is left" for name in beside(out)]
    yield Outcome(
        "undisturbed after them", f"{len(got)} files, the same bytes" if not wrong else "", wrong
    )


def moments(count: int, seed: int) -> list[float]:
    """One in each of ``count`` equal parts of the time, in random order."""
    drawn = random.Random(seed)
    spread = [(part + drawn.random()) / count for part in range(count)]
    drawn.shuffle(spread)
    return spread


# A full disk.


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path | None]:
    """A disk of ``size`` bytes below ``place``; None where we may not mount one."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill_when_writing(child: subprocess.Popen[str], out: Path, room: int) -> None:
    """Once the data file appears, let something take the disk but for ``room`` bytes, of which
    those count that the export has written by then."""
    before = shutil.disk_usage(out.parent).free
    filler = out.parent / "filler"
    wait_for_data(child, out)
    with filler.open("wb", buffering=0) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, before - room)
        except OSError:  # more than ``room`` was written meanwhile: take all that is left
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(out.parent).free)


def failed(
    what: str, child: subprocess.Popen[str], out: Path, before: Contents | None, says: str
) -> Outcome:
    """Wait for an export that must fail with one line that ``says`` so, and look."""
    _, errors = child.communicate()
    (out.parent / "filler").unlink(missing_ok=True)
    wrong = unharmed(out, before)
    wrong += [f"{name} is left" for name in beside(out)]
    lines = [line for line in errors.splitlines() if line.startswith("Error: ")]
    if child.returncode != 1 or len(lines) != 1 or "Traceback" in errors:
        wrong.append(f"exit status {child.returncode}: {errors[-300:]!r}")
    elif not re.search(says, lines[0]) or str(out.parent) not in lines[0]:
        wrong.append(f"says {lines[0]!r}")
    return Outcome(what, lines[0] if lines else "", wrong)


def too_small(command: Command, out: Path, before: Contents | None) -> Outcome:
    """A disk without the room, which is seen before anything is written."""
    says = r"[\d,]+ bytes are needed, [\d,]+ are free"
    return failed("disk too small", command.start(out), out, before, says)


def filled(command: Command, out: Path, before: Contents | None, room: int) -> Outcome:
    """A disk with the room, which something else takes."""
    child = command.start(out)
    fill_when_writing(child, out, room)
    what = f"disk filled up but for {room:,} bytes"
    return failed(what, child, out, before, "the disk ran full")


def limited(command: Command, out: Path, most: int) -> Outcome:
    """No file may be larger than ``most`` bytes."""
    child = command.start(out, most_bytes=most)
    return failed(f"files of at most {most:,} bytes", child, out, None, "larger than files may be")


def full_disks(command: Command, place: Path, whole: Path) -> Iterator[Outcome]:
    """Disks of several sizes, with and without an older folder on them."""
    sizes = {path.name: path.stat().st_size for path in whole.iterdir()}
    total, data = sum(sizes.values()), sizes[DATA]
    older = contents(whole)
    for index, size in enumerate((total // 2, 3 * total)):
        with small_disk(place / f"small{index}", size) as disk:
            over = size > 2 * total
            if disk is not None:
                if over:
                    shutil.copytree(whole, disk / OUT)
                yield too_small(command, disk / OUT, older if over else None)
    # Before, within and at the end of the weights; and all fits but the manifest.
    enough = sum(-(-size // PAGE) * PAGE for name, size in sizes.items() if name != MANIFEST)
    rooms = (data // 8, data // 2, data, enough)
    for index, room in enumerate(rooms):
        with small_disk(place / f"filled{index}", HEADROOM + 3 * total) as disk:
            if disk is not None:
                over = index % 2 == 0
                if over:
                    shutil.copytree(whole, disk / OUT)
                yield filled(command, disk / OUT, older if over else None, room)
    (place / "limited").mkdir()
    yield limited(command, place / "limited" / OUT, data // 2)


def show(outcome: Outcome) -> Outcome:
    """Print a line of the table."""
    print(f"{'WRONG' if outcome.wrong else 'right':6}{outcome.what:44} {outcome.saw}", flush=True)
    for wrong in outcome.wrong:
        print(f"      {wrong}", flush=True)
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status is 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-kills", action="store_true", help="the full disk alone")
    parser.add_argument("options", nargs="*", help="of specexport, behind --")
    given = parser.parse_args(arguments)
    command = Command(given.source, tuple(given.options) or OPTIONS)
    with tempfile.TemporaryDirectory() as scratch:
        whole, place = Path(scratch, "undisturbed", OUT), Path(scratch, "killed")
        place.mkdir()
        times = command.run(whole)
        size = sum(path.stat().st_size for path in whole.iterdir())
        print(
            f"undisturbed: {times.whole:.1f} s, {times.from_writing:.1f} s of them from the weights"
            f" on, {size:,} bytes",
            flush=True,
        )
        drawn = [] if given.no_kills else moments(given.kills, given.seed)
        outcomes = (
            [show(one) for one in kills(command, place, whole, times, drawn)] if drawn else []
        )
        outcomes += [show(one) for one in full_disks(command, Path(scratch), whole)]
    wrong = sum(bool(one.wrong) for one in outcomes)
    print(
        json.dumps(
            {
                "source": given.source,
                "options": command.options,
                "seconds": round(times.whole, 1),
                "wrong": wrong,
                "outcomes": [dataclasses.asdict(one) for one in outcomes],
            }
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
