"""Tensors in safetensors files: the header parsed, the data read row by row.

The format: 8 bytes little-endian header length, a JSON object ``name -> {dtype, shape,
data_offsets}``, then the data, to which the offsets refer. What is read is mapped, a piece at a
time, so that the resident size is that of one piece, whatever the file's size. Widening bfloat16
from a map took half to two thirds of the time that reading into memory first took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from specexport.errors import SourceError, WeightsError
from specexport.weights import Array, Shape
from specrun.reading import leads_inside, parse_json, read_text, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
BAND_BYTES = 16 << 20  # of a matrix that is read by columns, mapped at a time
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
MAX_HEADER_ITEMS = 4_000_000  # values in it, some eight per tensor
MAX_AXES = 16
MAX_NAME = 255  # characters of a shard's name
READ_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")

# Type in the file -> (how it lies there, what rows() returns).
_DTYPES: dict[str, tuple[str, str]] = {
    "F64": ("<f8", "<f4"),
    "F32": ("<f4", "<f4"),
    "F16": ("<f2", "<f2"),
    "BF16": ("<u2", "<f4"),
    "I64": ("<i8", "<i8"),
    "I32": ("<i4", "<i4"),
    "I16": ("<i2", "<i2"),
    "I8": ("i1", "i1"),
    "U8": ("u1", "u1"),
    "BOOL": ("?", "?"),
}


@dataclass(frozen=True)
class SafeTensor:
    """One tensor of a safetensors file; ``offset`` is in bytes from the start of the file."""

    path: Path
    name: str
    stored: str
    shape: Shape
    offset: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """What ``rows`` returns."""
        return np.dtype(self._types()[1])

    def rows(self, start: int, stop: int) -> Array:
        """Rows ``start <= row < stop``; bfloat16 widened to float32, which is exact."""
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        count = prod(shape)
        disk = np.dtype(self._types()[0])
        if not count:
            return np.empty(shape, self.dtype)
        first = start * prod(self.shape[1:])
        raw = np.memmap(self.path, disk, "r", self.offset + first * disk.itemsize, (count,))
        return self._widened(raw).reshape(shape)

    def columns(self, start: int, stop: int) -> Array:
        """Columns ``start <= column < stop`` of a matrix, ``[rows, stop - start]``.

        Bands of rows are mapped one after the other: a column touches every page of the file, and
        pages of a map that is gone are not held.
        """
        disk = np.dtype(self._types()[0])
        rows, width = self.shape
        raw = np.empty((rows, stop - start), disk)
        step = max(1, BAND_BYTES // (width * disk.itemsize))
        for row in range(0, rows, step):
            end = min(row + step, rows)
            offset = self.offset + row * width * disk.itemsize
            band = np.memmap(self.path, disk, "r", offset, (end - row, width))
            raw[row:end] = band[:, start:stop]
        return self._widened(raw)

    def _widened(self, raw: Array) -> Array:
        """A copy in the dtype that is returned."""
        if self.stored != "BF16":
            return np.array(raw, self.dtype)
        halves = np.zeros((*raw.shape, 2), "<u2")  # low half first: that of a bfloat16 is zero
        halves[..., 1] = raw
        wide: Array = halves.view("<f4")[..., 0]
        return wide

    def matrix_rows(self, start: int, stop: int) -> Array:
        """Rows of the matrix ``[..., shape[-1]]``, for a tensor of more than two axes."""
        flat = (prod(self.shape[:-1]), self.shape[-1])
        return replace(self, shape=flat).rows(start, stop)

    def _types(self) -> tuple[str, str]:
        try:
            return _DTYPES[self.stored]
        except KeyError:
            raise WeightsError(
                f"{self.path}: {self.name} is stored as {self.stored}, which is not read",
                hint=f"give the checkpoint in one of {', '.join(_DTYPES)}",
            ) from None


def read_header(path: Path) -> dict[str, SafeTensor]:
    """The tensors of one file by name. Raises WeightsError for a damaged or cut file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = parse_json(file.read(length), max_items=MAX_HEADER_ITEMS)
        if not isinstance(header, dict):
            raise ValueError(f"its header is {shown(header)}")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {}
        places = []
        for name, entry in entries.items():
            tensor, end = _tensor(path, name, entry, 8 + length)
            if end > size:
                raise ValueError(f"{shown(name)} ends at byte {end}, the file at {size}")
            tensors[name] = tensor
            places.append((tensor.offset, end, name))
    except (ValueError, KeyError, OSError) as error:
        raise WeightsError(
            f"{path}: not a whole safetensors file: {error}", hint="download the file again"
        ) from error
    _check_apart(path, sorted(places))
    return tensors


