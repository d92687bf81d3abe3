"""Train `gemma4-tiny`: a miniature Gemma 4 target and its multi-token-prediction assistant.

    python scripts/train_tiny.py                        # every stage, under an hour on two cores
    python scripts/train_tiny.py --stage assistant      # one stage again, on what is there

Stages, each resumed where it stopped: `data` fetches and cleans the text, `tokenizer` learns the
vocabulary, `target` trains the language model, `assistant` lets the target write, then trains the
drafter on what the target wrote, `evaluate` measures both on the saved (rounded) weights.

How the assistant is trained is how transformers runs it. With n the index of the last token, the
target has read rows 0 … n-1 and row n-1 chose token n. The draft of step k = 0 … K-1 computes

    x_k = pre_projection([embed_target(token n+k), h_k]),   h_0 = target hidden row n-1
    y_k = layers(x_k), queries at position n, keys and values of target rows 0 … n-1
    h_{k+1} = post_projection(y_k),   draft token n+k+1 = argmax(head(y_k))

where sliding layers see the last window + 1 rows. All n of a row are trained at once: one query
per n, and a mask that shows it rows < n of the target's keys.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny_data
import torch
from tiny_data import BOS, EOS, PAD, TURN_END, VOCAB_SIZE
from torch import Tensor, nn
from torch.nn import functional

STAGES = ("data", "tokenizer", "target", "assistant", "evaluate")
ROOT = Path(__file__).resolve().parent.parent
WINDOW = 64
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
END_IDS = [EOS, TURN_END]
MAX_POSITIONS = 2048


@dataclass(frozen=True)
class Recipe:
    """Sizes of the training; the defaults made the committed pair."""

    seed: int = 20
    row_length: int = 512
    batch_rows: int = 8
    target_steps: int = 2000
    assistant_steps: int = 800
    distill_rows: int = 4608
    distill_row_length: int = 320
    draft_steps: int = 4
    compile: bool = True
    minutes: float = 55.0

    @property
    def target_seconds(self) -> float:
        return self.minutes * 60 * 0.55

    @property
    def assistant_seconds(self) -> float:
        return self.minutes * 60 * 0.25


# --- models -------------------------------------------------------------------------------------


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


# --- training loop ------------------------------------------------------------------------------


def optimizers(
    model: nn.Module, matrix_rate: float, other_rate: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, Adam for embeddings, head, norms and centroids."""
    tables = ("embed_tokens", "lm_head", "centroids")
    matrices, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and not any(table in name for table in tables)
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=matrix_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_factor(step: int, progress: float) -> float:
    """Linear warm-up over 60 steps, then full rate until 0.4 of the run, then linear to zero."""
    return min(1.0, (step + 1) / 60) * min(1.0, max(0.0, (1.0 - progress) / 0.6))


def batches(rows: Tensor, batch_rows: int, seed: int) -> Callable[[int], Tensor]:
    """Batch number `step` of an endless seeded reshuffling, so that a resumed run sees the same."""
    per_epoch = len(rows) // batch_rows

    def batch(step: int) -> Tensor:
        epoch, index = divmod(step, per_epoch)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch))
        return rows[order[index * batch_rows : (index + 1) * batch_rows]].long()

    return batch


