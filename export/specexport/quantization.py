"""Which weight of an export is stored how, and the graphs that read it so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specexport import calibration, heap, naming, texts
from specexport.calibration import Choice, Layers
from specexport.integers import BlockForm
from specexport.made import Importance, Sources, is_stored_so
from specexport.parts.base import Settings
from specexport.sources import Source
from specexport.weights import Weights, listed
from specgraphs.formats import (
    ACCURACY_LEVEL,
    HEAD,
    KEEP_FLOAT,
    Formats,
    LinearFormat,
)
from specgraphs.recipes import Blocks, Stacked, WeightRef
from specrun.contract import TARGET_ENGINES, FixedSizes
from specrun.manifest import Precision, WeightFormats

if TYPE_CHECKING:
    from specgraphs.engine_graph import EngineGraph

MANY_KEPT = 0.5  # of the layers, from which the manifest says so
KEPT = "as the checkpoint has them"
REQUANTIZED = "therefore dequantized and quantized again"


@dataclass(frozen=True)
class Precisions:
    """Of the target's linear layers, of drafters, of the output head and of tables."""

    target: Precision
    drafter: Precision
    head: Precision
    embedding: Precision
    block_size: int

    @property
    def of_target(self) -> set[Precision]:
        """Those of the target's own weights."""
        return {self.target, self.head, self.embedding}

    @property
    def needs_calibration(self) -> bool:
        """Whether formats of the target's weights depend on what its layers are fed."""
        return bool(self.of_target & {"int4", "w8a8"})


def resolve(
    precision: Precision,
    *,
    drafter: Precision | None,
    head: Precision | None,
    embedding: Precision | None,
    block_size: int,
) -> Precisions:
    """What was given, and for None what goes with ``precision``."""
    return Precisions(
        target=precision,
        # A drafter steps row by row, which blocks do best.
        drafter=drafter or ("int8" if precision == "w8a8" else precision),
        head=head or careful(precision),
        embedding=embedding or careful(precision),
        block_size=block_size,
    )


def careful(precision: Precision) -> Precision:
    """What logits and embeddings are stored as: four bits lose too much there."""
    return "int8" if precision == "int4" else precision


def calibrates(target: Source, precisions: Precisions) -> bool:
    """Whether a format or an encoding depends on what layers are fed: not where all of them are
    taken as the checkpoint has them."""
    if not precisions.needs_calibration or "w8a8" in precisions.of_target:
        return precisions.needs_calibration
    import torch

    formats = _of_target(target, precisions, {})
    model = naming.meta_model(*target.class_and_config())
    linear = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return any(_in_int4(formats, f"{name}.weight") for name in linear)


def _in_int4(formats: Formats, name: str) -> bool:
    """Whether a linear layer is encoded in 4-bit blocks, from floats."""
    found = _linear(formats, name)
    return found.kind == "blocks" and found.bits == 4 and not formats.is_stored(name, found)


def _of_target(
    target: Source, precisions: Precisions, chosen: Mapping[str, LinearFormat]
) -> Formats:
    return Formats(
        precisions.target,
        precisions.head,
        precisions.embedding,
        precisions.block_size,
        chosen,
        _stored(target.weights),
    )


def _stored(weights: Weights) -> dict[str, tuple[int, int]]:
    """Name -> bits and columns of the blocks that the checkpoint has a tensor in."""
    forms = {name: weights.form(name) for name in weights.names()}
    return {n: (form.bits, form.size) for n, form in forms.items() if form and form.size}


def _linear(formats: Formats, name: str) -> LinearFormat:
    return formats.linear(name, head=bool(HEAD.search(name)))


@dataclass(frozen=True)
class Plan:
    """Formats of the target's weights and of those that drafters bring, and what chose them.

    ``num_layers``: linear layers that calibration looked at, the head not counted.
    """

    target: Formats
    drafter: Formats
    choices: tuple[Choice, ...] = ()
    importance: Importance = field(default_factory=dict)
    num_layers: int = 0


def plan(
    target: Source,
    model: Any,
    precisions: Precisions,
    report: Callable[[str, int, int], None],
) -> Plan:
    """Formats of all weights. ``model``: transformers' of the target, None where it is not needed,
    see ``calibrates``."""
    if model is None or not calibrates(target, precisions):
        return Plan(*formats(target, precisions, {}))
    report("calibrate", 0, 1)
    chooser = _Chooser(target, precisions)
    tokens = texts.tokens(target, texts.CALIBRATION)
    calibration.observe(target, model, tokens, chooser.see)
    choices = chooser.choices()
    found: dict[str, LinearFormat] = {}
    for name, chosen in calibration.formats(choices).items():
        found[name] = found[target.weights.canonical(name)] = chosen
    report("calibrate", 1, 1)
    return Plan(
        *formats(target, precisions, found), choices, chooser.importance, chooser.num_layers
    )


def formats(
    target: Source, precisions: Precisions, chosen: Mapping[str, LinearFormat]
) -> tuple[Formats, Formats]:
    """Formats of the target's weights and of those that drafters bring.

    ``chosen``: name of a weight of the target -> the format that calibration found for it.
    """
    drafter, size = precisions.drafter, precisions.block_size
    of_drafters = Formats(drafter, careful(drafter), careful(drafter), size)
    return _of_target(target, precisions, chosen), of_drafters


