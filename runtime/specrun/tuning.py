"""The tuning file: what rounds cost on the machines an engine folder was tuned on.

``tuning.json`` stands beside the manifest, which does not list it: it may be deleted, and a folder
that is exported again loses it. One file holds any number of machines and settings; what was
measured on another one is kept and not used. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from specrun import writing
from specrun.costs import StepCosts, interpolate
from specrun.decode import DecodeError, decode, encode
from specrun.errors import FolderError
from specrun.limits import MAX_CONTEXT, MAX_TUNING_BYTES, check_within
from specrun.manifest import Manifest
from specrun.reading import ReadingError, parse_json, read_text, shown

FORMAT = 1
TUNING = "tuning.json"
AGAIN = "run specrun tune again"
MAX_ROWS = 1 << 16  # that a step can have been measured with

Points = tuple[tuple[int, float], ...]  # tokens or rows -> seconds


@dataclass(frozen=True)
class Machine:
    """What costs depend on beside the engines. Two that differ have nothing to tell each other."""

    cpu: str
    threads: int
    device: str
    onnxruntime: str


@dataclass(frozen=True)
class MethodCosts:
    """One method at one length of context, in seconds. See StepCosts."""

    context_length: int
    draft_seconds: Points
    verify_seconds: Points
    round_seconds: float
    catch_up_seconds: float

    def __post_init__(self) -> None:
        check_within("context_length", self.context_length, 0, MAX_CONTEXT)
        for count, _ in (*self.draft_seconds, *self.verify_seconds):
            check_within("a number of tokens or rows", count, 0, MAX_ROWS)
        self.step_costs()

    def step_costs(self) -> StepCosts:
        """As a schedule uses them. Raises ValueError for what no clock can have measured."""
        return StepCosts(
            dict(self.draft_seconds),
            dict(self.verify_seconds),
            self.round_seconds,
            self.catch_up_seconds,
        )


@dataclass(frozen=True)
class Entry:
    """One tuning. ``engines``: file -> sha256. ``methods``: by context length, ascending."""

    machine: Machine
    engines: dict[str, str]
    methods: dict[str, tuple[MethodCosts, ...]]

    def costs(self, method: str, context_length: int) -> StepCosts | None:
        """Costs of ``method`` at that length, between those measured; None for another method."""
        measured = self.methods.get(method, ())
        if not measured:
            return None
        at = max(measured[0].context_length, min(context_length, measured[-1].context_length))
        all_costs = {item.context_length: item.step_costs() for item in measured}

        def between(values: Mapping[int, float]) -> float:
            return interpolate(values, [at])[0]

        drafts = sorted({count for item in measured for count, _ in item.draft_seconds})
        rows = sorted({count for item in measured for count, _ in item.verify_seconds})
        return StepCosts(
            {k: between({n: c.draft(k) for n, c in all_costs.items()}) for k in drafts},
            {r: between({n: c.verify(r) for n, c in all_costs.items()}) for r in rows},
            between({n: c.round_seconds for n, c in all_costs.items()}),
            between({n: c.catch_up_seconds for n, c in all_costs.items()}),
        )


@dataclass(frozen=True)
class Tuning:
    """The file. At most one entry per machine."""

    format: int
    entries: tuple[Entry, ...]

    def with_entry(self, entry: Entry) -> Tuning:
        """With ``entry`` in place of what was measured on the same machine before."""
        others = tuple(old for old in self.entries if old.machine != entry.machine)
        return replace(self, entries=(*others, entry))

    def find(self, machine: Machine, engines: Mapping[str, str]) -> Entry | str:
        """The entry for this machine and these engines, or why there is none."""
        if not self.entries:
            return "nothing was tuned"
        same = [entry for entry in self.entries if entry.machine == machine]
        if not same:
            return _difference(machine, self.entries)
        if same[0].engines != engines:
            return "the engines are others than those that were tuned"
        return same[0]


def engine_hashes(manifest: Manifest) -> dict[str, str]:
    """The file and the sha256 of every engine: what a tuning is bound to. Of a target that PyTorch
    runs, the fingerprint of its weights."""
    hashes = {entry.path: entry.sha256 for entry in manifest.files}
    files = sorted({engine.file for engine in manifest.engines.values() if engine.file})
    found = {file: hashes[file] for file in files}
    if not manifest.has_target_engine:
        found["PyTorch"] = manifest.target_sha256
    return found


def this_machine(*, threads: int, device: str, onnxruntime: str) -> Machine:
    """This one. ``onnxruntime``: its version."""
    return Machine(_cpu(), threads, device, onnxruntime)


def read(path: Path, *, inside: Path | None = None) -> Tuning:
    """Read a tuning file. Raises FolderError where it is not there or not one.

    ``inside``: the folder that it must not lead out of.
    """
    try:
        data = parse_json(read_text(path, MAX_TUNING_BYTES, inside=inside))
    except OSError as error:
        raise FolderError(f"{path}: {error.strerror}", hint="run specrun tune first") from error
    except ReadingError as error:
        raise FolderError(f"{path}: {error}", hint=f"delete the file and {AGAIN}") from error
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        raise FolderError(
            f"{path}: format: must be {FORMAT}, got {shown(version)}",
            hint="upgrade specrun" if newer else f"delete the file and {AGAIN}",
        )
    try:
        return decode(Tuning, data)
    except DecodeError as error:
        raise FolderError(f"{path}: {error}", hint=f"delete the file and {AGAIN}") from error


def check_writable(path: Path) -> None:
    """Raise FolderError where :func:`write` would, before anything is measured."""
    if path.exists():
        read(path)
    try:
        writing.check_writable(path)
    except OSError as error:
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> FolderError:
    return FolderError(
        f"{path}: cannot be written: {error.strerror}",
        hint="give --out FILE in a folder that can, and --tuning FILE to use it",
    )


def write(path: Path, entry: Entry) -> None:
    """Put ``entry`` into the file, which is made if need be; what else is in it stays.

    The file is complete at any time. Raises FolderError where it cannot be written, or where what
    is there is no tuning file.
    """
    before = read(path) if path.exists() else Tuning(FORMAT, ())
    tuning = before.with_entry(entry)
    text = json.dumps(encode(tuning), indent=1, allow_nan=False) + "\n"
    try:
        writing.replace(path, text)
    except OSError as error:
        raise _not_writable(path, error) from error


def _difference(machine: Machine, entries: tuple[Entry, ...]) -> str:
    """In what the entry that is most alike differs."""
    names = [field.name for field in fields(Machine)]

    def differing(entry: Entry) -> list[str]:
        return [n for n in names if getattr(entry.machine, n) != getattr(machine, n)]

    nearest = min(entries, key=lambda entry: len(differing(entry)))
    parts = [
        f"{name} {getattr(nearest.machine, name)!r}, here {getattr(machine, name)!r}"
        for name in differing(nearest)
    ]
    return f"tuned with {' and '.join(parts)}"


def _cpu() -> str:
    """What the system calls its processor, or the board it is on."""
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            name, _, value = line.partition(":")
            if name.strip().lower() in ("model name", "hardware") and value.strip():
                return value.strip()
    with contextlib.suppress(OSError):
        board = Path("/proc/device-tree/model").read_text(encoding="utf-8", errors="replace")
        return board.strip("\0 \n")
    return platform.processor() or platform.machine()