def train(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    steps: int,
    seconds: float,
    checkpoint: Path,
    rates: tuple[float, float],
) -> None:
    """Run `steps` updates, fewer if `seconds` end first; the rate reaches zero in either case."""
    chosen = optimizers(model, *rates)
    base_rates = [group["lr"] for optimizer in chosen for group in optimizer.param_groups]
    step, spent = load_checkpoint(checkpoint, model, chosen)
    started, shown = time.monotonic() - spent, 0.0
    while (progress := max(step / steps, (time.monotonic() - started) / seconds)) < 1.0:
        for optimizer, rate in zip(chosen, base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_factor(step, progress)
        loss = loss_of(step)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        shown = loss.item() if shown == 0.0 else 0.95 * shown + 0.05 * loss.item()
        spent = time.monotonic() - started
        if step % 20 == 0:
            log(f"step {step}/{steps}  loss {shown:.3f}  {spent:.0f} s")
        if step % 200 == 0:
            save_checkpoint(checkpoint, model, chosen, step, spent)
    save_checkpoint(checkpoint, model, chosen, step, spent)


def save_checkpoint(
    path: Path, model: nn.Module, chosen: list[torch.optim.Optimizer], step: int, spent: float
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in chosen],
        "step": step,
        "spent": spent,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_checkpoint(
    path: Path, model: nn.Module, chosen: list[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Steps done and seconds spent, 0 and 0 without a checkpoint."""
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(chosen, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    log(f"resuming {path.name} at step {state['step']}")
    return state["step"], state["spent"]


def compiled(function: Callable[..., Any], enabled: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False) if enabled else function


def softcapped_logits(target: Any, hidden: Tensor) -> Tensor:
    cap = target.config.final_logit_softcapping
    logits: Tensor = torch.tanh(target.lm_head(hidden).float() / cap) * cap
    return logits


def save_rounded(model: Any, folder: Path) -> None:
    """Write bfloat16 weights and the configs that belong to them."""
    import copy

    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.save_pretrained(folder)


# --- target -------------------------------------------------------------------------------------


def train_target(recipe: Recipe, work: Path, out: Path) -> None:
    rows = torch.from_numpy(np.load(work / "rows.npy"))
    model = new_target(recipe.seed)
    body = compiled(model.model, recipe.compile)
    batch_of = batches(rows, recipe.batch_rows, recipe.seed)

    def head_loss(hidden: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = softcapped_logits(model, hidden)
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    head = compiled(head_loss, recipe.compile)

    def loss_of(step: int) -> Tensor:
        ids = batch_of(step)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        loss: Tensor = head(hidden, ids)
        return loss

    log(f"target: {count_parameters(model)} parameters, {rows.numel()} tokens of text")
    rates = (0.004, 0.004)
    train(model, loss_of, recipe.target_steps, recipe.target_seconds, work / "target.pt", rates)
    model.generation_config.eos_token_id = END_IDS
    save_rounded(model, out / "target")


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def load_target(out: Path) -> Any:
    """The saved target, rounded weights, computing in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()


def load_assistant(out: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out / "assistant", dtype=torch.float32).eval()


# --- assistant ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lessons:
    """What the target wrote: rows of prompt and continuation, `PAD` behind, and the prompt's length."""

    ids: Tensor
    prompt_lengths: Tensor


def opening_prompts(
    tokenizer: Any, passages: list[Any], count: int, rng: random.Random
) -> list[list[int]]:
    """Chat prompts, and one in five a plain opening, short enough to leave room for a reply."""
    prompts: list[list[int]] = []
    while len(prompts) < count:
        passage = rng.choice(passages)
        if rng.random() < 0.2:
            words = passage.text.split(" ")
            start = rng.randrange(len(words))
            text = "<bos>" + " ".join(words[start : start + rng.randint(4, 40)])
        else:
            chat = tiny_data.chat_text(passage, rng)
            text = chat[: chat.index("<|turn>model\n")] + "<|turn>model\n"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) <= 128:
            prompts.append(ids)
    return prompts


def written_by_target(target: Any, prompts: list[list[int]], length: int, seed: int) -> Lessons:
    """Let the target continue each prompt, three in four greedily, the rest sampled."""
    torch.manual_seed(seed)
    prompts = sorted(prompts, key=len)
    groups = [prompts[start : start + 128] for start in range(0, len(prompts), 128)]
    rows = list[Tensor]()
    for index, group in enumerate(groups):
        widest = max(map(len, group))
        ids = torch.tensor([[PAD] * (widest - len(p)) + p for p in group])
        mask = torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in group])
        with torch.no_grad():
            written = target.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=min(224, length - widest),
                do_sample=index % 4 == 3,
                top_k=0,
                pad_token_id=PAD,
            )
        for prompt, row in zip(group, written, strict=True):
            kept = row[widest - len(prompt) :][:length]
            rows.append(functional.pad(kept, (0, length - len(kept)), value=PAD))
        if index % 8 == 0:
            log(f"target writes: {len(rows)}/{len(prompts)}")
    return Lessons(torch.stack(rows), torch.tensor([len(p) for p in prompts]))


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
    """y_0 … y_{steps-1} for every last-token index n = 1 … T - steps of the rows, as in the module's docs."""
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


