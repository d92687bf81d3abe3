"""Engine folders in integers: tiny models through the whole exporter, opened and run; what the
manifest says of them, what they cost in bytes and in agreement with fp32, and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exported
import numpy as np
import onnx_ir as ir
import pytest
import tiny_models
import tokenizers
import torch
import transformers
from click.testing import CliRunner
from exported import Exported, Pair, forward, prompt_of, reference
from numpy.typing import NDArray

from specexport import encoders, exporter, parity, quality, texts
from specexport.cli import main
from specexport.datafile import DATA_FILE, LARGE_ALIGNMENT, LARGE_TENSOR, SMALL_ALIGNMENT
from specexport.errors import ParityError
from specexport.numbers import relative_error
from specexport.options import ExportOptions
from specexport.sources import Source, resolve
from specgraphs.formats import ACCURACY_LEVEL
from specrun import manifest as manifests
from specrun.contract import TARGET_ENGINE
from specrun.manifest import EngineSpec, Manifest, Precision

pytestmark = pytest.mark.slow

ExportedPair = Callable[..., Exported]
LLAMA: Pair = ("llama", None)
QWEN: Pair = ("qwen3", None)
GEMMA: Pair = ("gemma3", None)
SHARING: Pair = ("gemma4-e2b", "assistant-plain")
CENTROID: Pair = ("gemma4-e2b", "assistant-centroid")
GLM: Pair = ("glm4-moe-mtp1", None)
LATENT: Pair = ("deepseek-mtp1", None)

# Every family once, and every precision with what is special about it: a tied head (llama, gemma3,
# glm4), one that is not (qwen3), per-layer tables and a second model (gemma4), experts and MTP
# layers (glm4), latent attention (deepseek).
FOLDERS: tuple[tuple[Pair, Precision], ...] = (
    (LLAMA, "int8"),
    (LLAMA, "int4"),
    (LLAMA, "w8a8"),
    (QWEN, "int4"),
    (GEMMA, "w8a8"),
    (SHARING, "w8a8"),
    (CENTROID, "int4"),
    (GLM, "int8"),
    (LATENT, "w8a8"),
)
EVERY = pytest.mark.parametrize(
    ("pair", "precision"),
    [pytest.param(p, q, id=f"{exported.name_of(p)}-{q}") for p, q in FOLDERS],
)
ONLY_LLAMA = pytest.mark.parametrize("precision", ["int8", "int4", "w8a8"])

# On random weights, where the best two logits are closer than in trained models: share of rows
# with the same most probable token, and error of the logits (root mean square, relative).
LEAST_AGREEMENT = {"int8": 0.9, "w8a8": 0.7, "int4": 0.2}
MOST_ERROR = {"int8": 0.04, "w8a8": 0.09, "int4": 0.45}
GEMMA_FACTOR = 3  # norms behind the layers too, so that small errors do not stay small
BITS = {"int8": 8, "w8a8": 8, "int4": 4}


def externals(path: Path) -> dict[str, ir.ExternalTensor]:
    """Initializers of a written engine that stand in the data file."""
    values = ir.load(path).graph.initializers
    tensors = {name: value.const_value for name, value in values.items()}
    return {name: t for name, t in tensors.items() if isinstance(t, ir.ExternalTensor)}


def operators(made: Exported, engine: str = TARGET_ENGINE) -> list[ir.Node]:
    path = made.folder / made.manifest.engines[engine].file
    return list(ir.load(path).graph.all_nodes())


def stored(made: Exported, engine: str = TARGET_ENGINE) -> manifests.WeightFormats:
    found = made.manifest.engines[engine].weights
    assert found is not None
    return found


# What every folder has.


@EVERY
def test_every_method_generates(
    exported_pair: ExportedPair, pair: Pair, precision: Precision
) -> None:
    """The folder opens, and every method of it generates what plain decoding does, unless two
    logits were closer than other widths of a block are apart."""
    made = exported_pair(pair, precision)
    assert made.manifest.parity is not None
    noise = made.manifest.parity.width_noise
    methods = [*made.manifest.drafters, "prompt-lookup"]
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_ids": [], "strict": True}
    with made.open() as engine:
        for length in (3, 20):
            prompt = prompt_of(length)
            plain = engine.generate(prompt, method="plain", **options).tokens
            assert len(plain) == 24
            for method in methods:
                got = engine.generate(prompt, method=method, **options)
                assert got.stats.method == method
                same_up_to(made, prompt, plain, got.tokens, noise)


def same_up_to(
    made: Exported, prompt: list[int], plain: list[int], got: list[int], noise: float
) -> None:
    """A difference must be of two logits that are nearly the same."""
    pairs = zip(plain, got, strict=True)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        return
    rows = made.open_target().prefill(np.array([prompt + plain[:index]]), want_logits=True)
    assert rows.logits is not None
    row = rows.logits[0, -1]
    gap = abs(float(row[plain[index]] - row[got[index]]))
    assert gap <= max(4 * noise, 0.02 * float(np.abs(row).max())), (index, gap)


@EVERY
def test_the_quality_report(exported_pair: ExportedPair, pair: Pair, precision: Precision) -> None:
    report = exported_pair(pair, precision).manifest.quality
    assert report is not None
    assert report.text == "evaluation.txt" and "whole model" in report.scope
    assert report.tokens == tiny_models.CONTEXT - 1
    # A random model knows nothing: about as many choices as there are tokens.
    assert 200 < report.reference_perplexity < 1000
    assert 0.5 < report.perplexity / report.reference_perplexity < 1.5
    assert report.loss == pytest.approx(report.perplexity / report.reference_perplexity - 1)
    assert LEAST_AGREEMENT[precision] <= report.argmax_agreement <= 1


@EVERY
def test_logits_agree_with_fp32(
    exported_pair: ExportedPair, pair: Pair, precision: Precision
) -> None:
    """C67: 64 tokens, against the weights as they were; nothing is zero or infinite."""
    made = exported_pair(pair, precision)
    tokens = prompt_of(64)
    want = forward(reference(pair[0]), tokens)[0]
    got = made.open_target().verify(np.array([tokens]), want_logits=True)
    assert got.logits is not None
    logits = got.logits[0]
    assert np.isfinite(logits).all()
    assert (np.abs(logits).max(axis=1) > 0.1 * np.abs(want).max(axis=1)).all()
    error = float(np.sqrt(np.square(logits - want).mean() / np.square(want).mean()))
    agreed = float((got.argmax[0] == want.argmax(axis=1)).mean())
    gemma = pair[0].startswith("gemma")
    assert error <= MOST_ERROR[precision] * (GEMMA_FACTOR if gemma else 1), (error, agreed)
    assert agreed >= LEAST_AGREEMENT[precision], (error, agreed)


@EVERY
def test_what_the_manifest_says(
    exported_pair: ExportedPair, pair: Pair, precision: Precision
) -> None:
    """Block size, accuracy level and the precisions of head and tables; the graphs have them."""
    made = exported_pair(pair, precision)
    said = stored(made)
    careful = "int8" if precision == "int4" else precision
    assert (said.head, said.embedding) == (careful, careful)
    assert (said.block_size, said.accuracy_level) == (32, ACCURACY_LEVEL)
    assert said.smoothing == {} or precision == "w8a8"
    assert said.two_terms == said.rotated == () or precision == "w8a8"
    assert all(0 < strength < 1 for strength in said.smoothing.values())
    assert all(0 <= error < 0.5 for error in said.errors.values())
    assert set(said.smoothing) <= set(said.errors) and set(said.two_terms) <= set(said.errors)
    nodes = operators(made)
    kinds = {node.op_type for node in nodes}
    if precision == "w8a8":
        assert "MatMulIntegerToFloat" in kinds
        assert "lm_head.weight" in said.two_terms  # of the logits
        assert set(said.rotated) <= set(said.errors) - set(said.two_terms)
    else:
        blocks = [node.attributes for node in nodes if node.op_type == "MatMulNBits"]
        assert {found["bits"].as_int() for found in blocks} <= {BITS[precision], 8}
        assert BITS[precision] in {found["bits"].as_int() for found in blocks}
        assert {found["block_size"].as_int() for found in blocks} == {32}
        assert {found["accuracy_level"].as_int() for found in blocks} == {ACCURACY_LEVEL}
    names = {value.name for node in nodes for value in node.inputs if value is not None}
    assert set(said.kept_float) <= names


PER_LAYER = {f"per_layer_{part}" for part in ("model_projection", "input_gate", "projection")}


def test_what_is_kept_float(exported_pair: ExportedPair) -> None:
    """Per-layer projections of Gemma 4, routers of experts, latent up-projections."""
    parts = {
        (SHARING, "w8a8"): PER_LAYER,
        (GLM, "int8"): {"gate"},
        (LATENT, "w8a8"): {"gate", "kv_b_proj"},
        (LLAMA, "w8a8"): set(),
    }  # fmt: skip
    for (pair, precision), wanted in parts.items():
        kept = stored(exported_pair(pair, precision)).kept_float
        assert {name.split(".")[-2] for name in kept} == wanted, pair


@EVERY
def test_bytes_of_a_step(exported_pair: ExportedPair, pair: Pair, precision: Precision) -> None:
    """Of every engine, far less than in fp32, and no more than the data file."""
    made, full = exported_pair(pair, precision), exported_pair(pair)
    size = (made.folder / DATA_FILE).stat().st_size
    for name, engine in made.manifest.engines.items():
        before = full.manifest.engines[name].step_bytes
        assert 0 < engine.step_bytes < 1.1 * size
        # Experts, norms and what is kept float is a large part of a tiny model.
        assert engine.step_bytes < (0.95 if pair in (GLM, LATENT) else 0.6) * before, name
    assert size < (full.folder / DATA_FILE).stat().st_size


# C57: nothing is stored twice.


@EVERY
def test_the_data_file_is_its_ranges(
    exported_pair: ExportedPair, pair: Pair, precision: Precision
) -> None:
    """Ranges of all engines together are the file, up to alignment, and no two hold the same."""
    made = exported_pair(pair, precision)
    files = [engine.file for engine in made.manifest.engines.values()]
    tensors = [tensor for file in files for tensor in externals(made.folder / file).values()]
    ranges = sorted({(tensor.offset or 0, tensor.length or 0) for tensor in tensors})
    data = (made.folder / DATA_FILE).read_bytes()
    end, held = 0, 0
    contents: dict[str, tuple[int, int]] = {}
    for offset, length in ranges:
        align = LARGE_ALIGNMENT if length >= LARGE_TENSOR else SMALL_ALIGNMENT
        assert offset == -(-end // align) * align
        assert not any(data[end:offset])
        end, held = offset + length, held + length
        if length >= 1024:  # small ones may be the same by chance, as zeros are
            digest = hashlib.sha256(data[offset:end]).hexdigest()
            assert digest not in contents, (contents[digest], (offset, length))
            contents[digest] = (offset, length)
    assert end == len(data)
    assert len(data) <= 1.05 * held


@pytest.mark.parametrize("precision", ["int8", "int4", "w8a8"])
def test_a_tied_head_is_stored_once(precision: Precision, tmp_path: Path) -> None:
    """With a large vocabulary the table would show in the size."""
    config = transformers.LlamaConfig(
        **tiny_models.BASE | {"vocab_size": 4096}, num_hidden_layers=1, tie_word_embeddings=True
    )
    model: Any = tiny_models.seeded(lambda: transformers.LlamaForCausalLM(config), "tied", 0.06)
    model.tie_weights()
    source = save_model(model, tmp_path / "ck")
    options = ExportOptions(precision=precision, check=False)
    exporter.export(source, None, tmp_path / "out", options)
    table = 4096 * 64
    others = sum(p.numel() for p in model.parameters() if p.dim() > 1) - table
    # int4 has its table in int8; a scale of 4 bytes for 32 values, or for a row.
    per_value = {"int8": 1 + 4 / 32, "int4": 1 + 4 / 32, "w8a8": 1 + 4 / 64}[precision]
    rest = others * (1 + 4 / 32)
    size = (tmp_path / "out" / DATA_FILE).stat().st_size
    tables = 2 * (CONTEXT_ROWS * 8) * 4  # cosines and sines
    assert size <= 1.05 * (table * per_value + rest + tables)


CONTEXT_ROWS = tiny_models.CONTEXT + 1024


def save_model(model: Any, path: Path) -> Source:
    """A checkpoint of ``model`` with the tiny tokenizer."""
    model.save_pretrained(path)
    tiny_models.tokenizer().save_pretrained(path)
    return resolve(path)


# Precisions of parts.


def test_drafters_of_w8a8_are_int8(exported_pair: ExportedPair) -> None:
    """They step row by row, which blocks do best; int4 drafters are int4."""
    for pair, precision, engine, wanted in (
        (SHARING, "w8a8", "mtp_drafter", "int8"),
        (CENTROID, "int4", "mtp_drafter", "int4"),
        (LATENT, "w8a8", "mtp.0", "int8"),
        (GLM, "int8", "mtp.0", "int8"),
    ):
        made = exported_pair(pair, precision)
        assert made.manifest.engines[engine].precision == wanted
        bits = {
            node.attributes["bits"].as_int()
            for node in operators(made, engine)
            if node.op_type == "MatMulNBits"
        }
        assert BITS[wanted] in bits


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Layers in int8, everything else said to be otherwise."""
    options = ExportOptions(
        precision="int8",
        drafter_precision="fp32",
        head_precision="w8a8",
        embedding_precision="fp32",
        block_size=16,
        num_draft=4,
    )
    return exported.make(SHARING, tmp_path_factory.mktemp("mixed"), options=options)


