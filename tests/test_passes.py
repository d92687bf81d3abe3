"""Graph passes, case by case, on small graphs; what a graph computes never changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from ir_values import Dims, initializer, value
from numpy.typing import NDArray
from onnx_ir.passes import common

from specgraphs.loop import RepeatStep
from specgraphs.passes import (
    ArgmaxInBlocks,
    DropShapePairs,
    FuseResidualNorms,
    FuseSilu,
    FuseTransposedWeights,
    StaticReshapes,
    WantedRowsFromFirstRow,
)
from specrun import contract

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


class Builder:
    """A graph in the making; ``op`` returns the value of a new node."""

    def __init__(self, *inputs: ir.Value) -> None:
        self.inputs = inputs
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []

    def constant(self, array: Any, dtype: Any = np.int64) -> ir.Value:
        made = initializer(f"constant{len(self.initializers)}", np.asarray(array, dtype))
        self.initializers.append(made)
        return made

    def op(
        self, kind: str, inputs: Sequence[ir.Value], dims: Dims, dtype: ir.DataType = FLOAT,
        **attributes: Any,
    ) -> ir.Value:  # fmt: skip
        node = ir.node(kind, inputs, attributes=attributes)
        self.nodes.append(node)
        out = node.outputs[0]
        out.name = f"{kind}{len(self.nodes)}"
        out.shape, out.type = ir.Shape(dims), ir.TensorType(dtype)
        return out

    def model(self, *outputs: ir.Value) -> ir.Model:
        graph = ir.Graph(
            self.inputs,
            outputs,
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports={"": 23},
            name="test",
        )
        return ir.Model(graph, ir_version=10)


def run(model: ir.Model, **feeds: NDArray[Any]) -> list[NDArray[Any]]:
    """The outputs of ``model`` in ONNX Runtime."""
    proto = ir.to_proto(model).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    outputs: list[NDArray[Any]] = session.run(None, feeds)
    return outputs


def apply(model: ir.Model, pass_: Any, tolerance: float = 0.0, **feeds: Any) -> bool:
    """Apply ``pass_``, assert that the outputs stay the same, return whether it changed anything.

    A second application finds nothing more to do. ``tolerance``: relative, where sums may be made
    in another order.
    """
    before = run(model, **feeds)
    modified = bool(pass_(model).modified)
    for old, new in zip(before, run(model, **feeds), strict=True):
        np.testing.assert_allclose(old, new, rtol=tolerance, atol=tolerance)
    assert not pass_(model).modified
    return modified


def kinds(model: ir.Model) -> list[str]:
    """Operators of the nodes that are used, but constants."""
    common.RemoveUnusedNodesPass()(model)
    return [node.op_type for node in model.graph if node.op_type != "Constant"]


def target_of(model: ir.Model) -> list[int] | None:
    """Constant target of the last Reshape."""
    reshape = [node for node in model.graph if node.op_type == "Reshape"][-1]
    shape = reshape.inputs[1]
    assert shape is not None
    sizes: list[int] | None = (
        None if shape.const_value is None else shape.const_value.numpy().tolist()
    )
    return sizes


X = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)


def reshaped(source: Dims, output: Dims, **attributes: Any) -> ir.Model:
    """x reshaped to a target that is an input, so that nobody can know it."""
    shape = value("shape", [len(output)], INT64)
    build = Builder(x := value("x", source), shape)
    return build.model(build.op("Reshape", [x, shape], output, **attributes))


@pytest.mark.parametrize(
    ("output", "sizes", "target"),
    [
        (["batch", "rows", 2, 4], [2, 3, 2, 4], [0, 0, 2, 4]),  # cases 1 and 2
        (["batch", "other"], [2, 24], [0, -1]),  # case 3
        (["other", 8], [6, 8], [-1, 8]),
        (["other"], [48], [-1]),
        (["rows", "batch", 8], [3, 2, 8], None),  # each at another place: two sizes are left
        ([None, "rows", 8], [2, 3, 8], None),
        ([2, 3, 8], [2, 3, 8], [2, 3, 8]),
    ],
)
@pytest.mark.parametrize("allowzero", [None, 0, 1])
def test_static_reshapes(
    output: Dims, sizes: list[int], target: list[int] | None, allowzero: int | None
) -> None:
    attributes = {} if allowzero is None else {"allowzero": allowzero}
    model = reshaped(["batch", "rows", 8], output, **attributes)
    assert apply(model, StaticReshapes(), x=X, shape=np.array(sizes)) is (target is not None)
    assert target_of(model) == target
    if target is not None:
        # 0 must mean "copy", whatever the traced node said.
        assert "allowzero" not in next(n for n in model.graph if n.op_type == "Reshape").attributes


def test_static_reshapes_of_empty_sizes() -> None:
    """A size that is 0 cannot be written where 0 means copy."""
    model = reshaped(["batch", 0, 8], [0, "batch"], allowzero=1)
    empty = np.zeros((2, 0, 8), np.float32)
    assert not apply(model, StaticReshapes(), x=empty, shape=np.array([0, 2]))


def test_static_reshapes_leave_constants() -> None:
    build = Builder(x := value("x", ["batch", "rows", 8]))
    out = build.op("Reshape", [x, build.constant([0, 0, 2, 4])], ["batch", "rows", 2, 4])
    model = build.model(out)
    assert not apply(model, StaticReshapes(), x=X)


def test_reshape_of_a_reshape() -> None:
    """Case 1: both become one, and a third one too; what else reads the first keeps it."""
    build = Builder(x := value("x", ["batch", "rows", 8]))
    flat = build.op("Reshape", [x, build.constant([-1])], ["all"])
    wide = build.op("Reshape", [flat, build.constant([-1, 8])], ["both", 8])
    heads = build.op("Reshape", [wide, build.constant([-1, 2, 4])], ["both", 2, 4])
    model = build.model(heads, build.op("Neg", [flat], ["all"]))
    assert apply(model, DropShapePairs(), x=X)
    assert sorted(kinds(model)) == ["Neg", "Reshape", "Reshape"]
    assert target_of(model) == [-1, 2, 4]


def test_reshape_back() -> None:
    """Cases 1 and 3: there and back again is nothing."""
    build = Builder(x := value("x", ["batch", "rows", 8]))
    heads = build.op("Reshape", [x, build.constant([0, 0, 2, 4])], ["batch", "rows", 2, 4])
    back = build.op("Reshape", [heads, build.constant([0, 0, 8])], ["batch", "rows", 8])
    model = build.model(build.op("Neg", [back], ["batch", "rows", 8]))
    assert apply(model, DropShapePairs(), x=X)
    assert kinds(model) == ["Neg"]


def test_reshape_to_the_same_shape() -> None:
    """Case 3; as an output of the graph it stays, for its name's sake."""
    for output in (False, True):
        build = Builder(x := value("x", ["batch", "rows", 8]))
        same = build.op("Reshape", [x, build.constant([0, 0, 8])], ["batch", "rows", 8])
        model = build.model(same if output else build.op("Neg", [same], ["batch", "rows", 8]))
        assert apply(model, DropShapePairs(), x=X) is not output
        assert kinds(model) == (["Reshape"] if output else ["Neg"])


