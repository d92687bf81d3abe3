"""MTP layers of the target's own checkpoint: weights, engines, drafter, against transformers.

The drafter's tests feed it hidden rows of the reference and accept as they please, so they need no
target engine; that of the end-to-end tests is exported with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mtp_reference
import numpy as np
import onnx_ir as ir
import pytest
import tiny_models
import torch
from exported import prompt_of
from numpy.typing import NDArray

import specrun
from specexport import exporter, mtp_weights
from specexport.errors import SourceError, WeightsError
from specexport.models import STREAMED, WHOLE
from specexport.numbers import relative_error
from specexport.options import ExportOptions
from specexport.parts import mtp_layers
from specexport.parts.base import TargetRun
from specexport.sources import resolve
from specgraphs import families, ops, passes, trace
from specrun import contract
from specrun import manifest as manifests
from specrun.contract import Part, past
from specrun.decode import DecodeError
from specrun.drafters import mtp_layers as drafters
from specrun.drafters.mtp_layers import MtpLayersDrafter
from specrun.manifest import Manifest
from specrun.ort import open_session
from specrun.sampling import Draw, Sampler

DEEPSEEK, GLM, MELLUM = "deepseek-mtp3", "glm4-moe-mtp2", "mellum-mtp1"
slow = pytest.mark.slow  # one family is exported in every run, the others take a minute more
EXPORTED = (DEEPSEEK, pytest.param(GLM, marks=slow))
# Checkpoint and how many of its layers are used.
USED = [
    (DEEPSEEK, 3),
    (DEEPSEEK, 1),
    pytest.param(GLM, 2, marks=slow),
    pytest.param(GLM, 1, marks=slow),
]
NEW = 30
LOGITS_ERROR = 1e-4


class Made(NamedTuple):
    """A checkpoint with its engine folder."""

    checkpoint: Path
    folder: Path
    manifest: Manifest

    def drafter(self, layers: int, **options: Any) -> MtpLayersDrafter:
        """The first ``layers`` engines as a drafter."""
        names = [contract.mtp_layer_engine(layer) for layer in range(layers)]
        specs = [self.manifest.engines[name] for name in names]
        sessions = [open_session(self.folder / spec.file, spec, threads=1) for spec in specs]
        return MtpLayersDrafter(sessions, specs, **{"max_context": 128, "max_drafts": 8, **options})


@pytest.fixture(scope="module")
def made(once: Callable[..., Path]) -> Callable[[str], Made]:
    """``made(name)``: a checkpoint of tiny_models and its folder; the first is compared too."""

    def export(name: str, folder: Path) -> None:
        source = resolve(tiny_models.save(name, folder))
        options = ExportOptions(num_draft=8, check=name == DEEPSEEK)
        exporter.export(source, None, folder / "engines", options)

    def make(name: str) -> Made:
        folder = once(f"mtp-{name}", lambda folder: export(name, folder))
        engines = folder / "engines"
        return Made(folder / name, engines, manifests.read(engines))

    return make


class Spy(Sampler):
    """Greedy; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes: list[list[int]] = []
        self.logits: list[NDArray[np.float32]] = []

    @property
    def needs_draft_logits(self) -> bool:
        return True

    def draw(self, prefix: Any, logits: Any) -> Draw:
        self.prefixes.append(prefix.tolist())
        self.logits.append(logits.copy())
        return super().draw(prefix, logits)


