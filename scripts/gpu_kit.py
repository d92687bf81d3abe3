"""What gpu_check.py needs, in a folder that can be carried to the machine with the GPU.

    kit.json                        what there is, tolerances
    RECIPE/checkpoints/             of the target and its drafters
    RECIPE/VARIANT/                 an engine folder
    RECIPE/VARIANT.programs.json    its graphs for PyTorch (dialect of TensorRT only)
    RECIPE/VARIANT.reference.*      what ONNX Runtime says of it on the CPU

Made with ``prepare``, which needs the extra ``export``; read with the runtime alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

FORMAT = 1
KIT = "kit.json"
CHECKPOINTS = "checkpoints"
Dialect = Literal["onnxruntime", "tensorrt-rtx"]


@dataclass(frozen=True)
class Variant:
    """A way to export. ``reference``: the variant whose results on the CPU are compared with; None:
    its own, as ONNX Runtime runs it there."""

    dialect: Dialect
    precision: str
    activations: str
    reference: str | None = None


VARIANTS: dict[str, Variant] = {
    "ort-fp32": Variant("onnxruntime", "fp32", "fp32"),
    "ort-fp16": Variant("onnxruntime", "fp16", "fp16"),
    "trt-fp16": Variant("tensorrt-rtx", "fp16", "fp16"),
    "trt-bf16": Variant("tensorrt-rtx", "bf16", "bf16", reference="ort-fp32"),
    "trt-int8": Variant("tensorrt-rtx", "int8", "fp16"),
    "trt-int4": Variant("tensorrt-rtx", "int4", "fp16"),
}
SIDES = 2  # that round: the device, and the CPU whose results are the reference
# bfloat16 has no reference in its own precision, and other drafts where two candidates are close.
LIKENESS = {"fp32": 0.95, "fp16": 0.9, "bf16": 0.6}


@dataclass(frozen=True)
class Kit:
    """A prepared folder. ``recipes``: methods of each; ``tolerances``: by activations,
    from TOLERANCE in specexport.parity; ``size``: of the vocabulary."""

    format: int
    recipes: dict[str, list[str]]
    variants: list[str]
    tolerances: dict[str, float]
    num_draft: int
    size: int
    versions: dict[str, str]


def read(folder: Path) -> Kit:
    """The kit in ``folder``. Raises ValueError where there is none, or one of another format."""
    path = folder / KIT
    if not path.is_file():
        raise ValueError(f"{folder}: has no {KIT}; make one with --prepare {folder}")
    kit = Kit(**json.loads(path.read_text(encoding="utf-8")))
    if kit.format != FORMAT:
        raise ValueError(f"{path}: has format {kit.format}, this script reads {FORMAT}")
    return kit


def reference_path(folder: Path, recipe: str, variant: str) -> Path:
    """Of the reference of a variant, without its endings."""
    return folder / recipe / f"{VARIANTS[variant].reference or variant}_reference"


def target_of(engines: Path) -> str:
    """Name of the checkpoint that an engine folder was exported from."""
    from specrun.manifest import read as read_manifest

    return read_manifest(engines).target.id


def programs_path(folder: Path, recipe: str, variant: str) -> Path:
    """Of the graphs as PyTorch reads them."""
    return folder / recipe / f"{variant}.programs.json"


def prepare(
    folder: Path,
    recipes: Sequence[str] | None = None,
    variants: Sequence[str] | None = None,
    *,
    plans: tuple[int, ...] = (),
) -> Kit:
    """Export everything and run it on the CPU. Processes share the work.

    ``recipes``, ``variants``: only these, with what they are compared with. ``plans``: compute
    capabilities of which TensorRT-RTX builds plans too. Raises ExportError, DeviceError.
    """
    from gpu_models import NUM_DRAFT, RECIPES, SIZE

    from specexport.parity import TOLERANCE

    recipes, wanted = list(recipes or RECIPES), list(variants or VARIANTS)
    needed = {VARIANTS[name].reference for name in wanted} - {None}
    wanted = [name for name in VARIANTS if name in wanted or name in needed]
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in recipes:
        _save(folder / recipe, recipe)
    _in_processes([(folder, recipe, variant) for recipe in recipes for variant in wanted])
    if plans:
        _build(folder, [(recipe, variant) for recipe in recipes for variant in wanted], plans)
    kit = Kit(
        FORMAT,
        {recipe: list(RECIPES[recipe].methods) for recipe in recipes},
        wanted,
        {name: SIDES * TOLERANCE[name] for name in ("fp32", "fp16", "bf16")},
        NUM_DRAFT,
        SIZE,
        _versions(),
    )
    (folder / KIT).write_text(json.dumps(asdict(kit), indent=1), encoding="utf-8")
    return kit


def _build(folder: Path, made: Sequence[tuple[str, str]], plans: tuple[int, ...]) -> None:
    from specexport.trt.building import Asked, build_folder

    for recipe, variant in made:
        if VARIANTS[variant].dialect == "tensorrt-rtx":
            build_folder(folder / recipe / variant, Asked("tensorrt_rtx", plans))


def _in_processes(jobs: Sequence[tuple[Path, str, str]]) -> None:
    """Every export in as many processes as there are CPUs; each imports PyTorch for itself."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from specrun.options import available_threads

    workers = min(available_threads(), len(jobs))
    if workers <= 2:
        for job in jobs:
            make(*job)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for made in [pool.submit(make, *job) for job in jobs]:
            made.result()