def test_reshapes_that_stay() -> None:
    """To a shape that is not known, and a pair that no single Reshape can stand for."""
    build = Builder(x := value("x", ["batch", "rows", 8]), s := value("s", [3], INT64))
    one = build.op("Neg", [x], ["batch", "rows", 8])
    two = build.op("Reshape", [one, s], [None, "rows", 8])
    model = build.model(build.op("Neg", [two], [None, "rows", 8]))
    assert not apply(model, DropShapePairs(), x=X, s=np.array([2, 3, 8]))
    assert kinds(model) == ["Neg", "Reshape", "Neg"]
    build = Builder(x := value("x", ["a", "b", 8]), s := value("s", [3], INT64))
    one = build.op("Reshape", [x, build.constant([-1])], ["all"])
    model = build.model(build.op("Reshape", [one, s], ["c", "d", 8]))
    assert not apply(model, DropShapePairs(), x=X, s=np.array([3, 2, 8]))


@pytest.mark.parametrize(
    ("first", "second", "dropped"),
    [
        ([0, 2, 1], [0, 2, 1], True),
        ([1, 2, 0], [2, 0, 1], True),
        ([1, 2, 0], [1, 2, 0], False),
        ([0, 2, 1], [1, 0, 2], False),
        (None, None, True),  # without perm the axes are reversed
        (None, [2, 1, 0], True),
        (None, [0, 2, 1], False),
    ],
)
def test_transpose_of_a_transpose(
    first: list[int] | None, second: list[int] | None, dropped: bool
) -> None:
    """Case 2."""
    build = Builder(x := value("x", [2, 3, 8]))
    dims = np.array([2, 3, 8])

    def transpose(source: ir.Value, perm: list[int] | None) -> ir.Value:
        nonlocal dims
        dims = dims[perm if perm is not None else [2, 1, 0]]
        attributes: dict[str, Any] = {} if perm is None else {"perm": perm}
        return build.op("Transpose", [source], dims.tolist(), **attributes)

    twice = transpose(transpose(x, first), second)
    model = build.model(build.op("Neg", [twice], dims.tolist()))
    assert apply(model, DropShapePairs(), x=X) is dropped
    assert kinds(model) == (["Neg"] if dropped else ["Transpose", "Transpose", "Neg"])


