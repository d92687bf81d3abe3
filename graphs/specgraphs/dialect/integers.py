"""Weights in integers: signed, symmetric, dequantized by a standard operator.

TensorRT reads 8- and 4-bit weights as constants in front of DequantizeLinear only, without zero
point, with scales in the dtype of what they are multiplied with; it fuses that into the product or
the lookup behind it, so the floats never exist as a whole.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from specgraphs.engine_graph import EngineGraph
from specgraphs.nodes import Nodes, replace
from specgraphs.recipes import Blocks, Made, Recipe, Signed, WeightRef

SIGNED = {4: ir.DataType.INT4, 8: ir.DataType.INT8}


def apply(graph: EngineGraph) -> None:
    """Rewrite the products and lookups on blocks of ``graph``, in place.

    Case 1: ``MatMulNBits(x, values, scales)``: ``MatMul(x, DequantizeLinear(values, scales)^T)``.
    Case 2: ``GatherBlockQuantized(values, ids, scales)``: ``Gather(DequantizeLinear(...), ids)``.
    Case 3: both on the same table: it is dequantized once, for both.
    Ensures: no other operator on integers of weights is left.
    """
    editor = _Editor(graph)
    for node in list(graph.model.graph.all_nodes()):
        if node.op_type == "MatMulNBits":
            editor.product(node)
        elif node.op_type == "GatherBlockQuantized":
            editor.lookup(node)


def _name(source: WeightRef) -> str:
    """As :func:`specgraphs.engine_graph.bind` has it: two checkpoints may use the same names."""
    return source.label if source.origin == "target" else f"{source.origin}.{source.label}"


class _Editor:
    def __init__(self, graph: EngineGraph) -> None:
        self.engine = graph
        self.graph = graph.model.graph
        self._tables: dict[Recipe, ir.Value] = {}

    def product(self, node: ir.Node) -> None:
        """``x @ table^T``."""
        x, values = node.inputs[0], node.inputs[1]
        assert x is not None and x.dtype is not None and values is not None
        shape = (node.attributes["N"].as_int(), node.attributes["K"].as_int())
        table = self._table(node, values, shape, x.dtype)
        nodes = Nodes(node.name or "product")
        turned = nodes.add("Transpose", table, perm=[1, 0])
        replace(node, nodes, {0: nodes.add("MatMul", x, turned)})

    def lookup(self, node: ir.Node) -> None:
        """Rows of the table."""
        values, ids, scales = node.inputs[:3]
        out = node.outputs[0]
        assert values is not None and scales is not None and scales.shape is not None
        assert out.dtype is not None
        *lead, count = scales.shape.numpy()
        shape = (*lead, count * node.attributes["block_size"].as_int())
        table = self._table(node, values, shape, out.dtype)
        nodes = Nodes(node.name or "lookup")
        replace(node, nodes, {0: nodes.add("Gather", table, ids, axis=0)})

    def _table(
        self, node: ir.Node, values: ir.Value, shape: tuple[int, ...], dtype: ir.DataType
    ) -> ir.Value:
        """The matrix or table as floats of ``dtype``, once for all its readers."""
        blocks = self.engine.made[values.name or ""].recipe
        assert isinstance(blocks, Blocks)
        recipe = Signed(blocks.sources, blocks.bits, blocks.size, dtype.numpy().name)
        if recipe not in self._tables:
            self._tables[recipe] = self._dequantized(recipe, shape, dtype)
        return self._tables[recipe]

    def _dequantized(self, recipe: Signed, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        *lead, columns = shape
        title = "+".join(map(_name, recipe.sources))
        values = self._made(f"{title}.signed", Made(recipe), SIGNED[recipe.bits], shape)
        if columns % recipe.size or (recipe.bits == 4 and columns % 2):
            raise ValueError(f"{title}: {columns} columns are no whole blocks of {recipe.size}")
        blocks = columns // recipe.size
        attributes: dict[str, Any]
        if blocks == 1 and len(lead) == 1:  # on blocks as long as the row TensorRT fails
            sizes, attributes = tuple(lead), {"axis": 0}
        else:
            sizes, attributes = (*lead, blocks), {"axis": len(lead), "block_size": recipe.size}
        scales = self._made(f"{title}.scales", Made(recipe, "scales"), dtype, sizes)
        nodes = Nodes(title)
        (table,) = nodes.add_many("DequantizeLinear", 1, values, scales, **attributes)
        table.dtype, table.shape = dtype, ir.Shape(shape)
        self.graph.insert_before(self.graph[0], nodes.nodes)
        return table

    def _made(self, name: str, made: Made, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        assert name not in self.graph.initializers, name
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.initializers[name] = value
        self.engine.made[name] = made
        return value
