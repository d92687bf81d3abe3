"""Every architecture, tiny: exported, run by the runtime, compared with transformers.

``check_architecture`` is what every pair must pass. The tests behind it look at single cases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_models
from drafted import check_candidates, draft, reference_draft
from drafting import CorruptEvery, KnownText, Noisy, Oracle, RightFor, Scripted
from exported import (
    NUM_DRAFT,
    Exported,
    Greedy,
    Pair,
    forward,
    greedy,
    known_text,
    pair_params,
    prompt_of,
    reference,
    same_tokens,
)
from numpy.typing import NDArray

import specrun
from specexport import errors
from specexport.numbers import relative_error
from specrun import contract
from specrun.contract import TARGET_ENGINE, KvLayer, Part, Role, past
from specrun.drafters.mtp import MtpDrafter
from specrun.errors import EngineError
from specrun.kv import KvBuffers
from specrun.runs import zeros
from specrun.sampling import Sampler
from specrun.target import Target

pytestmark = pytest.mark.slow

ExportedPair = Callable[..., Exported]

WINDOW = tiny_models.WINDOW
NEW = 30
LENGTHS = (1, 2, 3, WINDOW - 1, WINDOW, WINDOW + 1, 20)
AROUND_THE_WINDOW = (6, 7, 8, 9, 20)
POISONS = (1e4, np.nan)
TRACED_SIZES = {3, 5, 40}  # rows, wanted rows and capacity of the example that is traced
SHARING: Pair = ("gemma4-e2b", "assistant-plain")  # layers that share KV, per-layer embeddings
CENTROID: Pair = ("gemma4-e2b", "assistant-centroid")
EXPERTS: Pair = ("gemma4-moe", "assistant-centroid")


def check_architecture(pair: Exported) -> None:
    """Exported as transformers computes it, lossless with every drafter, KV exact throughout."""
    assert pair.manifest.parity is not None
    assert pair.manifest.parity.worst_error <= 1e-4
    assert pair.manifest.parity.argmax_agreement == 1
    with pair.open() as engine:
        for length in LENGTHS:
            prompt = prompt_of(length)
            want = greedy(reference(pair.pair[0]), prompt, NEW)
            _check_methods(pair, engine, prompt, want)
        for length in AROUND_THE_WINDOW:
            _check_caches(engine, known_text(pair.pair[0], tuple(prompt_of(length)), NEW))


def _check_methods(pair: Exported, engine: specrun.Engine, prompt: list[int], want: Greedy) -> None:
    """Every method, every draft length, both schedules: transformers' greedy tokens."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": [], "strict": True}
    same_tokens(engine.generate(prompt, method="plain", **options).tokens, want)
    for method in pair.drafting_methods:
        for schedule in ("constant", "heuristic"):
            for k in range(1, NUM_DRAFT + 1):
                result = engine.generate(
                    prompt,
                    method=method,
                    num_assistant_tokens=k,
                    num_assistant_tokens_schedule=schedule,
                    **options,
                )
                same_tokens(result.tokens, want)
                assert result.stats.method == method
                assert result.stats.drafted > 0 or method == "prompt-lookup"


def _check_caches(engine: specrun.Engine, text: KnownText) -> None:
    """After every round the KV is that of a prefill, and what lies behind it never matters."""
    twin = Twin(engine, text)
    for k in range(1, NUM_DRAFT + 1):
        watch = Watch(engine, twin, poison=POISONS[k % 2])
        drafter = Noisy(text, seed=k)
        result = engine.generate(
            text.prompt,
            drafter=drafter,
            num_assistant_tokens=k,
            max_new_tokens=len(text.new),
            eos_token_ids=[],
            strict=True,
            on_round=watch,
        )
        assert result.tokens == text.new
        assert watch.rounds == result.stats.rounds > 0


class Twin:
    """The KV of ``text`` by one prefill; rows of a prefix are a prefix of its rows."""

    def __init__(self, engine: specrun.Engine, text: KnownText) -> None:
        target = engine.target
        target.truncate(0)
        target.prefill(np.array([text.tokens]))
        length = target.length
        self.rows = {name: array[:, :, :length].copy() for name, array in target.kv.arrays.items()}


