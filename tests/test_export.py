"""What an export leaves on the disk, when it refuses, and that it leaves nothing else behind."""

from __future__ import annotations

import ast
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import namedtuple
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exported
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tiny_models
import torch
import transformers
from click.testing import CliRunner
from exported import Exported, Pair, forward, pair_params, prompt_of, reference
from huggingface_hub import ModelCard
from numpy.typing import NDArray

import specrun
from specexport import card, cli, datafile, engines, exporter, folder, models, streamed
from specexport import reference as references
from specexport.datafile import DATA_FILE
from specexport.errors import ExportError, ParityError, SourceError
from specexport.options import ExportOptions
from specexport.parts import base as parts_base
from specexport.parts.assistant import Assistant
from specexport.sources import Source, resolve, resolve_pair
from specgraphs import ops, patches
from specgraphs import target as target_graph
from specgraphs.packed_attention import SPARE_ROWS
from specrun import manifest as manifests
from specrun import ort
from specrun.contract import MTP_DRAFTER_ENGINE, TARGET_ENGINE, DType, Role
from specrun.errors import EngineError, FolderError, UsageError
from specrun.ort import open_session
from specrun.resolve import unsupported_defaults
from specrun.target import Target

pytestmark = pytest.mark.slow

ExportedPair = Callable[..., Exported]
ROOT = Path(__file__).parents[1]
LLAMA: Pair = ("llama", None)
SHARING: Pair = ("gemma4-e2b", "assistant-plain")
CENTROID: Pair = ("gemma4-e2b", "assistant-centroid")
EXPERTS: Pair = ("gemma4-moe", "assistant-centroid")
UNCHECKED = ExportOptions(check=False)
# Products of matrices in pieces: processors differ in how they add up.
SAME: Any = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The smallest checkpoint, for what does not depend on the architecture."""
    return resolve(tiny_models.save("llama", tmp_path_factory.mktemp("checkpoint")))


EARLIER = '{"format": 1, "files": []}'  # the manifest of an earlier export


def save_model(model: Any, path: Path) -> Source:
    """A checkpoint of ``model`` with the tiny tokenizer."""
    model.save_pretrained(path)
    tiny_models.tokenizer().save_pretrained(path)
    return resolve(path)


def external(path: Path) -> dict[str, tuple[int, int]]:
    """Initializer -> (offset, length) in the data file."""
    initializers = ir.load(path).graph.initializers
    found: dict[str, tuple[int, int]] = {}
    for name, value in initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            assert tensor.location == DATA_FILE
            assert tensor.offset is not None and tensor.length is not None
            found[name] = (tensor.offset, tensor.length)
    return found


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


# The data file.


# C57: here in fp32, in integers in test_precisions.
def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        **tiny_models.BASE | {"vocab_size": 4096}, num_hidden_layers=2, tie_word_embeddings=True
    )
    model = transformers.LlamaForCausalLM(config)
    unique = sum(parameter.nbytes for parameter in model.parameters())
    exporter.export(save_model(model, tmp_path / "ck"), None, tmp_path / "out", UNCHECKED)
    size = (tmp_path / "out" / DATA_FILE).stat().st_size
    size -= 2 * (tiny_models.CONTEXT + SPARE_ROWS) * 8 * 4  # cosines and sines of half a head
    assert 0.95 * unique <= size <= 1.05 * unique  # norms stand in the graph itself


@pytest.mark.parametrize("pair", pair_params(SHARING, CENTROID))
def test_engines_share_the_embedding(exported_pair: ExportedPair, pair: Pair) -> None:
    made = exported_pair(pair)
    names = (TARGET_ENGINE, MTP_DRAFTER_ENGINE)
    target, drafter = (made.folder / made.manifest.engines[name].file for name in names)
    embedding = external(drafter)["model.embed_tokens.weight"]
    assert embedding[1] == tiny_models.VOCAB * tiny_models.BASE["hidden_size"] * 4
    tied = [name for name, place in external(target).items() if place == embedding]
    assert len(tied) == 1  # embedding and head are one initializer
    assert set(external(target).values()) & set(external(drafter).values()) == {embedding}


@pytest.mark.parametrize("pair", pair_params(LLAMA, CENTROID))
def test_the_data_file_is_its_ranges(exported_pair: ExportedPair, pair: Pair) -> None:
    """Ranges lie one behind the other; between them stands alignment and nothing else."""
    made = exported_pair(pair)
    files = [engine.file for engine in made.manifest.engines.values()]
    ranges = {place for file in files for place in external(made.folder / file).values()}
    data = (made.folder / DATA_FILE).read_bytes()
    end = 0
    for offset, length in sorted(ranges):
        large = length >= datafile.LARGE_TENSOR
        align = datafile.LARGE_ALIGNMENT if large else datafile.SMALL_ALIGNMENT
        assert offset == -(-end // align) * align
        assert not any(data[end:offset])
        end = offset + length
    assert end == len(data)


# C58.
def test_all_tensors_outside_of_the_graph(
    llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a low threshold the graph file holds shapes only, and loads by its path."""
    original = engines.write_engine

    def write(*arguments: Any) -> None:
        original(*arguments, inline_below=64)

    monkeypatch.setattr(engines, "write_engine", write)
    made = exporter.export(llama, None, tmp_path / "out")
    assert made.parity is not None and made.parity.worst_error <= 1e-4
    path = tmp_path / "out" / "target.onnx"
    inside = ir.load(path).graph.initializers.keys() - external(path).keys()
    assert {"model.norm.weight", "lm_head.weight"} <= external(path).keys()
    for name in inside:
        value = ir.load(path).graph.initializers[name].const_value
        assert value is not None and value.nbytes < 64, name
    onnx.checker.check_model(str(path))
    with specrun.load(tmp_path / "out", threads=1) as engine:
        assert len(engine.generate([1, 2], max_new_tokens=3, eos_token_ids=[]).tokens) == 3


