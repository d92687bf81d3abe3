"""What a graph for TensorRT must not have: each rule finds its fault, and good graphs have none.

The faults that matter most are those which TensorRT takes without a word: for these the test shows
that its parser does take them, so that nothing but the rule stands between them and wrong tokens.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import needs
import numpy as np
import onnx
import pytest
import trt_graphs
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, external_data_helper, helper
from onnx import numpy_helper as arrays

from specgraphs.static_rules import check, static_rules
from specgraphs.trt_rules.attention import has_kernel
from specrun.errors import EngineError

Edit = Callable[[GraphProto], None]
F16, F32 = TensorProto.FLOAT16, TensorProto.FLOAT
ROOT = Path(__file__).parents[1]


def first(graph: GraphProto, op: str) -> NodeProto:
    """The first node of an operator."""
    return next(node for node in graph.node if node.op_type == op)


def maker(graph: GraphProto, name: str) -> NodeProto:
    """The node that makes a value."""
    return next(node for node in graph.node if name in node.output)


def put_before(graph: GraphProto, node: NodeProto, op: str, ports: list[str], made: str) -> None:
    """A new node before another one."""
    new = helper.make_node(op, ports, [made], name=f"{made}/{op}")
    graph.node.insert(list(graph.node).index(node), new)


def constant(graph: GraphProto, name: str, values: object, dtype: type | None = None) -> str:
    """A new initializer."""
    graph.initializer.append(arrays.from_array(np.asarray(values, dtype), name))
    return name


def set_attribute(node: NodeProto, name: str, value: object) -> None:
    """Give an attribute another value, or a new one."""
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def attention_attribute(name: str, value: object) -> Edit:
    return lambda graph: set_attribute(first(graph, "Attention"), name, value)


def scatter_attribute(name: str, value: object) -> Edit:
    return lambda graph: set_attribute(first(graph, "TensorScatter"), name, value)


def nonpad(graph: GraphProto) -> None:
    node = first(graph, "Attention")
    node.input.extend(["", "", "position"])


def no_mask(graph: GraphProto) -> None:
    del first(graph, "Attention").input[3]


def causal_without_mask(graph: GraphProto) -> None:
    no_mask(graph)
    set_attribute(first(graph, "Attention"), "is_causal", 1)


def float_mask(graph: GraphProto) -> None:
    node = first(graph, "Attention")
    constant(graph, "seen", 0, np.float16)
    constant(graph, "unseen", -30000, np.float16)
    put_before(graph, node, "Where", ["mask", "seen", "unseen"], "float_mask")
    node.input[3] = "float_mask"


def flat_mask(graph: GraphProto) -> None:
    node = first(graph, "Attention")
    constant(graph, "flat", [-1, 64])
    put_before(graph, node, "Reshape", ["mask", "flat"], "mask_2d")
    node.input[3] = "mask_2d"


def past_on_attention(graph: GraphProto) -> None:
    node = first(graph, "Attention")
    node.input.extend(["past.0.key", "past.0.value"])


def second_output(graph: GraphProto) -> None:
    first(graph, "Attention").output.extend(["all_keys"])


def three_axes(graph: GraphProto) -> None:
    node = first(graph, "Attention")
    put_before(graph, node, "Reshape", ["q", "joined_shape"], "q_3d")
    node.input[0] = "q_3d"


def shared_keys(graph: GraphProto) -> None:
    node = first(graph, "Attention")
    second = NodeProto()
    second.CopyFrom(node)
    second.name, second.input[0], second.output[0] = "second", "attended", "attended_again"
    first_reader = maker(graph, "turned")
    first_reader.input[0] = "attended_again"
    graph.node.insert(list(graph.node).index(first_reader), second)


def no_write_indices(graph: GraphProto) -> None:
    del first(graph, "TensorScatter").input[2]


def narrow_write_indices(graph: GraphProto) -> None:
    first(graph, "TensorScatter").input[2] = "past_length"


def hidden_cache(graph: GraphProto) -> None:
    node = first(graph, "TensorScatter")
    put_before(graph, node, "Identity", ["past.0.key"], "copied")
    node.input[0] = "copied"


def kept_cache(graph: GraphProto) -> None:
    kept = [value for value in graph.output if value.name != "present.0.key"]
    del graph.output[:]
    graph.output.extend(kept)


def crossed_caches(graph: GraphProto) -> None:
    key, value = (maker(graph, f"present.0.{part}") for part in ("key", "value"))
    key.output[0], value.output[0] = value.output[0], key.output[0]


def unwritten_cache(graph: GraphProto) -> None:
    node = maker(graph, "present.0.key")
    node.op_type = "Identity"
    del node.input[1:], node.attribute[:]


def reads_past(graph: GraphProto) -> None:
    first(graph, "Attention").input[1] = "past.0.key"


def resize(axis: int, symbol: str, names: tuple[str, ...]) -> Edit:
    def edit(graph: GraphProto) -> None:
        for value in (*graph.input, *graph.output):
            if value.name in names:
                value.type.tensor_type.shape.dim[axis].dim_param = symbol

    return edit


dynamic_capacity = resize(2, "capacity", ("past.0.key",))


def five_axes(graph: GraphProto) -> None:
    for value in (*graph.input, *graph.output):
        if value.name in ("past.0.key", "present.0.key"):
            value.type.tensor_type.shape.dim.add().dim_value = 1


def zero_point(graph: GraphProto) -> None:
    node = maker(graph, "wq")
    constant(graph, "zero_point", np.ones(64), np.int8)
    node.input.append("zero_point")


def no_zero_point_values(graph: GraphProto) -> None:
    node = maker(graph, "wq")
    put_before(graph, node, "Identity", ["wq_q"], "zero_point")
    node.input.append("zero_point")


def retype(name: str, dtype: int) -> Edit:
    """An initializer in another type of floats."""

    def edit(graph: GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == name)
        values = arrays.to_array(tensor).astype(np.float32).ravel()
        tensor.CopyFrom(helper.make_tensor(name, dtype, tensor.dims, values))

    return edit


def block_of(size: int) -> Edit:
    return lambda graph: set_attribute(maker(graph, "wq"), "block_size", size)


def block_of_8(graph: GraphProto) -> None:
    block_of(8)(graph)
    tensor = next(t for t in graph.initializer if t.name == "wq_scale")
    tensor.CopyFrom(helper.make_tensor("wq_scale", F16, [8, 64], np.ones(512)))


def block_along_three_axes(graph: GraphProto) -> None:
    tensor = next(t for t in graph.initializer if t.name == "wq_q")
    tensor.dims[:] = [1, 64, 64]


def gathered_integers(graph: GraphProto) -> None:
    graph.node.remove(maker(graph, "embedding"))
    node = maker(graph, "x")
    node.input[0], node.output[0] = "embedding_q", "x_q"
    constant(graph, "one", 1, np.float16)
    put_before(graph, maker(graph, "normed"), "DequantizeLinear", ["x_q", "unit"], "x")
    constant(graph, "unit", 1, np.float16)


def unsigned(graph: GraphProto) -> None:
    constant(graph, "bytes", [1], np.uint8)


def double(graph: GraphProto) -> None:
    node = first(graph, "RMSNormalization")
    for source, made, dtype in (("x", "x64", TensorProto.DOUBLE), ("x64", "x16", F16)):
        new = helper.make_node("Cast", [source], [made], name=f"{made}/Cast", to=dtype)
        graph.node.insert(list(graph.node).index(node), new)
    node.input[0] = "x16"


def wide_top_k(graph: GraphProto) -> None:
    next(t for t in graph.initializer if t.name == "two").CopyFrom(
        arrays.from_array(np.array([3841]), "two")
    )


def computed_top_k(graph: GraphProto) -> None:
    first(graph, "TopK").input[1] = "rows_shape"


def loop(graph: GraphProto) -> None:
    def info(name: str, dtype: int, shape: list[int] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, shape)

    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["carried", "carried"], ["doubled"]),
        ],
        "body",
        [
            info("i", TensorProto.INT64, []),
            info("go", TensorProto.BOOL, []),
            info("carried", F32, None),
        ],
        [info("go_on", TensorProto.BOOL, []), info("doubled", F32, None)],
    )
    constant(graph, "trips", 2, np.int64)
    constant(graph, "condition", True, np.bool_)
    node = helper.make_node(
        "Loop", ["trips", "condition", "raw"], ["logits"], name="loop", body=body
    )
    made = maker(graph, "logits")
    made.output[0] = "raw"
    graph.node.insert(list(graph.node).index(made) + 1, node)


def replaced(name: str, op: str, domain: str = "") -> Edit:
    """The node that makes a value becomes another operator."""

    def edit(graph: GraphProto) -> None:
        node = maker(graph, name)
        node.op_type, node.domain = op, domain
        del node.attribute[:]

    return edit


group_query = replaced("attended", "GroupQueryAttention", "com.microsoft")


def large_index(graph: GraphProto) -> None:
    node = maker(graph, "last_column")
    constant(graph, "far", 2**40, np.int64)
    put_before(graph, node, "Add", ["row_start", "far"], "far_start")
    node.input[0] = "far_start"


def infinite(value: float) -> Edit:
    def edit(graph: GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == "gain")
        gain = arrays.to_array(tensor).copy()
        gain[3] = value
        tensor.CopyFrom(arrays.from_array(gain, "gain"))

    return edit


def narrowed_constant(graph: GraphProto) -> None:
    constant(graph, "low", -1e9, np.float32)
    node = first(graph, "RMSNormalization")
    cast = helper.make_node("Cast", ["low"], ["low16"], name="low/Cast", to=F16)
    graph.node.insert(0, cast)
    put_before(graph, node, "Add", ["x", "low16"], "lowered")
    node.input[0] = "lowered"


def half_softmax(graph: GraphProto) -> None:
    node = first(graph, "RMSNormalization")
    put_before(graph, node, "Softmax", ["x"], "softened")
    node.input[0] = "softened"


def half_mean(graph: GraphProto) -> None:
    node = first(graph, "RMSNormalization")
    put_before(graph, node, "ReduceMean", ["x", "axis_1"], "mean")
    put_before(graph, node, "Sub", ["x", "mean"], "centred")
    node.input[0] = "centred"


def half_stash(graph: GraphProto) -> None:
    set_attribute(first(graph, "RMSNormalization"), "stash_type", F16)


def unread_input(graph: GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("noise", F32, [1]))


def declared(name: str, dtype: int) -> Edit:
    def edit(graph: GraphProto) -> None:
        value = next(v for v in (*graph.input, *graph.output) if v.name == name)
        value.type.tensor_type.elem_type = dtype

    return edit


def renamed_input(graph: GraphProto) -> None:
    value = next(v for v in graph.input if v.name == "wanted_rows")
    value.name = "first_row"
    maker(graph, "wanted_hidden").input[1] = "first_row"


def twice_made(graph: GraphProto) -> None:
    graph.node.append(helper.make_node("Identity", ["logits"], ["lead"], name="again"))


def twice_called(graph: GraphProto) -> None:
    maker(graph, "x").name = maker(graph, "normed").name


def external(location: str) -> Edit:
    def edit(graph: GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == "head")
        external_data_helper.set_external_data(tensor, location, 0, len(tensor.raw_data))
        tensor.ClearField("raw_data")
        tensor.ClearField("int32_data")

    return edit


# Rule, node or value it names, the planted fault, form of the weights.
FAULTS: list[tuple[str, str, Edit, str]] = [
    ("attention-nonpad", "attended/Attention", nonpad, "float"),
    ("attention-causal", "attended/Attention", attention_attribute("is_causal", 1), "float"),
    ("attention-causal", "attended/Attention", causal_without_mask, "float"),
    ("attention-window", "attended/Attention", attention_attribute("left_window_size", 4), "float"),
    ("attention-attribute", "attended/Attention", attention_attribute("precision", 1), "float"),
    ("attention-softcap", "attended/Attention", attention_attribute("softcap", 30.0), "float"),
    ("attention-past", "attended/Attention", past_on_attention, "float"),
    ("attention-outputs", "attended/Attention", second_output, "float"),
    ("attention-no-mask", "attended/Attention", no_mask, "float"),
    ("attention-mask-dtype", "attended/Attention", float_mask, "float"),
    ("attention-mask-rank", "attended/Attention", flat_mask, "float"),
    ("attention-rank", "attended/Attention", three_axes, "float"),
    ("attention-shared-scale", "second", shared_keys, "float"),
    ("cache-mode", "present.0.key/TensorScatter", scatter_attribute("mode", "circular"), "float"),
    ("cache-axis", "present.0.key/TensorScatter", scatter_attribute("axis", 1), "float"),
    ("cache-no-index", "present.0.key/TensorScatter", no_write_indices, "float"),
    ("cache-index-dtype", "present.0.key/TensorScatter", narrow_write_indices, "float"),
    ("cache-rank", "present.0.key/TensorScatter", five_axes, "float"),
    ("cache-capacity", "present.0.key/TensorScatter", dynamic_capacity, "float"),
    ("cache-input", "present.0.key/TensorScatter", hidden_cache, "float"),
    ("cache-output", "present.0.key/TensorScatter", kept_cache, "float"),
    ("cache-pair", "present.0.key/TensorScatter", crossed_caches, "float"),
    ("cache-not-written", "present.0.key", unwritten_cache, "float"),
    ("cache-read", "attended/Attention", reads_past, "float"),
    ("zero-point", "wq/DequantizeLinear", zero_point, "int8"),
    ("zero-point", "wq/DequantizeLinear", no_zero_point_values, "int8"),
    ("scale-dtype", "q_rows/MatMul", retype("wq_scale", F32), "int8"),
    ("scale-dtype", "q_rows/MatMul", retype("wq_scale", TensorProto.BFLOAT16), "int4"),
    ("mixed-types", "q_rows/MatMul", retype("wq", F32), "float"),
    ("block-size", "wq/DequantizeLinear", block_of_8, "int4"),
    ("block-scales", "wq/DequantizeLinear", block_of(64), "int4"),
    ("block-rank", "wq/DequantizeLinear", block_along_three_axes, "int4"),
    ("quantized-reader", "x/Gather", gathered_integers, "int8"),
    ("dtype", "bytes", unsigned, "float"),
    ("dtype", "x64/Cast", double, "float"),
    ("topk-large", "best_logits/TopK", wide_top_k, "float"),
    ("topk-dynamic", "best_logits/TopK", computed_top_k, "float"),
    ("control-flow", "loop", loop, "float"),
    ("data-dependent", "limit/Unsqueeze", replaced("limit", "NonZero"), "float"),
    ("random", "x/Gather", replaced("x", "RandomUniformLike"), "float"),
    ("foreign-operator", "attended/Attention", group_query, "float"),
    ("foreign-operator", "x/Gather", replaced("x", "Lookup", "our.own"), "float"),
    ("int64-range", "far_start/Add", large_index, "float"),
    ("half-range", "gain", infinite(-np.inf), "float"),
    ("half-range", "gain", infinite(np.nan), "float"),
    ("half-range", "low/Cast", narrowed_constant, "float"),
    ("sum-precision", "softened/Softmax", half_softmax, "float"),
    ("sum-precision", "mean/ReduceMean", half_mean, "float"),
    ("norm-precision", "normed/RMSNormalization", half_stash, "float"),
    ("unused-input", "noise", unread_input, "float"),
    ("border-dtype", "past_length", declared("past_length", TensorProto.INT64), "float"),
    ("border-dtype", "tokens", declared("tokens", TensorProto.INT32), "float"),
    ("border-dtype", "logits", declared("logits", F16), "float"),
    ("border-name", "first_row", renamed_input, "float"),
    ("dynamic-size", "past.0.key", dynamic_capacity, "float"),
    ("dynamic-size", "past.0.value", resize(1, "heads", ("past.0.value",)), "float"),
    ("duplicate-value", "lead", twice_made, "float"),
    ("duplicate-node", "normed/RMSNormalization", twice_called, "float"),
    ("external-outside", "head", external("../weights.bin"), "float"),
    ("external-outside", "head", external("/weights.bin"), "float"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "node", "edit", "weights"), FAULTS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAULTS)]
)
def test_a_fault_is_found_where_it_is(rule: str, node: str, edit: Edit, weights: str) -> None:
    model = trt_graphs.target(weights=weights)
    assert static_rules(model) == []
    edit(model.graph)
    found = static_rules(model)
    assert (rule, node) in [(v.rule, v.node) for v in found], [str(v) for v in found]
    assert all(v.message and v.hint for v in found)


GOOD: dict[str, Callable[[], ModelProto]] = {
    "fp16": lambda: trt_graphs.target(),
    "bf16": lambda: trt_graphs.target(TensorProto.BFLOAT16),
    "fp32, spelled out": lambda: trt_graphs.target(F32, fused=False),
    "head 8, spelled out": lambda: trt_graphs.target(head=8, fused=False),
    "head 288, spelled out": lambda: trt_graphs.target(head=288, fused=False),
    "int8": lambda: trt_graphs.target(weights="int8"),
    "int4": lambda: trt_graphs.target(weights="int4"),
    "int4 bf16": lambda: trt_graphs.target(TensorProto.BFLOAT16, weights="int4"),
    "one sequence": lambda: trt_graphs.target(batch=1),
    "drafter": lambda: trt_graphs.drafter(),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_graphs_have_no_fault(name: str) -> None:
    assert [str(v) for v in static_rules(GOOD[name]())] == []


@pytest.mark.parametrize("head", [8, 12, 20, 257, 264, 288, 512])
def test_head_sizes_without_a_kernel(head: int) -> None:
    assert not has_kernel(head)
    found = {v.rule for v in static_rules(trt_graphs.target(head=head))}
    assert found == {"attention-head-size"}


@pytest.mark.parametrize("head", [16, 24, 64, 80, 128, 248, 256])
def test_head_sizes_with_a_kernel(head: int) -> None:
    assert has_kernel(head)
    assert not has_kernel("head") and not has_kernel(None)


def test_fused_attention_in_float32_is_refused() -> None:
    found = static_rules(trt_graphs.target(F32))
    assert {v.rule for v in found} == {"attention-dtype"} and len(found) == 3


@pytest.mark.parametrize(
    ("opset", "ir_version", "rules"),
    [(23, 11, {"opset"}), (25, 11, {"opset"}), (24, 12, {"ir-version"}), (24, 10, set())],
)
def test_versions(opset: int, ir_version: int, rules: set[str]) -> None:
    model = trt_graphs.target()
    model.opset_import[0].version, model.ir_version = opset, ir_version
    assert {v.rule for v in static_rules(model)} == rules


def test_ends_of_slices_may_be_large() -> None:
    model = trt_graphs.target()
    graph, node = model.graph, first(model.graph, "RMSNormalization")
    for name, value in (("from", 0), ("to_the_end", 2**63 - 1), ("along", 1)):
        constant(graph, name, [value], np.int64)
    put_before(graph, node, "Slice", ["x", "from", "to_the_end", "along"], "sliced")
    node.input[0] = "sliced"
    assert static_rules(model) == []


def test_scaled_queries_may_share_keys() -> None:
    model = trt_graphs.target()
    shared_keys(model.graph)
    for node in model.graph.node:
        if node.op_type == "Attention":
            set_attribute(node, "scale", 1.0)
    assert static_rules(model) == []


def saved(folder: Path, model: ModelProto) -> Path:
    """The model in a file, large initializers in ``weights.bin`` beside it."""
    path = folder / "target.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return path


def test_external_data_is_looked_at(tmp_path: Path) -> None:
    path = saved(tmp_path, trt_graphs.target())
    weights = tmp_path / "weights.bin"
    assert static_rules(path) == [] == static_rules(str(path))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert {v.rule for v in static_rules(path)} == {"external-short"}
    weights.unlink()
    assert {v.rule for v in static_rules(path)} == {"external-missing"}


@pytest.mark.parametrize("dtype", [F16, TensorProto.BFLOAT16])
def test_weights_that_are_not_finite_are_found(tmp_path: Path, dtype: int) -> None:
    path = saved(tmp_path, trt_graphs.target(dtype))
    weights = np.fromfile(tmp_path / "weights.bin", np.uint16)
    assert static_rules(path) == []
    weights[-1] = 0x7C00 if dtype == F16 else 0xFF80
    weights.tofile(tmp_path / "weights.bin")
    assert [v.rule for v in static_rules(path)] == ["half-range"]


def test_check_raises_with_the_first_faults() -> None:
    model = trt_graphs.target()
    check(model)
    nonpad(model.graph)
    with pytest.raises(EngineError, match="cannot run target as it is") as caught:
        check(model, "target")
    assert "attended/Attention: nonpad_kv_seqlen is ignored [attention-nonpad]" in str(caught.value)
    assert caught.value.hint and "mask" in caught.value.hint
    for number in range(7):
        model.graph.input.append(helper.make_tensor_value_info(f"unread_{number}", F32, [1]))
    with pytest.raises(EngineError, match=r"and \d+ more"):
        check(model)


# What TensorRT takes without a word, though it computes something else.
SILENT = {
    "nonpad": nonpad,
    "causal without a mask": causal_without_mask,
    "no mask": no_mask,
    "window": attention_attribute("left_window_size", 4),
    "no write_indices": no_write_indices,
    "crossed caches": crossed_caches,
    "reads what is written": reads_past,
    "float64": double,
    "infinite": infinite(np.inf),
    "mean in fp16": half_mean,
    "norm in fp16": half_stash,
    "loop": loop,
}


@pytest.mark.parametrize("name", SILENT)
def test_tensorrt_takes_it(name: str) -> None:
    model = trt_graphs.target()
    SILENT[name](model.graph)
    assert parsed(model) == []
    assert static_rules(model)


@pytest.mark.parametrize("opset", [23, 25])
def test_tensorrt_does_not_look_at_the_opset(opset: int) -> None:
    model = trt_graphs.target()
    model.opset_import[0].version = opset
    assert parsed(model) == []


def test_tensorrt_says_what_it_does_not_take() -> None:
    """So that the test above can fail."""
    model = trt_graphs.target()
    attention_attribute("softcap", 30.0)(model.graph)
    assert any("softcap" in reason for reason in parsed(model))


def parsed(model: ModelProto) -> list[str]:
    """What TensorRT's parser says against a graph."""
    trt = needs.tensorrt_rtx()
    log = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    taken = parser.parse(model.SerializeToString())
    reasons = [parser.get_error(index).desc() for index in range(parser.num_errors)]
    assert taken == (not reasons)
    return reasons