class Watch:
    """Compares the engine's KV with the twin's after every round, then poisons what is behind."""

    def __init__(self, engine: specrun.Engine, twin: Twin, *, poison: float) -> None:
        self.engine = engine
        self.twin = twin
        self.poison = poison
        self.rounds = 0

    def __call__(self, round_: specrun.Round) -> None:
        self.engine.check_integrity()
        target = self.engine.target
        length = target.length
        assert length == round_.committed_length - 1
        for name, array in target.kv.arrays.items():
            want = self.twin.rows[name][:, :, :length]
            np.testing.assert_allclose(array[:, :, :length], want, 1e-5, 1e-5, err_msg=name)
        poison_behind(target.kv, self.poison)
        self.rounds += 1


def poison_behind(kv: KvBuffers, value: float) -> None:
    """Fill every row from the length on."""
    for array in kv.arrays.values():
        for sequence, length in enumerate(kv.lengths):
            array[sequence, :, length:] = value


@pytest.mark.parametrize("pair", pair_params())
def test_architecture(exported_pair: ExportedPair, pair: Pair) -> None:
    check_architecture(exported_pair(pair))


# The target alone, at the level of its tensors.


@pytest.mark.parametrize("pair", pair_params())
def test_any_rows_after_any_length(exported_pair: ExportedPair, pair: Pair) -> None:
    """Sizes other than the traced ones; the first call has an empty KV."""
    target = exported_pair(pair).open_target()
    tokens = prompt_of(20)
    want, want_hidden = forward(reference(pair[0]), tokens)
    for length in (0, 1, 13):
        for rows in (1, 2, 4, 7):
            target.truncate(0)
            if length:
                target.prefill(np.array([tokens[:length]]))
            got = target.verify(np.array([tokens[length : length + rows]]), want_logits=True)
            assert got.logits is not None and got.logits.shape[1] == rows
            block = slice(length, length + rows)
            assert relative_error(got.logits[0], want[block]) <= 1e-4
            assert relative_error(got.hidden[0], want_hidden[block]) <= 1e-4
            np.testing.assert_array_equal(got.argmax[0], got.logits[0].argmax(1))


@pytest.mark.parametrize("pair", pair_params(("llama", None), SHARING, EXPERTS))
def test_prefill_in_chunks(exported_pair: ExportedPair, pair: Pair) -> None:
    """One block or chunks of 1, 3, 7: the same logits, the same KV, the same text."""
    made = exported_pair(pair)
    tokens = np.array([prompt_of(20)])
    whole = made.open_target(prefill_chunk=64)
    want = whole.prefill(tokens, want_logits=True)
    assert want.logits is not None
    for chunk in (1, 3, 7):
        target = made.open_target(prefill_chunk=chunk)
        got = target.prefill(tokens, want_logits=True)
        assert got.logits is not None
        np.testing.assert_allclose(got.logits, want.logits, atol=1e-5, rtol=0)
        np.testing.assert_allclose(got.hidden, want.hidden, atol=1e-5, rtol=1e-5)
        for name, array in target.kv.arrays.items():
            other = whole.kv.arrays[name]
            np.testing.assert_allclose(array[:, :, :20], other[:, :, :20], atol=1e-5, rtol=0)
        with made.open(prefill_chunk=chunk) as engine:
            result = engine.generate(tokens[0].tolist(), max_new_tokens=NEW, eos_token_ids=[])
        same_tokens(result.tokens, greedy(reference(pair[0]), tokens[0].tolist(), NEW))


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("pair", pair_params())
def test_what_lies_behind_the_length(
    exported_pair: ExportedPair, pair: Pair, poison: float
) -> None:
    """Bit for bit the same logits and hidden rows with other rows behind the length."""
    target = exported_pair(pair).open_target()
    tokens = np.array([prompt_of(12)])

    def run(value: float) -> tuple[NDArray[Any], NDArray[Any]]:
        target.truncate(0)
        poison_behind(target.kv, value)
        target.prefill(tokens[:, :5])
        poison_behind(target.kv, value)
        rows = target.verify(tokens[:, 5:], want_logits=True)
        assert rows.logits is not None
        return rows.logits.copy(), rows.hidden.copy()

    for clean, dirty in zip(run(0.0), run(poison), strict=True):
        np.testing.assert_array_equal(clean, dirty)


