"""transformers' model of a source, for comparing with: in memory, or streamed where it is large."""

from __future__ import annotations

from typing import Any

from specexport import streamed
from specexport.sources import Source

WHOLE = "whole model"
STREAMED = "whole model, weights streamed module by module"


def load(source: Source, memory: int, dtype: Any) -> tuple[Any, str]:
    """transformers' model of ``source``, and how it is run: whole, or streamed where it takes more
    than ``memory`` bytes."""
    needed = sum(
        source.weights.nbytes(name)
        for name in source.weights.names()
        if source.weights.canonical(name) == name
    )
    if needed <= memory:
        return source.load_reference(dtype), WHOLE
    return streamed.load(source), STREAMED
