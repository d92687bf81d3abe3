"""The least that an export has to do, in plain numpy: read, quantize, write. Its yardstick.

    python scripts/quantize_numpy.py CHECKPOINT OUT int8|int4

Reads every matrix of the safetensors files in pieces, puts it into blocks of 32 columns with the
arithmetic of specexport.encoders (8 bits rounded to nearest; 4 bits the best of several ranges, the
scale refitted; tables and the head in 8 bits), writes values, scales and zero points to one file,
and removes it again. One line for people, one JSON line last.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.datafile import CHUNK_BYTES
from specexport.encoders import LEAST_RANGE, SHRINKS
from specexport.safetensors_files import read_folder
from specexport.weights import Weights

SIZE = 32
Floats = NDArray[np.float32]


def eight_bits(rows: Floats) -> Iterable[NDArray[Any]]:
    """Values and scales, symmetric."""
    blocks = rows.reshape(len(rows), -1, SIZE)
    scales = np.abs(blocks).max(-1, keepdims=True) / 127
    values = np.rint(blocks / np.where(scales > 0, scales, 1)) + 128
    return values.astype(np.uint8), scales


def four_bits(rows: Floats) -> Iterable[NDArray[Any]]:
    """Values, scales and zero points of the range with the least squared error."""
    blocks = rows.reshape(len(rows), -1, SIZE)
    low = np.minimum(blocks.min(-1, keepdims=True), 0)
    high = np.maximum(blocks.max(-1, keepdims=True), 0)
    weights = np.ones(SIZE, np.float32)  # as importance has them
    best: list[NDArray[Any]] = []
    for share in np.linspace(1.0, LEAST_RANGE, SHRINKS, dtype=np.float32):
        scale = (high - low) * (share / 15)
        safe = np.where(scale > 0, scale, 1)
        zero = np.clip(np.rint(-low * share / safe), 0, 15)
        q = np.clip(np.rint(blocks / safe + zero), 0, 15)
        shifted = q - zero
        weighted = shifted * weights
        square = (weighted * shifted).sum(-1, keepdims=True)
        fitted = (weighted * blocks).sum(-1, keepdims=True) / np.where(square > 0, square, 1)
        scale = np.where(square > 0, fitted, scale)
        off = blocks - shifted * scale
        error = (off * off * weights).sum(-1, keepdims=True)
        found = [error, scale, zero, q]
        if best:
            better = error < best[0]
            found = [np.where(better, new, old) for new, old in zip(found, best, strict=True)]
        best = found
    values = best[3].astype(np.uint8)
    return values[..., 0::2] | values[..., 1::2] << 4, best[1], best[2].astype(np.uint8)


def main() -> None:
    """Command line."""
    checkpoint, out, precision = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    weights = Weights(read_folder(checkpoint))
    start, read = time.monotonic(), 0
    with out.open("wb") as file:
        for name in weights.names():
            shape = weights.shape(name)
            for rows in weights.chunks(name, CHUNK_BYTES):
                read += rows.nbytes // 2
                if len(shape) < 2 or shape[-1] % SIZE:
                    file.write(rows.data)
                    continue
                careful = "embed" in name or "lm_head" in name
                encode = eight_bits if precision == "int8" or careful else four_bits
                for part in encode(rows):
                    file.write(np.ascontiguousarray(part).data)
        size = file.tell()
    seconds = time.monotonic() - start
    out.unlink()
    print(f"{seconds:.1f} s for {read / 1e9:.2f} GB of bf16, wrote {size / 1e9:.2f} GB")
    print(json.dumps({"seconds": round(seconds, 1), "read_bytes": read, "written_bytes": size}))


if __name__ == "__main__":
    main()