@pytest.mark.parametrize("pair", pair_params(SHARING, ("gemma3", None), ("gemma4-dense", None)))
def test_rows_outside_the_window_do_not_matter(exported_pair: ExportedPair, pair: Pair) -> None:
    """Sliding layers see the window, no row more and no row less; full layers see everything."""
    if pair[0] == "gemma4-dense":
        pair = ("gemma4-dense", "assistant-dense")
    made = exported_pair(pair)
    target = made.open_target()
    tokens = np.array([prompt_of(20)])
    first = 19 - WINDOW + 1  # the first row that the one at position 19 sees

    def logits(layers: list[KvLayer], rows: slice) -> NDArray[Any]:
        target.truncate(0)
        target.prefill(tokens[:, :19])
        spoil(target.kv, layers, rows)
        got = target.verify(tokens[:, 19:], want_logits=True).logits
        assert got is not None
        return got.copy()

    sliding = [kv for kv in made.spec.kv if kv.window is not None]
    full = [kv for kv in made.spec.kv if kv.window is None]
    assert {kv.window for kv in sliding} == {WINDOW} and full
    clean = logits([], slice(0, 0))
    np.testing.assert_array_equal(logits(sliding, slice(0, first)), clean)
    assert not np.array_equal(logits(sliding, slice(first, first + 1)), clean)
    assert not np.array_equal(logits(full, slice(0, 1)), clean)


def spoil(kv: KvBuffers, layers: list[KvLayer], rows: slice) -> None:
    """Set some rows of some layers to a huge value."""
    for layer in layers:
        for part in Part:
            kv.arrays[past(layer.layer, part)][:, :, rows] = 1e4


@pytest.mark.parametrize("pair", pair_params(("llama", None), SHARING))
def test_batch_of_different_lengths(exported_pair: ExportedPair, pair: Pair) -> None:
    """Single rows of two sequences equal the two runs apart."""
    made = exported_pair(pair)
    texts = [prompt_of(14, seed=1), prompt_of(14, seed=2)]
    lengths = [11, 4]
    both = made.open_target(batch=2)
    for row in range(12):
        both.verify(np.array([[text[row]] for text in texts]))
    both.kv.truncate(lengths)
    poison_behind(both.kv, np.nan)
    step = np.array([[text[n]] for text, n in zip(texts, lengths, strict=True)])
    got = both.verify(step, want_logits=True)
    assert got.logits is not None
    for sequence, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        alone = made.open_target()
        alone.prefill(np.array([text[:length]]))
        want = alone.verify(step[sequence : sequence + 1], want_logits=True)
        assert want.logits is not None
        np.testing.assert_allclose(got.logits[sequence], want.logits[0], atol=1e-5, rtol=0)
        assert got.argmax[sequence] == want.argmax[0]


@pytest.mark.parametrize("pair", pair_params(("llama", None)))
def test_a_batch_of_blocks_is_refused(exported_pair: ExportedPair, pair: Pair) -> None:
    """ONNX Runtime's CPU kernel cannot; a list of prompts is turned away before it is asked."""
    made = exported_pair(pair)
    target = made.open_target(batch=2)
    target.verify(np.array([[1], [2]]))
    with pytest.raises(EngineError, match=r"target\.onnx: a run failed: .*batch_size must be 1"):
        target.verify(np.array([[1, 2], [3, 4]]))
    with made.open() as engine:  # so every text of a batch has buffers of its own
        options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_ids": []}
        batch = engine.generate([[1, 2], [3]], **options)
        alone = [engine.generate(prompt, **options) for prompt in ([1, 2], [3])]
        assert [row.tokens for row in batch] == [row.tokens for row in alone]


