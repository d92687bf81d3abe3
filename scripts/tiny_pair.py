"""The gemma4-tiny pair: shapes, saving and loading, the drafting equations, measurement.

How the assistant is trained is how transformers runs it. With n the index of the last token, the
target has read rows 0 … n-1 and row n-1 chose token n. The draft of step k = 0 … K-1 computes

    x_k = pre_projection([embed_target(token n+k), h_k]),   h_0 = target hidden row n-1
    y_k = layers(x_k), queries at position n, keys and values of target rows 0 … n-1
    h_{k+1} = post_projection(y_k),   draft token n+k+1 = argmax(head(y_k))

where sliding layers see the last window + 1 rows. `draft_hidden` computes all n of a row at once
for training, one query per n under a mask; `draft` is one n, through the assistant's own forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tiny_data
import torch
from tiny_data import BOS, EOS, PAD, TURN_END, VOCAB_SIZE
from torch import Tensor, nn
from torch.nn import functional

WINDOW = 64
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
END_IDS = [EOS, TURN_END]
MAX_POSITIONS = 2048


# --- models ---------------------------------------------------------------------------------------


def target_config() -> Any:
    """E2B in miniature: per-layer embeddings, KV sharing, two head sizes, softcap."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size=256,
        hidden_size_per_layer_input=16,
        intermediate_size=384,
        use_double_wide_mlp=True,
        num_hidden_layers=len(LAYER_TYPES),
        num_kv_shared_layers=3,
        layer_types=LAYER_TYPES,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=WINDOW,
        final_logit_softcapping=30.0,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END_IDS,
    )


def assistant_config() -> Any:
    """Four layers, half the target's width; head sizes are the target's, whose keys they read."""
    from transformers import Gemma4AssistantConfig, Gemma4TextConfig

    layer_types = ["sliding_attention"] * 3 + ["full_attention"]
    text = Gemma4TextConfig(
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=0,
        hidden_size=128,
        hidden_size_per_layer_input=0,
        intermediate_size=256,
        num_hidden_layers=len(layer_types),
        num_kv_shared_layers=len(layer_types),
        layer_types=layer_types,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=WINDOW,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END_IDS,
    )
    return Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=256,
        use_ordered_embeddings=True,
        num_centroids=64,
        centroid_intermediate_top_k=12,
    )


def soften_attention(model: nn.Module) -> None:
    """Gemma 4 scales scores by 1, so unit query norms start nearly one-hot: start at 1/sqrt(d)."""
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            nn.init.constant_(parameter, len(parameter) ** -0.5)


def new_target(seed: int) -> Any:
    from transformers import Gemma4ForCausalLM

    torch.manual_seed(seed)
    model = Gemma4ForCausalLM(target_config())
    soften_attention(model)
    return model


def new_assistant(seed: int, target: Any) -> Any:
    """A fresh assistant whose head starts as the best low-rank copy of the target's."""
    from transformers import Gemma4AssistantForCausalLM

    torch.manual_seed(seed)
    model = Gemma4AssistantForCausalLM(assistant_config())
    soften_attention(model)
    with torch.no_grad():
        u, s, _ = torch.linalg.svd(target.lm_head.weight.float(), full_matrices=False)
        width = model.lm_head.weight.shape[1]
        model.lm_head.weight.copy_(u[:, :width] * s[:width])
    return model


def softcapped_logits(target: Any, hidden: Tensor) -> Tensor:
    cap = target.config.final_logit_softcapping
    logits: Tensor = torch.tanh(target.lm_head(hidden).float() / cap) * cap
    return logits


def save_rounded(model: Any, folder: Path) -> None:
    """Write bfloat16 weights and their configs into `folder`."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written readable by its owner only


def load_target(out: Path) -> Any:
    """The saved target, rounded weights, computing in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()


def load_assistant(out: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out / "assistant", dtype=torch.float32).eval()


# --- drafting -------------------------------------------------------------------------------------


def draft_masks(queries: int, keys: int) -> dict[str, Tensor]:
    """Query of last-token index n = 1 … sees rows < n; sliding layers rows n-1-window … n-1."""
    last_token = torch.arange(1, queries + 1)[:, None]
    row = torch.arange(keys)[None, :]
    full = row < last_token
    sliding = full & (row >= last_token - 1 - WINDOW)
    return {"full_attention": full[None, None], "sliding_attention": sliding[None, None]}


def draft_hidden(
    body: Callable[..., Any], assistant: Any, target: Any, ids: Tensor, read: Any, steps: int
) -> Iterator[Tensor]:
    """y_0 … y_{steps-1} (module's docs) for every last-token index n = 1 … T - steps."""
    queries = ids.shape[1] - steps
    positions = torch.arange(1, queries + 1)[None]
    masks = draft_masks(queries, ids.shape[1])
    states = {kind: (key, value) for kind, (key, value) in read.shared_kv_states.items()}
    hidden = read.last_hidden_state[:, :queries]
    for k in range(steps):
        embedded = target.model.embed_tokens(ids[:, 1 + k : 1 + k + queries])
        projected = assistant.pre_projection(torch.cat([embedded, hidden], dim=-1))
        result = body(
            inputs_embeds=projected,
            attention_mask=masks,
            position_ids=positions,
            shared_kv_states=states,
            use_cache=False,
            # A tensor, since the model drops rows of all-shared layers for the default 0.
            logits_to_keep=positions,
        )
        yield result.last_hidden_state
        hidden = assistant.post_projection(result.last_hidden_state)


