"""A traced step becomes a Loop: carried values feed back, what is asked for is stacked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from specrun import contract


class RepeatStep(InPlacePass):
    """Repeat the graph ``trip_count`` times (a new int64 scalar input) inside one Loop node.

    Case 1: nodes that depend on a carried input go into the body.
    Case 2: all others (positions, rotary tables, lengths) stay outside and run once.
    ``carried``: input -> the output that replaces it in the next step. ``stacked``: new graph
    output -> step output ``[batch, 1, ...]``, stacked to ``[batch, drafts, ...]``.
    Requires: a graph without subgraphs whose stacked outputs have a second size of 1.
    """

    def __init__(
        self, *, carried: Mapping[str, str], trip_count: str, stacked: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.carried = dict(carried)
        self.trip_count = trip_count
        self.stacked = dict(stacked)

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        inputs = {value.name: value for value in graph.inputs}
        outputs = {value.name: value for value in graph.outputs}
        carried = [inputs[name] for name in self.carried]
        moved = _depending_on(graph, carried)
        inside = [_clone(value, f"{value.name}_step") for value in carried]
        for outer, inner in zip(carried, inside, strict=True):
            outer.replace_all_uses_with(inner)
        graph.outputs.clear()
        graph.remove(moved)
        results = [outputs[name] for name in self.carried.values()]
        scans = [outputs[name] for name in self.stacked.values()]
        body = _body(inside, moved, results, scans)
        trips = ir.Value(
            name=self.trip_count, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64)
        )
        position = len(self.carried) + 1
        graph.inputs.insert(position, trips)
        loop = ir.node(
            "Loop",
            [trips, None, *carried],
            attributes={"body": body},
            num_outputs=len(carried) + len(scans),
        )
        graph.append(loop)
        for name, stacked, step in zip(
            self.stacked, loop.outputs[len(carried) :], scans, strict=True
        ):
            graph.outputs.append(_per_batch(graph, stacked, step, name))
        return PassResult(model, True)


def _depending_on(graph: ir.Graph, values: list[ir.Value]) -> list[ir.Node]:
    reached = set(values)
    nodes = []
    for node in graph:
        if any(value in reached for value in node.inputs):
            nodes.append(node)
            reached.update(node.outputs)
    return nodes


def _clone(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, shape=value.shape, type=value.type)


def _body(
    carried: list[ir.Value],
    nodes: list[ir.Node],
    results: list[ir.Value],
    scans: list[ir.Value],
) -> ir.Graph:
    """The Loop body; scan outputs get an Identity, as one value cannot be carried and stacked."""
    scalar = ir.Shape([])
    iteration = ir.Value(name="step", shape=scalar, type=ir.TensorType(ir.DataType.INT64))
    going_on = ir.Value(name="going_on", shape=scalar, type=ir.TensorType(ir.DataType.BOOL))
    copies = [ir.node("Identity", [value]) for value in (going_on, *scans)]
    for copy, value in zip(copies, (going_on, *scans), strict=True):
        copy.outputs[0].name = f"{value.name}_out"
        copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
    copied = [copy.outputs[0] for copy in copies]
    return ir.Graph(
        [iteration, going_on, *carried],
        [copied[0], *results, *copied[1:]],
        nodes=[*nodes, *copies],
        name="draft_step",
    )


def _per_batch(graph: ir.Graph, stacked: ir.Value, step: ir.Value, name: str) -> ir.Value:
    """``[drafts, batch, 1, ...]`` to ``[batch, drafts, ...]``."""
    assert step.shape is not None and step.shape[1] == 1, step
    axis = ir.node("Constant", [], attributes={"value": ir.Tensor(np.array([2], np.int64))})
    squeezed = ir.node("Squeeze", [stacked, axis.outputs[0]])
    rank = len(step.shape)
    perm = [1, 0, *range(2, rank)]
    swapped = ir.node("Transpose", [squeezed.outputs[0]], attributes={"perm": perm})
    graph.extend([axis, squeezed, swapped])
    result = swapped.outputs[0]
    result.name = name
    batch, *rest = step.shape[0], *step.shape[2:]
    result.shape = ir.Shape([batch, contract.DRAFTS, *rest])
    result.type = step.type
    return result
