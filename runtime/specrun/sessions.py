"""Opens the engines of a folder with whatever runs them on the device that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun import graph_file
from specrun.contract import TARGET_ENGINES
from specrun.devices import TENSORRT, Place
from specrun.errors import DeviceError
from specrun.manifest import Manifest
from specrun.options import EngineOptions
from specrun.runner import Session

if TYPE_CHECKING:
    from specrun.plans import Flavour, PlanSpec


def open_engine(folder: Path, manifest: Manifest, name: str, options: EngineOptions) -> Session:
    """A session of the engine called ``name``. Raises EngineError, FolderError."""
    if options.device in TENSORRT:
        return _open_plan(folder, manifest, name, options)
    return _open_onnx(folder, manifest, name, options)


def _open_plan(folder: Path, manifest: Manifest, name: str, options: EngineOptions) -> Session:
    from specrun import plans, trt_library
    from specrun.fixed import as_contract
    from specrun.trt_cuda import Cuda
    from specrun.trt_session import open_plan

    spec = manifest.engines[name]
    if spec.fixed is None:
        raise DeviceError(
            f"device: {options.device!r}: the engines of this folder are written for ONNX Runtime",
            hint=f"export them with specexport SOURCE --backend {options.device}",
        )
    flavour = plans.of_backend(options.device)
    library, cuda = _library(spec.plans, flavour), Cuda(options.device_id)
    device = trt_library.trt_device(flavour, library, cuda)
    plan = plans.pick(spec.plans, device, folder, name)
    graphs = options.cuda_graph and name in TARGET_ENGINES
    session = open_plan(folder / plan.file, spec, plan, device=options.device_id, graphs=graphs)
    return as_contract(session)


def _library(there: Sequence[PlanSpec], flavour: Flavour) -> Any:
    """TensorRT's module. Where it is not installed, and the folder has plans of another one only,
    the error says that too."""
    from specrun import plans, trt_library

    try:
        return trt_library.load(flavour)
    except DeviceError as error:
        found: set[Flavour] = {plan.flavour for plan in there}
        if not found or flavour in found:
            raise
        others = sorted(found)
        names = " and ".join(plans.PRODUCTS[other] for other in others)
        raise DeviceError(
            f"{error}; the folder has plans of {names} only",
            hint=f"use --device {plans.BACKENDS[others[0]]}, or {error.hint}",
        ) from error


def _open_onnx(folder: Path, manifest: Manifest, name: str, options: EngineOptions) -> Session:
    from specrun import ort

    assert options.threads is not None, "resolved when the folder was opened"
    spec = manifest.engines[name]
    path = folder / spec.file
    graph_file.check(path, folder, manifest.sizes)
    graph_file.check_versions(path, spec.requires.opset, spec.requires.ir_version)
    return ort.open_session(
        path,
        spec,
        threads=options.threads,
        place=Place.of(options, cuda_graph=name in TARGET_ENGINES),
        spin=options.spin,
    )
