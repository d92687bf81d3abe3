"""The dialect of TensorRT: one finished graph in standard operators, for buffers of a fixed size.

A graph for ONNX Runtime says the same in operators that are fast there. Both give the same tokens:
tests run this one on ONNX Runtime too.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from specgraphs.dialect import integers
from specgraphs.dialect.attention import FixedAttention
from specgraphs.dialect.sizes import BatchFromLengths, FixedCapacity, WantedRowsAsInput
from specgraphs.dialect.standard import CONTRIB, StandardOperators
from specgraphs.dialect.unroll import UnrollDrafts
from specgraphs.engine_graph import EngineGraph

OPSET = 24  # TensorScatter, and Attention on a bool mask of four axes
IR_VERSION = 11


def apply(graph: EngineGraph, *, capacity: int, drafts: int | None) -> None:
    """Rewrite a finished ``graph`` in place.

    ``capacity``: rows of the KV buffers, a fixed number here. ``drafts``: steps of an MTP drafter,
    which it always takes; None where there is no such loop.
    Requires: experts as :func:`specgraphs.experts.expand` makes them ``everywhere``; no weights in
    rows of integers (w8a8). Ensures: standard operators of opset 24 only, without Loop and If.
    Raises ValueError for an operator that has no standard form.
    """
    model = graph.model
    if drafts is not None:
        UnrollDrafts(drafts)(model)
    WantedRowsAsInput()(model)
    FixedAttention(capacity)(model)
    StandardOperators()(model)
    integers.apply(graph)
    BatchFromLengths()(model)
    FixedCapacity(capacity)(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    _drop_unused(graph)
    _check(model)
    model.opset_imports.clear()
    model.opset_imports[""] = OPSET
    model.ir_version = IR_VERSION


def _drop_unused(graph: EngineGraph) -> None:
    """Weights that nothing reads any more."""
    there = graph.model.graph.initializers
    for held in (graph.weights, graph.made, graph.constants):
        for name in [name for name in held if name not in there]:
            del held[name]


def _check(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        if node.domain == CONTRIB or node.op_type in ("Loop", "If", "Scan"):
            raise ValueError(f"{node.name}: {node.op_type} has no form for TensorRT")


__all__ = ["IR_VERSION", "OPSET", "apply"]
