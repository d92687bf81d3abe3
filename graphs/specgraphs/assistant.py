"""The MTP drafter engine: a Gemma 4 assistant, all its steps in one call.

Reference: transformers 5.24, models/gemma4_assistant/modeling_gemma4_assistant.py and the
SinglePositionMultiTokenCandidateGenerator of generation/candidate_generator.py. In formulas::

    x        = pre_projection([embedding_target(token), hidden])
    h        = decoder(x) at position past_length, attending to the target's KV rows
    logits   = head(h)                       over the vocabulary, or over the selected clusters
    token    = argmax(logits);  hidden = post_projection(h);  again, num_draft times
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from specgraphs import families, ops, passes, patches
from specgraphs.engine_graph import EngineGraph, bind
from specgraphs.loop import RepeatStep
from specgraphs.trace import EXAMPLE_BATCH, TORCH_DTYPES, FakeModel, export, kv_inputs
from specrun import contract
from specrun.contract import KvLayer

NEXT_TOKEN, NEXT_HIDDEN = "next_token", "next_hidden"


@dataclass(frozen=True)
class AssistantPlan:
    """How an assistant reads its target.

    ``kv_map``: attention type -> target layer. ``windows``: attention type -> KV rows it sees; the
    reference's mask allows a distance of ``sliding_window``, counted from the last KV row, so one
    row more than the target's own window.
    """

    kv: tuple[KvLayer, ...]
    kv_map: dict[str, int]
    windows: dict[str, int | None]
    head: Literal["plain", "centroid"]
    candidates: int
    hidden_size: int


def plan_assistant(assistant_config: Any, target_config: Any) -> AssistantPlan:
    """Match an assistant to its target. Raises ValueError where the two cannot be a pair."""
    text = assistant_config.get_text_config()
    width = assistant_config.backbone_hidden_size
    if width != target_config.hidden_size:
        raise ValueError(
            f"the assistant was trained for a target of hidden size {width},"
            f" this target has {target_config.hidden_size}"
        )
    if text.vocab_size != target_config.vocab_size:
        raise ValueError(
            f"the assistant has a vocabulary of {text.vocab_size},"
            f" this target of {target_config.vocab_size}"
        )
    owners = families.last_owners(target_config)
    kinds = list(dict.fromkeys(families.layer_types(text)))
    kv_map = {kind: _owner_layer(owners, kind) for kind in kinds}
    kv = {kv.layer: kv for kv in families.kv_plan(target_config).owners}
    for layer, kind in enumerate(families.layer_types(text)):
        _check_heads(text, layer, kv[kv_map[kind]])
    windows = {
        kind: int(text.sliding_window) + 1 if kind == families.SLIDING else None for kind in kinds
    }
    return AssistantPlan(
        kv=tuple(kv[layer] for layer in sorted(set(kv_map.values()))),
        kv_map=kv_map,
        windows=windows,
        head="centroid" if assistant_config.use_ordered_embeddings else "plain",
        candidates=_candidates(assistant_config),
        hidden_size=width,
    )


def _owner_layer(owners: dict[str, int], kind: str) -> int:
    if kind not in owners:
        raise ValueError(
            f"the assistant has {kind} layers and no layer of that kind owns KV in the target"
            f" (it has {sorted(owners)})"
        )
    return owners[kind]


def _check_heads(text: Any, layer: int, buffer: KvLayer) -> None:
    heads, head_size = families.kv_shape(text, layer)
    if (heads, head_size) != (buffer.heads, buffer.head_size):
        raise ValueError(
            f"assistant layer {layer} reads {heads} KV heads of {head_size}; the target's layer"
            f" {buffer.layer} has {buffer.heads} of {buffer.head_size}"
        )


def _candidates(config: Any) -> int:
    vocab = int(config.get_text_config().vocab_size)
    if not config.use_ordered_embeddings:
        return vocab
    return int(config.centroid_intermediate_top_k) * (vocab // int(config.num_centroids))


class _Step(torch.nn.Module):
    """One draft step; the loop around it is built on the graph."""

    def __init__(self, assistant: Any, embedding: Any, plan: AssistantPlan) -> None:
        super().__init__()
        self.assistant = assistant
        self.embedding = embedding
        self.plan = plan

    def forward(
        self,
        token: torch.Tensor,
        hidden: torch.Tensor,
        past_length: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        buffers = {kv.layer: (past[2 * i], past[2 * i + 1]) for i, kv in enumerate(self.plan.kv)}
        shared = {kind: buffers[layer] for kind, layer in self.plan.kv_map.items()}
        lengths = (past_length - 1, past_length.max().reshape(1))

        def attend(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *,
            scale: float,
            window: int | None,
        ) -> torch.Tensor:
            seen = self.plan.windows[module.layer_type]
            return ops.attention_read(query, (key, value), lengths, scale=scale, window=seen)

        x = torch.cat([self.embedding(token), hidden], dim=-1)
        with patches.attending(attend):
            h = self.assistant.model(
                inputs_embeds=self.assistant.pre_projection(x),
                attention_mask=dict.fromkeys(shared),
                position_ids=past_length.to(torch.int64)[:, None],
                shared_kv_states=shared,
                use_cache=False,
            ).last_hidden_state
        return (*self._head(h), self.assistant.post_projection(h))

    def _head(self, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Next token ``[batch, 1]``, logits and, for the centroid head, their token ids."""
        weight = self.assistant.lm_head.weight
        if self.plan.head == "plain":
            logits = self.assistant.lm_head(h).to(torch.float32)
            return logits.argmax(-1), logits
        embedder = self.assistant.masked_embedding
        clusters = embedder.centroids(h)[:, 0].topk(embedder.centroid_intermediate_top_k).indices
        order = embedder.token_ordering.view(
            embedder.num_centroids, embedder.vocab_size_per_centroid
        )
        ids = order[clusters].flatten(1)
        logits = (weight[ids] @ h.transpose(1, 2)).transpose(1, 2).to(torch.float32)
        best = logits.argmax(-1)
        return ids.gather(1, best), logits, ids[:, None]


