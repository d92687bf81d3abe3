"""Routed experts: the branches of :mod:`specgraphs.experts` in ONNX Runtime, beside numpy, and what
an engine with experts promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from exported import Exported
from numpy.typing import NDArray

from specexport import engines
from specexport.datafile import DATA_FILE, DataFile
from specexport.made import Sources
from specexport.weights import MergedExperts, Weights
from specgraphs import apply_formats, experts, ops
from specgraphs.engine_graph import EngineGraph
from specgraphs.formats import Formats
from specgraphs.recipes import WeightRef
from specrun import ort
from specrun.errors import UsageError
from specrun.manifest import Precision

Floats = NDArray[np.float32]
HIDDEN, WIDTH, COUNT = 64, 96, 8
BOTH, DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True)
class InMemory:
    """A stored tensor that is an array."""

    array: Floats
    stored: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def rows(self, start: int, stop: int) -> Floats:
        return self.array[start:stop].copy()


def matrices(seed: int = 0) -> dict[str, Floats]:
    draw = np.random.default_rng(seed)
    return {
        BOTH: draw.standard_normal((COUNT, 2 * WIDTH, HIDDEN), np.float32) / np.float32(8),
        DOWN: draw.standard_normal((COUNT, HIDDEN, WIDTH), np.float32) / np.float32(10),
    }


def traced(k: int, activation: str) -> EngineGraph:
    """A graph of one node, as tracing emits it."""
    floats, ints = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT64)
    x = ir.Value(name="x", shape=ir.Shape(["n", HIDDEN]), type=floats)
    index = ir.Value(name="index", shape=ir.Shape(["n", k]), type=ints)
    shares = ir.Value(name="shares", shape=ir.Shape(["n", k]), type=floats)
    weights = [
        ir.Value(name=name, shape=ir.Shape(array.shape), type=floats)
        for name, array in matrices().items()
    ]
    node = ir.node(
        ops.ROUTED_EXPERTS,
        [x, index, shares, *weights],
        {"activation": activation},
        domain=ops.OWN_DOMAIN,
        name="layer",
    )
    node.outputs[0].name = "out"
    node.outputs[0].shape, node.outputs[0].type = x.shape, floats
    graph = ir.Graph(
        [x, index, shares],
        list(node.outputs),
        nodes=[node],
        initializers=weights,
        opset_imports={"": ops.OPSET, ops.OWN_DOMAIN: 1},
        name="experts",
    )
    refs = {name: WeightRef("target", name) for name in (BOTH, DOWN)}
    return EngineGraph(ir.Model(graph, ir_version=ops.IR_VERSION), refs, {})


def written(folder: Path, k: int, activation: str, precision: Precision = "fp32") -> EngineGraph:
    graph = traced(k, activation)
    formats = {"target": Formats(precision, precision, precision, 32)}
    experts.expand(graph, formats)
    apply_formats.apply(graph, formats, {})
    tensors = {name: InMemory(array) for name, array in matrices().items()}
    with DataFile(folder / DATA_FILE) as data:
        engines.write_engine(graph, folder / "e.onnx", data, Sources({"target": Weights(tensors)}))
    return graph


def session(folder: Path, *, profile: bool = False) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_profiling = profile
    options.profile_file_prefix = str(folder / "profile")
    return onnxruntime.InferenceSession(
        str(folder / "e.onnx"), options, providers=["CPUExecutionProvider"]
    )


def inputs(rows: int, k: int, seed: int = 1, among: int = COUNT) -> dict[str, Any]:
    """Rows that are routed to ``k`` different ones of the first ``among`` experts."""
    draw = np.random.default_rng(seed)
    index = np.stack([draw.permutation(among)[:k] for _ in range(rows)]).astype(np.int64)
    return {
        "x": draw.standard_normal((rows, HIDDEN), np.float32),
        "index": index,
        "shares": draw.random((rows, k), np.float32),
    }


def expected(fed: dict[str, Any], activation: str) -> Floats:
    """The formula, row by row and expert by expert."""
    arrays = matrices()
    out = np.zeros_like(fed["x"], dtype=np.float64)
    for row, x in enumerate(fed["x"].astype(np.float64)):
        for expert, share in zip(fed["index"][row], fed["shares"][row], strict=True):
            gate, up = np.split(arrays[BOTH][expert] @ x, 2)
            if activation == "silu":
                gate = gate / (1 + np.exp(-gate))
            else:
                inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
                gate = 0.5 * gate * (1 + np.tanh(inner))
            out[row] += share * (arrays[DOWN][expert] @ (gate * up))
    return out.astype(np.float32)


@pytest.mark.parametrize("activation", sorted(experts.ACTIVATIONS))
@pytest.mark.parametrize("k", [1, 2, COUNT])
def test_against_the_formula(tmp_path: Path, activation: str, k: int) -> None:
    written(tmp_path, k, activation)
    run = session(tmp_path)
    for rows in (1, 2, 7, experts.EXACT_ROWS, experts.EXACT_ROWS + 1, 100):
        for among in {k, COUNT}:
            fed = inputs(rows, k, rows, among)
            (got,) = run.run(None, fed)
            np.testing.assert_allclose(got, expected(fed, activation), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("precision", "error"), [("int8", 0.02), ("w8a8", 0.03), ("int4", 0.2)])
def test_experts_in_integers(tmp_path: Path, precision: Precision, error: float) -> None:
    """Every expert has integers of its own, and a row's result none of the rows beside it."""
    graph = written(tmp_path, 2, "silu", precision)
    assert graph.made and not graph.weights and experts.exact_rows(graph) is None
    run = session(tmp_path)
    fed = inputs(40, 2)
    (got,) = run.run(None, fed)
    want = expected(fed, "silu")
    overflows = ort.lacks_integer_products()
    if precision != "w8a8" or not overflows:
        assert 0 < np.abs(got - want).max() / np.abs(want).max() < error
    for row in (0, 17, 39):
        (alone,) = run.run(None, {name: array[row : row + 1] for name, array in fed.items()})
        if precision == "int4" and overflows:  # such processors sum blocks by the number of rows
            np.testing.assert_allclose(alone[0], got[row], atol=1e-5)
        else:
            np.testing.assert_array_equal(alone[0], got[row])


