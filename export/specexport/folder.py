"""The engine folder appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from specexport.errors import ExportError
from specrun.manifest import MANIFEST, FileEntry, sha256_of

HEADROOM = 64 << 20  # bytes left free beside what is written


@contextlib.contextmanager
def atomic(out: Path) -> Iterator[Path]:
    """A new folder beside ``out`` that takes its place when the block ends without an error.

    An engine folder that is there already is replaced; anything else that is there is refused
    before the block runs. On an error nothing is left and what was there stays.
    """
    check_target(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        _take_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_target(out: Path) -> None:
    """Raise ExportError where ``out`` holds something that is not an engine folder."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ExportError(f"{out}: is not a folder", hint="give a new folder with --out")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise ExportError(
            f"{out}: has files in it and is no engine folder",
            hint="give a new or empty folder with --out",
        )


def check_space(folder: Path, needed: int) -> None:
    """Raise ExportError unless the disk under ``folder`` has ``needed`` bytes and some headroom."""
    free = shutil.disk_usage(folder).free
    if free < needed + HEADROOM:
        raise ExportError(
            f"{folder.parent}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free",
            hint="free some space, or give --out on another disk",
        )


def listing(folder: Path) -> tuple[FileEntry, ...]:
    """Every file of the folder but the manifest, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple(
        FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, sha256_of(path))
        for path in files
        if path.name != MANIFEST
    )


def _take_place(new: Path, out: Path) -> None:
    if not out.exists():
        new.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
    out.rename(old / out.name)
    try:
        new.rename(out)
    except OSError:
        (old / out.name).rename(out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