@pytest.mark.parametrize("pair", pair_params(("llama", None), SHARING))
def test_logits_of_wanted_rows_only(
    exported_pair: ExportedPair, pair: Pair, tmp_path: Path
) -> None:
    """A prefill of 30 rows makes no tensor of 30 rows times the vocabulary."""
    made = exported_pair(pair)
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(
        str(made.folder / made.spec.file), options, providers=["CPUExecutionProvider"]
    )
    for first_row in (0, 29):
        outputs = session.run(["logits", "argmax", "hidden"], feeds(made, prompt_of(30), first_row))
        rows = 30 if made.spec.all_hidden else 30 - first_row
        assert [array.shape[1] for array in outputs] == [30 - first_row] * 2 + [rows]
    largest = [max(sizes) for sizes in run_sizes(Path(session.end_profiling()))]
    vocabulary = made.spec.vocab_size
    assert largest[0] >= 30 * vocabulary
    assert largest[1] < 30 * vocabulary


def feeds(made: Exported, tokens: list[int], first_row: int) -> dict[str, NDArray[Any]]:
    """Inputs of a target run on an empty KV."""
    sizes = {contract.BATCH: 1, contract.CAPACITY: 32}
    kv = {
        spec.name: zeros(spec, **sizes)
        for spec in made.spec.inputs
        if spec.name.startswith("past.")
    }
    return kv | {
        contract.TOKENS: np.array([tokens]),
        contract.PAST_LENGTH: np.zeros(1, np.int32),
        contract.FIRST_ROW: np.array([first_row]),
    }


def run_sizes(profile: Path) -> Iterator[list[int]]:
    """Elements of every tensor that was made, run by run."""
    sizes: list[int] = []
    for event in json.loads(profile.read_text(encoding="utf-8")):
        if event["name"] == "model_run":
            yield sizes
            sizes = []
        for output in event.get("args", {}).get("output_type_shape", []):
            sizes += [int(np.prod(shape)) for shape in output.values()]


# What stands in the graphs.


def nodes(made: Exported, name: str) -> list[ir.Node]:
    """All nodes of an engine, those of subgraphs too."""
    return list(ir.load(made.folder / made.manifest.engines[name].file).graph.all_nodes())


@pytest.mark.parametrize("pair", pair_params())
def test_graphs_are_general(exported_pair: ExportedPair, pair: Pair) -> None:
    """Symbolic sizes are declared, no size of the traced example is in a shape constant, and
    attention is the operator that takes its length as an input."""
    made = exported_pair(pair)
    for role, engine in made.manifest.engines.items():
        for spec in (*engine.inputs, *engine.outputs):
            assert not spec.shape or spec.shape[0] in (contract.BATCH, 1), spec
        found = nodes(made, role)
        assert {"Attention", "Loop"} & {n.op_type for n in found} <= {"Loop"}
        assert any(node.op_type == "GroupQueryAttention" for node in found)
        for node in found:
            check_shape_constant(node)


def check_shape_constant(node: ir.Node) -> None:
    """A Reshape or Expand of something that depends on the inputs names no traced size."""
    if node.op_type not in ("Reshape", "Expand") or node.inputs[0] is None:
        return
    source, target = node.inputs[0], node.inputs[1]
    if source.is_initializer() or target is None or target.const_value is None:
        return
    sizes = target.const_value.numpy().tolist()
    assert not TRACED_SIZES & set(sizes), node
    assert sizes[0] in (-1, 0, 1), node  # the batch, 2 in the example


@pytest.mark.parametrize("pair", pair_params())
def test_kv_of_every_layer(exported_pair: ExportedPair, pair: Pair) -> None:
    """Heads and head size are the layer's own; a layer that shares KV has no buffer."""
    made = exported_pair(pair)
    model = reference(pair[0])
    session = made.session(Role.TARGET)
    shapes = {node.name: node.shape for node in session.raw.get_inputs()}
    buffers = {name for name in shapes if name.startswith("past.")}
    total = 0
    for layer, module in enumerate(model.model.layers):
        attention = module.self_attn
        if getattr(attention, "is_kv_shared_layer", False):
            assert past(layer, Part.KEY) not in buffers
            continue
        head_size = attention.head_dim
        heads = attention.k_proj.out_features // head_size
        for part in Part:
            assert shapes[past(layer, part)][1::2] == [heads, head_size]
            buffers.remove(past(layer, part))
            total += heads * head_size * 4
    assert not buffers
    assert made.spec.kv_bytes_per_token == total


