"""Attention over KV buffers of a fixed size, with a mask that the graph makes from the lengths.

Paper and operators: ONNX 1.19, TensorScatter-24 and Attention-24. For row r of a sequence whose
rows end at position ``last``, R of them::

    start     = last - (R - 1)
    present   = past with rows start .. last replaced by the new ones    (in place when bound so)
    mask[r,c] = c <= start + r  and  c > start + r - window
    out[r]    = softmax(scale * query[r] . present_key[c] where mask) @ present_value

TensorRT for RTX 1.7 has kernels for ``Attention`` in fp16 and bf16 with heads of 16 to 256 values;
with fewer than four heads not for every number of rows. All else is written out, softmax in fp32.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import InPlacePass, PassResult

from specgraphs.dialect.sizes import is_buffer
from specgraphs.nodes import Nodes, replace
from specrun import contract

FUSED_HEADS = range(16, 257, 8)  # values of a head
FUSED_FROM = 4  # heads
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
LOWEST = float(np.finfo(np.float32).min)  # of a masked score; finite, so that nothing becomes NaN
AXIS = contract.KV_AXIS


class FixedAttention(InPlacePass):
    """Every GroupQueryAttention becomes TensorScatter and attention over all ``capacity`` rows.

    Case 1: queries, keys and values are three inputs: keys and values go into the buffers.
    Case 2: keys are empty (a layer that reads what another one wrote): nothing is written.
    Case 3: they are one input that the node splits and rotates itself, by tables of sines and
    cosines: split and rotated by standard operators first.
    Case 4: buffers that another operator (ScatterND of latent attention) writes at the positions
    behind ``past_length``: TensorScatter writes them, and what was cut to the valid rows has all.
    Requires: one query row per new position. Ensures: masks are shared by the layers that can.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        masks = _Masks(self.capacity)
        found = [node for node in graph if node.op_type == "GroupQueryAttention"]
        for node in found:
            _Attention(node, masks).rewrite()
        latent = [n for n in graph if n.op_type == "ScatterND" and is_buffer(n.inputs[0])]
        for node in latent:
            self._write_latent(node)
        return PassResult(model, bool(found or latent))

    def _write_latent(self, node: ir.Node) -> None:
        """``ScatterND(past, index, new [batch, rows, half])`` and the Slice behind it."""
        nodes = Nodes(node.name or node.outputs[0].name or "latent")
        new = nodes.add("Unsqueeze", node.inputs[2], nodes.ints(1))
        past_length = next(v for v in _graph(node).inputs if v.name == contract.PAST_LENGTH)
        start = nodes.add("Cast", past_length, to=ir.DataType.INT64)
        present = nodes.add("TensorScatter", node.inputs[0], new, start, axis=AXIS, mode="linear")
        cuts = [use.node for use in node.outputs[0].uses() if use.node.op_type == "Slice"]
        replace(node, nodes, {0: present})
        for cut in cuts:
            cut.outputs[0].replace_all_uses_with(present)
            _everywhere(cut.inputs[2], self.capacity)


def _everywhere(total: ir.Value | None, capacity: int) -> None:
    """Let everything that reads the number of valid rows read the capacity."""
    producer = None if total is None else total.producer()
    if total is None or producer is None or producer.op_type == "Constant":
        return
    nodes = Nodes("capacity")
    fixed = nodes.ints(capacity)
    graph = _graph(producer)
    graph.insert_before(graph[0], nodes.nodes)
    total.replace_all_uses_with(fixed)


def _graph(node: ir.Node | None) -> ir.Graph:
    assert node is not None and isinstance(node.graph, ir.Graph)
    return node.graph


