"""Which TensorRT is installed, its version, and what it can build for."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from types import ModuleType
from typing import get_args

from specexport.trt.plans import FlavourName
from specrun.errors import DeviceError

MODULES: dict[FlavourName, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
LATER = "or build the folder where it is: specexport build DIR --backend"


@dataclass(frozen=True)
class Flavour:
    """An installed TensorRT. ``name``: also that of its backend and of its extra."""

    name: FlavourName
    version: str

    @property
    def module(self) -> str:
        """Name of its Python module."""
        return MODULES[self.name]

    @property
    def builds_without_gpu(self) -> bool:
        """Whether it builds ahead of time, on a machine without the GPU."""
        return self.name == "tensorrt-rtx"


def find(asked: FlavourName | None = None) -> Flavour:
    """The TensorRT asked for, or the first that is installed: ``tensorrt``, else ``tensorrt-rtx``.

    Raises DeviceError where there is none, or where it does not load.
    """
    names = get_args(FlavourName) if asked is None else (asked,)
    for name in names:
        if importlib.util.find_spec(MODULES[name]) is not None:
            return Flavour(name, str(load(name).__version__))
    what = "TensorRT" if asked is None else f"{asked!r}"
    extra = names[-1]
    raise DeviceError(
        f"{what} is not installed (no module {MODULES[extra]!r})",
        hint=f"pip install 'specrun[{extra}]', {LATER} {extra}",
    )


def load(name: FlavourName) -> ModuleType:
    """Its module; DeviceError with the reason if the libraries do not load."""
    try:
        return importlib.import_module(MODULES[name])
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(
            f"{MODULES[name]!r} does not load: {error}",
            hint=f"pip install --force-reinstall 'specrun[{name}]', {LATER} {name}",
        ) from error


def capabilities(flavour: Flavour) -> tuple[str, ...]:
    """Compute capabilities that it can build for here, like ``"86"``, in rising order.

    All it knows if it builds ahead of time, otherwise that of the GPU which is present.
    """
    if not flavour.builds_without_gpu:
        return (present_capability(),)
    names = load(flavour.name).ComputeCapability.__members__
    numbers = (re.fullmatch(r"SM(\d+)", name) for name in names)
    return tuple(sorted((found[1] for found in numbers if found), key=int))


def present_capability() -> str:
    """Compute capability of the first GPU; DeviceError if there is none."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise DeviceError(
            f"cuda-python does not load: {error}", hint="pip install cuda-python"
        ) from error
    numbers = []
    for attribute in ("Major", "Minor"):
        wanted = getattr(
            runtime.cudaDeviceAttr, f"cudaDevAttrComputeCapability{attribute}"
        )
        status, value = runtime.cudaDeviceGetAttribute(wanted, 0)
        if status != runtime.cudaError_t.cudaSuccess:
            raise DeviceError(
                f"there is no GPU here ({runtime.cudaGetErrorString(status)[1].decode()})",
                hint=f"full TensorRT builds on the machine that runs the engine, {LATER} tensorrt",
            )
        numbers.append(value)
    return f"{numbers[0]}{numbers[1]}"


def check_capabilities(flavour: Flavour, asked: tuple[str, ...]) -> None:
    """DeviceError if one of them cannot be built for here."""
    known = capabilities(flavour)
    for capability in asked:
        if capability not in known:
            raise DeviceError(
                f"{flavour.name} {flavour.version} does not build for compute capability "
                f"{capability!r} here",
                hint=f"it builds for {', '.join(known)}",
            )