class Rounds:
    """Runs a drafter on rows of the reference; the caller says what is accepted."""

    def __init__(self, drafter: MtpLayersDrafter, model: Any, prompt: Sequence[int]) -> None:
        self.drafter = drafter
        self.model = model
        self.tokens = [*prompt]
        self.prompt_length = len(prompt)
        self.drafter.begin(prompt[:1])

    def read_prompt(self, chunk: int) -> None:
        """All but the first token, ``chunk`` rows at a time, as a prefill gives them."""
        rows = mtp_reference.hidden_rows(self.model, self.tokens[:-1])[0].numpy()
        for start in range(0, len(rows), chunk):
            stop = min(start + chunk, len(rows))
            self.drafter.observe(self.tokens[start + 1 : stop + 1], rows[start:stop])
            self.drafter.check_integrity()

    def propose(self, count: int) -> tuple[list[int], NDArray[np.float32]]:
        spy = Spy()
        proposal = self.drafter.propose(count, spy)
        assert proposal.q is None
        drafts = proposal.tokens
        assert spy.prefixes == [[*self.tokens, *drafts[:i]] for i in range(len(drafts))]
        return drafts, np.stack(spy.logits)

    def accept(self, drafts: Sequence[int], count: int) -> None:
        """``count`` of ``drafts`` and one token of the target's."""
        before = len(self.tokens)
        self.tokens += [*drafts[:count], (drafts[-1] + 1 + before) % 256]
        self.drafter.truncate(before + count)
        rows = mtp_reference.hidden_rows(self.model, self.tokens[:-1])[0].numpy()
        self.drafter.observe(self.tokens[before:], rows[before - 1 :])
        self.drafter.check_integrity()


def same_drafts(got: tuple[list[int], Any], want: tuple[list[int], Any]) -> None:
    assert got[0] == want[0]
    assert relative_error(got[1], want[1]) <= LOGITS_ERROR


# The drafter.


@pytest.mark.parametrize(("name", "layers"), USED)
def test_drafts_equal_transformers_loop(
    made: Callable[[str], Made], name: str, layers: int
) -> None:
    """Tokens and logits of every step, round by round, after none, one and all were accepted."""
    model = mtp_reference.load(made(name).checkpoint, layers)
    loop = mtp_reference.Loop(model)
    rounds = Rounds(made(name).drafter(layers), model, prompt_of(9))
    rounds.read_prompt(9)
    last = 0
    for accepted in (layers, 0, min(1, layers), layers, 0, 0, layers - 1, layers, layers, 0):
        got = rounds.propose(layers)
        same_drafts(got, loop.drafts(rounds.tokens, last))
        rounds.accept(got[0], accepted)
        last = accepted


@pytest.mark.parametrize(("name", "layers"), USED)
def test_more_or_fewer_drafts_than_layers(
    made: Callable[[str], Made], name: str, layers: int
) -> None:
    """The last layer is applied again; layers that were left out catch up later."""
    model = mtp_reference.load(made(name).checkpoint, layers)
    mtp = mtp_reference.load_mtp(model)
    rounds = Rounds(made(name).drafter(layers), model, prompt_of(5))
    rounds.read_prompt(5)
    for count, accepted in ((5, 5), (5, 0), (1, 1), (1, 0), (2, 2), (5, 4), (4, 1), (1, 1), (3, 3)):
        got = rounds.propose(count)
        same_drafts(got, mtp_reference.naive_drafts(model, mtp, rounds.tokens, count))
        rounds.accept(got[0], accepted)


