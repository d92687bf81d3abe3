"""Fixed memory addresses, without which TensorRT writes another plan each time.

TensorRT keeps tensors in tables that are ordered by address, so the order of what it writes follows
from where the heap lies: measured, two builds in one process differ, as do two processes. Two
things make the bytes repeat: an address space that is not randomised, and a thread of its own,
whose heap starts empty whatever the process has done before. What is left: TensorRT for RTX
compiles kernels in a thread beside, and on busy cores a few may change places in a plan.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable

NO_RANDOMIZE = 0x0040000  # ADDR_NO_RANDOMIZE of Linux' personality(2)
QUERY = 0xFFFFFFFF
# The threshold is that of glibc itself, which raises it no more once it is given.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "PYTHONHASHSEED": "0"}


def are_fixed() -> bool:
    """Whether this process was started at fixed addresses."""
    now = _personality(QUERY)
    return now >= 0 and bool(now & NO_RANDOMIZE)


def start_again_fixed() -> None:
    """Start this process again at fixed addresses; returns where the system does not allow it.

    To be called first thing: nothing of the process is kept. It has :data:`ENVIRONMENT` already.
    """
    before = _personality(QUERY)
    if before < 0 or before & NO_RANDOMIZE:
        return
    _personality(before | NO_RANDOMIZE)
    if are_fixed():
        os.execv(sys.executable, sys.orig_argv)


def in_new_heap(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread of its own and wait for it. It must not raise."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _personality(value: int) -> int:
    """personality(2), -1 where there is none or it is not allowed."""
    with contextlib.suppress(OSError, AttributeError):
        call = ctypes.CDLL(None).personality
        call.argtypes, call.restype = [ctypes.c_ulong], ctypes.c_int
        return int(call(value))
    return -1
