"""The border of an engine in the TensorRT dialect: fixed KV buffers, wanted rows by number."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from specrun import contract


class WantedRowsAsInput(InPlacePass):
    """``range(first_row, rows)`` becomes the input ``wanted_rows`` int64 ``[wanted]``.

    Case 1: the graph has the input ``first_row``: it is replaced, and what counted from it goes.
    Case 2: it has none: it stays. A size that depends on the value of an input would be decided on
    the host in each run.
    """

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        first = next((v for v in graph.inputs if v.name == contract.FIRST_ROW), None)
        if first is None:
            return PassResult(model, False)
        index = _counted_from(first)
        for value in (output for node in graph for output in node.outputs):
            if value.name == contract.WANTED_ROWS:
                value.name = f"{contract.WANTED_ROWS}.size"
        wanted = ir.Value(
            name=contract.WANTED_ROWS,
            shape=ir.Shape([contract.WANTED]),
            type=ir.TensorType(ir.DataType.INT64),
        )
        index.replace_all_uses_with(wanted)
        graph.inputs[list(graph.inputs).index(first)] = wanted
        _drop_readers(graph, first)
        return PassResult(model, True)


def _counted_from(first: ir.Value) -> ir.Value:
    """The Range that starts at ``first``."""
    for squeeze in (use.node for use in first.uses()):
        for node in (use.node for use in squeeze.outputs[0].uses()):
            if node.op_type == "Range" and node.inputs[0] is squeeze.outputs[0]:
                return node.outputs[0]
    raise ValueError(f"no Range starts at {first.name}")


def _drop_readers(graph: ir.Graph, first: ir.Value) -> None:
    """Remove what reads ``first``, which is no input any more."""
    pending = [use.node for use in first.uses()]
    readers: list[ir.Node] = []
    while pending:
        node = pending.pop()
        readers.append(node)
        pending += [use.node for output in node.outputs for use in output.uses()]
    graph.remove(readers, safe=True)


class BatchFromLengths(InPlacePass):
    """Whoever asks a KV buffer for the number of sequences asks ``past_length``.

    Case 1: ``Shape(past.N.part)`` from axis 0 to 1. TensorRT wants nobody but the node that writes
    a buffer to look at it. Case 2: another Shape: it stays.
    """

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        lengths = next((v for v in graph.inputs if v.name == contract.PAST_LENGTH), None)
        modified = False
        for node in graph.all_nodes():
            of_buffer = node.op_type == "Shape" and is_buffer(node.inputs[0])
            if lengths is not None and of_buffer and _axes(node) == (0, 1):
                node.replace_input_with(0, lengths)
                modified = True
        return PassResult(model, modified)


def is_buffer(value: ir.Value | None) -> bool:
    """Whether a value is a KV buffer that an engine is given."""
    return value is not None and value.is_graph_input() and (value.name or "").startswith("past.")


def _axes(node: ir.Node) -> tuple[int, int | None]:
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    return start, node.attributes["end"].as_int() if "end" in node.attributes else None


class FixedCapacity(InPlacePass):
    """KV buffers of ``capacity`` rows, among inputs and outputs.

    Ensures: no size is called ``capacity``. Values between keep what tracing said of them.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def call(self, model: ir.Model) -> PassResult:
        for value in (*model.graph.inputs, *model.graph.outputs):
            if value.shape is not None:
                value.shape = ir.Shape([self._fixed(size) for size in value.shape])
        return PassResult(model, True)

    def _fixed(self, size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        named = isinstance(size, ir.SymbolicDim) and size.value == contract.CAPACITY
        return self.capacity if named else size