@pytest.mark.parametrize("chunk", [1, 7, 40, 90])
def test_long_prompts(
    made: Callable[[str], Made], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in pieces of any size, through the layers in blocks: the same drafts; few rows kept."""
    monkeypatch.setattr(drafters, "SETTLE_ROWS", 32)
    model = mtp_reference.load(made(DEEPSEEK).checkpoint)
    mtp = mtp_reference.load_mtp(model)
    drafter = made(DEEPSEEK).drafter(3, block=16, initial_capacity=8)
    rounds = Rounds(drafter, model, prompt_of(90))
    rounds.read_prompt(chunk)
    assert len(drafter._rows) < 32 + chunk
    for accepted in (0, 3, 1):
        got = rounds.propose(3)
        same_drafts(got, mtp_reference.naive_drafts(model, mtp, rounds.tokens, 3))
        rounds.accept(got[0], accepted)
        assert len(drafter._rows) < 32 + 3


def test_layers_that_lag_catch_up(
    made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draft per round for long: rows that wait for the deeper layers stay bounded."""
    monkeypatch.setattr(drafters, "SETTLE_ROWS", 8)
    model = mtp_reference.load(made(DEEPSEEK).checkpoint)
    mtp = mtp_reference.load_mtp(model)
    drafter = made(DEEPSEEK).drafter(3)
    rounds = Rounds(drafter, model, prompt_of(4))
    rounds.read_prompt(4)
    for accepted in (0, 1) * 8:
        rounds.accept(rounds.propose(1)[0], accepted)
        assert len(drafter._rows) < 8 + 2
    got = rounds.propose(4)
    same_drafts(got, mtp_reference.naive_drafts(model, mtp, rounds.tokens, 4))


def test_rows_behind_the_length_do_not_matter(made: Callable[[str], Made]) -> None:
    """Whatever a rejected draft left in the buffers."""
    model = mtp_reference.load(made(DEEPSEEK).checkpoint)
    found = []
    for poison in (0.0, np.nan):
        rounds = Rounds(made(DEEPSEEK).drafter(3), model, prompt_of(6))
        rounds.read_prompt(6)
        rounds.accept(rounds.propose(5)[0], 1)
        for layer in rounds.drafter._layers:
            for array in layer.kv.arrays.values():
                array[:, :, layer.kv.length :] = poison
        found.append(rounds.propose(5))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_stops_after_a_draft_that_is_not_confident(made: Callable[[str], Made]) -> None:
    model = mtp_reference.load(made(DEEPSEEK).checkpoint)
    rounds = Rounds(made(DEEPSEEK).drafter(3), model, prompt_of(6))
    rounds.read_prompt(6)
    assert len(rounds.drafter.propose(5, Sampler(confidence_threshold=1.0)).tokens) == 1
    rounds.drafter.truncate(len(rounds.tokens))
    assert len(rounds.drafter.propose(5, Sampler()).tokens) == 5


def test_sampled_drafts_carry_their_distribution(made: Callable[[str], Made]) -> None:
    model = mtp_reference.load(made(DEEPSEEK).checkpoint)
    mtp = mtp_reference.load_mtp(model)
    rounds = Rounds(made(DEEPSEEK).drafter(3), model, prompt_of(6))
    rounds.read_prompt(6)
    proposal = rounds.drafter.propose(3, Sampler(do_sample=True, seed=1))
    assert proposal.q is not None and len(proposal.q) == len(proposal.tokens) == 3
    logits = mtp_reference.naive_drafts(model, mtp, rounds.tokens, 1)[1][0]
    want = torch.softmax(torch.from_numpy(logits).double(), 0).numpy()
    np.testing.assert_allclose(proposal.q[0].dense(tiny_models.VOCAB), want, atol=1e-5)
    assert all(q.of(token) > 0 for q, token in zip(proposal.q, proposal.tokens, strict=True))


def test_truncating_below_what_is_kept_is_refused(made: Callable[[str], Made]) -> None:
    model = mtp_reference.load(made(DEEPSEEK).checkpoint)
    drafter = made(DEEPSEEK).drafter(3)
    rounds = Rounds(drafter, model, prompt_of(9))
    rounds.read_prompt(9)
    rounds.accept(rounds.propose(3)[0], 3)
    with pytest.raises(ValueError, match="cannot truncate to 4: row 8 is the first kept"):
        drafter.truncate(4)


# The folder, through the public API.


@pytest.mark.parametrize("name", EXPORTED)
def test_generates_what_transformers_does(made: Callable[[str], Made], name: str) -> None:
    """As ``generate(use_mtp=True)``: the tokens, and every proposal; other lengths too."""
    model = mtp_reference.load(made(name).checkpoint)
    layers = model.config.num_mtp_layers
    # transformers' own loop fails on prompts of fewer tokens than layers.
    for prompt in (prompt_of(11), prompt_of(3)):
        tokens, proposals = mtp_reference.generate(model, prompt, NEW)
        with specrun.load(made(name).folder, threads=1) as engine:
            rounds: list[specrun.Round] = []
            common: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": [], "strict": True}
            result = engine.generate(prompt, method="mtp", on_round=rounds.append, **common)
            assert result.options.num_assistant_tokens == layers
            assert result.tokens == tokens
            # Ours stops where no more tokens are asked for; transformers drafts on.
            for ours, theirs in zip(rounds, proposals, strict=True):
                assert list(ours.proposal) == theirs[: len(ours.proposal)]
            assert sum(len(r.proposal) == layers for r in rounds) >= len(rounds) - layers
            for count in (1, layers + 2):
                longer = engine.generate(prompt, method="mtp", num_assistant_tokens=count, **common)
                assert longer.tokens == tokens


def test_parity_report_covers_every_layer(made: Callable[[str], Made]) -> None:
    report = made(DEEPSEEK).manifest.parity
    assert report is not None and report.worst_error <= LOGITS_ERROR
    compared = {case.engine for case in report.cases if case.tensor == "mtp_logits"}
    assert compared == {"mtp.0", "mtp.1", "mtp.2"}


@pytest.mark.parametrize("name", EXPORTED)
def test_contract_in_the_manifest(made: Callable[[str], Made], name: str) -> None:
    """What the reference code says of the family; another place or order is refused."""
    manifest = made(name).manifest
    drafter = manifest.drafters["mtp"]
    for layer, engine in enumerate(drafter.engines):
        spec = manifest.engines[engine].mtp_layer
        assert spec is not None and spec.layer == layer
        assert spec.concat_order == ("embedding", "hidden")
        assert spec.hidden == ("previous_layer" if layer else "target_after_norm")
        assert spec.reapply is (layer == len(drafter.engines) - 1)
    turned = dataclasses.replace(drafter, engines=drafter.engines[::-1])
    with pytest.raises(DecodeError, match=r"mtp_layer: is not its place"):
        dataclasses.replace(manifest, drafters={"mtp": turned})


@pytest.mark.parametrize("name", EXPORTED)
def test_shared_tensors_are_stored_once(made: Callable[[str], Made], name: str) -> None:
    places = {
        engine: {
            tensor.name: (tensor.offset or 0, tensor.length or 0)
            for tensor in (value.const_value for value in initializers(made(name), engine))
            if isinstance(tensor, ir.ExternalTensor)
        }
        for engine in made(name).manifest.engines
    }
    for engine, found in places.items():
        for shared in ("model.embed_tokens.weight", "lm_head.weight"):
            assert found[shared] == places["target"][shared], engine
    ends = [start + size for found in places.values() for start, size in found.values()]
    assert max(ends) == (made(name).folder / "weights.data").stat().st_size


def initializers(made: Made, engine: str) -> Iterator[ir.Value]:
    yield from ir.load(made.folder / f"{engine}.onnx").graph.initializers.values()


def test_latent_kv_is_one_row_per_token(made: Callable[[str], Made]) -> None:
    """24 of the latent and 8 of the rotated key, in two halves; kv_b_proj is stored as it is."""
    manifest = made(DEEPSEEK).manifest
    for name in manifest.engines:
        assert {(kv.heads, kv.head_size) for kv in manifest.engines[name].kv} == {(1, 16)}
    assert manifest.engines["target"].kv_bytes_per_token == 3 * 32 * 4
    names = [value.name for value in initializers(made(DEEPSEEK), "target")]
    assert names.count("model.layers.0.self_attn.kv_b_proj.weight") == 1


# Weights.


def test_layers_come_with_or_without_copies_of_shared_tensors(tmp_path: Path) -> None:
    """The same tensors either way, and those of the target are not touched (C49)."""
    found = []
    for shared in (False, True):
        path = tiny_models.save("deepseek-mtp1", tmp_path / str(shared))
        tensors = tiny_models.mtp_tensors(tiny_models.build("deepseek-mtp1"), shared=shared)
        tiny_models.add_mtp_layers(path, tensors)
        source = resolve(path)
        source.weights.check_complete(source.expected_shapes())
        weights = mtp_weights.read(source)
        assert weights is not None
        found.append({name: weights.read(name) for name in weights.names()})
        assert not any("shared_head" in name or "embed" in name for name in weights.names())
    assert found[0].keys() == found[1].keys()
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], err_msg=name)


