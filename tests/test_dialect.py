"""The dialect of TensorRT: pass by pass on small graphs, and whole folders on ONNX Runtime.

What a graph says never changes with its dialect; engine folders in both give the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import small_vocabulary
import tiny_models
from ir_values import Dims, initializer, value
from numpy.typing import NDArray

import specrun
from specexport import encoders, exporter
from specexport.integers import unpack
from specexport.options import ExportOptions
from specexport.sources import resolve_pair
from specgraphs import dialect, static_rules
from specgraphs.dialect.attention import FUSED_FROM, FixedAttention
from specgraphs.dialect.sizes import FixedCapacity, WantedRowsAsInput
from specgraphs.dialect.standard import StandardOperators
from specgraphs.dialect.unroll import UnrollDrafts
from specgraphs.loop import RepeatStep
from specgraphs.passes import WantedRowsFromFirstRow
from specrun import contract
from specrun import manifest as manifests
from specrun.contract import Part, past, present

FLOAT, HALF, INT32, INT64 = (
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.INT32,
    ir.DataType.INT64,
)
CAPACITY, BATCH, ROWS = 24, 1, 5
KEY, VALUE = past(0, Part.KEY), past(0, Part.VALUE)
Arrays = dict[str, NDArray[Any]]


def model_of(
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    nodes: Sequence[ir.Node],
    initializers: Sequence[ir.Value] = (),
) -> ir.Model:
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=initializers,
        opset_imports={"": 23, "com.microsoft": 1},
        name="small",
    )
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, feeds: Arrays) -> Arrays:
    model.opset_imports[""] = dialect.OPSET if _standard(model) else 23
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session: Any = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [node.name for node in session.get_outputs()]
    wanted = {node.name for node in session.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in wanted}
    return dict(zip(names, session.run(None, given), strict=True))


def _standard(model: ir.Model) -> bool:
    return all(node.domain == "" for node in model.graph.all_nodes())


# Attention.


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention node: heads, KV heads, values of a head, window, and what it is given."""

    heads: int = 4
    kv_heads: int = 2
    head: int = 16
    window: int | None = None
    reads: bool = False
    rotates: int = 0  # values of a head that it rotates itself, of one packed input
    dtype: ir.DataType = FLOAT
    scale: float = 0.3

    @property
    def sizes(self) -> list[int]:
        """Columns of query, key and value."""
        return [n * self.head for n in (self.heads, self.kv_heads, self.kv_heads)]

    def model(self) -> ir.Model:
        query, key, new = (
            value(name, (None, "rows", size), self.dtype)
            for name, size in zip(("query", "key", "value"), self.sizes, strict=True)
        )
        length = value(contract.PAST_LENGTH, ("batch",), INT32)
        shape = ("batch", self.kv_heads, contract.CAPACITY, self.head)
        buffers = [value(name, shape, self.dtype) for name in (KEY, VALUE)]
        rows = ir.node("Shape", [query], {"start": 1, "end": 2})
        count = ir.node("Cast", [rows.outputs[0]], {"to": INT32})
        total = ir.node("Add", [length, count.outputs[0]])
        one = initializer("one", np.array(1, np.int32))
        last = ir.node("Sub", [total.outputs[0], one])
        last.outputs[0].type = ir.TensorType(INT32)
        total.outputs[0].shape = ir.Shape([1])
        nodes, initializers = [rows, count, total, last], [one]
        given: list[ir.Value | None] = [query, key, new]
        inputs = [query, key, new]
        if self.reads:
            empty = [
                initializer(f"empty{i}", np.zeros((1, 0, self.sizes[1]), self.numpy))
                for i in (0, 1)
            ]
            initializers += empty
            given, inputs = [query, *empty], [query]
        lengths = [last.outputs[0], total.outputs[0]]
        attributes: dict[str, Any] = {
            "num_heads": self.heads,
            "kv_num_heads": self.kv_heads,
            "scale": self.scale,
            "local_window_size": self.window or -1,
        }
        tables: list[ir.Value] = []
        if self.rotates:
            query.name, query.shape = "query", ir.Shape((None, "rows", sum(self.sizes)))
            angles = np.arange(64)[:, None] / 10.0 ** np.arange(self.rotates // 2)
            tables = [initializer("cos", np.cos(angles).astype(self.numpy))]
            tables.append(initializer("sin", np.sin(angles).astype(self.numpy)))
            initializers += tables
            given, inputs = [query, None, None], [query]
            attributes |= {"do_rotary": 1, "rotary_interleaved": 0}
        node = ir.node(
            "GroupQueryAttention",
            [*given, *buffers, *lengths, *tables],
            attributes,
            domain="com.microsoft",
            num_outputs=1 if self.reads else 3,
        )
        outputs = list(node.outputs)
        names = ["out", present(0, Part.KEY), present(0, Part.VALUE)]
        dims: list[Dims] = [(None, "rows", self.sizes[0]), shape, shape]
        for output, name, sizes in zip(outputs, names, dims, strict=False):
            output.name, output.shape = name, ir.Shape(sizes)
            output.type = ir.TensorType(self.dtype)
        return model_of([*inputs, length, *buffers], outputs, [*nodes, node], initializers)

    @property
    def numpy(self) -> Any:
        return self.dtype.numpy()

    def feeds(self, rows: int, past_length: int) -> Arrays:
        rng = np.random.default_rng(7)

        def some(*shape: int) -> NDArray[Any]:
            return rng.normal(size=shape).astype(self.numpy)

        packed = sum(self.sizes) if self.rotates else self.sizes[0]
        buffer = (BATCH, self.kv_heads, CAPACITY, self.head)
        return {
            "query": some(BATCH, rows, packed),
            "key": some(BATCH, rows, self.sizes[1]),
            "value": some(BATCH, rows, self.sizes[2]),
            contract.PAST_LENGTH: np.array([past_length], np.int32),
            KEY: some(*buffer),
            VALUE: some(*buffer),
        }


CASES = {
    "plain": Case(),
    "window": Case(window=3),
    "wide-window": Case(window=64),
    "one-kv-head": Case(heads=8, kv_heads=1),
    "few-heads": Case(heads=2, kv_heads=2, dtype=HALF),
    "large-head": Case(head=288, dtype=HALF),
    "reads": Case(reads=True),
    "reads-window": Case(reads=True, window=4),
    "rotates": Case(rotates=16),
    "rotates-a-part": Case(rotates=16, head=48),
    "no-scale": Case(scale=1.0),
    "half": Case(dtype=HALF),
    "half-window": Case(dtype=HALF, window=3),
    "half-reads": Case(dtype=HALF, reads=True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "past_length"), [(1, 0), (1, 9), (5, 0), (5, 12), (5, 19)])
def test_attention_says_the_same(name: str, rows: int, past_length: int) -> None:
    """Whatever a stale row behind the length holds, it is not looked at."""
    case = CASES[name]
    feeds = case.feeds(rows, past_length if not case.reads else past_length + rows)
    if case.reads:
        feeds[contract.PAST_LENGTH] -= rows
    want = run(case.model(), feeds)
    model = case.model()
    FixedAttention(CAPACITY)(model)
    got = run(model, feeds)
    tolerance = 3e-3 if case.dtype is HALF else 2e-6
    np.testing.assert_allclose(got["out"], want["out"], atol=tolerance)
    for part in Part:
        if case.reads:
            continue
        end = past_length + rows
        array = got[present(0, part)]
        np.testing.assert_allclose(
            array[:, :, :end], want[present(0, part)][:, :, :end], atol=tolerance
        )
        np.testing.assert_array_equal(array[:, :, end:], feeds[past(0, part)][:, :, end:])


@pytest.mark.parametrize("name", CASES)
def test_which_attention_is_one_operator(name: str) -> None:
    """Those that TensorRT has a kernel for; it takes no scale, which the query is given before."""
    case = CASES[name]
    model = case.model()
    FixedAttention(CAPACITY)(model)
    found = [node for node in model.graph if node.op_type == "Attention"]
    fused = case.dtype is HALF and case.head <= 256 and case.heads >= FUSED_FROM
    assert bool(found) == fused
    assert all(node.attributes["scale"].as_float() == 1 for node in found)
    scatters = [node for node in model.graph if node.op_type == "TensorScatter"]
    assert len(scatters) == (0 if case.reads else 2)


def test_layers_share_a_mask() -> None:
    """One per window, whatever the number of layers."""
    models = [Case().model(), Case(window=3).model()]
    nodes = [
        node for model in models for node in model.graph if node.op_type == "GroupQueryAttention"
    ]
    model = models[0]
    for node in nodes[1:]:  # the second layer reads what the first one does
        copy = ir.node(
            node.op_type,
            nodes[0].inputs,
            {k: v.value for k, v in node.attributes.items()},
            domain=node.domain,
            num_outputs=3,
        )
        again = ir.node(
            node.op_type,
            nodes[0].inputs,
            {k: v.value for k, v in node.attributes.items()},
            domain=node.domain,
            num_outputs=3,
        )
        model.graph.extend([copy, again])
    FixedAttention(CAPACITY)(model)
    compared = [node.op_type for node in model.graph if node.op_type in ("LessOrEqual", "Greater")]
    assert sorted(compared) == ["Greater", "LessOrEqual", "LessOrEqual"]


# Other passes.


@pytest.mark.parametrize("swap", [0, 1])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_standard_operators(swap: int, alpha: float) -> None:
    """Norms of sums, SiLU and products mean the same, in standard operators."""
    rng = np.random.default_rng(1)

    def made() -> ir.Model:
        x, y = (value(name, ("batch", "rows", 8)) for name in "xy")
        weight = initializer("weight", rng.normal(size=8).astype("f4"))
        matrix = initializer("matrix", rng.normal(size=(8, 8)).astype("f4"))
        norm = ir.node(
            "SkipSimplifiedLayerNormalization",
            [x, y, weight],
            {"epsilon": 1e-5},
            domain="com.microsoft",
            num_outputs=4,
        )
        norm.outputs[1].name = norm.outputs[2].name = ""
        for output in (norm.outputs[0], norm.outputs[3]):
            output.type, output.shape = x.type, x.shape
        silu = ir.node("QuickGelu", [norm.outputs[0]], {"alpha": 1.0}, domain="com.microsoft")
        silu.outputs[0].type, silu.outputs[0].shape = x.type, x.shape
        product = ir.node(
            "FusedMatMul",
            [silu.outputs[0], matrix],
            {"transB": swap, "alpha": alpha},
            domain="com.microsoft",
        )
        outputs = [product.outputs[0], norm.outputs[3]]
        for output, name in zip(outputs, ("z", "sum"), strict=True):
            output.name, output.type, output.shape = name, x.type, x.shape
        return model_of([x, y], outputs, [norm, silu, product], [weight, matrix])

    model = made()
    feeds = {name: rng.normal(size=(2, 3, 8)).astype("f4") for name in "xy"}
    want = run(model, feeds)
    StandardOperators()(model)
    assert _standard(model)
    got = run(model, feeds)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=1e-6)


