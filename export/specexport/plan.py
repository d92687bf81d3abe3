"""What an export will write, from configurations alone: no weight is read.

The sizes follow from transformers' modules and from the rules that the export itself stores by
(:mod:`specexport.quantization`, :mod:`specgraphs.formats`)::

    linear layer                   the format of its precision
    embedding                      the format of tables
    anything else, norms           floats

A tensor that several engines read, or that is tied to another one, counts once in all. Where
calibration decides (int4: which layers have 8 bits; w8a8: which are smoothed or rotated), a second
figure says how much that can be at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specexport import quantization
from specexport.calibration import EIGHT_BITS_BUDGET
from specexport.datafile import LARGE_ALIGNMENT, LARGE_TENSOR, SMALL_ALIGNMENT
from specexport.exporter import context_limit
from specexport.options import ExportOptions
from specexport.parts.base import Settings
from specexport.plan_engines import Builder, EnginePlan, KvUse
from specexport.plan_tensors import Stored
from specexport.quantization import Precisions
from specexport.sources import Source
from specgraphs.formats import LinearFormat
from specgraphs.rotation import LARGEST, SMALLEST
from specrun.errors import UsageError

ROTATIONS = [size for size in (16, 32, 64) if SMALLEST <= size <= LARGEST]


@dataclass(frozen=True)
class ExportPlan:
    """What an export will write. Bytes; the tokenizer is not counted.

    ``calibration_bytes``: how much calibration may add at most.
    """

    target: Source
    engines: tuple[EnginePlan, ...]
    settings: Settings
    precisions: Precisions
    calibration_bytes: int
    notes: tuple[str, ...]

    @property
    def stored(self) -> tuple[Stored, ...]:
        """Everything in the data file, once."""
        return tuple({one.key: one for engine in self.engines for one in engine.stored}.values())

    @property
    def nbytes(self) -> int:
        """Of the data file, with its alignment."""
        return sum(_aligned(one.nbytes) for one in self.stored)

    @property
    def kv(self) -> tuple[KvUse, ...]:
        """Every KV buffer that a run allocates; drafters on the target's own have none."""
        return tuple(use for engine in self.engines for use in engine.kv)


def make(
    target: Source,
    drafters: Sequence[Source],
    options: ExportOptions,
    chosen: Mapping[str, LinearFormat] | None = None,
) -> ExportPlan:
    """The plan of an export with these ``options``.

    ``chosen``: name of a weight -> its format, where calibration has decided already. Raises
    UsageError, or SourceError where a drafter cannot draft for the target.
    """
    if options.precision == "auto":
        raise UsageError(
            "precision: auto is decided by measuring the weights, which a plan does not read",
            hint="give one of fp32, fp16, int8, w8a8, int4",
        )
    precisions = quantization.resolve(
        options.precision,
        drafter=options.drafter_precision,
        head=options.head_precision,
        embedding=options.embedding_precision,
        block_size=options.block_size,
    )
    limit = context_limit(target, options)
    settings = Settings(precisions.target, precisions.drafter, limit, options.drafts)
    builder = Builder(target, settings, quantization.formats(target, precisions, chosen or {}))
    engines = list(builder.target_engines(options.early_exit))
    for source in drafters:
        engines.append(builder.assistant(source) if source.is_assistant else builder.draft(source))
    engines += builder.mtp_layers(options.mtp_layers)
    return ExportPlan(
        target,
        tuple(engines),
        settings,
        precisions,
        _calibration_bytes(engines, precisions),
        tuple(builder.notes),
    )


def _calibration_bytes(engines: Sequence[EnginePlan], precisions: Precisions) -> int:
    """What calibration may add to the target: 8 bits for some layers, scales of activations."""
    # What one engine looks up may be the head of another.
    read = {one.key: one for engine in engines for one in engine.stored if not one.table}
    own = [one for one in read.values() if one.key[0] == "target"]
    if precisions.target == "int4":
        blocks = sum(one.nbytes for one in own if "blocks" in one.key[2])
        return int(EIGHT_BITS_BUDGET * blocks)
    if "w8a8" in precisions.of_target:
        smoothing = sum(4 * one.columns for one in own if one.key[2] == "rows")
        return smoothing + sum(4 * size**2 for size in ROTATIONS)
    return 0


def _aligned(nbytes: int) -> int:
    align = LARGE_ALIGNMENT if nbytes >= LARGE_TENSOR else SMALL_ALIGNMENT
    return -(-nbytes // align) * align