@pytest.mark.parametrize("name", tiny_models.MTP_LAYERS)
def test_weights_are_those_that_transformers_loads(tmp_path: Path, name: str) -> None:
    path = tiny_models.save(name, tmp_path)
    weights = mtp_weights.read(resolve(path))
    assert weights is not None
    want = mtp_reference.load_mtp(mtp_reference.load(path)).state_dict()
    own = {key for key in want if key.startswith("layers.")}
    assert set(weights.names()) == own
    for key in own:
        np.testing.assert_array_equal(weights.read(key), want[key].numpy(), err_msg=key)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    path = tiny_models.save("glm4-moe-mtp1", tmp_path)
    change(path, drop="model.layers.3.enorm.weight")
    with pytest.raises(WeightsError, match=r"MTP layers of glm4.*lacks layers\.0\.enorm\.weight"):
        mtp_weights.read(resolve(path))
    change(path, drop="model.layers.3.mlp.experts.5.up_proj.weight")
    with pytest.raises(WeightsError, match="gate_up_proj: experts are missing"):
        mtp_weights.read(resolve(path))


def test_a_checkpoint_without_mtp_layers(tmp_path: Path) -> None:
    """Its config says that there are some, as converted checkpoints do."""
    path = tiny_models.save("glm4-moe-mtp1", tmp_path)
    change(path, drop="model.layers.3.")
    assert mtp_weights.read(resolve(path)) is None
    with pytest.raises(SourceError, match="its checkpoint has no MTP layers"):
        exporter.export(resolve(path), None, tmp_path / "out", ExportOptions(mtp_layers=True))


