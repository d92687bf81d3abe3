"""Which TensorRT is installed, its version, and what it can build for."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from types import ModuleType
from typing import get_args

from specrun.errors import DeviceError
from specrun.plans import BACKENDS, PRODUCTS, Flavour

FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)  # in the order in which they are looked for


@dataclass(frozen=True)
class Installed:
    """An installed TensorRT."""

    flavour: Flavour
    version: str

    @property
    def builds_without_gpu(self) -> bool:
        """Whether it builds ahead of time, on a machine without the GPU."""
        return self.flavour == "tensorrt_rtx"

    def __str__(self) -> str:
        return f"{PRODUCTS[self.flavour]} {self.version}"


def find(asked: Flavour | None = None) -> Installed:
    """The TensorRT asked for, or the first that is installed: full TensorRT, else that for RTX.

    Raises DeviceError where there is none, or where it does not load.
    """
    for flavour in FLAVOURS if asked is None else (asked,):
        if importlib.util.find_spec(flavour) is not None:
            return Installed(flavour, str(load(flavour).__version__))
    extras = [BACKENDS[flavour] for flavour in (FLAVOURS if asked is None else (asked,))]
    what = "TensorRT" if asked is None else PRODUCTS[asked]
    raise DeviceError(
        f"{what} is not installed",
        hint=" or ".join(f"pip install 'specrun[{extra}]'" for extra in extras),
    )


def load(flavour: Flavour) -> ModuleType:
    """Its module; DeviceError with the reason if the libraries do not load."""
    try:
        return importlib.import_module(flavour)
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(
            f"{PRODUCTS[flavour]}: the Python package {flavour} does not load: {error}",
            hint=f"pip install --force-reinstall 'specrun[{BACKENDS[flavour]}]'",
        ) from error


def capabilities(installed: Installed) -> tuple[int, ...]:
    """Compute capabilities that it can build for here, 10 * major + minor, in rising order.

    All it knows if it builds ahead of time, otherwise that of the GPU which is present.
    """
    if not installed.builds_without_gpu:
        return (present_capability(),)
    names = load(installed.flavour).ComputeCapability.__members__
    numbers = (re.fullmatch(r"SM(\d+)", name) for name in names)
    return tuple(sorted(int(found[1]) for found in numbers if found))


def check_capability(installed: Installed, asked: int) -> None:
    """DeviceError if it does not build for this compute capability here."""
    known = capabilities(installed)
    if asked not in known:
        raise DeviceError(
            f"{installed} does not build for compute capability {asked} here",
            hint=f"it builds for {', '.join(map(str, known))}",
        )


def present_capability() -> int:
    """Compute capability of the first GPU, 10 * major + minor; DeviceError if there is none."""
    from specrun.trt_cuda import Cuda

    try:
        return Cuda().compute_capability
    except DeviceError as error:  # which speaks of an option that runs have
        raise DeviceError(str(error).removeprefix("device: "), hint=error.hint) from error