def test_every_part_has_its_own(mixed: Exported) -> None:
    target, drafter = (mixed.manifest.engines[name] for name in ("target", "mtp_drafter"))
    assert (target.precision, drafter.precision) == ("int8", "fp32")
    assert drafter.weights is None
    said = stored(mixed)
    assert (said.head, said.embedding, said.block_size) == ("w8a8", "fp32", 16)
    assert said.two_terms == ("lm_head.weight",)
    nodes = operators(mixed)
    kinds = [node.op_type for node in nodes]
    assert kinds.count("MatMulIntegerToFloat") == 1
    sizes = {n.attributes["block_size"].as_int() for n in nodes if n.op_type == "MatMulNBits"}
    assert sizes == {16}
    assert "GatherBlockQuantized" not in kinds
    integers = {"MatMulNBits", "MatMulIntegerToFloat", "GatherBlockQuantized"}
    assert not integers & {node.op_type for node in operators(mixed, "mtp_drafter")}
    with mixed.open() as engine:
        for method in ("plain", "mtp-drafter"):
            assert len(engine.generate([1, 2, 3], method=method, max_new_tokens=5).tokens) <= 5


def test_a_draft_model_is_described_by_itself(tmp_path: Path) -> None:
    """Its layers have the names of the target's; its formats are its own."""
    paths = [tiny_models.save("llama", tmp_path / part) for part in ("target", "draft")]
    target, draft = (resolve(path) for path in paths)
    options = ExportOptions(precision="w8a8", drafter_precision="int4", check=False)
    made = exporter.export(target, [draft], tmp_path / "engines", options)
    described = made.engines["draft"].weights
    assert described is not None
    assert (described.two_terms, described.smoothing, described.errors) == ((), {}, {})
    assert (described.head, described.embedding) == ("int8", "int8")
    assert described.kept_float == ()


