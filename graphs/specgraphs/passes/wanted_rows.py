"""The traced index of wanted rows becomes the contract's first_row."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from specrun import contract


class WantedRowsFromFirstRow(InPlacePass):
    """Replace the input ``traced_name`` (int64 [wanted]) by ``range(first_row, rows)``.

    Case 1: the input exists: it is removed, ``first_row`` int64 [1] takes its place, and every
    use reads a Range up to the second size of the input ``rows_of``. Ensures: the contract's
    inputs.
    """

    def __init__(self, traced_name: str, rows_of: str = contract.TOKENS) -> None:
        super().__init__()
        self.traced_name = traced_name
        self.rows_of = rows_of

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        index = next(i for i, v in enumerate(graph.inputs) if v.name == self.traced_name)
        fed = next(v for v in graph.inputs if v.name == self.rows_of)
        traced = graph.inputs[index]
        first_row = ir.Value(
            name=contract.FIRST_ROW,
            shape=ir.Shape([1]),
            type=ir.TensorType(ir.DataType.INT64),
        )
        nodes = _range_nodes(first_row, fed)
        wanted = nodes[-1].outputs[0]
        wanted.shape, wanted.type = traced.shape, traced.type
        traced.replace_all_uses_with(wanted)
        graph.inputs[index] = first_row
        graph.insert_before(graph[0], nodes)
        return PassResult(model, True)


def _range_nodes(first_row: ir.Value, fed: ir.Value) -> list[ir.Node]:
    """Squeeze(first_row) .. Squeeze(Shape(fed)[1]) in steps of 1."""
    one = ir.node("Constant", [], attributes={"value": ir.Tensor(np.array(1, np.int64))})
    start = ir.node("Squeeze", [first_row])
    size = ir.node("Shape", [fed], attributes={"start": 1, "end": 2})
    stop = ir.node("Squeeze", [size.outputs[0]])
    index = ir.node("Range", [start.outputs[0], stop.outputs[0], one.outputs[0]])
    for name, node in zip(
        ("step", "start", "rows", "stop", "index"), (one, start, size, stop, index), strict=True
    ):
        node.outputs[0].name = f"wanted_{name}"
    return [one, start, size, stop, index]
