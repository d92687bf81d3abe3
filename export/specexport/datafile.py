"""The one data file of an engine folder: every tensor's bytes once, written in bounded pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from specexport.errors import WeightsError

DATA_FILE = "weights.data"
CHUNK_BYTES = 16 << 20  # of a tensor in memory at a time
SMALL_ALIGNMENT = 64  # bytes; what vector loads want
LARGE_ALIGNMENT = 4096  # bytes; a page, so that large tensors can be mapped
LARGE_TENSOR = 1 << 20  # bytes

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class Range:
    """Where a tensor's bytes stand in the data file. Bytes."""

    offset: int
    length: int


def alignment(length: int) -> int:
    """What the place of a tensor of ``length`` bytes is a multiple of."""
    return LARGE_ALIGNMENT if length >= LARGE_TENSOR else SMALL_ALIGNMENT


class DataFile:
    """Appends tensors; the same key is stored once and gets the same range."""

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self.path = path
        self.ranges: dict[tuple[str, str, str], Range] = {}
        self._file = path.open("wb+")
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(
        self,
        key: tuple[str, str],
        dtype: np.dtype[Any],
        length: int,
        chunks: Iterable[NDArray[Any]],
    ) -> Range:
        """Store ``chunks`` converted to ``dtype`` under ``key``, unless they are stored already.

        ``length``: bytes that the chunks must make up. Raises WeightsError where they do not, and
        where a float16 conversion overflows.
        """
        full_key = (*key, dtype.name)
        if full_key in self.ranges:
            return self.ranges[full_key]
        offset = self._align(length)
        for chunk in chunks:
            data = np.ascontiguousarray(_convert(chunk, dtype, key[1]))
            self._file.write(as_bytes(data))
            if self._progress is not None:
                self._progress(data.nbytes)
        written = self._file.tell() - offset
        if written != length:
            raise WeightsError(f"{key[1]}: must give {length} bytes, gave {written}")
        self.ranges[full_key] = Range(offset, length)
        return self.ranges[full_key]

    def reserve(self, key: tuple[str, str, str], length: int) -> Range:
        """A place of ``length`` bytes under ``key`` (its last part the dtype), to be filled."""
        offset = self._align(length)
        self._file.truncate(offset + length)
        self._file.seek(offset + length)
        self.ranges[key] = Range(offset, length)
        return self.ranges[key]

    def fill(self, place: Range, start: int, array: NDArray[Any]) -> None:
        """Write ``array`` into ``place``, from byte ``start`` of it on."""
        if start + array.nbytes > place.length:
            raise WeightsError(f"{array.nbytes} bytes at {start} do not fit into {place.length}")
        end = self._file.tell()
        self._file.seek(place.offset + start)
        self._file.write(as_bytes(array))
        self._file.seek(end)
        if self._progress is not None:
            self._progress(array.nbytes)

    def fill_columns(self, place: Range, width: int, start: int, array: NDArray[Any]) -> None:
        """Write ``array`` ``[rows, columns]`` of bytes transposed into ``place``.

        ``place`` is a matrix ``[columns, width]``, of which this fills the columns from ``start``.
        """
        turned = np.ascontiguousarray(array.T)
        if turned.shape[1] == width:
            self.fill(place, 0, turned)
            return
        self._file.flush()
        number = self._file.fileno()
        for row, piece in enumerate(turned):
            _write_at(number, piece.data, place.offset + row * width + start)
        if self._progress is not None:
            self._progress(turned.nbytes)

    def _align(self, length: int) -> int:
        """Pad the file up to where ``length`` bytes may begin; the place."""
        align = alignment(length)
        offset = -(-self._file.tell() // align) * align
        self._file.write(b"\0" * (offset - self._file.tell()))
        return offset


def as_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of ``array`` in order, also of dtypes that are not NumPy's own (bfloat16)."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_at(number: int, data: memoryview, offset: int) -> None:
    """All of ``data`` at ``offset``: a nearly full disk takes a part, and says so only when asked
    for the rest."""
    while data:
        written = os.pwrite(number, data, offset)
        data, offset = data[written:], offset + written


def _convert(chunk: NDArray[Any], dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    if chunk.dtype == dtype:
        return chunk
    with np.errstate(over="ignore"):
        converted = chunk.astype(dtype)
    lost = dtype == np.float16 and not np.isfinite(converted).all() and np.isfinite(chunk).all()
    if lost:
        raise WeightsError(
            f"{name}: holds {float(np.abs(chunk).max()):.3g}, more than fp16 can",
            hint="export with --precision fp32",
        )
    return converted
