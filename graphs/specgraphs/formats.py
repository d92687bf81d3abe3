"""How the weights of an engine are stored and multiplied: the formats, and who has which.

A linear layer is in one of three formats::

    float    FusedMatMul on the checkpoint's own matrix
    blocks   MatMulNBits: integers of 4 or 8 bits, a scale per block of columns; the operator
             quantizes the activations of a block to 8 bits itself (accuracy level 4)
    rows     int8 weights with a scale per output, activations quantized to 8 bits row by row, an
             integer product, rescaled; where outliers cost too much the activations are rotated
             before, or have two ``terms``: what the first 8 bits lost follows in 8 more, through
             the same product

Blocks are the smallest and best for one row, rows cost almost the same for 16 rows as for one. A
row's result never depends on the rows beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specrun.manifest import Precision

Kind = Literal["float", "blocks", "rows"]
Activations = Literal["fp32", "fp16", "bf16"]

DEFAULT_BLOCK_SIZE = 32
BLOCK_SIZES = (16, 32, 64, 128, 256)
ACCURACY_LEVEL = 4  # of MatMulNBits: activations in 8 bits

# Small and sensitive: what Gemma 4 adds to each layer per token, routers of experts and of tokens
# behind a centroid head, and the up-projection of latent attention, which the graph multiplies with
# itself.
KEEP_FLOAT = re.compile(
    r"\.(per_layer_model_projection|per_layer_input_gate|per_layer_projection|router\.proj"
    r"|mlp\.gate|kv_b_proj|centroids)\.weight$"
)
HEAD = re.compile(r"(^|\.)lm_head\.weight$")


@dataclass(frozen=True)
class LinearFormat:
    """One linear layer, or several that read the same rows.

    ``smoothing``: float32 ``[columns]``; inputs are divided by it and the weights multiplied
    (SmoothQuant, Xiao et al. 2023). ``rotation``: columns that are rotated together, behind the
    smoothing, see :mod:`specgraphs.rotation`; 0: none are. ``terms``: 8-bit terms of an activation,
    1 or 2.
    """

    kind: Kind
    bits: int = 8
    block_size: int = DEFAULT_BLOCK_SIZE
    smoothing: NDArray[np.float32] | None = field(default=None, compare=False)
    terms: int = 1
    rotation: int = 0


FLOAT = LinearFormat("float")


def of_precision(precision: Precision, block_size: int) -> LinearFormat:
    """The format that a precision gives a linear layer."""
    if precision in ("fp32", "fp16", "bf16"):
        return FLOAT
    if precision == "w8a8":
        return LinearFormat("rows")
    return LinearFormat("blocks", bits=4 if precision == "int4" else 8, block_size=block_size)


def activations(precision: Precision) -> Activations:
    """Of what dtype activations, KV and what stays float are, unless something else is asked for.

    Only in the dialect of TensorRT integers go with others than fp32.
    """
    return precision if precision in ("fp16", "bf16") else "fp32"


@dataclass(frozen=True)
class Formats:
    """Which weight has which format. ``chosen``: by name, what calibration found for a layer.

    ``head`` and ``embedding``: of the output head and of every table that rows are looked up in.
    ``stored``: by name, bits and block size of the blocks that the checkpoint has a weight in; it
    stays in them where its precision has that many bits, whatever ``block_size`` is.
    """

    precision: Precision
    head: Precision
    embedding: Precision
    block_size: int = DEFAULT_BLOCK_SIZE
    chosen: Mapping[str, LinearFormat] = field(default_factory=dict)
    stored: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def linear(self, name: str, *, head: bool = False) -> LinearFormat:
        """Of the linear layer with the weight ``name``; ``head``: it gives the logits."""
        if name in self.chosen:
            return self.chosen[name]
        if KEEP_FLOAT.search(name):
            return FLOAT
        return self._of(name, self.head if head else self.precision)

    def is_stored(self, name: str, format: LinearFormat) -> bool:
        """Whether ``format`` is the one that the checkpoint has the weight ``name`` in."""
        blocks = (format.bits, format.block_size)
        return format.kind == "blocks" and self.stored.get(name) == blocks

    def _of(self, name: str, precision: Precision) -> LinearFormat:
        found = of_precision(precision, self.block_size)
        bits, size = self.stored.get(name, (0, 0))
        same = found.kind == "blocks" and found.bits == bits
        return LinearFormat("blocks", bits, size) if same else found

    def table(self, name: str, columns: int) -> LinearFormat:
        """Of the table ``name`` that rows of ``columns`` values are looked up in; w8a8 has int8
        blocks."""
        found = self._of(name, "int8" if self.embedding == "w8a8" else self.embedding)
        whole = columns % found.block_size == 0
        return found if found.kind == "blocks" and whole else FLOAT
