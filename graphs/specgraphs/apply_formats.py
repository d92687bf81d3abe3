"""Puts the weights of a bound graph into their formats, and layers that read the same rows in one.

Runs after :func:`specgraphs.engine_graph.bind`, when every weight has its checkpoint's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specgraphs import rotation
from specgraphs.engine_graph import EngineGraph
from specgraphs.formats import ACCURACY_LEVEL, HEAD, Formats, LinearFormat
from specgraphs.nodes import Nodes, replace
from specgraphs.recipes import Blocks, Columns, Made, Recipe, Stacked, WeightRef
from specrun import contract

QMAX = 127.0  # largest magnitude of an 8-bit term
ZERO_POINT = 128  # of activations, which the integer product takes as unsigned
SECOND = 2 * QMAX  # how much finer the second term is
SOFTCAP, SOFTCAP_NODES = ("Div", "Tanh", "Mul", "Cast"), 5
NORMS = {"RMSNormalization": 1, "SkipSimplifiedLayerNormalization": 2}  # operator: its scale


ByOrigin = Mapping[str, Formats]
Heads = Mapping[WeightRef, LinearFormat]


def heads(graphs: Iterable[EngineGraph], formats: ByOrigin) -> dict[WeightRef, LinearFormat]:
    """Weight -> format of every output head among ``graphs``; it may be a table in another one."""
    found: dict[WeightRef, LinearFormat] = {}
    for graph in graphs:
        for group in _groups(graph, formats):
            for node, ref in zip(group.nodes, group.refs, strict=True):
                if _is_head(node):
                    found[ref] = group.format
    return found


def apply(graph: EngineGraph, formats: ByOrigin, heads: Heads, *, same_bits: bool = False) -> None:
    """Rewrite ``graph`` in place. ``formats``: by the origin of a weight; ``heads``: see above.

    ``same_bits``: blocks of layers that read the same value have the same number of bits, the
    larger one: TensorRT fuses their products, and fails where these differ.

    Ensures: linear layers and tables are in the format that ``formats`` gives them; linear layers
    of one format that read the same value are one product and a Split; a table that is also a
    head, in the same format, is stored once.
    """
    editor = _Editor(graph)
    groups = list(_groups(graph, formats))
    for group in _with_same_bits(groups) if same_bits else groups:
        editor.replace_linear(group)
    for node in _tables(graph):
        table = node.inputs[0]
        assert table is not None and table.shape is not None
        ref = graph.weights[table.name or ""]
        own = formats[ref.origin]
        as_head = heads.get(ref)
        if as_head is not None and as_head.kind == "rows" and own.embedding == "w8a8":
            editor.replace_table_by_columns(node, ref, as_head)
        else:
            columns = int(table.shape[-1])  # type: ignore[arg-type]
            editor.replace_table(node, ref, own.table(ref.name, columns))
    editor.finish()


class _Group:
    """Linear layers that read the same rows, in one format."""

    def __init__(self, format: LinearFormat) -> None:
        self.format = format
        self.nodes: list[ir.Node] = []
        self.refs: list[WeightRef] = []

    @property
    def sizes(self) -> list[int]:
        return [_matrix(node).shape[0] for node in self.nodes]  # type: ignore[index,misc]


def _owner(node: ir.Node) -> ir.Graph:
    """The graph that holds ``node``: a drafter's steps are in the body of a Loop."""
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def _matrix(node: ir.Node) -> ir.Value:
    value = node.inputs[1]
    assert value is not None
    return value


def _groups(graph: EngineGraph, formats: ByOrigin) -> Iterable[_Group]:
    found: dict[tuple[Any, ...], _Group] = {}
    for node in graph.model.graph.all_nodes():
        if node.op_type != "FusedMatMul" or node.inputs[1] is None:
            continue
        name = node.inputs[1].name or ""
        ref = graph.weights.get(name)
        if ref is None or node.attributes["transB"].as_int() != 1 or "alpha" in node.attributes:
            continue
        chosen = formats[ref.origin].linear(ref.name, head=_is_head(node))
        key = (id(node.graph), id(node.inputs[0]), chosen, id(chosen.smoothing))
        group = found.setdefault(key, _Group(chosen))
        group.nodes.append(node)
        group.refs.append(ref)
    return found.values()


def _with_same_bits(groups: Sequence[_Group]) -> list[_Group]:
    """Groups in blocks of one size that read the same value, put together in the most bits."""
    merged: dict[tuple[Any, ...], _Group] = {}
    for group in groups:
        first = group.nodes[0]
        blocks = (group.format.kind, group.format.block_size)
        alone = None if group.format.kind == "blocks" else id(group)
        known = merged.setdefault((id(first.graph), id(first.inputs[0]), blocks, alone), group)
        if known is group:
            continue
        known.format = max((known.format, group.format), key=lambda format: format.bits)
        known.nodes += group.nodes
        known.refs += group.refs
    return list(merged.values())