class _Attention:
    """One node of GroupQueryAttention and what stands for it."""

    def __init__(self, node: ir.Node, masks: _Masks) -> None:
        self.node, self.masks = node, masks
        self.nodes = Nodes(node.name or node.outputs[0].name or "attention")
        self.heads = node.attributes["num_heads"].as_int()
        self.kv_heads = node.attributes["kv_num_heads"].as_int()
        window = node.attributes["local_window_size"].as_int()
        self.window = window if window > 0 else None
        past_key, last = node.inputs[3], node.inputs[5]
        assert past_key is not None and past_key.shape is not None and last is not None
        assert past_key.dtype is not None
        self.head, self.dtype, self.last = int(past_key.shape[-1]), past_key.dtype, last  # type: ignore[arg-type]

    def rewrite(self) -> None:
        query, key, value = self._inputs()
        start, mask = self.masks.of(self.node, self.last, self.window)
        kept = list(self.node.inputs[3:5])
        results: dict[int, ir.Value] = {}
        if not _is_empty(key):
            for index, new in enumerate((key, value)):
                rows = self._apart(new, self.kv_heads)
                kept[index] = results[index + 1] = self.nodes.add(
                    "TensorScatter", kept[index], rows, start, axis=AXIS, mode="linear"
                )
        # Not an attribute: TensorRT would scale the keys too, for every reader of them apart, and
        # ends in a crash where two layers read the same ones.
        heads = self._apart(query, self.heads)
        scale = self.node.attributes["scale"].as_float()
        if scale != 1:
            heads = self.nodes.add("Mul", heads, self.nodes.constant(self._number(scale)))
        build = self._fused if self.is_fused else self._written_out
        attended = build(heads, kept[0], kept[1], mask)
        out = self.nodes.add("Transpose", attended, perm=[0, 2, 1, 3])
        results[0] = self.nodes.add("Reshape", out, self.nodes.ints(0, 0, -1))
        replace(self.node, self.nodes, results)

    @property
    def is_fused(self) -> bool:
        """Whether TensorRT has a kernel for it."""
        return self.dtype in HALVES and self.heads >= FUSED_FROM and self.head in FUSED_HEADS

    def _number(self, value: float) -> NDArray[Any]:
        """A scalar of the dtype of the activations."""
        return np.array(value, dtype=self.dtype.numpy())

    def _inputs(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Query, key and value ``[batch, rows, heads * head]``, rotated."""
        query, key, value = self.node.inputs[:3]
        assert query is not None
        if key is not None and value is not None:
            return query, key, value
        sizes = self.nodes.ints(
            *(n * self.head for n in (self.heads, self.kv_heads, self.kv_heads))
        )
        query, key, value = self.nodes.add_many("Split", 3, query, sizes, axis=-1)
        places = self.masks.positions(self.node, self.last)
        return (
            self._rotated(query, self.heads, places),
            self._rotated(key, self.kv_heads, places),
            value,
        )

    def _rotated(self, x: ir.Value, heads: int, places: ir.Value) -> ir.Value:
        cos, sin = self.node.inputs[7], self.node.inputs[8]
        assert cos is not None and cos.shape is not None
        interleaved = self.node.attributes["rotary_interleaved"].as_int()
        size = 2 * int(cos.shape[-1])  # type: ignore[arg-type]
        part: dict[str, Any] = {} if size == self.head else {"rotary_embedding_dim": size}
        rows = [self.nodes.add("Gather", table, places, axis=0) for table in (cos, sin)]
        return self.nodes.add(
            "RotaryEmbedding", x, *rows, num_heads=heads, interleaved=interleaved, **part
        )

    def _apart(self, x: ir.Value, heads: int) -> ir.Value:
        """``[batch, rows, heads * head]`` as ``[batch, heads, rows, head]``."""
        split = self.nodes.add("Reshape", x, self.nodes.ints(0, 0, heads, self.head))
        return self.nodes.add("Transpose", split, perm=[0, 2, 1, 3])

    def _fused(
        self, query: ir.Value, key: ir.Value | None, value: ir.Value | None, mask: ir.Value
    ) -> ir.Value:
        return self.nodes.add("Attention", query, key, value, mask, scale=1.0)

    def _written_out(
        self, query: ir.Value, key: ir.Value | None, value: ir.Value | None, mask: ir.Value
    ) -> ir.Value:
        """The heads that share keys are an axis of their own: ``[batch, kv heads, group, ...]``."""
        add, group = self.nodes.add, self.heads // self.kv_heads
        query = add("Reshape", query, self.nodes.ints(0, self.kv_heads, group, -1, self.head))
        turned = add("Transpose", add("Unsqueeze", key, self.nodes.ints(2)), perm=[0, 1, 2, 4, 3])
        scores = add("Cast", add("MatMul", query, turned), to=ir.DataType.FLOAT)
        lowest = self.nodes.constant(np.array(LOWEST, np.float32))
        scores = add("Where", add("Unsqueeze", mask, self.nodes.ints(1)), scores, lowest)
        weights = add("Cast", add("Softmax", scores, axis=-1), to=self.dtype)
        out = add("MatMul", weights, add("Unsqueeze", value, self.nodes.ints(2)))
        return add("Reshape", out, self.nodes.ints(0, self.heads, -1, self.head))


def _is_empty(key: ir.Value) -> bool:
    """Whether a layer adds nothing to the KV: its keys have no rows."""
    return key.shape is not None and key.shape[1] == 0


class _Masks:
    """Where rows stand and what they see, made once for all layers that agree."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._made: dict[Hashable, ir.Value] = {}

    def of(self, node: ir.Node, last: ir.Value, window: int | None) -> tuple[ir.Value, ir.Value]:
        """First position int64 ``[batch]``, and mask bool ``[batch, 1, rows, capacity]``."""
        places = self.positions(node, last)
        key = ("mask", places, window)
        if key not in self._made:
            nodes = Nodes(f"{places.name}.mask.{window or 'all'}")
            mask = self._mask(nodes, places, window)
            node.graph.insert_before(node, nodes.nodes)  # type: ignore[union-attr]
            self._made[key] = mask
        return self._made[("start", places)], self._made[key]

    def positions(self, node: ir.Node, last: ir.Value) -> ir.Value:
        """Position of each query row of the attention ``node``, int64 ``[batch, rows]``."""
        query = node.inputs[0]
        assert query is not None and query.shape is not None
        key = ("places", last, str(query.shape[1]))
        if key not in self._made:
            nodes = Nodes(f"{last.name}.positions.{query.shape[1]}")
            rows = nodes.add("Shape", query, start=1, end=2)
            ends = nodes.add("Cast", last, to=ir.DataType.INT64)
            start = nodes.add("Add", nodes.add("Sub", ends, rows), nodes.ints(1))
            zero, one = (nodes.constant(np.array(n, np.int64)) for n in (0, 1))
            steps = nodes.add("Range", zero, nodes.add("Squeeze", rows), one)
            places = nodes.add("Add", nodes.add("Unsqueeze", start, nodes.ints(1)), steps)
            node.graph.insert_before(node, nodes.nodes)  # type: ignore[union-attr]
            self._made[key] = places
            self._made[("start", places)] = start
        return self._made[key]

    def _mask(self, nodes: Nodes, places: ir.Value, window: int | None) -> ir.Value:
        columns = nodes.constant(np.arange(self.capacity, dtype=np.int64).reshape(1, 1, 1, -1))
        rows = nodes.add("Unsqueeze", places, nodes.ints(1, 3))
        seen = nodes.add("LessOrEqual", columns, rows)
        if window is None or window >= self.capacity:
            return seen
        before = nodes.add("Sub", rows, nodes.ints(window))
        return nodes.add("And", seen, nodes.add("Greater", columns, before))