def test_wanted_rows_are_an_input() -> None:
    """In place of the row they begin with; whoever asks for the size of the rows still has it."""
    tokens = value(contract.TOKENS, ("batch", "rows"), INT64)
    wanted = value("wanted", ("wanted",), INT64)
    pick = ir.node("Gather", [tokens, wanted], {"axis": 1})
    pick.outputs[0].name, pick.outputs[0].type = "picked", ir.TensorType(INT64)
    pick.outputs[0].shape = ir.Shape(("batch", "wanted"))
    model = model_of([tokens, wanted], [pick.outputs[0]], [pick])
    WantedRowsFromFirstRow("wanted")(model)
    feeds = {contract.TOKENS: np.arange(6).reshape(1, 6), contract.FIRST_ROW: np.array([4])}
    want = run(model, feeds)["picked"]
    WantedRowsAsInput()(model)
    names = [given.name for given in model.graph.inputs]
    assert names == [contract.TOKENS, contract.WANTED_ROWS]
    assert {node.op_type for node in model.graph} <= {"Gather", "Shape", "Squeeze", "Constant"}
    feeds[contract.WANTED_ROWS] = np.array([4, 5])
    np.testing.assert_array_equal(run(model, feeds)["picked"], want)
    assert not WantedRowsAsInput()(model).modified