@pytest.mark.parametrize("pair", pair_params(*(p for p in tiny_models.PAIRS if p[1])))
def test_windows_in_the_graphs(exported_pair: ExportedPair, pair: Pair) -> None:
    """The window of every attention node; the assistant sees one row more, as its own token has
    no row."""
    made = exported_pair(pair)
    for role, window in ((Role.TARGET, WINDOW), (Role.MTP_DRAFTER, WINDOW + 1)):
        found = [
            node.attributes["local_window_size"].as_int()
            for node in nodes(made, role)
            if node.op_type == "GroupQueryAttention"
        ]
        assert sorted(set(found)) == [-1, window]
    drafter = made.manifest.engines[Role.MTP_DRAFTER].mtp
    assert drafter is not None
    assert set(drafter.windows.values()) == {WINDOW + 1, None}


# The MTP drafter.


DRAFTING = tuple(pair for pair in tiny_models.PAIRS if pair[1])


@pytest.mark.parametrize("pair", pair_params(*DRAFTING))
def test_drafts_equal_the_reference(exported_pair: ExportedPair, pair: Pair) -> None:
    made = exported_pair(pair)
    target = made.open_target()
    tokens = prompt_of(25)
    for length in (1, 7, 8, 9, 10, 24):
        target.truncate(0)
        hidden = target.prefill(np.array([tokens[:length]])).hidden[0, -1].copy()
        poison_behind(target.kv, np.nan)
        got = draft(made, target, tokens[length], hidden, NUM_DRAFT)
        drafted, logits = reference_draft(pair, tokens, length, NUM_DRAFT)
        assert got[contract.DRAFT_TOKENS][0].tolist() == drafted
        check_candidates(made, got, logits)


