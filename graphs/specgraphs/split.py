"""A target in three engines for early exit: front, back and head.

Elhoushi et al., "LayerSkip" (2024). With E = early_exit, L layers and rows r::

    front:  h_E[r] = layers 0 .. E - 1 (embedding(tokens[r]))
    back:   h_L[r] = layers E .. L - 1 (h_E[r])
    head:   logits[r] = lm_head(final_norm(h[r])),   h one of the two

A draft is front and head, verification front, back and head; every layer and matrix is in one
engine only. transformers' own loop over the layers runs: the ones that belong to another engine
are replaced by modules that pass their input on, so every layer stands at its own index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from specgraphs import families, passes, patches
from specgraphs.engine_graph import EngineGraph, bind
from specgraphs.families import KvPlan
from specgraphs.target import WANTED_ROWS, KvAttention, keep_rows, positions
from specgraphs.trace import (
    EXAMPLE_BATCH,
    EXAMPLE_ROWS,
    EXAMPLE_WANTED,
    TORCH_DTYPES,
    FakeModel,
    KvInputs,
    Sizes,
    export,
    kv_inputs,
)
from specrun import contract
from specrun.contract import KvLayer, Part, SplitContract


@dataclass(frozen=True)
class SplitPlan:
    """A target cut at ``contract.early_exit``. ``front`` and ``back``: the buffers each owns."""

    contract: SplitContract
    front: tuple[KvLayer, ...]
    back: tuple[KvLayer, ...]

    @property
    def bound(self) -> tuple[KvLayer, ...]:
        """Buffers that the back takes, its own and those it reads, in layer order."""
        return tuple(sorted((*self.contract.reads, *self.back), key=lambda kv: kv.layer))


def plan_split(config: Any, early_exit: int) -> SplitPlan:
    """Cut a text config of one of TARGETS. Raises ValueError naming the range of early_exit."""
    plan = families.kv_plan(config)
    layers = len(plan.source)
    sharing = [layer for layer in range(layers) if not plan.owns(layer)]
    if sharing and sharing != list(range(sharing[0], layers)):
        raise ValueError(f"layers {sharing} share KV; only the last ones of a model may")
    read = {plan.source[layer] for layer in range(early_exit, layers)}
    return SplitPlan(
        SplitContract(
            early_exit,
            layers,
            reads=tuple(kv for kv in plan.owners if kv.layer < early_exit and kv.layer in read),
            shared_from=sharing[0] if sharing else None,
            per_layer_size=int(getattr(config, "hidden_size_per_layer_input", None) or 0) or None,
        ),
        tuple(kv for kv in plan.owners if kv.layer < early_exit),
        tuple(kv for kv in plan.owners if kv.layer >= early_exit),
    )


class _Front(torch.nn.Module):
    """Tokens to the hidden state behind the last layer of the front."""

    def __init__(self, model: Any, kv_plan: KvPlan, plan: SplitPlan) -> None:
        super().__init__()
        self.model = model
        self.kv_plan = _visible(kv_plan, plan.front, range(plan.contract.early_exit))
        self.plan = plan

    def forward(
        self,
        tokens: torch.Tensor,
        past_length: torch.Tensor,
        rest: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        wanted_rows, past = _apart(rest, self.plan.contract.front_picks)
        attend = KvAttention(self.kv_plan, past, past_length, tokens.shape[1])
        decoder = self.model.model
        embeddings: list[torch.Tensor] = []
        replaced = {**_pick(decoder, wanted_rows), **_watch_per_layer(decoder, embeddings)}
        with patches.attending(attend), _methods(decoder, replaced):
            rows = decoder(
                input_ids=tokens,
                position_ids=positions(past_length, tokens.shape[1]),
                use_cache=False,
            ).last_hidden_state
        if not self.plan.contract.has_back:
            embeddings.clear()
        for wanted in wanted_rows:
            embeddings = [x.index_select(1, wanted) for x in embeddings]
        return (rows, *embeddings, *attend.present())


class _Back(torch.nn.Module):
    """The hidden state behind the front to the one behind the last layer."""

    def __init__(self, model: Any, kv_plan: KvPlan, plan: SplitPlan) -> None:
        super().__init__()
        self.model = model
        cut = plan.contract
        self.kv_plan = _visible(kv_plan, plan.bound, range(cut.early_exit, cut.layers))
        self.plan = plan

    def forward(
        self,
        exit_rows: list[torch.Tensor],
        past_length: torch.Tensor,
        rest: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        rows, *embeddings = exit_rows
        wanted_rows, past = _apart(rest, self.plan.contract.back_picks)
        attend = KvAttention(self.kv_plan, past, past_length, rows.shape[1])
        decoder = self.model.model
        replaced = {**_pick(decoder, wanted_rows), **_given_per_layer(embeddings)}
        with patches.attending(attend), _methods(decoder, replaced):
            last = decoder(
                inputs_embeds=rows,
                position_ids=positions(past_length, rows.shape[1]),
                use_cache=False,
                **({"per_layer_inputs": embeddings[0]} if embeddings else {}),
                **self._shared(attend),
            ).last_hidden_state
        written = {kv.layer for kv in self.plan.back}
        halves = zip(
            [kv for kv in self.kv_plan.owners for _ in Part], attend.present(), strict=True
        )
        return (last, *(half for kv, half in halves if kv.layer in written))

    def _shared(self, attend: KvAttention) -> dict[str, Any]:
        """What layers of the front would have left for those of the back that share their KV."""
        reads = self.plan.contract.reads
        kinds = families.layer_types(self.model.config)
        given = {kinds[kv.layer]: attend.buffers[kv.layer] for kv in reads}
        return {"shared_kv_states": given} if given else {}


class _Head(torch.nn.Module):
    """Final norm, head and softcap."""

    def __init__(self, model: Any, cap: float | None) -> None:
        super().__init__()
        self.model = model
        self.cap = cap

    def forward(self, rows: torch.Tensor, wanted_rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.model.model.norm(rows)
        logits = families.head_logits(self.model, hidden.index_select(1, wanted_rows), self.cap)
        return logits, logits.argmax(-1), hidden


class _PassOn(torch.nn.Module):
    """Stands at the index of a layer that is in another engine."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


