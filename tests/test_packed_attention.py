"""Attention that takes queries, keys and values as one tensor and rotates them itself: the same
results as with the rotation outside, at every position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_models
import transformers
from exported import forward, prompt_of, reference
from numpy.typing import NDArray

from specexport import engines
from specexport.datafile import DATA_FILE, DataFile
from specexport.made import Sources
from specexport.numbers import relative_error
from specexport.sources import Source, resolve
from specgraphs import apply_formats, packed_attention
from specgraphs.engine_graph import EngineGraph
from specgraphs.formats import Formats
from specgraphs.target import trace_target
from specgraphs.trace import build_fake
from specrun import contract

pytestmark = pytest.mark.slow

CONTEXT = tiny_models.CONTEXT
ROTARY, ATTENTION = "RotaryEmbedding", "GroupQueryAttention"
Array = NDArray[Any]


@dataclass(frozen=True)
class Engine:
    """A target engine with the graph that it was written from."""

    graph: EngineGraph
    session: Any

    def operators(self) -> list[str]:
        return [node.op_type for node in self.graph.model.graph]

    def run(self, tokens: Array, past_length: Array, kv: dict[str, Array]) -> dict[str, Array]:
        """Outputs by name, all rows wanted; ``kv`` is not changed."""
        feeds = {
            contract.TOKENS: tokens,
            contract.PAST_LENGTH: past_length.astype(np.int32),
            contract.FIRST_ROW: np.zeros(1, np.int64),
        }
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(None, feeds | kv), strict=True))

    def empty_kv(self, batch: int, capacity: int) -> dict[str, Array]:
        """Buffers of noise, as what stands behind the length must not matter."""
        random = np.random.default_rng(0)
        return {
            value.name: random.standard_normal(
                (batch, value.shape[1], capacity, value.shape[3])
            ).astype(np.float32)
            for value in self.session.get_inputs()
            if value.name.startswith("past.")
        }


def present(outputs: dict[str, Array]) -> dict[str, Array]:
    """The KV that a run leaves, as inputs of the next one."""
    return {
        name.replace("present.", "past."): array
        for name, array in outputs.items()
        if name.startswith("present.")
    }


def traced(source: Source) -> EngineGraph:
    """The target's graph with stacked projections, as they are when attention is packed."""
    fake = build_fake(*source.class_and_config(), "fp32")
    graph = trace_target(fake, "fp32", max_context=CONTEXT)
    apply_formats.apply(graph, {"target": Formats("fp32", "fp32", "fp32")}, {})
    return graph


