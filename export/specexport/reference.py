"""What transformers computes, kept for comparison: computed before anything is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport import streamed
from specexport.sources import Source

SEED = 20
DRAFT_STEPS = 4
WHOLE = "whole model"


@dataclass(frozen=True)
class Case:
    """Feed ``rows`` tokens when ``past_length`` are in the KV; a prefill (past 0) wants one row."""

    past_length: int
    rows: int

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions whose logits are compared."""
        end = self.past_length + self.rows
        return (end - 1,) if self.past_length == 0 else tuple(range(self.past_length, end))


@dataclass(frozen=True)
class DraftCase:
    """What the assistant drafts after ``past_length`` committed KV rows.

    ``fed`` int64 ``[steps]`` and ``hidden`` float32 ``[steps, hidden size]``: what each step was
    given; ``tokens`` int64 ``[steps]`` and ``logits`` float32 ``[steps, vocabulary]``: its result.
    """

    past_length: int
    fed: NDArray[np.int64] = field(repr=False)
    hidden: NDArray[np.float32] = field(repr=False)
    tokens: NDArray[np.int64] = field(repr=False)
    logits: NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True)
class Reference:
    """transformers' results on one random sequence.

    ``tokens`` int64 ``[n]``; ``logits`` position -> float32 ``[vocabulary]``; ``hidden`` float32
    ``[n, hidden size]``, after the final norm; ``scope`` says how the model was run. ``noise``:
    tensor -> how far transformers' own run in the export's precision is from its fp32 run.
    """

    tokens: NDArray[np.int64] = field(repr=False)
    cases: tuple[Case, ...]
    logits: dict[int, NDArray[np.float32]] = field(repr=False)
    hidden: NDArray[np.float32] = field(repr=False)
    drafts: tuple[DraftCase, ...]
    scope: str
    noise: dict[str, float] = field(default_factory=dict)


def plan_cases(config: Any, max_context: int, block: int) -> tuple[Case, ...]:
    """Several lengths, short ones, odd ones and one that crosses the sliding window.

    Every length is prefilled and then continued by 1 and by ``block`` rows.
    """
    window = getattr(config, "sliding_window", None)
    lengths = [1, 2, 7, 33]
    if window and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        lengths.append(int(window) + 9)
    fitting = sorted({n for n in lengths if n + block <= max_context}) or [1]
    return tuple(case for n in fitting for case in (Case(0, n), Case(n, 1), Case(n, block)))


def compute(
    target: Source,
    drafter: Source | None,
    *,
    max_context: int,
    block: int,
    memory: int,
    precision: str = "fp32",
) -> Reference:
    """Run transformers over one seeded random sequence in fp32.

    ``memory``: bytes that the models may take; larger ones run with their weights streamed module
    by module from the checkpoint. With ``precision="fp16"`` models that fit run in it too, so that
    the engine is measured by what transformers itself loses.
    """
    import torch

    cases = plan_cases(target.config, max_context, block)
    total = max(case.past_length + case.rows for case in cases)
    generator = np.random.default_rng(SEED)
    tokens = generator.integers(0, target.config.vocab_size, total, dtype=np.int64)
    seen = _run(target, drafter, tokens, cases, memory, torch.float32)
    if precision == "fp32" or seen.scope != WHOLE:
        return seen
    return replace(
        seen, noise=_noise(seen, _run(target, drafter, tokens, cases, memory, torch.float16))
    )


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Largest difference over the largest wanted value; infinite where anything is not finite."""
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
    error = float(difference / max(np.abs(want.astype(np.float64)).max(), 1e-30))
    return error if np.isfinite(error) else float("inf")


def _noise(exact: Reference, rounded: Reference) -> dict[str, float]:
    noise = {
        "logits": max(relative_error(rounded.logits[p], exact.logits[p]) for p in exact.logits),
        "hidden": relative_error(rounded.hidden, exact.hidden),
    }
    if exact.drafts:
        pairs = zip(rounded.drafts, exact.drafts, strict=True)
        noise["draft_logits"] = max(relative_error(a.logits[0], b.logits[0]) for a, b in pairs)
    return noise


def _run(
    target: Source,
    drafter: Source | None,
    tokens: NDArray[np.int64],
    cases: tuple[Case, ...],
    memory: int,
    dtype: Any,
) -> Reference:
    import torch

    positions = sorted({p for case in cases for p in case.positions})
    model, scope = _load(target, memory, dtype)
    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens)[None],
            use_cache=False,
            output_hidden_states=True,
            logits_to_keep=torch.tensor(positions),
            **({} if drafter is None else {"return_shared_kv_states": True}),
        )
        hidden = out.hidden_states[-1][0]
        logits = {p: out.logits[0, i].float().numpy() for i, p in enumerate(positions)}
        drafts: tuple[DraftCase, ...] = ()
        if drafter is not None:
            lengths = sorted({case.past_length for case in cases} - {0})
            assistant, draft_scope = _load(drafter, memory, dtype)
            scope = scope if draft_scope == scope else f"{scope}; drafter: {draft_scope}"
            embedding = model.get_input_embeddings()
            drafts = _drafts(assistant, embedding, tokens, hidden, out.shared_kv_states, lengths)
    return Reference(tokens, cases, logits, hidden.float().numpy(), drafts, scope)


def _load(source: Source, memory: int, dtype: Any) -> tuple[Any, str]:
    needed = sum(
        source.weights.nbytes(name)
        for name in source.weights.names()
        if source.weights.canonical(name) == name
    )
    if needed <= memory:
        return source.load_reference(dtype), WHOLE
    return streamed.load(source), "whole model, weights streamed module by module"


def _drafts(
    assistant: Any,
    embedding: Any,
    tokens: NDArray[np.int64],
    hidden: Any,
    shared_kv: Any,
    lengths: Sequence[int],
) -> tuple[DraftCase, ...]:
    """The reference loop of SinglePositionMultiTokenCandidateGenerator on committed rows only."""
    import torch

    cases = []
    for past in lengths:
        token = torch.tensor([[tokens[past]]])
        state = hidden[None, past - 1 : past]
        kv = {kind: (k[:, :, :past], v[:, :, :past]) for kind, (k, v) in shared_kv.items()}
        fed, states, drafted, scores = [], [], [], []
        for _ in range(DRAFT_STEPS):
            fed.append(int(token))
            states.append(state[0, 0].float().numpy())
            out = assistant(
                inputs_embeds=torch.cat([embedding(token), state], dim=-1),
                position_ids=torch.tensor([[past]]),
                shared_kv_states=kv,
                attention_mask=None,
                use_cache=False,
            )
            token, state = out.logits.argmax(-1), out.last_hidden_state
            drafted.append(int(token))
            scores.append(out.logits[0, 0].float().numpy())
        cases.append(
            DraftCase(past, np.array(fed), np.stack(states), np.array(drafted), np.stack(scores))
        )
    return tuple(cases)
