"""What is installed, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

from specrun.options import available_threads

PACKAGES = ("onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers", "jinja2", "click")
ONNXRUNTIMES = ("onnxruntime", "onnxruntime-gpu")


@dataclass(frozen=True)
class Report:
    """Versions (None: not installed), providers of ONNX Runtime, CPUs, and problems."""

    versions: dict[str, str | None]
    providers: tuple[str, ...]
    threads: int
    problems: tuple[str, ...]


def examine() -> Report:
    """Look at this installation."""
    versions = {"specrun": _version("specrun"), "python": platform.python_version()}
    versions |= {name: _version(name) for name in PACKAGES}
    problems = []
    installed = [name for name in ONNXRUNTIMES if versions[name] is not None]
    if len(installed) > 1:
        problems.append(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files:"
            " pip uninstall both, then install the one you want"
        )
    providers: tuple[str, ...] = ()
    try:
        import onnxruntime

        providers = tuple(onnxruntime.get_available_providers())
    except Exception as error:
        problems.append(f"onnxruntime does not load: {error}: pip install onnxruntime")
    return Report(versions, providers, available_threads(), tuple(problems))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