def test_a_run_computes_the_experts_that_it_needs(tmp_path: Path) -> None:
    """Two products for each expert with a row, by what ONNX Runtime says it ran, and no other."""
    written(tmp_path, 2, "silu")
    run = session(tmp_path, profile=True)
    run.run(None, inputs(5, 2, among=3))
    used = len(np.unique(inputs(5, 2, among=3)["index"]))
    events = json.loads(Path(run.end_profiling()).read_text())
    ran = [e for e in events if e.get("args", {}).get("op_name") in ("FusedMatMul", "MatMul")]
    products = [e for e in ran if e["name"].endswith("_kernel_time")]
    assert 2 <= used <= 3 and len(products) == 2 * used


def test_many_rows_go_through_their_own_experts_only(tmp_path: Path) -> None:
    """Beyond the rows that exact mode runs, an expert's product has as many rows as it is sent."""
    written(tmp_path, 2, "silu")
    run = session(tmp_path, profile=True)
    fed = inputs(200, 2)
    run.run(None, fed)
    events = json.loads(Path(run.end_profiling()).read_text())
    shapes = [
        next(iter(e["args"]["output_type_shape"][0].values()))
        for e in events
        if e.get("args", {}).get("op_name") == "FusedMatMul" and e["name"].endswith("kernel_time")
    ]
    assert sum(shape[0] for shape in shapes if shape[1] == HIDDEN) == 200 * 2


def test_bits_do_not_depend_on_where_other_rows_are_routed(tmp_path: Path) -> None:
    written(tmp_path, 2, "gelu_pytorch_tanh")
    run = session(tmp_path)
    one, other = inputs(16, 2, 5), inputs(16, 2, 6)
    mixed = {name: np.concatenate([one[name][:4], other[name][4:]]) for name in one}
    np.testing.assert_array_equal(run.run(None, one)[0][:4], run.run(None, mixed)[0][:4])


def test_step_bytes_count_the_share_that_a_row_needs(tmp_path: Path) -> None:
    graph = written(tmp_path, 2, "silu")
    whole = COUNT * 3 * WIDTH * HIDDEN * 4
    assert engines.step_bytes(graph) == pytest.approx(whole * 2 / COUNT, rel=0.02)


def test_an_unknown_form_is_refused() -> None:
    config = SimpleNamespace(hidden_act="relu")
    flags = {"has_gate": True, "is_concatenated": True, "is_transposed": False}
    module = SimpleNamespace(config=config, has_bias=False, has_post_expert_norm=False, **flags)
    with pytest.raises(ValueError, match="with relu do not export"):
        experts.activation(module)
    config.hidden_act = "silu"
    assert experts.activation(module) == "silu"
    module.has_bias = True
    with pytest.raises(ValueError, match="do not export"):
        experts.activation(module)


def test_merged_experts_are_read_in_pieces() -> None:
    """No piece is larger than asked for, across matrices and experts, and all of them together
    are the tensor."""
    draw = np.random.default_rng(3)
    parts = [
        tuple(InMemory(draw.standard_normal((5, 4), np.float32)) for _ in range(2))
        for _ in range(3)
    ]
    whole = np.stack([np.concatenate([part.array for part in expert]) for expert in parts])
    weights = Weights({"e": MergedExperts(tuple(parts))})
    for size in (16, 48, 112, 1000):
        pieces = list(weights.chunks("e", size))
        assert max(piece.nbytes for piece in pieces) <= size
        np.testing.assert_array_equal(np.concatenate(pieces), whole.reshape(-1, 4))
        one = np.concatenate(list(weights.chunks("e", size, 1)))
        np.testing.assert_array_equal(one, whole[1])
    np.testing.assert_array_equal(weights.read("e"), whole)


@pytest.mark.slow
def test_an_exact_width_that_experts_do_not_keep_is_refused(
    exported_pair: Callable[..., Exported],
) -> None:
    made = exported_pair(("gemma4-moe", "assistant-centroid"))
    assert made.spec.exact_rows == experts.EXACT_ROWS
    with pytest.raises(UsageError, match=r"exact_width: must be at most 32 .* got 64"):
        made.open(exact=True, exact_width=64)
    with made.open(exact=True, exact_width=32) as engine:
        assert engine.generate([1, 2, 3], max_new_tokens=2).tokens