# C58.
def test_no_model_is_serialized_in_memory() -> None:
    """A model over 2 GB has no protobuf form in one piece: nothing may ask for one, but for graphs
    that hold no weights of a model."""
    banned = {"SerializeToString", "ParseFromString", "load_external_data_for_model", "check_model"}
    files = [*(ROOT / "export").rglob("*.py"), *(ROOT / "graphs").rglob("*.py")]
    assert len(files) > 20
    small = {"packed_attention.py": "cosines and sines", "auto_precision.py": "a sample of layers"}
    assert small.keys() <= {path.name for path in files}
    for path in files:
        if path.name in small:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Attribute) and node.attr in banned), path


# Whole or not at all.


# C59.
@pytest.mark.usefixtures("traced_anew")
def test_twice_the_same_bytes(llama: Source, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    exporter.export(llama, None, out, UNCHECKED)
    first = contents(out)
    exporter.export(llama, None, out, UNCHECKED)
    assert contents(out) == first
    assert [path.name for path in tmp_path.iterdir()] == ["engines"]


ELSEWHERE = """
    import sys
    from pathlib import Path
    from specexport import exporter
    from specexport.sources import resolve

    for path in map(Path, sys.argv[2:]):
        out = Path(sys.argv[1]) / path.name
        exporter.export(resolve(path), None, out, exporter.ExportOptions(check=False))
"""


# C59. gemma3 makes the set of its kinds of layers in each run, gemma4 keeps one.
def test_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    """Hashes of texts differ between processes, so whatever goes through a set of them does."""
    paths = [tiny_models.save(name, tmp_path / "checkpoints") for name in ("gemma3", "gemma4-e2b")]
    for path in paths:  # here, where traces are shared, with hashes of any seed
        exporter.export(resolve(path), None, tmp_path / "here" / path.name, UNCHECKED)
    for seed in ("1", "2"):  # of hashes; the two sets come in different orders
        command = [sys.executable, "-c", textwrap.dedent(ELSEWHERE), str(tmp_path / seed)]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([*command, *paths], env=environment, capture_output=True, check=True)
        for path in paths:
            made, here = tmp_path / seed / path.name, tmp_path / "here" / path.name
            assert contents(made) == contents(here)


@pytest.mark.parametrize("before", [False, True])
def test_an_error_in_the_middle(
    llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    out = tmp_path / "engines"
    if before:
        out.mkdir()
        (out / manifests.MANIFEST).write_text(EARLIER)
    kept = [path.name for path in tmp_path.iterdir()]
    monkeypatch.setattr(engines, "write_engine", writes_half)
    with pytest.raises(OSError, match="no more"):
        exporter.export(llama, None, out, UNCHECKED)
    assert [path.name for path in tmp_path.iterdir()] == kept
    if before:
        assert contents(out) == {manifests.MANIFEST: EARLIER.encode()}


def writes_half(graph: Any, path: Path, data: Any, weights: Any) -> None:
    """Writes something, then fails as a device does."""
    data._file.write(b"x" * 5000)
    path.write_bytes(b"half")
    raise OSError("no more")


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from specexport import engines, exporter
    from specexport.sources import resolve

    def dies(*arguments):
        write(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    write, engines.write_engine = engines.write_engine, dies
    exporter.export(
        resolve(sys.argv[1]), None, Path(sys.argv[2]), exporter.ExportOptions(check=False)
    )
"""


# C59; at random moments: scripts/check_kills.py.
def test_killed_in_the_middle(llama: Source, tmp_path: Path) -> None:
    """What was there is there; what is left beside it is no engine folder."""
    out = tmp_path / "engines"
    out.mkdir()
    (out / manifests.MANIFEST).write_text(EARLIER)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(llama.path), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert contents(out) == {manifests.MANIFEST: EARLIER.encode()}
    left = [path for path in tmp_path.iterdir() if path != out]
    assert [path.suffix for path in left] == [".partial"]
    assert {"target.onnx", DATA_FILE} <= set(contents(left[0]))
    with pytest.raises(FolderError, match=r"no manifest\.json in it"):
        specrun.load(left[0])


def test_what_a_killed_export_left_is_cleared_up(tmp_path: Path) -> None:
    """A half-written folder goes, one that was moved away comes back; a running export's stays."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    out = tmp_path / "engines"
    partial = tmp_path / f".engines.{dead.pid}.abc.partial"
    partial.mkdir()
    moved = tmp_path / f".engines.{dead.pid}.abc.old" / "engines"
    moved.mkdir(parents=True)
    (moved / manifests.MANIFEST).write_text(EARLIER)
    # The process number of a killed export may be that of another process by now, even this one.
    again = tmp_path / f".engines.{os.getpid()}.def.partial"
    again.mkdir()
    running = tmp_path / f".engines.{dead.pid}.ghi.partial"
    running.mkdir()
    with (
        folder._held(running),
        pytest.raises(RuntimeError, match="interrupted"),
        folder.atomic(out),
    ):
        assert contents(out) == {manifests.MANIFEST: EARLIER.encode()}
        raise RuntimeError("interrupted")
    assert contents(out) == {manifests.MANIFEST: EARLIER.encode()}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([running.name, "engines"])


@pytest.mark.parametrize("manifest", ['{"name": "my app"}', EARLIER, "[]", "not JSON"])
def test_what_others_wrote_stays(manifest: str, tmp_path: Path) -> None:
    """A folder is replaced only where its manifest accounts for every file in it."""
    out = tmp_path / "webapp"
    (out / "src").mkdir(parents=True)
    (out / manifests.MANIFEST).write_text(manifest)
    (out / "src" / "main.js").write_text("code")
    with (
        pytest.raises(ExportError, match=r"is no engine folder|holds src/main\.js"),
        folder.atomic(out),
    ):
        pass
    assert (out / manifests.MANIFEST).read_text() == manifest
    assert (out / "src" / "main.js").read_text() == "code"


def test_a_corrupt_weight_is_found(
    llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong tensor on its way to the file: an error, exit 1, and no folder."""
    original = datafile.DataFile.add

    def add(
        self: datafile.DataFile,
        key: tuple[str, str],
        dtype: np.dtype[Any],
        length: int,
        chunks: Iterable[NDArray[Any]],
    ) -> datafile.Range:
        if key[1] == "model.layers.1.mlp.down_proj.weight":
            chunks = [np.concatenate([chunk[1:], chunk[:1]]) for chunk in chunks]
        return original(self, key, dtype, length, chunks)

    monkeypatch.setattr(datafile.DataFile, "add", add)
    out = tmp_path / "engines"
    with pytest.raises(ParityError, match=r"target\.(logits|hidden) differs from trans"):
        exporter.export(llama, None, out)
    done = CliRunner().invoke(cli.main, [str(llama.path), "--out", str(out), "--quiet"])
    assert done.exit_code == 1
    assert "Error: target." in done.stderr and "hint: --no-check" in done.stderr
    assert not done.stdout
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_seen_before_writing(
    llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**7))
    monkeypatch.setattr(engines, "write_engine", None)
    with pytest.raises(ExportError, match=r"[\d,]+ bytes are needed, 10,000,000 are") as caught:
        exporter.export(llama, None, tmp_path / "engines", UNCHECKED)
    assert str(caught.value.hint) == "free some space, or give --out on another disk"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pair", pair_params(CENTROID))
def test_the_room_is_what_the_data_file_takes(
    exported_pair: ExportedPair, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of everything, tables of cosines too; the tokenizer is written before, as its size counts."""
    sources = exported_pair(pair).sources
    rooms: list[int] = []

    def checks(partial: Path, room: int) -> None:
        assert [path.name for path in partial.iterdir()] == ["tokenizer.json"]
        rooms.append(room)

    monkeypatch.setattr(folder, "check_space", checks)
    exporter.export(*sources, tmp_path / "out", UNCHECKED)
    size = (tmp_path / "out" / DATA_FILE).stat().st_size
    files = (tmp_path / "out").glob("*.onnx")
    ranges = len({place for path in files for place in external(path).values()})
    assert len(rooms) == 1
    assert size <= rooms[0] <= size + datafile.SMALL_ALIGNMENT * ranges


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_disk_that_runs_full(
    llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """While a tensor is written: one sentence, a way out, and nothing left."""
    original = datafile.DataFile._align

    def aligns(self: datafile.DataFile, length: int) -> int:
        if self._file.tell() > 10_000:
            raise OSError(number, os.strerror(number))
        return original(self, length)

    monkeypatch.setattr(datafile.DataFile, "_align", aligns)
    command = [str(llama.path), "--out", str(tmp_path / "engines"), "--no-check", "--quiet"]
    done = CliRunner().invoke(cli.main, command)
    assert done.exit_code == 1
    assert done.stderr == (
        f"Error: {tmp_path / 'engines'}: {folder.FULL[number]}\nhint: {folder.SPACE_HINT}\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write may take a part of the bytes; the rest is written too."""
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: original(file, data[:7], at))
    matrix = np.arange(20 * 30, dtype=np.int16).astype(np.int8).reshape(20, 30)
    with datafile.DataFile(tmp_path / DATA_FILE) as data:
        place = data.reserve(("a", "b", "int8"), matrix.size)
        data.fill_columns(place, 20, 0, matrix[:12])
        data.fill_columns(place, 20, 12, matrix[12:])
    assert (tmp_path / DATA_FILE).read_bytes() == matrix.T.tobytes()


def test_a_folder_of_something_else_is_left_alone(llama: Source, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for out in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(ExportError, match=r"is no engine folder|is not a folder") as caught:
            exporter.export(llama, None, out, UNCHECKED)
        assert "--out" in str(caught.value.hint)
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}


@pytest.mark.parametrize("pair", pair_params(SHARING))
def test_moved_renamed_and_read_only(
    exported_pair: ExportedPair, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exported_pair(pair)
    place = tmp_path / "somewhere else äöü" / "e"
    shutil.copytree(made.folder, place)
    for path in [*place.iterdir(), place]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.chdir(tmp_path)
    with specrun.load(Path("somewhere else äöü") / "e", integrity="full", threads=1) as engine:
        monkeypatch.chdir("/")
        options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_ids": [], "strict": True}
        got = engine.generate([5, 6, 7], method="mtp-drafter", **options)
    with made.open() as engine:
        assert engine.generate([5, 6, 7], method="plain", **options).tokens == got.tokens
    place.chmod(0o755)


# Precision.


# C61.
@pytest.mark.parametrize("name", ["llama", "gemma4-e2b"])
def test_a_bfloat16_checkpoint(name: str, tmp_path: Path) -> None:
    """bfloat16 is widened: no such tensor or cast in the graph, and it runs."""
    source = resolve(tiny_models.save(name, tmp_path, dtype=torch.bfloat16))
    made = exporter.export(source, None, tmp_path / "out")
    assert made.parity is not None and made.parity.worst_error <= 1e-4
    graph = ir.load(tmp_path / "out" / "target.onnx").graph
    values = [value for node in graph.all_nodes() for value in node.outputs]
    values += [*graph.initializers.values(), *graph.inputs, *graph.outputs]
    assert ir.DataType.BFLOAT16 not in {value.dtype for value in values}
    for node in graph.all_nodes():
        if node.op_type == "Cast":
            assert node.attributes["to"].as_int() != ir.DataType.BFLOAT16
    with specrun.load(tmp_path / "out", threads=1) as engine:
        engine.generate([1, 2, 3], max_new_tokens=2)


@pytest.mark.parametrize("pair", pair_params(CENTROID, ("gemma3", None)))
def test_float16(exported_pair: ExportedPair, pair: Pair) -> None:
    """Half the bytes, compared by what transformers itself loses, and lossless in itself."""
    made = exported_pair(pair, "fp16")
    assert made.manifest.parity is not None
    assert made.manifest.parity.worst_error <= made.manifest.parity.tolerance <= 0.5
    full = exported_pair(pair)
    assert made.spec.kv_bytes_per_token * 2 == full.spec.kv_bytes_per_token
    sizes = [(m.folder / DATA_FILE).stat().st_size for m in (made, full)]
    assert sizes[0] < 0.55 * sizes[1]
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_ids": [], "strict": True}
    with made.open() as engine:
        assert engine.target.kv.dtype is DType.FLOAT16
        for length in (3, 8, 20):
            prompt = prompt_of(length)
            plain = engine.generate(prompt, method="plain", **options).tokens
            for method in made.drafting_methods:
                got = engine.generate(prompt, method=method, **options).tokens
                same_or_tie(made, prompt, plain, got)


def same_or_tie(made: Exported, prompt: list[int], plain: list[int], got: list[int]) -> None:
    """Blocks of other widths round differently: a difference must be a tie in fp16."""
    pairs = zip(plain, got, strict=True)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        return
    tokens = np.array([prompt + plain[:index]])
    logits = made.open_target().prefill(tokens, want_logits=True).logits
    assert logits is not None
    row = logits[0, -1]
    gap = abs(float(row[plain[index]] - row[got[index]]))
    assert gap <= 4 * np.spacing(np.float16(np.abs(row).max())), (index, gap)


@pytest.mark.parametrize("pair", pair_params(CENTROID))
def test_kv_dtype_is_the_sessions(exported_pair: ExportedPair, pair: Pair) -> None:
    """Buffers are made as the engine wants them; an engine of another dtype is refused."""
    half, full = exported_pair(pair, "fp16"), exported_pair(pair)
    for made, dtype in ((half, DType.FLOAT16), (full, DType.FLOAT32)):
        target = Target(made.session(Role.TARGET), full.spec, max_context=64)
        assert target.kv.dtype is dtype
    path = half.folder / half.spec.file
    with pytest.raises(EngineError, match=r"target\.onnx: input 'past\.0\.key': must be float32"):
        open_session(path, full.spec, threads=1)


# Versions.


# C63; run on the least ONNX Runtime: scripts/check_min_runtime.py.
@pytest.mark.parametrize("pair", pair_params(CENTROID))
def test_versions_are_pinned(exported_pair: ExportedPair, pair: Pair) -> None:
    made = exported_pair(pair)
    for engine in made.manifest.engines.values():
        model = ir.load(made.folder / engine.file)
        assert (model.opset_imports[""], model.ir_version) == (ops.OPSET, ops.IR_VERSION)
        assert (engine.requires.opset, engine.requires.ir_version) == (23, 10)
        assert engine.requires.onnxruntime == parts_base.MIN_ONNXRUNTIME
        assert set(model.opset_imports) <= {"", "com.microsoft"}
    assert {"torch", "transformers", "onnxruntime", "specrun"} <= set(made.manifest.versions)


@pytest.mark.parametrize("pair", pair_params(LLAMA))
def test_an_older_onnxruntime_is_refused(
    exported_pair: ExportedPair, pair: Pair, tmp_path: Path
) -> None:
    made = exported_pair(pair)
    place = tmp_path / "engines"
    shutil.copytree(made.folder, place)
    requires = dataclasses.replace(made.spec.requires, onnxruntime="99.1")
    spec = dataclasses.replace(made.spec, requires=requires)
    newer = dataclasses.replace(made.manifest, engines={TARGET_ENGINE: spec})
    (place / manifests.MANIFEST).write_text(manifests.dumps(newer))
    with pytest.raises(EngineError, match=r"requires onnxruntime 99\.1 or newer") as caught:
        specrun.load(place, verify="engine")
    assert caught.value.hint == "pip install -U 'onnxruntime>=99.1'"


# What does not belong together.


def assistant(path: Path, **changes: Any) -> Source:
    """An assistant with another text configuration."""
    return save_model(tiny_models._assistant(centroids=False, **changes), path)


def narrow_target(path: Path) -> Source:
    """A Gemma 4 of half the hidden size."""
    config = transformers.Gemma4TextConfig(
        **tiny_models.GEMMA4 | {"hidden_size": 32},
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    )
    return save_model(transformers.Gemma4ForCausalLM(config), path)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Source]:
    """A target and its assistant."""
    root = tmp_path_factory.mktemp("gemma")
    names = ("gemma4-e2b", "assistant-plain")
    return resolve(tiny_models.save(names[0], root)), resolve(tiny_models.save(names[1], root))


def test_pairs_that_are_none(gemma: tuple[Source, Source], llama: Source, tmp_path: Path) -> None:
    target, drafter = gemma
    heads = assistant(tmp_path / "heads", num_key_value_heads=2)
    words = assistant(tmp_path / "words", vocab_size=400)
    narrow = narrow_target(tmp_path / "narrow")
    refused = [
        (drafter, None, r"assistant-plain: is an assistant .* works only with its target"),
        (narrow, drafter, r"trained for a target of hidden size 64, this target has 32"),
        (target, words, r"has a vocabulary of 400, this target of 384"),
        (target, heads, r"assistant layer 0 reads 2 KV heads of 16; .* has 1 of 16"),
        (llama, drafter, r"has sliding_attention layers and no layer of that kind owns KV"),
    ]
    for source, other, message in refused:
        with pytest.raises(SourceError, match=message):
            exporter.export(source, other, tmp_path / "out", UNCHECKED)
    assert not (tmp_path / "out").exists()


def test_a_context_that_the_model_has_not(llama: Source, tmp_path: Path) -> None:
    options = ExportOptions(max_context=129, check=False)
    with pytest.raises(UsageError, match="max_context: llama has 128 positions, got 129") as caught:
        exporter.export(llama, None, tmp_path / "out", options)
    assert caught.value.hint == "give at most 128"


def test_a_smaller_context(llama: Source, tmp_path: Path) -> None:
    exporter.export(llama, None, tmp_path / "out", ExportOptions(max_context=24))
    with specrun.load(tmp_path / "out", threads=1) as engine:
        result = engine.generate(prompt_of(20), eos_token_ids=[])
        assert (len(result.tokens), result.finish_reason) == (4, "length")


def test_generation_defaults_are_kept() -> None:
    """Lists too, so that the runtime can honour them, or say that it does not."""
    given = {
        "eos_token_id": [1, -1, 99],
        "temperature": 0.7,
        "bad_words_ids": [[3], [4, 5]],
        "suppress_tokens": [7],
        "top_p": float("nan"),
        "pad_token_id": 0,
        "_from_model_config": True,
        "max_length": None,
    }
    source: Any = SimpleNamespace(generation=given, config=SimpleNamespace(vocab_size=10))
    kept = exporter._generation(source, 32)
    assert (kept.eos_token_ids, kept.pad_token_id, kept.max_context) == ((1,), 0, 32)
    assert kept.defaults == {
        "temperature": 0.7,
        "bad_words_ids": [[3], [4, 5]],
        "suppress_tokens": [7],
    }
    assert unsupported_defaults(kept.defaults) == {"suppress_tokens": [7]}


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "hot"), ("top_p", 3.0), ("bad_words_ids", [[999]])]
)
def test_generation_defaults_that_cannot_be(tmp_path: Path, name: str, value: object) -> None:
    """Said at the export, with the file that is wrong, before anything is written."""
    path = tiny_models.save("llama", tmp_path)
    (path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(
        SourceError, match=rf"llama: generation_config\.json: {name}: must "
    ) as error:
        exporter.export(resolve(path), None, tmp_path / "engines")
    assert error.value.hint and not (tmp_path / "engines").exists()


def test_options_are_checked() -> None:
    for field, value in (("precision", "int3"), ("num_draft", 0), ("max_context", 1)):
        changes: dict[str, Any] = {field: value}
        with pytest.raises(UsageError, match=f"{field}: must be .*, got {value!r}"):
            ExportOptions(**changes)


# The reference.


@pytest.mark.parametrize("pair", [CENTROID, EXPERTS], ids=exported.name_of)
def test_streamed_reference_is_the_whole_one(pair: Pair, tmp_path: Path) -> None:
    """Weights that come and go module by module, large tables in pieces: the same numbers."""
    paths = [tiny_models.save(name, tmp_path) for name in pair if name]
    target, drafter = resolve_pair(*paths)
    options: dict[str, Any] = {"max_context": 128, "block": 9}
    assert drafter is not None
    drafting = [Assistant(drafter, target)]
    whole = references.compute(target, drafting, memory=1 << 40, **options)
    parts = references.compute(target, drafting, memory=0, **options)
    assert (whole.scope, "streamed" in parts.scope) == (models.WHOLE, True)
    drafts = [seen.drafts["mtp-drafter"] for seen in (parts, whole)]
    assert whole.cases == parts.cases and len(drafts[0]) == len(drafts[1]) > 2
    for position, logits in whole.logits.items():
        np.testing.assert_allclose(parts.logits[position], logits, **SAME)
    np.testing.assert_allclose(parts.hidden, whole.hidden, **SAME)
    for ours, theirs in zip(*drafts, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(ours.logits, theirs.logits, **SAME)


def test_streamed_linear_in_pieces(
    llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_context": 64, "block": 5, "memory": 0}
    whole = references.compute(llama, [], **options)
    monkeypatch.setattr(streamed, "LINEAR_BYTES", 1 << 10)
    monkeypatch.setattr(streamed, "CHUNK_BYTES", 1 << 8)
    parts = references.compute(llama, [], **options)
    for position, logits in whole.logits.items():
        np.testing.assert_allclose(parts.logits[position], logits, **SAME)


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize("pair", pair_params(SHARING))
def test_transformers_is_left_as_it_was(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an export, and after one that failed in the middle of tracing: the same results."""
    modeling = sys.modules[type(reference(pair[0])).__module__]
    rotary = modeling.apply_rotary_pos_emb
    tokens = prompt_of(20)
    before = forward(reference(pair[0]), tokens)

    def check() -> None:
        assert modeling.apply_rotary_pos_emb is rotary
        assert not patches._active
        for model in (reference(pair[0]), tiny_models.build(pair[0])):
            for now, then in zip(forward(model, tokens), before, strict=True):
                np.testing.assert_array_equal(now, then)

    made = exported.make(pair, tmp_path / "whole", options=UNCHECKED)
    check()
    calls = 0
    original = target_graph.KvAttention.__call__

    def breaks(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("in the middle")
        return original(self, *arguments, **options)

    monkeypatch.setattr(target_graph.KvAttention, "__call__", breaks)
    with pytest.raises(Exception, match="in the middle"):
        exporter.export(*made.sources, tmp_path / "broken", UNCHECKED)
    assert calls == 4 and not (tmp_path / "broken").exists()
    check()


def test_threads_are_those_we_may_use(
    llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = open_session

    def opens(*arguments: Any, threads: int, **options: Any) -> Any:
        seen.append(threads)
        return original(*arguments, threads=threads, **options)

    monkeypatch.setattr(ort, "open_session", opens)
    exporter.export(llama, None, tmp_path / "out")
    assert seen == [len(os.sched_getaffinity(0))]


def test_a_model_card_is_written(llama: Source, tmp_path: Path) -> None:
    """With the checkpoint's licence. It is no file of the manifest; an export may replace it."""
    path = shutil.copytree(llama.path, tmp_path / "llama")
    (path / card.CARD).write_text("---\nlicense: mit\n---\n")
    out = tmp_path / "engines"
    made = exporter.export(resolve(path), None, out, UNCHECKED)
    folder.check_target(out)
    assert card.CARD not in made.sizes
    found = ModelCard.load(out / card.CARD)
    assert found.data.license == "mit"
    assert "* llama: mit" in found.text
