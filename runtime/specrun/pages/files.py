"""Pages and data as files: refused before the work, or there as a whole. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrun import writing
from specrun.errors import UsageError

PAGE = (".html", ".htm")
HINT = "give a file in a folder that is there and can be written to"


def check(flag: str, path: Path, endings: Sequence[str] = PAGE) -> None:
    """Raise UsageError where nothing can be written to ``path``, before anything is done."""
    if path.suffix.lower() not in endings:
        raise UsageError(
            f"{flag}: must end in {' or '.join(endings)}, got {str(path)!r}",
            hint=f"for example {flag} {path.stem or 'out'}{endings[0]}",
        )
    try:
        writing.check_writable(path)
    except OSError as error:
        said = f"{flag}: {path}: cannot be written: {error.strerror}"
        raise UsageError(said, hint=HINT) from error


def write(path: Path, text: str) -> None:
    """Put ``text`` there, complete or not at all. Raises UsageError where that cannot be."""
    try:
        writing.replace(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}", hint=HINT) from error