@pytest.mark.parametrize("perm", [[1, 0], None])
def test_fuse_transposed_weights(perm: list[int] | None) -> None:
    """Case 1: the weight is read as it is stored, by both of its users."""
    build = Builder(x := value("x", ["batch", "rows", 8]))
    weight = build.constant(np.arange(40).reshape(5, 8), np.float32)
    attributes: dict[str, Any] = {} if perm is None else {"perm": perm}
    turned = build.op("Transpose", [weight], [8, 5], **attributes)
    one = build.op("MatMul", [x, turned], ["batch", "rows", 5])
    two = build.op("MatMul", [build.op("Neg", [x], ["batch", "rows", 8]), turned], ["a", "b", 5])
    model = build.model(one, two)
    assert apply(model, FuseTransposedWeights(), x=X)
    assert kinds(model) == ["FusedMatMul", "Neg", "FusedMatMul"]
    assert model.opset_imports["com.microsoft"] == 1


def test_products_that_stay() -> None:
    """No transpose; a transposed input; a transposed weight on the left; a batch of weights."""
    build = Builder(x := value("x", [2, 3, 8]), y := value("y", [5, 8]))
    weight = build.constant(np.arange(40).reshape(8, 5), np.float32)
    stack = build.constant(np.arange(80).reshape(2, 5, 8), np.float32)
    turned = build.op("Transpose", [y], [8, 5], perm=[1, 0])
    turned_stack = build.op("Transpose", [stack], [2, 8, 5], perm=[0, 2, 1])
    left = build.op("Transpose", [weight], [5, 8], perm=[1, 0])
    columns = build.op("Transpose", [x], [2, 8, 3], perm=[0, 2, 1])
    model = build.model(
        build.op("MatMul", [x, weight], [2, 3, 5]),
        build.op("MatMul", [x, turned], [2, 3, 5]),
        build.op("MatMul", [x, turned_stack], [2, 3, 5]),
        build.op("MatMul", [left, columns], [2, 5, 3]),
    )
    feeds: dict[str, Any] = {"x": X, "y": np.arange(40, dtype=np.float32).reshape(5, 8)}
    assert not apply(model, FuseTransposedWeights(), **feeds)
    assert "FusedMatMul" not in kinds(model)
    assert "com.microsoft" not in model.opset_imports


def output_names(model: ir.Model) -> list[str | None]:
    """Names of the outputs, which no pass may change."""
    return [v.name for v in model.graph.outputs]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("output", [False, True])
def test_fuse_silu(swapped: bool, output: bool) -> None:
    """Case 1: in either order; as an output of the graph it keeps its name."""
    build = Builder(x := value("x", [2, 3, 8]))
    soft = build.op("Sigmoid", [x], [2, 3, 8])
    product = build.op("Mul", [soft, x] if swapped else [x, soft], [2, 3, 8])
    made = product if output else build.op("Neg", [product], [2, 3, 8])
    made.name = "out"
    model = build.model(made)
    assert apply(model, FuseSilu(), 1e-6, x=X / 10 - 2)
    assert kinds(model) == (["QuickGelu"] if output else ["QuickGelu", "Neg"])
    assert output_names(model) == ["out"]
    assert model.opset_imports["com.microsoft"] == 1