def _save(folder: Path, recipe: str) -> None:
    """The checkpoints of a recipe."""
    import gpu_models

    made = gpu_models.RECIPES[recipe]
    folder.mkdir(exist_ok=True)
    for name in (made.target, *made.drafters):
        gpu_models.save(name, folder / CHECKPOINTS)


def make(folder: Path, recipe: str, variant: str) -> None:
    """Export one variant of one recipe, and run it on the CPU."""
    import gpu_models
    import gpu_programs

    from specexport import exporter
    from specexport.options import ExportOptions
    from specexport.sources import resolve

    made, how, home = gpu_models.RECIPES[recipe], VARIANTS[variant], folder / recipe
    checkpoints = home / CHECKPOINTS
    quantized = how.precision in ("int8", "int4")
    options = ExportOptions(
        precision=how.precision,  # type: ignore[arg-type]
        num_draft=gpu_models.NUM_DRAFT,
        early_exit=made.early_exit,
        backend=how.dialect,
        activations=how.activations if quantized else None,  # type: ignore[arg-type]
        check=how.precision == "fp32",
    )
    drafters = [resolve(checkpoints / name) for name in made.drafters]
    exporter.export(resolve(checkpoints / made.target), drafters, home / variant, options)
    if how.dialect == "tensorrt-rtx":
        gpu_programs.write(home / variant, programs_path(folder, recipe, variant))
    if how.reference is None:
        _refer(folder, recipe, variant)


def _refer(folder: Path, recipe: str, variant: str) -> None:
    """What ONNX Runtime says on the CPU.

    In the TensorRT dialect by the operators that are written: fused, it rounds the activations
    beside weights in integers to 8 bits too, which costs more than half precision does.
    """
    import gpu_models
    import gpu_observe

    import specrun

    size, methods = gpu_models.SIZE, gpu_models.RECIPES[recipe].methods
    plainly = VARIANTS[variant].dialect == "tensorrt-rtx"
    with (
        _as_written() if plainly else contextlib.nullcontext(),
        specrun.load(folder / recipe / variant, threads=1, verify="engine") as engine,
    ):
        arrays = gpu_observe.logits(engine.target, size)
        texts = gpu_observe.texts(engine, methods, gpu_models.NUM_DRAFT, size)
    gpu_observe.write(reference_path(folder, recipe, variant), arrays, texts)


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """Within, ONNX Runtime opens graphs without its own optimizations."""
    import onnxruntime

    from specrun import ort

    usual = ort._session_options

    def plain(threads: int, *, spin: bool) -> Any:
        options = usual(threads, spin=spin)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options

    ort._session_options = plain
    try:
        yield
    finally:
        ort._session_options = usual


def _versions() -> dict[str, Any]:
    from importlib.metadata import version

    return {name: version(name) for name in ("specrun", "torch", "transformers", "onnxruntime")}
