"""The MTP layers of a target's own checkpoint: one engine per layer.

Reference: transformers 5.24, modeling_layers.py (MtpLayer, MtpModel), cache_utils.py (MtpCache) and
the MTPCandidateGenerator of generation/candidate_generator.py; DeepSeek-V3 (arXiv:2412.19437),
section 2.2. Row i of layer k belongs to the target's row i and stands k + 1 tokens ahead of it::

    x[i]      = eh_proj([enorm(embedding(token[i + 1 + k])), hnorm(h_(k-1)[i])])
    h_k[i]    = post_norm(block_k(x)[i])        at position i + 1 + k, over rows 0 .. i of layer k
    logits[i] = head(h_k[i])                    of token i + 2 + k

``h_-1`` is the target's hidden state after its final norm. Embedding and head are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from specgraphs import families, passes, patches
from specgraphs.engine_graph import EngineGraph, Module, Origin, bind
from specgraphs.families import KvPlan
from specgraphs.target import WANTED_ROWS, KvAttention
from specgraphs.trace import (
    EXAMPLE_BATCH,
    EXAMPLE_ROWS,
    EXAMPLE_WANTED,
    TORCH_DTYPES,
    FakeModel,
    Sizes,
    as_fake,
    export,
    kv_inputs,
)
from specrun import contract
from specrun.contract import KvLayer, Part

ORIGIN: Origin = "mtp"  # of the layers' own weights; those they share are the target's


@dataclass(frozen=True)
class MtpPlan:
    """What the MTP layers of a target are. ``kv``: of layer k the buffers that engine k owns.

    ``concat_order``: of the input of the projection.
    """

    kv: tuple[KvLayer, ...]
    concat_order: tuple[Literal["embedding", "hidden"], ...]


def plan_mtp(config: Any) -> MtpPlan:
    """The MTP layers that a target's text config announces.

    Raises ValueError for a kind of layer that does not export.
    """
    if config.model_type not in families.MTP_LAYERS:
        raise ValueError(f"MTP layers of a {config.model_type} do not export")
    layers = config.get_mtp_config()
    first = bool(getattr(layers, "mtp_hidden_states_first", False))
    return MtpPlan(
        kv=families.kv_plan(layers).owners,
        concat_order=("hidden", "embedding") if first else ("embedding", "hidden"),
    )


def build_mtp(target: FakeModel, precision: str) -> FakeModel:
    """The MTP layers of ``target`` on fake parameters; embedding, head and rotary are its own."""
    from accelerate import init_empty_weights
    from transformers.modeling_layers import MtpModel
    from transformers.modeling_utils import local_torch_dtype

    count = target.model.config.num_mtp_layers
    dtype = local_torch_dtype(TORCH_DTYPES[precision], MtpModel.__name__)
    with init_empty_weights(include_buffers=False), dtype:
        model = MtpModel(target.model, count).eval()
    return as_fake(model, target.mode)


class _Layer(torch.nn.Module):
    """forward() is what engine ``layer`` computes; see specrun.contract for the formulas."""

    def __init__(self, mtp: Any, plan: KvPlan, layer: int) -> None:
        super().__init__()
        self.mtp = mtp
        self.plan = plan
        self.layer = layer

    def forward(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        past_length: torch.Tensor,
        wanted_rows: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        rows = tokens.shape[1]
        attend = KvAttention(self.plan, past, past_length, rows)
        first = past_length.to(torch.int64)[:, None] + 1 + self.layer
        # No mask is built: attention takes lengths. MtpModel would ask the cache for its size.
        self.mtp.create_masks_for_mtp_layer = lambda *_: {"attention_mask": None}
        with patches.attending(attend):
            state = self.mtp.forward_layer(
                self.layer, hidden, first + torch.arange(rows)[None], None, input_ids=tokens
            )
        wanted = state.index_select(1, wanted_rows)
        logits = self.mtp._project_to_logits(wanted).to(torch.float32)
        return (logits, logits.argmax(-1), state, *attend.present())


def trace_mtp_layer(
    mtp: FakeModel, target: FakeModel, layer: int, precision: str, *, max_context: int
) -> EngineGraph:
    """Trace the engine of MTP layer ``layer``; KV dtype and activations in ``precision``."""
    config = mtp.model.config
    owner = families.kv_plan(config).owners[layer]
    sizes = Sizes.up_to(max_context)
    kv = kv_inputs((owner,), mtp.mode, precision, batch=sizes.batch, max_context=max_context)
    fed = (EXAMPLE_BATCH, EXAMPLE_ROWS)
    with mtp.mode:
        args = (
            torch.ones(fed, dtype=torch.int64),
            torch.zeros(*fed, config.hidden_size, dtype=TORCH_DTYPES[precision]),
            torch.ones(EXAMPLE_BATCH, dtype=torch.int32),
            torch.arange(EXAMPLE_WANTED),
            kv.examples,
        )
    model = export(
        _Layer(mtp.model, KvPlan((owner,), (layer,) * (layer + 1)), layer),
        args,
        (
            {0: sizes.batch, 1: sizes.rows},
            {0: sizes.batch, 1: sizes.rows},
            {0: sizes.batch},
            {0: sizes.wanted},
            kv.shapes,
        ),
        mode=mtp.mode,
        input_names=[
            contract.TOKENS,
            contract.HIDDEN,
            contract.PAST_LENGTH,
            WANTED_ROWS,
            *kv.names,
        ],
        output_names=[
            contract.LOGITS,
            contract.ARGMAX,
            contract.NEXT_HIDDEN,
            *(contract.present(layer, part) for part in Part),
        ],
    )
    passes.WantedRowsFromFirstRow(WANTED_ROWS)(model)
    passes.simplify(model)
    return bind(model, _modules(mtp, target))


def _modules(mtp: FakeModel, target: FakeModel) -> tuple[Module, ...]:
    """Whose tensors are under which name: the layers' own, then what they share."""
    own = frozenset(n for n in mtp.model.state_dict(keep_vars=True) if n.startswith("layers."))
    return (
        Module("mtp.layers.", ORIGIN, "layers.", mtp.buffers, own),
        target.traced_as("mtp.embed_tokens.", "target", "model.embed_tokens."),
        target.traced_as("mtp.shared_head.", "target", "lm_head."),
        target.traced_as("mtp.rotary_emb.", "target", "model.rotary_emb."),
    )
