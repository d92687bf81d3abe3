"""The engine folder appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from specexport import card
from specexport.card import CARD
from specexport.errors import ExportError
from specrun.manifest import MANIFEST, FileEntry, sha256_of
from specrun.tuning import TUNING

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SECONDS_TO_LOCK = 5  # from the making of a folder
HEADROOM = 64 << 20  # bytes beside the weights: graph files and the manifest, and some left free
PARTIAL, OLD = ".partial", ".old"  # ends of the names of what stands beside the folder meanwhile
SPACE_HINT = "free some space, or give --out on another disk"
FULL = {
    errno.ENOSPC: "the disk ran full while the folder was written",
    errno.EDQUOT: "the quota of the disk was reached while the folder was written",
    errno.EFBIG: "a file of the folder became larger than files may be here (ulimit -f)",
}


@contextlib.contextmanager
def atomic(out: Path, *, card_goes_along: bool = False) -> Iterator[Path]:
    """A new folder beside ``out`` that takes its place when the block ends without an error.

    An engine folder that is there already is replaced; anything else that is there is refused
    before the block runs, a model card that somebody changed too, unless ``card_goes_along`` into
    the new folder. On an error nothing is left and what was there stays; that of a full disk
    becomes an ExportError.
    """
    check_target(out, card_goes_along=card_goes_along)
    with _explaining_a_full_disk(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_up(out)
        partial = _beside(out, PARTIAL)
        try:
            with _held(partial):
                yield partial
            partial.chmod(0o777 & ~_umask())
            _take_place(partial, out, card_goes_along=card_goes_along)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _explaining_a_full_disk(out: Path) -> Iterator[None]:
    """An error of writing for want of space names no file and no way out; this one does."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ExportError(f"{out}: {FULL[error.errno]}", hint=SPACE_HINT) from error


def check_target(out: Path, *, card_goes_along: bool = False) -> None:
    """Raise ExportError where ``out`` holds anything that an export has not written."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ExportError(f"{out}: is not a folder", hint="give a new folder with --out")
    if any(parent.exists() and not parent.is_dir() for parent in out.parents):
        raise ExportError(f"{out}: lies below a file", hint="give another folder with --out")
    if not out.is_dir() or not any(out.iterdir()):
        return
    ours = _written_by_an_export(out)
    if ours is None:
        raise ExportError(
            f"{out}: has files in it and is no engine folder",
            hint="give a new or empty folder with --out",
        )
    inside = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()}
    foreign = sorted(inside - ours)
    if CARD in foreign and (card_goes_along or card.is_own(out / CARD)):
        foreign.remove(CARD)
    if CARD in foreign:
        raise ExportError(
            f"{out}: its {CARD} was changed since the export, and would be written anew",
            hint="move it away, and put it back afterwards",
        )
    if foreign:
        raise ExportError(
            f"{out}: holds {foreign[0]}, which is no part of the engine folder in it",
            hint="move it away, or give another folder with --out",
        )


def _written_by_an_export(out: Path) -> set[str] | None:
    """Paths that the manifest in ``out`` accounts for, of any format, and the tuning file; None
    without a manifest."""
    try:
        data = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        return (
            {MANIFEST, TUNING, *(str(entry["path"]) for entry in data["files"])}
            if data["format"]
            else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_space(folder: Path, needed: int) -> None:
    """Raise ExportError unless the disk under ``folder`` has ``needed`` bytes and some headroom."""
    free = shutil.disk_usage(folder).free
    if free < needed + HEADROOM:
        raise ExportError(
            f"{folder.parent}: {needed + HEADROOM:,} bytes are needed, {free:,} are free",
            hint=SPACE_HINT,
        )


def replace_text(path: Path, text: str) -> None:
    """Write a file anew, whole or not at all: what stands there may be linked elsewhere too."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def listing(folder: Path) -> tuple[FileEntry, ...]:
    """Every file of the folder but the manifest, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple(
        FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, sha256_of(path))
        for path in files
        if path.name != MANIFEST
    )


def _take_place(new: Path, out: Path, *, card_goes_along: bool) -> None:
    if not out.exists():
        new.rename(out)
        return
    check_target(out, card_goes_along=card_goes_along)  # once more: an export takes its time
    old = _beside(out, OLD)
    with _held(old):
        try:
            out.rename(old / out.name)
            new.rename(out)
        except BaseException:
            if not out.exists():
                (old / out.name).rename(out)
            raise
        finally:
            if out.exists():
                shutil.rmtree(old, ignore_errors=True)


def _beside(out: Path, suffix: str) -> Path:
    """A new folder beside ``out`` whose name says which process it belongs to."""
    prefix = f".{out.name}.{os.getpid()}."
    return Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=out.parent))


def _clear_up(out: Path) -> None:
    """Remove what a killed export left beside ``out``; put back a folder it had moved away."""
    for left in sorted(out.parent.glob(f".{glob.escape(out.name)}.*.*")):
        owner = left.name.removeprefix(f".{out.name}.").partition(".")[0]
        if left.suffix not in (PARTIAL, OLD) or not owner.isdigit():
            continue
        if _is_held(left, int(owner)):
            continue
        if left.suffix == OLD and not out.exists() and (left / out.name).is_dir():
            (left / out.name).rename(out)
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock ``folder`` where the system can; the lock ends with the process, however that ends."""
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                handle = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _is_held(folder: Path, owner: int) -> bool:
    """Whether a running export writes to ``folder``: by its lock, else by the process in its name.

    Numbers of processes repeat, in containers all the time, so they count where locks do not work.
    """
    if fcntl is None or not folder.is_dir():
        return _runs(owner)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return _runs(owner)
    finally:
        os.close(handle)
    # Between its making and its lock.
    new = time.time() - folder.stat().st_mtime < SECONDS_TO_LOCK
    return new and owner != os.getpid() and _runs(owner)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
