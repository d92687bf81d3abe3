"""Queries, keys and values go into attention as one tensor, which rotates them itself.

For families without norms between the projections and the rotation. Runs after
:func:`specgraphs.apply_formats.apply`, which makes one product of the three projections.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from specgraphs.engine_graph import EngineGraph
from specrun import contract

TABLE_BYTES = 32 << 20  # most that a table of sines and cosines may take
SPARE_ROWS = 1024  # behind the last position, for rows of a block that are dropped again
UNIT = 8  # GroupQueryAttention wants half a rotated head in multiples of this


def apply(graph: EngineGraph, max_context: int) -> None:
    """Rewrite ``graph`` in place where it can be done; elsewhere it stays as it is.

    Case 1: the inputs of an attention node are RotaryEmbedding(Split 0), RotaryEmbedding(Split 1)
    and Split 2 of one Split, both rotated by the same cosines and sines: the attention node reads
    what was split, and the cosines and sines of all positions from a table.
    Case 2: the table would be larger than TABLE_BYTES, or the head has a size the operator does
    not take: both stay.
    Ensures: the same results up to rounding; positions are those of the KV rows, as before.
    """
    tables: dict[tuple[int, int], tuple[ir.Value, ir.Value] | None] = {}
    for node in list(graph.model.graph):
        if node.op_type != "GroupQueryAttention":
            continue
        found = _Packed.of(node)
        if found is None:
            continue
        key = (id(found.cos), id(found.sin))
        if key not in tables:
            tables[key] = _tables(graph, found, max_context)
        if tables[key] is not None:
            found.rewrite(graph.model.graph, *tables[key])  # type: ignore[misc]
    _drop_unused(graph)


class _Packed:
    """An attention node with what stands before it."""

    def __init__(self, node: ir.Node, query: ir.Node, key: ir.Node, split: ir.Node) -> None:
        self.node, self.query, self.key, self.split = node, query, key, split
        self.cos, self.sin = query.inputs[1], query.inputs[2]

    @classmethod
    def of(cls, node: ir.Node) -> _Packed | None:
        query, key, value = (
            None if value is None else value.producer() for value in node.inputs[:3]
        )
        if query is None or key is None or value is None or value.op_type != "Split":
            return None
        if len(value.outputs) != 3 or node.inputs[2] is not value.outputs[2]:
            return None
        for index, rotary in enumerate((query, key)):
            plain = rotary.op_type == "RotaryEmbedding" and len(rotary.inputs) == 3
            if not plain or rotary.inputs[0] is not value.outputs[index]:
                return None
            if len(list(rotary.outputs[0].uses())) != 1:
                return None
        if query.inputs[1:] != key.inputs[1:]:
            return None
        if query.attributes["interleaved"].as_int() != key.attributes["interleaved"].as_int():
            return None
        return cls(node, query, key, value)

    def rewrite(self, graph: ir.Graph, cos: ir.Value, sin: ir.Value) -> None:
        packed = self.split.inputs[0]
        attributes = dict(self.node.attributes)
        attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
        interleaved = self.query.attributes["interleaved"].as_int()
        attributes["rotary_interleaved"] = ir.AttrInt64("rotary_interleaved", interleaved)
        made = ir.Node(
            self.node.domain,
            self.node.op_type,
            [packed, None, None, *self.node.inputs[3:7], cos, sin],
            attributes.values(),
            num_outputs=len(self.node.outputs),
            name=self.node.name,
        )
        graph.insert_before(self.node, [made])
        for old, new in zip(self.node.outputs, made.outputs, strict=True):
            new.shape, new.type, new.name = old.shape, old.type, old.name
            old.name = None
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove([self.node, self.query, self.key], safe=True)
        if not any(output.uses() for output in self.split.outputs):
            graph.remove(self.split, safe=True)


def _tables(
    graph: EngineGraph, found: _Packed, max_context: int
) -> tuple[ir.Value, ir.Value] | None:
    """Cosines and sines ``[positions, half]`` of all positions as initializers."""
    cos, sin = found.cos, found.sin
    assert cos is not None and sin is not None and cos.shape is not None and cos.dtype is not None
    half = cos.shape[-1]
    rows = max_context + SPARE_ROWS
    if not isinstance(half, int) or half % UNIT or 2 * half % 16:
        return None
    if 2 * rows * half * cos.dtype.bitwidth // 8 > TABLE_BYTES:
        return None
    arrays = _evaluate(graph, (cos, sin), rows)
    if arrays is None:
        return None
    values = []
    for name, array in zip(("cos", "sin"), arrays, strict=True):
        title = f"rotary.{name}.{len(graph.constants)}"
        value = ir.Value(name=title, shape=ir.Shape(array.shape), type=ir.TensorType(cos.dtype))
        graph.model.graph.initializers[title] = value
        graph.constants[title] = array
        values.append(value)
    return values[0], values[1]


def _evaluate(
    graph: EngineGraph, outputs: tuple[ir.Value, ir.Value], rows: int
) -> list[NDArray[Any]] | None:
    """The graph's own ``outputs`` for one sequence of ``rows`` tokens from position 0.

    None where they depend on more than the positions.
    """
    import onnxruntime

    nodes, inputs, initializers = _needed(graph.model.graph, outputs)
    feeds = {
        contract.TOKENS: np.zeros((1, rows), dtype=np.int64),
        contract.PAST_LENGTH: np.zeros(1, dtype=np.int32),
    }
    if not {value.name for value in inputs} <= feeds.keys():
        return None
    made = [
        ir.tensor(graph.constants[value.name or ""], name=value.name)
        if value.name in graph.constants
        else value.const_value
        for value in initializers
    ]
    if any(tensor is None for tensor in made):
        return None
    model = onnx.ModelProto(ir_version=graph.model.ir_version)
    for domain, version in graph.model.opset_imports.items():
        model.opset_import.append(onnx.OperatorSetIdProto(domain=domain, version=version))
    model.graph.name = "rotary"
    model.graph.input.extend(ir.to_proto(value) for value in inputs)
    model.graph.output.extend(ir.to_proto(value) for value in outputs)
    model.graph.node.extend(ir.to_proto(node) for node in nodes)
    for value, tensor in zip(initializers, made, strict=True):
        model.graph.initializer.append(ir.to_proto(ir.Tensor(np.asarray(tensor), name=value.name)))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session: Any = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    used = {value.name for value in inputs}
    found = session.run(
        [value.name for value in outputs], {k: v for k, v in feeds.items() if k in used}
    )
    return [np.ascontiguousarray(array[0]) for array in found]


def _needed(
    graph: ir.Graph, outputs: tuple[ir.Value, ...]
) -> tuple[list[ir.Node], list[ir.Value], list[ir.Value]]:
    """Nodes, graph inputs and initializers that ``outputs`` depend on, nodes in order."""
    wanted: set[int] = set()
    inputs: dict[int, ir.Value] = {}
    initializers: dict[int, ir.Value] = {}
    pending: list[ir.Value] = list(outputs)
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is not None:
            if id(node) not in wanted:
                wanted.add(id(node))
                pending += [value for value in node.inputs if value is not None]
        elif value.is_initializer():
            initializers[id(value)] = value
        else:
            inputs[id(value)] = value
    nodes = [node for node in graph if id(node) in wanted]
    return nodes, list(inputs.values()), list(initializers.values())


def _drop_unused(graph: EngineGraph) -> None:
    """Sines and cosines of single steps that nothing reads any more."""
    from onnx_ir.passes import common

    common.RemoveUnusedNodesPass()(graph.model)
    initializers = graph.model.graph.initializers
    for name in [name for name in graph.constants if name not in initializers]:
        del graph.constants[name]
