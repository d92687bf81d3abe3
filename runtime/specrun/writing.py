"""Files that appear complete or not at all. Standard library only."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise OSError where :func:`replace` would, before there is anything to write."""
    if path.exists() and not path.is_file():
        kind = "is a folder" if path.is_dir() else "is no regular file"
        raise OSError(0, kind, str(path))
    handle, name = _beside(path)
    os.close(handle)
    Path(name).unlink()


def replace(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 in place of what is there; a link stays one.

    Raises OSError where it cannot be written; what was there stays then.
    """
    check_writable(path)
    handle, name = _beside(path)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path.resolve())
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _beside(path: Path) -> tuple[int, str]:
    place = path.resolve()
    return tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
