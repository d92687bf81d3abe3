"""The most probable token of a row, found block by block, and how far ahead it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from specrun import contract

LARGEST_BLOCK = 512


class ArgmaxInBlocks(InPlacePass):
    """``argmax`` of ``logits`` as the contract has it, and the output ``margin`` beside it.

    Case 1: the graph has both outputs and a vocabulary that divides into blocks: the maxima of all
    blocks are found in one fast pass, then the block and the token in it; a margin costs nothing.
    Case 2: it does not divide: the two best of all logits.
    Case 3: the graph has no such outputs: it stays.
    Ensures: of equal logits the first is taken, as before.
    """

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        outputs = {value.name: value for value in graph.outputs}
        argmax = outputs.get(contract.ARGMAX)
        node = argmax.producer() if argmax is not None else None
        if argmax is None or node is None or node.op_type != "ArgMax":
            return PassResult(model, False)
        logits = node.inputs[0]
        assert logits is not None and logits.shape is not None
        size = logits.shape[-1]
        assert isinstance(size, int)
        block = next((n for n in range(min(LARGEST_BLOCK, size), 15, -1) if size % n == 0), None)
        build = _Nodes()
        best, margin = build.whole(logits) if block is None else build.blocks(logits, size, block)
        graph.insert_before(node, build.nodes)
        best.shape, best.type, best.name = argmax.shape, argmax.type, argmax.name
        argmax.name = None
        argmax.replace_all_uses_with(best, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        if contract.HIDDEN in outputs:  # of a target; an MTP layer has no margin
            margin.name = contract.MARGIN
            margin.type, margin.shape = ir.TensorType(ir.DataType.FLOAT), best.shape
            graph.outputs.insert(list(graph.outputs).index(best) + 1, margin)
        return PassResult(model, True)


class _Nodes:
    """The nodes of one search."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def blocks(self, logits: ir.Value, size: int, block: int) -> tuple[ir.Value, ir.Value]:
        """In formulas, for each row, with ``maxima[b] = max of block b``::

        b0, b1   = the two largest of maxima      i0, i1 = the two largest in block b0
        argmax   = b0 * block + i0                 margin = value(i0) - max(value(b1), value(i1))
        """
        parts = self._add("Reshape", logits, self._ints(0, 0, size // block, block))
        maxima = self._add("ReduceMax", parts, self._ints(-1), keepdims=0)
        count = self._ints(min(2, size // block))
        tops, where = self._add_many("TopK", 2, maxima, count, axis=-1)
        first = self._slice(where, 0)
        inside = self._add("GatherND", parts, first, batch_dims=2)
        values, places = self._add_many("TopK", 2, inside, self._ints(2), axis=-1)
        best = self._add("Add", self._add("Mul", first, self._ints(block)), self._slice(places, 0))
        second = self._slice(values, 1)
        if size > block:
            second = self._add("Max", second, self._slice(tops, 1))
        return self._done(best, self._slice(values, 0), second)

    def whole(self, logits: ir.Value) -> tuple[ir.Value, ir.Value]:
        values, places = self._add_many("TopK", 2, logits, self._ints(2), axis=-1)
        return self._done(self._slice(places, 0), self._slice(values, 0), self._slice(values, 1))

    def _done(self, best: ir.Value, value: ir.Value, second: ir.Value) -> tuple[ir.Value, ir.Value]:
        axis = self._ints(-1)
        margin = self._add("Sub", value, second)
        return self._add("Squeeze", best, axis), self._add("Squeeze", margin, axis)

    def _slice(self, value: ir.Value, index: int) -> ir.Value:
        """Of the last axis, which stays."""
        return self._add("Slice", value, self._ints(index), self._ints(index + 1), self._ints(-1))

    def _ints(self, *values: int) -> ir.Value:
        tensor = ir.Tensor(np.array(values, dtype=np.int64))
        made = self._add("Constant", value=tensor)
        made.const_value = tensor
        made.dtype, made.shape = ir.DataType.INT64, ir.Shape([len(values)])
        return made

    def _add(self, op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return self._add_many(op, 1, *inputs, **attributes)[0]

    def _add_many(
        self, op: str, count: int, *inputs: ir.Value, **attributes: Any
    ) -> list[ir.Value]:
        node = ir.node(op, list(inputs), attributes, num_outputs=count)
        self.nodes.append(node)
        return list(node.outputs)