def change(path: Path, *, drop: str) -> None:
    """Take the tensors that start so out of a checkpoint."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    kept = {name: t for name, t in load_file(file).items() if not name.startswith(drop)}
    save_file(kept, file, metadata={"format": "pt"})


@torch.no_grad()
def test_layers_too_large_for_memory_are_streamed(tmp_path: Path) -> None:
    """What the export compares with is the same, read module by module."""
    path = tiny_models.save("glm4-moe-mtp1", tmp_path)
    found = mtp_layers.part(resolve(path), None)
    assert found is not None
    model = mtp_reference.load(path)
    tokens = np.array(prompt_of(9))
    out = model(torch.from_numpy(tokens)[None], use_cache=False, output_hidden_states=True)
    scopes: list[str] = []

    def run(memory: int) -> TargetRun:
        note = lambda _, scope: scopes.append(scope)  # noqa: E731
        return TargetRun(model, out, tokens, (1, 8), torch.float32, memory, note)

    runs = [found.reference(run(memory)) for memory in (0, 1 << 40)]
    for streamed, whole in zip(*runs, strict=True):
        assert len(streamed.steps) == 2
        for got, want in zip(streamed.steps, whole.steps, strict=True):
            np.testing.assert_array_equal(got.tokens, want.tokens)
            np.testing.assert_allclose(got.logits, want.logits, atol=1e-5)
    assert scopes == [STREAMED, WHOLE]


# Latent attention by itself.


def test_latent_attention_of_a_batch(tmp_path: Path) -> None:
    """Blocks of two sequences of different lengths; huge values behind each length."""
    rng = np.random.default_rng(0)
    batch, rows, heads, half, lengths, capacity = 2, 3, 5, 4, [2, 6], 12
    query = rng.standard_normal((batch, rows, heads, 2 * half)).astype("f4")
    new = rng.standard_normal((batch, rows, 2 * half)).astype("f4")
    buffers = rng.standard_normal((2, batch, 1, capacity, half)).astype("f4")
    for sequence, length in enumerate(lengths):
        buffers[:, sequence, :, length:] = 1e4
    session = latent_session(tmp_path, heads, half)
    total = max(lengths) + rows
    feeds = {
        "query": query,
        "key": new[:, :, :half],
        "value": new[:, :, half:],
        past(0, Part.KEY): buffers[0],
        past(0, Part.VALUE): buffers[1],
        "last": np.array([n + rows - 1 for n in lengths], dtype=np.int32),
        "total": np.array([total], dtype=np.int32),
    }
    out, key, value = session.run(None, feeds)
    for sequence, length in enumerate(lengths):
        stored = np.concatenate([buffers[0, sequence, 0], buffers[1, sequence, 0]], axis=1)
        stored[length : length + rows] = new[sequence]
        both = np.concatenate([key[sequence, 0], value[sequence, 0]], axis=1)
        np.testing.assert_array_equal(both, stored)
        for row in range(rows):
            seen = stored[: length + row + 1]
            scores = 0.3 * query[sequence, row] @ seen.T
            weights = np.exp(scores - scores.max(1, keepdims=True))
            want = weights / weights.sum(1, keepdims=True) @ seen
            np.testing.assert_allclose(out[sequence, row], want, atol=1e-5)


def latent_session(folder: Path, heads: int, half: int) -> Any:
    """One latent attention, traced and written as engines are."""
    import onnxruntime
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Attention(torch.nn.Module):
        def forward(
            self, query: Any, key: Any, value: Any, last: Any, total: Any, past: Any
        ) -> Any:
            return ops.latent_append(
                query.transpose(1, 2), key[:, None], value[:, None], tuple(past), (last, total),
                scale=0.3,
            )  # fmt: skip

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch, rows = torch.export.Dim("batch", min=1), torch.export.Dim("rows", min=1)
    layer = contract.KvLayer(0, 1, half, None)
    kv = trace.kv_inputs((layer,), mode, "fp32", batch=batch, max_context=64)
    with mode:
        args = (
            torch.zeros(2, 3, heads, 2 * half),
            *(torch.zeros(2, 3, half) for _ in range(2)),
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            kv.examples,
        )
    blocks = [{0: batch, 1: rows}] * 3
    model = trace.export(
        Attention(),
        args,
        (*blocks, {0: batch}, None, kv.shapes),
        mode=mode,
        input_names=["query", "key", "value", "last", "total", *kv.names],
        output_names=["out", "present.key", "present.value"],
    )
    passes.simplify(model)
    model.ir_version = ops.IR_VERSION
    assert ops.OWN_DOMAIN not in model.opset_imports
    ir.save(model, folder / "latent.onnx")
    return onnxruntime.InferenceSession(folder / "latent.onnx")


# Families.


def test_families_with_mtp_layers_are_targets() -> None:
    assert set(families.MTP_LAYERS) <= set(families.TARGETS)
    built = {tiny_models.build(name).config.model_type for name in tiny_models.MTP_LAYERS}
    assert built == set(families.MTP_LAYERS)


@slow
@pytest.mark.parametrize("name", ["deepseek-mtp1", "glm4-moe-mtp1", MELLUM])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_family_exports(tmp_path: Path, name: str, precision: Any) -> None:
    """Other rotary forms and no query rank; tied head; a window in the MTP layer."""
    source = resolve(tiny_models.save(name, tmp_path))
    options = ExportOptions(precision=precision, num_draft=4)
    made = exporter.export(source, None, tmp_path / "engines", options)
    assert made.parity is not None and "mtp.0" in made.engines
    with specrun.load(tmp_path / "engines", threads=1) as engine:
        common: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": [], "strict": True}
        plain = engine.generate(prompt_of(9), method="plain", **common)
        for count in (1, 3):
            drafted = engine.generate(
                prompt_of(9), method="mtp", num_assistant_tokens=count, **common
            )
            assert drafted.tokens == plain.tokens
