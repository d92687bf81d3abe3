"""How the candidates of an assistant's step are compared with the reference: what is an error.

Pure arrays; that real engines pass is in test_architectures.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from specexport.parts.assistant import _centroid_error, _existing, _plain_error

FULL = np.array([0.5, 3.0, -1.0, 2.0, 2.0, -4.0], np.float32)
FILLED = np.array([0.5, 3.0, -5.0, 2.0, -5.0, -5.0], np.float32)  # tokens 2, 4, 5 not selected


def of(values: NDArray[np.float32], *ids: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The candidates ``ids`` with their logits in ``values``."""
    return values[list(ids)], np.array(ids)


def test_plain() -> None:
    for ids in ((1, 3, 4), (1, 4, 3)):  # a tie may stand either way
        assert _plain_error(*of(FULL, *ids), FULL) == 0
    logits, _ = of(FULL, 1, 3, 4)
    assert _plain_error(logits, np.array([1, 3, 0]), FULL) == 0.5  # a logit of another token
    assert _plain_error(*of(FULL, 1, 3, 0), FULL) == 0.5  # a better one was left out
    assert _plain_error(logits + np.float32(0.003), np.array([1, 3, 4]), FULL) == pytest.approx(
        0.001, rel=1e-3
    )


def test_centroid() -> None:
    least = 0.6
    assert _centroid_error(*of(FILLED, 1, 3, 0), FILLED, least) == 0
    # One cluster fell otherwise: the others are compared.
    other = np.array([3.0, 2.0, 1.9], np.float32), np.array([1, 3, 4])
    assert _centroid_error(*other, FILLED, least) == 0
    assert _centroid_error(*other, FILLED, 0.75) == np.inf
    # Nothing in common, whatever is asked for.
    nothing = np.array([3.0, 2.0], np.float32), np.array([2, 4])
    assert _centroid_error(*nothing, FILLED, 0.0) == np.inf
    # All of it selected, but not the most likely ones.
    assert _centroid_error(*of(FILLED, 0), FILLED, least) == np.inf
    wrong = np.array([3.0, 2.3, 0.5], np.float32), np.array([1, 3, 0])
    assert _centroid_error(*wrong, FILLED, least) == pytest.approx(0.1)


def test_which_candidates_exist() -> None:
    low = np.float32(-np.inf)
    logits = np.array([3.0, 1.0, low], np.float32)
    found = _existing(logits, np.array([4, 2, 9]), 5)
    assert found is not None
    assert found[0].tolist() == [3.0, 1.0] and found[1].tolist() == [4, 2]
    for ids in ([4, 2, 3], [4, 9, 8], [4, 4, 9]):  # no id behind -inf; a logit behind one; twice
        assert _existing(logits, np.array(ids), 5) is None
    assert _existing(logits[[1, 0, 2]], np.array([2, 4, 9]), 5) is None  # not in order
    assert _existing(np.full(2, low), np.array([8, 9]), 5) is None  # none at all
    assert _existing(np.array([np.nan, 1.0], np.float32), np.array([1, 2]), 5) is None