def _tensor(path: Path, name: str, entry: Any, data: int) -> tuple[SafeTensor, int]:
    """One entry of a header whose data begins at byte ``data``, and where its bytes end."""
    if not isinstance(entry, dict):
        raise ValueError(f"{shown(name)} is {shown(entry)}")
    stored, shape, places = (entry[field] for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(stored, str) or not _counts(shape) or not _counts(places):
        raise ValueError(f"{shown(name)} is {shown(entry)}")
    if len(places) != 2 or places[0] > places[1] or len(shape) > MAX_AXES:
        raise ValueError(f"{shown(name)} of shape {shown(shape)} lies at {shown(places)}")
    begin, end = places
    known = _DTYPES.get(stored)
    if known and prod(shape) * np.dtype(known[0]).itemsize != end - begin:
        raise ValueError(f"{shown(name)} has {end - begin} bytes for {shape}")
    return SafeTensor(path, name, stored, tuple(shape), data + begin), data + end


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_apart(path: Path, places: list[tuple[int, int, str]]) -> None:
    """Raise WeightsError where bytes belong to two tensors; ``places`` are sorted."""
    last, before = 0, ""
    for start, end, name in places:
        if start < last and start < end:
            raise WeightsError(
                f"{path}: not a whole safetensors file: {shown(name)} begins within"
                f" {shown(before)}",
                hint="download the file again",
            )
        if end > last:
            last, before = end, name


def check_links(folder: Path) -> None:
    """Raise SourceError for a file of the checkpoint that is a link out of it."""
    for path in sorted(folder.iterdir()):
        if path.suffix in READ_SUFFIXES and path.is_symlink() and not leads_inside(path, folder):
            raise SourceError(
                f"{path}: is a link that leads out of the checkpoint",
                hint="put the file itself there",
            )


def read_folder(folder: Path) -> dict[str, SafeTensor]:
    """The tensors of a checkpoint folder, sharded or not, by their names in the files.

    Raises SourceError if there are no safetensors in it, WeightsError for a missing shard.
    """
    tensors: dict[str, SafeTensor] = {}
    for path in weight_files(folder):
        tensors.update(read_header(path))
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, in order."""
    index = folder / INDEX
    if index.is_file():
        return _shards(index)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickled = sorted({path.name for pattern in PICKLED for path in folder.glob(pattern)})
    if pickled:
        raise SourceError(
            f"{folder}: its weights are pickled ({pickled[0]}), which can run code when loaded",
            hint="convert it to safetensors first: load it with transformers where you trust it and"
            " save_pretrained() it to a new folder",
        )
    raise SourceError(
        f"{folder}: no .safetensors file in it",
        hint="give a folder with config.json and model.safetensors, as save_pretrained() writes it",
    )


def _shards(index: Path) -> list[Path]:
    try:
        data = parse_json(read_text(index, MAX_HEADER_BYTES), max_items=MAX_HEADER_ITEMS)
        names = sorted({str(name) for name in data["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise WeightsError(
            f"{index}: not an index of shards: {error}", hint="download the checkpoint again"
        ) from error
    for name in names:
        if Path(name).name != name or not name.isprintable() or len(name) > MAX_NAME:
            raise WeightsError(
                f"{index}: shard {shown(name)} is not a file name of this folder",
                hint="download the checkpoint again",
            )
        if not (index.parent / name).is_file():
            raise WeightsError(
                f"{index.parent}: the index lists {name}, it is missing",
                hint="download the checkpoint again; all shards must be there",
            )
    return [index.parent / name for name in names]
