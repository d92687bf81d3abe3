"""Memory that was freed goes back to the system.

The C library keeps what it freed for later; between pieces of many sizes that becomes gigabytes.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import sys
from typing import Any


def give_back() -> None:
    """Return freed memory, where the C library can (glibc); takes about a millisecond."""
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    name = ctypes.util.find_library("c")
    return None if name is None else getattr(ctypes.CDLL(name), "malloc_trim", None)
