"""Write a random checkpoint of a full-size shape, tensor by tensor, for memory and time figures.

    python scripts/make_checkpoint.py gemma4-e2b DIR
    python scripts/make_checkpoint.py deepseek-v3 DIR --layers 5

writes DIR/target and, where the shape has one, DIR/assistant: bf16 safetensors in shards, the
configuration, and a byte tokenizer. The values are random and small: nothing can be read from what
such a model says. ``--layers`` cuts the target, as the large shapes fit no usual disk; see
shapes.py for the shapes and for what could not be verified of them.

DeepSeek-V3 and GLM-4.5 are written as they were released: experts one by one, MTP layers as layers
behind the last one. Left out are the copies of embedding and head that those repeat per MTP layer,
which nobody reads, and the fp8 format with its scales.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from shapes import SHAPES, ShapeError, configs

SHARD_BYTES = 2 << 30
PIECE = 8 << 20  # values made at a time
HEADROOM = 64 << 20  # bytes left free beside what is written
ONE_BY_ONE = ("deepseek_v3", "glm4_moe")  # model types whose experts are released one by one
Tensors = dict[str, tuple[int, ...]]  # name in the checkpoint -> shape


class NoSpace(Exception):
    """The disk is too small for the checkpoint."""


def make(shape: str, folder: Path, *, layers: int | None = None, seed: int = 0) -> list[Path]:
    """Write the checkpoints of ``shape`` below ``folder``; returns their folders.

    ``layers``: as many layers of the target instead of all. Raises ShapeError, or NoSpace before
    anything is written.
    """
    target, drafter = configs(shape, layers)
    wanted = {"target": target} if drafter is None else {"target": target, "assistant": drafter}
    _check_space(folder, sum(_size(tensors(config)) for config in wanted.values()))
    return [
        _write(config, folder / name, seed + number)
        for number, (name, config) in enumerate(wanted.items())
    ]


def _check_space(folder: Path, needed: int) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed + HEADROOM:
        raise NoSpace(
            f"{folder}: {needed:,} bytes are needed, {free:,} are available on that disk;"
            " --layers writes fewer layers"
        )


def tensors(config: Any) -> Tensors:
    """Everything that a checkpoint of ``config`` holds, under the names of released ones."""
    from specexport.naming import expected_shapes, meta_model

    model = meta_model(_class(config), config)
    tied = config.get_text_config().tie_word_embeddings
    found: Tensors = {}
    for name, shape in expected_shapes(model).items():
        if not (name == "lm_head.weight" and tied):
            found |= _experts(name, shape) if config.model_type in ONE_BY_ONE else {name: shape}
    return found | _mtp_tensors(model)


def _mtp_tensors(model: Any) -> Tensors:
    from specexport.mtp_weights import expected_shapes, meta_model

    if not getattr(model.config, "num_mtp_layers", 0):
        return {}
    found: Tensors = {}
    for name, shape in expected_shapes(meta_model(model)).items():
        _, layer, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        place = int(layer) + int(model.config.num_hidden_layers)
        found |= _experts(f"model.layers.{place}.{rest}", shape)
    return found


def _experts(name: str, shape: tuple[int, ...]) -> Tensors:
    """Merged experts one by one; anything else as it is."""
    stem, _, last = name.rpartition(".experts.")
    if last == "gate_up_proj":
        count, rows, columns = shape
        halves: Tensors = dict.fromkeys(("gate_proj", "up_proj"), (rows // 2, columns))
    elif last == "down_proj":
        count, *one = shape
        halves = {"down_proj": tuple(one)}
    else:
        return {name: shape}
    return {
        f"{stem}.experts.{expert}.{half}.weight": size
        for expert in range(count)
        for half, size in halves.items()
    }


def _class(config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _write(config: Any, folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [_class(config).__name__]
    config.save_pretrained(folder)
    _write_shards(tensors(config), folder, np.random.default_rng(seed))
    _tokenizer().save_pretrained(folder)
    return folder


def _write_shards(shapes: Tensors, folder: Path, rng: np.random.Generator) -> None:
    shards: list[Tensors] = [{}]
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
    index = {"metadata": {"total_size": _size(shapes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_shard(shapes: Tensors, path: Path, rng: np.random.Generator) -> None:
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


def _size(shapes: Tensors) -> int:
    return sum(_bytes(name, shape) for name, shape in shapes.items())


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
    parser.add_argument("--layers", type=int, help="layers of the target (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        made = make(given.shape, given.folder, layers=given.layers, seed=given.seed)
    except (ShapeError, NoSpace) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    for path in made:
        print(path)


if __name__ == "__main__":
    main()
