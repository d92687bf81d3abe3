"""Weights that are integers in the checkpoint already: what they stand for, and as engine blocks.

Arrays only; where they lie in a file is the business of ``prequantized`` and ``gguf_source``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class BlockParts(NamedTuple):
    """See :class:`specgraphs.recipes.Blocks`; ``zeros`` is None in 8 bits."""

    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8] | None


class BlockForm(NamedTuple):
    """How a file has a matrix in integers of ``bits``.

    ``size``: columns that share a scale, where an engine's blocks can be filled with the integers
    as they are; else None, and ``obstacle`` says why not.
    """

    bits: int
    size: int | None
    obstacle: str = ""


class Integers(NamedTuple):
    """Rows of a matrix as the file has them, ``g`` being the group of a column::

        w[row, column] = scales[row, g] * (values[row, column] - zeros[row, g])

    values uint8 ``[rows, columns]``; scales float32, zeros uint8 ``[rows, groups]``.
    """

    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]


def dequantized(stored: Integers, groups: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """The matrix in float32; ``groups`` ``[columns]``: the group of each column.

    The difference is a small integer and exact, so a value is rounded once, by the product.
    """
    out = stored.values.astype(np.float32)
    out -= stored.zeros[:, groups]
    with np.errstate(invalid="ignore"):  # scales that are not finite; who writes them says so
        out *= stored.scales[:, groups]
    return out


def as_blocks(stored: Integers, bits: int, size: int) -> BlockParts:
    """The same integers and scales in the layout of an engine; groups are ``size`` columns each.

    Columns that fill the last block stand for zero. In 8 bits every zero point must be 128.
    """
    rows, columns = stored.values.shape
    count = stored.scales.shape[1]
    fill = np.repeat(stored.zeros[:, -1:], count * size - columns, axis=1)
    values = np.concatenate([stored.values, fill], axis=1).reshape(rows, count, size)
    scales = np.ascontiguousarray(stored.scales, np.float32)
    if bits == 8:
        return BlockParts(values, scales, None)
    return BlockParts(pack(values), scales, pack(stored.zeros))


def pack(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two 4-bit values to a byte along the last axis, the first in the low half."""
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=-1)
    packed: NDArray[np.uint8] = values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
    return np.ascontiguousarray(packed)


def unpack(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two values of 4 bits from each byte along the last axis, the low half first."""
    halves = [values & np.uint8(15), values >> np.uint8(4)]
    return np.stack(halves, axis=-1).reshape(*values.shape[:-1], 2 * values.shape[-1])
