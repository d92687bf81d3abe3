"""What an engine's graph file reads from other files, found before ONNX Runtime opens it.

An ONNX graph may name any file for the bytes of a tensor (``external_data``). Here such a name must
be one of the files that the manifest lists, which are inside the folder, with a range inside that
file. A protobuf message is ``(number << 3 | wire type, value)`` over and over; of the messages only
those that can hold a tensor are entered, and of those only what has the word ``location`` in it, so
that a graph of any size takes a moment. Standard library only.
"""

from __future__ import annotations

import mmap
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from specrun.errors import EngineError
from specrun.limits import MAX_GRAPH_BYTES
from specrun.manifest import REEXPORT

MAX_DEPTH = 64  # of messages in one another; protobuf itself stops at 100

# Message -> number of a field -> the message in it, for all that lead to a tensor (onnx.proto).
_FIELDS: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "Sparse"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "Sparse", 23: "Sparse"},
    "Sparse": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
_OPSET_IMPORT = 8  # of a Model: domain and version
_OWN_DOMAIN = ("", "ai.onnx")
_VARINT, _FIXED64, _MESSAGE, _FIXED32 = 0, 1, 2, 5
_WORD = b"location"
_RANGE = re.compile(r"[0-9]{1,19}")

Entry = Mapping[str, str]  # of external_data: location, offset, length


def check(path: Path, folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise EngineError unless the graph reads only files of ``sizes``, and within them.

    ``sizes``: path inside ``folder`` -> bytes, of every file that the manifest lists.
    """
    try:
        within = PurePosixPath(path.relative_to(folder).as_posix()).parent
        for entry in external_data(path):
            _check_entry(entry, within, sizes)
    except OSError as error:
        raise EngineError(f"{path}: cannot be read: {error.strerror}", hint=REEXPORT) from error
    except ValueError as error:
        raise EngineError(f"{path}: does not load: {error}", hint=REEXPORT) from error


def check_versions(path: Path, opset: int, ir_version: int) -> None:
    """Raise EngineError unless the graph is of these versions of ONNX, as the manifest says."""
    try:
        found = versions(path)
    except OSError as error:
        raise EngineError(f"{path}: cannot be read: {error.strerror}", hint=REEXPORT) from error
    except ValueError as error:
        raise EngineError(f"{path}: does not load: {error}", hint=REEXPORT) from error
    if found != (opset, ir_version):
        raise EngineError(
            f"{path}: must be of opset {opset} and IR version {ir_version}, is of opset"
            f" {found[0]} and IR version {found[1]}",
            hint=REEXPORT,
        )


def versions(path: Path) -> tuple[int, int]:
    """Opset of ONNX's own operators in a graph, and the version of the file's format (IR); 0 where
    it has none. Raises ValueError for what is no graph, OSError."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = len(data)
        opsets = [
            _number(data, begin, stop, 2)
            for number, begin, stop in _fields(data, 0, size)
            if number == _OPSET_IMPORT and _pair(data, begin, stop)[0] in _OWN_DOMAIN
        ]
        return next(iter(opsets), 0), _number(data, 0, size, 1)


def _number(data: mmap.mmap, start: int, end: int, wanted: int) -> int:
    """The value of a field of a message that is a number."""
    places = [p for p in _fields(data, start, end, _VARINT) if p[0] == wanted]
    return _varint(data, *places[-1][1:])[0] if places else 0


def external_data(path: Path) -> list[Entry]:
    """Every place outside of the file that a tensor of the graph is read from.

    Raises ValueError for what is no graph, OSError.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if not 0 < size <= MAX_GRAPH_BYTES:
            raise ValueError(f"a graph of {size} bytes, must have 1 to {MAX_GRAPH_BYTES}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return list(_entries(data, "Model", 0, size, _places(data), 0))


def _places(data: mmap.mmap) -> list[int]:
    """Where the word stands, in order."""
    found = []
    place = data.find(_WORD)
    while place >= 0:
        found.append(place)
        place = data.find(_WORD, place + 1)
    return found


def _entries(
    data: mmap.mmap, kind: str, start: int, end: int, places: list[int], depth: int
) -> Iterator[Entry]:
    if depth > MAX_DEPTH:
        raise ValueError("messages in one another too deep")
    entry: dict[str, str] = {}
    for number, begin, stop in _fields(data, start, end):
        inner = _FIELDS[kind].get(number)
        if inner == "Entry":
            key, value = _pair(data, begin, stop)
            if entry.setdefault(key, value) is not value:
                raise ValueError(f"external data with two values for {key[:60]!r}")
        elif inner is not None and _has_word(places, begin, stop):
            yield from _entries(data, inner, begin, stop, places, depth + 1)
    if entry:
        yield entry


def _has_word(places: list[int], begin: int, stop: int) -> bool:
    at = bisect_left(places, begin)
    return at < len(places) and places[at] < stop


def _pair(data: mmap.mmap, start: int, end: int) -> tuple[str, str]:
    """Key and value of an entry; of either the last one counts, as for any reader of protobuf."""
    found = {1: "", 2: ""}
    for number, begin, stop in _fields(data, start, end):
        if number in found:
            if stop - begin > 4096:
                raise ValueError(f"external data of {stop - begin} bytes in a name")
            found[number] = data[begin:stop].decode("utf-8")
    return found[1], found[2]


def _fields(
    data: mmap.mmap, start: int, end: int, kind: int = _MESSAGE
) -> Iterator[tuple[int, int, int]]:
    """Number and place of every field of a message that has a length, or is a number (_VARINT)."""
    place = start
    while place < end:
        tag, place = _varint(data, place, end)
        wire = tag & 7
        if wire == _VARINT:
            begin = place
            _, place = _varint(data, place, end)
            if kind == _VARINT:
                yield tag >> 3, begin, place
        elif wire == _MESSAGE:
            length, place = _varint(data, place, end)
            if length > end - place:
                raise ValueError(f"a field at byte {place} ends behind its message")
            if kind == _MESSAGE:
                yield tag >> 3, place, place + length
            place += length
        elif wire in (_FIXED64, _FIXED32):
            place += 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"no ONNX graph at byte {place}")
    if place != end:
        raise ValueError(f"no ONNX graph at byte {place}")


def _varint(data: mmap.mmap, place: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while place < end and shift < 70:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
    raise ValueError(f"no ONNX graph at byte {place}")


def _check_entry(entry: Entry, within: PurePosixPath, sizes: Mapping[str, int]) -> None:
    location = entry.get("location", "")
    size = sizes.get(str(within / location))
    if not location or size is None or ".." in PurePosixPath(location).parts:
        raise ValueError(f"it reads the file {location[:200]!r}, which the manifest does not list")
    numbers = [entry.get(name, "0") for name in ("offset", "length")]
    if not all(map(_RANGE.fullmatch, numbers)):
        raise ValueError(f"it reads {location} at {numbers[0][:30]!r}, {numbers[1][:30]!r} bytes")
    offset, length = map(int, numbers)
    if offset + length > size:
        raise ValueError(f"it reads {location} up to byte {offset + length}, which has {size}")