def train_assistant(recipe: Recipe, work: Path, out: Path) -> None:
    target = load_target(out)
    lessons = load_lessons(recipe, work, target)
    assistant = new_assistant(recipe.seed, target)
    body = compiled(assistant.model, recipe.compile)
    reader = compiled(target.model, recipe.compile)
    numbers = batches(torch.arange(len(lessons.ids)), recipe.batch_rows, recipe.seed)

    def lesson(step: int) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Ids, what the target read in them, its logits, and which rows belong to the reply."""
        chosen = numbers(step)
        ids = lessons.ids[chosen].long()
        with torch.no_grad():
            read = reader(input_ids=ids, use_cache=False, return_shared_kv_states=True)
            teacher = softcapped_logits(target, read.last_hidden_state)
        place = torch.arange(ids.shape[1])[None]
        inside = (place >= lessons.prompt_lengths[chosen][:, None] - 1) & (ids != PAD)
        return ids, read, teacher, inside

    def loss_of(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            ids, read, teacher, inside = lesson(step)
            drafts = draft_hidden(body, assistant, target, ids, read, recipe.draft_steps)
            queries = ids.shape[1] - recipe.draft_steps
            losses = []
            for k, hidden in enumerate(drafts):
                rows = slice(1 + k, 1 + k + queries)
                keep = inside[:, rows]
                logits = assistant.lm_head(hidden[keep]).float()
                losses.append(teaching_loss(logits, teacher[:, rows][keep]))
        return torch.stack(losses).mean()

    log(f"assistant: {count_parameters(assistant)} parameters, {len(lessons.ids)} lessons")
    rates = (0.004, 0.003)
    seconds = recipe.assistant_seconds
    train(assistant, loss_of, recipe.assistant_steps, seconds, work / "assistant.pt", rates)
    train_centroids(assistant, target, body, lesson, recipe)
    assistant.generation_config.num_assistant_tokens = recipe.draft_steps
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    save_rounded(assistant, out / "assistant")


def teaching_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Half the target's distribution, half its greedy choice, which is what greedy drafts must hit."""
    soft = functional.cross_entropy(logits, teacher.softmax(-1))
    hard = functional.cross_entropy(logits, teacher.argmax(-1))
    return 0.5 * (soft + hard)


def load_lessons(recipe: Recipe, work: Path, target: Any) -> Lessons:
    path = work / "lessons.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        return Lessons(saved["ids"], saved["prompt_lengths"])
    passages = [p for p in tiny_data.load_passages(work / "passages.jsonl") if not p.held_out]
    rng = random.Random(recipe.seed + 1)
    prompts = opening_prompts(load_tokenizer(work), passages, recipe.distill_rows, rng)
    lessons = written_by_target(target, prompts, recipe.distill_row_length, recipe.seed)
    torch.save({"ids": lessons.ids, "prompt_lengths": lessons.prompt_lengths}, path)
    return lessons


# --- centroid head ------------------------------------------------------------------------------


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


def train_centroids(
    assistant: Any,
    target: Any,
    body: Callable[..., Any],
    lesson: Callable[[int], tuple[Tensor, Any, Tensor, Tensor]],
    recipe: Recipe,
    steps: int = 120,
) -> None:
    """Cluster the head's rows, then teach the centroids to find the cluster of the target's token."""
    head = assistant.masked_embedding
    order = balanced_clusters(assistant.lm_head.weight.detach(), head.num_centroids)
    head.token_ordering.copy_(order)
    cluster_of = torch.empty_like(order)
    cluster_of[order] = torch.arange(len(order)) // head.vocab_size_per_centroid
    members = functional.one_hot(cluster_of, head.num_centroids).float()
    optimizer = torch.optim.Adam(head.centroids.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / steps)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            ids, read, teacher, inside = lesson(step)
            queries = ids.shape[1] - recipe.draft_steps
            drafts = list(draft_hidden(body, assistant, target, ids, read, recipe.draft_steps))
            wanted = [teacher[:, 1 + k : 1 + k + queries] for k in range(len(drafts))]
            kept = [inside[:, 1 + k : 1 + k + queries] for k in range(len(drafts))]
            hidden = torch.cat([d[m] for d, m in zip(drafts, kept, strict=True)]).float()
            rows = torch.cat([t[m] for t, m in zip(wanted, kept, strict=True)])
            goal = 0.5 * (rows.float().softmax(-1) @ members) + 0.5 * members[rows.argmax(-1)]
        loss = functional.cross_entropy(head.centroids(hidden), goal)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    log(f"centroids: loss {loss.item():.3f}")


# --- evaluation ---------------------------------------------------------------------------------


def held_out_loss(target: Any, tokenizer: Any, passages: list[Any], row_length: int) -> float:
    """Nats per token over the passages never trained on, plain text."""
    texts = [tiny_data.plain_text(p) for p in passages if p.held_out]
    rows = torch.from_numpy(tiny_data.pack_rows(tokenizer, texts, row_length)).long()
    losses = []
    with torch.no_grad():
        for batch in rows.split(8):
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
    """Drafts accepted per round in transformers' own generate, and how many outputs equal plain ones."""
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


