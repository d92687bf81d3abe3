"""Which tensors each engine of an export reads: one method per kind of engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from specexport import mtp_weights, naming
from specexport.errors import SourceError
from specexport.parts.base import Settings, file_name
from specexport.plan_tensors import (
    Kind,
    Stored,
    Tensor,
    encoded_bytes,
    inline,
    is_head,
    layer_of,
    module_of,
    packed_heads,
    tensors,
)
from specexport.sources import Source
from specgraphs import families
from specgraphs.formats import Formats, LinearFormat
from specgraphs.packed_attention import SPARE_ROWS, TABLE_BYTES
from specrun.contract import (
    BACK_ENGINE,
    DRAFT_ENGINE,
    FRONT_ENGINE,
    HEAD_ENGINE,
    MTP_DRAFTER_ENGINE,
    TARGET_ENGINE,
    KvLayer,
    mtp_layer_engine,
)
from specrun.errors import UsageError
from specrun.manifest import Precision

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class KvUse:
    """KV buffers of one engine and one attention type. ``token_bytes``: of all its layers."""

    engine: str
    kind: Literal["full", "sliding"]
    layers: int
    token_bytes: int
    max_context: int


@dataclass(frozen=True)
class EnginePlan:
    """One engine: ``about``: what it computes; ``layers``: of the model that it holds."""

    name: str
    about: str
    precision: Precision
    layers: int
    stored: tuple[Stored, ...]
    kv: tuple[KvUse, ...] = ()

    @property
    def file(self) -> str:
        """In the engine folder."""
        return file_name(self.name)

    @property
    def nbytes(self) -> int:
        """Of all weights it reads, also those that other engines read."""
        return sum(one.nbytes for one in self.stored)


class Builder:
    """Makes the engines of one export."""

    def __init__(self, target: Source, settings: Settings, formats: tuple[Formats, Formats]):
        self.source = target
        self.settings = settings
        self.of_target, self.of_drafters = formats
        self.item = 2 if settings.dtype == "fp16" else 4
        self.model: Any = naming.meta_model(*target.class_and_config())
        self.tensors = list(tensors(self.model))
        self.notes: list[str] = []

    def target_engines(self, early_exit: int | None) -> Iterator[EnginePlan]:
        """One, or with ``early_exit`` front, back and head."""
        layers = int(self.source.config.num_hidden_layers)
        if early_exit is None:
            yield self._causal(TARGET_ENGINE, "the whole model", self.source, self.settings)
            return
        split = _split(self.source, early_exit)
        in_head = {"lm_head", "model.norm"}

        def at(first: int, last: int) -> Callable[[str], bool]:
            return lambda name: first <= layer_of(name) < last

        def front(name: str) -> bool:
            return layer_of(name) < early_exit and module_of(name) not in in_head

        parts: list[tuple[str, str, int, Callable[[str], bool], tuple[KvLayer, ...]]] = [
            (FRONT_ENGINE, f"layers 0 to {early_exit - 1}", early_exit, front, split.front),
            (
                BACK_ENGINE,
                f"layers {early_exit} to {layers - 1}",
                layers - early_exit,
                at(early_exit, layers),
                split.back,
            ),
            (HEAD_ENGINE, "final norm and head", 0, lambda name: module_of(name) in in_head, ()),
        ]
        for name, about, count, wanted, kv in parts:
            if name == BACK_ENGINE and not count:
                continue
            own = [tensor for tensor in self.tensors if wanted(tensor.name)]
            stored = self._stored("target", own, self.of_target)
            if count:
                stored += self._rotary(self.model, self.settings.max_context, "target")
            uses = self._kv(name, kv, self.settings.max_context)
            yield EnginePlan(name, about, self.settings.precision, count, _once(stored), uses)

    def assistant(self, source: Source) -> EnginePlan:
        """A Gemma 4 assistant: on the target's embedding and KV, without KV of its own."""
        from specgraphs.assistant import plan_assistant

        try:
            plan_assistant(source.full_config, self.source.config)
        except ValueError as error:
            raise SourceError(f"{source.id} is no drafter of {self.source.id}: {error}") from error
        model: Any = naming.meta_model(*source.class_and_config())
        # The head is looked up cluster by cluster, or a linear layer.
        as_head: Kind = "table" if source.full_config.use_ordered_embeddings else "linear"
        own = [
            replace(tensor, kind=as_head) if is_head(tensor) else tensor
            for tensor in tensors(model)
            if tensor.name != EMBEDDING
        ]
        stored = self._stored("drafter", own, self.of_drafters)
        stored += self._shared(EMBEDDING)
        layers = int(source.config.num_hidden_layers)
        about = "the assistant, all its steps in one run"
        return self._drafting(MTP_DRAFTER_ENGINE, about, layers, stored, ())

    def draft(self, source: Source) -> EnginePlan:
        """A smaller causal model."""
        self.notes.append(
            f"{source.id}: counted as one with the target's tokenizer; with another one its engine"
            " is called universal, and its KV grows up to its own context"
        )
        return self._causal(DRAFT_ENGINE, "a smaller model that drafts", source, self.settings)

    def mtp_layers(self, wanted: bool | None) -> Iterator[EnginePlan]:
        """The MTP layers that the target's configuration announces, one engine each."""
        config = self.source.config
        count = int(getattr(config, "num_mtp_layers", None) or 0)
        known = config.model_type in families.MTP_LAYERS
        if wanted is False or (wanted is None and not (count and known)):
            return
        if not (count and known):
            raise SourceError(f"{self.source.id}: its configuration announces no MTP layers")
        from specgraphs.mtp_layers import ORIGIN, plan_mtp

        self.notes.append(
            f"{count} MTP layers are announced by the configuration; a checkpoint without them"
            " exports without these engines"
        )
        model: Any = mtp_weights.meta_model(self.model)
        own = list(tensors(model))
        for layer, kv in enumerate(plan_mtp(config).kv):
            name = mtp_layer_engine(layer)
            inside = [one for one in own if one.name.startswith(f"layers.{layer}.")]
            stored = self._stored(ORIGIN, inside, self.of_drafters)
            stored += self._shared(EMBEDDING, LM_HEAD)
            stored += self._rotary(self.model, self.settings.max_context, name, inside)
            uses = self._kv(name, (kv,), self.settings.max_context)
            yield self._drafting(name, f"MTP layer {layer}", 1, stored, uses)

    def _drafting(
        self,
        name: str,
        about: str,
        layers: int,
        stored: list[Stored],
        kv: tuple[KvUse, ...],
    ) -> EnginePlan:
        precision = self.settings.drafter_precision
        return EnginePlan(name, about, precision, layers, _once(stored), kv)

    def _causal(self, name: str, about: str, source: Source, settings: Settings) -> EnginePlan:
        is_target = source is self.source
        model = self.model if is_target else naming.meta_model(*source.class_and_config())
        formats = self.of_target if is_target else self.of_drafters
        origin = "target" if is_target else "draft"
        limit = min(settings.max_context, int(source.config.max_position_embeddings))
        stored = self._stored(origin, list(tensors(model)), formats)
        stored += self._rotary(model, limit, origin)
        layers = int(source.config.num_hidden_layers)
        uses = self._kv(name, families.kv_plan(source.config).owners, limit)
        return EnginePlan(name, about, settings.of_engine(name), layers, _once(stored), uses)

    def _shared(self, *names: str) -> list[Stored]:
        """Tensors of the target that another engine reads too."""
        found = [one for one in self.tensors if one.name in names]
        return self._stored("target", found, self.of_target)

    def _stored(
        self,
        origin: str,
        own: list[Tensor],
        formats: Formats,
    ) -> list[Stored]:
        whole = self.tensors if origin == "target" else own
        heads = {one.stored_as for one in whole if one.kind == "linear" and is_head(one)}
        found: list[Stored] = []
        for tensor in own:
            if tensor.kind == "table":
                # A table that is also the head is read as the head has it.
                by_columns = formats.embedding == formats.head == "w8a8"
                shared = tensor.stored_as in heads and by_columns
                chosen = (
                    LinearFormat("rows") if shared else formats.table(tensor.name, tensor.shape[-1])
                )
            elif tensor.kind == "linear":
                chosen = formats.linear(tensor.name, head=is_head(tensor))
            else:
                chosen = LinearFormat("float")
            found.append(self._encoded(origin, tensor, chosen))
        return [one for one in found if not inline(one)]

    def _encoded(self, origin: str, tensor: Tensor, chosen: LinearFormat) -> Stored:
        nbytes, how = encoded_bytes(tensor.shape, chosen, tensor.item_bytes or self.item)
        key = (origin, tensor.stored_as, how)
        columns = tensor.shape[-1] if tensor.shape else 1
        return Stored(key, nbytes, math.prod(tensor.shape), columns, tensor.kind == "table")

    def _rotary(
        self, model: Any, max_context: int, owner: str, within: Iterable[Tensor] | None = None
    ) -> list[Stored]:
        """Cosines and sines of all positions; see specgraphs.packed_attention for who has them."""
        heads = {int(size) for size in packed_heads(model)}
        if within is not None and not any(one.name.endswith("q_proj.weight") for one in within):
            return []
        rows = max_context + SPARE_ROWS
        found = []
        for name, buffer in model.named_buffers():
            half = buffer.numel()
            if not name.endswith("inv_freq") or "original" in name or 2 * half not in heads:
                continue
            size = 2 * rows * half * self.item
            if half % 8 == 0 and size <= TABLE_BYTES:
                found.append(Stored((owner, name, "constant"), size, 0, half, table=True))
        return found

    def _kv(self, name: str, owners: tuple[KvLayer, ...], limit: int) -> tuple[KvUse, ...]:
        kinds: tuple[Literal["full", "sliding"], ...] = ("full", "sliding")
        uses = []
        for kind in kinds:
            of_kind = [kv for kv in owners if (kv.window is not None) == (kind == "sliding")]
            size = sum(2 * kv.heads * kv.head_size * self.item for kv in of_kind)
            if of_kind:
                uses.append(KvUse(name, kind, len(of_kind), size, limit))
        return tuple(uses)


def _split(source: Source, early_exit: int) -> Any:
    from specgraphs.split import plan_split

    try:
        return plan_split(source.config, early_exit)
    except ValueError as error:
        layers = int(source.config.num_hidden_layers)
        raise UsageError(f"{source.id}: {error}", hint=f"give 1 to {layers}") from error


def _once(stored: list[Stored]) -> tuple[Stored, ...]:
    return tuple({one.key: one for one in stored}.values())
