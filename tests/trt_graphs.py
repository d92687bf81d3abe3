"""Small graphs in the dialect for TensorRT, written by hand, for its rules and its builder."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from specrun.contract import DType, TensorSpec

VOCABULARY, HEADS, KV_HEADS = 64, 4, 2
SPEC_TYPES = {
    TensorProto.FLOAT: DType.FLOAT32,
    TensorProto.FLOAT16: DType.FLOAT16,
    TensorProto.BFLOAT16: DType.BFLOAT16,
    TensorProto.INT64: DType.INT64,
    TensorProto.INT32: DType.INT32,
}
Size = int | str


class GraphBuilder:
    """Nodes, initializers and borders as they come; ``node`` names each node by what it makes."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def node(self, op: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        """Append a node and return its first output."""
        made = helper.make_node(op, inputs, outputs, name=f"{outputs[0]}/{op}", **attributes)
        self.nodes.append(made)
        return outputs[0]

    def constant(self, name: str, values: Any, dtype: int | None = None) -> str:
        """An initializer: integers as they are, floats as ``dtype``, int4 packed."""
        array = np.asarray(values)
        if dtype is None:
            self.initializers.append(numpy_helper.from_array(array, name))
        elif dtype == TensorProto.INT4:
            bits = array.astype(np.int64).ravel() & 15
            packed = (bits[0::2] | bits[1::2] << 4).astype(np.uint8).tobytes()
            self.initializers.append(helper.make_tensor(name, dtype, array.shape, packed, raw=True))
        else:
            flat = array.astype(np.float64).ravel()
            made = numpy_helper.to_array(helper.make_tensor(name, dtype, array.shape, flat))
            raw = helper.make_tensor(name, dtype, array.shape, made.tobytes(), raw=True)
            self.initializers.append(raw)  # as bytes, so that they can lie in a file of weights
        return name

    def input(self, name: str, dtype: int, *shape: Size) -> str:
        """A graph input."""
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, *shape: Size) -> str:
        """A graph output."""
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def model(self) -> onnx.ModelProto:
        """The finished model: opset 24, IR version 11."""
        graph = helper.make_graph(
            self.nodes, "engine", self.inputs, self.outputs, self.initializers
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
        model.ir_version = 11
        return model


def target(
    dtype: int = TensorProto.FLOAT16,
    head: int = 16,
    capacity: int = 64,
    batch: Size = "batch",
    weights: str = "float",
    *,
    fused: bool = True,
    seed: int = 0,
) -> onnx.ModelProto:
    """A target of one layer: embedding, attention over its KV, logits of the wanted rows.

    ``weights``: ``float``, ``int8`` per channel or ``int4`` in blocks of 32. ``fused``: Attention
    instead of MatMul and Softmax.
    """
    g, rng, hidden = GraphBuilder(), np.random.default_rng(seed), HEADS * head
    g.input("tokens", TensorProto.INT64, batch, "rows")
    g.input("past_length", TensorProto.INT32, batch)
    g.input("wanted_rows", TensorProto.INT64, "wanted")
    table = rng.normal(size=(VOCABULARY, hidden))
    x = g.node("Gather", [_weight(g, "embedding", table, dtype, weights), "tokens"], "x")
    g.constant("gain", np.ones(hidden), dtype)
    x = g.node("RMSNormalization", [x, "gain"], "normed", axis=-1, epsilon=1e-6)
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        weight = rng.normal(size=(hidden, heads * head)) / np.sqrt(hidden)
        rows = g.node("MatMul", [x, _weight(g, f"w{name}", weight, dtype, weights)], f"{name}_rows")
        g.constant(f"{name}_shape", np.array([0, 0, heads, head]))
        split = g.node("Reshape", [rows, f"{name}_shape"], f"{name}_split")
        g.node("Transpose", [split], name, perm=[0, 2, 1, 3])
    caches = write_caches(g, dtype, batch, capacity, head)
    mask = causal_mask(g, capacity)
    if fused:
        attended = g.node("Attention", ["q", *caches, mask], "attended", scale=head**-0.5)
    else:
        attended = _spelled_out(g, caches, mask, dtype, head)
    g.constant("joined_shape", np.array([0, 0, hidden]))
    turned = g.node("Transpose", [attended], "turned", perm=[0, 2, 1, 3])
    joined = g.node("Reshape", [turned, "joined_shape"], "joined")
    wanted = g.node("Gather", [joined, "wanted_rows"], "wanted_hidden", axis=1)
    head_weight = rng.normal(size=(hidden, VOCABULARY)) / np.sqrt(hidden)
    half = g.node(
        "MatMul", [wanted, _weight(g, "head", head_weight, dtype, weights)], "half_logits"
    )
    g.node("Cast", [half], "logits", to=TensorProto.FLOAT)
    best(g)
    g.output("logits", TensorProto.FLOAT, batch, "wanted", VOCABULARY)
    g.output("argmax", TensorProto.INT64, batch, "wanted")
    g.output("margin", TensorProto.FLOAT, batch, "wanted")
    for part in ("key", "value"):
        g.output(f"present.0.{part}", dtype, batch, KV_HEADS, capacity, head)
    return g.model()


def write_caches(
    g: GraphBuilder, dtype: int, batch: Size, capacity: int, head: int
) -> tuple[str, str]:
    """New keys ``k`` and values ``v`` into the buffers of layer 0."""
    g.node("Cast", ["past_length"], "position", to=TensorProto.INT64)
    for part, new in (("key", "k"), ("value", "v")):
        g.input(f"past.0.{part}", dtype, batch, KV_HEADS, capacity, head)
        ports = [f"past.0.{part}", new, "position"]
        g.node("TensorScatter", ports, f"present.0.{part}", axis=2, mode="linear")
    return "present.0.key", "present.0.value"


def causal_mask(g: GraphBuilder, capacity: int) -> str:
    """bool [batch, 1, rows, capacity]: columns at most past_length + row."""
    g.constant("zero", np.array(0))
    g.constant("one", np.array(1))
    g.constant("axis_1", np.array([1]))
    g.constant("axes_1_3", np.array([1, 3]))
    g.constant("columns", np.arange(capacity).reshape(1, 1, 1, capacity))
    size = g.node("Shape", ["tokens"], "rows_shape", start=1, end=2)
    count = g.node("Squeeze", [size], "rows_count")
    rows = g.node("Range", ["zero", count, "one"], "row_numbers")
    start = g.node("Unsqueeze", ["position", "axis_1"], "row_start")
    last = g.node("Add", [start, rows], "last_column")
    limit = g.node("Unsqueeze", [last, "axes_1_3"], "limit")
    return g.node("LessOrEqual", ["columns", limit], "mask")


def best(g: GraphBuilder) -> None:
    """The best token of ``logits``, and by how much it leads."""
    g.constant("two", np.array([2]))
    g.constant("halves", np.array([1, 1]))
    g.constant("last_axis", np.array([-1]))
    g.node("TopK", ["logits", "two"], "best_logits", "best_tokens", axis=-1)
    g.node("Split", ["best_logits", "halves"], "first_logit", "second_logit", axis=-1)
    lead = g.node("Sub", ["first_logit", "second_logit"], "lead")
    g.node("Squeeze", [lead, "last_axis"], "margin")
    g.node("Split", ["best_tokens", "halves"], "first_token", "second_token", axis=-1)
    g.node("Squeeze", ["first_token", "last_axis"], "argmax")


def _weight(g: GraphBuilder, name: str, values: Any, dtype: int, form: str) -> str:
    if form == "float":
        return g.constant(name, values, dtype)
    largest, blocked = (127, 1) if form == "int8" else (7, 32)
    # A table is read by rows, so each row of it has its own scales.
    axis = (0 if form == "int8" else 1) if name == "embedding" else (1 if form == "int8" else 0)
    whole = np.abs(values)
    if form == "int8":
        scale = whole.max(axis=1 - axis) / largest
        spread = np.expand_dims(scale, 1 - axis)
        attributes = {"axis": axis}
    else:
        rows, columns = values.shape
        cut = (rows // blocked, blocked, columns) if axis == 0 else (rows, columns // blocked, -1)
        scale = whole.reshape(cut).max(axis=1 if axis == 0 else 2) / largest
        spread = np.repeat(scale, blocked, axis=axis)
        attributes = {"axis": axis, "block_size": blocked}
    integers = np.rint(values / spread)
    if form == "int8":
        g.constant(f"{name}_q", integers.astype(np.int8))
    else:
        g.constant(f"{name}_q", integers, TensorProto.INT4)
    g.constant(f"{name}_scale", scale, dtype)
    return g.node("DequantizeLinear", [f"{name}_q", f"{name}_scale"], name, **attributes)


def _spelled_out(g: GraphBuilder, caches: tuple[str, str], mask: str, dtype: int, head: int) -> str:
    """Grouped attention as matrix products, with the softmax in float32."""
    group = HEADS // KV_HEADS
    g.constant("grouped", np.array([0, KV_HEADS, group, -1, head]))
    g.constant("ungrouped", np.array([0, HEADS, -1, head]))
    g.constant("axis_2", np.array([2]))
    g.constant("root", np.array(head**-0.5), TensorProto.FLOAT)
    g.constant("hidden_score", np.array(-1e30), TensorProto.FLOAT)
    q = g.node("Reshape", ["q", "grouped"], "q_grouped")
    key = g.node("Unsqueeze", [caches[0], "axis_2"], "key_5d")
    value = g.node("Unsqueeze", [caches[1], "axis_2"], "value_5d")
    key_t = g.node("Transpose", [key], "key_t", perm=[0, 1, 2, 4, 3])
    products = g.node("MatMul", [q, key_t], "products")
    scores = g.node("Cast", [products], "scores", to=TensorProto.FLOAT)
    scaled = g.node("Mul", [scores, "root"], "scaled")
    mask_5d = g.node("Unsqueeze", [mask, "axis_2"], "mask_5d")
    seen = g.node("Where", [mask_5d, scaled, "hidden_score"], "seen_scores")
    shares = g.node("Softmax", [seen], "shares", axis=-1)
    halves = g.node("Cast", [shares], "shares_cast", to=dtype)
    summed = g.node("MatMul", [halves, value], "summed")
    return g.node("Reshape", [summed, "ungrouped"], "ungrouped_heads")


def drafter(
    dtype: int = TensorProto.FLOAT16, head: int = 16, capacity: int = 64, steps: int = 3
) -> onnx.ModelProto:
    """Reads the buffers of layer 0 and never writes; its steps are unrolled.

    Each step attends with the embedding of the token before it, and draws from two candidates.
    """
    g, rng, hidden = GraphBuilder(), np.random.default_rng(1), HEADS * head
    g.input("token", TensorProto.INT64, "batch", 1)
    g.input("hidden", dtype, "batch", 1, hidden)
    g.input("past_length", TensorProto.INT32, "batch")
    g.input("noise", TensorProto.FLOAT, "batch", steps, 2)
    for part in ("key", "value"):
        g.input(f"past.0.{part}", dtype, "batch", KV_HEADS, capacity, head)
    g.constant("embedding", rng.normal(size=(VOCABULARY, hidden)), dtype)
    g.constant("head", rng.normal(size=(hidden, VOCABULARY)), dtype)
    g.constant("root", np.array(head**-0.5), dtype)
    g.constant("q_shape", np.array([0, 0, HEADS, head]))
    g.constant("joined_shape", np.array([0, 0, hidden]))
    g.constant("two", np.array([2]))
    g.constant("minus_1", np.array([-1]))
    g.constant("limit_axes", np.array([1, 2, 3]))
    g.constant("columns", np.arange(capacity).reshape(1, 1, 1, capacity))
    g.constant("noise_rows", np.ones(steps, np.int64))
    g.node("Cast", ["past_length"], "position", to=TensorProto.INT64)
    g.node("Unsqueeze", ["position", "limit_axes"], "limit")
    g.node("Less", ["columns", "limit"], "mask")
    g.node("Split", ["noise", "noise_rows"], *(f"noise_{k}" for k in range(steps)), axis=1)
    token, state = "token", "hidden"
    for k in range(steps):
        token, state = _draft_step(g, k, token, state, head)
    for name, part in (("draft_tokens", "token"), ("draft_logits", "logit")):
        g.node("Concat", [f"{part}_{k}" for k in range(steps)], name, axis=1)
    g.node("Concat", [f"candidates_{k}" for k in range(steps)], "draft_candidates", axis=1)
    g.output("draft_tokens", TensorProto.INT64, "batch", steps)
    g.output("draft_logits", TensorProto.FLOAT, "batch", steps, 2)
    g.output("draft_candidates", TensorProto.INT64, "batch", steps, 2)
    return g.model()


def _draft_step(g: GraphBuilder, k: int, token: str, state: str, head: int) -> tuple[str, str]:
    looked_up = g.node("Gather", ["embedding", token], f"embedded_{k}")
    x = g.node("Add", [looked_up, state], f"x_{k}")
    split = g.node("Reshape", [x, "q_shape"], f"split_{k}")
    q = g.node("Transpose", [split], f"q_{k}", perm=[0, 2, 1, 3])
    scaled = g.node("Mul", [q, "root"], f"scaled_{k}")
    ports = [scaled, "past.0.key", "past.0.value", "mask"]
    attended = g.node("Attention", ports, f"attended_{k}", scale=1.0)
    turned = g.node("Transpose", [attended], f"turned_{k}", perm=[0, 2, 1, 3])
    joined = g.node("Reshape", [turned, "joined_shape"], f"joined_{k}")
    half = g.node("MatMul", [joined, "head"], f"half_{k}")
    logits = g.node("Cast", [half], f"all_logits_{k}", to=TensorProto.FLOAT)
    g.node("TopK", [logits, "two"], f"logit_{k}", f"candidates_{k}", axis=-1)
    noisy = g.node("Add", [f"logit_{k}", f"noise_{k}"], f"noisy_{k}")
    choice = g.node("ArgMax", [noisy], f"choice_{k}", axis=-1, keepdims=1)
    drawn = g.node("GatherElements", [f"candidates_{k}", choice], f"drawn_{k}", axis=2)
    return g.node("Squeeze", [drawn, "minus_1"], f"token_{k}"), joined


def specs(values: Any) -> tuple[TensorSpec, ...]:
    """The declared inputs or outputs of a graph, as the manifest has them."""
    found = []
    for value in values:
        tensor = value.type.tensor_type
        shape = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
        found.append(TensorSpec(value.name, SPEC_TYPES[tensor.elem_type], shape))
    return tuple(found)
