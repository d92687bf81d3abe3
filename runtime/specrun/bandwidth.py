"""How fast this machine reads memory: what no decoding step can be faster than."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

LEAST = 256 << 20  # bytes to read, where the caches are small or unknown
PASSES = 12
CPUS = Path("/sys/devices/system/cpu")
MEMORY = Path("/proc/meminfo")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def read_bandwidth(threads: int, *, size: int | None = None, passes: int = PASSES) -> float:
    """Bytes per second that ``threads`` threads together read from memory, in the best pass.

    ``size``: bytes to read (twice the caches, at least 256 MiB). The largest value is looked for,
    which numpy does at the speed of memory. Raises MemoryError.
    """
    if size is None:
        size = buffer_size(cache_bytes(), _available())
    words = np.ones(max(threads, size // 8), dtype=np.int64)  # written, so that it is there
    parts = np.array_split(words, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(passes):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return words.nbytes / best


def buffer_size(cache: int | None, available: int | None) -> int:
    """Bytes to read. Raises MemoryError where half of the available memory is too little."""
    size = max(LEAST, 2 * (cache or 0))
    if available is not None and size > available // 2:
        raise MemoryError(f"{size >> 20} MiB are needed, {available >> 20} MiB are free")
    return size


def cache_bytes() -> int | None:
    """Bytes of the last level of cache, of all its parts; None where the system does not say."""
    found: dict[tuple[int, str], int] = {}
    for index in CPUS.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((index / "level").read_text())
            match = re.fullmatch(r"(\d+)([KMG]?)", (index / "size").read_text().strip())
            shared = (index / "shared_cpu_list").read_text().strip()
        except (OSError, ValueError):
            continue
        if match is not None:
            found[level, shared] = int(match[1]) * UNITS[match[2]]
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or None


def _available() -> int | None:
    """Bytes of memory that are free; None where the system does not say."""
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB", MEMORY.read_text(), re.M)
    except OSError:
        return None
    return int(match[1]) << 10 if match else None