def balanced_clusters(vectors: Tensor, count: int, rounds: int = 12) -> Tensor:
    """Token order in which each consecutive `len / count` tokens form one cluster of like rows.

    Spherical k-means with full clusters closed: the tokens surest of their cluster choose first.
    """
    unit = functional.normalize(vectors, dim=-1)
    capacity = len(unit) // count
    generator = torch.Generator().manual_seed(0)
    centers = unit[torch.randperm(len(unit), generator=generator)[:count]]
    members: list[list[int]] = []
    for _ in range(rounds):
        scores = unit @ centers.T
        best = scores.topk(2, dim=-1).values
        wishes = scores.argsort(dim=-1, descending=True).tolist()
        members = [[] for _ in range(count)]
        for token in (best[:, 0] - best[:, 1]).argsort(descending=True).tolist():
            free = next(c for c in wishes[token] if len(members[c]) < capacity)
            members[free].append(token)
        centers = functional.normalize(torch.stack([unit[m].mean(0) for m in members]), dim=-1)
    return torch.tensor([token for cluster in members for token in sorted(cluster)])


# --- measurement ----------------------------------------------------------------------------------


def held_out_loss(target: Any, tokenizer: Any, passages: list[Any], row_length: int) -> float:
    """Nats per token over the passages never trained on, plain text."""
    texts = [tiny_data.plain_text(p) for p in passages if p.held_out]
    rows = torch.from_numpy(tiny_data.pack_rows(tokenizer, texts, row_length)).long()
    losses = []
    with torch.no_grad():
        for batch in torch.split(rows, 8):
            logits = target(input_ids=batch[:, :-1], use_cache=False).logits
            losses.append(functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
    return float(torch.stack(losses).mean())


@torch.no_grad()
def draft(assistant: Any, target: Any, ids: list[int], read: Any, k: int) -> list[int]:
    """K draft tokens after the last of `ids`, of which the target has read all but the last."""
    last, states = ids[-1], read.shared_kv_states
    committed = len(ids) - 1
    states = {kind: (k_[:, :, :committed], v[:, :, :committed]) for kind, (k_, v) in states.items()}
    hidden = read.hidden_states[-1][:, committed - 1 : committed]
    drafted: list[int] = []
    for _ in range(k):
        embedded = target.get_input_embeddings()(torch.tensor([[last]]))
        result = assistant(
            inputs_embeds=torch.cat([embedded, hidden], dim=-1),
            position_ids=torch.tensor([[committed]]),
            shared_kv_states=states,
        )
        last, hidden = int(result.logits.argmax()), result.last_hidden_state
        drafted.append(last)
    return drafted


@torch.no_grad()
def speculate(
    target: Any, assistant: Any, prompt: list[int], new: int, k: int
) -> tuple[list[int], list[int]]:
    """Greedy speculative decoding, the target re-reading everything; ids and accepted counts."""
    ids, accepted = list(prompt), list[int]()

    def read(tokens: list[int]) -> Any:
        return target(
            input_ids=torch.tensor([tokens]),
            use_cache=False,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )

    seen = read(ids)
    ids.append(int(seen.logits[0, -1].argmax()))
    while len(ids) - len(prompt) < new and not set(ids[len(prompt) :]) & set(END_IDS):
        drafted = draft(assistant, target, ids, seen, k)
        seen = read(ids + drafted)
        choices = seen.logits[0, len(ids) - 1 :].argmax(-1).tolist()
        count = next((i for i in range(k) if drafted[i] != choices[i]), k)
        accepted.append(count)
        ids += choices[: count + 1]
    return ids[len(prompt) : len(prompt) + new], accepted


def reference_acceptance(
    target: Any, assistant: Any, prompts: list[list[int]], new: int
) -> tuple[float, int]:
    """Drafts accepted per round by transformers' generate; how many outputs equal plain ones."""
    rounds, written, equal = 0, 0, 0
    calls: list[int] = []
    handle = target.register_forward_hook(lambda *_: calls.append(1))
    for prompt in prompts:
        ids = torch.tensor([prompt])
        plain = target.generate(ids, max_new_tokens=new, do_sample=False)
        calls.clear()
        assisted = target.generate(
            ids, max_new_tokens=new, do_sample=False, assistant_model=assistant
        )
        rounds += len(calls) - 1
        written += assisted.shape[1] - len(prompt) - 1
        equal += int(torch.equal(plain, assisted))
    handle.remove()
    return written / max(rounds, 1) - 1, equal


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])
