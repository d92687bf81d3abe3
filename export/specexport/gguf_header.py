"""The header of a GGUF file: its metadata and where its tensors lie.

The format (version 2 and 3, little-endian): magic, version, counts of tensors and of metadata
entries, the entries, the table of tensors, then, aligned, the data. Lists of strings (a vocabulary,
merges) are skipped and only counted, which makes a header of 262144 tokens a matter of a moment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any, BinaryIO

from specexport.errors import SourceError
from specexport.weights import Shape
from specrun.reading import shown

# Type of a metadata value -> its struct format; 8 is a string, 9 a list.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _LIST = 8, 9
_MAX_STRING = 1 << 26  # bytes; a chat template is far below
_MAX_ENTRIES = 1 << 16  # of the metadata, and tensors
_MAX_LIST = 1 << 22  # items; the largest vocabulary has a quarter of a million
_MAX_ITEMS = 1 << 23  # of all lists together
_MAX_ALIGNMENT = 1 << 20
_MAX_SIZE = 1 << 40  # of an axis


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: ``kind`` is the ggml type's number; ``offset`` from the start of the file."""

    name: str
    shape: Shape
    kind: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Metadata by key (a list of strings is its length) and the tensors in file order."""

    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]

    @property
    def architecture(self) -> str:
        """``general.architecture``, for example ``llama``."""
        return str(self.metadata.get("general.architecture"))


def read(path: Path) -> Header:
    """The header of a file. Raises SourceError for one that is damaged, cut off or split."""
    try:
        with path.open("rb") as file:
            header = _Reader(file, path.stat().st_size).header()
        parts = header.metadata.get("split.count", 0)
        if not isinstance(parts, int):
            raise ValueError(f"split.count is {shown(parts)}")
    except (ValueError, OSError) as error:
        raise SourceError(
            f"{path}: not a whole GGUF file: {error}", hint="download the file again"
        ) from error
    if parts > 1:
        raise SourceError(
            f"{path}: one part of a GGUF that is split over several files",
            hint="merge the parts with llama-gguf-split --merge",
        )
    return header


class _Reader:
    """Reads the header of a file of ``size`` bytes; nothing that it says is taken for granted."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._items = _MAX_ITEMS

    def header(self) -> Header:
        """All of it. Raises ValueError."""
        if self._file.read(4) != b"GGUF":
            raise ValueError("it does not start with GGUF")
        version, num_tensors, num_entries = self._unpack("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, must be 2 or 3")
        if max(num_tensors, num_entries) > _MAX_ENTRIES:
            raise ValueError(f"{num_tensors} tensors and {num_entries} entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise ValueError(f"{shown(key)} comes twice")
            metadata[key] = self._value(*self._unpack("I"))
        table = [self._table_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        whole = isinstance(alignment, int) and 0 < alignment <= _MAX_ALIGNMENT
        if not whole or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {shown(alignment)}, must be a power of 2")
        start = -(-self._file.tell() // alignment) * alignment
        tensors = [
            TensorEntry(name, shape, kind, start + offset, _nbytes(name, shape, kind))
            for name, shape, kind, offset in table
        ]
        self._check_places(tensors)
        return Header(metadata, tuple(tensors))

    def _check_places(self, tensors: list[TensorEntry]) -> None:
        """Raise ValueError unless each tensor has a name and bytes of its own, all in the file."""
        end, before = 0, ""
        for entry in sorted(tensors, key=lambda entry: (entry.offset, entry.nbytes)):
            if entry.offset + entry.nbytes > self._size:
                last = entry.offset + entry.nbytes
                raise ValueError(f"{shown(entry.name)} ends at byte {last} of {self._size}")
            if entry.offset < end and entry.nbytes:
                raise ValueError(f"{shown(entry.name)} begins within {shown(before)}")
            end, before = max(end, entry.offset + entry.nbytes), entry.name
        names = [entry.name for entry in tensors]
        if len(set(names)) != len(names):
            raise ValueError("a tensor comes twice")

    def _table_entry(self) -> tuple[str, Shape, int, int]:
        name = self._string()
        (rank,) = self._unpack("I")
        if rank > 8:
            raise ValueError(f"{shown(name)} has {rank} axes")
        dims = self._unpack(f"{rank}Q")
        if any(dim > _MAX_SIZE for dim in dims):
            raise ValueError(f"{shown(name)} has the shape {list(dims)}")
        kind, offset = self._unpack("IQ")
        return name, tuple(reversed(dims)), kind, offset  # the file has the fastest axis first

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            (value,) = self._unpack(_SCALARS[kind])
            if isinstance(value, float) and not isfinite(value):
                raise ValueError(f"a number of the metadata is {value}")
            return value
        if kind == _STRING:
            return self._string()
        if kind != _LIST:
            raise ValueError(f"metadata of type {kind}")
        item, count = self._unpack("IQ")
        self._items -= count
        if count > _MAX_LIST or self._items < 0:
            raise ValueError(f"a list of {count} items")
        if item in _SCALARS:
            return list(self._unpack(f"{count}{_SCALARS[item]}"))
        if item != _STRING:
            raise ValueError(f"a list of type {item}")
        for _ in range(count):
            self._file.seek(self._length(), 1)
        return count

    def _string(self) -> str:
        return self._file.read(self._length()).decode("utf-8")

    def _length(self) -> int:
        """Of the string that comes now, all of which is there."""
        (length,) = self._unpack("Q")
        if length > min(_MAX_STRING, self._size - self._file.tell()):
            raise ValueError(f"a string of {length} bytes")
        return int(length)

    def _unpack(self, fields: str) -> tuple[Any, ...]:
        form = struct.Struct("<" + fields)
        if form.size > self._size - self._file.tell():
            raise ValueError("it ends within its header")
        return form.unpack(self._file.read(form.size))


def _nbytes(name: str, shape: Shape, kind: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ValueError(f"{shown(name)} is of the unknown type {kind}") from None
    if shape and shape[-1] % block:
        raise ValueError(f"{shown(name)}: rows of {shape[-1]} in blocks of {block}")
    return int(prod(shape) // block * size)
