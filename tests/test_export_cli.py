"""The command specexport: exit codes, what goes to stdout and stderr, texts of errors."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from click.testing import CliRunner, Result
from exported import Exported, Pair, pair_params

from specexport.cli import main
from specexport.presets import PRESETS
from specrun import manifest as manifests
from specrun.contract import Role

ExportedPair = Callable[..., Exported]
PAIR: Pair = ("gemma4-e2b", "assistant-plain")


def call(*arguments: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def failed(result: Result, message: str, hint: str = "") -> None:
    """Exit 1, nothing on stdout, the two lines on stderr and no traceback."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first.startswith("Error: ") and message in first
    assert len(rest) == bool(hint)
    if hint:
        assert rest[0].startswith("hint: ") and hint in rest[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("checkpoint"))


# export.


@pytest.mark.slow
def test_export_as_json(llama: Path, tmp_path: Path) -> None:
    """export is the default sub-command; stdout holds one JSON object and nothing else."""
    out = tmp_path / "engines"
    result = call(llama, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data.pop("parity")["worst_error"] <= 1e-4
    size = sum(file.stat().st_size for file in out.iterdir() if file.suffix != ".md")
    size -= (out / "manifest.json").stat().st_size
    assert data == {
        "out": str(out),
        "target": "llama",
        "drafters": {},
        "engines": {"target": "target.onnx"},
        "bytes": size,
        "notes": [],
        "quality": None,
    }


@pytest.mark.slow
def test_export_without_check(llama: Path, tmp_path: Path) -> None:
    """The folder goes to stdout, what was or was not checked to stderr and into the manifest."""
    out = tmp_path / "engines"
    arguments = (llama, "-o", out, "--no-check", "--max-context", 32, "--precision", "fp16")
    result = call("export", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}\n"
    assert result.stderr == "not compared with transformers (--no-check)\n"
    made = manifests.read(out)
    assert made.parity is None
    assert made.generation.max_context == 32
    assert made.engines[Role.TARGET].precision == "fp16"


def test_export_errors(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    failed(call("no-such-thing", "-o", out), "no-such-thing: no such folder", "presets: gemma4")
    failed(call(tmp_path, "-o", out), f"{tmp_path}: no config.json in it", "save_pretrained")
    for arguments, says in (
        ((llama, "--drafter", llama, "--drafter", llama), "two drafters are for the method draft"),
        ((llama, "--drafter", llama, "--drafter", "none"), "--drafter: 'none' excludes others"),
        ((llama, "--early-exit", 0), "--early-exit: must be at least 1, got 0"),
        ((llama, "--early-exit", 99), "give 1 to"),
    ):
        wrong = call(*arguments, "-o", out)
        assert (wrong.exit_code, wrong.stdout) == (2, "") and says in wrong.stderr
    assert call("check", tmp_path, "--drafter", llama).exit_code == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    failed(call(llama, "-o", tmp_path / "full"), "has files in it", "give a new or empty folder")
    assert not out.exists()


@pytest.mark.parametrize("preset", ["gemma4", "gemma4-31b"])
def test_a_preset_without_a_network(preset: str, tmp_path: Path) -> None:
    failed(
        call(preset, "--out", tmp_path / "engines"),
        f"preset {preset}: {PRESETS[preset].target}: no folder of that name here, not in the cache",
        "specexport PATH/TO/target --drafter PATH/TO/assistant --out DIR",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((".",), "Missing option '-o' / '--out'"),
        ((".", "-o", "out", "--precision", "int3"), "'int3' is not one of"),
        ((".", "-o", "out", "--max-context", "many"), "'many' is not a valid integer"),
        ((".", "-o", "out", "--nothing"), "No such option"),
        ((".", "-o", "out", "--num-draft", "0"), "Error: --num-draft: must be at least 1, got 0"),
        (
            (".", "-o", "out", "--memory", "inf"),
            "--memory: must be more than 1.07 and finite, got inf",
        ),
        (
            (".", "-o", "out", "--memory", "nan"),
            "--memory: must be more than 1.07 and finite, got nan",
        ),
        ((".", "-o", "out", "--max-context", "1"), "--max-context: must be at least 2, got 1"),
        (("check",), "Missing argument 'FOLDER'"),
        (("inspect", "a", "b"), "unexpected extra argument"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_context_that_the_model_has_not(llama: Path, tmp_path: Path) -> None:
    result = call(llama, "-o", tmp_path / "out", "--max-context", 4096)
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: --max-context: llama has 128 positions, got 4096\nhint: give at most 128\n"
    )


# check.


@pytest.mark.slow
@pytest.mark.parametrize("pair", pair_params(PAIR))
def test_check(exported_pair: ExportedPair, pair: Pair) -> None:
    made = exported_pair(pair)
    result = call("check", made.folder)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{made.folder}: sound: blocks and single rows differ by ")
    data = json.loads(call("check", made.folder, "--json").stdout)
    assert data["ok"] is True and 0 <= data["self_error"] <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("pair", pair_params(PAIR))
def test_check_with_the_source(exported_pair: ExportedPair, pair: Pair) -> None:
    made = exported_pair(pair)
    assert made.manifest.parity is not None
    source = (made.target_path, "--drafter", made.drafter_path)
    result = call("check", made.folder, *source, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["parity"]["cases"] == len(made.manifest.parity.cases)
    assert data["parity"]["worst_error"] <= 1e-4
    text = call("check", made.folder, *source)
    assert "agrees with transformers (whole model): " in text.stdout


@pytest.mark.slow
@pytest.mark.parametrize("pair", pair_params(PAIR))
def test_check_with_another_source(exported_pair: ExportedPair, pair: Pair, tmp_path: Path) -> None:
    """The same shapes, other weights."""
    made = exported_pair(pair)
    other = tmp_path / "other"
    shutil.copytree(made.target_path, other)
    spoil(other / "model.safetensors", -5)
    drafter = ("--drafter", made.drafter_path)
    failed(
        call("check", made.folder, other, *drafter), "differs from transformers by", "--no-check"
    )


@pytest.mark.slow
@pytest.mark.parametrize("pair", pair_params(PAIR))
def test_check_with_what_cannot_be_the_source(
    exported_pair: ExportedPair, pair: Pair, llama: Path
) -> None:
    """Another family, other sizes, no assistant for a folder with a drafter."""
    made = exported_pair(pair)
    failed(
        call("check", made.folder, llama),
        "llama: has architecture LlamaForCausalLM, the folder was exported from gemma4-e2b with",
        "give the checkpoint that the folder was exported from",
    )
    failed(
        call("check", made.folder, "gemma4-tiny"),
        "target: has vocabulary 3072, the folder",
        "give the",
    )
    failed(
        call("check", made.folder, made.target_path),
        "the folder has a drafter (assistant-plain, for mtp-drafter), and none is given",
        "give it with --drafter",
    )


@pytest.mark.slow
@pytest.mark.parametrize("pair", pair_params(PAIR))
@pytest.mark.parametrize("name", ["weights.data", "target.onnx", "tokenizer.json"])
def test_check_finds_a_flipped_byte(
    exported_pair: ExportedPair, pair: Pair, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "engines"
    shutil.copytree(exported_pair(pair).folder, folder)
    spoil(folder / name, 1000)
    failed(
        call("check", folder),
        f"{folder / name}: changed since the export: sha256 must be ",
        "export the folder again",
    )


def spoil(path: Path, place: int) -> None:
    """Flip a bit of one byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


def test_check_of_nothing(tmp_path: Path) -> None:
    failed(call("check", tmp_path), "no manifest.json in it", "specexport --out wrote")
    failed(call("check", tmp_path / "none"), "no such folder", "give the folder specexport wrote")


# inspect, presets, help.


@pytest.mark.slow
@pytest.mark.parametrize("pair", pair_params(PAIR))
def test_inspect(exported_pair: ExportedPair, pair: Pair) -> None:
    made = exported_pair(pair)
    result = call("inspect", made.folder)
    assert result.exit_code == 0, result.output
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    values = {name.strip(): value.strip() for name, value in lines.items()}
    assert values["target"] == "gemma4-e2b (Gemma4ForCausalLM)"
    assert values["method mtp-drafter"] == (
        "assistant-plain, starts with 4 drafts (heuristic-transient), drafts up to 8 tokens"
    )
    assert values["engine mtp_drafter"].startswith("mtp_drafter.onnx, fp32")
    data: dict[str, Any] = json.loads(call("inspect", made.folder, "--json").stdout)
    assert manifests.loads(json.dumps(data)) == made.manifest


def test_presets() -> None:
    result = call("presets")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(PRESETS)
    assert json.loads(call("presets", "--json").stdout) == {
        name: preset.about for name, preset in PRESETS.items()
    }


def test_help_shows_examples() -> None:
    for arguments in (("--help",), ("export", "--help"), ("check", "-h")):
        result = call(*arguments)
        assert result.exit_code == 0
        assert "  Examples:\n    specexport " in result.stdout


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine with only the runtime: one error that says what to install."""
    find_spec = importlib.util.find_spec
    missing = {"torch", "onnx_ir"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name)
    )
    done = CliRunner().invoke(main, ["gemma4-tiny", "--out", str(tmp_path / "engines")])
    assert done.exit_code == 1
    assert done.stderr.startswith(
        "Error: exporting needs torch, onnx_ir, not installed here\nhint:"
    )
    assert not (tmp_path / "engines").exists()
