"""The header of a GGUF file: its metadata and where its tensors lie.

The format (version 2 and 3, little-endian): magic, version, counts of tensors and of metadata
entries, the entries, the table of tensors, then, aligned, the data. Lists of strings (a vocabulary,
merges) are skipped and only counted, which makes a header of 262144 tokens a matter of a moment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from specexport.errors import SourceError
from specexport.weights import Shape

# Type of a metadata value -> its struct format; 8 is a string, 9 a list.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _LIST = 8, 9
_MAX_STRING = 1 << 26  # bytes; a chat template is far below


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
            header = _read(file, path.stat().st_size)
    except (ValueError, KeyError, struct.error, MemoryError) as error:
        raise SourceError(
            f"{path}: not a whole GGUF file: {error}", hint="download the file again"
        ) from error
    if header.metadata.get("split.count", 0) > 1:
        raise SourceError(
            f"{path}: one part of a GGUF that is split over several files",
            hint="merge the parts with llama-gguf-split --merge",
        )
    return header


def _read(file: BinaryIO, size: int) -> Header:
    if file.read(4) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    version, num_tensors, num_entries = _unpack(file, "IQQ")
    if version not in (2, 3):
        raise ValueError(f"version {version}, must be 2 or 3")
    metadata = {}
    for _ in range(num_entries):
        key = _string(file)
        metadata[key] = _value(file, *_unpack(file, "I"))
    table = [_table_entry(file) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-file.tell() // alignment) * alignment
    tensors = []
    for name, shape, kind, offset in table:
        entry = TensorEntry(name, shape, kind, start + offset, _nbytes(name, shape, kind))
        if entry.offset + entry.nbytes > size:
            raise ValueError(f"{name} ends at byte {entry.offset + entry.nbytes} of {size}")
        tensors.append(entry)
    return Header(metadata, tuple(tensors))


def _table_entry(file: BinaryIO) -> tuple[str, Shape, int, int]:
    name = _string(file)
    (rank,) = _unpack(file, "I")
    if rank > 8:
        raise ValueError(f"{name} has {rank} axes")
    dims = _unpack(file, f"{rank}Q")
    kind, offset = _unpack(file, "IQ")
    return name, tuple(reversed(dims)), kind, offset  # the file has the fastest axis first


def _nbytes(name: str, shape: Shape, kind: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape and shape[-1] % block:
        raise ValueError(f"{name}: rows of {shape[-1]} in blocks of {block}")
    return int(prod(shape) // block * size)


def _value(file: BinaryIO, kind: int) -> Any:
    if kind in _SCALARS:
        return _unpack(file, _SCALARS[kind])[0]
    if kind == _STRING:
        return _string(file)
    if kind != _LIST:
        raise ValueError(f"metadata of type {kind}")
    item, count = _unpack(file, "IQ")
    if item in _SCALARS:
        return list(_unpack(file, f"{count}{_SCALARS[item]}"))
    if item != _STRING:
        raise ValueError(f"a list of type {item}")
    for _ in range(count):
        file.seek(_unpack(file, "Q")[0], 1)
    return count


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > _MAX_STRING:
        raise ValueError(f"a string of {length} bytes")
    return file.read(length).decode("utf-8")


def _unpack(file: BinaryIO, fields: str) -> tuple[Any, ...]:
    form = struct.Struct("<" + fields)
    data = file.read(form.size)
    if len(data) < form.size:
        raise ValueError("it ends within its header")
    return form.unpack(data)