class _Chooser:
    """Chooses formats layer by layer, as a model runs, and keeps no input of any."""

    def __init__(self, target: Source, precisions: Precisions) -> None:
        self.target = target
        self.precisions = precisions
        self.importance: dict[WeightRef, NDArray[np.float32]] = {}
        self._formats = _of_target(target, precisions, {})
        self.num_layers = 0
        self._choices: list[Choice] = []
        self._budget = calibration.BlockBudget(target.weights, precisions.block_size)

    def see(self, seen: Layers) -> None:
        """Layers that belong together; those whose integers are taken as they are do not count."""
        names = tuple(name for name in seen.names if self._is_encoded(name))
        if not names:
            return
        layers = replace(seen, names=names)
        self.num_layers += sum(not HEAD.search(name) for name in names)
        if "int4" in self.precisions.of_target:
            for name in names:
                ref = WeightRef("target", self.target.weights.canonical(name))
                self.importance[ref] = layers.importance
        if _in_rows(names, self.precisions):
            self._choices += calibration.choose_rows([layers], self.target.weights)
        if self.precisions.target == "int4":
            self._budget.see(layers)
        heap.give_back()

    def choices(self) -> tuple[Choice, ...]:
        """What was chosen for which layers."""
        return (*self._choices, *self._budget.choices())

    def _is_encoded(self, name: str) -> bool:
        return not self._formats.is_stored(name, _linear(self._formats, name))


def _in_rows(names: tuple[str, ...], precisions: Precisions) -> bool:
    is_head = any(HEAD.search(name) for name in names)
    return (precisions.head if is_head else precisions.target) == "w8a8"


def apply(
    graphs: Mapping[str, EngineGraph],
    made: Plan,
    sources: Sources,
    settings: Settings,
    fixed: Mapping[str, FixedSizes | None],
) -> dict[str, WeightFormats | None]:
    """Put every graph's weights into their formats, and the graph into its dialect.

    ``fixed``: by engine. Returns what the manifest says of the weights of each engine.
    """
    from specgraphs import apply_formats, dialect, experts, packed_attention

    by_origin = {
        origin: made.target
        if origin == "target"
        else replace(made.drafter, stored=_stored(weights))
        for origin, weights in sources.weights.items()
    }
    for graph in graphs.values():
        experts.expand(graph, by_origin, everywhere=settings.tensorrt)
    # An engine may know a tied table under the head's name and another under the embedding's.
    heads = apply_formats.heads(graphs.values(), by_origin)
    heads |= {sources.canonical(ref): chosen for ref, chosen in heads.items()}
    for name, graph in graphs.items():
        apply_formats.apply(graph, by_origin, heads, same_bits=settings.tensorrt)
        sizes = fixed[name]
        if sizes is None:
            packed_attention.apply(graph, settings.max_context)
        else:
            dialect.apply(graph, capacity=sizes.capacity, drafts=sizes.drafts)
    return {name: _described(name, graph, made) for name, graph in graphs.items()}


def notes(graphs: Iterable[EngineGraph], sources: Sources) -> tuple[str, ...]:
    """What became of weights that the checkpoints have in integers already."""
    kept: dict[str, set[str]] = {}
    lost: dict[str, set[str]] = {}
    for recipe in {part.recipe for graph in graphs for part in graph.made.values()}:
        for ref in map(sources.canonical, recipe.sources):
            form = sources.form(ref)
            if form is None or isinstance(recipe, Stacked):
                continue
            if isinstance(recipe, Blocks) and is_stored_so(form, recipe.bits, recipe.size):
                kept.setdefault(f"{ref.origin}: {_in_blocks(form)}", set()).add(ref.name)
            else:
                reason = form.obstacle or f"stored with {_in_blocks(form)}"
                lost.setdefault(f"{ref.origin}: {reason}", set()).add(ref.name)
    said = [f"{what}, {KEPT}: {len(names)} weights" for what, names in kept.items()]
    said += [f"{why}, {REQUANTIZED}: {listed(sorted(names))}" for why, names in lost.items()]
    return tuple(sorted(said))


def kept_notes(made: Plan) -> tuple[str, ...]:
    """Where so many layers of a 4-bit model are worth 8 bits that it is hardly one."""
    kept = sum(len(c.names) for c in made.choices if c.format.kind == "blocks")
    if made.target.precision != "int4" or kept <= MANY_KEPT * made.num_layers:
        return ()
    return (
        f"int4: {kept} of {made.num_layers} linear layers are kept in 8 bits; the head and tables"
        " weigh so much beside them that it costs little",
    )


def _in_blocks(form: BlockForm) -> str:
    return f"{form.bits} bits in blocks of {form.size}"


def _described(name: str, graph: EngineGraph, made: Plan) -> WeightFormats | None:
    formats = made.target if name in TARGET_ENGINES else made.drafter
    if all(isinstance(part.recipe, Stacked) for part in graph.made.values()):
        return None  # nothing in integers
    refs = [ref for part in graph.made.values() for ref in part.recipe.sources]
    # A draft model has layers of the same names.
    own = {ref.name for ref in (*refs, *graph.weights.values()) if ref.origin == "target"}
    choices = [choice for choice in made.choices if own & set(choice.names)]
    return WeightFormats(
        block_size=formats.block_size,
        accuracy_level=ACCURACY_LEVEL,
        head=formats.head,
        embedding=formats.embedding,
        kept_float=tuple(sorted(n for n in graph.weights if KEEP_FLOAT.search(n))),
        kept_int8=tuple(n for c in choices if c.format.kind == "blocks" for n in c.names),
        two_terms=tuple(c.names[0] for c in choices if c.format.terms == 2),
        rotated=tuple(c.names[0] for c in choices if c.format.rotation),
        smoothing={c.names[0]: c.strength for c in choices if c.strength is not None},
        errors={c.names[0]: round(c.error, 5) for c in choices},
    )
