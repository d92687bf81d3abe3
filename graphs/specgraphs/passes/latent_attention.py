"""Latent attention in the operators of ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from specgraphs import ops


class ExpandLatentAttention(InPlacePass):
    """Replace every :func:`specgraphs.ops.latent_append` by matrix products over the valid rows.

    Case 1: the only one. All query heads read the same rows, so they are the rows of one product::

        present[last - rows + 1 + r] = new[r]                    (ScatterND, in place when bound so)
        p   = softmax(scale * [rows * heads, size] @ present[:total]^T, rows behind each are -inf)
        out = p @ present[:total]

    GroupQueryAttention would go through the rows once per head. Requires: sizes of queries and
    buffers in the graph. Ensures: standard operators and FusedMatMul only.
    """

    def call(self, model: ir.Model) -> PassResult:
        found = [node for node in model.graph if node.op_type == ops.LATENT_ATTENTION]
        for node in found:
            _Expansion(node).apply(model.graph)
        if found:
            model.opset_imports["com.microsoft"] = 1
            model.opset_imports.pop(ops.OWN_DOMAIN, None)
        return PassResult(model, bool(found))


class _Expansion:
    """The nodes that stand for one latent attention, in order."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        self.nodes: list[ir.Node] = []

    def apply(self, graph: ir.Graph) -> None:
        results = self._build()
        graph.insert_before(self.node, self.nodes)
        for old, new in zip(self.node.outputs, results, strict=True):
            new.name, new.shape, new.type = old.name, old.shape, old.type
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove(self.node, safe=True)

    def _build(self) -> list[ir.Value]:
        query, key, value, past_key, past_value, last, total = self.node.inputs
        assert query is not None and query.shape is not None and query.dtype is not None
        heads, size = query.shape[2], query.shape[3]
        assert isinstance(heads, int) and isinstance(size, int)
        scale = self.node.attributes["scale"].as_float()
        total = self._add("Cast", total, to=ir.DataType.INT64)
        positions = self._positions(key, last)
        index = self._index(positions)
        halves = [
            self._add("ScatterND", past, index, new)
            for past, new in ((past_key, key), (past_value, value))
        ]
        for half, past in zip(halves, (past_key, past_value), strict=True):
            assert past is not None
            half.shape, half.type = past.shape, past.type
        rows = [self._valid(half, total) for half in halves]
        flat = self._add("Reshape", query, self._ints(0, -1, size))
        parts = self._add_many("Split", 2, flat, axis=-1, num_outputs=2)
        for part in parts:
            part.type = query.type
        products = [
            self._add("FusedMatMul", q, r, domain="com.microsoft", transB=1, alpha=scale)
            for q, r in zip(parts, rows, strict=True)
        ]
        weights = self._softmax(self._add("Add", *products), positions, total, heads, query.dtype)
        mixed = [self._add("MatMul", weights, half) for half in rows]
        out = self._add("Concat", *mixed, axis=-1)
        return [self._add("Reshape", out, self._ints(0, -1, heads, size)), *halves]

    def _positions(self, key: ir.Value | None, last: ir.Value | None) -> ir.Value:
        """Positions of the new rows, int64 ``[batch, rows]``."""
        rows = self._add("Shape", key, start=1, end=2)
        last = self._add("Cast", last, to=ir.DataType.INT64)
        first = self._add("Add", self._add("Sub", last, rows), self._ints(1))
        offsets = self._range(self._add("Squeeze", rows))
        return self._add("Add", self._add("Unsqueeze", first, self._ints(1)), offsets)

    def _index(self, positions: ir.Value) -> ir.Value:
        """Where new rows go in a buffer, int64 ``[batch, rows, 3]``: sequence, head 0, position."""
        position = self._add("Unsqueeze", positions, self._ints(2))
        zero = self._add("Sub", position, position)
        count = self._add("Squeeze", self._add("Shape", positions, start=0, end=1))
        sequence = self._add("Unsqueeze", self._range(count), self._ints(1, 2))
        return self._add("Concat", self._add("Add", zero, sequence), zero, position, axis=-1)

    def _valid(self, buffer: ir.Value, total: ir.Value) -> ir.Value:
        """``[batch, total, size]`` of a buffer ``[batch, 1, capacity, size]``."""
        rows = self._add("Slice", buffer, self._ints(0), total, self._ints(2))
        valid = self._add("Squeeze", rows, self._ints(1))
        assert buffer.shape is not None and buffer.dtype is not None
        valid.shape, valid.type = ir.Shape([None, None, buffer.shape[-1]]), buffer.type
        return valid

    def _softmax(
        self,
        scores: ir.Value,
        positions: ir.Value,
        total: ir.Value,
        heads: int,
        dtype: ir.DataType,
    ) -> ir.Value:
        """Over the rows up to each position, in fp32; ``[batch, rows * heads, total]``."""
        apart = self._add("Concat", self._ints(0, -1, heads), total, axis=0)
        scores = self._add("Reshape", scores, apart)
        scores = self._add("Cast", scores, to=ir.DataType.FLOAT)
        future = self._add(
            "Greater",
            self._range(self._add("Squeeze", total)),
            self._add("Unsqueeze", positions, self._ints(2, 3)),
        )
        hidden = self._constant(np.array(-np.inf, dtype=np.float32))
        weights = self._add("Softmax", self._add("Where", future, hidden, scores), axis=-1)
        weights = self._add("Cast", weights, to=dtype)
        together = self._add("Concat", self._ints(0, -1), total, axis=0)
        return self._add("Reshape", weights, together)

    def _range(self, stop: ir.Value) -> ir.Value:
        zero, one = (self._constant(np.array(n, dtype=np.int64)) for n in (0, 1))
        return self._add("Range", zero, stop, one)

    def _ints(self, *values: int) -> ir.Value:
        return self._constant(np.array(values, dtype=np.int64))

    def _constant(self, array: np.ndarray) -> ir.Value:
        tensor = ir.Tensor(array)
        value = self._add("Constant", value=tensor)
        value.const_value = tensor
        value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
        return value

    def _add(self, op: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return self._add_many(op, 1, *inputs, **attributes)[0]

    def _add_many(
        self, op: str, count: int, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        node = ir.node(op, list(inputs), attributes, domain=domain, num_outputs=count)
        self.nodes.append(node)
        return list(node.outputs)
