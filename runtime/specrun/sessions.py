"""Opens the engines of a folder with whatever runs them on the device that was asked for."""

from __future__ import annotations

from pathlib import Path

from specrun import graph_file
from specrun.contract import TARGET_ENGINES
from specrun.devices import TENSORRT, Place
from specrun.errors import DeviceError
from specrun.manifest import Manifest
from specrun.options import EngineOptions
from specrun.runner import Session


def open_engine(folder: Path, manifest: Manifest, name: str, options: EngineOptions) -> Session:
    """A session of the engine called ``name``. Raises EngineError, FolderError."""
    if options.device in TENSORRT:
        raise DeviceError(
            f"device: {options.device!r}: this folder has no TensorRT engines",
            hint=f"export them with specexport SOURCE --backend {options.device}",
        )
    return _open_onnx(folder, manifest, name, options)


def _open_onnx(folder: Path, manifest: Manifest, name: str, options: EngineOptions) -> Session:
    from specrun import ort

    assert options.threads is not None, "resolved when the folder was opened"
    spec = manifest.engines[name]
    path = folder / spec.file
    graph_file.check(path, folder, manifest.sizes)
    return ort.open_session(
        path,
        spec,
        threads=options.threads,
        place=Place.of(options, cuda_graph=name in TARGET_ENGINES),
        spin=options.spin,
    )
