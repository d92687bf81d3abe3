"""A traced step becomes a Loop: carried values feed back, sliced inputs give each step its own
slice, what is asked for is stacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from specrun import contract


class RepeatStep(InPlacePass):
    """Repeat the graph ``trip_count`` times (a new int64 scalar input) inside one Loop node.

    Case 1: nodes that depend on a carried or a sliced input go into the body.
    Case 2: all others (positions, rotary tables, lengths) stay outside and run once.
    Case 3: a sliced input ``[batch, ...]`` becomes ``[batch, drafts, ...]``, of which step i reads
    slice i. A step without a slice is an error of the run.
    Case 4: a stacked output ``[batch, ...]`` becomes ``[batch, drafts, ...]``.
    ``carried``: input -> the output that replaces it in the next step, and no output of the graph
    any more. ``sliced``: inputs. ``stacked``: outputs, other ones than the carried.
    Requires: a graph without subgraphs.
    """

    def __init__(
        self,
        *,
        carried: Mapping[str, str],
        trip_count: str,
        stacked: Iterable[str],
        sliced: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self.carried = dict(carried)
        self.trip_count = trip_count
        self.stacked = tuple(stacked)
        self.sliced = tuple(sliced)

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        inputs = {value.name: value for value in graph.inputs}
        outputs = {value.name: value for value in graph.outputs}
        carried = [inputs[name] for name in self.carried]
        sliced = [inputs[name] for name in self.sliced]
        moved = _depending_on(graph, [*carried, *sliced])
        step = ir.Value(name="step", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
        slices = [_slice(value, step) for value in sliced]
        inside = [_clone(value, f"{value.name}_step") for value in carried]
        for outer, inner in zip(carried, inside, strict=True):
            outer.replace_all_uses_with(inner)
        graph.outputs.clear()
        graph.remove(moved)
        results = [outputs[name] for name in self.carried.values()]
        scans = [outputs[name] for name in self.stacked]
        for value in scans:
            value.name = f"{value.name}_step"
        body = _body([step, *inside], [*slices, *moved], [*results, *scans])
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
        for name, stacked, value in zip(
            self.stacked, loop.outputs[len(carried) :], scans, strict=True
        ):
            graph.outputs.append(_per_batch(graph, stacked, value, name))
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


def _slice(value: ir.Value, step: ir.Value) -> ir.Node:
    """Widen an input to all drafts; whoever read it reads slice ``step``, which the node gives."""
    assert value.shape is not None
    inside = _clone(value, f"{value.name}_step")
    value.replace_all_uses_with(inside)
    batch, *rest = value.shape
    value.shape = ir.Shape([batch, contract.DRAFTS, *rest])
    return ir.node("Gather", [value, step], attributes={"axis": 1}, outputs=[inside])


def _body(inputs: list[ir.Value], nodes: list[ir.Node], outputs: list[ir.Value]) -> ir.Graph:
    """The Loop body. ``inputs``: the number of the step, then the carried values."""
    step, *carried = inputs
    going_on = ir.Value(name="going_on", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    copy = ir.node("Identity", [going_on])
    copy.outputs[0].name = "going_on_out"
    copy.outputs[0].shape, copy.outputs[0].type = going_on.shape, going_on.type
    return ir.Graph(
        [step, going_on, *carried],
        [copy.outputs[0], *outputs],
        nodes=[*nodes, copy],
        name="draft_step",
    )


def _per_batch(graph: ir.Graph, stacked: ir.Value, step: ir.Value, name: str) -> ir.Value:
    """``[drafts, batch, ...]`` to ``[batch, drafts, ...]``."""
    assert step.shape is not None
    batch, *rest = step.shape
    perm = [1, 0, *range(2, 2 + len(rest))]
    swapped = ir.node("Transpose", [stacked], attributes={"perm": perm})
    graph.append(swapped)
    result = swapped.outputs[0]
    result.name = name
    result.shape = ir.Shape([batch, contract.DRAFTS, *rest])
    result.type = step.type
    return result
