"""Which weight of an export is stored how, and the graphs that read it so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specexport import calibration, texts
from specexport.calibration import Choice
from specexport.made import Importance, Sources
from specexport.parts.base import TARGET_ENGINES, Settings
from specexport.sources import Source
from specgraphs.formats import (
    ACCURACY_LEVEL,
    HEAD,
    KEEP_FLOAT,
    Formats,
    LinearFormat,
)
from specgraphs.recipes import Stacked, WeightRef
from specrun.manifest import Precision, WeightFormats

if TYPE_CHECKING:
    from specgraphs.engine_graph import EngineGraph


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


@dataclass(frozen=True)
class Plan:
    """Formats of the target's weights and of those that drafters bring, and what chose them."""

    target: Formats
    drafter: Formats
    choices: tuple[Choice, ...] = ()
    importance: Importance = field(default_factory=dict)


def plan(
    target: Source,
    model: Any,
    precisions: Precisions,
    report: Callable[[str, int, int], None],
) -> Plan:
    """Calibrate where a precision of the target needs it; ``model`` is None where none does."""
    found: dict[str, LinearFormat] = {}
    choices: tuple[Choice, ...] = ()
    importance: dict[WeightRef, NDArray[np.float32]] = {}
    if precisions.needs_calibration:
        report("calibrate", 0, 2)
        tokens = texts.tokens(target, texts.CALIBRATION)
        layers = calibration.observe(target, model, tokens)
        report("calibrate", 1, 2)
        if "int4" in precisions.of_target:
            for name, columns in calibration.importance(layers).items():
                importance[WeightRef("target", target.weights.canonical(name))] = columns
        if "w8a8" in precisions.of_target:
            wanted = [group for group in layers if _in_rows(group.names, precisions)]
            choices = tuple(calibration.choose_rows(wanted, target.weights))
        if precisions.target == "int4":
            found_layers = calibration.choose_blocks(layers, target.weights, precisions.block_size)
            choices += tuple(found_layers)
        for name, chosen in calibration.formats(choices).items():
            found[name] = found[target.weights.canonical(name)] = chosen
        report("calibrate", 2, 2)
    return Plan(*formats(precisions, found), choices, importance)


def formats(precisions: Precisions, chosen: Mapping[str, LinearFormat]) -> tuple[Formats, Formats]:
    """Formats of the target's weights and of those that drafters bring.

    ``chosen``: name of a weight of the target -> the format that calibration found for it.
    """
    drafter, size = precisions.drafter, precisions.block_size
    target = Formats(precisions.target, precisions.head, precisions.embedding, size, chosen)
    return target, Formats(drafter, careful(drafter), careful(drafter), size)


def _in_rows(names: tuple[str, ...], precisions: Precisions) -> bool:
    is_head = any(HEAD.search(name) for name in names)
    return (precisions.head if is_head else precisions.target) == "w8a8"


def apply(
    graphs: Mapping[str, EngineGraph], made: Plan, sources: Sources, settings: Settings
) -> dict[str, WeightFormats | None]:
    """Put every graph's weights into their formats; what the manifest says of each engine."""
    from specgraphs import apply_formats, packed_attention

    by_origin = dict.fromkeys(sources.weights, made.drafter) | {"target": made.target}
    heads = apply_formats.heads(graphs.values(), by_origin)
    for graph in graphs.values():
        apply_formats.apply(graph, by_origin, heads)
        packed_attention.apply(graph, settings.max_context)
    return {name: _described(name, graph, made) for name, graph in graphs.items()}


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