def evaluate(recipe: Recipe, work: Path, out: Path, prompts_file: Path) -> dict[str, Any]:
    """Measure the saved pair and print samples; returns the figures."""
    from transformers import AutoTokenizer

    target, assistant = load_target(out), load_assistant(out)
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    texts: list[str] = json.loads(prompts_file.read_text(encoding="utf-8"))
    prompts = [chat_ids(tokenizer, text) for text in texts]
    passages = tiny_data.load_passages(work / "passages.jsonl")
    figures: dict[str, Any] = {
        "held_out_loss": held_out_loss(target, load_tokenizer(work), passages, recipe.row_length)
    }
    for sparse in (True, False):
        assistant.config.use_ordered_embeddings = sparse
        counts = list[int]()
        lengths = list[int]()
        for text, prompt in zip(texts, prompts, strict=True):
            ids, accepted = speculate(target, assistant, prompt, 128, recipe.draft_steps)
            counts, lengths = counts + accepted, [*lengths, len(ids)]
            if sparse:
                mean = sum(accepted) / max(len(accepted), 1)
                print(
                    f"--- {text}\n{tokenizer.decode(ids)}\n    [{len(ids)} tokens, {mean:.2f} accepted]"
                )
        name = "centroid" if sparse else "plain"
        figures[f"accepted_per_round_{name}_head"] = sum(counts) / len(counts)
        figures["new_tokens"] = lengths
        reached = [
            sum(c >= i for c in counts) / len(counts) for i in range(1, recipe.draft_steps + 1)
        ]
        figures[f"reached_{name}_head"] = [round(share, 3) for share in reached]
    assistant.config.use_ordered_embeddings = True
    accepted_there, equal = reference_acceptance(target, assistant, prompts, 128)
    figures["accepted_per_round_transformers"] = accepted_there
    figures["equal_to_plain"] = f"{equal}/{len(prompts)}"
    raw = torch.tensor([tokenizer.encode("And it came to pass")])
    print(
        "--- raw text\n"
        + tokenizer.decode(target.generate(raw, max_new_tokens=100, do_sample=False)[0])
    )
    figures["bytes"] = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    print(json.dumps(figures))
    return figures


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


# --- stages -------------------------------------------------------------------------------------


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def load_tokenizer(work: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(work / "tokenizer.json"))


def prepare_data(work: Path) -> None:
    if (work / "passages.jsonl").exists():
        return
    versions = tiny_data.fetch_packages(work / "packages")
    passages = tiny_data.read_passages(work / "packages")
    tiny_data.save_passages(passages, work / "passages.jsonl")
    log(
        f"data: {versions}, {len(passages)} passages, {sum(len(p.text) for p in passages)} characters"
    )


def prepare_tokenizer(recipe: Recipe, work: Path, out: Path) -> None:
    """Learn the vocabulary, save it beside both models, and encode the training rows."""
    passages = [p for p in tiny_data.load_passages(work / "passages.jsonl") if not p.held_out]
    tokenizer = tiny_data.train_tokenizer([tiny_data.plain_text(p) for p in passages])
    tiny_data.check_round_trip(tokenizer)
    tokenizer.save(str(work / "tokenizer.json"))
    for name in ("target", "assistant"):
        (out / name).mkdir(parents=True, exist_ok=True)
        tiny_data.save_tokenizer(tokenizer, out / name, MAX_POSITIONS)
    texts = tiny_data.training_texts(passages, 2.0, random.Random(recipe.seed))
    rows = tiny_data.pack_rows(tokenizer, texts, recipe.row_length)
    np.save(work / "rows.npy", rows)
    log(f"tokenizer: {rows.size} ids for {sum(map(len, texts))} characters")


def parse_arguments() -> argparse.Namespace:
    defaults = Recipe()
    parser = argparse.ArgumentParser(
        description="Train the gemma4-tiny pair (target and assistant) from freely licensed text.",
        epilog="example: train_tiny.py --work build/tiny --out build/gemma4-tiny --minutes 10",
    )
    parser.add_argument(
        "--stage", choices=STAGES, action="append", help="run only this; repeatable"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "tiny", help="cache, checkpoints"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "export/specexport/bundled/gemma4-tiny")
    parser.add_argument("--prompts", type=Path, default=ROOT / "tests" / "data" / "prompts.json")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument(
        "--minutes", type=float, default=defaults.minutes, help="upper limit of training"
    )
    parser.add_argument("--target-steps", type=int, default=defaults.target_steps)
    parser.add_argument("--assistant-steps", type=int, default=defaults.assistant_steps)
    parser.add_argument("--distill-rows", type=int, default=defaults.distill_rows)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="slower, needs no C++ compiler")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(
        seed=arguments.seed,
        minutes=arguments.minutes,
        target_steps=arguments.target_steps,
        assistant_steps=arguments.assistant_steps,
        distill_rows=arguments.distill_rows,
        compile=not arguments.no_compile,
    )
    work, out = arguments.work, arguments.out
    work.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Callable[[], Any]] = {
        "data": lambda: prepare_data(work),
        "tokenizer": lambda: prepare_tokenizer(recipe, work, out),
        "target": lambda: train_target(recipe, work, out),
        "assistant": lambda: train_assistant(recipe, work, out),
        "evaluate": lambda: evaluate(recipe, work, out, arguments.prompts),
    }
    for stage in arguments.stage or STAGES:
        started = time.monotonic()
        runs[stage]()
        log(f"{stage}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