def test_the_capacity_is_fixed_at_the_border_only() -> None:
    buffer = value(KEY, ("batch", 2, contract.CAPACITY, 8))
    node = ir.node("Identity", [buffer])
    node.outputs[0].name, node.outputs[0].type = present(0, Part.KEY), buffer.type
    node.outputs[0].shape = buffer.shape
    model = model_of([buffer], [node.outputs[0]], [node])
    FixedCapacity(40)(model)
    for found in (model.graph.inputs[0], model.graph.outputs[0]):
        assert found.shape is not None and str(found.shape) == "[batch,2,40,8]"


@pytest.mark.parametrize("drafts", [1, 2, 5])
def test_an_unrolled_loop_drafts_the_same(drafts: int) -> None:
    def made() -> ir.Model:
        token = value("token", ("batch", 1), INT64)
        noise = value("noise", ("batch", 3))
        matrix = initializer("table", np.arange(12, dtype=np.float32).reshape(4, 3) % 5)
        row = ir.node("Gather", [matrix, token])
        flat = ir.node("Squeeze", [row.outputs[0], initializer("axis", np.array([1]))])
        logits = ir.node("Add", [flat.outputs[0], noise])
        best = ir.node("ArgMax", [logits.outputs[0]], {"axis": -1, "keepdims": 1})
        for node, name, dims, dtype in (
            (logits, "logits", ("batch", 3), FLOAT),
            (best, "next_token", ("batch", 1), INT64),
        ):
            node.outputs[0].name = name
            node.outputs[0].type, node.outputs[0].shape = ir.TensorType(dtype), ir.Shape(dims)
        for node, name in ((row, "row"), (flat, "flat"), (logits, "add"), (best, "best")):
            node.name = name
        axis = flat.inputs[1]
        assert axis is not None
        model = model_of(
            [token, noise],
            [best.outputs[0], logits.outputs[0]],
            [row, flat, logits, best],
            [matrix, axis],
        )
        RepeatStep(
            carried={"token": "next_token"},
            sliced=["noise"],
            trip_count=contract.NUM_DRAFT,
            stacked=["logits"],
        )(model)
        return model

    rng = np.random.default_rng(drafts)
    feeds: Arrays = {
        "token": np.array([[1], [3]]),
        "noise": rng.normal(size=(2, drafts, 3)).astype("f4"),
        contract.NUM_DRAFT: np.array(drafts),
    }
    want = run(made(), feeds)["logits"]
    model = made()
    UnrollDrafts(drafts)(model)
    assert [given.name for given in model.graph.inputs] == ["token", "noise"]
    assert not {"Loop", "Identity"} & {node.op_type for node in model.graph.all_nodes()}
    assert str(model.graph.outputs[0].shape) == f"[batch,{drafts},3]"
    np.testing.assert_array_equal(run(model, feeds)["logits"], want)
    assert not UnrollDrafts(drafts)(model).modified