@pytest.mark.parametrize("pair", pair_params(SHARING))
def test_swapped_halves_fail_parity(
    exported_pair: ExportedPair, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order [embedding, hidden] is checked, not assumed."""
    import torch

    from specexport import exporter
    from specgraphs import assistant

    original = assistant._Step.__init__

    def swapped(self: Any, model: Any, embedding: Any, plan: Any) -> None:
        original(self, model, embedding, plan)
        model.pre_projection.register_forward_pre_hook(
            lambda _, args: (torch.cat(args[0].chunk(2, dim=-1)[::-1], dim=-1),)
        )

    monkeypatch.setattr(assistant._Step, "__init__", swapped)
    with pytest.raises(errors.ParityError, match=r"mtp_drafter\.draft_logits differs"):
        exporter.export(*exported_pair(pair).sources, tmp_path / "engines")
    assert not (tmp_path / "engines").exists()
    mtp = exported_pair(pair).manifest.engines[Role.MTP_DRAFTER].mtp
    assert mtp is not None and mtp.concat_order == ("embedding", "hidden")


@pytest.mark.parametrize("pair", pair_params(SHARING, ("gemma4-dense", "assistant-dense")))
def test_drafter_sees_the_window(exported_pair: ExportedPair, pair: Pair) -> None:
    """Of 20 shared rows: huge values outside the window change nothing in sliding layers."""
    made = exported_pair(pair)
    target = made.open_target()
    tokens = prompt_of(21)
    spec = made.manifest.engines[Role.MTP_DRAFTER]
    first = 20 - WINDOW  # a distance of at most the window from the token at position 20

    def logits(windowed: bool | None, rows: slice) -> NDArray[Any]:
        target.truncate(0)
        hidden = target.prefill(np.array([tokens[:20]])).hidden[0, -1].copy()
        layers = [kv for kv in spec.kv if (kv.window is not None) is windowed]
        spoil(target.kv, layers, rows)
        return draft(made, target, tokens[20], hidden, 1)[contract.DRAFT_LOGITS]

    clean = logits(None, slice(0, 0))
    np.testing.assert_array_equal(logits(True, slice(0, 12 - 1)), clean)
    np.testing.assert_array_equal(logits(True, slice(0, first - 1)), clean)
    assert not np.array_equal(logits(True, slice(first - 1, first)), clean)
    assert not np.array_equal(logits(False, slice(0, 1)), clean)


class Spy(RightFor):
    """Accepts by a pattern, and looks at what the real drafter's engine is about to be fed."""

    def __init__(self, text: KnownText, pattern: list[int], real: MtpDrafter) -> None:
        super().__init__(text, pattern)
        self.real = real
        self.text = text

    def begin(self, tokens: Any) -> None:
        super().begin(tokens)
        self.real.begin(tokens)

    def observe(self, tokens: Any, hidden: NDArray[Any]) -> None:
        super().observe(tokens, hidden)
        self.real.observe(tokens, hidden)

    def propose(self, count: int, sampler: Sampler) -> Any:
        self.real.propose(count, sampler)
        state = self.real._state
        row = len(self.tokens) - 2  # of the last token that is in the KV
        assert state[contract.TOKEN].tolist() == [[self.tokens[-1]]]
        assert state[contract.PAST_LENGTH].tolist() == [row + 1]
        got = state[contract.HIDDEN][0, 0]
        np.testing.assert_allclose(got, self.text.hidden[row], atol=1e-4, rtol=1e-4)
        return super().propose(count, sampler)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.real.truncate(length)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("pair", pair_params(CENTROID, ("gemma4-unified", "assistant-unified")))
def test_hidden_row_of_the_last_accepted_token(
    exported_pair: ExportedPair, pair: Pair, k: int
) -> None:
    """After a prefill the last prompt row; then the row of the last accepted token, n = 0, 1, k."""
    text = known_text(pair[0], tuple(prompt_of(9)), NEW)
    with exported_pair(pair).open() as engine:
        assert engine._lane is not None
        real = engine._lane.drafter(engine.resolve(specrun.GenerateOptions(method="mtp-drafter")))
        assert isinstance(real, MtpDrafter)
        spy = Spy(text, [0, 1, k], real)
        rounds: list[specrun.Round] = []
        result = engine.generate(
            text.prompt,
            drafter=spy,
            num_assistant_tokens=k,
            num_assistant_tokens_schedule="constant",
            max_new_tokens=NEW,
            eos_token_ids=[],
            strict=True,
            on_round=rounds.append,
        )
    assert result.tokens == text.new
    assert [r.accepted for r in rounds[:3]] == [0, 1, k]


@pytest.mark.parametrize("pair", pair_params(SHARING, ("qwen3", None)))
def test_every_fourth_draft_corrupted(exported_pair: ExportedPair, pair: Pair) -> None:
    """What stands before the corrupted draft is accepted, in every round, to the context's end."""
    text = known_text(pair[0], (7,), 127)
    rounds: list[specrun.Round] = []
    drafter = CorruptEvery(text, 4)
    with exported_pair(pair).open() as engine:
        twin = Twin(engine, text)
        watch = Watch(engine, twin, poison=np.nan)

        def on_round(round_: specrun.Round) -> None:
            rounds.append(round_)
            watch(round_)

        result = engine.generate(
            [7], drafter=drafter, max_new_tokens=200, eos_token_ids=[], strict=True,
            on_round=on_round,
        )  # fmt: skip
    assert result.tokens == text.new and result.finish_reason == "length"
    drafted = 0
    for round_ in rounds:
        size = len(round_.proposal)
        assert round_.accepted == next((i for i in range(size) if (drafted + i) % 4 == 3), size)
        drafted += size


@pytest.mark.parametrize("kind", [Oracle, Noisy])
@pytest.mark.parametrize("pair", pair_params(EXPERTS))
def test_growing_buffers(
    exported_pair: ExportedPair, pair: Pair, kind: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers that double in the middle of a text keep it; the drafter follows them."""
    text = known_text(pair[0], tuple(prompt_of(9)), 100)
    with exported_pair(pair).open() as engine:
        spec = exported_pair(pair).spec
        session = engine._resources.session(TARGET_ENGINE)
        engine._open_lane().target = Target(session, spec, max_context=128, initial_capacity=16)
        options: dict[str, Any] = {"max_new_tokens": 100, "eos_token_ids": [], "strict": True}
        assert engine.generate(text.prompt, drafter=kind(text), **options).tokens == text.new
        assert engine.target.kv.capacity == 128
    with exported_pair(pair).open() as engine:
        engine._open_lane().target = Target(session, spec, max_context=128, initial_capacity=16)
        assert engine.generate(text.prompt, method="mtp-drafter", **options).tokens == text.new
