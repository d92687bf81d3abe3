"""Opens the folders of a kit on what a part of gpu_check.py is about, and says what is missing."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_verdict import NotHere

import specrun
from specexport.trt.plans import DEFAULT_LEVEL
from specrun.options import available_threads
from specrun.plans import BACKENDS, PRODUCTS, Flavour, PlanSpec
from specrun.probes import Gpu, find_gpus, try_provider, try_tensorrt

CUDA = "CUDAExecutionProvider"


@dataclass(frozen=True)
class Machine:
    """Where the checks run. ``device``: ``cuda``, or ``cpu`` for the same checks without a GPU;
    ``gpu``: the first one; ``why_none``: why there is none."""

    device: str
    gpu: Gpu | None
    why_none: str = ""

    @classmethod
    def here(cls, device: str) -> Machine:
        """This one."""
        gpus = find_gpus()
        reason = f"{gpus.source}: {gpus.why}" if gpus.why else "no driver"
        return cls(device, gpus.found[0] if gpus.found else None, reason)

    def needs(self, *packages: str) -> str | None:
        """What is missing of a device and these packages, None where nothing is."""
        if self.device == "cuda" and self.gpu is None:
            return "no GPU was found"
        return lacking(packages)


def lacking(packages: tuple[str, ...]) -> str | None:
    """The packages that are not installed; None where all are."""
    missing = [name for name in packages if not _installed(name)]
    return f"not installed: {', '.join(missing)}" if missing else None


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def check_torch(device: str) -> None:
    """Raise NotHere where PyTorch has no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise NotHere(f"PyTorch {torch.__version__} finds no CUDA device")


def check_onnxruntime(device: str) -> None:
    """Raise NotHere where ONNX Runtime runs nothing on the device."""
    if device == "cpu":
        return
    import onnxruntime

    if CUDA not in onnxruntime.get_available_providers():
        raise NotHere(
            f"onnxruntime {onnxruntime.__version__} has no {CUDA}: it comes with onnxruntime-gpu"
        )
    if (why := try_provider(CUDA).why) is not None:
        raise NotHere(f"{CUDA} does not load: {why}")


def tensorrt_missing(machine: Machine, flavour: Flavour) -> str | None:
    """Why engines of this TensorRT cannot be run, None where they can."""
    if machine.device == "cpu":
        return f"{PRODUCTS[flavour]} runs on a GPU only"
    return machine.needs(flavour, "cuda.bindings") or _does_not_build(machine, flavour)


def _does_not_build(machine: Machine, flavour: Flavour) -> str | None:
    assert machine.gpu is not None
    found = next(one for one in try_tensorrt() if one.name == BACKENDS[flavour])
    if found.why is not None:
        return f"{PRODUCTS[flavour]} does not load: {found.why}"
    # Full TensorRT builds for the GPU that is there, and lists none.
    if found.builds_for and machine.gpu.sm not in found.builds_for:
        return f"{PRODUCTS[flavour]} does not build for SM {machine.gpu.sm}"
    return None


@contextlib.contextmanager
def by_torch(folder: Path, programs: Path, device: str) -> Iterator[specrun.Engine]:
    """The graphs of a folder in the TensorRT dialect, operator by operator."""
    from gpu_torch_graphs import engines_by_torch

    with (
        engines_by_torch(programs, device),
        specrun.load(folder, verify="engine") as engine,
    ):
        yield engine


@contextlib.contextmanager
def by_engine(folder: Path, device: str, **options: Any) -> Iterator[specrun.Engine]:
    """The folder through the public API, by its own engines."""
    common: dict[str, Any] = {
        "threads": min(4, available_threads()),
        "device": device,
        "verify": "engine",
    }
    with specrun.load(folder, **common | options) as engine:
        yield engine


def with_plans(
    folder: Path, work: Path, flavour: Flavour, sm: int, level: int = DEFAULT_LEVEL
) -> Path:
    """The folder where it has plans for this GPU; else a copy of it in ``work``, with plans that
    are built now. ``level``: how long TensorRT looks for faster kernels. Raises EngineError, and
    NotHere where nothing can build here."""
    from specrun.manifest import read

    engines = read(folder).engines.values()
    if all(any(_fits(plan, flavour, sm) for plan in engine.plans) for engine in engines):
        return folder
    if (missing := lacking(("onnx", "onnx_ir"))) is not None:
        raise NotHere(f"there are no plans for SM {sm}, and to build them: {missing}")
    from specexport.trt.building import Asked, build_folder

    made = work / f"{folder.parent.name}-{folder.name}-{flavour}"
    if not made.is_dir():
        shutil.copytree(folder, made)
        build_folder(made, Asked(flavour, (sm,), level))
    return made


def _fits(plan: PlanSpec, flavour: Flavour, sm: int) -> bool:
    return plan.flavour == flavour and plan.compute_capability == sm
