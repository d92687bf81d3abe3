"""What a plan is made from, and how it is built, as JSON keeps it. Standard library only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path

from specrun import limits
from specrun.decode import encode
from specrun.errors import UsageError
from specrun.plans import Flavour, PlanSpec, ProfileSpec

MAX_LEVEL = 5  # of TensorRT's builder_optimization_level
DEFAULT_LEVEL = 3  # TensorRT's own


@dataclass(frozen=True)
class BuildSettings:
    """How an engine is built, apart from what it computes.

    ``compute_capability``: 10 * major + minor, one per plan. ``precision``: that of the graph, as
    the manifest calls it; TensorRT takes every type from the graph. ``profiles``: empty for an
    engine without dynamic sizes. ``level``: TensorRT's builder_optimization_level.
    """

    flavour: Flavour
    compute_capability: int
    profiles: tuple[ProfileSpec, ...]
    precision: str
    level: int = DEFAULT_LEVEL

    def __post_init__(self) -> None:
        if not 0 <= self.level <= MAX_LEVEL:
            raise UsageError(
                f"level must be in 0..{MAX_LEVEL}, got {self.level}",
                hint=f"{DEFAULT_LEVEL} is TensorRT's own default",
            )
        limits.check_within("compute_capability", self.compute_capability, 10, 999)


@dataclass(frozen=True)
class MadeFrom:
    """Everything that decides the bytes of a plan.

    ``graph``, ``weights``: sha256 of the ONNX file and of its external data (empty: it has none).
    ``version``: of TensorRT.
    """

    graph: str
    weights: str
    version: str
    settings: BuildSettings

    @property
    def key(self) -> str:
        """One sha256 of it all."""
        text = json.dumps(encode(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def changed_since(self, older: MadeFrom) -> tuple[str, ...]:
        """What is not as it was: ``graph``, ``weights``, ``version``, or names of settings."""
        outer = _differences(self, older, ("graph", "weights", "version"))
        names = tuple(field.name for field in fields(self.settings))
        return outer + _differences(self.settings, older.settings, names)


@dataclass(frozen=True)
class Built:
    """A finished plan. ``spec``: what the manifest says of it.

    ``activation_bytes``: device memory of a run beside weights and bindings, None where the builder
    did not say. ``reproducible``: built at fixed addresses, so that the same builder on the same
    machine writes the same bytes again.
    """

    spec: PlanSpec
    made_from: MadeFrom
    activation_bytes: int | None
    reproducible: bool

    def __post_init__(self) -> None:
        if self.spec.key != self.made_from.key:
            raise ValueError("spec.key: is not that of made_from")


def plan_file(engine: str, settings: BuildSettings) -> str:
    """File of an engine's plan: ``target.sm86.engine`` for RTX, ``target.sm86.plan`` for full
    TensorRT, so that a folder may have both."""
    ending = "engine" if settings.flavour == "tensorrt_rtx" else "plan"
    return f"{engine}.sm{settings.compute_capability}.{ending}"


def sha256_of(path: Path) -> str:
    """sha256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def made_from(
    onnx_path: Path, weights_sha256: str | None, version: str, settings: BuildSettings
) -> MadeFrom:
    """What a plan of this graph is made from.

    ``weights_sha256``: of the external data, None for a graph that has all in itself. ``version``:
    of TensorRT.
    """
    return MadeFrom(sha256_of(onnx_path), weights_sha256 or "", version, settings)


def _differences(new: object, old: object, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if getattr(new, name) != getattr(old, name))
