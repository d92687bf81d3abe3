"""Reshapes and transposes: constant targets, and no pairs that undo each other."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult


class StaticReshapes(InPlacePass):
    """Give Reshape nodes constant targets.

    Case 1: an output size is a number: it stands in the target.
    Case 2: it is the symbolic size of the input at the same place: 0 (copy).
    Case 3: one other size is left: -1. More than one: the node stays as it is.
    Requires: value shapes from tracing. Ensures: the arithmetic on sizes before it is unused.
    """

    def call(self, model: ir.Model) -> PassResult:
        modified = False
        for node in list(model.graph):
            if node.op_type != "Reshape" or node.domain != "":
                continue
            source, target = node.inputs
            goal = _target(known_dims(source), known_dims(node.outputs[0]))
            if goal is None or target is None or target.const_value is not None:
                continue
            _retarget(model.graph, node, goal)
            modified = True
        return PassResult(model, modified)


class DropShapePairs(InPlacePass):
    """Drop Reshape and Transpose nodes that together do nothing.

    Case 1: Reshape of a Reshape reads the first one's input.
    Case 2: Transpose of a Transpose with the inverse permutation is its input.
    Case 3: Reshape to the shape its input has is its input.
    Requires: value shapes from tracing. Ensures: no such pair is left around attention.
    """

    def call(self, model: ir.Model) -> PassResult:
        modified = False
        for node in list(model.graph):
            if node.domain == "" and node.op_type == "Reshape":
                modified |= self._reshape(model.graph, node)
            elif node.domain == "" and node.op_type == "Transpose":
                modified |= self._transpose(node)
        return PassResult(model, modified)

    def _reshape(self, graph: ir.Graph, node: ir.Node) -> bool:
        modified = False
        source = node.inputs[0]
        while source is not None and (before := source.producer()) is not None:
            if before.op_type != "Reshape" or before.domain != "":
                break
            goal = _target(known_dims(before.inputs[0]), known_dims(node.outputs[0]))
            if goal is None:
                break
            node.replace_input_with(0, before.inputs[0])
            _retarget(graph, node, goal)
            source, modified = before.inputs[0], True
        same = known_dims(node.outputs[0])
        if same is not None and source is not None and known_dims(source) == same:
            return _bypass(node, source) or modified
        return modified

    def _transpose(self, node: ir.Node) -> bool:
        source = node.inputs[0]
        before = source.producer() if source is not None else None
        if before is None or before.op_type != "Transpose" or before.inputs[0] is None:
            return False
        if before.inputs[0].shape is None:
            return False
        rank = len(before.inputs[0].shape)
        first, second = permutation(before, rank), permutation(node, rank)
        if [first[i] for i in second] != list(range(rank)):
            return False
        return _bypass(node, before.inputs[0])


def permutation(node: ir.Node, rank: int) -> list[int]:
    """The permutation of a Transpose; without the attribute it reverses the axes."""
    given = node.attributes.get("perm")
    return list(range(rank))[::-1] if given is None else list(given.as_ints())


def _bypass(node: ir.Node, source: ir.Value) -> bool:
    """Let everything read ``source`` instead of the node's output; graph outputs keep theirs."""
    output = node.outputs[0]
    if output.is_graph_output() or not output.uses():
        return False
    output.replace_all_uses_with(source)
    return True


def known_dims(value: ir.Value | None) -> list[int | str] | None:
    """Sizes as numbers and names; None where the shape or one size is not known."""
    if value is None or value.shape is None:
        return None
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return None if any(dim is None for dim in dims) else [d for d in dims if d is not None]


def _target(source: list[int | str] | None, output: list[int | str] | None) -> list[int] | None:
    if source is None or output is None or 0 in output:
        return None
    goal = [
        dim if isinstance(dim, int) else 0 if i < len(source) and source[i] == dim else -1
        for i, dim in enumerate(output)
    ]
    return goal if goal.count(-1) <= 1 else None


def _retarget(graph: ir.Graph, node: ir.Node, goal: list[int]) -> None:
    """Give a Reshape a constant target, in which 0 copies a size of the input."""
    tensor = ir.Tensor(np.array(goal, dtype=np.int64))
    constant = ir.node("Constant", [], attributes={"value": tensor})
    graph.insert_before(node, constant)
    value = constant.outputs[0]
    value.const_value = tensor
    value.dtype, value.shape = ir.DataType.INT64, ir.Shape([len(goal)])
    node.replace_input_with(1, value)
    node.attributes.pop("allowzero", None)
