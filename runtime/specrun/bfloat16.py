"""bfloat16 values as NumPy knows none: the upper half of a float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.contract import DType

BFLOAT16 = "bfloat16"


def stored(dtype: DType) -> np.dtype[Any]:
    """How values of ``dtype`` lie in a buffer: bfloat16 as uint16."""
    return np.dtype(np.uint16 if dtype.value == BFLOAT16 else dtype.value)


def shown(dtype: DType) -> np.dtype[Any]:
    """How the host sees values of ``dtype``: bfloat16 as float32."""
    return np.dtype(np.float32 if dtype.value == BFLOAT16 else dtype.value)


def widen(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    """float32 of the same values."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def narrow(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The nearest bfloat16 values; of two the even one. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    rounded = np.where(np.isnan(values), bits | np.uint32(0x400000), rounded)
    return (rounded >> 16).astype(np.uint16)


def to_host(values: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Stored values of ``dtype`` as the host sees them."""
    return widen(values) if dtype.value == BFLOAT16 else values


def to_stored(values: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Values of the host as they are stored for ``dtype``."""
    return narrow(values) if dtype.value == BFLOAT16 else values
