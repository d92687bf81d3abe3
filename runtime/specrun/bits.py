"""Floats that may come as their bits: bfloat16 as uint16, which NumPy cannot compute with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

EXPONENT = 0x7F80  # of bfloat16; all ones in NaN and the infinities, and in nothing else


def all_finite(array: NDArray[Any]) -> bool:
    """Whether no element is NaN or infinite; uint16 are the bits of bfloat16."""
    values = np.asarray(array)
    if values.dtype == np.uint16:
        return bool(((values & EXPONENT) != EXPONENT).all())
    return bool(np.isfinite(values).all())
