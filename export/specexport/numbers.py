"""How far two results are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TIE = 1e-4  # a differing argmax is a tie if the two reference logits are this close (relative)


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Largest difference over the largest wanted value; infinite where anything is not finite."""
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
    error = float(difference / max(np.abs(want.astype(np.float64)).max(), 1e-30))
    return error if np.isfinite(error) else float("inf")


def agreement(tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> float:
    """Share of rows whose token is the reference's argmax, or ties with it."""
    best = logits.max(axis=1)
    chosen = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return float((best - chosen <= TIE * np.maximum(1.0, np.abs(best))).mean())
