"""Weights as integers: encoders as plain functions, and small graphs before and after
``apply_formats`` in ONNX Runtime, beside the same formula in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import needs
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_values import Dims, value
from numpy.typing import NDArray
from test_passes import Builder

from specexport import calibration, encoders, engines, made, quantization
from specexport.datafile import DATA_FILE, SMALL_ALIGNMENT, DataFile
from specexport.made import Sources
from specexport.options import ExportOptions
from specgraphs import apply_formats
from specgraphs.engine_graph import EngineGraph
from specgraphs.formats import BLOCK_SIZES, Formats, LinearFormat, of_precision
from specgraphs.loop import RepeatStep
from specgraphs.recipes import Blocks, Columns, Made, Stacked, WeightRef
from specgraphs.rotation import matrix, rotated, size_for
from specrun import contract
from specrun.errors import UsageError
from specrun.manifest import Precision

Array = NDArray[Any]
Floats = NDArray[np.float32]
FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def random(*shape: int, seed: int = 0, outliers: bool = False) -> Floats:
    """Normal values; ``outliers``: some columns are 30 times as large, as activations have them."""
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if outliers:
        made[..., ::17] *= 30
    return made


# Encoders: blocks.


SHAPES = [(1, 32), (3, 96), (5, 100), (4, 7), (2, 257)]  # whole blocks or not, odd numbers of them


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks(bits: int, size: int, shape: tuple[int, int]) -> None:
    """The layout is that of the recipe, and no value is off by more than half a step."""
    weight = random(*shape)
    rows, columns = shape
    count = -(-columns // size)
    parts = encoders.blocks(weight, bits, size)
    assert parts.values.shape == (rows, count, size * bits // 8)
    assert parts.scales.shape == (rows, count)
    assert parts.values.dtype == np.uint8 and parts.scales.dtype == np.float32
    if bits == 8:
        assert parts.zeros is None
    else:
        assert parts.zeros is not None and parts.zeros.dtype == np.uint8
        assert parts.zeros.shape == (rows, (count + 1) // 2)
    decoded = encoders.decoded_blocks(parts, bits, columns)
    assert decoded.shape == shape and decoded.dtype == np.float32
    padded = np.zeros((rows, count * size), np.float32)
    padded[:, :columns] = np.abs(weight - decoded)
    off = padded.reshape(rows, count, size).max(axis=2)
    if bits == 8:
        assert (off <= 0.5001 * parts.scales).all()
    else:
        # The search may cut the range for a smaller sum of squares, so the bound is that of
        # the largest range: half a step, or what is cut from either end.
        whole = widest(weight, size)
        cut = (1 - encoders.LEAST_RANGE) * 15 * whole
        assert (off <= np.maximum(cut, 1.5 * whole)).all()
        assert np.sqrt((off**2).mean()) < 1.5 * np.sqrt((whole**2).mean())


def widest(weight: Floats, size: int) -> Floats:
    """The 4-bit step ``[rows, blocks]`` from the smallest to the largest value of a block."""
    rows, columns = weight.shape
    padded = np.zeros((rows, -(-columns // size) * size), np.float32)
    padded[:, :columns] = weight
    blocked = padded.reshape(rows, -1, size)
    found: Floats = (blocked.max(2).clip(min=0) - blocked.min(2).clip(max=0)) / 15
    return found


def rounded(weight: Floats, size: int) -> Floats:
    """4 bits without any search: the whole range, rounded to nearest."""
    rows, columns = weight.shape
    padded = np.zeros((rows, -(-columns // size) * size), np.float32)
    padded[:, :columns] = weight
    blocked = padded.reshape(rows, -1, size)
    scale = widest(weight, size)[..., None]
    safe = np.where(scale > 0, scale, 1)
    zero = np.round(-blocked.min(2, keepdims=True).clip(max=0) / safe).clip(0, 15)
    q = (np.round(blocked / safe + zero)).clip(0, 15)
    decoded: Floats = ((q - zero) * scale).reshape(rows, -1)[:, :columns].astype(np.float32)
    return decoded


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(3, 64), (1, 40), (2, 7)], ids=str)
def test_what_is_on_the_grid_comes_back(bits: int, shape: tuple[int, int]) -> None:
    """Values that a block can hold are held exactly."""
    levels = (1 << bits) - 1
    low, high = (0, levels) if bits == 4 else (-127, 127)
    draw = np.random.default_rng(1)
    weight = draw.integers(low, high + 1, shape).astype(np.float32)
    weight[:, 0] = high  # the range of every first block is the whole one
    weight[:, 32::32] = high
    if bits == 4:
        weight -= 5
        weight[:, 1::32] = -5
    parts = encoders.blocks(weight * 0.25, bits, 32)
    got = encoders.decoded_blocks(parts, bits, shape[1])
    np.testing.assert_allclose(got, weight * 0.25, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_of_zeros(bits: int) -> None:
    weight = random(3, 80)
    weight[1] = 0
    decoded = encoders.decoded_blocks(encoders.blocks(weight, bits, 32), bits, 80)
    np.testing.assert_array_equal(decoded[1], 0)
    assert np.isfinite(decoded).all() and decoded[0].any() and decoded[2].any()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_values_of_one_sign(bits: int, sign: int) -> None:
    """Zero is a value of every block, so nothing is lost where all are far from it."""
    weight = sign * (10 + np.abs(random(2, 64)))
    decoded = encoders.decoded_blocks(encoders.blocks(weight, bits, 32), bits, 64)
    step = np.abs(weight).max() / (15 if bits == 4 else 127)
    assert np.abs(decoded - weight).max() <= 0.75 * step


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Floats, int, Floats | None]:
    """A weight, a block size and the importance of its columns."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    random = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    weight = random.standard_normal((rows, columns)) * 10.0 ** draw(st.integers(-6, 6))
    weight *= random.random((rows, columns)) < draw(st.sampled_from([0.1, 1.0]))
    weight += draw(st.sampled_from([0.0, 1.0, -3.0])) * np.abs(weight).max()
    importance = None
    if draw(st.booleans()):
        importance = (random.standard_normal(columns) ** 4).astype(np.float32)
        importance[random.random(columns) < draw(st.sampled_from([0.0, 0.5]))] = 0
    return weight.astype(np.float32), draw(st.sampled_from(BLOCK_SIZES)), importance


