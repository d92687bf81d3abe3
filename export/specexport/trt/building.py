"""Plans for the engines of a folder: which, where they go, and what the manifest says of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specexport import folder
from specexport.card import CARD
from specexport.datafile import DATA_FILE
from specexport.errors import ExportError
from specexport.parts.base import ACTIVATIONS
from specexport.trt import build_manifest, flavours
from specexport.trt.build_manifest import (
    BUILD_MANIFEST,
    NO_PLAN,
    BuildManifest,
    EngineBuild,
    Task,
)
from specexport.trt.builder import build_engine
from specexport.trt.caches import PlanCache, why_damaged
from specexport.trt.flavours import Installed
from specexport.trt.plans import DEFAULT_LEVEL, Built
from specexport.trt.profiles import Sizes, profiles
from specgraphs import static_rules
from specrun import manifest as manifests
from specrun.errors import DeviceError, FolderError
from specrun.manifest import EngineSpec, FileEntry, Manifest
from specrun.options import PREFILL_CHUNK
from specrun.plans import BACKENDS, Flavour, PlanSpec
from specrun.tuning import TUNING

Progress = Callable[[str, int, int], None]
MAX_DRAFT = 31  # drafted tokens that one run can verify; prompt lookup makes long proposals


@dataclass(frozen=True)
class Asked:
    """What is to be built. ``capabilities``: 10 * major + minor each; none: of the GPU that is
    here. ``level``: TensorRT's builder_optimization_level. ``cache``: folder of earlier plans."""

    flavour: Flavour
    capabilities: tuple[int, ...] = ()
    level: int = DEFAULT_LEVEL
    cache: Path | None = None


def check_graphs(made: Manifest, where: Path) -> None:
    """Raise EngineError where TensorRT would refuse a graph, or compute something else."""
    for name, spec in made.engines.items():
        static_rules.check(where / spec.file, name)


def can_build(asked: Asked) -> str | None:
    """Why plans cannot be built here; None where they can.

    Raises DeviceError where TensorRT builds here, and not for what is asked.
    """
    try:
        installed = flavours.find(asked.flavour)
        if not installed.builds_without_gpu or not asked.capabilities:
            flavours.check_capability(installed, flavours.present_capability())
    except DeviceError as error:
        return str(error)
    for capability in asked.capabilities:
        flavours.check_capability(installed, capability)
    return None


def with_tasks(where: Path, made: Manifest, asked: Asked) -> Manifest:
    """Put down what is to be built, for a device where it can be; the manifest with that file."""
    planned = _tasks(where, made, asked)
    build_manifest.write(where, planned)
    return _described(where, made, planned)


def add_plans(where: Path, made: Manifest, asked: Asked, report: Progress) -> Manifest:
    """Build what is not up to date in the folder ``where``; its manifest with all plans.

    Raises DeviceError where TensorRT or the GPU is not there, EngineError, FolderError.
    """
    installed = flavours.find(asked.flavour)
    wanted = asked.capabilities or (_present(installed),)
    for capability in wanted:
        flavours.check_capability(installed, capability)
    check_graphs(made, where)
    planned = _tasks(where, made, replace(asked, capabilities=wanted))
    tasks = list(build_manifest.tasks(where, planned, installed.version, wanted))
    _check_others(where, planned, tasks)
    cache = None if asked.cache is None else PlanCache(asked.cache)
    built: list[Built] = []
    for index, task in enumerate(tasks):
        report("build", index, len(tasks))
        built.append(build_manifest.run(task, where, where, build_engine, cache))
    report("build", len(tasks), len(tasks))
    done = build_manifest.with_built(planned, tuple(built))
    build_manifest.write(where, done)
    return _described(where, made, done)


def build_folder(out: Path, asked: Asked, progress: Progress | None = None) -> Manifest:
    """Add plans to the engine folder ``out``, which changes at once or not at all.

    Raises FolderError, ExportError for a folder in the dialect of ONNX Runtime, and what
    ``add_plans`` does.
    """
    report = progress or (lambda stage, done, total: None)
    out = out.resolve()  # its name and what is beside it count, also of "." and of a link
    made = manifests.read(out, check_plans=False)
    if any(spec.fixed is None for spec in made.engines.values()):
        raise ExportError(
            f"{out}: its graphs are written for ONNX Runtime",
            hint=f"export them with specexport SOURCE --backend {BACKENDS[asked.flavour]}",
        )
    with folder.atomic(out, card_goes_along=True) as partial:
        _link_all(made, out, partial)
        made = add_plans(partial, made, asked, report)
        text = manifests.dumps(made)
        folder.replace_text(partial / manifests.MANIFEST, text)
        manifests.read(partial)
    return made


