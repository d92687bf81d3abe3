"""Reads files that nobody vouches for: bounded in size, regular, inside their folder; strict JSON.

What JSON leaves open is refused: NaN and infinities, numbers that no 64 bits hold, a key twice in
one object, halves of surrogate pairs. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

MAX_ITEMS = 1_000_000  # values in one JSON text; each takes up to 100 bytes in memory
MAX_NUMBER = 64  # characters of a number
INT64 = range(-(1 << 63), 1 << 63)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells half of a surrogate pair


class ReadingError(ValueError):
    """A file or text that is not what it must be; the message says why, without a path."""


def read_bytes(path: Path, limit: int, *, inside: Path | None = None) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    ``inside``: the folder that the file, with all links followed, must lie in. Raises ReadingError,
    OSError where it cannot be opened.
    """
    if inside is not None and not leads_inside(path, inside):
        raise ReadingError("leads out of the engine folder")
    # A named pipe would wait for a writer, a device could give bytes without end.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(number, "rb") as file:  # noqa: PTH123 (of a file descriptor)
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise ReadingError("is no regular file")
        if status.st_size > limit:
            raise ReadingError(f"has {status.st_size} bytes, at most {limit} are read")
        return file.read(limit)


def read_text(path: Path, limit: int, *, inside: Path | None = None) -> str:
    """The same as text. Raises ReadingError, also where it is not UTF-8, or OSError."""
    try:
        return read_bytes(path, limit, inside=inside).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReadingError(f"not UTF-8 text: {error.reason} at byte {error.start}") from error


def unicode_fault(text: str) -> str | None:
    """What keeps ``text`` from being Unicode (half of a surrogate pair); None: nothing does."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"not valid Unicode text: {error.reason} at {error.start}"
    return None


def leads_inside(path: Path, folder: Path) -> bool:
    """Whether ``path``, with all links followed, lies in ``folder``.

    A snapshot in the cache of the model hub is made of links to where the cache keeps the contents;
    those places belong to it.
    """
    try:
        real, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError):  # a name that is none, links in a circle
        return False
    return any(real.is_relative_to(place) for place in (root, *_contents(root)))


def _contents(folder: Path) -> tuple[Path, ...]:
    """Where files of a snapshot may be, or of a folder in one; none for any other folder.

    ``CACHE/models--ORG--NAME/snapshots/COMMIT/file`` is a link to ``blobs/NAME`` beside the
    snapshots, and that may be one to ``CACHE/blobs``, which all models of a cache share.
    """
    for commit in (folder, *folder.parents):
        snapshots = commit.parent
        model = snapshots.parent
        if (
            _COMMIT.fullmatch(commit.name)
            and snapshots.name == "snapshots"
            and model.name.startswith("models--")
        ):
            return model / "blobs", model.parent / "blobs"
    return ()


def parse_json(text: str | bytes, *, max_items: int = MAX_ITEMS) -> Any:
    """The value of a JSON text. Raises ReadingError for what is none, or is refused here."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        items = text.count(",") + text.count("[") + text.count("{")
        if items > max_items:
            raise ReadingError(f"holds some {items} values, at most {max_items} are read")
        data = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
        if _HALF.search(text):
            _check_unicode(data)
    except ReadingError:
        raise
    except ValueError as error:
        raise ReadingError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise ReadingError("not JSON: nested too deep") from error
    return data


def shown(value: object, limit: int = 60) -> str:
    """``value`` for a message: its repr, shortened."""
    if isinstance(value, (str, bytes)):
        value = value[: limit + 1]
    elif isinstance(value, int) and value not in INT64:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deep"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str) -> str:
    """``text`` without what a terminal obeys: control characters as escapes, lines kept."""
    return "".join(
        char if char in "\n\t" or (char.isprintable() or char == "\xa0") else ascii(char)[1:-1]
        for char in text
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ReadingError(f"the field {shown(twice)} comes twice in one object")
    return found


def _constant(name: str) -> Any:
    raise ReadingError(f"holds {name}, which is no number of JSON")


def _float(digits: str) -> float:
    value = float(digits) if len(digits) <= MAX_NUMBER else float("inf")
    if value in (float("inf"), float("-inf")):
        raise ReadingError(f"the number {shown(digits)} is too large or too long")
    return value


def _int(digits: str) -> int:
    value = int(digits) if len(digits) <= MAX_NUMBER else 1 << 64
    if value not in INT64:
        raise ReadingError(f"the number {shown(digits)} does not fit into 64 bits")
    return value


def _check_unicode(data: object) -> None:
    """Raise ReadingError where a text or key holds half of a surrogate pair."""
    waiting = [data]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str) and any("\ud800" <= char <= "\udfff" for char in item):
            raise ReadingError(f"the text {shown(item)} is not valid Unicode")
