"""Write a random checkpoint of a full-size shape, tensor by tensor, for memory and time figures.

    python scripts/make_checkpoint.py gemma4-e2b DIR

writes DIR/target and, where the shape has one, DIR/assistant: bf16 safetensors in shards, the
configuration, and a byte tokenizer. The values are random and small: nothing can be read from what
such a model says.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHARD_BYTES = 2 << 30
PIECE = 8 << 20  # values made at a time
SLIDING, FULL = "sliding_attention", "full_attention"


def _e2b_text() -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        vocab_size=262144,
        vocab_size_per_layer_input=262144,
        hidden_size=1536,
        hidden_size_per_layer_input=256,
        intermediate_size=6144,
        num_hidden_layers=35,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        num_kv_shared_layers=20,
        layer_types=([SLIDING] * 4 + [FULL]) * 7,
        use_double_wide_mlp=True,
        final_logit_softcapping=30.0,
        max_position_embeddings=131072,
        eos_token_id=[1, 106],
    )


def _e2b_assistant() -> Any:
    from transformers import Gemma4AssistantConfig, Gemma4TextConfig

    text = Gemma4TextConfig(
        vocab_size=262144,
        vocab_size_per_layer_input=0,
        hidden_size=256,
        hidden_size_per_layer_input=0,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        num_kv_shared_layers=4,
        layer_types=[SLIDING] * 3 + [FULL],
    )
    return Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=1536, use_ordered_embeddings=True
    )


SHAPES: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
    "gemma4-e2b": (_e2b_text, _e2b_assistant),
}


def make(shape: str, folder: Path, *, seed: int = 0) -> list[Path]:
    """Write the checkpoints of ``shape`` below ``folder``; returns their folders."""
    target, assistant = SHAPES[shape]
    made = [_write(target(), folder / "target", seed)]
    if assistant is not None:
        made.append(_write(assistant(), folder / "assistant", seed + 1))
    return made


def _write(config: Any, folder: Path, seed: int) -> Path:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from specexport.naming import expected_shapes, meta_model

    model = meta_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    shapes = {
        name: shape
        for name, shape in expected_shapes(model).items()
        if not (name == "lm_head.weight" and config.get_text_config().tie_word_embeddings)
    }
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    _write_shards(shapes, folder, np.random.default_rng(seed))
    _tokenizer().save_pretrained(folder)
    return folder


def _write_shards(
    shapes: dict[str, tuple[int, ...]], folder: Path, rng: np.random.Generator
) -> None:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size and size + _bytes(name, shape) > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += _bytes(name, shape)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(shard, folder / file, rng)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(_bytes(name, shape) for name, shape in shapes.items())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_shard(shapes: dict[str, tuple[int, ...]], path: Path, rng: np.random.Generator) -> None:
    """The safetensors layout: 8 bytes of header length, the header, the tensors one by one."""
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _bytes(name, shape)
        dtype = "I64" if _is_order(name) else "BF16"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for piece in _values(name, shape, rng):
                file.write(piece.tobytes())


def _values(
    name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> Iterator[np.ndarray[Any, Any]]:
    """bf16 bits: matrices hold +-[1, 2) / 64, vectors 1; an ordering is a permutation.

    Query norms hold 1/16: Gemma 4 does not scale its attention, and with 1 it would be one-hot,
    which turns rounding into other results layer by layer.
    """
    count = math.prod(shape)
    if _is_order(name):
        yield rng.permutation(count).astype(np.int64)
        return
    for start in range(0, count, PIECE):
        size = min(PIECE, count - start)
        if len(shape) < 2:
            yield np.full(size, 0x3D80 if "q_norm" in name else 0x3F80, np.uint16)
            continue
        bits = rng.integers(0, 256, size, dtype=np.uint8).astype(np.uint16)
        yield ((bits & 0x80) << 8) | 0x3C80 | (bits & 0x7F)


def _is_order(name: str) -> bool:
    return name.endswith("token_ordering")


def _bytes(name: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * (8 if _is_order(name) else 2)


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for path in make(given.shape, given.folder, seed=given.seed):
        print(path)


if __name__ == "__main__":
    main()
