"""Floats to integers with scales, in pieces of whole rows: what the recipes of a graph ask for.

Plain functions of arrays; :mod:`specexport.made` streams a checkpoint through them.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.integers import BlockParts, pack, unpack
from specgraphs.rotation import rotated
from specrun.options import available_threads

SHRINKS = 8  # candidates for the range of a block, from the whole of it down to LEAST_RANGE
LEAST_RANGE = 0.72
PIECE_VALUES = 1 << 15  # up to which torch takes no threads of its own
QMAX = 127.0


class ColumnParts(NamedTuple):
    """See :class:`specgraphs.recipes.Columns`; ``values`` int8 ``[rows, columns]``, not transposed
    yet."""

    values: NDArray[np.int8]
    scales: NDArray[np.float32]


class SignedParts(NamedTuple):
    """See :class:`specgraphs.recipes.Signed`; ``values`` uint8 ``[rows, bytes]``, ``scales``
    float32 ``[rows, blocks]``."""

    values: NDArray[np.uint8]
    scales: NDArray[np.float32]


def blocks(
    weight: NDArray[Any],
    bits: int,
    size: int,
    importance: NDArray[np.float32] | None = None,
) -> BlockParts:
    """Encode float ``weight`` ``[rows, columns]`` in blocks of ``size`` columns.

    8 bits: symmetric, rounded to nearest. 4 bits: asymmetric; of several ranges per block the one
    with the least squared error, its scale refitted to the integers (as llama.cpp's k-quants do,
    ggml-quants.c, make_qkx2_quants). ``importance``: float32 ``[columns]``, weight of a column's
    squared error, the mean square of what it is multiplied with. Columns that fill the last block
    are zero.
    """
    # In pieces that stay in the cache and that torch does in one thread, several at a time: four
    # times as fast as the whole at once, and much more where other work is on the cores.
    step = max(1, PIECE_VALUES // weight.shape[1])
    pieces = [weight[row : row + step] for row in range(0, max(1, len(weight)), step)]
    encode = functools.partial(_blocks, bits=bits, size=size, importance=importance)
    parts = [encode(pieces[0])] if len(pieces) == 1 else list(_workers().map(encode, pieces))
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return BlockParts(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(zeros) if zeros else None,
    )


def signed(
    weight: NDArray[Any],
    bits: int,
    size: int,
    importance: NDArray[np.float32] | None = None,
) -> SignedParts:
    """Encode float ``weight`` ``[rows, columns]`` in blocks of ``size`` columns, symmetrically.

    8 bits: rounded to nearest. 4 bits: of several ranges per block the one with the least squared
    error, its scale refitted, as :func:`blocks` does; ``importance`` as there. The last block may
    be a part of one.
    """
    step = max(1, PIECE_VALUES // weight.shape[1])
    pieces = [weight[row : row + step] for row in range(0, max(1, len(weight)), step)]
    encode = functools.partial(_signed, bits=bits, size=size, importance=importance)
    parts = [encode(pieces[0])] if len(pieces) == 1 else list(_workers().map(encode, pieces))
    return SignedParts(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts]),
    )


def _signed(
    weight: NDArray[Any], bits: int, size: int, importance: NDArray[np.float32] | None
) -> SignedParts:
    columns = weight.shape[1]
    blocked = _in_blocks(weight, size)
    if bits == 8:
        scale = blocked.abs().amax(-1, keepdim=True) / QMAX
        q = _divided(blocked, scale).round_()
    else:
        scale, q = _search_signed(blocked, _weights_in_blocks(importance, columns, size))
    values = q.to(torch.int8).view(len(weight), -1)[:, :columns].contiguous().numpy()
    raw: NDArray[np.uint8] = values.view(np.uint8)
    return SignedParts(pack(raw & np.uint8(0xF)) if bits == 4 else raw, _array(scale[..., 0]))


def _in_blocks(weight: NDArray[Any], size: int) -> torch.Tensor:
    """Float32 ``[rows, blocks, size]``, filled up with zeros."""
    rows, columns = weight.shape
    count = -(-columns // size)
    whole = torch.from_numpy(np.ascontiguousarray(weight, dtype=np.float32))
    return _padded(whole, count * size).view(rows, count, size)


def _weights_in_blocks(
    importance: NDArray[np.float32] | None, columns: int, size: int
) -> torch.Tensor | None:
    if importance is None:
        return None
    count = -(-columns // size)
    return _padded(torch.from_numpy(importance)[None], count * size).view(1, count, size)


def _search_signed(
    blocked: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale ``[rows, blocks, 1]`` and integers -8 .. 7 ``[rows, blocks, size]`` of least error."""
    largest = blocked.abs().amax(-1, keepdim=True)
    best: list[torch.Tensor] | None = None
    for share in np.linspace(1.0, LEAST_RANGE, SHRINKS):
        q = _divided(blocked, largest * (float(share) / 7)).round_().clamp_(-8, 7)
        weighted = q if weights is None else q * weights
        square = (weighted * q).sum(-1, keepdim=True)
        fitted = (weighted * blocked).sum(-1, keepdim=True) / square
        scale = torch.where(square > 0, fitted, largest * (float(share) / 7))
        off = blocked - q * scale
        error = (off * off if weights is None else off * off * weights).sum(-1, keepdim=True)
        if best is None:
            best = [error, scale, q]
            continue
        better = error < best[0]
        for index, value in enumerate((error, scale, q)):
            best[index] = torch.where(better, value, best[index])
    assert best is not None
    return best[1], best[2]


