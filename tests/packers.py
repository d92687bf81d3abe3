"""Tiny checkpoints that are quantized already, packed by code of their own.

The packers are written from the descriptions of the formats and share nothing with the code under
test; every layer is known by its integers, scales and zero points before it is packed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from specexport.sources import Source, resolve

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
HIDDEN, INNER, LAYERS = 128, 192, 2
ODD, EVEN = (1, 3, 5, 7), (0, 2, 4, 6)


@dataclass(frozen=True)
class Layer:
    """A weight ``[outputs, inputs]``: ``scales[:, groups] * (values - zeros[:, groups])``.

    values ``[outputs, inputs]``; scales (float16 values), zeros ``[outputs, number of groups]``;
    groups ``[inputs]``, the group of each column.
    """

    bits: int
    values: Ints
    scales: Floats
    zeros: Ints
    groups: Ints

    def floats(self) -> Floats:
        """The formula, one element after the other in float32."""
        out = np.empty(self.values.shape, np.float32)
        for column, group in enumerate(self.groups):
            whole = (self.values[:, column] - self.zeros[:, group]).astype(np.float32)
            out[:, column] = self.scales[:, group] * whole
        return out


@dataclass(frozen=True)
class Kind:
    """How the layers of a checkpoint are stored."""

    method: str
    bits: int
    size: int | None  # None: a whole row
    sym: bool = False
    act_order: bool = False
    v2: bool = False
    plain_zeros: bool = False  # compressed-tensors: zero points as int8, not packed

    @property
    def config(self) -> dict[str, Any]:
        size = -1 if self.size is None else self.size
        if self.method == "gptq":
            form = {"checkpoint_format": "gptq_v2"} if self.v2 else {}
            flags = {"sym": self.sym, "desc_act": self.act_order, **form}
            return {"quant_method": "gptq", "bits": self.bits, "group_size": size, **flags}
        if self.method == "awq":
            flags = {"version": "gemm", "zero_point": True}
            return {"quant_method": "awq", "bits": self.bits, "group_size": size, **flags}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.sym}
        weights |= {"strategy": "channel" if self.size is None else "group", "group_size": size}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }


STRAIGHT = {
    "gptq4": Kind("gptq", 4, 64),
    "gptq4-sym-v2": Kind("gptq", 4, 32, sym=True, v2=True),
    "gptq8-sym": Kind("gptq", 8, 32, sym=True),
    "awq": Kind("awq", 4, 64),
    "compressed4": Kind("compressed-tensors", 4, 128, sym=True),
    "compressed4-asym": Kind("compressed-tensors", 4, 32),
    "compressed8": Kind("compressed-tensors", 8, 64, sym=True),
}
FLOAT_WAY = {
    "act-order": Kind("gptq", 4, 64, act_order=True),
    "one scale for a whole row": Kind("gptq", 4, None),
    "8 bits with zero points other than 128": Kind("gptq", 8, 64),
    "groups of 48 columns": Kind("gptq", 4, 48),
}
OTHERS = {
    "awq-whole": Kind("awq", 4, None),
    "compressed-channel": Kind("compressed-tensors", 8, None, sym=True),
    "compressed4-int8-zeros": Kind("compressed-tensors", 4, 64, plain_zeros=True),
    "compressed4-act-order": Kind("compressed-tensors", 4, 64, act_order=True),
}
EVERY = STRAIGHT | FLOAT_WAY | OTHERS


def random_layer(rng: np.random.Generator, shape: tuple[int, int], kind: Kind) -> Layer:
    """Every integer and zero point that there is; values of about the size that layers have."""
    outputs, inputs = shape
    size = inputs if kind.size is None else kind.size
    count, top = -(-inputs // size), 1 << kind.bits
    values = rng.integers(0, top, shape)
    zeros = np.full((outputs, count), top // 2)
    if not kind.sym:  # near the middle, so that weights stay small, but for the two ends
        zeros = rng.integers(3 * top // 8, 5 * top // 8, (outputs, count))
        zeros[0, 0], zeros[1, 0] = 0, top - 1
    scales = (rng.uniform(0.5, 1.5, (outputs, count)) * 0.5 / top).astype(np.float16)
    groups = np.arange(inputs) // size
    if kind.act_order:
        groups = rng.permutation(groups)
    return Layer(kind.bits, values, scales.astype(np.float32), zeros, groups)


def words(values: Ints, bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Pack along the first axis, filled with zeros; ``order[i]``: which value of a word is at
    place i from the lowest bits."""
    per = 32 // bits
    out = np.zeros((-(-len(values) // per), *values.shape[1:]), np.uint32)
    for word in range(len(out)):
        for place, value in enumerate(order or range(per)):
            if word * per + value < len(values):
                out[word] |= values[word * per + value].astype(np.uint32) << np.uint32(bits * place)
    return out.view(np.int32)


def packed(name: str, layer: Layer, kind: Kind) -> dict[str, torch.Tensor]:
    """The tensors of one layer as ``kind`` stores them."""
    scales = torch.from_numpy(layer.scales).half()
    if kind.method == "gptq":
        stored = layer.zeros if kind.v2 else (layer.zeros - 1) % (1 << kind.bits)
        arrays = {
            "qweight": words(layer.values.T, kind.bits),
            "qzeros": words(stored, kind.bits).T,
            "g_idx": layer.groups.astype(np.int32),
        }
        parts = {"scales": scales.T, **tensors_of(arrays)}
    elif kind.method == "awq":
        order = (*EVEN, *ODD)
        arrays = {
            "qweight": words(layer.values, 4, order).T,
            "qzeros": words(layer.zeros, 4, order).T,
        }
        parts = {"scales": scales.T, **tensors_of(arrays)}
    else:
        arrays = {
            "weight_packed": words(layer.values.T, kind.bits).T,
            "weight_shape": np.array(layer.values.shape),
        }
        if kind.plain_zeros:
            arrays["weight_zero_point"] = (layer.zeros - (1 << (kind.bits - 1))).astype(np.int8)
        elif not kind.sym:
            arrays["weight_zero_point"] = words(layer.zeros, kind.bits)
        if kind.act_order:
            arrays["weight_g_idx"] = layer.groups.astype(np.int32)
        parts = {"weight_scale": scales, **tensors_of(arrays)}
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}


def tensors_of(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


@dataclass(frozen=True)
class Checkpoint:
    """A folder or GGUF file, its quantized layers by the name of their weight, and the model that
    they stand for."""

    path: Path
    layers: dict[str, Layer]
    model: Any

    @property
    def source(self) -> Source:
        return resolve(self.path)


def tiny_llama() -> Any:
    """Query, key and value layers of different heights; nothing is as wide as it is high."""
    fields = tiny_models.BASE | {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": 32}
    config = transformers.LlamaConfig(**fields, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    model: Any = tiny_models.seeded(lambda: transformers.LlamaForCausalLM(config), "pre", 0.06)
    model.tie_weights()
    return model.eval()


def linear_names(model: Any) -> list[str]:
    return [
        f"{name}.weight"
        for name, module in model.model.named_modules(prefix="model")
        if isinstance(module, torch.nn.Linear)
    ]


def write(folder: Path, kind: Kind) -> Checkpoint:
    """A tiny Llama whose layers are stored as ``kind``; embedding and norms stay floats."""
    model, rng = tiny_llama(), np.random.default_rng(3)
    model.save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    layers = {}
    for name in linear_names(model):
        shape = tuple(tensors.pop(name).shape)
        layers[name] = random_layer(rng, (shape[0], shape[1]), kind)
        tensors |= packed(name.removesuffix(".weight"), layers[name], kind)
        model.get_parameter(name).data = torch.from_numpy(layers[name].floats())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = kind.config
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(folder, layers, model)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TABLE = "model.embed_tokens.weight"


def gguf_name(name: str) -> str:
    fixed = {TABLE: "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    _, _, layer, *rest = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(rest)]}.weight"


def file_order(name: str, config: Any) -> Ints:
    """Row of the model for each row of the file: llama.cpp puts the two halves of a rotary pair
    next to each other in query and key heads."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads[name.split(".")[-2]]
    half = config.head_dim // 2
    return np.array(
        [
            head * 2 * half + part * half + pair
            for head in range(count)
            for pair in range(half)
            for part in range(2)
        ]
    )


def write_gguf(path: Path, type_name: str) -> Checkpoint:
    """The tiny Llama by gguf's own quantizer; ``layers`` from what that gives, table included."""
    import gguf
    from gguf.quants import quantize

    model = tiny_llama()
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    add_vocabulary(writer)
    kind, bits = gguf.GGMLQuantizationType[type_name], {"Q8_0": 8, "Q4_0": 4}[type_name]
    layers = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        raw = quantize(values, kind)
        layers[name] = of_gguf(raw, bits)
        parameter.data = torch.from_numpy(layers[name].floats())
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            raw = raw[file_order(name, config)]
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Checkpoint(path, layers, model)


def add_vocabulary(writer: Any) -> None:
    """The tokens of the tiny models, and one merge, as transformers wants some."""
    tokens = tiny_models.tokenizer().convert_ids_to_tokens(range(tiny_models.VOCAB))
    tokens[-1] = "th"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 3 + [4] * (tiny_models.VOCAB - 260) + [1])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(257)
    writer.add_bos_token_id(258)


def of_gguf(raw: NDArray[np.uint8], bits: int) -> Layer:
    """Byte by byte as ggml describes block_q8_0 and block_q4_0."""
    width = 2 + 32 * bits // 8
    rows, blocks = raw.shape[0], raw.shape[1] // width
    values = np.zeros((rows, blocks * 32), np.int64)
    scales = np.zeros((rows, blocks), np.float32)
    for block in range(blocks):
        part = raw[:, block * width : (block + 1) * width]
        scales[:, block] = np.frombuffer(part[:, :2].tobytes(), "<f2")
        for place, byte in enumerate(part[:, 2:].T.astype(np.int64)):
            if bits == 8:
                values[:, 32 * block + place] = np.where(byte < 128, byte, byte - 256) + 128
            else:
                values[:, 32 * block + place] = byte % 16
                values[:, 32 * block + 16 + place] = byte // 16
    zeros = np.full((rows, blocks), 1 << (bits - 1))
    return Layer(bits, values, scales, zeros, np.arange(blocks * 32) // 32)


def make(folder: Path, name: str) -> Checkpoint:
    """A checkpoint of a kind in EVERY or of a GGUF type."""
    if name in EVERY:
        return write(folder / "checkpoint", EVERY[name])
    return write_gguf(folder / "tiny.gguf", name)


# What is read.
