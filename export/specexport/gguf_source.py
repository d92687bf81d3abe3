"""Checkpoints in one GGUF file: configuration, names and tensors, read in pieces.

What the file stores differs from what the model has: names, the order of the rows of Llama's query
and key projections, norms with one added. transformers knows the differences per architecture, and
its own functions undo them here too, on pieces: where they move rows, they say in what order.
"""

from __future__ import annotations

import contextlib
import copy
import io
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specexport import config_sizes
from specexport.errors import SourceError, WeightsError
from specexport.gguf_header import Header, TensorEntry
from specexport.integers import BlockForm, BlockParts, Integers, as_blocks
from specexport.naming import expected_shapes, tied_aliases
from specexport.weights import Array, Shape, StoredTensor, Weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# general.architecture -> model_type. Others load in transformers with parts of their configuration
# left at defaults (Gemma 4: layer types, shared KV layers), which silently gives another model.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text"}
# Types whose blocks an engine has too, with their bits, and the columns of such a block.
_BITS = {"Q8_0": 8, "Q4_0": 4}
_BLOCK = 32


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
    values.pop("model_type", None)
    values.setdefault("vocab_size", header.metadata.get("tokenizer.ggml.tokens"))
    config_sizes.check(path, values)
    try:
        return AutoConfig.for_model(ARCHITECTURES[architecture], **values)
    except Exception as error:  # configurations check themselves and raise what they like
        raise SourceError(
            f"{path}: its metadata makes no configuration: {error}", hint="download the file again"
        ) from error


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
        """Rows ``start <= row < stop`` in the order of the model; a vector is unpacked whole."""
        if len(self.shape) < 2:
            return self._processed(self._unpacked(self._raw(0, 1)).reshape(self.shape))[start:stop]
        if start == stop:  # which the unpacking does not take
            return np.empty((0, *self.shape[1:]), np.float32)
        values = self._unpacked(self._raw(start, stop)).reshape(stop - start, *self.shape[1:])
        return values if self._order is not None else self._processed(values)

    def form(self) -> BlockForm | None:
        """Q8_0 and Q4_0, whose blocks an engine can have; None for every other type."""
        if len(self.shape) != 2 or self.stored not in _BITS or not self._keeps_values:
            return None
        return BlockForm(_BITS[self.stored], _BLOCK)

    def blocks(self, start: int, stop: int) -> BlockParts:
        """Rows ``start <= row < stop`` in the order of the model, bit for bit."""
        bits = _BITS[self.stored]
        return as_blocks(_integers(self._raw(start, stop), bits), bits, _BLOCK)

    @cached_property
    def _moved(self) -> NDArray[np.float64]:
        """What transformers makes of a matrix whose rows hold their own number."""
        numbers = np.arange(self.shape[0], dtype=np.float64)[:, None]
        moved = self.processor.process(weights=numbers, name=self.entry.name).weights
        return np.asarray(moved, np.float64).reshape(-1)

    @property
    def _keeps_values(self) -> bool:
        return np.array_equal(np.sort(self._moved), np.arange(self.shape[0]))

    @cached_property
    def _order(self) -> NDArray[np.int64] | None:
        """Row of the file for each row of the model, where transformers moves whole rows."""
        if not self._keeps_values or np.array_equal(self._moved, np.arange(self.shape[0])):
            return None
        return self._moved.astype(np.int64)

    def _raw(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes ``[stop - start, bytes of a row]`` of rows in the order of the model."""
        stored_rows = self.shape[0] if len(self.shape) > 1 else 1
        width = self.entry.nbytes // stored_rows
        if len(self.shape) > 1 and self._order is not None:
            shape = (stored_rows, width)
            whole = np.memmap(self.path, np.uint8, "r", self.entry.offset, shape)
            return np.asarray(whole[self._order[start:stop]])
        offset = self.entry.offset + start * width
        raw = np.fromfile(self.path, np.uint8, (stop - start) * width, offset=offset)
        return raw.reshape(stop - start, width)

    def _unpacked(self, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        values = dequantize(raw, GGMLQuantizationType(self.entry.kind))
        return np.ascontiguousarray(values, np.float32)

    def _processed(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        undone = self.processor.process(weights=values, name=self.entry.name).weights
        return np.ascontiguousarray(undone, np.float32)


def _integers(raw: NDArray[np.uint8], bits: int) -> Integers:
    """Rows of Q8_0 or Q4_0: per block of 32 columns an fp16 scale, then the integers.

    Q8_0 has them signed. Q4_0 has the first 16 in the low halves of its bytes and the others in
    the high halves, all of them 8 too high.
    """
    blocks = raw.reshape(len(raw), -1, 2 + _BLOCK * bits // 8)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0].astype(np.float32)
    packed = blocks[..., 2:]
    if bits == 8:
        values = packed ^ np.uint8(128)  # of a signed byte, 128 more
    else:
        values = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    return Integers(values.reshape(len(raw), -1), scales, zeros)
