"""From sources to an engine folder: reference, trace, stream the weights, check, appear."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from specexport import (
    auto_precision,
    engines,
    folder,
    models,
    parity,
    parts,
    quality,
    quantization,
    reference,
)
from specexport.datafile import DATA_FILE, DataFile
from specexport.errors import SourceError
from specexport.made import Sources
from specexport.parts.base import DrafterPart, Settings, TargetPart, file_name
from specexport.parts.record import manifest_source, manifest_tokenizer
from specexport.quantization import Plan, Precisions
from specexport.sources import Source
from specexport.weights import Weights
from specgraphs.formats import BLOCK_SIZES, DEFAULT_BLOCK_SIZE, activations
from specrun import defaults as generation_defaults
from specrun import manifest as manifests
from specrun.contract import FRONT_ENGINE, TARGET_ENGINE
from specrun.errors import UsageError
from specrun.manifest import Generation, Manifest, Precision
from specrun.options import available_threads

Progress = Callable[[str, int, int], None]  # stage, done, total

AUTO: Literal["auto"] = "auto"
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
MIN_CONTEXT = 24  # the graphs are traced with an example of this order
BLOCK = 5  # rows of a block to compare, where no drafter says how many it verifies
DEFAULT_MEMORY_GB = 2.5
BYTES_PER_WEIGHT = {"fp32": 4, "fp16": 2, "int8": 1.125, "w8a8": 1.125, "int4": 0.75}
IN_BLOCKS = ("int8", "int4")  # a run on mapped weights unpacks all of them
NOT_JUDGED = (
    "perplexity was not measured, as that would take more memory: --memory {:.1f} or more does it"
)
PROCESS_BYTES = 1 << 30  # of Python, torch, a trace and chunks of weights
MODEL_MEMORY_SHARE = 0.5  # at most this much of the free memory for a model or the engines


@dataclass(frozen=True)
class ExportOptions:
    """How to export. ``max_context`` and lengths in tokens; None: as the checkpoint says.

    ``precision``: of the weights of linear layers (auto: what is fastest here);
    ``drafter_precision``: those of drafters (the same, and int8 with w8a8, as they step row by
    row); ``head_precision``, ``embedding_precision``: of the output head and of tables (int8 with
    int4, else the same). ``block_size``: columns that share a scale in int8 and int4.
    ``num_draft``: most tokens that the MTP drafter can draft in a round. ``early_exit``: export
    the target in parts, so that its first so many layers can draft. ``mtp_layers``: export the MTP
    layers of the target's checkpoint (None: where it has any). ``check``: compare the written
    engines with transformers before the folder appears. ``memory_gb``: that the export may take,
    10^9 bytes; models that do not fit are read layer by layer, engines run on mapped weights.
    """

    precision: Precision | Literal["auto"] = "fp32"
    drafter_precision: Precision | None = None
    head_precision: Precision | None = None
    embedding_precision: Precision | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    max_context: int | None = None
    num_draft: int = 16
    early_exit: int | None = None
    mtp_layers: bool | None = None
    check: bool = True
    memory_gb: float = DEFAULT_MEMORY_GB

    @property
    def model_memory(self) -> int:
        """Bytes that transformers' model or the engines may take."""
        return memory_for_models(self.memory_gb)

    def __post_init__(self) -> None:
        self._check_precisions()
        if self.num_draft < 1:
            raise UsageError(f"num_draft: must be at least 1, got {self.num_draft}")
        if self.max_context is not None and self.max_context < 2:
            raise UsageError(f"max_context: must be at least 2, got {self.max_context}")
        if not PROCESS_BYTES < self.memory_gb * 1e9 < math.inf:
            raise UsageError(
                f"memory_gb: must be more than {PROCESS_BYTES / 1e9:.2f} and finite,"
                f" got {self.memory_gb:g}",
                hint=f"{DEFAULT_MEMORY_GB:g} is the default",
            )
        if self.early_exit is not None and self.early_exit < 1:
            raise UsageError(
                f"early_exit: must be at least 1, got {self.early_exit}",
                hint="give the number of first layers that draft",
            )

    def _check_precisions(self) -> None:
        for name in ("precision", "drafter_precision", "head_precision", "embedding_precision"):
            value = getattr(self, name)
            allowed = (*PRECISIONS, AUTO) if name == "precision" else (*PRECISIONS, None)
            if value not in allowed:
                listed = ", ".join(choice for choice in allowed if choice is not None)
                raise UsageError(
                    f"{name}: must be one of {listed}, got {value!r}",
                    hint=f"choose one of {listed}",
                )
            if value is not None and (value == "fp16") != (self.precision == "fp16"):
                raise UsageError(
                    f"{name}: {value} does not go with precision {self.precision}: activations are"
                    " fp16 with fp16, and fp32 with all others",
                    hint=f"leave {name} out, or give fp16 for both",
                )
        if self.block_size not in BLOCK_SIZES:
            raise UsageError(
                f"block_size: must be one of {', '.join(map(str, BLOCK_SIZES))},"
                f" got {self.block_size}",
                hint=f"{DEFAULT_BLOCK_SIZE} is the default",
            )


