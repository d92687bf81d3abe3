"""What an engine's tensors are made from, where no checkpoint tensor is taken as it is.

A recipe gives one or more tensors, its parts; equal recipes give equal bytes, so they are made and
stored once for all engines of a folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Origin = Literal["target", "drafter", "draft", "universal", "mtp"]
Part = Literal["values", "scales", "zeros"]


@dataclass(frozen=True)
class WeightRef:
    """A checkpoint tensor: whose checkpoint, and its name in the model class's state dict.

    ``index``: only that entry of its first axis, one expert's matrix of all experts'.
    """

    origin: Origin
    name: str
    index: int | None = None

    @property
    def label(self) -> str:
        """The name, with the index behind it where there is one."""
        return self.name if self.index is None else f"{self.name}.{self.index}"


@dataclass(frozen=True)
class Stacked:
    """Matrices ``[rows, columns]`` one below the other, as floats."""

    sources: tuple[WeightRef, ...]


@dataclass(frozen=True)
class Blocks:
    """Matrices or tables, one below the other, as unsigned integers with a scale per block::

        w[row, column] = scales[row, b] * (values[row, column] - zeros[row, b]),  b = column // size

    values uint8 ``[rows, blocks, size * bits / 8]``, the first of two 4-bit values in the low half;
    scales float32 ``[rows, blocks]``; zeros uint8 ``[rows, blocks * bits / 8 rounded up]``, in 8
    bits none: 128.
    """

    sources: tuple[WeightRef, ...]
    bits: int
    size: int


@dataclass(frozen=True)
class Signed:
    """Matrices or tables, one below the other, as signed integers without zero points::

        w[row, column] = scales[row, column // size] * values[row, column]

    values int8 ``[rows, columns]``, or 4-bit ones, the first of two in the low half of a byte;
    scales ``[rows, blocks]`` of dtype ``scale``: float32, float16 or bfloat16.
    """

    sources: tuple[WeightRef, ...]
    bits: int
    size: int
    scale: str


@dataclass(frozen=True)
class Columns:
    """Matrices, one below the other, transposed, as int8 with a scale per row::

        rotated(w[row] * smoothing)[column] = scales[row] * values[column, row]

    values int8 ``[columns, rows]``; scales float32 ``[rows]``. ``smoothing``: float32 ``[columns]``
    or none; the same for the same sources, so it does not tell recipes apart. ``rotation``: size of
    the pieces that :mod:`specgraphs.rotation` rotates, 0 for none.
    """

    sources: tuple[WeightRef, ...]
    smoothing: NDArray[np.float32] | None = field(default=None, compare=False)
    rotation: int = 0


Recipe = Stacked | Blocks | Signed | Columns


@dataclass(frozen=True)
class Made:
    """One part of what a recipe gives."""

    recipe: Recipe
    part: Part = "values"