@given(matrices())
@settings(max_examples=150, deadline=None)
def test_the_search_is_never_worse_than_rounding(case: tuple[Floats, int, Floats | None]) -> None:
    """In every block, weighted where columns have an importance."""
    weight, size, importance = case
    rows, columns = weight.shape
    weights = np.ones(columns) if importance is None else importance.astype(np.float64)

    def error(decoded: Floats) -> Array:
        off = np.zeros((rows, -(-columns // size) * size))
        off[:, :columns] = (decoded.astype(np.float64) - weight) ** 2 * weights
        summed: Array = off.reshape(rows, -1, size).sum(axis=2)
        return summed

    got = error(encoders.decoded_blocks(encoders.blocks(weight, 4, size, importance), 4, columns))
    scale = float((weight.astype(np.float64) ** 2 * weights).sum())
    assert (got <= error(rounded(weight, size)) * (1 + 1e-3) + 1e-9 * scale).all()


def test_importance_moves_the_error() -> None:
    """Columns that matter get nearer at the cost of the others."""
    weight = random(64, 128, seed=3)
    importance = np.full(128, 1e-3, np.float32)
    importance[::4] = 1.0
    with_it, without = (
        np.square(
            encoders.decoded_blocks(encoders.blocks(weight, 4, 32, given), 4, 128) - weight
        ).mean(axis=0)
        for given in (importance, None)
    )
    assert with_it[::4].mean() < 0.9 * without[::4].mean()


def test_pieces_of_rows_give_the_same() -> None:
    """What streaming relies on: a row is encoded by itself."""
    weight, importance = random(6, 100), np.abs(random(100, seed=1))
    for bits in (4, 8):
        whole = encoders.blocks(weight, bits, 32, importance)
        for start in range(0, 6, 2):
            piece = encoders.blocks(weight[start : start + 2], bits, 32, importance)
            for one, other in zip(piece, whole, strict=True):
                if one is not None and other is not None:
                    np.testing.assert_array_equal(one, other[start : start + 2])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes_are_widened(dtype: Any) -> None:
    weight = random(2, 40).astype(dtype)
    exact = encoders.blocks(weight.astype(np.float32), 8, 32)
    np.testing.assert_array_equal(encoders.blocks(weight, 8, 32).values, exact.values)
    columns = encoders.columns(weight, None)
    np.testing.assert_array_equal(
        columns.values, encoders.columns(weight.astype(np.float32), None).values
    )


# Encoders: columns.


@pytest.mark.parametrize("smoothed", [False, True])
def test_columns(smoothed: bool) -> None:
    weight = random(5, 33)
    smoothing = np.exp(random(33, seed=1)) if smoothed else None
    parts = encoders.columns(weight, smoothing)
    assert parts.values.shape == (5, 33) and parts.values.dtype == np.int8
    assert parts.scales.shape == (5,) and parts.scales.dtype == np.float32
    stands_for = weight if smoothing is None else weight * smoothing
    decoded = parts.values.astype(np.float32) * parts.scales[:, None]
    assert (np.abs(decoded - stands_for) <= 0.5001 * parts.scales[:, None]).all()
    assert (np.abs(parts.values.astype(int)).max(axis=1) == 127).all()


def test_columns_of_zeros() -> None:
    weight = random(3, 20)
    weight[2] = 0
    parts = encoders.columns(weight, None)
    np.testing.assert_array_equal(parts.values[2], 0)
    assert parts.scales[2] == 0 and np.isfinite(parts.scales).all()


# Graphs.


class Arrays:
    """Weights in memory, with what the exporter asks of a checkpoint. ``tied``: name -> name."""

    def __init__(self, arrays: Mapping[str, Array], tied: Mapping[str, str] | None = None) -> None:
        self.arrays = arrays
        self.tied = tied or {}

    def canonical(self, name: str) -> str:
        return self.tied.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[self.canonical(name)].shape

    def form(self, name: str) -> None:
        """Floats."""

    def chunks(self, name: str, size: int, index: int | None = None) -> Iterator[Array]:
        """In pieces of one row of the first axis, as little as a large tensor may come in."""
        array = self.arrays[self.canonical(name)]
        array = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array
        yield from (array[i : i + 1] for i in range(len(array)))


@dataclass
class Small:
    """A graph in the making whose weights are by name, and its runs before and after.

    ``importance``: of columns, by the name of the weight.
    """

    build: Builder
    arrays: dict[str, Floats] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    weights: dict[str, ir.Value] = field(default_factory=dict)
    importance: dict[WeightRef, Floats] = field(default_factory=dict)

    @classmethod
    def of(cls, *inputs: ir.Value) -> Small:
        return cls(Builder(*inputs))

    def weight(self, name: str, array: Floats) -> ir.Value:
        """The initializer for a weight, which has no value yet."""
        if name not in self.weights:
            self.weights[name] = value(name, array.shape)
            self.arrays[name] = array
        return self.weights[name]

    def linear(self, x: ir.Value, name: str, array: Floats) -> ir.Value:
        """``x @ array.T``, as the passes leave it."""
        dims = [*(d if isinstance(d, int) else d.value for d in x.shape or ())][:-1]
        weight = self.weight(name, array)
        made = self.build.op("FusedMatMul", [x, weight], [*dims, len(array)], transB=1)
        node = made.producer()
        assert node is not None
        node.domain = "com.microsoft"
        return made

    def lookup(self, ids: ir.Value, name: str, array: Floats, dims: Dims) -> ir.Value:
        """Rows of a table."""
        return self.build.op("Gather", [self.weight(name, array), ids], dims, axis=0)

    def graph(self, *outputs: ir.Value) -> EngineGraph:
        """The graph as ``bind`` leaves it; no initializer of a weight has a value."""
        for index, output in enumerate(outputs):
            if output.name is None or output.name[0].isupper():
                output.name = f"out{index}"
        model = self.build.model(*outputs)
        model.opset_imports["com.microsoft"] = 1
        for weight in self.weights.values():
            model.graph.initializers[weight.name or ""] = weight
        refs = {name: WeightRef("target", name) for name in self.weights}
        return EngineGraph(model, refs, {})

    @property
    def sources(self) -> Sources:
        checkpoint: Any = Arrays(self.arrays, self.tied)
        return Sources({"target": checkpoint}, self.importance)

    def written(self, graph: EngineGraph, folder: Path, name: str = "engine") -> Path:
        """``graph`` as a file, its tensors in the data file of ``folder``."""
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.onnx"
        with DataFile(folder / DATA_FILE) as data:
            engines.write_engine(graph, path, data, self.sources, inline_below=64)
        return path


def formats(
    precision: Precision = "fp32",
    *,
    head: Precision | None = None,
    embedding: Precision = "fp32",
    block_size: int = 32,
    chosen: Mapping[str, LinearFormat] | None = None,
) -> dict[str, Formats]:
    """By origin, with one precision for all linear layers unless said otherwise."""
    made = Formats(precision, head or precision, embedding, block_size, chosen or {})
    return {"target": made}


def applied(graph: EngineGraph, by_origin: Mapping[str, Formats]) -> EngineGraph:
    apply_formats.apply(graph, by_origin, apply_formats.heads([graph], by_origin))
    return graph


def outputs_of(path: Path, **feeds: Array) -> list[Array]:
    """A written engine in ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: list[Array] = session.run(None, feeds)
    return found


def ops_of(graph: EngineGraph) -> list[str]:
    """Operators in order."""
    return [node.op_type for node in graph.model.graph]


def rows_of(count: int, columns: int, **options: Any) -> tuple[ir.Value, Floats]:
    """An input ``x [1, rows, columns]`` and values for it."""
    return value("x", [1, "rows", columns]), random(1, count, columns, **options)


def relative(got: Array, want: Array) -> float:
    """Root mean square error over root mean square."""
    return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))


# Graphs: blocks.


@pytest.mark.parametrize("columns", [64, 96, 80])
@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_in_blocks(bits: int, size: int, columns: int, tmp_path: Path) -> None:
    """Equals the product with the decoded weight, up to activations in 8 bits."""
    x, fed = rows_of(5, columns)
    small, weight = Small.of(x), random(24, columns, seed=1)
    small.importance[WeightRef("target", "l.weight")] = np.abs(random(columns, seed=2))
    graph = small.graph(small.linear(x, "l.weight", weight))
    applied(graph, formats("int4" if bits == 4 else "int8", block_size=size))
    assert ops_of(graph) == ["MatMulNBits"]
    node = graph.model.graph[0]
    wanted = {"K": columns, "N": 24, "bits": bits, "block_size": size, "accuracy_level": 4}
    assert {name: node.attributes[name].as_int() for name in wanted} == wanted
    importance = small.importance[WeightRef("target", "l.weight")]
    parts = encoders.blocks(weight, bits, size, importance)
    decoded = encoders.decoded_blocks(parts, bits, columns)
    got = outputs_of(small.written(graph, tmp_path), x=fed)[0]
    assert relative(got, fed @ decoded.T) < 0.01
    assert relative(got, fed @ weight.T) < (0.15 if bits == 4 else 0.02)


# Graphs: rows.


def in_rows(
    x: Floats, weight: Floats, smoothing: Floats | None = None, terms: int = 1, rotation: int = 0
) -> Floats:
    """The formula of ``apply_formats``, with integers as integers."""
    parts = encoders.columns(weight, smoothing, rotation)
    x = x if smoothing is None else x * (np.float32(1) / smoothing)
    x = rotated(x, rotation)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    unit = np.divide(x, largest, out=np.zeros_like(x), where=largest > 0)
    q = np.rint(unit / np.float32(1 / 127)).astype(np.int64)
    y = (q @ parts.values.T.astype(np.int64)) * (parts.scales.astype(np.float64) / 127)
    if terms == 2:
        lost = unit - q.astype(np.float32) * np.float32(1 / 127)
        finer = np.rint(lost / np.float32(1 / (127 * 254))).clip(-128, 127).astype(np.int64)
        y = y + (finer @ parts.values.T.astype(np.int64)) * (parts.scales / 127.0 / 254)
    result: Floats = (y * largest).astype(np.float32)
    return result


def row_layer(
    terms: int = 1, smoothing: Floats | None = None, name: str = "l.weight", rotation: int = 0
) -> dict[str, LinearFormat]:
    return {name: LinearFormat("rows", terms=terms, smoothing=smoothing, rotation=rotation)}


@pytest.mark.parametrize("columns", [64, 100])
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.usefixtures("integer_products")
def test_a_layer_in_rows(count: int, terms: int, columns: int, tmp_path: Path) -> None:
    """Equals the formula in integers nearly to the bit."""
    x, fed = rows_of(count, columns, outliers=True)
    small, weight = Small.of(x), random(24, columns, seed=1)
    graph = small.graph(small.linear(x, "l.weight", weight))
    applied(graph, formats("w8a8", chosen=row_layer(terms)))
    assert ops_of(graph).count("MatMulIntegerToFloat") == 1
    got = outputs_of(small.written(graph, tmp_path), x=fed)[0]
    want = in_rows(fed, weight, terms=terms)
    # A value halfway between two integers may fall either way.
    assert np.quantile(np.abs(got - want), 0.9) <= 1e-5 * np.abs(want).max()
    assert relative(got, want) < (2e-3 if terms == 1 else 1e-4)


@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.usefixtures("integer_products")
def test_a_rotated_layer(count: int, terms: int, smoothed: bool, tmp_path: Path) -> None:
    """Equals the formula; rotating comes behind smoothing."""
    x, fed = rows_of(count, 64, outliers=True)
    small, weight = Small.of(x), random(24, 64, seed=1)
    graph = small.graph(small.linear(x, "l.weight", weight))
    smoothing = SMOOTHING if smoothed else None
    chosen = row_layer(terms, smoothing, rotation=16)
    applied(graph, formats("w8a8", chosen=chosen))
    got = outputs_of(small.written(graph, tmp_path), x=fed)[0]
    want = in_rows(fed, weight, smoothing, terms, rotation=16)
    assert np.quantile(np.abs(got - want), 0.9) <= 1e-5 * np.abs(want).max()
    assert relative(got, want) < 2e-3
    assert relative(got, fed @ weight.T) < (0.1 if smoothed else 0.03)


def test_rotating_makes_up_for_an_outlier(tmp_path: Path) -> None:
    """One value far above the rest costs them their bits, unless they share it."""
    x, fed = rows_of(16, 128)
    fed[..., 5] = 60.0
    weight = random(64, 128, seed=1)
    want = fed @ weight.T
    lost = []
    for size in (0, 64):
        small = Small.of(x := value("x", [1, "rows", 128]))
        graph = small.graph(small.linear(x, "l.weight", weight))
        applied(graph, formats("w8a8", chosen=row_layer(rotation=size)))
        got = outputs_of(small.written(graph, tmp_path / str(size)), x=fed)[0]
        lost.append(float(np.sqrt(np.square(got - want).mean())))
    assert 3 * lost[1] < lost[0]


@pytest.mark.parametrize(
    ("columns", "size"), [(576, 64), (1536, 64), (96, 32), (48, 16), (24, 0), (100, 0)]
)
def test_sizes_of_rotations(columns: int, size: int) -> None:
    assert size_for(columns) == size


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_a_rotation_is_its_own_inverse(size: int) -> None:
    turn = matrix(size)
    np.testing.assert_array_equal(turn, turn.T)
    np.testing.assert_allclose(turn @ turn, np.eye(size), atol=1e-6)
    rows = random(3, 5, 128)
    np.testing.assert_allclose(rotated(rotated(rows, size), size), rows, atol=1e-5)
    np.testing.assert_array_equal(rotated(rows, 0), rows)


def test_a_rotation_of_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two, got 24"):
        matrix(24)


@pytest.mark.usefixtures("integer_products")
def test_two_terms_lose_much_less(tmp_path: Path) -> None:
    """What activations lose is over 30 times less with a second term."""
    x, fed = rows_of(16, 128, outliers=True)
    weight = random(64, 128, seed=1)
    stored = encoders.columns(weight, None)
    want = fed @ (stored.values * stored.scales[:, None]).T.astype(np.float32)
    lost: list[float] = []
    for terms in (1, 2):
        small = Small.of(x := value("x", [1, "rows", 128]))
        graph = small.graph(small.linear(x, "l.weight", weight))
        applied(graph, formats("w8a8", chosen=row_layer(terms)))
        got = outputs_of(small.written(graph, tmp_path / str(terms)), x=fed)[0]
        lost.append(relative(got, want))
    assert 30 * lost[1] < lost[0] < 0.05


@pytest.mark.parametrize("rotation", [0, 32])
@pytest.mark.parametrize("terms", [1, 2])
def test_a_row_of_zeros_gives_zeros(terms: int, rotation: int, tmp_path: Path) -> None:
    x, fed = rows_of(3, 64)
    fed[0, 1] = 0
    small = Small.of(x)
    graph = small.graph(small.linear(x, "l.weight", random(24, 64, seed=1)))
    applied(graph, formats("w8a8", chosen=row_layer(terms, rotation=rotation)))
    got = outputs_of(small.written(graph, tmp_path), x=fed)[0]
    np.testing.assert_array_equal(got[0, 1], 0)
    assert np.isfinite(got).all() and got[0, 0].any() and got[0, 2].any()


@pytest.mark.parametrize("precision", ["int4", "int8", "w8a8", "two terms", "rotated"])
def test_rows_do_not_see_each_other(precision: Any, tmp_path: Path) -> None:
    """At one width the bits of a row are the same whatever stands beside it."""
    x, fed = rows_of(6, 64)
    small = Small.of(x)
    graph = small.graph(small.linear(x, "l.weight", random(24, 64, seed=1)))
    if precision == "two terms":
        applied(graph, formats("w8a8", chosen=row_layer(2)))
    elif precision == "rotated":
        applied(graph, formats("w8a8", chosen=row_layer(rotation=32)))
    else:
        applied(graph, formats(precision))
    path = small.written(graph, tmp_path)
    alone = outputs_of(path, x=fed)[0]
    other = random(1, 6, 64, seed=9) * 1000
    other[:, 2] = fed[:, 2]
    np.testing.assert_array_equal(outputs_of(path, x=other)[0][:, 2], alone[:, 2])


# Graphs: smoothing.

SMOOTHING: Floats = np.exp(random(64, seed=5))


def norm(small: Small, kind: str, x: ir.Value) -> ir.Value:
    """A norm with a scale of its own, fused with a residual sum or not."""
    scale = small.build.constant(1 + 0.1 * random(64, seed=6), np.float32)
    if kind == "RMSNormalization":
        return small.build.op(kind, [x, scale], [1, "rows", 64], axis=-1, epsilon=1e-6)
    made = small.build.op(kind, [x, x, scale], [1, "rows", 64], epsilon=1e-6)
    node = made.producer()
    assert node is not None
    node.domain = "com.microsoft"
    return made


@pytest.mark.parametrize("kind", ["RMSNormalization", "SkipSimplifiedLayerNormalization"])
@pytest.mark.parametrize("read", [False, True], ids=["only layers", "read elsewhere"])
def test_smoothing_goes_into_the_norm(kind: str, read: bool, tmp_path: Path) -> None:
    """Unless something else reads what the norm gives; the result is the same."""
    x, fed = rows_of(5, 64)
    small = Small.of(x)
    normed = norm(small, kind, x)
    outputs = [small.linear(normed, name, random(24, 64, seed=1)) for name in ("a.w", "b.w")]
    if read:
        outputs.append(small.build.op("Neg", [normed], [1, "rows", 64]))
    chosen = LinearFormat("rows", smoothing=SMOOTHING)
    graph = small.graph(*outputs)
    plain = Small.of(y := value("x", [1, "rows", 64]))
    before = plain.graph(norm(plain, kind, y))
    want = outputs_of(plain.written(before, tmp_path / "norm"), x=fed)[0]
    applied(graph, formats("w8a8", chosen={"a.w": chosen, "b.w": chosen}))
    got = outputs_of(small.written(graph, tmp_path / "whole"), x=fed)
    formula = in_rows(want, small.arrays["a.w"], SMOOTHING)
    for result in got[:2]:
        assert relative(result, formula) < 2e-3
    scale = next(n for n in graph.model.graph if n.op_type == kind).inputs[-1]
    assert scale is not None
    assert (scale.producer() is None) is read  # folded: on the scale, so not on every row
    assert ops_of(graph).count("Mul") == 2  # the factor, and what rescales
    if read:
        np.testing.assert_allclose(got[2], -want, rtol=1e-5, atol=1e-6)


def test_smoothing_of_what_is_no_norm(tmp_path: Path) -> None:
    """Activations are multiplied then."""
    x, fed = rows_of(5, 64)
    small, weight = Small.of(x), random(24, 64, seed=1)
    graph = small.graph(small.linear(x, "l.weight", weight))
    applied(graph, formats("w8a8", chosen=row_layer(smoothing=SMOOTHING)))
    assert ops_of(graph)[0] == "Mul"
    got = outputs_of(small.written(graph, tmp_path), x=fed)[0]
    assert relative(got, in_rows(fed, weight, SMOOTHING)) < 2e-3


# Graphs: layers that go together.


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4", "w8a8"])
def test_layers_that_read_the_same_rows(precision: Precision, tmp_path: Path) -> None:
    """Are one product and a Split, and each has the values it would have alone."""
    x, fed = rows_of(5, 64)
    sizes = {"q": 48, "k": 16, "v": 8}
    arrays = {name: random(size, 64, seed=size) for name, size in sizes.items()}
    small = Small.of(x)
    graph = small.graph(*(small.linear(x, f"{n}.weight", a) for n, a in arrays.items()))
    names = [output.name for output in graph.model.graph.outputs]
    applied(graph, formats(precision))
    products = {"FusedMatMul", "MatMulNBits", "MatMulIntegerToFloat"}
    assert len([op for op in ops_of(graph) if op in products]) == 1
    assert ops_of(graph)[-1] == "Split"
    assert [output.name for output in graph.model.graph.outputs] == names
    shapes = [list(output.shape or ()) for output in graph.model.graph.outputs]
    assert [shape[-1] for shape in shapes] == list(sizes.values())
    together = outputs_of(small.written(graph, tmp_path / "together"), x=fed)
    for got, (name, array) in zip(together, arrays.items(), strict=True):
        small = Small.of(x := value("x", [1, "rows", 64]))
        alone = small.graph(small.linear(x, f"{name}.weight", array))
        applied(alone, formats(precision))
        want = outputs_of(small.written(alone, tmp_path / name), x=fed)[0]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_layers_that_do_not_go_together(tmp_path: Path) -> None:
    """Other rows, another format, other smoothing: a product each."""
    x, fed = rows_of(5, 64)
    small = Small.of(x)
    other = small.build.op("Neg", [x], [1, "rows", 64])
    array = random(16, 64, seed=1)
    made = [small.linear(x, f"{n}.weight", array) for n in "abcd"]
    made.append(small.linear(other, "e.weight", array))
    graph = small.graph(*made)
    one, two = (LinearFormat("rows", smoothing=s) for s in (SMOOTHING, SMOOTHING[::-1]))
    chosen = {
        "a.weight": one,
        "b.weight": two,
        "c.weight": LinearFormat("blocks"),
        "d.weight": LinearFormat("blocks", bits=4),
        "e.weight": LinearFormat("blocks"),
    }
    applied(graph, formats("w8a8", chosen=chosen))
    assert ops_of(graph).count("MatMulNBits") == 3
    assert ops_of(graph).count("MatMulIntegerToFloat") == 2
    assert "Split" not in ops_of(graph)
    want = fed @ array.T
    for got, sign in zip(
        outputs_of(small.written(graph, tmp_path), x=fed), (1, 1, 1, 1, -1), strict=True
    ):
        assert relative(got, sign * want) < 0.2


def test_what_stays_float() -> None:
    """Layers whose names say so, products with a factor, and those that are not transposed."""
    x = value("x", [1, "rows", 64])
    small = Small.of(x)
    array = random(16, 64, seed=1)
    names = [
        "model.per_layer_model_projection.weight",
        "model.layers.0.per_layer_input_gate.weight",
        "model.layers.0.per_layer_projection.weight",
        "model.layers.0.router.proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
    ]
    inputs = [small.build.op("Neg", [x], [1, "rows", 64]) for _ in range(8)]
    made = [small.linear(y, name, array) for y, name in zip(inputs, names, strict=False)]
    scaled = small.linear(inputs[6], "scaled.weight", array)
    plain = small.linear(inputs[7], "plain.weight", random(64, 16))
    for out, change in ((scaled, ir.AttrFloat32("alpha", 2.0)), (plain, ir.AttrInt64("transB", 0))):
        node = out.producer()
        assert node is not None
        node.attributes[change.name] = change
    gate = small.linear(inputs[0], "model.layers.0.mlp.gate_proj.weight", array)
    graph = small.graph(*made, scaled, plain, gate)
    applied(graph, formats("int8"))
    assert ops_of(graph).count("FusedMatMul") == len(names) + 2
    assert ops_of(graph).count("MatMulNBits") == 1
    assert {*names, "scaled.weight", "plain.weight"} == set(graph.weights)


# Graphs: the head.


def head_graph(small: Small, hidden: ir.Value, softcap: bool) -> ir.Value:
    """Logits, with a softcap or without; the name of the weight does not say that it is a head."""
    made = small.linear(hidden, "model.embed_tokens.weight", random(40, 64, seed=2))
    dims: Dims = [1, "rows", 40]
    if softcap:
        cap = small.build.constant(30.0, np.float32)
        made = small.build.op("Div", [made, cap], dims)
        made = small.build.op("Tanh", [made], dims)
        made = small.build.op("Mul", [made, cap], dims)
    made.name = contract.LOGITS
    return made


@pytest.mark.parametrize("softcap", [False, True])
def test_a_head_has_a_precision_of_its_own(softcap: bool) -> None:
    """It is found by what it gives, also behind a softcap."""
    x = value("x", [1, "rows", 64])
    small = Small.of(x)
    inner = small.linear(x, "l.weight", random(64, 64, seed=1))
    graph = small.graph(head_graph(small, inner, softcap))
    by_origin = formats("int4", head="int8")
    found = apply_formats.heads([graph], by_origin)
    assert found == {WeightRef("target", "model.embed_tokens.weight"): of_precision("int8", 32)}
    applied(graph, by_origin)
    bits = [n.attributes["bits"].as_int() for n in graph.model.graph if n.op_type == "MatMulNBits"]
    assert bits == [4, 8]


def test_a_head_is_found_by_its_name() -> None:
    """Where what is behind it does not show it."""
    x = value("x", [1, "rows", 64])
    small = Small.of(x)
    made = small.linear(x, "lm_head.weight", random(40, 64))
    graph = small.graph(small.build.op("Softmax", [made], [1, "rows", 40]))
    assert list(apply_formats.heads([graph], formats("int8"))) == [
        WeightRef("target", "lm_head.weight")
    ]


# Graphs: tables.

IDS = np.array([[3, 0, 39, 3]])


def looked_up(
    table: Floats, precision: Precision, folder: Path, block_size: int = 32
) -> tuple[EngineGraph, Array]:
    ids = value("ids", [1, "rows"], INT64)
    small = Small.of(ids)
    out = small.lookup(ids, "t.weight", table, [1, "rows", *table.shape[1:]])
    graph = small.graph(out)
    applied(graph, formats(embedding=precision, block_size=block_size))
    return graph, outputs_of(small.written(graph, folder), ids=IDS)[0]


@pytest.mark.parametrize("shape", [(40, 64), (40, 96), (40, 3, 64), (40, 2, 32)], ids=str)
@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4), ("w8a8", 8)])
def test_a_table_in_blocks(
    precision: Precision, bits: int, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Rows are those of the decoded table; w8a8 has int8 blocks where there is no head."""
    table = random(*shape)
    graph, got = looked_up(table, precision, tmp_path)
    assert ops_of(graph) == ["GatherBlockQuantized"]
    flat = table.reshape(-1, shape[-1])
    decoded = encoders.decoded_blocks(encoders.blocks(flat, bits, 32), bits, shape[-1])
    np.testing.assert_allclose(got, decoded.reshape(shape)[IDS], rtol=1e-6, atol=1e-6)


def test_a_table_that_does_not_divide_stays_float(tmp_path: Path) -> None:
    table = random(40, 48)
    graph, got = looked_up(table, "int8", tmp_path)
    assert ops_of(graph) == ["Gather"]
    np.testing.assert_array_equal(got, table[IDS])


def test_a_table_of_floats_stays(tmp_path: Path) -> None:
    table = random(40, 64)
    graph, got = looked_up(table, "fp32", tmp_path)
    assert ops_of(graph) == ["Gather"] and list(graph.weights) == ["t.weight"]
    np.testing.assert_array_equal(got, table[IDS])


def test_a_gather_along_another_axis_stays() -> None:
    ids = value("ids", ["rows"], INT64)
    small = Small.of(ids)
    table = small.weight("t.weight", random(40, 64))
    graph = small.graph(small.build.op("Gather", [table, ids], [40, "rows"], axis=1))
    applied(graph, formats(embedding="int8"))
    assert ops_of(graph) == ["Gather"] and list(graph.weights) == ["t.weight"]


def tied_graph(small: Small, ids: ir.Value) -> EngineGraph:
    """A table that is the head too."""
    table = random(40, 64, seed=2)
    row = small.lookup(ids, "model.embed_tokens.weight", table, [1, "rows", 64])
    row.name = "row"
    logits = small.linear(row, "model.embed_tokens.weight", table)
    logits.name = contract.LOGITS
    return small.graph(logits, row)


@pytest.mark.parametrize("rotation", [0, 64])
@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.usefixtures("integer_products")
def test_a_tied_head_in_rows(smoothed: bool, rotation: int, tmp_path: Path) -> None:
    """Is stored once, and its rows are looked up as columns."""
    small = Small.of(ids := value("ids", [1, "rows"], INT64))
    graph = tied_graph(small, ids)
    name = "model.embed_tokens.weight"
    smoothing = SMOOTHING if smoothed else None
    chosen = row_layer(terms=2, smoothing=smoothing, name=name, rotation=rotation)
    applied(graph, formats("w8a8", embedding="w8a8", chosen=chosen))
    gathered = [n for n in graph.model.graph if n.op_type == "Gather"]
    assert [n.attributes["axis"].as_int() for n in gathered] == [1, 0]
    assert not graph.weights and len(graph.made) == 2  # values and scales
    logits, row = outputs_of(small.written(graph, tmp_path), ids=IDS)
    table = small.arrays[name]
    parts = encoders.columns(table, smoothing, rotation)
    decoded = rotated(parts.values.astype(np.float32) * parts.scales[:, None], rotation)
    if smoothing is not None:
        decoded = decoded / smoothing
    np.testing.assert_allclose(row, decoded[IDS], rtol=1e-5, atol=1e-5)
    if not smoothed:
        np.testing.assert_allclose(row, table[IDS], atol=0.02 * np.abs(table).max())
    assert relative(logits, row @ decoded.T) < 1e-3
    size = (tmp_path / DATA_FILE).stat().st_size - 4 * rotation**2
    assert size < 1.3 * table.size + 40 * 4 + 20 * SMALL_ALIGNMENT


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_tied_head_in_blocks(precision: Precision, tmp_path: Path) -> None:
    """Table and head have one range in the data file, whatever shapes they read it in."""
    small = Small.of(ids := value("ids", [1, "rows"], INT64))
    graph = tied_graph(small, ids)
    applied(graph, formats(precision, embedding=precision))
    assert sorted(ops_of(graph)) == ["GatherBlockQuantized", "MatMulNBits"]
    path = small.written(graph, tmp_path)
    places: dict[str, set[tuple[int, int]]] = {}
    for name, tensor in externals(path).items():
        places.setdefault(graph.made[name].part, set()).add(
            (tensor.offset or 0, tensor.length or 0)
        )
    assert all(len(found) == 1 for found in places.values())
    assert {"values", "scales"} <= places.keys()
    logits, row = outputs_of(path, ids=IDS)
    bits = 4 if precision == "int4" else 8
    parts = encoders.blocks(small.arrays["model.embed_tokens.weight"], bits, 32)
    decoded = encoders.decoded_blocks(parts, bits, 64)
    np.testing.assert_allclose(row, decoded[IDS], rtol=1e-6, atol=1e-6)
    assert relative(logits, row @ decoded.T) < 0.02


def externals(path: Path) -> dict[str, ir.ExternalTensor]:
    """Initializers of a written engine that stand in the data file."""
    values = ir.load(path).graph.initializers
    tensors = {name: value.const_value for name, value in values.items()}
    return {name: t for name, t in tensors.items() if isinstance(t, ir.ExternalTensor)}


# Graphs: loops.


@pytest.mark.parametrize("precision", ["int8", "int4", "w8a8"])
def test_layers_in_a_loop(precision: Precision, tmp_path: Path) -> None:
    """The steps of a drafter are in the body of a Loop: its layers and tables are no others, and
    what they read stands outside."""
    if precision == "w8a8":
        needs.integer_arithmetic()
    small = Small.of(x := value("x", ["batch", 1, 64]), ids := value("ids", ["batch", 1], INT64))
    row = small.lookup(ids, "t.weight", random(40, 64, seed=2), ["batch", 1, 64])
    fed = small.build.op("Add", [x, row], ["batch", 1, 64])
    one = small.linear(fed, "a.weight", 0.1 * random(64, 64, seed=3))
    two = small.linear(fed, "b.weight", 0.1 * random(24, 64, seed=4))
    next_ids = small.build.op("Identity", [ids], ["batch", 1], INT64)
    one.name, two.name, next_ids.name = "next", "shown", "next_ids"
    graph = small.graph(one, two, next_ids)
    RepeatStep(carried={"x": "next", "ids": "next_ids"}, trip_count="count", stacked=["shown"])(
        graph.model
    )
    feeds = {"x": random(2, 1, 64), "ids": np.array([[3], [39]]), "count": np.array(3)}
    want = outputs_of(small.written(graph, tmp_path / "before"), **feeds)[0]
    applied(graph, formats(precision, embedding=precision))
    assert "Split" not in ops_of(graph)
    inside = [node.op_type for node in graph.model.graph.all_nodes()]
    products = {"MatMulNBits", "MatMulIntegerToFloat"}
    assert len([op for op in inside if op in products]) == 1 and inside.count("Split") == 1
    assert inside.count("GatherBlockQuantized") == 1 and "FusedMatMul" not in inside
    got = outputs_of(small.written(graph, tmp_path / "after"), **feeds)[0]
    assert got.shape == want.shape == (2, 3, 1, 24)
    assert relative(got, want) < (0.2 if precision == "int4" else 0.02)


def test_a_table_of_ids_stays() -> None:
    """As the order of the tokens behind a centroid head."""
    small = Small.of(ids := value("ids", [1, "rows"], INT64))
    table = small.weight("order", random(40, 64))
    table.type = ir.TensorType(INT64)
    graph = small.graph(small.build.op("Gather", [table, ids], [1, "rows", 64], INT64, axis=0))
    applied(graph, formats("int8", embedding="int8"))
    assert ops_of(graph) == ["Gather"] and list(graph.weights) == ["order"]


# Writing what recipes make.


def places_of(
    recipes: Iterable[tuple[Made, Any]], small: Small, folder: Path
) -> tuple[list[tuple[int, int]], int]:
    """Where the parts stand, and how long the file is."""
    with DataFile(folder / DATA_FILE) as data:
        found = [made.write(m, np.dtype(d), data, small.sources) for m, d in recipes]
    return [(p.offset, p.length) for p in found], (folder / DATA_FILE).stat().st_size


def test_equal_recipes_are_written_once(tmp_path: Path) -> None:
    """Tied names too; another order, another dtype or another recipe is another range."""
    small = Small.of()
    for name, size in (("a", 8), ("b", 4)):
        small.weight(name, random(size, 32, seed=size))
    small.tied["head"] = "a"
    a, b, head = (WeightRef("target", name) for name in ("a", "b", "head"))
    wanted: list[tuple[Made, Any]] = [
        (Made(Blocks((a, b), 8, 32)), np.uint8),
        (Made(Blocks((head, b), 8, 32)), np.uint8),
        (Made(Blocks((b, a), 8, 32)), np.uint8),
        (Made(Blocks((a, b), 4, 32)), np.uint8),
        (Made(Blocks((a, b), 8, 16)), np.uint8),
        (Made(Columns((a, b))), np.int8),
        (Made(Stacked((a, b))), np.float32),
        (Made(Stacked((head, b))), np.float32),
        (Made(Stacked((a, b))), np.float16),
    ]
    places, _ = places_of(wanted, small, tmp_path)
    assert places[0] == places[1] and places[6] == places[7]
    assert len(set(places)) == len(wanted) - 2


@pytest.mark.parametrize("tall", [1, 3])
def test_what_is_written_is_what_encoders_make(tall: int, tmp_path: Path) -> None:
    """Of several sources one below the other, each in pieces."""
    small = Small.of()
    arrays = [random(5, tall, 48, seed=1), random(2, tall, 48, seed=2)]
    for name, array in zip("ab", arrays, strict=True):
        small.weight(name, array)
    refs = tuple(WeightRef("target", name) for name in "ab")
    small.importance[refs[1]] = np.abs(random(48, seed=3))
    below = np.concatenate([array.reshape(-1, 48) for array in arrays])
    recipes = (Blocks(refs, 4, 32), Columns(refs, None), Stacked(refs))
    wanted: list[tuple[Made, Any]] = [
        (Made(recipes[0], "values"), np.uint8),
        (Made(recipes[0], "scales"), np.float32),
        (Made(recipes[0], "zeros"), np.uint8),
        (Made(recipes[1], "values"), np.int8),
        (Made(recipes[1], "scales"), np.float32),
        (Made(recipes[2]), np.float32),
    ]
    places, _ = places_of(wanted, small, tmp_path)
    data = (tmp_path / DATA_FILE).read_bytes()
    stored = [
        np.frombuffer(data[offset : offset + length], dtype)
        for (offset, length), (_, dtype) in zip(places, wanted, strict=True)
    ]
    cut = 5 * tall
    first = encoders.blocks(below[:cut], 4, 32)
    second = encoders.blocks(below[cut:], 4, 32, small.importance[refs[1]])
    for got, one, two in zip(stored[:3], first, second, strict=True):
        assert one is not None and two is not None
        np.testing.assert_array_equal(got, np.concatenate([one.ravel(), two.ravel()]))
    columns = encoders.columns(below, None)
    np.testing.assert_array_equal(stored[3], columns.values.T.ravel())
    np.testing.assert_array_equal(stored[4], columns.scales)
    np.testing.assert_array_equal(stored[5], below.ravel())


@pytest.mark.parametrize("precision", ["int8", "int4", "w8a8"])
def test_as_many_bytes_as_were_said(precision: Precision, tmp_path: Path) -> None:
    """``bytes_to_write`` is the data file but for alignment; a step reads less than that."""
    small = Small.of(ids := value("ids", [1, "rows"], INT64))
    table = random(40, 64, seed=2)
    row = small.lookup(ids, "model.embed_tokens.weight", table, [1, "rows", 64])
    made = small.linear(row, "l.weight", random(32, 64))
    graph = small.graph(made)
    applied(graph, formats(precision, embedding=precision))
    total = engines.bytes_to_write([graph], small.sources)
    step = engines.step_bytes(graph)
    size = small.written(graph, tmp_path).with_name(DATA_FILE).stat().st_size
    assert total <= size <= total + SMALL_ALIGNMENT * 20
    bits = 4 if precision == "int4" else 8
    assert 32 * 64 * bits // 8 < step < 32 * 64 * bits // 8 * 1.5  # the layer, not the table


# Options.


@pytest.mark.parametrize("size", [0, 8, 15, 48, 512, -32])
def test_block_sizes_that_are_none(size: int) -> None:
    with pytest.raises(UsageError, match=f"block_size: must be one of 16, .*256, got {size}") as e:
        ExportOptions(block_size=size)
    assert e.value.hint == "32 is the default"


FIELDS = ("precision", "drafter_precision", "head_precision", "embedding_precision")


@pytest.mark.parametrize("name", FIELDS)
def test_precisions_that_are_none(name: str) -> None:
    given: dict[str, Any] = {name: "int3"}
    with pytest.raises(UsageError, match=rf"^{name}: must be one of fp32, .*got 'int3'") as error:
        ExportOptions(**given)
    assert "w8a8" in (error.value.hint or "")


@pytest.mark.parametrize("name", FIELDS[1:])
@pytest.mark.parametrize(
    ("precision", "other"), [("fp16", "int8"), ("int8", "fp16"), ("fp16", "bf16")]
)
def test_precisions_that_do_not_mix(name: str, precision: Any, other: Any) -> None:
    """Activations have one dtype in a folder."""
    given: dict[str, Any] = {name: other}
    with pytest.raises(
        UsageError, match=rf"^{name}: {other} does not go with precision {precision}"
    ) as error:
        ExportOptions(precision=precision, **given)
    assert error.value.hint == f"leave {name} out, or give fp16 for both"


def test_precisions_that_follow() -> None:
    """Of drafters, head and tables, where nothing is said."""
    nothing: dict[str, Any] = {"drafter": None, "head": None, "embedding": None}
    follow = {name: name for name in get_args(Precision)} | {"int4": "int8"}
    for precision in get_args(Precision):
        made = quantization.resolve(precision, **nothing, block_size=64)
        assert made.target == precision
        assert made.drafter == ("int8" if precision == "w8a8" else precision)
        assert (made.head, made.embedding) == (follow[precision], follow[precision])
        assert made.of_target == {precision, follow[precision]}
        assert made.needs_calibration is (precision in ("int4", "w8a8"))
    said = quantization.resolve(
        "int8", drafter="int4", head="w8a8", embedding="fp32", block_size=64
    )
    assert (said.drafter, said.head, said.embedding) == ("int4", "w8a8", "fp32")
    assert said.needs_calibration  # of the head


# Calibration of rows.


class Held:
    """A checkpoint of one matrix."""

    def __init__(self, matrix: Floats) -> None:
        self.matrix = matrix

    def shape(self, name: str) -> tuple[int, ...]:
        return self.matrix.shape

    def chunks(self, name: str, size: int) -> list[Floats]:
        return [self.matrix]


def chosen_for(fed: Floats, name: str = "l.weight") -> calibration.Choice:
    """What calibration chooses for a layer that is fed these rows, behind no norm."""
    fed = fed.reshape(-1, fed.shape[-1])
    largest, importance = np.abs(fed).max(axis=0), np.square(fed).mean(axis=0)
    layers = calibration.Layers((name,), False, fed, largest, importance)
    weights: Any = Held(random(32, fed.shape[-1], seed=1))
    (choice,) = calibration.choose_rows([layers], weights)
    return choice


def test_the_cheapest_format_that_is_good_enough() -> None:
    """As it is, rotated where there are outliers, with a second term where it cannot rotate."""
    even = random(64, 128)
    choice = chosen_for(even)
    assert (choice.format.rotation, choice.format.terms) == (0, 1)
    uneven = even.copy()
    uneven[:, 7] = 25
    choice = chosen_for(uneven)
    assert (choice.format.rotation, choice.format.terms) == (64, 1)
    assert choice.error <= calibration.MOST_ERROR[False]
    odd = uneven[:, :100]
    choice = chosen_for(odd)
    assert (choice.format.rotation, choice.format.terms) == (0, 2)
    choice = chosen_for(even, "lm_head.weight")
    assert (choice.format.rotation, choice.format.terms) == (0, 2)


@pytest.mark.parametrize(("kept", "said"), [(1, False), (2, False), (3, True)])
def test_an_int4_engine_that_is_mostly_int8_says_so(kept: int, said: bool) -> None:
    eight = LinearFormat("blocks", bits=8)
    choices = tuple(calibration.Choice((f"l{i}.weight",), eight, None, 0.1) for i in range(kept))
    formats = Formats("int4", "int8", "int8")
    made = quantization.Plan(formats, formats, choices, num_layers=4)
    notes = quantization.kept_notes(made)
    assert len(notes) == said
    assert not said or "3 of 4 linear layers are kept in 8 bits" in notes[0]
