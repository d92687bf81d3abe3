"""What has to be known of a model family beside its own code: who owns KV, head, drafter layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specrun.contract import KvLayer

# Text models that export as a target, by the model_type of their text config.
TARGETS = (
    "llama",
    "qwen3",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "deepseek_v3",
    "glm4_moe",
    "mellum",
)
# Of these the ones whose own MTP layers export. transformers 5.24 runs MTP layers of five more:
# sarvam_mla and sarvam_moe, which have the classes of deepseek_v3 and glm4_moe and trace as they
# do, but for which it knows no MTP weights; bailing_hybrid (recurrent linear attention) and inkling
# (short convolutions, a learned position bias), whose state cannot be cut back to a length; and
# step3p7, of which there is no text-only class.
MTP_LAYERS = ("deepseek_v3", "glm4_moe", "mellum")
# Drafters that run on a target's KV buffers, by model_type.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")

SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class KvPlan:
    """Which layer owns KV buffers and from which owner every layer reads.

    ``owners``: one entry per owning layer, in layer order. ``source[i]``: the owner layer i reads.
    """

    owners: tuple[KvLayer, ...]
    source: tuple[int, ...]

    def __post_init__(self) -> None:
        owned = {kv.layer for kv in self.owners}
        if missing := sorted(set(self.source) - owned):
            raise ValueError(f"layers {missing} are read from and own no KV buffer")

    @property
    def shares(self) -> bool:
        """Whether some layer reads KV that another one owns."""
        return any(not self.owns(layer) for layer in range(len(self.source)))

    def owns(self, layer: int) -> bool:
        """Whether the layer writes keys and values of its own."""
        return self.source[layer] == layer

    def owner(self, layer: int) -> KvLayer:
        """The buffers that ``layer`` attends to."""
        return next(kv for kv in self.owners if kv.layer == self.source[layer])


def layer_types(config: Any) -> list[str]:
    """Attention type per layer; families without the field attend to everything everywhere."""
    types = getattr(config, "layer_types", None)
    return list(types) if types else [FULL] * int(config.num_hidden_layers)


def kv_plan(config: Any) -> KvPlan:
    """The KV plan of a text config of one of TARGETS."""
    types = layer_types(config)
    modes = list(getattr(config, "kv_sharing_modes", None) or [None] * len(types))
    source: list[int] = []
    for layer, (kind, mode) in enumerate(zip(types, modes, strict=True)):
        own = mode != "reuse"
        source.append(layer if own else _last_owner(types, modes, kind, layer))
    owners = tuple(
        KvLayer(layer, *kv_shape(config, layer), _window(config, types[layer]))
        for layer in range(len(types))
        if source[layer] == layer
    )
    return KvPlan(owners, tuple(source))


def last_owners(config: Any) -> dict[str, int]:
    """Attention type -> last layer of that type that owns KV: what an assistant reads."""
    plan, types = kv_plan(config), layer_types(config)
    return {types[kv.layer]: kv.layer for kv in plan.owners}


def softcap(config: Any) -> float | None:
    """``logits = cap * tanh(logits / cap)`` after the head, where the family has it."""
    cap = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def head_logits(model: Any, rows: Any, cap: float | None) -> Any:
    """Logits float32 of normed ``rows``: the head, and the softcap where there is one."""
    logits = model.lm_head(rows)
    if cap is not None:
        logits = (logits / cap).tanh() * cap
    return logits.float()


def _last_owner(types: Sequence[str], modes: Sequence[str | None], kind: str, before: int) -> int:
    for layer in range(before - 1, -1, -1):
        if types[layer] == kind and modes[layer] != "reuse":
            return layer
    raise ValueError(f"layer {before} shares KV and no earlier {kind} layer owns any")


def kv_shape(config: Any, layer: int) -> tuple[int, int]:
    """KV heads and head size of a layer."""
    if (rank := getattr(config, "kv_lora_rank", None)) is not None:
        return 1, (int(rank) + int(config.qk_rope_head_dim)) // 2  # see specgraphs.latent
    per_layer = getattr(config, "per_layer_config", None)
    resolved = per_layer[layer] if per_layer is not None else config
    heads = int(resolved.num_key_value_heads)
    head_size = getattr(resolved, "head_dim", None)
    return heads, int(head_size or config.hidden_size // config.num_attention_heads)


def sliding_window(config: Any) -> int | None:
    """Tokens that layers with a sliding window see, where the model has such layers."""
    return _window(config, SLIDING) if SLIDING in layer_types(config) else None


def _window(config: Any, kind: str) -> int | None:
    window = getattr(config, "sliding_window", None)
    return int(window) if kind == SLIDING and window else None
