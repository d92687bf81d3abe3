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
}

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
    torch.manual_seed(sum(name.encode()))
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn_like(parameter) * 0.06
        else:
            parameter.data = 1 + 0.2 * torch.randn_like(parameter)
    embedder = getattr(model, "masked_embedding", None)
    if embedder is not None:
        embedder.token_ordering.data.copy_(torch.randperm(VOCAB))
    model.tie_weights()
    return model.eval()


def save(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint ``name`` with its tokenizer to ``folder / name``."""
    path = folder / name
    build(name).to(dtype).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def tokenizer() -> Any:
    """Byte-level, no merges; ids 0 to 255 are bytes, then <pad>, <eos>, <bos>, then words that no
    text holds, so that every id of the models is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<pad>", "<eos>", "<bos>")])
    backend.add_tokens([AddedToken(f"<{i}>", normalized=False) for i in range(259, VOCAB)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
