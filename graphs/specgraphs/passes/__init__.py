"""Graph passes: one file and one class each, saying what it requires and what it ensures."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

from specgraphs.passes.argmax import ArgmaxInBlocks
from specgraphs.passes.fused_norms import FuseResidualNorms
from specgraphs.passes.latent_attention import ExpandLatentAttention
from specgraphs.passes.linear import FuseTransposedWeights
from specgraphs.passes.reshapes import DropShapePairs, StaticReshapes
from specgraphs.passes.silu import FuseSilu
from specgraphs.passes.wanted_rows import WantedRowsFromFirstRow


def simplify(model: ir.Model) -> None:
    """The clean-up that every traced engine gets, in place.

    Requires: initializers of parameters hold no values (they must not be folded).
    Ensures: reshapes with constant targets, no reshape or transpose pairs, linear layers that
    read their weight as the checkpoint stores it, SiLU and residual norms in one node, the best
    token found in blocks, no unused or repeated nodes.
    """
    ExpandLatentAttention()(model)
    optimizer.fold_constants(model)
    StaticReshapes()(model)
    DropShapePairs()(model)
    FuseTransposedWeights()(model)
    FuseSilu()(model)
    FuseResidualNorms()(model)
    ArgmaxInBlocks()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    with _only_errors("onnx_ir"):  # it warns of every parameter, as none has a value yet
        common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)


@contextlib.contextmanager
def _only_errors(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


__all__ = [
    "ArgmaxInBlocks",
    "DropShapePairs",
    "ExpandLatentAttention",
    "FuseResidualNorms",
    "FuseSilu",
    "FuseTransposedWeights",
    "StaticReshapes",
    "WantedRowsFromFirstRow",
    "simplify",
]