def test_sigmoids_that_stay() -> None:
    """Read twice; an output itself; times something else; not times anything."""
    build = Builder(x := value("x", [2, 3, 8]))
    dims = [2, 3, 8]
    other = build.op("Neg", [x], dims)
    twice = build.op("Sigmoid", [x], dims)
    shown = build.op("Sigmoid", [x], dims)
    gate = build.op("Sigmoid", [x], dims)
    model = build.model(
        build.op("Mul", [x, twice], dims),
        build.op("Neg", [twice], dims),
        build.op("Mul", [x, shown], dims),
        shown,
        build.op("Mul", [other, gate], dims),
        build.op("Add", [x, build.op("Sigmoid", [x], dims)], dims),
        build.op("Mul", [square := build.op("Sigmoid", [x], dims), square], dims),
    )
    assert not apply(model, FuseSilu(), x=X / 10 - 2)
    assert "QuickGelu" not in kinds(model) and "com.microsoft" not in model.opset_imports


def normed(build: Builder, x: ir.Value, dims: Dims, **attributes: Any) -> ir.Value:
    scale = build.constant(np.linspace(0.5, 2, 8), np.float32)
    given = {"epsilon": 1e-6} | attributes
    return build.op("RMSNormalization", [x, scale], dims, **given)


Y = np.cos(X)


@pytest.mark.parametrize("axis", [None, -1])
@pytest.mark.parametrize("read", ["no", "later", "output"])
def test_fuse_residual_norms(read: str, axis: int | None) -> None:
    """Case 1: whatever else reads the sum reads it from the new node."""
    dims: Dims = ["batch", "rows", 8]
    build = Builder(x := value("x", dims), y := value("y", dims))
    total = build.op("Add", [x, y], dims)
    out = normed(build, total, dims, **({} if axis is None else {"axis": axis}))
    outputs = [out]
    if read == "later":
        outputs.append(build.op("Neg", [total], dims))
    model = build.model(*outputs)
    if read == "output":
        model.graph.outputs.append(total)
    names = output_names(model)
    fused = apply(model, FuseResidualNorms(), 1e-5, x=X, y=Y)
    assert output_names(model) == names
    if read == "output":  # the sum has to keep its name, so it stays
        assert not fused and kinds(model) == ["Add", "RMSNormalization"]
    else:
        assert fused
        wanted = ["SkipSimplifiedLayerNormalization", *(["Neg"] if read == "later" else [])]
        assert kinds(model) == wanted
        node = next(iter(model.graph))
        assert node.attributes["epsilon"].as_float() == pytest.approx(1e-6)


def test_a_chain_of_residual_norms() -> None:
    """Each sum is the residual of the next one, as layers are."""
    dims: Dims = ["batch", "rows", 8]
    build = Builder(x := value("x", dims), y := value("y", dims))
    total, outputs = build.op("Add", [x, y], dims), []
    for _ in range(3):
        out = normed(build, total, dims)
        outputs.append(build.op("Neg", [out], dims))
        total = build.op("Add", [total, outputs[-1]], dims)
    model = build.model(*outputs, build.op("Neg", [total], dims))
    assert apply(model, FuseResidualNorms(), 1e-5, x=X, y=Y)
    assert kinds(model).count("SkipSimplifiedLayerNormalization") == 3
    assert kinds(model).count("Add") == 1  # behind which there is no norm


