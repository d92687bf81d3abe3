"""``build.json``: what is to be built of a folder, so that another machine can finish it.

Full TensorRT builds on the GPU that runs the engine. Where it or the GPU is not there, an export
leaves graphs, weights and this file, and ``specexport build`` does the rest on the device. It also
keeps what each plan was made from, so that only what changed is built again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from specexport.folder import replace_text
from specexport.trt.caches import PlanCache, why_damaged, why_stale
from specexport.trt.plans import (
    DEFAULT_LEVEL,
    BuildSettings,
    Built,
    MadeFrom,
    made_from,
    plan_file,
    sha256_of,
)
from specrun import limits
from specrun.contract import TensorSpec
from specrun.decode import DecodeError, decode, encode
from specrun.errors import FolderError
from specrun.plans import BACKENDS, Flavour, ProfileSpec

BUILD_MANIFEST = "build.json"
FORMAT = 1
NO_PLAN = "no plan was built here"
Builder = Callable[..., Built]


@dataclass(frozen=True)
class EngineBuild:
    """One engine to build. ``graph``, ``weights``: files of the folder; None: all in the graph."""

    graph: str
    weights: str | None
    precision: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ProfileSpec, ...]

    def __post_init__(self) -> None:
        for path in filter(None, (self.graph, self.weights)):
            limits.check_path(path)


@dataclass(frozen=True)
class BuildManifest:
    """``compute_capabilities``: one plan each, empty for the GPU that is present. ``built``: plans
    that were built, with what they were made from."""

    format: int
    flavour: Flavour
    compute_capabilities: tuple[int, ...]
    level: int
    engines: dict[str, EngineBuild]
    built: tuple[Built, ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format must be {FORMAT}, got {self.format}")
        if not self.engines:
            raise ValueError("engines: must not be empty")


def to_build(
    engines: dict[str, EngineBuild],
    flavour: Flavour,
    compute_capabilities: tuple[int, ...] = (),
    level: int = DEFAULT_LEVEL,
) -> BuildManifest:
    """A manifest of which nothing is built yet."""
    return BuildManifest(FORMAT, flavour, compute_capabilities, level, engines)


def write(folder: Path, manifest: BuildManifest) -> None:
    """Put ``build.json`` into the folder, whole or not at all."""
    replace_text(folder / BUILD_MANIFEST, json.dumps(encode(manifest), indent=1))


def read(folder: Path) -> BuildManifest:
    """What the folder's ``build.json`` says; FolderError naming the field that is wrong."""
    path = folder / BUILD_MANIFEST
    if not path.is_file():
        raise FolderError(
            f"{path} is not there", hint="export the folder with a backend of TensorRT"
        )
    if path.stat().st_size > limits.MAX_MANIFEST_BYTES:
        raise FolderError(
            f"{path} has more than {limits.MAX_MANIFEST_BYTES} bytes", hint="export it again"
        )
    try:
        return decode(BuildManifest, json.loads(path.read_text(encoding="utf-8")))
    except (DecodeError, ValueError, RecursionError) as error:
        raise FolderError(f"{path}: {error}", hint="export the folder again") from error


def later(flavour: Flavour, reason: str) -> str:
    """What to tell whoever exported: what is missing here, and how to finish."""
    how = f"specexport build FOLDER --backend {BACKENDS[flavour]}"
    return f"{NO_PLAN} ({reason}); finish on the device with {how}"


@dataclass(frozen=True)
class Task:
    """One plan of the folder. ``reason``: why it is built, None if it is up to date."""

    name: str
    engine: EngineBuild
    settings: BuildSettings
    source: MadeFrom
    old: Built | None
    reason: str | None

    @property
    def file(self) -> str:
        """The plan's file."""
        return plan_file(self.name, self.settings)


def tasks(
    folder: Path, manifest: BuildManifest, version: str, compute_capabilities: tuple[int, ...]
) -> Iterator[Task]:
    """Every plan, engine by engine, with the reason to build it.

    ``version``: of the TensorRT that builds; ``compute_capabilities``: the manifest's, or those of
    the GPU that is present. Raises FolderError if a graph or its weights are not there.
    """
    hashes: dict[str, str] = {}
    known = {plan.spec.file: plan for plan in manifest.built}
    for name, engine in manifest.engines.items():
        weights = None if engine.weights is None else _hash(folder, engine.weights, hashes)
        _hash(folder, engine.graph, hashes)
        for capability in compute_capabilities:
            settings = BuildSettings(
                manifest.flavour, capability, engine.profiles, engine.precision, manifest.level
            )
            source = made_from(folder / engine.graph, weights, version, settings)
            old = known.get(plan_file(name, settings))
            reason = "is new" if old is None else _why(old, source, folder)
            yield Task(name, engine, settings, source, old, reason)


def run(
    task: Task, folder: Path, out: Path, build: Builder, cache: PlanCache | None = None
) -> Built:
    """The plan of a task in the folder ``out``: what is there, what is cached, or a new one.

    ``build``: :func:`specexport.trt.builder.build_engine`.
    """
    path = out / task.file
    if task.old is not None and task.reason is None:
        return task.old
    found = cache.find(task.source, path) if cache is not None else None
    if found is not None:
        return found
    timing = None
    if cache is not None and task.settings.flavour == "tensorrt":
        timing = cache.timing(task.settings, task.source.version)
    made = build(
        folder / task.engine.graph,
        task.engine.inputs,
        task.engine.outputs,
        task.settings,
        path,
        weights_sha256=task.source.weights or None,
        timing_cache=timing,
    )
    if cache is not None:
        cache.store(made, path)
    return made


def with_built(manifest: BuildManifest, built: tuple[Built, ...]) -> BuildManifest:
    """The manifest with these plans in place of those of the same file."""
    files = {plan.spec.file for plan in built}
    kept = tuple(plan for plan in manifest.built if plan.spec.file not in files)
    whole = sorted((*kept, *built), key=lambda plan: plan.spec.file)
    return replace(manifest, built=tuple(whole))


def _why(old: Built, source: MadeFrom, folder: Path) -> str | None:
    return why_stale(old, source) or why_damaged(old, folder / old.spec.file)


def _hash(folder: Path, file: str, known: dict[str, str]) -> str:
    path = folder / file
    if not path.is_file():
        raise FolderError(f"{path} is not there", hint="copy or export the whole folder again")
    if file not in known:
        known[file] = sha256_of(path)
    return known[file]
