"""Runs that are prepared once and used again, and the arrays that they are made of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from specrun.contract import TensorSpec

MAX_PREPARED_RUNS = 64  # block widths kept ready per engine

R = TypeVar("R")


class RunCache(Generic[R]):
    """Prepared runs by block width, dropped together when the KV buffers move.

    It does not keep what makes them, which has the cache: buffers are freed at once, not when the
    garbage collector comes round. Runs of buffers that moved keep those until the next ``get``.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, R] = OrderedDict()
        self._version = -1

    def get(self, make: Callable[..., R], version: int, *key: int) -> R:
        """The run for ``key``, made by ``make(*key)`` when there is none for this ``version``."""
        if version != self._version:
            self._runs.clear()
            self._version = version
        run = self._runs.get(key)
        if run is not None:
            self._runs.move_to_end(key)
            return run
        run = self._runs[key] = make(*key)
        if len(self._runs) > MAX_PREPARED_RUNS:
            self._runs.popitem(last=False)  # the one that was not used for longest
        return run


def zeros(spec: TensorSpec, **sizes: int) -> NDArray[Any]:
    """An array for ``spec`` with its symbolic sizes as given."""
    shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape)
    return np.zeros(shape, dtype=spec.dtype.numpy)