def test_residual_norms_that_stay() -> None:
    """Case 2: a broadcast sum, an unknown shape, another rank, another axis, no sum."""
    dims: Dims = ["batch", "rows", 8]
    build = Builder(x := value("x", dims), y := value("y", dims))
    bias = build.constant(np.arange(8), np.float32)
    flat = build.op("Reshape", [x, build.constant([-1, 8])], ["all", 8])
    unknown = build.op("Add", [x, y], [None, "rows", 8])
    unknown.shape = None
    hidden = build.op("Neg", [y], dims)
    hidden.shape = None
    plane = build.constant(np.ones((3, 8)), np.float32)
    model = build.model(
        normed(build, build.op("Add", [x, bias], dims), dims),
        normed(build, build.op("Add", [x, hidden], dims), dims),
        normed(build, build.op("Add", [flat, flat], ["all", 8]), ["all", 8]),
        build.op(
            "RMSNormalization", [build.op("Add", [x, y], dims), plane], dims, axis=1, epsilon=1e-6
        ),
        normed(build, build.op("Mul", [x, y], dims), dims),
        normed(build, x, dims),
    )
    assert not apply(model, FuseResidualNorms(), x=X, y=Y)
    assert kinds(model).count("RMSNormalization") == 6


def search(vocab: int) -> ir.Model:
    """The most probable token as it is traced."""
    logits = value("given", [contract.BATCH, contract.WANTED, vocab])
    build = Builder(logits)
    out = build.op("Identity", [logits], [contract.BATCH, contract.WANTED, vocab])
    best = build.op("ArgMax", [out], [contract.BATCH, contract.WANTED], INT64, axis=-1, keepdims=0)
    shown = build.op("Neg", [logits], [contract.BATCH, contract.WANTED, vocab])
    out.name, best.name, shown.name = contract.LOGITS, contract.ARGMAX, contract.HIDDEN
    return build.model(out, best, shown)


def check_search(model: ir.Model, logits: NDArray[np.float32]) -> None:
    """The tokens are numpy's, and the margin is that to the second of all logits."""
    names = output_names(model)
    assert names == [contract.LOGITS, contract.ARGMAX, contract.MARGIN, contract.HIDDEN]
    _, best, margin, _ = run(model, given=logits)
    np.testing.assert_array_equal(best, logits.argmax(axis=-1))
    top = np.sort(logits, axis=-1)[..., -2:]
    np.testing.assert_array_equal(margin, top[..., 1] - top[..., 0])
    assert best.dtype == np.int64 and margin.dtype == np.float32


# Divides: in blocks of 16, 32, 512 (as a vocabulary of 49152 does), 512, 257 and 506. Does not: a
# prime, 15, 7, and a product of two primes that are both too large for a block.
VOCABULARIES = (16, 64, 1024, 49152, 514, 1518, 521, 15, 7, 2, 523 * 541)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_argmax_in_blocks(vocab: int) -> None:
    """Cases 1 and 2, for several sequences and rows."""
    model = search(vocab)
    assert ArgmaxInBlocks()(model).modified
    in_blocks = "ReduceMax" in kinds(model)
    assert in_blocks is (vocab in (16, 64, 1024, 49152, 514, 1518))
    random = np.random.default_rng(vocab)
    for shape in ((1, 1), (1, 5), (2, 3)):
        check_search(model, random.standard_normal((*shape, vocab)).astype(np.float32))
    assert not ArgmaxInBlocks()(model).modified


@pytest.mark.parametrize("vocab", [16, 64, 1024, 514, 521, 15, 7])
def test_argmax_of_equal_logits(vocab: int) -> None:
    """The first one is taken, inside a block and across blocks; the margin is 0."""
    model = search(vocab)
    assert ArgmaxInBlocks()(model).modified
    logits = np.zeros((1, vocab + 4, vocab), np.float32)
    random = np.random.default_rng(vocab)
    for row in range(vocab):  # two equal ones, anywhere
        logits[0, row, random.choice(vocab, 2, replace=False)] = 1.0
    logits[0, -4] = random.integers(0, 2, vocab)  # many
    logits[0, -3] = -3.0  # all
    logits[0, -2] = np.arange(vocab) // 3  # increasing, in threes
    logits[0, -1] = -np.arange(vocab)  # the first is the best, and its neighbour the second
    check_search(model, logits)
    margins = run(model, given=logits)[2]
    assert not margins[0, :-1].any() or vocab % 3 == 1  # then the largest stands alone
    assert margins[0, -1] == 1