def test_what_has_no_form_is_refused() -> None:
    """By name: a graph that is half in the dialect would fail on the device only."""
    x = value("x", ("batch", "rows", 8))
    node = ir.node("BiasGelu", [x, initializer("bias", np.zeros(8, "f4"))], domain="com.microsoft")
    node.name, node.outputs[0].name = "the_node", "y"
    node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
    bias = node.inputs[1]
    assert bias is not None
    model = model_of([x], [node.outputs[0]], [node], [bias])
    from specgraphs.engine_graph import EngineGraph

    with pytest.raises(ValueError, match="the_node: BiasGelu has no form for TensorRT"):
        dialect.apply(EngineGraph(model, {}, {}), capacity=8, drafts=None)


# Integers.


@pytest.mark.parametrize(("bits", "most"), [(8, 0.006), (4, 0.12)])
@pytest.mark.parametrize("columns", [64, 80])
def test_signed_blocks(bits: int, most: float, columns: int) -> None:
    """Symmetric integers stand for the weight; the last block may be a part of one."""
    rng = np.random.default_rng(3)
    weight = rng.normal(size=(16, columns)).astype("f4")
    parts = encoders.signed(weight, bits, 32)
    count = -(-columns // 32)
    assert parts.scales.shape == (16, count) and (parts.scales > 0).all()
    raw = parts.values
    if bits == 4:
        nibbles = unpack(raw)
        signed = (nibbles ^ 8).astype(np.int8) - 8
        assert raw.shape == (16, columns // 2)
    else:
        signed = raw.view(np.int8)
    found = signed * np.repeat(parts.scales, 32, axis=1)[:, :columns]
    error = np.linalg.norm(found - weight) / np.linalg.norm(weight)
    assert error < most
    assert signed.min() >= -(1 << (bits - 1)) and signed.max() < 1 << (bits - 1)


def test_important_columns_lose_less() -> None:
    rng = np.random.default_rng(4)
    weight = rng.normal(size=(64, 64)).astype("f4")
    importance = np.where(np.arange(64) % 4 == 0, 50.0, 1.0).astype("f4")

    def error(parts: encoders.SignedParts) -> float:
        signed = (unpack(parts.values) ^ 8).astype(np.int8) - 8
        off = signed * np.repeat(parts.scales, 32, axis=1) - weight
        return float((off**2 * importance).sum())

    assert error(encoders.signed(weight, 4, 32, importance)) < error(encoders.signed(weight, 4, 32))


def test_a_block_of_zeros() -> None:
    parts = encoders.signed(np.zeros((2, 64), "f4"), 4, 32)
    assert not unpack(parts.values).any() and np.isfinite(parts.scales).all()


# Whole folders.


Folders = Callable[[str], tuple[Path, Path]]
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 11}
PROMPTS = ([1, 2, 3], [3, 1, 2, 1, 3, 1, 2], [1, 2, 3, 4, 5, 6] * 3)


@pytest.fixture
def both(small_folder: Callable[[str], Path], trt_folder: Callable[[str], Path]) -> Folders:
    """Engine folders of a small pair in the dialects of ONNX Runtime and of TensorRT."""

    def make(name: str) -> tuple[Path, Path]:
        own = small_vocabulary.ENGINES
        return small_folder(name) / own, trt_folder(name) / own

    return make


@pytest.mark.parametrize("name", ["llama", "mtp", "gemma4", "deepseek", "glm4-moe"])
def test_both_dialects_say_the_same(both: Folders, name: str) -> None:
    """Tokens, and what was accepted in every round, by every method, greedy and sampled."""
    plain, fixed = both(name)
    methods = ["plain", "prompt-lookup", *manifests.read(plain).drafters]
    common: dict[str, Any] = {"max_new_tokens": 24, "eos_token_ids": (), "strict": True}
    with specrun.load(plain, threads=1) as ours, specrun.load(fixed, threads=1) as theirs:
        for method in methods:
            for how in (GREEDY, SAMPLED):
                for prompt in PROMPTS:
                    want = ours.generate(prompt, method=method, **how, **common)
                    got = theirs.generate(prompt, method=method, **how, **common)
                    assert got.tokens == want.tokens, (method, how, prompt)
                    assert got.stats.accepted_by_round == want.stats.accepted_by_round


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_exact_mode(both: Folders, name: str) -> None:
    """Drafting changes no token, log-probability or near tie there."""
    _, fixed = both(name)
    common: dict[str, Any] = {"max_new_tokens": 24, "eos_token_ids": (), "logprobs": 1}
    with specrun.load(fixed, threads=1, exact=True) as engine:
        for method in manifests.read(fixed).drafters:
            want = engine.generate(PROMPTS[1], method="plain", **GREEDY, **common)
            got = engine.generate(PROMPTS[1], method=method, **GREEDY, **common)
            assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)


