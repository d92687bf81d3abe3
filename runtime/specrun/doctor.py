"""What is installed, what of it works, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

from specrun.options import available_threads
from specrun.probes import Gpus, Provider, TensorRt, find_gpus, try_provider, try_tensorrt

ONNXRUNTIMES = ("onnxruntime", "onnxruntime-gpu")
# What is shown -> the packages that it may come in.
PACKAGES: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*ONNXRUNTIMES, "numpy", "tokenizers", "jinja2", "click")},
    "torch": ("torch",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt-rtx": ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
    "cuda-python": ("cuda-python", "cuda-bindings"),
}


@dataclass(frozen=True)
class Report:
    """Versions (None: not installed), providers of ONNX Runtime that run, those that do not, every
    TensorRT, GPUs, CPUs, and problems."""

    versions: dict[str, str | None]
    providers: tuple[str, ...]
    not_loading: tuple[Provider, ...]
    tensorrt: tuple[TensorRt, ...]
    gpus: Gpus
    threads: int
    problems: tuple[str, ...]


def examine() -> Report:
    """Look at this installation; takes seconds, as every device is tried."""
    versions = {"specrun": _version("specrun"), "python": platform.python_version()}
    versions |= {name: _first_version(packages) for name, packages in PACKAGES.items()}
    problems = _conflicts(versions)
    available: list[str] = []
    try:
        import onnxruntime

        available = list(onnxruntime.get_available_providers())
    except Exception as error:
        problems.append(f"onnxruntime does not load: {error}: pip install onnxruntime")
    tried = [try_provider(name) for name in available]
    return Report(
        versions,
        tuple(provider.name for provider in tried if provider.why is None),
        tuple(provider for provider in tried if provider.why is not None),
        try_tensorrt(),
        find_gpus(),
        available_threads(),
        tuple(problems),
    )


def lines(report: Report) -> dict[str, str]:
    """The report as lines of text, by what each is about."""
    shown = {name: version or "not installed" for name, version in report.versions.items()}
    shown["providers"] = ", ".join(report.providers) or "-"
    for provider in report.not_loading:
        shown[provider.name] = f"does not load: {provider.why}"
    for flavour in report.tensorrt:
        shown[f"engines of {flavour.name}"] = _tensorrt_line(flavour)
    for index, gpu in enumerate(report.gpus.found):
        shown[f"GPU {index}"] = (
            f"{gpu.name}, SM {gpu.sm}, driver {gpu.driver}, {gpu.memory_bytes / 2**30:.1f} GiB"
        )
    if not report.gpus.found:
        source, why = report.gpus.source, report.gpus.why
        shown["GPUs"] = f"none found ({source}: {why})" if source else "none found"
    return shown | {"threads": str(report.threads)}


def _tensorrt_line(flavour: TensorRt) -> str:
    if flavour.why is not None:
        return f"does not load: {flavour.why}"
    sms = ", ".join(map(str, flavour.builds_for))
    return f"{flavour.version} loads" + (f", builds for SM {sms}" if sms else "")


def _conflicts(versions: dict[str, str | None]) -> list[str]:
    if any(versions[name] is None for name in ONNXRUNTIMES):
        return []
    return [
        "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files:"
        " pip uninstall both, then install the one you want"
    ]


def _first_version(packages: tuple[str, ...]) -> str | None:
    found = (_version(package) for package in packages)
    return next((version for version in found if version is not None), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
