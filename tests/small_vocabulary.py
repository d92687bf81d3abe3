"""Pairs of eight tokens, tiny and random: texts so few that the law of all of them can be written.

A target of each kind that drafting needs, with its drafters, as checkpoints and as an engine
folder. Heads are scaled so that no token is certain and no two models agree: drafts are taken
sometimes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers

from specexport import exporter
from specexport.options import ExportOptions
from specexport.sources import resolve

SIZE = 8
LETTERS = tuple("abcdefgh")
# Another order, and words that the target writes as two tokens.
OTHER_WORDS = ("ab", *"hdbf", "de", *"acge", "hh")
PROMPT = [2, 0, 5, 2, 0, 1, 6, 2]  # n-grams that come again, for prompt lookup
CONTEXT = 64
NUM_DRAFT = 4
ENGINES = "engines"
# Standard deviation of the logits over the vocabulary.
SPREAD = 0.8

BASE: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA4: dict[str, Any] = {
    **BASE,
    "num_key_value_heads": 1,
    "global_head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "layer_types": [tiny_models.SLIDING, tiny_models.FULL],
    "num_hidden_layers": 2,
}
EXPERTS: dict[str, Any] = {
    **{k: v for k, v in BASE.items() if k != "tie_word_embeddings"},
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def _llama(layers: int, **changes: Any) -> Any:
    config = transformers.LlamaConfig(**BASE | changes, num_hidden_layers=layers)
    return transformers.LlamaForCausalLM(config)


def _deepseek(layers: int) -> Any:
    fields = {k: v for k, v in EXPERTS.items() if k != "head_dim"} | {"num_hidden_layers": layers}
    config = transformers.DeepseekV3Config(
        **fields,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_mtp_layers=1,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _glm4_moe() -> Any:
    config = transformers.Glm4MoeConfig(**EXPERTS, use_qk_norm=True, num_mtp_layers=2)
    return transformers.Glm4MoeForCausalLM(config)


def _gemma4() -> Any:
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**GEMMA4))


def _assistant(centroids: bool) -> Any:
    text = transformers.Gemma4TextConfig(
        **GEMMA4 | {"hidden_size": 16, "intermediate_size": 32}, num_kv_shared_layers=2
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=BASE["hidden_size"],
        use_ordered_embeddings=centroids,
        num_centroids=4,
        centroid_intermediate_top_k=3,
    )
    return transformers.Gemma4AssistantForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _llama(2),
    "llama-deep": lambda: _llama(4),
    "llama-draft": lambda: _llama(1, hidden_size=16, num_attention_heads=1, num_key_value_heads=1),
    "llama-other": lambda: _llama(1, vocab_size=len(OTHER_WORDS)),
    "llama-words": lambda: _llama(1, vocab_size=len(OTHER_WORDS)),
    "deepseek": lambda: _deepseek(2),
    "deepseek-dense": lambda: _deepseek(1),
    "glm4-moe": _glm4_moe,
    "gemma4": _gemma4,
    "assistant": lambda: _assistant(centroids=False),
    "assistant-centroid": lambda: _assistant(centroids=True),
}
WITH_MTP_LAYERS = ("deepseek", "deepseek-dense", "glm4-moe")
WITH_WORDS = ("llama-other", "llama-words")  # the second says them more often than not


@dataclass(frozen=True)
class Pair:
    """A target with whatever drafts for it, in one engine folder."""

    target: str
    drafters: tuple[str, ...] = ()
    early_exit: int | None = None


PAIRS: dict[str, Pair] = {
    "llama": Pair("llama", ("llama-draft", "llama-other")),
    "llama-words": Pair("llama", ("llama-words",)),
    "early-exit": Pair("llama-deep", early_exit=2),
    "deepseek": Pair("deepseek"),
    "glm4-moe": Pair("glm4-moe"),
    "gemma4": Pair("gemma4", ("assistant",)),
    "gemma4-centroid": Pair("gemma4", ("assistant-centroid",)),
}

# One folder per kind of target, for every method; in parts, so that one has early exit too.
FOLDERS: dict[str, Pair] = {
    "llama": Pair("llama", ("llama-draft", "llama-other"), early_exit=1),
    "mtp": Pair("deepseek-dense"),
    "gemma4": Pair("gemma4", ("assistant-centroid",)),
}
# Method -> the folder that has it.
METHODS: dict[str, str] = {
    "plain": "llama",
    "prompt-lookup": "llama",
    "draft": "llama",
    "universal": "llama",
    "early-exit": "llama",
    "mtp": "mtp",
    "mtp-drafter": "gemma4",
}


def build(name: str) -> Any:
    """The seeded random model ``name``, its logits spread."""
    model = tiny_models.seeded(MODELS[name], name, 0.2)
    if not name.startswith("assistant"):
        model.lm_head.weight.data *= SPREAD / _logits(model).std()
    if name == "llama-words":
        _prefer_words(model)
    return model.eval()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.eval()(torch.arange(SIZE)[None].repeat(1, 4)).logits
    return out


def _prefer_words(model: Any) -> None:
    """Words of two letters get a logit that is higher by 2 on average."""
    hidden = _hidden(model).mean(dim=(0, 1))
    words = [len(word) > 1 for word in OTHER_WORDS]
    model.lm_head.weight.data[words] += 2 * hidden / hidden.square().sum()


def _hidden(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.model(torch.arange(SIZE)[None].repeat(1, 4)).last_hidden_state
    return out


def save(name: str, folder: Path) -> Path:
    """Write the checkpoint ``name`` with its tokenizer to ``folder / name``."""
    path = folder / name
    model = build(name)
    model.save_pretrained(path)
    if name in WITH_MTP_LAYERS:
        tiny_models.add_mtp_layers(path, tiny_models.mtp_tensors(model))
    tokenizer(OTHER_WORDS if name in WITH_WORDS else LETTERS).save_pretrained(path)
    return path


def export(pair: Pair, folder: Path, **changes: Any) -> Path:
    """Save the checkpoints of ``pair`` under ``folder`` and export them to ``folder / engines``.

    ``changes``: options of the export.
    """
    sources = [resolve(save(name, folder)) for name in (pair.target, *pair.drafters)]
    chosen = {"num_draft": NUM_DRAFT, "early_exit": pair.early_exit} | changes
    options = ExportOptions(**chosen)
    exporter.export(sources[0], sources[1:], folder / ENGINES, options)
    return folder / ENGINES


def tokenizer(words: Sequence[str]) -> Any:
    """One letter is one token, and so are the longer ``words``; ids in their order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {word: id_ for id_, word in enumerate(words)}
    merges = [(word[0], word[1]) for word in words if len(word) > 1]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
