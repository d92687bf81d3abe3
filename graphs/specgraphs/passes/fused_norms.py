"""A residual sum and the norm behind it are one operator."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from specgraphs.passes.reshapes import known_dims


class FuseResidualNorms(InPlacePass):
    """``RMSNormalization(Add(x, y))`` becomes SkipSimplifiedLayerNormalization.

    Case 1: x and y have the same known shape, and the norm is over the last axis: one node gives
    the norm and the sum, which whatever else read it reads from there.
    Case 2: anything else: both nodes stay.
    Requires: value shapes from tracing. Ensures: the same values, the mean in fp32 as before.
    """

    def call(self, model: ir.Model) -> PassResult:
        modified = False
        for node in list(model.graph):
            total = _sum_before(node)
            if total is None:
                continue
            _fuse(model.graph, total, node)
            modified = True
        if modified:
            model.opset_imports["com.microsoft"] = 1
        return PassResult(model, modified)


def _sum_before(norm: ir.Node) -> ir.Node | None:
    """The sum that ``norm`` is of, where the two can be one."""
    if norm.op_type != "RMSNormalization" or norm.domain != "":
        return None
    axis = norm.attributes.get("axis")
    source = norm.inputs[0]
    total = source.producer() if source is not None else None
    if total is None or total.op_type != "Add" or total.domain != "":
        return None
    if source is None or source.is_graph_output() or (axis is not None and axis.as_int() != -1):
        return None
    x, y = (known_dims(value) for value in total.inputs)
    return total if x is not None and x == y and len(x) == 3 else None


def _fuse(graph: ir.Graph, total: ir.Node, norm: ir.Node) -> None:
    epsilon = norm.attributes["epsilon"].as_float()
    fused = ir.node(
        "SkipSimplifiedLayerNormalization",
        [*total.inputs, norm.inputs[1]],
        attributes={"epsilon": epsilon},
        domain="com.microsoft",
        num_outputs=4,
    )
    # Outputs 1 and 2, mean and deviation, are for training; a name would make them real.
    for output in (fused.outputs[1], fused.outputs[2]):
        output.name = ""
    graph.insert_before(norm, [fused])
    for old, new in ((norm.outputs[0], fused.outputs[0]), (total.outputs[0], fused.outputs[3])):
        new.shape, new.type = old.shape, old.type
        new.name, old.name = old.name, None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove([norm, total], safe=True)
