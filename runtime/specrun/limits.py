"""How large the numbers and names of an engine folder may be. Standard library only.

Far above every published model, and so small that nothing that follows from them overflows, fills
the memory before a file was seen to hold as much, or takes long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

MAX_MANIFEST_BYTES = 32 << 20
MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TUNING_BYTES = 4 << 20
MAX_GRAPH_BYTES = 2 << 30  # what a protobuf message can have
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = (1 << 31) - 1  # lengths are int32 in engines
MAX_LAYERS = 1 << 14
MAX_HEADS = 1 << 14
MAX_HEAD_SIZE = 1 << 16
MAX_HIDDEN_SIZE = 1 << 20
MAX_CANDIDATES = 1 << 16
MAX_DRAFTS = 1 << 12
MAX_KV_BYTES = 64 << 20  # per token of one engine
MAX_BYTES = 1 << 60  # of a file, or of weights
MAX_PATH = 1024  # characters
MAX_NAME = 255  # bytes of one part of a path

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Not portable, or meant otherwise by a system or by ONNX Runtime, whose "*/_ORT_MEM_ADDR_/*" is an
# address in memory.
_NOT_IN_NAMES = re.compile(r'[\\:*?"<>|]')


def check_within(name: str, value: int | None, low: int, high: int) -> None:
    """Raise ValueError unless ``low <= value <= high``; None is for what may be left out."""
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name} must be in {low}..{high}, got {value}")


def check_all(values: Mapping[str, int | None], ranges: Mapping[str, tuple[int, int]]) -> None:
    """The same for several numbers by name."""
    for name, (low, high) in ranges.items():
        check_within(name, values[name], low, high)


def check_path(path: str) -> None:
    """Raise ValueError unless this is the plain name of a file in the folder or below it."""
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or "\\" in path or not plain.parts:
        raise ValueError(f"path must stay inside the folder, got {path[:MAX_PATH]!r}")
    short = len(path) <= MAX_PATH and all(
        len(p.encode("utf-8", "replace")) <= MAX_NAME for p in plain.parts
    )
    if not short or str(plain) != path or not path.isprintable() or _NOT_IN_NAMES.search(path):
        raise ValueError(f"path must be a plain file name, got {path[:60]!r}")


def check_sha256(name: str, value: str) -> None:
    """Raise ValueError unless ``value`` is a sha256 in hex."""
    if not _SHA256.fullmatch(value):
        raise ValueError(f"{name} must be 64 hexadecimal digits, got {value[:60]!r}")
