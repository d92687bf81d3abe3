"""What the numbers in a configuration may be, before anything is made as large as they say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specexport.errors import SourceError
from specrun.reading import shown

MAX_LAYERS = 512  # the largest published model has 126
MAX_SIZE = 1 << 24
# Fields that say how large a model is, in any part of a configuration.
_LAYERS = re.compile(r"num_hidden_layers|num_layers|n_layers?|block_count|num_nextn_predict_layers")
_SIZES = re.compile(
    r"(num|n)_\w+|\w*(_size|_heads|_dim|_rank|_experts|_length|_count|_channels|_embeddings)"
)
_LONG = re.compile(r"\w*(position_embeddings|_length|_window|_tokens)")  # in tokens
NOT_SIZES = ("quantization_config",)  # whose own reader checks them; -1 is a whole row there
_MAX_LONG = (1 << 31) - 1


def check(where: Path, raw: Mapping[str, Any]) -> None:
    """Raise SourceError for a number of layers, a width or a count that no model has."""
    for name, value in _numbers(raw):
        most = _most(name)
        if most is not None and not 0 <= value <= most:
            raise SourceError(
                f"{where}: {name} must be in 0..{most}, got {shown(value)}",
                hint="the file must be as the model's authors published it",
            )


def _most(name: str) -> int | None:
    if _LAYERS.fullmatch(name):
        return MAX_LAYERS
    if _LONG.fullmatch(name):
        return _MAX_LONG
    return MAX_SIZE if _SIZES.fullmatch(name) else None


def _numbers(raw: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Every number by the name of its field, those inside of objects and lists too."""
    waiting: list[tuple[str, Any]] = list(raw.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += () if name in NOT_SIZES else value.items()
        elif isinstance(value, list):
            waiting += ((name, item) for item in value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value
