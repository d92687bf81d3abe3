"""Train `gemma4-tiny`: a miniature Gemma 4 target and its multi-token-prediction assistant.

    python scripts/train_tiny.py                        # every stage, under an hour on two cores
    python scripts/train_tiny.py --stage assistant      # one stage again, on what is there

Stages, each resumed where it stopped (delete its file under `--work` to redo it): `data` fetches
and cleans the text, `tokenizer` learns the vocabulary, `target` trains the language model,
`assistant` lets the target write, then trains the drafter on what the target wrote, `evaluate`
measures both on the saved (rounded) weights.

On cores shared with other work, set OMP_WAIT_POLICY=PASSIVE: threads that spin while they wait for
a descheduled one cost three quarters of the speed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny_data
import tiny_pair
import torch
from tiny_data import PAD
from tiny_pair import END_IDS, MAX_POSITIONS, balanced_clusters, draft_hidden, softcapped_logits
from torch import Tensor, nn
from torch.nn import functional

STAGES = ("data", "tokenizer", "target", "assistant", "evaluate")
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Recipe:
    """Sizes of the training; the defaults are the steps that the committed pair was given."""

    seed: int = 20
    row_length: int = 512
    batch_rows: int = 8
    target_steps: int = 1010
    assistant_steps: int = 257
    written_lessons: int = 768
    text_lessons: int = 3072
    lesson_length: int = 320
    draft_steps: int = 4
    compile: bool = True
    minutes: float = 55.0

    @property
    def target_seconds(self) -> float:
        return self.minutes * 60 * 0.55

    @property
    def assistant_seconds(self) -> float:
        return self.minutes * 60 * 0.25


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


# --- target -------------------------------------------------------------------------------------


def train_target(recipe: Recipe, work: Path, out: Path) -> None:
    rows = torch.from_numpy(np.load(work / "rows.npy"))
    model = tiny_pair.new_target(recipe.seed)
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
    tiny_pair.save_rounded(model, out / "target")


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- assistant ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lessons:
    """Rows for the assistant, `PAD` behind the text, and how many ids of each are prompt."""

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
    """Let the target continue each prompt, greedily, but every fourth batch sampled."""
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
                pad_token_id=PAD,
                **({"do_sample": True, "top_k": 0} if index % 4 == 3 else {"do_sample": False}),
            )
        for prompt, row in zip(group, written, strict=True):
            kept = row[widest - len(prompt) :][:length]
            rows.append(functional.pad(kept, (0, length - len(kept)), value=PAD))
        if index % 8 == 0:
            log(f"target writes: {len(rows)}/{len(prompts)}")
    return Lessons(torch.stack(rows), torch.tensor([len(p) for p in prompts]))


def train_assistant(recipe: Recipe, work: Path, out: Path) -> None:
    target = tiny_pair.load_target(out)
    lessons = load_lessons(recipe, work, target)
    assistant = tiny_pair.new_assistant(recipe.seed, target)
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
    train_centroids(assistant, target, lesson, recipe)
    assistant.generation_config.num_assistant_tokens = recipe.draft_steps
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    tiny_pair.save_rounded(assistant, out / "assistant")


def teaching_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Half the target's distribution, half its greedy choice, which greedy drafts must hit."""
    soft = functional.cross_entropy(logits, teacher.softmax(-1))
    hard = functional.cross_entropy(logits, teacher.argmax(-1))
    return 0.5 * (soft + hard)


def text_lessons(tokenizer: Any, texts: list[str], length: int) -> Lessons:
    """Plain texts and chats of the training set, which the target only reads; no prompt."""
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    rows = [torch.tensor(encoding.ids[:length]) for encoding in encoded]
    padded = [functional.pad(row, (0, length - len(row)), value=PAD) for row in rows]
    return Lessons(torch.stack(padded), torch.ones(len(rows), dtype=torch.long))


def load_lessons(recipe: Recipe, work: Path, target: Any) -> Lessons:
    """Rows that the target wrote, which is what drafts must hit, and rows of the training text."""
    path = work / "lessons.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        return Lessons(saved["ids"], saved["prompt_lengths"])
    tokenizer = load_tokenizer(work)
    passages = training_passages(work)
    rng = random.Random(recipe.seed + 1)
    prompts = opening_prompts(tokenizer, passages, recipe.written_lessons, rng)
    written = written_by_target(target, prompts, recipe.lesson_length, recipe.seed)
    texts = tiny_data.training_texts(passages, 1.0, rng)[: recipe.text_lessons]
    known = text_lessons(tokenizer, texts, recipe.lesson_length)
    ids = torch.cat([written.ids, known.ids])
    prompt_lengths = torch.cat([written.prompt_lengths, known.prompt_lengths])
    torch.save({"ids": ids, "prompt_lengths": prompt_lengths}, path)
    return Lessons(ids, prompt_lengths)