def trace_assistant(
    assistant: FakeModel, target: FakeModel, precision: str, *, max_context: int
) -> EngineGraph:
    """Trace the drafter engine: its steps as one Loop whose trip count is an input.

    ``assistant`` and ``target`` share one fake mode. Raises ValueError where they are no pair.
    """
    plan = plan_assistant(assistant.model.config, target.model.config)
    batches = torch.export.Dim(contract.BATCH, min=1, max=4096)
    kv = kv_inputs(plan.kv, assistant.mode, precision, batch=batches, max_context=max_context)
    dtype = TORCH_DTYPES[precision]
    with assistant.mode:
        args = (
            torch.ones(EXAMPLE_BATCH, 1, dtype=torch.int64),
            torch.zeros(EXAMPLE_BATCH, 1, plan.hidden_size, dtype=dtype),
            torch.ones(EXAMPLE_BATCH, dtype=torch.int32),
            kv.examples,
        )
    sparse = [contract.DRAFT_CANDIDATES] if plan.head == "centroid" else []
    model = export(
        _Step(assistant.model, target.model.get_input_embeddings(), plan),
        args,
        ({0: batches}, {0: batches}, {0: batches}, kv.shapes),
        mode=assistant.mode,
        input_names=[contract.TOKEN, contract.HIDDEN, contract.PAST_LENGTH, *kv.names],
        output_names=[NEXT_TOKEN, contract.DRAFT_LOGITS, *sparse, NEXT_HIDDEN],
    )
    passes.simplify(model)
    RepeatStep(
        carried={contract.TOKEN: NEXT_TOKEN, contract.HIDDEN: NEXT_HIDDEN},
        trip_count=contract.NUM_DRAFT,
        stacked={
            contract.DRAFT_TOKENS: NEXT_TOKEN,
            contract.DRAFT_LOGITS: contract.DRAFT_LOGITS,
            **{name: name for name in sparse},
        },
    )(model)
    embedding = _attribute_path(target.model, target.model.get_input_embeddings())
    return bind(
        model,
        (
            assistant.traced_as("assistant.", "drafter"),
            target.traced_as("embedding.", "target", f"{embedding}."),
        ),
    )


def _attribute_path(model: Any, wanted: torch.nn.Module) -> str:
    paths = {id(module): str(path) for path, module in model.named_modules()}
    return paths[id(wanted)]
