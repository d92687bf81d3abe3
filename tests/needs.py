"""What some tests need and not every machine has.

In the environment that ``scripts/test`` makes the packages are there, so that to miss one is an
error and not a skipped test that nobody sees. A browser is installed by ``.ci/run``, which says so
with the variable ``NEEDS_BROWSER``; elsewhere its tests are skipped where there is none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specrun

EXTRA = "pip install 'specrun[tensorrt-rtx]'"
DEV = "pip install 'specrun[dev]'"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def tensorrt_rtx() -> Any:
    """The module of TensorRT for RTX."""
    return _module("tensorrt_rtx")


def cuda_runtime() -> Any:
    """The module of CUDA's runtime; to call it takes no GPU, to get an answer does."""
    return _module("cuda.bindings.runtime")


def playwright() -> Any:
    """The module that drives a browser."""
    return _module("playwright.sync_api", everywhere=True)


def axe() -> Any:
    """The module that looks for what keeps people with other senses out of a page."""
    return _module("axe_playwright_python.sync_playwright", everywhere=True)


def chromium() -> Path:
    """The machine's Chromium, or Chrome."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return Path(found)
    missing = f"no browser: none of {', '.join(BROWSERS)} is there"
    if os.environ.get("NEEDS_BROWSER"):
        raise RuntimeError(missing)
    pytest.skip(missing)


@contextlib.contextmanager
def integer_products() -> Iterator[None]:
    """Skip what opens an engine in w8a8 on a processor that would compute it wrongly.

    There the runtime refuses to (``test_a_processor_without_integer_products``).
    """
    if not _overflows():
        yield
        return
    try:
        yield
    except specrun.EngineError as error:
        if "w8a8 needs 8-bit products" in str(error):
            integer_arithmetic()
        raise


def integer_arithmetic() -> None:
    """Skip where 8-bit products overflow."""
    if _overflows():
        pytest.skip("w8a8: this processor's 8-bit products overflow")


@functools.cache
def _overflows() -> bool:
    from specrun import ort

    return ort.lacks_integer_products()


def _module(name: str, *, everywhere: bool = False) -> Any:
    """``everywhere``: it has packages for all machines, not only for Linux on x86-64."""
    here = platform.system() == "Linux" and platform.machine() == "x86_64"
    if Path(sys.prefix, "installed-from").exists() and (here or everywhere):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=DEV if everywhere else EXTRA)
