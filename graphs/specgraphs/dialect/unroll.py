"""The draft loop, step after step: TensorRT takes no attention inside a Loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from specgraphs.nodes import Nodes
from specrun import contract


class UnrollDrafts(InPlacePass):
    """The Loop over ``num_draft`` steps becomes ``drafts`` copies of its body.

    Case 1: the graph has the input ``num_draft``: it goes, and every size called ``drafts`` is that
    number; what the Loop stacked is put together behind the last step.
    Case 2: it has none: it stays.
    Requires: the Loop that :class:`specgraphs.loop.RepeatStep` makes. Ensures: no Loop is left.
    """

    def __init__(self, drafts: int) -> None:
        super().__init__()
        self.drafts = drafts

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        trips = next((v for v in graph.inputs if v.name == contract.NUM_DRAFT), None)
        if trips is None:
            return PassResult(model, False)
        loop = next(use.node for use in trips.uses() if use.node.op_type == "Loop")
        self._unroll(graph, loop)
        graph.inputs.remove(trips)
        for value in (*graph.inputs, *graph.outputs):
            if value.shape is not None:
                value.shape = ir.Shape([self._fixed(size) for size in value.shape])
        return PassResult(model, True)

    def _unroll(self, graph: ir.Graph, loop: ir.Node) -> None:
        body = loop.attributes["body"].as_graph()
        carried: Sequence[ir.Value | None] = loop.inputs[2:]
        count = len(carried)
        stacked: list[list[ir.Value]] = []
        for step in range(self.drafts):
            copy = _Step(f"draft.{step}", body, step, carried)
            graph.insert_before(loop, copy.nodes)
            carried = copy.outputs[1 : 1 + count]
            stacked.append(copy.outputs[1 + count :])
        for index, scan in enumerate(loop.outputs[count:]):
            self._stack(graph, scan, [step[index] for step in stacked])
        graph.remove(loop, safe=True)

    def _stack(self, graph: ir.Graph, scan: ir.Value, steps: list[ir.Value]) -> None:
        """``[batch, ...]`` of every step as ``[batch, drafts, ...]``, for what turned the scan."""
        (turned,) = (use.node for use in scan.uses())
        nodes = Nodes(f"{turned.outputs[0].name}.steps")
        axis = nodes.add("Constant", value=ir.Tensor(np.array([1], np.int64)))
        apart = [nodes.add("Unsqueeze", value, axis) for value in steps]
        together = nodes.add("Concat", *apart, axis=1)
        graph.insert_before(turned, nodes.nodes)
        old = turned.outputs[0]
        together.shape, together.type, together.name = old.shape, old.type, old.name
        old.name = None
        old.replace_all_uses_with(together, replace_graph_outputs=True)
        graph.remove(turned, safe=True)

    def _fixed(self, size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        named = isinstance(size, ir.SymbolicDim) and size.value == contract.DRAFTS
        return self.drafts if named else size


class _Step:
    """A copy of a Loop body for one step; values of the graph around are read as they are."""

    def __init__(
        self, name: str, body: ir.Graph, step: int, carried: Sequence[ir.Value | None]
    ) -> None:
        self.name = name
        number = ir.node("Constant", [], {"value": ir.Tensor(np.array(step, np.int64))})
        number.outputs[0].name = f"{name}.number"
        number.outputs[0].shape = ir.Shape([])
        number.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        self.nodes = [number]
        inside = [body.inputs[0], *body.inputs[2:]]
        self.known: dict[ir.Value, ir.Value | None] = dict(
            zip(inside, [number.outputs[0], *carried], strict=True)
        )
        self.known[body.inputs[1]] = None  # whether to go on
        for node in body:
            if node.inputs and node.inputs[0] is body.inputs[1]:
                continue  # hands on that it goes on
            self.nodes.append(self._copy(node))
        self.outputs: list[ir.Value] = [
            known for value in body.outputs if (known := self.known.get(value, value)) is not None
        ]

    def _copy(self, node: ir.Node) -> ir.Node:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [None if v is None else self.known.get(v, v) for v in node.inputs],
            node.attributes.values(),
            num_outputs=len(node.outputs),
            name=f"{self.name}.{node.name}",
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.shape, new.type = old.shape, old.type
            new.name = f"{self.name}.{old.name}" if old.name else old.name
            self.known[old] = new
        return copy
