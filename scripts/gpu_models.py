"""The tiny models of gpu_check.py: random, of eight tokens, in sizes that every precision takes.

One target of each kind that drafting needs, with its drafters. Matrices have whole blocks of 32
columns, attention has four heads of 16 values, which TensorRT has kernels for, and heads are scaled
so that no token is certain: drafts are taken sometimes, and a wrong row shows in the tokens.
Needs transformers, and the test's own ``tiny_models`` and ``small_vocabulary``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZE = 8
CONTEXT = 320  # more than KV buffers start with, and than a chunk of a prompt
NUM_DRAFT = 4
SPREAD = 1.5  # standard deviation of the logits over the vocabulary

BASE: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_mtp_layers": 1,
}
GEMMA4: dict[str, Any] = {
    **BASE,
    "num_key_value_heads": 1,
    "global_head_dim": 16,
    "sliding_window": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
}


@dataclass(frozen=True)
class Recipe:
    """An engine folder: a target with its drafters, and the methods that it then has."""

    target: str
    drafters: tuple[str, ...]
    methods: tuple[str, ...]
    early_exit: int | None = None


RECIPES: dict[str, Recipe] = {
    "llama": Recipe(
        "llama",
        ("draft", "other"),
        ("plain", "prompt-lookup", "draft", "universal", "early-exit"),
        early_exit=2,
    ),
    "mtp": Recipe("deepseek", (), ("plain", "prompt-lookup", "mtp")),
    "gemma4": Recipe("gemma4", ("assistant",), ("plain", "prompt-lookup", "mtp-drafter")),
}


def _llama(layers: int, **changes: Any) -> Any:
    import transformers

    config = transformers.LlamaConfig(**BASE | changes, num_hidden_layers=layers)
    return transformers.LlamaForCausalLM(config)


def _deepseek() -> Any:
    import transformers

    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**LATENT))


def _gemma4() -> Any:
    import transformers

    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**GEMMA4))


def _assistant() -> Any:
    import transformers

    text = transformers.Gemma4TextConfig(
        **GEMMA4 | {"final_logit_softcapping": None}, num_kv_shared_layers=2
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=BASE["hidden_size"],
        use_ordered_embeddings=True,
        num_centroids=4,
        centroid_intermediate_top_k=3,
    )
    return transformers.Gemma4AssistantForCausalLM(config)


@dataclass(frozen=True)
class Model:
    """How a model is made. ``scale``, ``seed``: of its matrices, such that its greedy texts go on
    changing, and half precision costs no more than it does in larger models. ``near``: a model
    that it says nearly the same as."""

    make: Callable[[], Any]
    scale: float
    seed: str
    near: str | None = None


MODELS: dict[str, Model] = {
    "llama": Model(lambda: _llama(4), 0.15, "llama"),
    "draft": Model(lambda: _llama(4), 0.02, "draft", near="llama"),
    "other": Model(lambda: _llama(1, vocab_size=12), 0.15, "other"),
    "deepseek": Model(_deepseek, 0.2, "deepseekb"),
    "gemma4": Model(_gemma4, 0.15, "gemma4b"),
    "assistant": Model(_assistant, 0.15, "assistant"),
}


def save(name: str, folder: Path) -> Path:
    """Write the checkpoint ``name`` with its tokenizer to ``folder / name``, in float32."""
    small_vocabulary, tiny_models = _of_tests()
    path = folder / name
    model = _build(name)
    model.save_pretrained(path)
    if name == "deepseek":
        tiny_models.add_mtp_layers(path, tiny_models.mtp_tensors(model))
    words = small_vocabulary.OTHER_WORDS if name == "other" else small_vocabulary.LETTERS
    small_vocabulary.tokenizer(words).save_pretrained(path)
    return path


def byte_tokenizer(size: int) -> Any:
    """A token per byte, and others up to ``size`` that no text holds."""
    return _of_tests()[1].tokenizer(size)


def _build(name: str) -> Any:
    import torch

    _, tiny_models = _of_tests()
    how = MODELS[name]
    model = tiny_models.seeded(how.make, how.seed, how.scale)
    if how.near is not None:
        for parameter, other in zip(model.parameters(), _build(how.near).parameters(), strict=True):
            parameter.data = other.data + (parameter.data if parameter.dim() > 1 else 0)
    elif name != "assistant":
        with torch.no_grad():
            said = model.eval()(torch.arange(SIZE)[None].repeat(1, 4)).logits
        model.lm_head.weight.data *= SPREAD / said.std()
    return model.eval()


def _of_tests() -> tuple[Any, Any]:
    """The test's own modules, which are found beside the scripts."""
    tests = str(Path(__file__).resolve().parents[1] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    import small_vocabulary
    import tiny_models

    return small_vocabulary, tiny_models
