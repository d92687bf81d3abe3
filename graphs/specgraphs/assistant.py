"""The MTP drafter engine: a Gemma 4 assistant, all its steps in one call.

Reference: transformers 5.24, models/gemma4_assistant/modeling_gemma4_assistant.py and the
SinglePositionMultiTokenCandidateGenerator of generation/candidate_generator.py. In formulas::

    x        = pre_projection([embedding_target(token), hidden])
    h        = decoder(x) at position past_length, attending to the target's KV rows
    logits   = head(h)                       over the vocabulary, or over the selected clusters
    top, ids = the C largest logits and their tokens, largest first, equal ones as they stand
    token    = ids[argmax(top - top[0] + noise[step])]
    hidden   = post_projection(h);  again, num_draft times

With noise = temperature * Gumbel, a token is an exact sample of softmax(top / temperature) (Gumbel
1954; Maddison, Tarlow and Minka, "A* Sampling", 2014); with zero noise it is argmax(logits). The
largest logit is taken off first: differences to it are small, so that little noise is not lost in
rounding. Tokens that the tokenizer does not have are no candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

from specgraphs import families, ops, passes, patches
from specgraphs.engine_graph import EngineGraph, bind
from specgraphs.loop import RepeatStep
from specgraphs.trace import EXAMPLE_BATCH, TORCH_DTYPES, FakeModel, Sizes, export, kv_inputs
from specrun import contract
from specrun.contract import KvLayer

NEXT_TOKEN, NEXT_HIDDEN = "next_token", "next_hidden"
# Tokens per round on the bundled pair at temperature 1, 4 drafts, with 16, 64, 128, 256 candidates:
# 1.98, 2.03, 2.14, 2.14 (scripts/drafter_sampling.py). More cost time and memory traffic.
MAX_CANDIDATES = 128


@dataclass(frozen=True)
class AssistantPlan:
    """How an assistant reads its target.

    ``kv_map``: attention type -> target layer. ``windows``: attention type -> KV rows it sees; the
    reference's mask allows a distance of ``sliding_window``, counted from the last KV row, so one
    row more than the target's own window. ``candidates``: tokens that a step draws from, all of
    them below ``known_tokens``, the size of the tokenizer: a padded vocabulary has more rows.
    """

    kv: tuple[KvLayer, ...]
    kv_map: dict[str, int]
    windows: dict[str, int | None]
    head: Literal["plain", "centroid"]
    candidates: int
    known_tokens: int
    hidden_size: int


def plan_assistant(
    assistant_config: Any, target_config: Any, tokenizer_size: int | None = None
) -> AssistantPlan:
    """Match an assistant to its target. Raises ValueError where the two cannot be a pair.

    ``tokenizer_size``: number of tokens that the tokenizer has (None: the whole vocabulary).
    """
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
    known = min(text.vocab_size, tokenizer_size or text.vocab_size)
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
        candidates=min(MAX_CANDIDATES, known, _scored(assistant_config)),
        known_tokens=known,
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


def _scored(config: Any) -> int:
    """Tokens that the head gives a logit in a step."""
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
        noise: torch.Tensor,
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
        logits, ids = self._candidates(h)
        best = (logits - logits[:, :1] + noise).argmax(-1, keepdim=True)
        token = ids.gather(-1, best)
        return token, self.assistant.post_projection(h), token.squeeze(-1), logits, ids

    def _candidates(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logits float32 ``[batch, candidates]`` in order, and their token ids."""
        weight = self.assistant.lm_head.weight
        if self.plan.head == "plain":
            # A product of three axes, as all linear layers, so that it gets their formats.
            logits = self.assistant.lm_head(h).squeeze(1)[:, : self.plan.known_tokens]
            logits = logits.to(torch.float32)
            top = logits.topk(self.plan.candidates)
            return top.values, top.indices
        embedder = self.assistant.masked_embedding
        clusters = (
            embedder.centroids(h.squeeze(1)).topk(embedder.centroid_intermediate_top_k).indices
        )
        order = embedder.token_ordering.view(
            embedder.num_centroids, embedder.vocab_size_per_centroid
        )
        # As a lookup in a table this is one node; as an index it would be six.
        ids = functional.embedding(clusters, order).flatten(1)
        rows = functional.embedding(ids, weight)
        logits = (rows @ h.transpose(1, 2)).squeeze(-1).to(torch.float32)
        if self.plan.known_tokens < weight.shape[0]:
            logits = logits.masked_fill(ids >= self.plan.known_tokens, -torch.inf)
        top = logits.topk(self.plan.candidates)
        return top.values, ids.gather(-1, top.indices)


def trace_assistant(
    assistant: FakeModel,
    target: FakeModel,
    precision: str,
    *,
    max_context: int,
    tokenizer_size: int | None = None,
) -> EngineGraph:
    """Trace the drafter engine: its steps as one Loop whose trip count is an input.

    ``assistant`` and ``target`` share one fake mode; ``tokenizer_size`` as in
    :func:`plan_assistant`. Raises ValueError where they are no pair.
    """
    plan = plan_assistant(assistant.model.config, target.model.config, tokenizer_size)
    batches = Sizes.up_to(max_context).batch
    kv = kv_inputs(plan.kv, assistant.mode, precision, batch=batches, max_context=max_context)
    dtype = TORCH_DTYPES[precision]
    with assistant.mode:
        args = (
            torch.ones(EXAMPLE_BATCH, 1, dtype=torch.int64),
            torch.zeros(EXAMPLE_BATCH, 1, plan.hidden_size, dtype=dtype),
            torch.ones(EXAMPLE_BATCH, dtype=torch.int32),
            torch.zeros(EXAMPLE_BATCH, plan.candidates, dtype=torch.float32),
            kv.examples,
        )
    per_batch = {0: batches}
    stacked = [contract.DRAFT_TOKENS, contract.DRAFT_LOGITS, contract.DRAFT_CANDIDATES]
    model = export(
        _Step(assistant.model, target.model.get_input_embeddings(), plan),
        args,
        (per_batch, per_batch, per_batch, per_batch, kv.shapes),
        mode=assistant.mode,
        input_names=[
            contract.TOKEN,
            contract.HIDDEN,
            contract.PAST_LENGTH,
            contract.NOISE,
            *kv.names,
        ],
        output_names=[NEXT_TOKEN, NEXT_HIDDEN, *stacked],
    )
    passes.simplify(model)
    RepeatStep(
        carried={contract.TOKEN: NEXT_TOKEN, contract.HIDDEN: NEXT_HIDDEN},
        sliced=[contract.NOISE],
        trip_count=contract.NUM_DRAFT,
        stacked=stacked,
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
