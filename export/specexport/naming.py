"""From the names in a checkpoint to the names of the text model's state dict.

Multimodal checkpoints keep their language model under a prefix; experts are often stored one by
one where the model has one tensor. transformers knows the second kind of difference per model and
its own rules are applied here; the first kind it knows only for the multimodal class, so it is
written down below.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specexport.errors import WeightsError
from specexport.weights import MergedExperts, Shape, StoredTensor, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Prefix in the checkpoint -> prefix in the text model; the first that fits is taken.
TEXT_PREFIXES = (
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
)
# The same for transformers' ``key_mapping``, which takes patterns.
KEY_MAPPING = {
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
}


def meta_model(cls: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """The model without memory for its weights: for names, shapes and rules."""
    import torch

    with torch.device("meta"):
        return cls(config)


def expected_shapes(model: PreTrainedModel) -> dict[str, Shape]:
    """Name -> shape of everything the model loads: parameters and persistent buffers."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def text_name(name: str) -> str:
    """The name without the prefix that a multimodal checkpoint puts before its language model."""
    for prefix, replacement in TEXT_PREFIXES:
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    return name


def map_weights(stored: Mapping[str, StoredTensor], model: PreTrainedModel) -> Weights:
    """Tensors as ``stored`` in a checkpoint, under the names of ``model``'s state dict.

    Tensors the model has no place for (vision and audio towers, keys and values of layers that
    share another layer's) are left out, as transformers leaves them out. Raises WeightsError for a
    conversion that is more than a rename or a merge of experts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    expected = expected_shapes(model)
    rules = get_model_conversion_mapping(model)
    tensors = collect(stored, expected, renamer(model, expected, rules))
    return Weights(tensors, tied_aliases(model, tensors))


def collect(
    stored: Mapping[str, StoredTensor], expected: Container[str], rename: Any
) -> dict[str, StoredTensor]:
    """``stored`` tensors whose new name is ``expected``, experts merged. Raises WeightsError."""
    tensors: dict[str, StoredTensor] = {}
    merges: dict[str, _Merge] = defaultdict(_Merge)
    for name, tensor in stored.items():
        target, converter, pattern = rename(text_name(name))
        if target not in expected:
            continue
        if converter is None:
            tensors[target] = tensor
        else:
            merges[target].add(converter, pattern, name, tensor)
    for target, merge in merges.items():
        tensors[target] = merge.result(target)
    return tensors


class _Merge:
    """Collects the per-expert tensors of one merged tensor."""

    def __init__(self) -> None:
        self.converter: Any = None
        self.parts: dict[str, list[tuple[tuple[Any, ...], StoredTensor]]] = defaultdict(list)

    def add(self, converter: Any, pattern: str, name: str, tensor: StoredTensor) -> None:
        self.converter = converter
        self.parts[pattern].append((_natural(name), tensor))

    def result(self, target: str) -> MergedExperts:
        operations = [type(op).__name__ for op in self.converter.operations]
        axes = [getattr(op, "dim", None) for op in self.converter.operations]
        if (operations, axes) not in (
            (["MergeModulelist"], [0]),
            (["MergeModulelist", "Concatenate"], [0, 1]),
        ):
            raise WeightsError(
                f"{target}: is stored in a form that is not read ({', '.join(operations)})",
                hint="load the checkpoint with transformers and save_pretrained() it to a folder",
            )
        # In the order of the converter's patterns (gate before up), experts by number.
        columns = [
            [tensor for _, tensor in sorted(self.parts[pattern], key=lambda part: part[0])]
            for pattern in self.converter.source_patterns
        ]
        if len({len(column) for column in columns}) != 1:
            counts = [len(column) for column in columns]
            raise WeightsError(f"{target}: experts are missing, found {counts} of each kind")
        try:
            return MergedExperts(tuple(zip(*columns, strict=True)))
        except ValueError as error:
            raise WeightsError(f"{target}: {error}") from error


def _natural(name: str) -> tuple[Any, ...]:
    """A sort key with numbers as numbers: experts.2 before experts.10."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def renamer(model: PreTrainedModel, expected: Iterable[str], rules: Iterable[Any]) -> Any:
    """name -> (name in the state dict, converter or None, the converter's pattern).

    ``rules``: transformers' own for ``model``, in their order.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    rules = list(rules)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    meta = dict.fromkeys(expected, True)

    def rename(name: str) -> tuple[str, Any, str]:
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, meta
        )
        pattern = pattern or ""
        return target, by_pattern.get(pattern), pattern

    return rename


def tied_aliases(model: PreTrainedModel, tensors: dict[str, StoredTensor]) -> dict[str, str]:
    """Tied names -> the name that has the bytes; drops a stored tied tensor equal to its twin.

    As transformers does it: of two tied tensors that are both stored and differ, both stay.
    """
    aliases: dict[str, str] = {}
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if target in tensors and source in tensors:
            if not _equal(tensors[target], tensors[source]):
                continue
            del tensors[target]
        elif target in tensors:
            target, source = source, target
        if source in tensors:
            aliases[target] = source
    return aliases


def _equal(one: StoredTensor, two: StoredTensor, max_rows: int = 4096) -> bool:
    if one.shape != two.shape:
        return False
    for start in range(0, one.shape[0], max_rows):
        stop = min(start + max_rows, one.shape[0])
        if not np.array_equal(one.rows(start, stop), two.rows(start, stop)):
            return False
    return True
