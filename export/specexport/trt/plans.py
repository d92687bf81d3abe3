"""What a plan is made from and what is known of it, as JSON keeps it. Standard library only."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from specexport.errors import ExportError
from specrun.limits import check_path, check_sha256

FlavourName = Literal["tensorrt", "tensorrt-rtx"]
SizeName = Literal["batch", "rows", "wanted"]
BUILDER_LEVELS = range(6)  # TensorRT's builder_optimization_level
COMPUTE_CAPABILITY = re.compile(r"[1-9]\d{1,2}")


@dataclass(frozen=True)
class Range:
    """What one dynamic size may be in a run; the engine is tuned for ``opt``."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.opt <= self.max:
            told = f"{self.min}, {self.opt}, {self.max}"
            raise ExportError(
                f"a profile needs 1 <= min <= opt <= max, got {told}",
                hint="raise the largest size, or lower what the engine is tuned for",
            )


@dataclass(frozen=True)
class Profile:
    """The sizes that one kind of run has: ``prefill`` or ``decode``."""

    name: str
    sizes: dict[SizeName, Range]


@dataclass(frozen=True)
class BuildSettings:
    """How an engine is built.

    ``compute_capabilities``: those that the one plan is for, like ``"86"``. ``precision``: that of
    the graph, as the manifest calls it; the graph alone decides what is computed in which type.
    ``level``: TensorRT's builder_optimization_level.
    """

    flavour: FlavourName
    compute_capabilities: tuple[str, ...]
    profiles: tuple[Profile, ...]
    precision: str
    level: int = 3

    def __post_init__(self) -> None:
        if self.level not in BUILDER_LEVELS:
            raise ExportError(
                f"level must be in 0..{BUILDER_LEVELS[-1]}, got {self.level}",
                hint="3 is TensorRT's own default",
            )
        for capability in self.compute_capabilities or ("",):
            if not COMPUTE_CAPABILITY.fullmatch(capability):
                raise ExportError(
                    f"compute capability must be like '86', got {capability!r}",
                    hint="write the two numbers of 8.6 without the point",
                )
        if len({profile.name for profile in self.profiles}) != len(self.profiles):
            raise ExportError(
                "two profiles have the same name", hint="give each profile a name of its own"
            )


@dataclass(frozen=True)
class MadeFrom:
    """Everything that decides the bytes of a plan. ``graph``, ``weights``: sha256 of the files."""

    graph: str
    weights: str
    flavour: FlavourName
    version: str
    compute_capabilities: tuple[str, ...]
    precision: str
    level: int
    profiles: tuple[Profile, ...]

    @property
    def key(self) -> str:
        """One sha256 of it all."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def changed_since(self, older: MadeFrom) -> tuple[str, ...]:
        """Names of what is not as it was."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if getattr(self, name) != getattr(older, name))


@dataclass(frozen=True)
class Plan:
    """A finished plan, as the manifest lists it.

    ``file``: its name in the folder. ``size``: bytes. ``activation_bytes``: device memory that a
    run needs beside weights and bindings, None where the builder did not say. ``reproducible``:
    built at fixed addresses, so that the same builder on the same machine writes the same bytes.
    """

    file: str
    size: int
    sha256: str
    key: str
    made_from: MadeFrom
    activation_bytes: int | None
    reproducible: bool

    def __post_init__(self) -> None:
        check_path(self.file)
        check_sha256("sha256", self.sha256)
        if self.key != self.made_from.key:
            raise ValueError("key: is not that of made_from")


def plan_file(name: str, compute_capabilities: tuple[str, ...]) -> str:
    """File of an engine's plan: ``target.sm86.engine``, ``target.sm86-89.engine``."""
    return f"{name}.sm{'-'.join(compute_capabilities)}.engine"


def sha256_of(path: Path) -> str:
    """sha256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def made_from(
    onnx_path: Path, weights_sha256: str | None, version: str, settings: BuildSettings
) -> MadeFrom:
    """What a plan of this graph is made from.

    ``weights_sha256``: of the external data, None for a graph that has all in itself.
    ``version``: of TensorRT.
    """
    return MadeFrom(
        graph=sha256_of(onnx_path),
        weights=weights_sha256 or "",
        flavour=settings.flavour,
        version=version,
        compute_capabilities=settings.compute_capabilities,
        precision=settings.precision,
        level=settings.level,
        profiles=settings.profiles,
    )


def ranges(profile: Profile) -> Mapping[str, Range]:
    """The profile's ranges by the name of the size."""
    return {str(name): size for name, size in profile.sizes.items()}
