"""Checkpoints in one GGUF file: configuration, names and tensors, read in pieces.

What the file stores differs from what the model has: names, the order of the rows of Llama's query
and key projections, norms with one added. transformers knows the differences per architecture, and
its own functions undo them here too, on pieces where they work on pieces.
"""

from __future__ import annotations

import contextlib
import copy
import io
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specexport.errors import SourceError, WeightsError
from specexport.gguf_header import Header, TensorEntry
from specexport.naming import expected_shapes, tied_aliases
from specexport.weights import Array, Shape, StoredTensor, Weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# general.architecture -> model_type. Others load in transformers with parts of their configuration
# left at defaults (Gemma 4: layer types, shared KV layers), which silently gives another model.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text"}


def load_config(path: Path, header: Header) -> Any:
    """The configuration of the text model, from the file's metadata.

    By transformers' own table of keys, so equal to ``AutoConfig.from_pretrained(gguf_file=...)``;
    that one unpacks the vocabulary too, which takes a quarter of a minute for 262144 tokens.
    Raises SourceError where the table leaves out something that changes the model.
    """
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    architecture = header.architecture
    _check_faithful(path, header)
    values: dict[str, Any] = {
        "tie_word_embeddings": all(entry.name != "output.weight" for entry in header.tensors)
    }
    for section in ("general", architecture, "tokenizer"):
        for key, name in GGUF_CONFIG_MAPPING[section].items():
            if name is not None and f"{section}.{key}" in header.metadata:
                values[name] = header.metadata[f"{section}.{key}"]
    values.pop("model_type")
    values.setdefault("vocab_size", header.metadata.get("tokenizer.ggml.tokens"))
    try:
        return AutoConfig.for_model(ARCHITECTURES[architecture], **values)
    except Exception as error:  # configurations check themselves and raise what they like
        raise SourceError(f"{path}: its metadata makes no configuration: {error}") from error


def _check_faithful(path: Path, header: Header) -> None:
    hint = "give the checkpoint as a folder with config.json and safetensors"
    architecture = header.architecture
    if architecture not in ARCHITECTURES:
        raise SourceError(
            f"{path}: GGUF architecture {architecture!r} is not supported",
            hint=f"supported in GGUF: {', '.join(ARCHITECTURES)}; {hint}",
        )
    scaling = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise SourceError(
            f"{path}: {architecture}.rope.scaling.type is {scaling!r}, which GGUF files are not"
            " read with",
            hint=hint,
        )


def map_weights(path: Path, header: Header, model: PreTrainedModel) -> Weights:
    """The tensors of the file under the names of ``model``'s state dict; none is read yet.

    Raises WeightsError for a tensor that the model has no place for: left out, the model would be
    another one (scaled rotary frequencies, biases, experts).
    """
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor_class = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
    processor = processor_class(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    expected = expected_shapes(model)
    tensors: dict[str, StoredTensor] = {}
    for entry in header.tensors:
        target = names.get(entry.name)
        if target not in expected:
            raise WeightsError(
                f"{path}: {type(model).__name__} has no place for the tensor {entry.name}",
                hint="give the checkpoint as a folder with config.json and safetensors",
            )
        if entry.shape != expected[target]:
            raise WeightsError(
                f"{path}: {entry.name} is {list(entry.shape)}, must be {list(expected[target])}",
                hint="give the checkpoint as a folder with config.json and safetensors",
            )
        tensors[target] = GgufTensor(path, entry, processor)
    return Weights(tensors, tied_aliases(model, tensors))


def load_model(
    path: Path, cls: type[PreTrainedModel], config: Any, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model as transformers loads it from the file, and its loading report.

    transformers unpacks the weights and still marks the model as quantized; the marks are removed,
    so that it can be cast and saved like any other.
    """
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that has no switch
        loaded: Any = cls.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=copy.deepcopy(config),
            dtype=dtype,
            output_loading_info=True,
        )
    model, info = loaded
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(mark, None)
    vars(model.config).pop("quantization_config", None)
    return model, info


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file, unpacked and brought into the order of the model on reading."""

    path: Path
    entry: TensorEntry
    processor: Any = field(repr=False)

    @property
    def shape(self) -> Shape:
        """Shape in the orientation of the state dict; rows as they are stored."""
        return self.entry.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """What ``rows`` returns: everything is unpacked to float32, as transformers does."""
        return np.dtype(np.float32)

    @property
    def stored(self) -> str:
        """Type in the file, for example ``Q4_K``."""
        from gguf.constants import GGMLQuantizationType

        return str(GGMLQuantizationType(self.entry.kind).name)

    def rows(self, start: int, stop: int) -> Array:
        """Rows ``start <= row < stop`` in the order of the model.

        Llama's query and key projections and vectors are unpacked whole for it: the first because
        undoing the file's order moves rows, the second because they have none. Both are small.
        """
        if len(self.shape) < 2 or _moves_rows(self.processor, self.entry.name):
            return self._unpacked(0, prod(self.shape[:1]))[start:stop].copy()
        return self._unpacked(start, stop)

    def _unpacked(self, start: int, stop: int) -> Array:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        stored_rows = self.shape[0] if len(self.shape) > 1 else 1
        rows = stop - start if len(self.shape) > 1 else 1
        row_bytes = self.entry.nbytes // stored_rows
        raw = np.fromfile(
            self.path,
            dtype=np.uint8,
            count=rows * row_bytes,
            offset=self.entry.offset + start * row_bytes,
        )
        values = dequantize(raw.reshape(rows, row_bytes), GGMLQuantizationType(self.entry.kind))
        values = values.reshape(stop - start, *self.shape[1:])
        undone = self.processor.process(weights=values, name=self.entry.name).weights
        return np.ascontiguousarray(undone, np.float32)


def _moves_rows(processor: Any, name: str) -> bool:
    """True where ``processor`` moves rows; elsewhere it works element by element."""
    from transformers import modeling_gguf_pytorch_utils as loader

    if type(processor) in (loader.TensorProcessor, loader.Gemma2TensorProcessor):
        return False
    return type(processor) is not loader.LlamaTensorProcessor or any(
        part in name for part in (".attn_q.", ".attn_k.")
    )