# --- centroid head ------------------------------------------------------------------------------


def train_centroids(
    assistant: Any,
    target: Any,
    lesson: Callable[[int], tuple[Tensor, Any, Tensor, Tensor]],
    recipe: Recipe,
    steps: int = 60,
) -> None:
    """Cluster the head's rows, then teach the centroids the cluster of the target's token."""
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
            drafts = list(
                draft_hidden(assistant.model, assistant, target, ids, read, recipe.draft_steps)
            )
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


# --- evaluation -----------------------------------------------------------------------------------


def evaluate(recipe: Recipe, work: Path, out: Path, prompts_file: Path) -> dict[str, Any]:
    """Measure the saved pair and print samples; returns the figures."""
    from transformers import AutoTokenizer

    target, assistant = tiny_pair.load_target(out), tiny_pair.load_assistant(out)
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    texts: list[str] = json.loads(prompts_file.read_text(encoding="utf-8"))
    prompts = [tiny_pair.chat_ids(tokenizer, text) for text in texts]
    passages = tiny_data.load_passages(work / "passages.jsonl")
    loss = tiny_pair.held_out_loss(target, load_tokenizer(work), passages, recipe.row_length)
    figures: dict[str, Any] = {"held_out_loss": round(loss, 3)}
    for name, sparse in (("plain", False), ("centroid", True)):
        assistant.config.use_ordered_embeddings = sparse
        runs = [
            tiny_pair.speculate(target, assistant, prompt, 128, recipe.draft_steps)
            for prompt in prompts
        ]
        figures[f"{name}_head"] = acceptance([accepted for _, accepted in runs], recipe.draft_steps)
    for text, (ids, accepted) in zip(texts, runs, strict=True):
        mean = sum(accepted) / max(len(accepted), 1)
        print(f"--- {text}\n{tokenizer.decode(ids)}\n[{len(ids)} tokens, {mean:.2f} a round]")
    figures["new_tokens"] = [len(ids) for ids, _ in runs]
    mean, equal = tiny_pair.reference_acceptance(target, assistant, prompts, 128)
    figures["transformers"] = {"mean": round(mean, 3), "equal_to_plain": f"{equal}/{len(prompts)}"}
    opening = torch.tensor([tokenizer.encode("And it came to pass")])
    written = target.generate(opening, max_new_tokens=100, do_sample=False)[0]
    print(f"--- plain text\n{tokenizer.decode(written)}")
    figures["bytes"] = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    print(json.dumps(figures))
    return figures


def acceptance(runs: list[list[int]], draft_steps: int) -> dict[str, Any]:
    """Mean accepted drafts a round over all rounds, and the share of rounds reaching each depth."""
    counts = [count for run in runs for count in run]
    depths = [sum(c >= depth for c in counts) / len(counts) for depth in range(1, draft_steps + 1)]
    mean = sum(counts) / len(counts)
    return {"mean": round(mean, 3), "depths": [round(share, 3) for share in depths]}


# --- stages -------------------------------------------------------------------------------------


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def load_tokenizer(work: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(work / "tokenizer.json"))


def training_passages(work: Path) -> list[tiny_data.Passage]:
    return [p for p in tiny_data.load_passages(work / "passages.jsonl") if not p.held_out]


def prepare_data(work: Path) -> None:
    if (work / "passages.jsonl").exists():
        return
    versions = tiny_data.fetch_packages(work / "packages")
    passages = tiny_data.read_passages(work / "packages")
    tiny_data.save_passages(passages, work / "passages.jsonl")
    characters = sum(len(p.text) for p in passages)
    log(f"data: {versions}, {len(passages)} passages, {characters} characters")


def prepare_tokenizer(recipe: Recipe, work: Path, out: Path) -> None:
    """Learn the vocabulary, save it beside both models, and encode the training rows."""
    passages = training_passages(work)
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
    parser.add_argument("--written-lessons", type=int, default=defaults.written_lessons)
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
        written_lessons=arguments.written_lessons,
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
