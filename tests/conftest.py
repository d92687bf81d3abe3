"""Shared fixtures. Nothing here or below reaches for a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import toys

import specrun

if TYPE_CHECKING:
    from exported import Exported, Pair

    from specexport.exporter import Precision


@pytest.fixture
def open_toy(tmp_path: Path) -> Iterator[Callable[..., specrun.Engine]]:
    """``open_toy(toy, **engine_options)``: write the toy's folder and open it."""
    engines: list[specrun.Engine] = []

    def make(toy: toys.Toy | None = None, **options: Any) -> specrun.Engine:
        folder = toys.write_folder(tmp_path / f"toy{len(engines)}", toy or toys.Toy())
        engines.append(specrun.load(folder, **{"threads": 1, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def toy_folder(tmp_path: Path) -> Callable[[toys.Toy], Path]:
    """``toy_folder(toy)``: write the toy's folder."""

    def make(toy: toys.Toy) -> Path:
        return toys.write_folder(tmp_path / "engines", toy)

    return make


@pytest.fixture(scope="session")
def exported_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """``exported_pair(pair, precision="fp32")``: a tiny pair, exported when it is first asked for.

    The folder is shared by all tests of the session: nobody changes it.
    """
    import exported  # torch and transformers, which most tests do without

    made: dict[tuple[Pair, str], Exported] = {}

    def make(pair: Pair, precision: Precision = "fp32") -> Exported:
        key = (pair, precision)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{exported.group(pair)}-{precision}")
            made[key] = exported.make(pair, folder, precision)
        return made[key]

    return make
