"""SiLU is one operator."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult


class FuseSilu(InPlacePass):
    """``x * Sigmoid(x)`` becomes QuickGelu with alpha 1, which is the same formula.

    Case 1: the sigmoid is read by that product only. Ensures: one node instead of two.
    """

    def call(self, model: ir.Model) -> PassResult:
        modified = False
        for node in list(model.graph):
            if node.op_type != "Sigmoid" or node.domain != "":
                continue
            users = list(node.outputs[0].uses())
            if len(users) != 1 or node.outputs[0].is_graph_output():
                continue
            product, index = users[0].node, users[0].idx
            if product.op_type != "Mul" or product.inputs[1 - index] is not node.inputs[0]:
                continue
            _fuse(model.graph, node, product)
            modified = True
        if modified:
            model.opset_imports["com.microsoft"] = 1
        return PassResult(model, modified)


def _fuse(graph: ir.Graph, sigmoid: ir.Node, product: ir.Node) -> None:
    fused = ir.node(
        "QuickGelu", [sigmoid.inputs[0]], attributes={"alpha": 1.0}, domain="com.microsoft"
    )
    graph.insert_before(product, [fused])
    old, new = product.outputs[0], fused.outputs[0]
    new.shape, new.type, new.name = old.shape, old.type, old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove([product, sigmoid], safe=True)
