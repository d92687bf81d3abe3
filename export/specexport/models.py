"""transformers' model of a source, for comparing with: in memory, or streamed where it is large."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from specexport import mtp_weights, streamed
from specexport.sources import Source
from specexport.weights import Weights

WHOLE = "whole model"
DEQUANTIZED = "whole model, its weights dequantized by the export"
STREAMED = "whole model, weights streamed module by module"


def load(source: Source, memory: int, dtype: Any) -> tuple[Any, str]:
    """transformers' model of ``source``, and how it is run: whole, or streamed where it takes more
    than ``memory`` bytes."""
    if source.weights.total_nbytes <= memory:
        scope = WHOLE if source.scheme is None else DEQUANTIZED
        return source.load_reference(dtype), scope
    return streamed.load(source), STREAMED


def load_mtp(source: Source, own: Weights, target: Any, memory: int, dtype: Any) -> tuple[Any, str]:
    """transformers' MtpModel around ``target``, its model of ``source``, likewise.

    ``own``: the weights of the layers, which decide whether they are streamed; dequantized ones
    always are.
    """
    if own.total_nbytes <= memory and source.scheme is None:
        return mtp_weights.load_reference(source, target, dtype), WHOLE
    return streamed.load_mtp(target, own), STREAMED


@contextlib.contextmanager
def last_hidden(model: Any) -> Iterator[list[Any]]:
    """Collects the hidden states behind the final norm, of each forward pass of ``model``."""
    seen: list[Any] = []
    handle = model.model.register_forward_hook(
        lambda module, args, output: seen.append(output.last_hidden_state)
    )
    try:
        yield seen
    finally:
        handle.remove()