def _blocks(
    weight: NDArray[Any], bits: int, size: int, importance: NDArray[np.float32] | None
) -> BlockParts:
    blocked = _in_blocks(weight, size)
    if bits == 8:
        scale = blocked.abs().amax(-1, keepdim=True) / QMAX
        q = _divided(blocked, scale).round_().add_(128)
        return BlockParts(q.to(torch.uint8).numpy(), _array(scale[..., 0]), None)
    weights = _weights_in_blocks(importance, weight.shape[1], size)
    scale, zero, q = _search(blocked, weights, (1 << bits) - 1)
    return BlockParts(
        pack(q.to(torch.uint8).numpy()), _array(scale), pack(zero.to(torch.uint8).numpy())
    )


def decoded_blocks(parts: BlockParts, bits: int, columns: int) -> NDArray[np.float32]:
    """What :func:`blocks` stands for, float32 ``[rows, columns]``."""
    rows, count = parts.scales.shape
    values = unpack(parts.values) if bits == 4 else parts.values
    zeros: Any = 128.0
    if parts.zeros is not None:
        zeros = unpack(parts.zeros)[:, :count, None].astype(np.float32)
    whole = (values.astype(np.float32) - zeros) * parts.scales[..., None]
    return np.ascontiguousarray(whole.reshape(rows, -1)[:, :columns])


def columns(
    weight: NDArray[Any], smoothing: NDArray[np.float32] | None, rotation: int = 0
) -> ColumnParts:
    """Encode float ``weight`` ``[rows, columns]`` with one scale per row, symmetric.

    ``smoothing``, ``rotation``: see :class:`specgraphs.recipes.Columns`.
    """
    array = np.ascontiguousarray(weight, dtype=np.float32)
    if smoothing is not None:
        array = array * smoothing
    value = torch.from_numpy(rotated(array, rotation))
    scale = value.abs().amax(1, keepdim=True) / QMAX
    q = _divided(value, scale).round_()
    return ColumnParts(q.to(torch.int8).numpy(), _array(scale[:, 0]))


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_threads(), thread_name_prefix="encode")


def _search(
    blocked: torch.Tensor, weights: torch.Tensor | None, levels: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale, zero point ``[rows, blocks]`` and integers ``[rows, blocks, size]`` of least error."""
    low = blocked.amin(-1, keepdim=True).clamp(max=0)
    high = blocked.amax(-1, keepdim=True).clamp(min=0)
    best: list[torch.Tensor] | None = None
    for share in np.linspace(1.0, LEAST_RANGE, SHRINKS):
        scale = (high - low) * (float(share) / levels)
        zero = _divided(-low * float(share), scale).round_().clamp_(0, levels)
        q = _divided(blocked, scale).add_(zero).round_().clamp_(0, levels)
        shifted = q - zero
        weighted = shifted if weights is None else shifted * weights
        square = (weighted * shifted).sum(-1, keepdim=True)
        scale = torch.where(square > 0, (weighted * blocked).sum(-1, keepdim=True) / square, scale)
        off = blocked - shifted * scale
        error = (off * off if weights is None else off * off * weights).sum(-1, keepdim=True)
        if best is None:
            best = [error, scale, zero, q]
            continue
        better = error < best[0]
        for index, value in enumerate((error, scale, zero, q)):
            best[index] = torch.where(better, value, best[index])
    assert best is not None
    return best[1][..., 0], best[2][..., 0], best[3]


def _padded(value: torch.Tensor, columns: int, fill: float = 0.0) -> torch.Tensor:
    return torch.nn.functional.pad(value, (0, columns - value.shape[-1]), value=fill)


def _divided(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``value / scale``, zero where the scale is."""
    return value / torch.where(scale > 0, scale, torch.ones_like(scale))


def _array(value: torch.Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(value.numpy())
