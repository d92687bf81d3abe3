"""Shared fixtures. Nothing here or below reaches for a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import toys

import specrun


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
