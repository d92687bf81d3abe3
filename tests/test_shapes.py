"""The full-size shapes: as many parameters as published, cut and written they are checkpoints."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import make_checkpoint  # pyright: ignore[reportMissingImports]
import shapes  # pyright: ignore[reportMissingImports]

from specexport import mtp_weights, sources
from specgraphs import families
from specgraphs.assistant import plan_assistant
from specgraphs.split import plan_split

SLIDING, FULL = shapes.SLIDING, shapes.FULL
# Billions of parameters: of the target without MTP layers, of what drafts for it. The names say
# 26, 31, 671, 355, 106 and so on; E4B says 8 with its vision and audio towers, and its assistant
# was counted at 78.518 million by others.
PUBLISHED = {
    "gemma4-e2b": (4.63, 0.0777),
    "gemma4-e4b": (7.46, 0.078518),
    "gemma4-12b": (11.9, 0.423),
    "gemma4-26b-a4b": (25.2, 0.420),
    "gemma4-31b": (30.7, 0.470),
    "deepseek-v3": (671.0, 11.6),
    "glm-4.5": (353.0, 3.99),
    "glm-4.5-air": (106.9, 2.38),
    "llama-3.2-1b": (1.236, 0.0),
    "qwen3-0.6b": (0.596, 0.0),
    "qwen3-8b": (8.19, 0.0),
}


def billions(tensors: dict[str, tuple[int, ...]]) -> float:
    return sum(math.prod(shape) for shape in tensors.values()) / 1e9


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_as_many_parameters_as_published(name: str) -> None:
    target, drafter = shapes.configs(name)
    tensors = make_checkpoint.tensors(target)
    count = target.num_hidden_layers
    mtp = {n: shape for n, shape in tensors.items() if mtp_weights.is_mtp(n, count)}
    own = {n: shape for n, shape in tensors.items() if n not in mtp}
    drafting = mtp if drafter is None else make_checkpoint.tensors(drafter)
    assert billions(own) == pytest.approx(PUBLISHED[name][0], rel=0.003)
    assert billions(drafting) == pytest.approx(PUBLISHED[name][1], rel=0.006)
    if drafter is not None:
        plan_assistant(drafter, target)  # raises ValueError unless they are a pair


@pytest.mark.parametrize("name", shapes.SHAPES)
@pytest.mark.parametrize("layers", [2, 7, 11])
def test_fewer_layers_are_still_a_model_of_the_family(name: str, layers: int) -> None:
    """Every type of layer is there, the last one as in the whole model, and drafters still fit."""
    whole, drafter = shapes.configs(name)
    target, _ = shapes.configs(name, layers)
    types, all_types = families.layer_types(target), families.layer_types(whole)
    assert (target.num_hidden_layers, len(types)) == (layers, layers)
    assert (set(types), types[-1]) == (set(all_types), all_types[-1])
    plan_split(target, 1)
    if drafter is not None:
        plan_assistant(drafter, target)


def test_cut_keeps_shares() -> None:
    """E2B: 20 of 35 layers share KV, so 6 of 11; DeepSeek-V3 keeps a layer with experts."""
    e2b, _ = shapes.configs("gemma4-e2b", 11)
    assert e2b.num_kv_shared_layers == 6
    assert e2b.layer_types == [FULL, *([SLIDING] * 4 + [FULL]) * 2]
    assert shapes.configs("gemma4-e2b", 2)[0].num_kv_shared_layers == 0
    assert shapes.configs("deepseek-v3", 2)[0].first_k_dense_replace == 1
    assert shapes.configs("deepseek-v3", 8)[0].first_k_dense_replace == 3


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("gpt-5", None, "no such shape; there are gemma4-e2b, "),
        ("gemma4-31b", 1, "must be 2 to 60 for this shape, got 1"),
        ("qwen3-8b", 0, "must be 1 to 36 for this shape, got 0"),
        ("qwen3-8b", 37, "must be 1 to 36 for this shape, got 37"),
    ],
)
def test_shapes_that_cannot_be_had(name: str, layers: int | None, message: str) -> None:
    with pytest.raises(shapes.ShapeError, match=message):
        shapes.configs(name, layers)


SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 2,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}


@pytest.mark.parametrize("kind", ["glm", "deepseek"])
def test_written_as_released_and_read_back(kind: str, tmp_path: Path) -> None:
    """Experts one by one and MTP layers behind the last one are found by what reads checkpoints."""
    config: Any = transformers.Glm4MoeConfig(**SMALL)
    if kind == "deepseek":
        heads = {"num_key_value_heads": 4, "v_head_dim": 8, "n_group": 4, "topk_group": 2}
        fields = {name: value for name, value in SMALL.items() if name != "head_dim"}
        config = transformers.DeepseekV3Config(**fields | LATENT | heads)
    folder = make_checkpoint._write(config, tmp_path / "m", seed=0)
    source = sources.resolve(folder)
    source.weights.check_complete(source.expected_shapes())
    assert source.weights.shape("model.layers.1.mlp.experts.gate_up_proj") == (12, 32, 32)
    mtp = mtp_weights.read(source)
    assert mtp is not None
    assert {name.split(".")[1] for name in mtp.names()} == {"0", "1"}
    names = make_checkpoint.tensors(config)
    assert "model.layers.1.mlp.experts.11.up_proj.weight" in names
    assert "model.layers.3.shared_head.norm.weight" in names
    index = folder / "model.safetensors.index.json"
    size = sum(2 * math.prod(shape) for shape in names.values())
    assert f'"total_size": {size}' in index.read_text()


def test_no_space_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=123_456_789)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    needed = r"1,192,\d{3},\d{3} bytes are needed, 123,456,789 are available"
    with pytest.raises(make_checkpoint.NoSpace, match=needed):
        make_checkpoint.make("qwen3-0.6b", tmp_path / "deep" / "er")
    assert list(tmp_path.iterdir()) == []
