"""Every supported architecture, tiny and random, as a checkpoint folder.

Built by code from its own transformers config with a seed; the tokenizer is one byte per token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 384
WINDOW = 8
CONTEXT = 128
SLIDING, FULL = "sliding_attention", "full_attention"

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 258,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
GEMMA4: dict[str, Any] = {
    **BASE,
    "num_key_value_heads": 1,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": VOCAB,
}
MIXED = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL]


def _llama() -> Any:
    config = transformers.LlamaConfig(**BASE, num_hidden_layers=2, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def _qwen3() -> Any:
    config = transformers.Qwen3Config(**BASE, num_hidden_layers=2, tie_word_embeddings=False)
    return transformers.Qwen3ForCausalLM(config)


def _gemma3() -> Any:
    config = transformers.Gemma3TextConfig(
        **BASE,
        num_hidden_layers=3,
        sliding_window=WINDOW,
        layer_types=[SLIDING, SLIDING, FULL],
        query_pre_attn_scalar=16,
    )
    return transformers.Gemma3ForCausalLM(config)


def _gemma4_e2b() -> Any:
    """Per-layer embeddings, KV sharing, double-wide MLP in the sharing layers."""
    config = transformers.Gemma4TextConfig(
        **GEMMA4,
        num_hidden_layers=6,
        layer_types=MIXED,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    )
    return transformers.Gemma4ForCausalLM(config)


def _gemma4_dense() -> Any:
    """As the 31B: keys serve as values in full layers, other KV heads there, nothing shared."""
    config = transformers.Gemma4TextConfig(
        **GEMMA4 | {"num_key_value_heads": 2, "vocab_size_per_layer_input": 0},
        num_hidden_layers=3,
        layer_types=[SLIDING, SLIDING, FULL],
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    )
    return transformers.Gemma4ForCausalLM(config)


def _gemma4_moe() -> Any:
    """As the 26B-A4B: routed experts beside the dense MLP."""
    config = transformers.Gemma4TextConfig(
        **GEMMA4 | {"vocab_size_per_layer_input": 0},
        num_hidden_layers=3,
        layer_types=[SLIDING, SLIDING, FULL],
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=32,
    )
    return transformers.Gemma4ForCausalLM(config)


def _gemma4_unified() -> Any:
    """As the text part of the 12B."""
    fields = {k: v for k, v in GEMMA4.items() if k != "vocab_size_per_layer_input"}
    config = transformers.Gemma4UnifiedTextConfig(
        **fields, num_hidden_layers=3, layer_types=[SLIDING, SLIDING, FULL]
    )
    return transformers.Gemma4UnifiedForCausalLM(config)


def _assistant_fields() -> dict[str, Any]:
    return {
        **GEMMA4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "final_logit_softcapping": None,
    }


def _assistant(centroids: bool, **changes: Any) -> Any:
    """``changes``: what the target's KV asks for; an assistant has the KV heads of its target."""
    text = transformers.Gemma4TextConfig(
        **_assistant_fields() | {"vocab_size_per_layer_input": 0} | changes,
        hidden_size_per_layer_input=0,
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=BASE["hidden_size"],
        use_ordered_embeddings=centroids,
        num_centroids=24,
        centroid_intermediate_top_k=5,
    )
    return transformers.Gemma4AssistantForCausalLM(config)


def _unified_assistant() -> Any:
    fields = {k: v for k, v in _assistant_fields().items() if k != "vocab_size_per_layer_input"}
    text = transformers.Gemma4UnifiedTextConfig(**fields)
    config = transformers.Gemma4UnifiedAssistantConfig(
        text_config=text, backbone_hidden_size=BASE["hidden_size"]
    )
    return transformers.Gemma4UnifiedAssistantForCausalLM(config)


EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _deepseek(mtp_layers: int, **changes: Any) -> Any:
    """Latent attention with interleaved rotary pairs, expert groups, smaller value heads."""
    fields = {k: v for k, v in BASE.items() if k not in ("head_dim", "num_key_value_heads")}
    groups = {"n_group": 4, "topk_group": 2}
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "kv_lora_rank": 24}
    config = transformers.DeepseekV3Config(
        **{**fields, **EXPERTS, **groups, **heads, "q_lora_rank": 32, **changes},
        num_hidden_layers=3,
        num_key_value_heads=4,
        num_mtp_layers=mtp_layers,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _glm4_moe(mtp_layers: int, **changes: Any) -> Any:
    """As GLM-4.5: rotary on half of each head, norms on queries and keys."""
    config = transformers.Glm4MoeConfig(
        **BASE,
        **EXPERTS,
        num_hidden_layers=3,
        n_group=1,
        topk_group=1,
        use_qk_norm=True,
        attention_bias=True,
        num_mtp_layers=mtp_layers,
        **changes,
    )
    return transformers.Glm4MoeForCausalLM(config)


def _mellum() -> Any:
    """One MTP layer with a sliding window of its own; rotary frequencies per attention type."""
    config = transformers.MellumConfig(
        **BASE,
        num_hidden_layers=3,
        sliding_window=WINDOW,
        layer_types=[SLIDING, SLIDING, FULL],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_mtp_layers=1,
    )
    return transformers.MellumForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gemma4-e2b": _gemma4_e2b,
    "gemma4-dense": _gemma4_dense,
    "gemma4-moe": _gemma4_moe,
    "gemma4-unified": _gemma4_unified,
    "assistant-plain": lambda: _assistant(centroids=False),
    "assistant-centroid": lambda: _assistant(centroids=True),
    "assistant-dense": lambda: _assistant(
        centroids=False,
        num_key_value_heads=2,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "assistant-unified": _unified_assistant,
    "deepseek-mtp1": lambda: _deepseek(
        1, q_lora_rank=None, rope_interleave=False, rope_parameters=YARN
    ),
    "deepseek-mtp3": lambda: _deepseek(3),
    "glm4-moe-mtp1": lambda: _glm4_moe(1, tie_word_embeddings=True),
    "glm4-moe-mtp2": lambda: _glm4_moe(2),
    "mellum-mtp1": _mellum,
}

# Targets with MTP layers of their own in the checkpoint.
MTP_LAYERS = ("deepseek-mtp1", "deepseek-mtp3", "glm4-moe-mtp1", "glm4-moe-mtp2", "mellum-mtp1")

# Every target with the drafters that fit it; None is a target alone.
PAIRS: tuple[tuple[str, str | None], ...] = (
    ("llama", None),
    ("qwen3", None),
    ("gemma3", None),
    ("gemma4-e2b", "assistant-plain"),
    ("gemma4-e2b", "assistant-centroid"),
    ("gemma4-dense", "assistant-dense"),
    ("gemma4-moe", "assistant-centroid"),
    ("gemma4-unified", "assistant-unified"),
)


def build(name: str) -> Any:
    """The seeded random model ``name``: weights apart enough that argmax is clear."""
    model = seeded(MODELS[name], name, 0.06)
    model.tie_weights()
    return model.eval()


def seeded(make: Callable[[], Any], name: str, scale: float) -> Any:
    """``make()`` with random weights that depend on ``name`` only: matrices of ``scale``, norms
    around 1, and a centroid head's tokens in random order."""
    torch.manual_seed(sum(name.encode()))
    model = make()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn_like(parameter) * scale
        else:
            parameter.data = 1 + 0.2 * torch.randn_like(parameter)
    embedder = getattr(model, "masked_embedding", None)
    if embedder is not None:
        order = embedder.token_ordering.data
        order.copy_(torch.randperm(len(order)))
    return model


def save(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint ``name`` with its tokenizer to ``folder / name``."""
    path = folder / name
    model = build(name)
    model.to(dtype).save_pretrained(path)
    if name in MTP_LAYERS:
        add_mtp_layers(path, mtp_tensors(model))
    tokenizer().save_pretrained(path)
    return path


def mtp_tensors(model: Any, *, shared: bool = False) -> dict[str, torch.Tensor]:
    """The seeded MTP layers of ``model`` as released checkpoints name them; norms far from 1.

    ``shared``: with copies of the embedding and head, which some checkpoints repeat per layer.
    """
    from transformers.modeling_layers import MtpModel

    config = model.config
    layers = MtpModel(model, config.num_mtp_layers).layers
    tensors: dict[str, torch.Tensor] = {}
    random = torch.Generator().manual_seed(config.num_mtp_layers)
    for name, tensor in layers.state_dict().items():
        layer, _, rest = name.partition(".")
        if tensor.dim() > 1:
            value = torch.randn(tensor.shape, generator=random) * 0.06
        else:
            value = 0.4 + 2 * torch.rand(tensor.shape, generator=random)
        where = MELLUM if config.model_type == "mellum" else RELEASED
        place = int(layer) + (0 if where is MELLUM else config.num_hidden_layers)
        for part, piece in _experts(rest.removeprefix("mtp_block."), value):
            tensors[where.get(part, where[""] + part).format(place)] = piece
    if shared:
        for layer in range(config.num_hidden_layers, config.num_hidden_layers + len(layers)):
            prefix = f"model.layers.{layer}."
            tensors[prefix + "embed_tokens.weight"] = model.get_input_embeddings().weight.clone()
            tensors[prefix + "shared_head.head.weight"] = model.lm_head.weight.clone()
    return tensors


# Name in MtpLayer -> name in a checkpoint; "" is what the others get in front.
RELEASED = {"": "model.layers.{}.", "post_norm.weight": "model.layers.{}.shared_head.norm.weight"}
MELLUM = {
    "": "mtp.layers.{}.",
    "eh_proj.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "post_norm.weight": "mtp.norm.weight",
}


def _experts(name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Merged experts one by one, as checkpoints have them; anything else as it is."""
    if name == "mlp.experts.gate_up_proj":
        return [
            (f"mlp.experts.{expert}.{half}_proj.weight", piece.contiguous())
            for expert, both in enumerate(value)
            for half, piece in zip(("gate", "up"), both.chunk(2), strict=True)
        ]
    if name == "mlp.experts.down_proj":
        return [(f"mlp.experts.{i}.down_proj.weight", one.clone()) for i, one in enumerate(value)]
    return [(name, value)]


def add_mtp_layers(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add ``tensors`` to the one weight file of a saved checkpoint, in its dtype."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    stored = load_file(file)
    dtype = stored["model.embed_tokens.weight"].dtype
    stored |= {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(stored, file, metadata={"format": "pt"})


def tokenizer(size: int = VOCAB) -> Any:
    """Byte-level, no merges; ids 0 to 255 are bytes, then <pad>, <eos>, <bos>, then words that no
    text holds, up to ``size``: as it is, every id of the models is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<pad>", "<eos>", "<bos>")])
    backend.add_tokens([AddedToken(f"<{i}>", normalized=False) for i in range(259, size)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
