"""The full-size shapes of published models as transformers configurations, without any weights.

    configs("gemma4-26b-a4b")             the target's configuration and that of its drafter
    configs("gemma4-26b-a4b", layers=4)   the same with four layers of the target

Sources: the defaults and docstrings of transformers 5.24, the published config.json files as tests
of other projects quote them, and the parameter count in the model's name, which
tests/test_shapes.py compares with the count of the model that is built here.

Not verified against a published file: of the 12B's assistant everything but its kind, its hidden
sizes and its number of layers (the rest is as in the 26B-A4B's, with the 12B's KV heads); query
heads of the 26B-A4B's assistant, which change no KV; end ids, which change no size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
Fields = dict[str, Any]


class ShapeError(Exception):
    """A shape that cannot be had: an unknown name, or too few or too many layers."""


@dataclass(frozen=True)
class Shape:
    """A published model. ``config``, ``drafter_config``: names of configuration classes.

    ``fields``: of the target's text configuration; ``drafter``: of the drafter's text configuration
    and of what is around it. ``layer_types`` follow ``pattern`` as often as it fits.
    """

    config: str
    fields: Fields
    pattern: tuple[str, ...] = ()
    drafter_config: str | None = None
    drafter: Fields | None = None


GEMMA4: Fields = {
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 262144,
    "eos_token_id": [1, 106],
}
PER_LAYER: Fields = {
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
}
# The larger ones: no per-layer embeddings, no KV sharing, keys serve as values in full layers.
LARGE: Fields = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
EVERY_FIFTH = (SLIDING,) * 4 + (FULL,)
EVERY_SIXTH = (SLIDING,) * 5 + (FULL,)
GLM: Fields = {
    "vocab_size": 151552,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.5,
    },
    "eos_token_id": [151329, 151336, 151338],
    "num_mtp_layers": 1,
}


def _small_drafter(backbone: int, kv_heads: int) -> Fields:
    """E2B and E4B: 78 million parameters, a centroid head. ``backbone``: the target's width."""
    return {
        **GEMMA4,
        **PER_LAYER,
        "vocab_size_per_layer_input": 0,
        "hidden_size_per_layer_input": 0,
        "hidden_size": 256,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "final_logit_softcapping": None,
        "backbone_hidden_size": backbone,
        "use_ordered_embeddings": True,
    }


def _large_drafter(backbone: int, heads: int, kv_heads: int, global_kv_heads: int) -> Fields:
    """26B-A4B and 31B, and the 12B as far as it is known: a plain head."""
    return {
        **GEMMA4,
        **LARGE,
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": global_kv_heads,
        "attention_k_eq_v": True,
        "final_logit_softcapping": None,
        "backbone_hidden_size": backbone,
        "use_ordered_embeddings": False,
    }


def _without(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


SHAPES: dict[str, Shape] = {
    "gemma4-e2b": Shape(
        "Gemma4TextConfig",
        {
            **GEMMA4,
            **PER_LAYER,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
        },
        EVERY_FIFTH,
        "Gemma4AssistantConfig",
        _small_drafter(1536, 1),
    ),
    "gemma4-e4b": Shape(
        "Gemma4TextConfig",
        {
            **GEMMA4,
            **PER_LAYER,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
        },
        EVERY_SIXTH,
        "Gemma4AssistantConfig",
        _small_drafter(2560, 2),
    ),
    "gemma4-12b": Shape(
        "Gemma4UnifiedTextConfig",
        {
            **GEMMA4,
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        EVERY_SIXTH,
        "Gemma4UnifiedAssistantConfig",
        _without(_large_drafter(3840, 16, 8, 1), *LARGE),
    ),
    "gemma4-26b-a4b": Shape(
        "Gemma4TextConfig",
        {
            **GEMMA4,
            **LARGE,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        EVERY_SIXTH,
        "Gemma4AssistantConfig",
        _large_drafter(2816, 16, 8, 2),
    ),
    "gemma4-31b": Shape(
        "Gemma4TextConfig",
        {
            **GEMMA4,
            **LARGE,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
        },
        EVERY_SIXTH,
        "Gemma4AssistantConfig",
        _large_drafter(5376, 32, 16, 4),
    ),
    "deepseek-v3": Shape(
        "DeepseekV3Config",  # whose defaults are the published sizes
        {
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 163840,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "num_mtp_layers": 1,
        },
    ),
    "glm-4.5": Shape(
        "Glm4MoeConfig",
        {
            **GLM,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 92,
            "n_routed_experts": 160,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
    ),
    "glm-4.5-air": Shape(
        "Glm4MoeConfig",
        {
            **GLM,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
        },
    ),
    "llama-3.2-1b": Shape(
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
        },
    ),
    "qwen3-0.6b": Shape(
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "eos_token_id": 151645,
        },
    ),
    "qwen3-8b": Shape(
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "eos_token_id": 151645,
        },
    ),
}


def configs(name: str, layers: int | None = None) -> tuple[Any, Any | None]:
    """Configuration of the target called ``name`` and of its drafter, where it has one.

    ``layers``: as many layers of the target instead of all; a drafter keeps its own. Raises
    ShapeError.
    """
    if name not in SHAPES:
        raise ShapeError(f"{name}: no such shape; there are {', '.join(SHAPES)}")
    shape = SHAPES[name]
    fields = cut(shape, layers)
    drafter = None if shape.drafter is None else _drafter(shape.drafter_config, shape.drafter)
    return _class(shape.config)(**fields), drafter


def cut(shape: Shape, layers: int | None) -> Fields:
    """Fields of the target with ``layers`` layers, its last ones by type. Raises ShapeError.

    As many layers share KV as in the whole model, in proportion, and at least one of each type
    keeps its own; of the dense layers before those with experts at least one gives way.
    """
    fields = dict(shape.fields)
    most = int(fields["num_hidden_layers"])
    least = len(set(shape.pattern)) or 1
    count = most if layers is None else layers
    if not least <= count <= most:
        raise ShapeError(f"layers: must be {least} to {most} for this shape, got {count}")
    fields["num_hidden_layers"] = count
    if shape.pattern:
        types = (list(shape.pattern) * most)[:most][most - count :]
        fields["layer_types"] = types
        shared = round(count * int(fields.get("num_kv_shared_layers", 0)) / most)
        while set(types[: count - shared]) != set(types):
            shared -= 1
        fields["num_kv_shared_layers"] = shared
    if "first_k_dense_replace" in fields:
        fields["first_k_dense_replace"] = min(fields["first_k_dense_replace"], count - 1)
    return fields


def _drafter(config: str | None, fields: Fields) -> Any:
    assert config is not None, "a shape with fields of a drafter names its configuration"
    outer = {name: fields[name] for name in ("backbone_hidden_size", "use_ordered_embeddings")}
    text = _class(config.replace("Assistant", "Text"))(
        **_without(fields, *outer),
        num_hidden_layers=4,
        num_kv_shared_layers=4,
        layer_types=[SLIDING] * 3 + [FULL],
    )
    return _class(config)(text_config=text, **outer)


def _class(name: str) -> Callable[..., Any]:
    import transformers

    found: Callable[..., Any] = getattr(transformers, name)
    return found
