"""ONNX Runtime's own operators in standard ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from specgraphs.nodes import Nodes, replace

CONTRIB = "com.microsoft"


class StandardOperators(InPlacePass):
    """Every fused operator of ONNX Runtime that is left becomes the standard ones it stands for.

    Case 1: ``SkipSimplifiedLayerNormalization(x, y, w)``: ``RMSNormalization(x + y, w)``, and the
    sum.
    Case 2: ``QuickGelu(x, alpha)``: ``x * Sigmoid(alpha * x)``.
    Case 3: ``FusedMatMul(x, w)``: ``alpha * MatMul(x, w)``, w transposed where it says so.
    Ensures: none of these operators is left.
    """

    def call(self, model: ir.Model) -> PassResult:
        modified = False
        for node in list(model.graph.all_nodes()):
            build = _REPLACEMENTS.get(node.op_type) if node.domain == CONTRIB else None
            if build is not None:
                nodes = Nodes(node.name or node.outputs[0].name or node.op_type)
                replace(node, nodes, build(node, nodes))
                modified = True
        return PassResult(model, modified)


def _norm(node: ir.Node, nodes: Nodes) -> dict[int, ir.Value]:
    x, y, weight = node.inputs[:3]
    total = nodes.add("Add", x, y)
    total.type, total.shape = node.outputs[0].type, node.outputs[0].shape
    epsilon = node.attributes["epsilon"].as_float()
    normed = nodes.add("RMSNormalization", total, weight, axis=-1, epsilon=epsilon, stash_type=1)
    return {0: normed, 3: total}


def _silu(node: ir.Node, nodes: Nodes) -> dict[int, ir.Value]:
    x = node.inputs[0]
    assert x is not None
    alpha = node.attributes["alpha"].as_float()
    scaled = x if alpha == 1 else nodes.add("Mul", x, _scalar(nodes, alpha, x))
    return {0: nodes.add("Mul", x, nodes.add("Sigmoid", scaled))}


def _product(node: ir.Node, nodes: Nodes) -> dict[int, ir.Value]:
    x, w = node.inputs
    assert x is not None and w is not None
    sides = [
        nodes.add("Transpose", value, perm=_swapped(value)) if _flag(node, name) else value
        for value, name in ((x, "transA"), (w, "transB"))
    ]
    y = nodes.add("MatMul", *sides)
    alpha = node.attributes["alpha"].as_float() if "alpha" in node.attributes else 1.0
    if alpha == 1:
        return {0: y}
    y.type = x.type
    return {0: nodes.add("Mul", y, _scalar(nodes, alpha, x))}


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and node.attributes[name].as_int() == 1


def _swapped(value: ir.Value) -> list[int]:
    """The axes with the last two exchanged."""
    assert value.shape is not None, value.name
    axes = list(range(len(value.shape)))
    return [*axes[:-2], axes[-1], axes[-2]]


def _scalar(nodes: Nodes, number: float, like: ir.Value) -> ir.Value:
    assert like.dtype is not None
    return nodes.add("Constant", value=ir.Tensor(np.array(number, dtype=like.dtype.numpy())))


_REPLACEMENTS: dict[str, Callable[[ir.Node, Nodes], dict[int, ir.Value]]] = {
    "SkipSimplifiedLayerNormalization": _norm,
    "QuickGelu": _silu,
    "FusedMatMul": _product,
}