Drafters = Source | Sequence[Source] | None


def export(
    target: Source,
    drafters: Drafters,
    out: Path,
    options: ExportOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Manifest:
    """Write the engine folder ``out``; it appears whole, or an error is raised and it does not.

    ``drafters``: checkpoints that draft for ``target``, each for a method of its own.
    Raises UsageError, or ExportError (SourceError, WeightsError, ParityError below it).
    """
    options = options or ExportOptions()
    report = progress or _silent
    precisions, notes = _precisions(target, options, report)
    settings = Settings(
        precisions.target, precisions.drafter, context_limit(target, options), options.num_draft
    )
    chosen, drafting = parts.plan(target, _listed(drafters), options)
    fits = _expected_bytes(target, precisions) <= options.model_memory
    for part in (chosen, *drafting):
        part.check()
    _check_generation(target)
    folder.check_target(out)
    seen = None
    if options.check:
        report("reference", 0, 1)
        seen = reference.compute(
            target,
            drafting,
            max_context=settings.max_context,
            block=options.num_draft + 1 if drafting else BLOCK,
            memory=options.model_memory,
            precision=settings.dtype,
            few=not fits and precisions.target in IN_BLOCKS,
        )
        report("reference", 1, 1)
    judge = options.check and precisions.of_target != {"fp32"}
    if judge and not fits:
        notes += (NOT_JUDGED.format(_expected_bytes(target, precisions) / 1e9 + 1.5),)
    plan, judged = _plan(
        target,
        precisions,
        options.model_memory,
        report,
        judge=judge and fits,
        max_context=settings.max_context,
    )
    with folder.atomic(out) as partial:
        made = _write(target, chosen, drafting, partial, settings, plan, report)
        if judged is not None:
            made = replace(made, quality=quality.measure(partial, made, judged, report))
        made = replace(made, notes=notes + made.notes)
        if seen is not None:
            made = replace(
                made, parity=_compare(partial, made, drafting, seen, report, mapped=not fits)
            )
        else:
            parity.check_declared_io(partial, made)
        (partial / manifests.MANIFEST).write_text(manifests.dumps(made), encoding="utf-8")
        manifests.read(partial)
    return made


def _precisions(
    target: Source, options: ExportOptions, report: Progress
) -> tuple[Precisions, tuple[str, ...]]:
    """What was asked for, or measured to be best here; and why."""
    precision = options.precision
    notes: tuple[str, ...] = ()
    if precision == AUTO:
        choice = auto_precision.choose(target, report)
        precision, notes = choice.precision, (choice.reason,)
    made = quantization.resolve(
        precision,
        drafter=options.drafter_precision,
        head=options.head_precision,
        embedding=options.embedding_precision,
        block_size=options.block_size,
    )
    return made, notes


def _expected_bytes(target: Source, precisions: Precisions) -> int:
    """About how many bytes the target's weights will take."""
    return int(target.weights.total_nbytes / 4 * BYTES_PER_WEIGHT[precisions.target])


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _listed(drafters: Drafters) -> list[Source]:
    if drafters is None:
        return []
    return [drafters] if isinstance(drafters, Source) else list(drafters)


def recheck(
    out: Path, target: Source, drafters: Drafters, *, progress: Progress | None = None
) -> manifests.ParityReport:
    """Compare the engine folder ``out`` with ``target`` and ``drafters`` again.

    Raises FolderError, SourceError where they cannot be what it was exported from, or ParityError.
    """
    report = progress or _silent
    made = manifests.read(out, integrity="full")
    _check_same(made, target)
    drafting = parts.of_folder(made, target, _listed(drafters))
    most = max((d.max_num_draft or 0 for d in made.drafters.values()), default=0)
    weights = next(entry.size for entry in made.files if entry.path == DATA_FILE)
    mapped = weights > memory_for_models()
    seen = reference.compute(
        target,
        drafting,
        max_context=made.generation.max_context,
        block=most + 1 if most else BLOCK,
        memory=memory_for_models(),
        precision=activations(made.target_engine.precision),
        few=mapped and made.target_engine.precision in IN_BLOCKS,
    )
    return _compare(out, made, drafting, seen, report, mapped=mapped)


def check_itself(out: Path) -> float:
    """Compare the engine folder ``out`` with itself; see :func:`parity.check_itself`."""
    made = manifests.read(out, integrity="full")
    return parity.check_itself(out, made, threads=available_threads())


def _compare(
    folder: Path,
    made: Manifest,
    drafting: Sequence[DrafterPart],
    seen: reference.Reference,
    report: Progress,
    *,
    mapped: bool,
) -> manifests.ParityReport:
    return parity.check(
        folder,
        made,
        drafting,
        seen,
        threads=available_threads(),
        mapped=mapped,
        progress=lambda done, total: report("check", done, total),
    )


def _check_same(made: Manifest, target: Source) -> None:
    """The target has the shape of the folder's; whether it has its weights, parity will show."""
    spec = made.target_engine
    for what, folder_has, source_has in (
        ("architecture", made.target.architecture, target.architecture),
        ("vocabulary", spec.vocab_size, int(target.config.vocab_size)),
        ("hidden size", spec.hidden_size, int(target.config.hidden_size)),
    ):
        if folder_has != source_has:
            raise SourceError(
                f"{target.id}: has {what} {source_has}, the folder was exported from"
                f" {made.target.id} with {folder_has}",
                hint="give the checkpoint that the folder was exported from",
            )


def context_limit(target: Source, options: ExportOptions) -> int:
    """Most tokens that the engines will take. Raises UsageError where they cannot be so many."""
    limit = int(target.config.max_position_embeddings)
    wanted = options.max_context or limit
    if wanted > limit:
        raise UsageError(
            f"max_context: {target.id} has {limit} positions, got {wanted}",
            hint=f"give at most {limit}",
        )
    if wanted < MIN_CONTEXT:
        raise UsageError(
            f"max_context: must be at least {MIN_CONTEXT}, got {wanted}",
            hint="smaller contexts cannot be compared with transformers",
        )
    if options.num_draft + 2 > wanted:
        raise UsageError(
            f"num_draft: {options.num_draft} drafts do not fit into a context of {wanted}",
            hint=f"give at most {wanted - 2}, or a larger --max-context",
        )
    return wanted


def _write(
    target: Source,
    chosen: TargetPart,
    drafting: Sequence[DrafterPart],
    partial: Path,
    settings: Settings,
    plan: Plan,
    report: Progress,
) -> Manifest:
    from specgraphs import experts

    graphs = _trace(target, chosen, drafting, settings, report)
    weights: dict[str, Weights] = {"target": target.weights}
    for part in drafting:
        weights |= part.weights
    sources = Sources(weights, plan.importance)
    stored = quantization.apply(graphs, plan, sources, settings)
    # First, so that the space it takes is seen below.
    tokenizer = target.write_tokenizer(partial)
    for part in drafting:
        part.write_files(partial)
    folder.check_space(partial, engines.room_to_write(graphs.values(), sources))
    total = engines.bytes_to_write(graphs.values(), sources)
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        report("write", min(done, total), total)

    with DataFile(partial / DATA_FILE, count) as data:
        for name, graph in graphs.items():
            engines.write_engine(graph, partial / file_name(name), data, sources)
    files = folder.listing(partial)
    sha256 = {entry.path: entry.sha256 for entry in files}
    specs = chosen.specs(settings)
    first = specs[TARGET_ENGINE] if TARGET_ENGINE in specs else specs[FRONT_ENGINE]
    for part in drafting:
        specs |= part.specs(settings)
    specs = {
        name: replace(
            spec,
            step_bytes=engines.step_bytes(graphs[name]),
            weights=stored[name],
            exact_rows=experts.exact_rows(graphs[name]),
        )
        for name, spec in specs.items()
    }
    notes = quantization.notes(graphs.values(), sources) + quantization.kept_notes(plan)
    return Manifest(
        format=manifests.FORMAT,
        target=manifest_source(target),
        drafters={
            part.method: part.drafter(settings, sha256[first.file], sha256) for part in drafting
        },
        tokenizer=manifest_tokenizer(tokenizer, sha256[tokenizer.file]),
        generation=_generation(target, settings.max_context),
        engines=specs,
        files=files,
        versions=_versions(),
        parity=None,
        quality=None,
        notes=notes,
    )


def _plan(
    target: Source,
    precisions: Precisions,
    memory: int,
    report: Progress,
    *,
    judge: bool,
    max_context: int,
) -> tuple[Plan, quality.Judged | None]:
    """Formats of the weights, and what fp32 says of the text that they will be judged by."""
    model = scope = None
    if judge or quantization.calibrates(target, precisions):
        import torch

        report("calibrate", 0, 2)
        model, scope = models.load(target, memory, torch.float32)
    judged = quality.reference(target, model, scope or "", max_context) if judge else None
    return quantization.plan(target, model, precisions, report), judged


def _trace(
    target: Source,
    chosen: TargetPart,
    drafting: Sequence[DrafterPart],
    settings: Settings,
    report: Progress,
) -> dict[str, Any]:
    from specgraphs.trace import build_fake

    count = 1 + len(drafting)
    report("trace", 0, count)
    fake = build_fake(*target.class_and_config(), settings.dtype)
    graphs = chosen.trace(fake, settings)
    for index, part in enumerate(drafting, start=1):
        report("trace", index, count)
        graphs |= part.trace(fake, settings)
    report("trace", count, count)
    return graphs


def _generation(target: Source, max_context: int) -> Generation:
    given = target.generation
    end = given.get("eos_token_id")
    ids = list(end) if isinstance(end, (list, tuple)) else [end]
    # Some checkpoints write -1 for "none"; an id outside of the vocabulary can never come.
    vocab = int(target.config.vocab_size)
    found = (_token_id(value, vocab) for value in ids)
    named = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version")
    defaults = {
        key: value
        for key, value in sorted(given.items())
        if key not in named and not key.startswith("_") and _is_plain(value)
    }
    return Generation(
        eos_token_ids=tuple(value for value in found if value is not None),
        bos_token_id=_token_id(given.get("bos_token_id"), vocab),
        pad_token_id=_token_id(given.get("pad_token_id"), vocab),
        max_context=max_context,
        defaults=defaults,
    )


def _check_generation(target: Source) -> None:
    """Raise SourceError for a default that no generation could run with."""
    try:
        generation_defaults.check(target.generation, int(target.config.vocab_size))
    except UsageError as error:
        raise SourceError(
            f"{target.id}: generation_config.json: {error}",
            hint="mend or remove that value in the checkpoint's generation_config.json",
        ) from error


def _is_plain(value: object) -> bool:
    """Whether it can stand in the manifest: a value of JSON, without NaN and infinity."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, (bool, int, str)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _token_id(value: object, vocab: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < vocab else None


def _versions() -> dict[str, str]:
    names = ("specrun", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")
    return {name: importlib.metadata.version(name) for name in names}


def memory_for_models(memory_gb: float = DEFAULT_MEMORY_GB) -> int:
    """Bytes that a comparison may take, and no more than can be had without swapping."""
    free = int(_available_memory() * MODEL_MEMORY_SHARE)
    return min(int(memory_gb * 1e9) - PROCESS_BYTES, free)


def _available_memory() -> int:
    """Bytes that can be allocated; file caches give way, so what they hold counts too."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        found = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(encoding="ascii"), re.M)
        if found is not None:
            return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
