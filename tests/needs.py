"""Packages that some tests need and not every machine has.

In the environment that ``scripts/test`` makes they are there, so that to miss one is an error and
not a skipped test that nobody sees.
"""

from __future__ import annotations

import importlib
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

EXTRA = "pip install 'specrun[tensorrt-rtx]'"


def tensorrt_rtx() -> Any:
    """The module of TensorRT for RTX."""
    return _module("tensorrt_rtx")


def cuda_runtime() -> Any:
    """The module of CUDA's runtime; to call it takes no GPU, to get an answer does."""
    return _module("cuda.bindings.runtime")


def _module(name: str) -> Any:
    made_by_scripts = Path(sys.prefix, "installed-from").exists()
    if made_by_scripts and platform.system() == "Linux" and platform.machine() == "x86_64":
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=EXTRA)