# fp16 and fp32 are as they were.


def test_floats_have_no_formats(exported_pair: ExportedPair) -> None:
    for precision in ("fp32", "fp16"):
        made = exported_pair(LLAMA, precision).manifest
        assert made.engines[TARGET_ENGINE].weights is None
        assert (made.quality is None) is (precision == "fp32")
    half = exported_pair(LLAMA, "fp16").manifest
    assert half.quality is not None
    assert half.quality.argmax_agreement > 0.95
    assert abs(half.quality.loss) < 0.01
    full = exported_pair(LLAMA).manifest.engines[TARGET_ENGINE].step_bytes
    assert 0.45 * full < half.engines[TARGET_ENGINE].step_bytes < 0.55 * full


# Block sizes.


@pytest.mark.parametrize("size", [16, 128])
def test_other_block_sizes(size: int, tmp_path: Path, exported_pair: ExportedPair) -> None:
    """Smaller blocks are nearer; larger ones than a row are one block."""
    options = ExportOptions(precision="int4", block_size=size)
    made = exported.make(LLAMA, tmp_path, options=options)
    assert stored(made).block_size == size
    tokens = np.array([prompt_of(64)])
    want = forward(reference("llama"), tokens[0].tolist())[0]

    def error(folder: Exported) -> float:
        logits = folder.open_target().verify(tokens, want_logits=True).logits
        assert logits is not None
        return float(np.square(logits[0] - want).mean())

    usual = error(exported_pair(LLAMA, "int4"))
    assert (error(made) < usual) is (size < 32)