@pytest.mark.parametrize("vocab", [64, 1024])
def test_argmax_where_much_is_infinite(vocab: int) -> None:
    """Masked logits: one, two or one block of them are left."""
    model = search(vocab)
    assert ArgmaxInBlocks()(model).modified
    logits = np.full((1, 3, vocab), -np.inf, np.float32)
    logits[0, 0, vocab // 2] = 1.0
    logits[0, 1, [3, vocab - 1]] = [1.0, 2.0]
    logits[0, 2, :16] = np.arange(16)
    check_search(model, logits)


def test_searches_that_stay() -> None:
    """Case 3: no such output, or one that no ArgMax gives."""
    model = search(64)
    model.graph.outputs[1].name = "other"
    assert not ArgmaxInBlocks()(model).modified
    assert "ArgMax" in kinds(model)
    build = Builder(tokens := value("tokens", [contract.BATCH, contract.WANTED], INT64))
    same = build.op("Identity", [tokens], [contract.BATCH, contract.WANTED], INT64)
    same.name = contract.ARGMAX
    model = build.model(same)
    assert not ArgmaxInBlocks()(model).modified
    assert output_names(model) == [contract.ARGMAX]


def test_wanted_rows() -> None:
    """Case 1: the traced index gives way to first_row .. rows - 1."""
    tokens = value(contract.TOKENS, [contract.BATCH, contract.ROWS], INT64)
    build = Builder(tokens, wanted := value("traced", [contract.WANTED], INT64))
    picked = build.op("Gather", [tokens, wanted], [contract.BATCH, contract.WANTED], INT64, axis=1)
    model = build.model(picked, build.op("Neg", [wanted], [contract.WANTED], INT64))
    feed = np.arange(14).reshape(2, 7)
    want = run(model, tokens=feed, traced=np.array([4, 5, 6]))
    assert WantedRowsFromFirstRow("traced")(model).modified
    assert [v.name for v in model.graph.inputs] == [contract.TOKENS, contract.FIRST_ROW]
    for got, old in zip(run(model, tokens=feed, first_row=np.array([4])), want, strict=True):
        np.testing.assert_array_equal(got, old)
    assert run(model, tokens=feed, first_row=np.array([0]))[0].shape == (2, 7)
    assert run(model, tokens=feed[:, :1], first_row=np.array([0]))[0].shape == (2, 1)


def step_model() -> ir.Model:
    """token' = token + length, hidden' = 2 hidden + token + exp(length) + noise; what is stacked:
    the token, -hidden' and -noise."""
    token = value("token", [contract.BATCH, 1], INT64)
    hidden = value("hidden", [contract.BATCH, 1, 3])
    length = value("past_length", [contract.BATCH], INT64)
    noise = value("noise", [contract.BATCH, 3])
    build = Builder(token, hidden, length, noise)
    one = build.constant([1])
    column = build.op("Unsqueeze", [length, one], [contract.BATCH, 1], INT64)
    real = build.op("Cast", [column], [contract.BATCH, 1], to=FLOAT)
    outside = build.op("Exp", [real], [contract.BATCH, 1])
    wide = build.op("Unsqueeze", [outside, build.constant([2])], [contract.BATCH, 1, 1])
    number = build.op("Cast", [token], [contract.BATCH, 1], to=FLOAT)
    tall = build.op("Unsqueeze", [number, build.constant([2])], [contract.BATCH, 1, 1])
    double = build.op("Add", [hidden, hidden], [contract.BATCH, 1, 3])
    both = build.op("Add", [double, tall], [contract.BATCH, 1, 3])
    quiet = build.op("Add", [both, wide], [contract.BATCH, 1, 3])
    row = build.op("Unsqueeze", [noise, one], [contract.BATCH, 1, 3])
    next_hidden = build.op("Add", [quiet, row], [contract.BATCH, 1, 3])
    next_token = build.op("Add", [token, column], [contract.BATCH, 1], INT64)
    tokens = build.op("Squeeze", [next_token, one], [contract.BATCH], INT64)
    negative = build.op("Neg", [next_hidden], [contract.BATCH, 1, 3])
    logits = build.op("Squeeze", [negative, one], [contract.BATCH, 3])
    unheard = build.op("Neg", [noise], [contract.BATCH, 3])
    outputs = {
        "next_token": next_token, "next": next_hidden, "tokens": tokens, "logits": logits,
        "unheard": unheard,
    }  # fmt: skip
    for name, made in outputs.items():
        made.name = name
    return build.model(*outputs.values())


def repeated() -> ir.Model:
    model = step_model()
    RepeatStep(
        carried={"token": "next_token", "hidden": "next"},
        sliced=["noise"],
        trip_count=contract.NUM_DRAFT,
        stacked=["tokens", "logits", "unheard"],
    )(model)
    return model


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 3])
def test_repeated_step(steps: int, batch: int, spare: int) -> None:
    """The loop equals the step called again and again, each with its slice of the noise; slices
    behind the last step are not read."""
    step = step_model()
    token = np.arange(batch).reshape(batch, 1)
    hidden = np.linspace(0, 1, 3 * batch, dtype=np.float32).reshape(batch, 1, 3)
    length = np.arange(1, batch + 1)
    noise = np.arange(batch * (steps + spare) * 3, dtype=np.float32).reshape(batch, -1, 3)
    noise[:, steps:] = np.nan
    feeds = {"past_length": length, "num_draft": np.array(steps), "noise": noise}
    got = run(repeated(), token=token, hidden=hidden, **feeds)
    stacks: list[list[NDArray[Any]]] = [[], [], []]
    for index in range(steps):
        token, hidden, *found = run(
            step, token=token, hidden=hidden, past_length=length, noise=noise[:, index]
        )
        for stack, array in zip(stacks, found, strict=True):
            stack.append(array)
    for array, stack in zip(got, stacks, strict=True):
        np.testing.assert_array_equal(array, np.stack(stack, axis=1))