def trace_split(
    fake: FakeModel, precision: str, *, early_exit: int, max_context: int
) -> dict[str, EngineGraph]:
    """Trace front, back (where layers are left) and head of ``fake``, by engine name.

    ``precision``: of KV, activations and hidden states. The model is left as it was. Raises
    ValueError for an ``early_exit`` out of range.
    """
    return {
        **trace_layers(fake, precision, early_exit=early_exit, max_context=max_context),
        contract.HEAD_ENGINE: trace_head(fake, precision, max_context=max_context),
    }


def trace_layers(
    fake: FakeModel, precision: str, *, early_exit: int, max_context: int
) -> dict[str, EngineGraph]:
    """The same without the head."""
    plan, sizes = plan_split(fake.model.config, early_exit), Sizes.up_to(max_context)
    graphs = {contract.FRONT_ENGINE: _trace_front(fake, plan, precision, sizes)}
    if plan.contract.has_back:
        graphs[contract.BACK_ENGINE] = _trace_back(fake, plan, precision, sizes)
    return graphs


def _trace_front(fake: FakeModel, plan: SplitPlan, precision: str, sizes: Sizes) -> EngineGraph:
    cut = plan.contract
    kv = kv_inputs(
        plan.front, fake.mode, precision, batch=sizes.batch, max_context=sizes.max_context
    )
    rest, rest_shapes = _with_wanted(kv, fake, cut.front_picks, sizes)
    with fake.mode:
        tokens = torch.ones(EXAMPLE_BATCH, EXAMPLE_ROWS, dtype=torch.int64)
        past_length = torch.ones(EXAMPLE_BATCH, dtype=torch.int32)
    inputs = contract.front_inputs(plan.front, contract.DType.FLOAT32, cut)
    outputs = contract.front_outputs(plan.front, contract.DType.FLOAT32, 1, cut)
    with _only_layers(fake.model.model, range(cut.early_exit)):
        model = export(
            _Front(fake.model, families.kv_plan(fake.model.config), plan),
            (tokens, past_length, rest),
            ({0: sizes.batch, 1: sizes.rows}, {0: sizes.batch}, rest_shapes),
            mode=fake.mode,
            input_names=_traced_names(inputs),
            output_names=[spec.name for spec in outputs],
        )
    return _finished(model, fake, contract.TOKENS)


def _trace_back(fake: FakeModel, plan: SplitPlan, precision: str, sizes: Sizes) -> EngineGraph:
    cut, config = plan.contract, fake.model.config
    kv = kv_inputs(
        plan.bound, fake.mode, precision, batch=sizes.batch, max_context=sizes.max_context
    )
    rest, rest_shapes = _with_wanted(kv, fake, cut.back_picks, sizes)
    specs = cut.exit_specs(contract.DType.FLOAT32, int(config.hidden_size), contract.ROWS)
    with fake.mode:
        exit_rows = [
            torch.zeros(
                EXAMPLE_BATCH,
                EXAMPLE_ROWS,
                *(int(size) for size in spec.shape[2:]),
                dtype=TORCH_DTYPES[precision],
            )
            for spec in specs
        ]
        past_length = torch.ones(EXAMPLE_BATCH, dtype=torch.int32)
    rows_shapes = [{0: sizes.batch, 1: sizes.rows} for _ in exit_rows]
    inputs = contract.back_inputs(plan.back, contract.DType.FLOAT32, 1, cut)
    outputs = contract.back_outputs(plan.back, contract.DType.FLOAT32, 1, cut)
    with _only_layers(fake.model.model, range(cut.early_exit, cut.layers)):
        model = export(
            _Back(fake.model, families.kv_plan(config), plan),
            (exit_rows, past_length, rest),
            (rows_shapes, {0: sizes.batch}, rest_shapes),
            mode=fake.mode,
            input_names=_traced_names(inputs),
            output_names=[spec.name for spec in outputs],
        )
    return _finished(model, fake, contract.EXIT_ROWS)