CRASH = """
import sys, onnx, tensorrt_rtx as trt
log = trt.Logger(trt.Logger.INTERNAL_ERROR)
builder = trt.Builder(log)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, log)
assert parser.parse_from_file(sys.argv[1])
config, profile = builder.create_builder_config(), builder.create_optimization_profile()
for tensor in (network.get_input(index) for index in range(network.num_inputs)):
    profile.set_shape(tensor.name, *[tuple(4 if size < 0 else size for size in tensor.shape)] * 3)
assert config.add_optimization_profile(profile) == 0
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM86, 0)
sys.exit(0 if builder.build_serialized_network(network, config) else 3)
"""


@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_tensorrt_dies_of_scaled_keys_that_are_shared(tmp_path: Path, scale: float) -> None:
    """The reason of ``attention-shared-scale``. When this fails, the rule can go."""
    needs.tensorrt_rtx()
    model = trt_graphs.target()
    shared_keys(model.graph)
    for node in model.graph.node:
        if node.op_type == "Attention":
            set_attribute(node, "scale", scale)
    path = tmp_path / "target.onnx"
    onnx.save(model, path)
    done = subprocess.run([sys.executable, "-c", CRASH, str(path)], capture_output=True)
    assert (done.returncode == 0) == (scale == 1.0)
    assert bool(static_rules(model)) == (scale != 1.0)
