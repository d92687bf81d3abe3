"""The tensors of a model, and how many bytes a format makes of each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specexport.engines import INLINE_BELOW
from specgraphs.formats import LinearFormat

if TYPE_CHECKING:
    import torch

Kind = Literal["linear", "table", "other"]
Key = tuple[str, str, str]  # origin, name in the checkpoint, how it is stored
EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model: ``name`` in its state dict, ``stored_as`` that of the one it is tied to.

    ``item_bytes``: of an element, None for floats, which are stored as the export says.
    """

    name: str
    stored_as: str
    kind: Kind
    shape: tuple[int, ...]
    item_bytes: int | None


@dataclass(frozen=True)
class Stored:
    """Bytes that the data file holds once. ``columns``: elements of a row; ``table``: rows are
    looked up in it, never all read."""

    key: Key
    nbytes: int
    elements: int
    columns: int
    table: bool = False


def tensors(model: Any) -> Iterator[Tensor]:
    """Parameters and persistent buffers of a meta model, by what the graphs do to them."""
    import torch

    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    matrices: dict[str, Kind] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            matrices[f"{path}.weight"] = "linear"
        elif isinstance(module, torch.nn.Embedding):
            matrices[f"{path}.weight"] = "table"
    value: torch.Tensor
    for name, value in model.state_dict(keep_vars=True).items():
        size = None if value.is_floating_point() else value.element_size()
        kind = "linear" if EXPERTS.search(name) else matrices.get(name, "other")
        yield Tensor(name, tied.get(name, name), kind, tuple(value.shape), size)


def encoded_bytes(shape: tuple[int, ...], chosen: LinearFormat, item_bytes: int) -> tuple[int, str]:
    """Bytes of a tensor in a format, scales and zero points included, and how that is called."""
    count = math.prod(shape)
    if chosen.kind == "float":
        return count * item_bytes, "float"
    rows, columns = count // shape[-1], shape[-1]
    if chosen.kind == "rows":
        return count + 4 * rows, "rows"
    blocks = -(-columns // chosen.block_size)
    zeros = -(-blocks // 2) if chosen.bits == 4 else 0
    width = blocks * (chosen.block_size * chosen.bits // 8 + 4) + zeros
    return rows * width, f"int{chosen.bits} blocks of {chosen.block_size}"


def packed_heads(model: Any) -> Iterator[int]:
    """Sizes of the heads whose attention rotates queries and keys itself: no norms, no biases."""
    import torch

    for module in model.modules():
        projections = [getattr(module, f"{name}_proj", None) for name in "qkv"]
        plain = all(isinstance(p, torch.nn.Linear) and p.bias is None for p in projections)
        if plain and getattr(module, "q_norm", None) is None:
            yield int(module.head_dim)


def is_head(tensor: Tensor) -> bool:
    """Whether it is the matrix that gives the logits."""
    return tensor.name == "lm_head.weight"


def module_of(name: str) -> str:
    """Path of the module that a tensor belongs to."""
    return name.rpartition(".")[0]


def layer_of(name: str) -> int:
    """Number of the layer that a tensor belongs to, -1 for those outside of all layers."""
    found = LAYER.search(name)
    return -1 if found is None else int(found[1])


def as_is(key: Key) -> bool:
    """Whether it is stored in floats."""
    return key[2] == "float"


def inline(one: Stored) -> bool:
    """Whether it stands in the graph file: a small one that is stored as it is."""
    return as_is(one.key) and one.nbytes < INLINE_BELOW
