"""Plans of TensorRT: what the manifest says of each, and which one runs on a device.

Standard library only. A plan is tied to what built it: TensorRT refuses one of another release,
and one that was compiled for another compute capability.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from specrun import limits
from specrun.contract import TensorSpec
from specrun.errors import EngineError

Flavour = Literal["tensorrt", "tensorrt_rtx"]  # names of the Python modules
ProfileName = Literal["prefill", "decode"]
PRODUCTS: dict[Flavour, str] = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
BACKENDS: dict[Flavour, str] = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}
PROFILES: tuple[ProfileName, ...] = ("prefill", "decode")  # in the order of their numbers
MAX_AXES = 8
MAX_INPUTS = 4 * limits.MAX_LAYERS
Shape = tuple[int, ...]


def of_backend(backend: str) -> Flavour:
    """The flavour of the backend ``tensorrt`` or ``tensorrt-rtx``."""
    return next(flavour for flavour, name in BACKENDS.items() if name == backend)


@dataclass(frozen=True)
class ShapeRange:
    """The shapes that an input may have under a profile; ``opt`` is what it was tuned for."""

    min: Shape
    opt: Shape
    max: Shape

    def __post_init__(self) -> None:
        if not len(self.min) == len(self.opt) == len(self.max) <= MAX_AXES:
            raise ValueError(f"min, opt and max must have as many axes, at most {MAX_AXES}")
        for low, best, high in zip(self.min, self.opt, self.max, strict=True):
            if not 0 <= low <= best <= high <= limits.MAX_CONTEXT:
                raise ValueError(f"must be 0 <= min <= opt <= max, got {low}, {best}, {high}")

    def holds(self, shape: Shape) -> bool:
        """Whether ``shape`` lies in the range."""
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )

    def __str__(self) -> str:
        return f"{list(self.min)}..{list(self.max)}"


@dataclass(frozen=True)
class ProfileSpec:
    """An optimization profile: ranges of its inputs by name, of those with sizes to choose."""

    name: ProfileName
    inputs: dict[str, ShapeRange]

    def __post_init__(self) -> None:
        limits.check_within("inputs", len(self.inputs), 1, MAX_INPUTS)

    def misfits(self, shapes: Mapping[str, Shape]) -> list[str]:
        """Names of the inputs whose shapes lie outside."""
        return [
            name
            for name, shape in shapes.items()
            if name in self.inputs and not self.inputs[name].holds(shape)
        ]


@dataclass(frozen=True)
class PlanSpec:
    """A file that TensorRT built of one engine, for one kind of device.

    ``version``: of what built it. ``compute_capability``: 10 * major + minor. ``size`` in bytes.
    ``key``: what tells its engine and settings from others. ``profiles``: in the plan's order.
    """

    flavour: Flavour
    version: str
    compute_capability: int
    file: str
    size: int
    sha256: str
    key: str
    profiles: tuple[ProfileSpec, ...]

    def __post_init__(self) -> None:
        limits.check_path(self.file)
        limits.check_sha256("sha256", self.sha256)
        limits.check_sha256("key", self.key)
        limits.check_within("size", self.size, 1, limits.MAX_BYTES)
        limits.check_within("compute_capability", self.compute_capability, 10, 999)
        if not re.fullmatch(r"\d{1,4}(\.\d{1,6}){1,3}", self.version):
            raise ValueError(f"version must be numbers and dots, got {self.version[:60]!r}")
        names = tuple(profile.name for profile in self.profiles)
        if not names or (names != PROFILES[: len(names)] and names != ("decode",)):
            raise ValueError(f"profiles must be {list(PROFILES)} or ['decode'], got {list(names)}")


@dataclass(frozen=True)
class TrtDevice:
    """Where a plan is to run: what is installed, and the GPU, by its ``name``."""

    flavour: Flavour
    version: str
    compute_capability: int
    name: str

    def __str__(self) -> str:
        return f"{PRODUCTS[self.flavour]} {self.version} (SM {self.compute_capability})"


def why_not(plan: PlanSpec, device: TrtDevice) -> str | None:
    """Why ``plan`` does not run on ``device``; None where it does."""
    if plan.flavour != device.flavour:
        return f"is a plan of {PRODUCTS[plan.flavour]}, asked for is {PRODUCTS[device.flavour]}"
    if plan.version != device.version:
        return (
            f"was built by {PRODUCTS[plan.flavour]} {plan.version}, {device.version} is installed,"
            " and a plan runs on the release that built it only"
        )
    if plan.compute_capability != device.compute_capability:
        return (
            f"was built for SM {plan.compute_capability},"
            f" {device.name} is SM {device.compute_capability}"
        )
    return None


def pick(plans: Sequence[PlanSpec], device: TrtDevice, folder: Path, engine: str) -> PlanSpec:
    """The plan of ``engine`` for ``device``. Raises EngineError with what is wrong with each."""
    reasons = []
    for plan in plans:
        reason = why_not(plan, device)
        if reason is None:
            return plan
        reasons.append(f"{plan.file} {reason}")
    refuse(engine, "; ".join(reasons) or "the folder has no plan of it", folder, device.flavour)


def refuse(name: str, reason: str, folder: Path, flavour: Flavour) -> NoReturn:
    """Raise EngineError for a plan that must be built anew."""
    raise EngineError(f"{name}: {reason}", hint=build_hint(folder, flavour))


def build_hint(folder: Path, flavour: Flavour, capability: int | None = None) -> str:
    """How to build plans: for this device, or for the compute capability that is known."""
    built = f"specexport build {folder} --backend {BACKENDS[flavour]}"
    if capability is None:
        return f"build it here: {built}"
    return f"build it again: {built} --compute-capability {capability}"


def most(plan: PlanSpec, inputs: Sequence[TensorSpec], size: str) -> int | None:
    """The largest that a dynamic ``size`` may be under any profile; None if no input has it."""
    found = [
        profile.inputs[tensor.name].max[tensor.shape.index(size)]
        for profile in plan.profiles
        for tensor in inputs
        if size in tensor.shape and tensor.name in profile.inputs
    ]
    return max(found, default=None)


def fitting_profile(plan: PlanSpec, shapes: Mapping[str, Shape]) -> int:
    """Number of the profile for inputs of these ``shapes``: ``decode`` where they fit it.

    Raises EngineError naming the input that fits none, and the limits.
    """
    for number in reversed(range(len(plan.profiles))):
        if not plan.profiles[number].misfits(shapes):
            return number
    largest = plan.profiles[0]
    name = largest.misfits(shapes)[0]
    ranges = ", ".join(f"{p.name} {p.inputs[name]}" for p in plan.profiles if name in p.inputs)
    raise EngineError(
        f"{plan.file}: {name} has shape {list(shapes[name])}, the plan takes {ranges}",
        hint="use shorter blocks (prefill_chunk, num_assistant_tokens), or build larger profiles",
    )
