"""Writes what a recipe makes: streams the checkpoint through an encoder into the data file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport import encoders
from specexport.datafile import CHUNK_BYTES, DataFile, Range
from specexport.encoders import SignedParts
from specexport.errors import WeightsError
from specexport.integers import BlockForm, BlockParts
from specexport.weights import Weights
from specgraphs.recipes import Blocks, Columns, Made, Recipe, Signed, Stacked, WeightRef

Importance = Mapping[WeightRef, NDArray[np.float32]]


@dataclass(frozen=True)
class Sources:
    """Checkpoints by origin, and what calibration says of their columns."""

    weights: Mapping[str, Weights]
    importance: Importance = field(default_factory=dict)

    def canonical(self, ref: WeightRef) -> WeightRef:
        """Under which name the bytes of a tied tensor stand."""
        return replace(ref, name=self.weights[ref.origin].canonical(ref.name))

    def shape(self, ref: WeightRef) -> tuple[int, ...]:
        """Of the tensor in the checkpoint."""
        shape = self.weights[ref.origin].shape(ref.name)
        return shape if ref.index is None else shape[1:]

    def rows(self, ref: WeightRef) -> Iterator[NDArray[Any]]:
        """The tensor in pieces of whole rows; see :meth:`specexport.weights.Weights.chunks`.

        Raises WeightsError for values that are not finite.
        """
        for chunk in self.weights[ref.origin].chunks(ref.name, CHUNK_BYTES, ref.index):
            _check_finite(ref, chunk)
            yield chunk

    def form(self, ref: WeightRef) -> BlockForm | None:
        """In which integers the checkpoint has the tensor; None for floats."""
        return self.weights[ref.origin].form(ref.name)

    def blocks(self, ref: WeightRef, bits: int, size: int) -> Iterator[BlockParts]:
        """The tensor in blocks: as they are stored where they are these, else encoded."""
        if is_stored_so(self.form(ref), bits, size):
            for parts in self.weights[ref.origin].block_chunks(ref.name, CHUNK_BYTES, ref.index):
                _check_finite(ref, parts.scales)
                yield parts
            return
        importance = self.importance.get(replace(self.canonical(ref), index=None))
        for chunk in self.rows(ref):
            yield encoders.blocks(chunk, bits, size, importance)

    def signed(self, ref: WeightRef, bits: int, size: int) -> Iterator[SignedParts]:
        """The tensor in symmetric blocks of signed integers."""
        importance = self.importance.get(replace(self.canonical(ref), index=None))
        for chunk in self.rows(ref):
            yield encoders.signed(chunk, bits, size, importance)


def _check_finite(ref: WeightRef, array: NDArray[Any]) -> None:
    # One pass: a sum is finite only where all of it is, for values of the size that weights have.
    if array.dtype.kind == "f" and not np.isfinite(array.sum(dtype=np.float64)):
        raise WeightsError(
            f"{ref.label}: holds values that are not finite (nan or inf)",
            hint="download the checkpoint again, or have it made again",
        )


def is_stored_so(form: BlockForm | None, bits: int, size: int) -> bool:
    """Whether blocks of ``bits`` and ``size`` columns are those of the checkpoint."""
    return form is not None and (form.bits, form.size) == (bits, size)


def key(made: Made, sources: Sources) -> tuple[str, str]:
    """What tells the bytes of a part from others in the data file."""
    recipe = made.recipe
    names = "+".join(f"{r.origin}:{r.label}" for r in map(sources.canonical, recipe.sources))
    detail = ""
    if isinstance(recipe, Blocks):
        detail = f"{recipe.bits}/{recipe.size}"
    elif isinstance(recipe, Signed):
        detail = f"{recipe.bits}/{recipe.size}/{recipe.scale}"
    elif isinstance(recipe, Columns):
        detail = f"/{recipe.rotation}"
    return (f"{type(recipe).__name__}{detail}.{made.part}", names)


def write(made: Made, dtype: np.dtype[Any], data: DataFile, sources: Sources) -> Range:
    """The place of a part in ``data``; all parts of its recipe are written with the first."""
    wanted = (*key(made, sources), dtype.name)
    if wanted not in data.ranges:
        recipe = made.recipe
        if isinstance(recipe, Stacked):
            _write_stacked(recipe, wanted[:2], dtype, data, sources)
        elif isinstance(recipe, Blocks):
            _write_blocks(recipe, data, sources)
        elif isinstance(recipe, Signed):
            _write_signed(recipe, data, sources)
        else:
            _write_columns(recipe, data, sources)
    return data.ranges[wanted]


def _write_stacked(
    recipe: Stacked,
    name: tuple[str, str],
    dtype: np.dtype[Any],
    data: DataFile,
    sources: Sources,
) -> None:
    length = sum(math.prod(sources.shape(ref)) for ref in recipe.sources) * dtype.itemsize
    data.add(name, dtype, length, (c for ref in recipe.sources for c in sources.rows(ref)))


def _write_blocks(recipe: Blocks, data: DataFile, sources: Sources) -> None:
    rows, columns = _matrix(recipe, sources)
    count = -(-columns // recipe.size)
    parts = {
        "values": ("uint8", count * recipe.size * recipe.bits // 8),
        "scales": ("float32", count * 4),
    }
    if recipe.bits == 4:
        parts["zeros"] = ("uint8", -(-count * recipe.bits // 8))
    places = {
        part: data.reserve((*key(Made(recipe, part), sources), dtype), rows * width)  # type: ignore[arg-type]
        for part, (dtype, width) in parts.items()
    }
    row = 0
    for ref in recipe.sources:
        for encoded in sources.blocks(ref, recipe.bits, recipe.size):
            for part, (_, width) in parts.items():
                data.fill(places[part], row * width, getattr(encoded, part))
            row += len(encoded.scales)


def _write_signed(recipe: Signed, data: DataFile, sources: Sources) -> None:
    rows, columns = _matrix(recipe, sources)
    scale = _dtype(recipe.scale)
    kind = f"int{recipe.bits}"
    widths = (columns * recipe.bits // 8, -(-columns // recipe.size) * scale.itemsize)
    values = data.reserve((*key(Made(recipe), sources), kind), rows * widths[0])
    scales = data.reserve((*key(Made(recipe, "scales"), sources), scale.name), rows * widths[1])
    row = 0
    for ref in recipe.sources:
        for encoded in sources.signed(ref, recipe.bits, recipe.size):
            data.fill(values, row * widths[0], encoded.values)
            data.fill(scales, row * widths[1], encoded.scales.astype(scale).view(np.uint8))
            row += len(encoded.scales)


def _dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes  # numpy has no bfloat16 of its own

    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _write_columns(recipe: Columns, data: DataFile, sources: Sources) -> None:
    rows, columns = _matrix(recipe, sources)
    values = data.reserve((*key(Made(recipe, "values"), sources), "int8"), rows * columns)
    scales = data.reserve((*key(Made(recipe, "scales"), sources), "float32"), rows * 4)
    row = 0
    for ref in recipe.sources:
        for chunk in sources.rows(ref):
            encoded = encoders.columns(chunk, recipe.smoothing, recipe.rotation)
            data.fill_columns(values, rows, row, encoded.values)
            data.fill(scales, row * 4, encoded.scales)
            row += len(chunk)


def _matrix(recipe: Recipe, sources: Sources) -> tuple[int, int]:
    """Rows of all sources together, and their columns."""
    shapes = [sources.shape(ref) for ref in recipe.sources]
    columns = {shape[-1] for shape in shapes}
    assert len(columns) == 1, f"{recipe.sources} have different widths"
    return sum(math.prod(shape[:-1]) for shape in shapes), columns.pop()
