"""The target engine: a transformers causal LM on KV buffers, in the shape of the contract."""

from __future__ import annotations

from typing import Any

import torch

from specgraphs import families, latent, ops, passes, patches
from specgraphs.engine_graph import EngineGraph, Origin, bind
from specgraphs.families import KvPlan
from specgraphs.trace import (
    EXAMPLE_BATCH,
    EXAMPLE_ROWS,
    EXAMPLE_WANTED,
    FakeModel,
    Sizes,
    export,
    kv_inputs,
)
from specrun import contract
from specrun.contract import Part

WANTED_ROWS = "wanted_rows"  # traced input; becomes first_row .. rows - 1 in the finished graph


class _Target(torch.nn.Module):
    """forward() is what the engine computes; see specrun.contract for the formulas."""

    def __init__(self, model: Any, plan: KvPlan, cap: float | None) -> None:
        super().__init__()
        self.model = model
        self.plan = plan
        self.cap = cap

    def forward(
        self,
        tokens: torch.Tensor,
        past_length: torch.Tensor,
        wanted_rows: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        rows = tokens.shape[1]
        attend = KvAttention(self.plan, past, past_length, rows)
        decoder = self.model.model
        decoder._maybe_slice_kv_shared_inputs = keep_rows(wanted_rows)
        with patches.attending(attend):
            hidden = decoder(
                input_ids=tokens, position_ids=positions(past_length, rows), use_cache=False
            ).last_hidden_state
        # Layers that share KV were given the wanted rows only; other families return every row.
        wanted = hidden if self.plan.shares else hidden.index_select(1, wanted_rows)
        logits = families.head_logits(self.model, wanted, self.cap)
        return (logits, logits.argmax(-1), hidden, *attend.present())


class KvAttention:
    """Attention of one traced forward pass: owners append, sharers read what the owner wrote.

    A sharing layer takes the owner's *present* value, so it runs after the owner has written.
    """

    def __init__(
        self, plan: KvPlan, past: list[torch.Tensor], past_length: torch.Tensor, rows: Any
    ) -> None:
        self.plan = plan
        self.buffers = {
            kv.layer: (past[2 * i], past[2 * i + 1]) for i, kv in enumerate(plan.owners)
        }
        last_position = past_length + (rows - 1)
        total = past_length.max().reshape(1) + rows
        self.lengths = (last_position.to(torch.int32), total.to(torch.int32))

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        layer = module.layer_idx
        owner = self.plan.owner(layer)
        buffers = self.buffers[owner.layer]
        if not self.plan.owns(layer):
            return ops.attention_read(query, buffers, self.lengths, scale=scale, window=window)
        if latent.is_latent(module):
            out, *present = ops.latent_append(query, key, value, buffers, self.lengths, scale=scale)
        else:
            out, *present = ops.attention_append(
                query, key, value, buffers, self.lengths, scale=scale, window=window
            )
        self.buffers[layer] = (present[0], present[1])
        return out

    def present(self) -> tuple[torch.Tensor, ...]:
        return tuple(half for kv in self.plan.owners for half in self.buffers[kv.layer])


def positions(past_length: torch.Tensor, rows: Any) -> torch.Tensor:
    """Positions int64 ``[batch, rows]`` of the rows behind ``past_length`` ``[batch]``."""
    return past_length.to(torch.int64)[:, None] + torch.arange(rows)[None]


def keep_rows(wanted_rows: torch.Tensor) -> Any:
    """KV-shared layers need only the wanted rows: they write no KV (Gemma 4 E2B: 20 of 35)."""

    def keep(
        hidden: torch.Tensor,
        per_layer_inputs: torch.Tensor | None,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        masks: dict[str, None],
        *_: Any,
        **__: Any,
    ) -> tuple[Any, ...]:
        def pick(x: torch.Tensor) -> torch.Tensor:
            return x.index_select(1, wanted_rows)

        per_layer = None if per_layer_inputs is None else pick(per_layer_inputs)
        rope = {kind: (pick(cos), pick(sin)) for kind, (cos, sin) in position_embeddings.items()}
        return pick(hidden), per_layer, rope, masks

    return keep


def trace_target(
    fake: FakeModel, precision: str, *, max_context: int, origin: Origin = "target"
) -> EngineGraph:
    """Trace the target engine of ``fake``; KV dtype and activations in ``precision``.

    ``origin``: whose weights it has, as a draft model is such an engine too.
    """
    config = fake.model.config
    plan = families.kv_plan(config)
    sizes = Sizes.up_to(max_context)
    kv = kv_inputs(plan.owners, fake.mode, precision, batch=sizes.batch, max_context=max_context)
    with fake.mode:
        args = (
            torch.ones(EXAMPLE_BATCH, EXAMPLE_ROWS, dtype=torch.int64),
            torch.ones(EXAMPLE_BATCH, dtype=torch.int32),
            torch.arange(EXAMPLE_WANTED),
            kv.examples,
        )
    model = export(
        _Target(fake.model, plan, families.softcap(config)),
        args,
        (
            {0: sizes.batch, 1: sizes.rows},
            {0: sizes.batch},
            {0: sizes.wanted},
            kv.shapes,
        ),
        mode=fake.mode,
        input_names=[contract.TOKENS, contract.PAST_LENGTH, WANTED_ROWS, *kv.names],
        output_names=[
            contract.LOGITS,
            contract.ARGMAX,
            contract.HIDDEN,
            *(contract.present(owner.layer, part) for owner in plan.owners for part in Part),
        ],
    )
    passes.WantedRowsFromFirstRow(WANTED_ROWS)(model)
    passes.simplify(model)
    return bind(model, (fake.traced_as("model.", origin),))