# check.


def call(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("pair", "precision"), [(SHARING, "w8a8"), (GLM, "int8")], ids=["w8a8", "int8"]
)
def test_check(exported_pair: ExportedPair, pair: Pair, precision: Precision) -> None:
    """With the checkpoint and without."""
    made = exported_pair(pair, precision)
    alone = call("check", made.folder)
    assert alone.exit_code == 0, alone.output
    assert "sound: blocks and single rows differ by" in alone.stdout
    drafter = () if made.drafter_path is None else ("--drafter", made.drafter_path)
    result = call("check", made.folder, made.target_path, *drafter, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parity"]["worst_error"] < parity.TOLERANCE[precision]


def scales_of(made: Exported, part: str) -> ir.ExternalTensor:
    """The scales of the layers ``part``."""
    found = externals(made.folder / made.spec.file)
    return next(t for name, t in found.items() if part in name and ".scales" in name)


def spoiled(made: Exported, folder: Path, factor: float, *, known: bool) -> Path:
    """A copy with the scales of one layer multiplied; ``known``: the manifest agrees with it."""
    shutil.copytree(made.folder, folder)
    tensor = scales_of(made, "layers.1.mlp.down_proj")
    assert tensor.offset is not None and tensor.length is not None
    path = folder / DATA_FILE
    scales = np.memmap(path, np.float32, "r+", tensor.offset, tensor.length // 4)
    scales *= factor
    scales.flush()
    if known:
        text = (folder / manifests.MANIFEST).read_text(encoding="utf-8")
        old = next(entry.sha256 for entry in made.manifest.files if entry.path == DATA_FILE)
        changed = text.replace(old, manifests.sha256_of(path))
        (folder / manifests.MANIFEST).write_text(changed, encoding="utf-8")
    return folder


@ONLY_LLAMA
def test_a_wrong_scale_is_found(
    exported_pair: ExportedPair, precision: Precision, tmp_path: Path
) -> None:
    """C64: by its bytes, and where the manifest agrees with them by its results."""
    made = exported_pair(LLAMA, precision)
    one = call("check", spoiled(made, tmp_path / "one", 1.001, known=False))
    assert one.exit_code == 1
    assert "weights.data: changed since the export" in one.stderr
    two = call("check", spoiled(made, tmp_path / "two", 20.0, known=True), made.target_path)
    assert two.exit_code == 1
    assert "differs from transformers by" in two.stderr
    assert "Error: target." in two.stderr and not two.stdout


@ONLY_LLAMA
def test_a_wrong_scale_stops_an_export(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written wrongly does not appear."""
    kind = "columns" if precision == "w8a8" else "blocks"
    right = getattr(encoders, kind)

    def wrong(weight: NDArray[Any], *arguments: Any) -> Any:
        parts = right(weight, *arguments)
        return parts._replace(scales=parts.scales * np.float32(40 if len(weight) == 64 else 1))

    source = resolve(tiny_models.save("llama", tmp_path))
    monkeypatch.setattr(f"specexport.made.encoders.{kind}", wrong)
    with pytest.raises(ParityError):
        exporter.export(source, None, tmp_path / "out", ExportOptions(precision=precision))
    assert not (tmp_path / "out").exists()


# The command.


def test_the_command(tmp_path: Path) -> None:
    """Every option of precision arrives; what was lost is said on stderr."""
    checkpoint = tiny_models.save("llama", tmp_path)
    out = tmp_path / "engines"
    given = ("--precision", "int8", "--head-precision", "fp32", "--embedding-precision", "int4")
    result = call(checkpoint, "--out", out, *given, "--block-size", 64, "--json")
    assert result.exit_code == 0, result.output
    made = manifests.read(out)
    engine = made.engines[TARGET_ENGINE]
    assert engine.precision == "int8" and engine.weights is not None
    assert (engine.weights.head, engine.weights.embedding) == ("fp32", "int4")
    assert engine.weights.block_size == 64
    assert made.quality is not None
    assert json.loads(result.stdout)["quality"] == dataclasses.asdict(made.quality)


def test_the_command_says_what_was_lost(exported_pair: ExportedPair) -> None:
    made = exported_pair(LLAMA, "w8a8").manifest.quality
    assert made is not None
    from specexport.cli import _quality

    said = _quality(made)
    assert f"{made.tokens} tokens" in said and f"{made.perplexity:.4g}" in said
    assert f"{made.argmax_agreement:.1%}" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--block-size", "8"), "Error: --block-size: must be one of 16, 32, 64, 128, 256, got 8"),
        (("--block-size", "48"), "got 48"),
        (
            ("--precision", "fp16", "--head-precision", "int8"),
            "Error: --head-precision: int8 does not go with precision fp16",
        ),
        (
            ("--precision", "int8", "--drafter-precision", "fp16"),
            "Error: --drafter-precision: fp16 does not go with precision int8",
        ),
        (("--embedding-precision", "int3"), "'int3' is not one of"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    result = call(".", "-o", tmp_path / "out", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert ("hint: " in result.stderr) is result.stderr.startswith("Error: --")


# Calibration and quality.


def words(path: Path, words: list[str]) -> Path:
    """Give a checkpoint a tokenizer that knows ``words`` only, and nothing else of a text."""
    for file in path.glob("tokenizer*"):
        file.unlink()
    vocabulary = {word: index for index, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=words[0]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(path)
    return path


@pytest.mark.parametrize("precision", ["w8a8", "int4"])
def test_a_tokenizer_that_gives_few_tokens(precision: Precision, tmp_path: Path) -> None:
    """All of its ids are one or two tokens; the export is as good as any other."""
    path = words(tiny_models.save("llama", tmp_path), ["<unk>", "the"])
    source = resolve(path)
    assert len(set(texts.tokens(source, texts.CALIBRATION))) <= 2
    made = exporter.export(source, None, tmp_path / "out", ExportOptions(precision=precision))
    assert made.quality is not None and np.isfinite(made.quality.perplexity)


@pytest.mark.parametrize("count", [2, 3])
def test_texts_of_very_few_tokens(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve(tiny_models.save("llama", tmp_path))
    monkeypatch.setattr(
        texts, "tokens", lambda *_: np.random.default_rng(0).integers(0, 256, count).tolist()
    )
    made = exporter.export(source, None, tmp_path / "out", ExportOptions(precision="w8a8"))
    assert made.quality is not None and made.quality.tokens == count - 1


def test_texts_are_cut(tmp_path: Path) -> None:
    """At the model's positions; ids that its table has not are left out."""
    source = resolve(tiny_models.save("llama", tmp_path))
    for text in (texts.CALIBRATION, texts.EVALUATION):
        found = texts.tokens(source, text)
        assert len(found) == tiny_models.CONTEXT
        assert texts.tokens(source, text, 10) == found[:10]
    source.config.vocab_size = 100
    assert max(texts.tokens(source, texts.EVALUATION)) < 100


def test_a_broken_target_is_refused(exported_pair: ExportedPair) -> None:
    """A model that predicts something must still do so, and nothing may be infinite."""
    made = exported_pair(LLAMA, "w8a8")
    ids = np.arange(12, dtype=np.int64)
    wrong = np.full(11, 383)
    trained = quality.Judged(ids, wrong, loss=float(np.log(5)), scope="whole model")
    with pytest.raises(
        ParityError, match=r"perplexity is .* against 5 in fp32, and 0% of"
    ) as error:
        quality.measure(made.folder, made.manifest, trained, lambda *_: None)
    assert "finer --precision" in (error.value.hint or "")
    random = quality.Judged(ids, wrong, loss=float(np.log(380)), scope="whole model")
    report = quality.measure(made.folder, made.manifest, random, lambda *_: None)
    assert report.argmax_agreement == 0


def test_transformers_on_the_decoded_weights(exported_pair: ExportedPair) -> None:
    """int8 blocks: the engine is transformers with the decoded weights, up to activations."""
    made = exported_pair(LLAMA, "int8")
    model = tiny_models.build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parts = encoders.blocks(parameter.numpy(), 8, 32)
                decoded = encoders.decoded_blocks(parts, 8, parameter.shape[1])
                parameter.copy_(torch.from_numpy(decoded))
    tokens = prompt_of(40)
    want = forward(model, tokens)[0]
    got = made.open_target().verify(np.array([tokens]), want_logits=True).logits
    assert got is not None
    exact = forward(reference("llama"), tokens)[0]
    assert relative_error(got[0], want) < 0.05
    assert relative_error(got[0], exact) < 0.08


def test_engines_and_manifests_are_typed() -> None:
    """What other code reads: fields by name."""
    names = {field.name for field in dataclasses.fields(EngineSpec)}
    assert {"step_bytes", "weights", "precision"} <= names
    assert "quality" in {field.name for field in dataclasses.fields(Manifest)}