def test_a_step_without_a_slice() -> None:
    """Is an error, not the last slice again."""
    feeds: dict[str, Any] = {
        "token": np.zeros((1, 1), np.int64), "hidden": np.zeros((1, 1, 3), np.float32),
        "past_length": np.array([1]), "noise": np.zeros((1, 2, 3), np.float32),
    }  # fmt: skip
    assert run(repeated(), **feeds, num_draft=np.array(2))[1].shape == (1, 2, 3)
    with pytest.raises(Exception, match="out of data bounds"):
        run(repeated(), **feeds, num_draft=np.array(3))


def test_without_slices() -> None:
    """Nothing but carried values and a length: the noise is the same in every step."""
    model = step_model()
    RepeatStep(
        carried={"token": "next_token", "hidden": "next"},
        trip_count=contract.NUM_DRAFT,
        stacked=["logits"],
    )(model)
    feeds: dict[str, Any] = {
        "token": np.zeros((1, 1), np.int64), "hidden": np.zeros((1, 1, 3), np.float32),
        "past_length": np.array([0]), "noise": np.ones((1, 3), np.float32),
    }  # fmt: skip
    # hidden' = 2 hidden + exp(0) + 1
    got = run(model, **feeds, num_draft=np.array(3))[0]
    np.testing.assert_array_equal(got[0, :, 0], [-2, -6, -14])


def test_what_the_loop_holds() -> None:
    """Cases 1 to 4: in the body stands what depends on the carried and sliced values, and nothing
    else."""
    graph = repeated().graph
    names = ["token", "hidden", "past_length", "num_draft", "noise"]
    assert [v.name for v in graph.inputs] == names
    assert [v.name for v in graph.outputs] == ["tokens", "logits", "unheard"]
    outside = [node.op_type for node in graph]
    assert outside[:4] == ["Unsqueeze", "Cast", "Exp", "Unsqueeze"]
    loop = next(node for node in graph if node.op_type == "Loop")
    inside = [node.op_type for node in loop.attributes["body"].as_graph()]
    twice = ["Neg", "Squeeze", "Unsqueeze"] * 2
    assert sorted(inside) == sorted(["Gather", "Cast", "Identity", *["Add"] * 5, *twice])
    shapes = [[d if isinstance(d, int) else d.value for d in v.shape or ()] for v in graph.outputs]
    stacked = [contract.BATCH, contract.DRAFTS]
    assert shapes == [stacked, [*stacked, 3], [*stacked, 3]]
    assert graph.inputs[-1].shape == ir.Shape([*stacked, 3])