def test_a_full_context(both: Folders) -> None:
    """Buffers hold more rows than texts may have tokens; texts end where the context does."""
    _, fixed = both("llama")
    spec = manifests.read(fixed).target_engine
    assert spec.fixed is not None
    with specrun.load(fixed, threads=1) as engine:
        assert spec.fixed.capacity >= engine.max_context
        prompt = [1] * (engine.max_context - 3)
        result = engine.generate(
            prompt, method="prompt-lookup", max_new_tokens=64, eos_token_ids=()
        )
        assert len(result.tokens) == 3
        with pytest.raises(specrun.ContextFull):
            engine.generate([1] * (engine.max_context + 1))


def test_more_drafts_than_are_made(both: Folders) -> None:
    """The engine drafts eight; fewer are the first of them, and more are not to be had."""
    _, fixed = both("gemma4")
    with specrun.load(fixed, threads=1) as engine:
        common: dict[str, Any] = {
            "method": "mtp-drafter",
            "num_assistant_tokens_schedule": "constant",
            "max_new_tokens": 20,
            "eos_token_ids": (),
            "do_sample": False,
        }
        for count in (1, 3, 8):
            result = engine.generate(PROMPTS[0], num_assistant_tokens=count, **common)
            assert max(result.stats.num_draft_by_round) == count
        with pytest.raises(specrun.UsageError, match="exported for at most 8, got 9"):
            engine.generate(PROMPTS[0], num_assistant_tokens=9, **common)


FAMILIES = (
    ("gemma4-e2b", "assistant-centroid"),
    ("gemma4-moe", None),
    ("deepseek-mtp1", None),
    ("mellum-mtp1", None),
)


@pytest.mark.parametrize(("name", "drafter"), FAMILIES)
def test_families_agree_with_transformers(tmp_path: Path, name: str, drafter: str | None) -> None:
    """KV sharing, windows, latent attention, experts of every kind: the export compares them."""
    paths = []
    for model in (name, drafter):
        if model is None:
            continue
        paths.append(tiny_models.save(model, tmp_path))
        if model in tiny_models.MTP_LAYERS:
            tensors = tiny_models.mtp_tensors(tiny_models.build(model))
            tiny_models.add_mtp_layers(paths[-1], tensors)
    options = ExportOptions(backend="tensorrt-rtx", num_draft=4)
    made = exporter.export(*resolve_pair(*paths), tmp_path / "engines", options)
    assert made.parity is not None and made.parity.worst_error < 1e-4
    for spec in made.engines.values():
        # The rules are for what is built; fp32 attention is written out.
        assert not static_rules.static_rules(tmp_path / "engines" / spec.file)