def _present(installed: Installed) -> int:
    try:
        return flavours.present_capability()
    except DeviceError as error:
        if not installed.builds_without_gpu:
            raise
        known = ", ".join(map(str, flavours.capabilities(installed)))
        raise DeviceError(
            f"{error}, and no compute capability was given to build for",
            hint=f"give --compute-capability, one of {known}",
        ) from error


def _tasks(where: Path, made: Manifest, asked: Asked) -> BuildManifest:
    """What is to be built, and what of it is built already."""
    engines = {name: _engine_build(spec, made) for name, spec in made.engines.items()}
    known = build_manifest.read(where) if (where / BUILD_MANIFEST).is_file() else None
    before = known.compute_capabilities if known and known.flavour == asked.flavour else ()
    wanted = tuple(sorted({*before, *asked.capabilities}))
    planned = build_manifest.to_build(engines, asked.flavour, wanted, asked.level)
    return planned if known is None else build_manifest.with_built(planned, known.built)


def _check_others(where: Path, planned: BuildManifest, tasks: Sequence[Task]) -> None:
    """Raise FolderError where a plan that stays, as it is of another device, is not whole."""
    files = {task.file for task in tasks}
    for one in planned.built:
        reason = None if one.spec.file in files else why_damaged(one, where / one.spec.file)
        if reason is not None:
            raise FolderError(
                f"{one.spec.file}: the plan {reason}",
                hint=f"build it too: --compute-capability {one.spec.compute_capability}, beside"
                " the others; or export the folder again",
            )


def _engine_build(spec: EngineSpec, made: Manifest) -> EngineBuild:
    inputs, outputs = spec.file_io
    most = max((d.num_assistant_tokens for d in made.drafters.values()), default=1)
    sizes = Sizes(PREFILL_CHUNK, MAX_DRAFT, draft=min(most, MAX_DRAFT))
    return EngineBuild(
        graph=spec.file,
        weights=DATA_FILE,
        precision=f"{spec.precision}, activations {ACTIVATIONS[spec.kv_dtype]}",
        inputs=inputs,
        outputs=outputs,
        profiles=profiles(inputs, sizes),
    )


def _described(where: Path, made: Manifest, done: BuildManifest) -> Manifest:
    """The manifest with every plan, and the files that came with them."""
    plans = {name: tuple(_plans_of(name, done.built)) for name in made.engines}
    engines = {name: replace(spec, plans=plans[name]) for name, spec in made.engines.items()}
    names = [plan.file for own in plans.values() for plan in own]
    new = {name: _entry(where, name) for name in (*names, BUILD_MANIFEST)}
    kept = [entry for entry in made.files if entry.path not in new and not _is_plan(entry, made)]
    files = sorted((*kept, *new.values()), key=lambda entry: entry.path)
    left = tuple(note for note in made.notes if not (names and note.startswith(NO_PLAN)))
    return replace(made, engines=engines, files=tuple(files), notes=left)


def _plans_of(name: str, built: Sequence[Built]) -> list[PlanSpec]:
    own = [one.spec for one in built if one.spec.file.rpartition(".sm")[0] == name]
    return sorted(own, key=lambda plan: (plan.compute_capability, plan.flavour))


def _is_plan(entry: FileEntry, made: Manifest) -> bool:
    return any(plan.file == entry.path for spec in made.engines.values() for plan in spec.plans)


def _entry(where: Path, name: str) -> FileEntry:
    path = where / name
    return FileEntry(name, path.stat().st_size, manifests.sha256_of(path))


def _link_all(made: Manifest, source: Path, out: Path) -> None:
    """Every file of a folder in another one, without a copy of its bytes where that can be.

    Of plans only those that are there: the others are built.
    """
    for name in (manifests.MANIFEST, TUNING, CARD, *made.sizes):
        path, place = source / name, out / name
        if not path.is_file():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), place)
        except OSError:  # a file system without links
            shutil.copyfile(path, place)