def opened(source: Source, graph: EngineGraph, folder: Path) -> Engine:
    folder.mkdir(parents=True)
    path = folder / "target.onnx"
    with DataFile(folder / DATA_FILE) as data:
        engines.write_engine(graph, path, data, Sources({"target": source.weights}))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Engine(graph, session)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return resolve(tiny_models.save("llama", tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="module")
def packed(llama: Source, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    graph = traced(llama)
    packed_attention.apply(graph, CONTEXT)
    return opened(llama, graph, tmp_path_factory.mktemp("packed") / "engine")


@pytest.fixture(scope="module")
def rotated(llama: Source, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The same with the rotation outside, as no table may be made."""
    graph = traced(llama)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "TABLE_BYTES", 0)
        packed_attention.apply(graph, CONTEXT)
    return opened(llama, graph, tmp_path_factory.mktemp("rotated") / "engine")


def attention_of(engine: Engine) -> list[ir.Node]:
    return [node for node in engine.graph.model.graph if node.op_type == ATTENTION]


def test_one_product_goes_into_attention(packed: Engine) -> None:
    """No rotation outside; the tables have all positions and some more, once for all layers."""
    operators = packed.operators()
    assert ROTARY not in operators and operators.count(ATTENTION) == 2
    for node in attention_of(packed):
        qkv, *_ = node.inputs
        assert qkv is not None and node.inputs[1] is None and node.inputs[2] is None
        product = qkv.producer()
        assert product is not None and product.op_type == "FusedMatMul"
        assert product.inputs[1] is not None and product.inputs[1].shape == ir.Shape([128, 64])
        assert node.attributes["do_rotary"].as_int() == 1
        tables = node.inputs[7:9]
        for table in tables:
            assert table is not None
            assert table.shape == ir.Shape([CONTEXT + packed_attention.SPARE_ROWS, 8])
    assert len({tuple(map(id, node.inputs[7:9])) for node in attention_of(packed)}) == 1
    assert "Cos" not in operators and "Sin" not in operators
    assert set(packed.graph.constants) <= set(packed.graph.model.graph.initializers)


def test_without_room_for_a_table(rotated: Engine) -> None:
    """Rotation, split and attention stay as they are."""
    assert rotated.operators().count(ROTARY) == 4
    for node in attention_of(rotated):
        assert all(value is not None for value in node.inputs[:3])
        assert "do_rotary" not in node.attributes or not node.attributes["do_rotary"].as_int()


def test_the_same_as_transformers(packed: Engine, rotated: Engine) -> None:
    """In one block up to the end of the context."""
    tokens = prompt_of(CONTEXT)
    want = forward(reference("llama"), tokens)[0]
    for engine in (packed, rotated):
        out = engine.run(np.array([tokens]), np.zeros(1), engine.empty_kv(1, CONTEXT))
        assert relative_error(out[contract.LOGITS][0], want) < 1e-4
        np.testing.assert_array_equal(out[contract.ARGMAX][0], want.argmax(-1))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("past", [0, 1, 7, 63, 122, CONTEXT - 1, CONTEXT + 30, CONTEXT + 500])
def test_every_position(packed: Engine, rotated: Engine, past: int, rows: int) -> None:
    """Behind the context too, where rows of a block of fixed width are dropped again."""
    kv = packed.empty_kv(1, CONTEXT + 600)
    tokens = np.array([prompt_of(rows, seed=past)])
    one, two = (e.run(tokens, np.array([past]), kv) for e in (packed, rotated))
    for name, array in two.items():
        np.testing.assert_allclose(one[name], array, rtol=1e-4, atol=1e-4, err_msg=name)
    np.testing.assert_array_equal(one[contract.ARGMAX], two[contract.ARGMAX])


@pytest.mark.parametrize(("past", "rows"), [((0, 90, 17), 1), ((0, 0, 0), 4)])
def test_sequences_of_other_lengths(
    packed: Engine, rotated: Engine, past: tuple[int, ...], rows: int
) -> None:
    """Each is rotated by its own positions; ONNX Runtime takes several behind a past row by row."""
    kv = packed.empty_kv(3, CONTEXT)
    tokens = np.array([prompt_of(rows, seed=seed) for seed in range(3)])
    one, two = (e.run(tokens, np.array(past), kv) for e in (packed, rotated))
    for name, array in two.items():
        np.testing.assert_allclose(one[name], array, rtol=1e-4, atol=1e-4, err_msg=name)


def test_step_by_step_to_the_end(packed: Engine) -> None:
    """Single rows give what one block gives."""
    tokens = np.array([prompt_of(CONTEXT)])
    whole = packed.run(tokens, np.zeros(1), packed.empty_kv(1, CONTEXT))[contract.LOGITS]
    kv = packed.empty_kv(1, CONTEXT)
    for position in range(CONTEXT):
        out = packed.run(tokens[:, position : position + 1], np.array([position]), kv)
        kv = present(out)
        assert relative_error(out[contract.LOGITS][0, 0], whole[0, position]) < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_families_with_norms_between_stay(name: str, tmp_path: Path) -> None:
    """Queries and keys are normed before they are rotated, which the operator does not do."""
    graph = traced(resolve(tiny_models.save(name, tmp_path)))
    before = [node.op_type for node in graph.model.graph]
    packed_attention.apply(graph, CONTEXT)
    assert [node.op_type for node in graph.model.graph] == before
    assert ROTARY in before


def small_heads(path: Path) -> Source:
    """A llama whose half heads are no multiple of 8."""
    fields = tiny_models.BASE | {"head_dim": 8}
    config = transformers.LlamaConfig(**fields, num_hidden_layers=1)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tiny_models.tokenizer().save_pretrained(path)
    return resolve(path)


def test_head_sizes_that_the_operator_does_not_take(tmp_path: Path) -> None:
    graph = traced(small_heads(tmp_path / "small"))
    packed_attention.apply(graph, CONTEXT)
    assert [node.op_type for node in graph.model.graph].count(ROTARY) == 2


def biased(path: Path) -> Source:
    """A llama with biases, which stand between the product and the rotation."""
    config = transformers.LlamaConfig(
        **tiny_models.BASE, num_hidden_layers=1, attention_bias=True, mlp_bias=True
    )
    model: Any = tiny_models.seeded(lambda: transformers.LlamaForCausalLM(config), "biased", 0.06)
    model.save_pretrained(path)
    tiny_models.tokenizer().save_pretrained(path)
    return resolve(path)


def test_biases(tmp_path: Path) -> None:
    """Each projection has its own behind the split, so the rotation stays outside."""
    source = biased(tmp_path / "biased")
    graph = traced(source)
    packed_attention.apply(graph, CONTEXT)
    operators = [node.op_type for node in graph.model.graph]
    assert operators.count(ROTARY) == 2 and "Split" in operators
    engine = opened(source, graph, tmp_path / "engine")
    model = transformers.AutoModelForCausalLM.from_pretrained(source.path)
    tokens = prompt_of(20)
    out = engine.run(np.array([tokens]), np.zeros(1), engine.empty_kv(1, CONTEXT))
    assert relative_error(out[contract.LOGITS][0], forward(model, tokens)[0]) < 1e-4


Exported = Callable[..., Any]


def test_the_exported_folder_has_it(exported_pair: Exported) -> None:
    """What the exporter writes is the packed form."""
    made = exported_pair(("llama", None))
    graph = ir.load(made.folder / made.spec.file).graph
    operators = [node.op_type for node in graph]
    assert ROTARY not in operators and operators.count(ATTENTION) == 2
