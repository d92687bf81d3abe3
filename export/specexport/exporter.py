"""From sources to an engine folder: reference, trace, stream the weights, check, appear."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexport import (
    auto_precision,
    card,
    engines,
    folder,
    licences,
    models,
    parity,
    parts,
    quality,
    quantization,
    reference,
)
from specexport.datafile import DATA_FILE, DataFile
from specexport.errors import SourceError
from specexport.fingerprint import fingerprint
from specexport.made import Sources
from specexport.options import AUTO, ExportOptions, memory_for_models
from specexport.parts.base import ACTIVATIONS, DrafterPart, Settings, TargetPart, file_name
from specexport.parts.record import manifest_source, manifest_tokenizer
from specexport.quantization import Plan, Precisions
from specexport.sources import Source
from specexport.weights import Weights
from specgraphs.formats import Activations
from specrun import defaults as generation_defaults
from specrun import manifest as manifests
from specrun.contract import FRONT_ENGINE, TARGET_ENGINE, DType
from specrun.errors import UsageError
from specrun.manifest import EngineSpec, Generation, Manifest
from specrun.options import available_threads
from specrun.plans import of_backend

if TYPE_CHECKING:
    from specexport.trt.building import Asked

Progress = Callable[[str, int, int], None]  # stage, done, total

MIN_CONTEXT = 24  # the graphs are traced with an example of this order
FIXED_CONTEXT = 4096  # of buffers of a fixed size, which are allocated and attended to whole
BLOCK = 5  # rows of a block to compare, where no drafter says how many it verifies
BYTES_PER_WEIGHT = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "int8": 1.125,
    "w8a8": 1.125,
    "int4": 0.75,
}
IN_BLOCKS = ("int8", "int4")  # a run on mapped weights unpacks all of them
NO_BF16 = (
    "not compared with transformers, as ONNX Runtime has no bf16 on a CPU; to compare the same"
    " graph export with --precision fp32, or beside int8 and int4 with --activations fp32"
)
NOT_JUDGED = (
    "perplexity was not measured, as that would take more memory: --memory {:.1f} or more does it"
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
    settings = _settings(target, options, precisions)
    asked = _asked(options) if options.is_tensorrt else None
    chosen, drafting = parts.plan(target, _listed(drafters), options)
    fits = _expected_bytes(target, precisions) <= options.model_memory
    for part in (chosen, *drafting):
        part.check()
    _check_generation(target)
    folder.check_target(out)
    compares = options.check and settings.dtype != "bf16"
    if options.check and not compares:
        notes += (NO_BF16,)
    seen = None
    if compares:
        report("reference", 0, 1)
        seen = reference.compute(
            target,
            drafting,
            max_context=settings.max_context,
            block=options.drafts + 1 if drafting else BLOCK,
            memory=options.model_memory,
            precision=settings.dtype,
            few=not fits and precisions.target in IN_BLOCKS,
        )
        report("reference", 1, 1)
    judge = compares and precisions.of_target != {"fp32"} and not options.skip_target
    if judge and not fits:
        notes += (NOT_JUDGED.format(_expected_bytes(target, precisions) / 1e9 + 1.5),)
    if options.skip_target:  # what drafters have of its weights is not calibrated
        plan, judged = Plan(*quantization.formats(target, precisions, {})), None
    else:
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
                made,
                parity=_compare(partial, made, target, drafting, seen, report, mapped=not fits),
            )
        else:
            parity.check_declared_io(partial, made)
        sources = (target, *_listed(drafters))
        told = card.text(made, {source.id: licences.find(source.path) for source in sources})
        (partial / card.CARD).write_text(told, encoding="utf-8")
        if asked is not None:  # of plans the card says nothing: others may be built later
            made = _with_plans(partial, made, *asked, report)
        (partial / manifests.MANIFEST).write_text(manifests.dumps(made), encoding="utf-8")
        manifests.read(partial)
    return made


def _precisions(
    target: Source, options: ExportOptions, report: Progress
) -> tuple[Precisions, tuple[str, ...]]:
    """What was asked for, or measured to be best here; and why."""
    precision = options.precision
    notes: tuple[str, ...] = ()
    if options.skip_target and precision == "w8a8":
        precision = "int8"  # as drafters have it
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


def _settings(target: Source, options: ExportOptions, precisions: Precisions) -> Settings:
    return Settings(
        precisions.target,
        precisions.drafter,
        context_limit(target, options),
        options.drafts,
        options.activations or _activations(target, options),
        options.is_tensorrt,
    )


def _asked(options: ExportOptions) -> tuple[Asked, str | None]:
    """The plans to build, and why that cannot be here. Raises DeviceError where TensorRT builds
    here, and not for these GPUs."""
    from specexport.trt import building

    asked = building.Asked(of_backend(options.backend), options.compute_capabilities)
    return asked, building.can_build(asked)


def _with_plans(
    partial: Path, made: Manifest, asked: Asked, obstacle: str | None, report: Progress
) -> Manifest:
    """The manifest with plans where they can be built here, else with a note of what is left.

    ``obstacle``: why they cannot.
    """
    from specexport.trt import building
    from specexport.trt.build_manifest import later

    building.check_graphs(made, partial)
    if obstacle is None:
        return building.add_plans(partial, made, asked, report)
    made = building.with_tasks(partial, made, asked)
    return replace(made, notes=(*made.notes, later(asked.flavour, obstacle)))


def _activations(target: Source, options: ExportOptions) -> Activations | None:
    """Beside integers TensorRT computes in half precision, that of the checkpoint."""
    if not options.is_tensorrt or options.precision not in ("int8", "int4"):
        return None
    return "bf16" if "bfloat16" in str(target.config.dtype) else "fp16"


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
    if not made.has_target_engine:
        weights += target.weights.total_nbytes
    mapped = weights > memory_for_models()
    seen = reference.compute(
        target,
        drafting,
        max_context=made.generation.max_context,
        block=most + 1 if most else BLOCK,
        memory=memory_for_models(),
        precision=ACTIVATIONS[made.target_engine.kv_dtype],
        few=mapped and made.target_engine.precision in IN_BLOCKS,
    )
    return _compare(out, made, target, drafting, seen, report, mapped=mapped)


def check_itself(out: Path) -> float | None:
    """Compare the engine folder ``out`` with itself; see :func:`parity.check_itself`.

    None for engines in bf16, of which inputs and outputs are checked only: they do not run here.
    """
    made = manifests.read(out, integrity="full")
    if made.target_engine.kv_dtype is DType.BFLOAT16:
        parity.check_declared_io(out, made)
        return None
    return parity.check_itself(out, made, threads=available_threads())


def _compare(
    folder: Path,
    made: Manifest,
    target: Source,
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
        target=target,
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
    wanted = options.max_context or (min(limit, FIXED_CONTEXT) if options.is_tensorrt else limit)
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
    if options.drafts + 2 > wanted:
        raise UsageError(
            f"num_draft: {options.drafts} drafts do not fit into a context of {wanted}",
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
    specs = chosen.specs(settings)
    of_target = dict(specs)
    for part in drafting:
        specs |= part.specs(settings)
    weights: dict[str, Weights] = {"target": target.weights}
    for part in drafting:
        weights |= part.weights
    sources = Sources(weights, plan.importance)
    fixed = {name: spec.fixed for name, spec in specs.items()}
    stored = quantization.apply(graphs, plan, sources, settings, fixed)
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
    bound_to = _bound_to(target, of_target, sha256)
    specs = {
        name: replace(
            spec,
            step_bytes=engines.step_bytes(graphs[name]),
            weights=stored[name],
            exact_rows=experts.exact_rows(graphs[name]),
        )
        if name in graphs
        else spec
        for name, spec in specs.items()
    }
    notes = quantization.notes(graphs.values(), sources) + quantization.kept_notes(plan)
    return Manifest(
        format=manifests.FORMAT,
        target=manifest_source(target),
        drafters={part.method: part.drafter(settings, bound_to, sha256) for part in drafting},
        tokenizer=manifest_tokenizer(tokenizer, sha256[tokenizer.file]),
        generation=_generation(target, settings.max_context),
        engines=specs,
        files=files,
        versions=_versions(),
        parity=None,
        quality=None,
        notes=notes,
    )


def _bound_to(target: Source, specs: Mapping[str, EngineSpec], sha256: Mapping[str, str]) -> str:
    """What drafters are bound to, see :attr:`specrun.manifest.Manifest.target_sha256`."""
    first = specs[TARGET_ENGINE] if TARGET_ENGINE in specs else specs[FRONT_ENGINE]
    return fingerprint(target.weights) if first.backend == "torch" else sha256[first.file]


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
