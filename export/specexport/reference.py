"""What transformers computes, kept for comparison: computed before anything is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.models import DEQUANTIZED, WHOLE, last_hidden, load
from specexport.numbers import relative_error
from specexport.parts.base import DrafterPart, TargetRun
from specexport.sources import Source
from specrun.manifest import DraftMethod

SEED = 20


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
class Reference:
    """transformers' results on one random sequence.

    ``tokens`` int64 ``[n]``; ``logits`` position -> float32 ``[vocabulary]``; ``hidden`` float32
    ``[n, hidden size]``, after the final norm; ``scope`` says how the model was run; ``drafts``:
    what each part saw. ``noise``: tensor -> how far transformers' own run in the export's
    precision is from its fp32 run. ``routed``: the model has routed experts. ``few``: see
    :func:`plan_cases`.
    """

    tokens: NDArray[np.int64] = field(repr=False)
    cases: tuple[Case, ...]
    logits: dict[int, NDArray[np.float32]] = field(repr=False)
    hidden: NDArray[np.float32] = field(repr=False)
    drafts: dict[DraftMethod, Any] = field(repr=False)
    scope: str
    noise: dict[str, float] = field(default_factory=dict)
    routed: bool = False
    few: bool = False


def plan_cases(config: Any, max_context: int, block: int, *, few: bool = False) -> tuple[Case, ...]:
    """Several lengths, short ones, odd ones and one that crosses the sliding window.

    Every length is prefilled and then continued by 1 and by ``block`` rows. ``few``: one length,
    for engines that take minutes for a run.
    """
    from specgraphs import families

    lengths = [33] if few else [1, 2, 7, 33]
    if not few and (window := families.sliding_window(config)) is not None:
        lengths.append(window + 9)
    fitting = sorted({n for n in lengths if n + block <= max_context}) or [1]
    return tuple(case for n in fitting for case in (Case(0, n), Case(n, 1), Case(n, block)))


def compute(
    target: Source,
    parts: Sequence[DrafterPart],
    *,
    max_context: int,
    block: int,
    memory: int,
    precision: str = "fp32",
    few: bool = False,
) -> Reference:
    """Run transformers over one seeded random sequence in fp32.

    ``memory``: bytes that the models may take; larger ones run with their weights streamed module
    by module from the checkpoint. ``few``: see :func:`plan_cases`. With ``precision="fp16"`` models
    that fit run in it too, so that the engine is measured by what transformers itself loses.
    """
    import torch

    cases = plan_cases(target.config, max_context, block, few=few)
    total = max(case.past_length + case.rows for case in cases)
    generator = np.random.default_rng(SEED)
    tokens = generator.integers(0, target.config.vocab_size, total, dtype=np.int64)
    seen = replace(_run(target, parts, tokens, cases, memory, torch.float32), few=few)
    if precision == "fp32" or seen.scope not in (WHOLE, DEQUANTIZED):
        return seen
    rounded = _run(target, parts, tokens, cases, memory, torch.float16)
    return replace(seen, noise=_noise(seen, rounded, parts))


def _noise(exact: Reference, rounded: Reference, parts: Sequence[DrafterPart]) -> dict[str, float]:
    noise = {
        "logits": max(relative_error(rounded.logits[p], exact.logits[p]) for p in exact.logits),
        "hidden": relative_error(rounded.hidden, exact.hidden),
    }
    for part in parts:
        noise |= part.noise(exact.drafts[part.method], rounded.drafts[part.method])
    return noise


def _run(
    target: Source,
    parts: Sequence[DrafterPart],
    tokens: NDArray[np.int64],
    cases: tuple[Case, ...],
    memory: int,
    dtype: Any,
) -> Reference:
    import torch

    positions = sorted({p for case in cases for p in case.positions})
    lengths = sorted({case.past_length for case in cases} - {0})
    asked: dict[str, Any] = {}
    for part in parts:
        asked |= part.forward_options
    model, scope = load(target, memory, dtype)
    with torch.no_grad(), last_hidden(model) as last:
        out = model(
            torch.from_numpy(tokens)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(positions),
            **asked,
        )
        if out.hidden_states is None:  # not asked for: those of all layers take room
            out.hidden_states = (last[0],)
        hidden = out.hidden_states[-1][0].float().numpy()
        logits = {p: out.logits[0, i].float().numpy() for i, p in enumerate(positions)}
        others: list[str] = []

        def note(method: DraftMethod, drafter_scope: str) -> None:
            if drafter_scope != scope:
                others.append(f"; {method}: {drafter_scope}")

        run = TargetRun(model, out, tokens, lengths, dtype, memory, note)
        drafts: dict[DraftMethod, Any] = {}
        for part in parts:
            drafts[part.method] = part.reference(run)
    routed = any(hasattr(module, "gate_up_proj") for module in model.modules())
    return Reference(tokens, cases, logits, hidden, drafts, scope + "".join(others), routed=routed)