def trace_head(fake: FakeModel, precision: str, *, max_context: int) -> EngineGraph:
    """Final norm and head of ``fake``, the same for every early exit."""
    sizes = Sizes.up_to(max_context)
    config = fake.model.config
    with fake.mode:
        rows = torch.zeros(
            EXAMPLE_BATCH, EXAMPLE_ROWS, int(config.hidden_size), dtype=TORCH_DTYPES[precision]
        )
        wanted = torch.arange(EXAMPLE_WANTED)
    model = export(
        _Head(fake.model, families.softcap(config)),
        (rows, wanted),
        ({0: sizes.batch, 1: sizes.rows}, {0: sizes.wanted}),
        mode=fake.mode,
        input_names=[contract.HEAD_ROWS, WANTED_ROWS],
        output_names=[contract.LOGITS, contract.ARGMAX, contract.HIDDEN],
    )
    return _finished(model, fake, contract.HEAD_ROWS)


def _finished(model: ir.Model, fake: FakeModel, fed: str) -> EngineGraph:
    """The traced index of wanted rows replaced, where there is one; ``fed``: what has the rows."""
    if any(value.name == WANTED_ROWS for value in model.graph.inputs):
        passes.WantedRowsFromFirstRow(WANTED_ROWS, fed)(model)
    passes.simplify(model)
    return bind(model, (fake.traced_as("model.", "target"),))


def _with_wanted(
    kv: KvInputs, fake: FakeModel, picks: bool, sizes: Sizes
) -> tuple[list[Any], list[Any]]:
    """The KV inputs, behind the index of wanted rows in an engine that picks them."""
    if not picks:
        return kv.examples, kv.shapes
    with fake.mode:
        wanted = torch.arange(EXAMPLE_WANTED)
    return [wanted, *kv.examples], [{0: sizes.wanted}, *kv.shapes]


def _apart(rest: list[Any], picks: bool) -> tuple[list[Any], list[Any]]:
    """The index of wanted rows as a list of one or none, and the KV buffers."""
    return rest[: int(picks)], rest[int(picks) :]


def _traced_names(inputs: Sequence[contract.TensorSpec]) -> list[str]:
    return [WANTED_ROWS if spec.name == contract.FIRST_ROW else spec.name for spec in inputs]


def _visible(plan: KvPlan, bound: tuple[KvLayer, ...], layers: range) -> KvPlan:
    """``plan`` with the buffers of one engine. Other engines' layers never ask for theirs, so any
    buffer stands for them."""
    source = (owner if i in layers else bound[0].layer for i, owner in enumerate(plan.source))
    return KvPlan(bound, tuple(source))


@contextlib.contextmanager
def _only_layers(decoder: Any, layers: range) -> Iterator[None]:
    """Let ``decoder`` run ``layers`` only and return its hidden state before the final norm."""
    all_layers, norm = decoder.layers, decoder.norm
    kept = (x if i in layers else _PassOn() for i, x in enumerate(all_layers))
    decoder.layers, decoder.norm = torch.nn.ModuleList(kept), torch.nn.Identity()
    try:
        yield
    finally:
        decoder.layers, decoder.norm = all_layers, norm


@contextlib.contextmanager
def _methods(instance: Any, replaced: dict[str, Any]) -> Iterator[None]:
    """Give ``instance`` methods of its own; on exit it has those it had."""
    before = {name: instance.__dict__[name] for name in replaced if name in instance.__dict__}
    instance.__dict__.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del instance.__dict__[name]
        instance.__dict__.update(before)


def _pick(decoder: Any, wanted_rows: list[torch.Tensor]) -> dict[str, Any]:
    """What Gemma 4 does in front of its KV-sharing layers: keep the wanted rows, or every row."""
    name = "_maybe_slice_kv_shared_inputs"
    if not hasattr(decoder, name):
        return {}
    if wanted_rows:
        return {name: keep_rows(wanted_rows[0])}
    return {name: lambda *inputs, **_: inputs[:-1]}  # the last one is logits_to_keep


def _watch_per_layer(decoder: Any, seen: list[torch.Tensor]) -> dict[str, Any]:
    """Let the per-layer embeddings ``[batch, rows, layers, size]`` be noted in ``seen``."""
    if not getattr(decoder, "hidden_size_per_layer_input", None):
        return {}
    compute = decoder.project_per_layer_inputs

    def project(*inputs: Any) -> torch.Tensor:
        seen.append(compute(*inputs))
        return seen[-1]

    return {"project_per_layer_inputs": project}


def _given_per_layer(embeddings: list[torch.Tensor]) -> dict[str, Any]:
    """The back is given per-layer embeddings that are projected already."""
    return {"project_per_layer_inputs": lambda _, given: given} if embeddings else {}