def _is_head(node: ir.Node) -> bool:
    """Whether a linear layer gives logits: nothing but a softcap and a cast is behind it."""
    name = node.inputs[1].name if node.inputs[1] is not None else None
    value = node.outputs[0]
    for _ in range(SOFTCAP_NODES):
        if value.is_graph_output():
            return value.name == contract.LOGITS
        after = [use.node for use in value.uses() if use.node.op_type in SOFTCAP]
        if not after:
            break
        value = after[0].outputs[0]
    return bool(HEAD.search(name or ""))


def _tables(graph: EngineGraph) -> list[ir.Node]:
    return [
        node
        for node in graph.model.graph.all_nodes()
        if node.op_type == "Gather"
        and node.domain == ""
        and node.inputs[0] is not None
        and node.inputs[0].name in graph.weights
        and node.inputs[0].dtype is not None
        and node.inputs[0].dtype.is_floating_point()
        and ("axis" not in node.attributes or node.attributes["axis"].as_int() == 0)
    ]


class _Editor:
    """Replaces nodes of one graph and of the loops in it; initializers are all outside of those."""

    def __init__(self, graph: EngineGraph) -> None:
        self.engine = graph
        self.graph = graph.model.graph
        self.values: dict[tuple[Any, ...], ir.Value] = {}

    # -- linear layers

    def replace_linear(self, group: _Group) -> None:
        """One product for all layers of ``group``, and a Split where they are several."""
        chosen, first = group.format, group.nodes[0]
        if chosen.kind == "float" and len(group.nodes) == 1:
            return
        total = sum(group.sizes)
        nodes = Nodes(first.name or "linear")
        sources = tuple(group.refs)
        x = first.inputs[0]
        assert x is not None and x.dtype is not None
        if chosen.kind == "float":
            matrix = self._made(Stacked(sources), "values", x.dtype, (total, _columns(first)))
            y = nodes.add("FusedMatMul", x, matrix, domain="com.microsoft", transB=1)
        elif chosen.kind == "blocks":
            y = self._blocks(nodes, x, sources, chosen, total, _columns(first))
        else:
            y = self._rows(nodes, x, group, total, _columns(first))
        outputs = [node.outputs[0] for node in group.nodes]
        if len(outputs) == 1:
            results = [y]
        else:
            # Of x, as the product before a bias has no type from tracing.
            y.shape = None if x.shape is None else ir.Shape([*x.shape[:-1], total])
            y.type = ir.TensorType(x.dtype)
            sizes = self.constant(np.array(group.sizes, dtype=np.int64))
            results = nodes.add_many("Split", len(outputs), y, sizes, axis=-1)
        owner = _owner(first)
        owner.insert_before(first, nodes.nodes)
        for old, new in zip(outputs, results, strict=True):
            new.shape, new.type, new.name = old.shape, old.type, old.name
            old.name = None
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        owner.remove(group.nodes, safe=True)

    def _blocks(
        self,
        nodes: Nodes,
        x: ir.Value,
        sources: tuple[WeightRef, ...],
        chosen: LinearFormat,
        rows: int,
        columns: int,
    ) -> ir.Value:
        inputs = self._block_values(sources, chosen, rows, columns, as_table=False)
        return nodes.add(
            "MatMulNBits",
            x,
            *inputs,
            domain="com.microsoft",
            K=columns,
            N=rows,
            bits=chosen.bits,
            block_size=chosen.block_size,
            accuracy_level=ACCURACY_LEVEL,
        )

    def _rows(
        self,
        nodes: Nodes,
        x: ir.Value,
        group: _Group,
        rows: int,
        columns: int,
    ) -> ir.Value:
        """Quantize row by row, multiply integers, rescale.

        In formulas, with zero point 128 left out::

            x' = rotated(x / smoothing)  m = max |x'| of the row          d = x' / m
            q = round(127 d)            q2 = round(127 * 254 * (d - q / 127))
            y = m * scales * (q @ values / 127 + q2 @ values / (127 * 254))
        """
        chosen, owner = group.format, _owner(group.nodes[0])
        values, scales = self._column_values(tuple(group.refs), chosen, rows, columns)
        if chosen.smoothing is not None:
            inverse = (np.float32(1) / chosen.smoothing).astype(np.float32)
            if not self._fold_in_norm(x, inverse, group.nodes):
                scaled = nodes.add("Mul", x, self.constant(inverse))
                scaled.shape, scaled.type = x.shape, x.type
                x = scaled
        if chosen.rotation:
            shape = self._shape(nodes, x, columns, owner)
            turned = self._rotated(nodes, x, chosen.rotation, shape)
            turned.shape, turned.type = x.shape, x.type
            x = turned
        # A row of zeros is divided by zero, and what comes of it is multiplied by zero again.
        largest = nodes.add(
            "ReduceMax", nodes.add("Abs", x), self.constant(np.array([-1], np.int64)), keepdims=1
        )
        unit = nodes.add("Div", x, largest)
        step, zero = self._scalar(1 / QMAX), self.constant(np.array(ZERO_POINT, np.uint8))
        product = {"domain": "com.microsoft"}
        if chosen.terms == 1:
            q = nodes.add("QuantizeLinear", unit, step, zero)
            y = nodes.add("MatMulIntegerToFloat", q, values, step, scales, zero, **product)
            return nodes.add("Mul", y, largest)
        # Both terms in one product, one sequence behind the other.
        q = nodes.add("QuantizeLinear", unit, step, zero)
        lost = nodes.add("Sub", unit, nodes.add("DequantizeLinear", q, step, zero))
        finer = nodes.add("QuantizeLinear", lost, self._scalar(1 / (QMAX * SECOND)), zero)
        both = nodes.add("Concat", q, finer, axis=0)
        y = nodes.add("MatMulIntegerToFloat", both, values, step, scales, zero, **product)
        # Their weighted sum is a product with a row of two: ONNX Runtime does it in one pass.
        shares = self.constant(np.array([[1, 1 / SECOND]], dtype=np.float32))
        halves = nodes.add("Reshape", y, self.constant(np.array([2, -1], np.int64)))
        total = nodes.add("MatMul", shares, halves)
        y = nodes.add("Reshape", total, self._shape(nodes, x, rows, owner))
        return nodes.add("Mul", y, largest)

    def _rotated(self, nodes: Nodes, x: ir.Value, size: int, shape: ir.Value) -> ir.Value:
        """``x``, of ``shape``, with pieces of ``size`` columns rotated."""
        pieces = nodes.add("Reshape", x, self.constant(np.array([-1, size], np.int64)))
        turned = nodes.add("MatMul", pieces, self.constant(rotation.matrix(size)))
        return nodes.add("Reshape", turned, shape)

    def _shape(self, nodes: Nodes, x: ir.Value, columns: int, owner: ir.Graph) -> ir.Value:
        """The shape of ``x`` with another last size, once for values of the same sizes there."""
        assert x.shape is not None
        sizes = (id(owner), *(str(size) for size in x.shape[:-1]))
        if (sizes,) not in self.values:
            self.values[(sizes,)] = nodes.add("Shape", x, end=-1)
        if (sizes, columns) not in self.values:
            last = self.constant(np.array([columns], np.int64))
            self.values[(sizes, columns)] = nodes.add("Concat", self.values[(sizes,)], last, axis=0)
        return self.values[(sizes, columns)]

    def _fold_in_norm(
        self, x: ir.Value, factor: NDArray[np.float32], readers: Sequence[ir.Node]
    ) -> bool:
        """Multiply the scale of the norm that gives ``x`` instead of ``x`` itself.

        Only where nothing but ``readers`` reads x. ONNX Runtime multiplies the two when it loads.
        """
        norm = x.producer()
        if norm is None or norm.op_type not in NORMS or x.is_graph_output():
            return False
        if {id(use.node) for use in x.uses()} - {id(node) for node in readers}:
            return False
        index = NORMS[norm.op_type]
        product = ir.node("Mul", [norm.inputs[index], self.constant(factor)])
        product.outputs[0].name = f"{x.name}.scale"
        _owner(norm).insert_before(norm, [product])
        norm.replace_input_with(index, product.outputs[0])
        return True

    # -- tables

    def replace_table(self, node: ir.Node, ref: WeightRef, chosen: LinearFormat) -> None:
        """Rows of a table of integers; a table of floats stays."""
        table = node.inputs[0]
        if chosen.kind == "float" or table is None or table.shape is None:
            return
        *lead, columns = table.shape.numpy()
        rows = int(np.prod(lead))
        data, *rest = self._block_values(
            (ref,), chosen, rows, columns, as_table=True, lead=tuple(lead)
        )
        nodes = Nodes(node.name or "gather")
        out = nodes.add(
            "GatherBlockQuantized",
            data,
            node.inputs[1],
            *rest,
            domain="com.microsoft",
            gather_axis=0,
            quantize_axis=len(lead),
            block_size=chosen.block_size,
            bits=chosen.bits,
        )
        replace(node, nodes, {0: out})

    def replace_table_by_columns(self, node: ir.Node, ref: WeightRef, chosen: LinearFormat) -> None:
        """Rows of a table that stands transposed, as the head reads it."""
        assert node.inputs[0] is not None and node.inputs[0].shape is not None
        rows, columns = node.inputs[0].shape.numpy()
        values, scales = self._column_values((ref,), chosen, rows, columns)
        nodes = Nodes(node.name or "gather")
        ids = node.inputs[1]
        found = nodes.add("Gather", values, ids, axis=1)  # [columns, batch, rows]
        found = nodes.add("Transpose", found, perm=[1, 2, 0])
        found = nodes.add("Cast", found, to=ir.DataType.FLOAT)
        scale = nodes.add("Gather", scales, ids, axis=0)
        scale = nodes.add("Unsqueeze", scale, self.constant(np.array([-1], np.int64)))
        out = nodes.add("Mul", found, scale)
        if chosen.rotation:  # back again
            last = self.constant(np.array([columns], np.int64))
            shape = nodes.add("Concat", nodes.add("Shape", ids), last, axis=0)
            out = self._rotated(nodes, out, chosen.rotation, shape)
        if chosen.smoothing is not None:
            inverse = np.float32(1) / chosen.smoothing
            out = nodes.add("Mul", out, self.constant(inverse.astype(np.float32)))
        replace(node, nodes, {0: out})

    # -- initializers

    def _block_values(
        self,
        sources: tuple[WeightRef, ...],
        chosen: LinearFormat,
        rows: int,
        columns: int,
        *,
        as_table: bool,
        lead: tuple[int, ...] = (),
    ) -> list[ir.Value]:
        size, bits = chosen.block_size, chosen.bits
        blocks = -(-columns // size)
        lead = lead or (rows,)
        recipe = Blocks(sources, bits, size)
        shape = (*lead, columns * bits // 8) if as_table else (rows, blocks, size * bits // 8)
        made = [
            self._made(recipe, "values", ir.DataType.UINT8, shape),
            self._made(recipe, "scales", ir.DataType.FLOAT, (*lead, blocks)),
        ]
        if bits == 4:
            packed = -(-blocks * bits // 8)
            made.append(self._made(recipe, "zeros", ir.DataType.UINT8, (*lead, packed)))
        return made

    def _column_values(
        self, sources: tuple[WeightRef, ...], chosen: LinearFormat, rows: int, columns: int
    ) -> tuple[ir.Value, ir.Value]:
        recipe = Columns(sources, chosen.smoothing, chosen.rotation)
        return (
            self._made(recipe, "values", ir.DataType.INT8, (columns, rows)),
            self._made(recipe, "scales", ir.DataType.FLOAT, (rows,)),
        )

    def _made(
        self, recipe: Recipe, part: Any, dtype: ir.DataType, shape: Sequence[int]
    ) -> ir.Value:
        """The initializer for a part of ``recipe``, once per shape."""
        key = (recipe, part, tuple(shape))
        if key not in self.values:
            names = "+".join(self._name(ref) for ref in recipe.sources)
            kind = type(recipe).__name__.lower()
            name = f"{names}.{kind}.{part}.{len(self.values)}"
            value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
            self.graph.initializers[name] = value
            self.engine.made[name] = Made(recipe, part)
            self.values[key] = value
        return self.values[key]

    @staticmethod
    def _name(ref: WeightRef) -> str:
        name = ref.label.removesuffix(".weight")
        return name if ref.origin == "target" else f"{ref.origin}.{name}"

    def constant(self, array: np.ndarray) -> ir.Value:
        """A small constant, once per value."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.values:
            name = f"constant.{len(self.values)}"
            tensor = ir.Tensor(array, name=name)
            value = ir.Value(
                name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype)
            )
            value.const_value = tensor
            self.graph.initializers[name] = value
            self.values[key] = value
        return self.values[key]

    def _scalar(self, number: float) -> ir.Value:
        return self.constant(np.array(number, dtype=np.float32))

    def finish(self) -> None:
        """Drop weights that nothing reads any more."""
        for name in list(self.engine.weights):
            value = self.graph.initializers[name]
            if not value.uses():
                del self.graph.initializers[name]
                del self.engine.weights[name]
        self.engine.model.opset_imports["com.microsoft"] = 1


def _columns(node: ir.Node) -> int:
    shape = _matrix(node).shape
    assert shape is not None
    return int(shape[1])  # type: ignore[arg-type]
