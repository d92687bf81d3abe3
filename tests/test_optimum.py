"""`optimum-cli export speculative`: found by optimum, the export of specexport under its names;
and what optimum's TasksManager says of checkpoints."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("optimum.exporters")

import transformers
from optimum.commands.export.base import ExportCommand
from optimum.commands.optimum_cli import load_optimum_namespace_cli_commands
from optimum.commands.optimum_cli import main as optimum_cli

from specexport import cli, exporter, tasks
from specexport.cli_options import Task
from specexport.errors import SourceError
from specexport.optimum_command import SpeculativeExportCommand, arguments
from specexport.options import ExportOptions
from specexport.sources import ASSISTANTS, MULTIMODAL, TARGETS, Wanted, resolve_as

ROOT = Path(__file__).parents[1]
OURS = [option for option in cli.export.params if isinstance(option, click.Option)]
RENAMED = {"out": "output", "task": "--task", "cache_dir": "--cache_dir"}


def forwarded(*given: str) -> list[str]:
    """What `specexport export` gets."""
    parser = argparse.ArgumentParser()
    SpeculativeExportCommand.parse_args(parser)
    return arguments(parser.parse_args(given))


def parsed(given: list[str]) -> dict[str, Any]:
    """As `specexport export` understands its arguments."""
    return cli.export.make_context("export", list(given)).params


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """``run(*arguments)``: exit status and stderr of optimum-cli in this process."""

    def call(*given: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", "export", "speculative", *given])
        with pytest.raises(SystemExit) as left:
            optimum_cli()
        code = left.value.code
        return int(code or 0), capsys.readouterr().err

    return call


# Found by optimum.


def test_it_is_registered_below_export() -> None:
    assert (SpeculativeExportCommand, ExportCommand) in load_optimum_namespace_cli_commands()


def test_optimum_cli_lists_it() -> None:
    """As installed, in a process of its own, which loads nothing heavy for it."""
    code = (
        "from optimum.commands.optimum_cli import main; import sys; sys.argv[1:] = ['export', '-h']"
    )
    code += "\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "speculative" in done.stdout
    assert "specexport.cli" in done.stderr.split()
    assert not {"torch", "transformers", "onnx", "numpy"} & set(done.stderr.split())


def test_the_folder_stays_a_namespace() -> None:
    """Without __init__.py, which would hide optimum; and it is part of what is installed."""
    folder = ROOT / "export" / "optimum"
    assert [path.name for path in folder.rglob("*.py")] == ["register_speculative.py"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "export/optimum" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


# The same options.


def test_optimums_names_stand_for_ours() -> None:
    same = ["--revision", "v1", "--token", "t"]
    theirs = ["--task", "causal-lm-with-past", "--library", "transformers", "--cache_dir", "c"]
    got = forwarded("-m", "org/model", *theirs, *same, "out")
    ours = ["--out", "out", "--task", "text-generation", "--cache-dir", "c"]
    expected = ["org/model", *ours, *same]
    assert parsed(got) == parsed(expected)
    assert parsed(forwarded("--model=-odd", "out"))["source"] == "-odd"


@pytest.mark.parametrize("option", [o for o in OURS if o.name not in RENAMED], ids=lambda o: o.name)
def test_every_option_of_ours_is_there(option: click.Option) -> None:
    """By each of its names, twice where it can be given twice; and means the same."""
    choices = getattr(option.type, "choices", None)
    value = [] if option.is_flag else [str(choices[0] if choices else "32")]
    for name in (*option.opts, *option.secondary_opts):
        given = [name, *value] * (2 if option.multiple else 1)
        assert parsed(forwarded("-m", "x", *given, "out")) == parsed(
            ["x", "--out", "out", *given]
        ), name


def test_the_help_names_every_option() -> None:
    parser = argparse.ArgumentParser()
    SpeculativeExportCommand.parse_args(parser)
    text = parser.format_help()
    for option in OURS:
        assert RENAMED.get(option.name or "", option.opts[-1]) in text
        if option.name not in RENAMED:
            assert " ".join((option.help or "").split()) in " ".join(text.split())


def test_it_runs_the_same_export(
    run: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same sources, options and exit status as specexport export."""
    seen: list[Any] = []

    def export(target: Any, drafters: Any, out: Path, options: ExportOptions, **_: Any) -> None:
        seen.append((target.id, [drafter.id for drafter in drafters], out, options))
        raise SourceError("the end", hint="of this test")

    monkeypatch.setattr(exporter, "export", export)
    out = str(tmp_path / "out")
    same = ["--precision", "int8", "--num-draft", "3", "--no-check"]
    status, told = run("-m", "gemma4-tiny", *same, out)
    assert (status, told) == (1, "Error: the end\nhint: of this test\n")
    with pytest.raises(SystemExit):
        cli.export.main(["gemma4-tiny", "--out", out, *same])
    assert seen[0] == seen[1]
    assert seen[0][:2] == ("gemma4-tiny/target", ["gemma4-tiny/assistant"])
    assert seen[0][3] == ExportOptions(precision="int8", num_draft=3, check=False)


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        (
            ["-m", "x", "--library", "timm", "out"],
            2,
            "Error: --library: only models of transformers",
        ),
        (
            ["-m", "x", "--trust-remote-code", "out"],
            2,
            "Error: --trust-remote-code: code that comes",
        ),
        (["-m", "x", "--task", "fill-mask", "out"], 2, "Error: --task: only text-generation is"),
        (["-m", "x", "--task", "summarization", "out"], 2, "got 'summarization'"),
        (["-m", "x", "--precision", "int3", "out"], 2, "Invalid value for '--precision'"),
        (
            ["-m", "x", "--num-draft", "0", "out"],
            2,
            "Error: --num-draft: must be at least 1, got 0",
        ),
        (["-m", "x", "--bogus", "out"], 2, "unrecognized arguments: --bogus"),
        (["out"], 2, "the following arguments are required: -m/--model"),
        (["-m", "no/such/thing", "out"], 1, "Error: no/such/thing: no such folder or file"),
    ],
)
def test_errors(
    given: list[str], status: int, message: str, run: Callable[..., tuple[int, str]]
) -> None:
    got, told = run(*given)
    assert (got, message in told) == (status, True), told


# What a checkpoint is for.


@pytest.mark.parametrize("model_type", sorted({*TARGETS, *ASSISTANTS}))
def test_all_that_is_supported_is_for_text(model_type: str, tmp_path: Path) -> None:
    """By the classes that published checkpoints of the type name."""
    from transformers.models.auto import modeling_auto

    named = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)]
    if model_type in MULTIMODAL:
        named.append(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])
    for name in filter(None, named):
        config = {"model_type": model_type, "architectures": [name]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        tasks.check(tmp_path, config, multimodal=model_type in MULTIMODAL)
    assert any(named)


@pytest.mark.parametrize(
    ("model_type", "architecture", "task"),
    [
        ("bert", "BertForMaskedLM", "fill-mask"),
        ("t5", "T5ForConditionalGeneration", "text2text-generation"),
        ("whisper", "WhisperForConditionalGeneration", "automatic-speech-recognition"),
        ("llama", "LlamaForSequenceClassification", "text-classification"),
        ("qwen3", "Qwen3Model", "feature-extraction"),
        ("llava", "LlavaForConditionalGeneration", "image-"),
    ],
)
def test_what_is_for_something_else(
    model_type: str, architecture: str, task: str, tmp_path: Path
) -> None:
    config = {"model_type": model_type, "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=rf"is a model for {task}.*\({architecture}\)") as caught:
        resolve_as(tmp_path, Wanted(config_only=True, task="auto"))
    assert "--task text-generation" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "content", "library"),
    [
        ("model_index.json", "{}", "diffusers"),
        ("config_sentence_transformers.json", "{}", "sentence_transformers"),
        ("config.json", '{"architecture": "resnet18", "pretrained_cfg": {}}', "timm"),
    ],
)
def test_models_of_other_libraries(name: str, content: str, library: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=f"is a model of {library}, not of transformers"):
        resolve_as(tmp_path, Wanted(task="auto"))


@pytest.mark.parametrize(
    "architectures",
    [None, [], "LlamaForCausalLM", [7], ["MyOwnLlama"], ["pipeline"], ["__doc__"], ["os.path"]],
)
def test_what_does_not_say_is_left_to_its_type(architectures: object, tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": architectures}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tasks.check(tmp_path, config, multimodal=False)


@pytest.mark.parametrize("content", ["[]", "{", "\udcff", "[" * 100_000])
def test_a_configuration_that_is_none_is_told_as_ever(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    choices: tuple[Task, Task] = ("auto", "text-generation")
    for task in choices:
        with pytest.raises(SourceError) as caught:
            resolve_as(tmp_path, Wanted(task=task))
        assert str(caught.value).startswith(f"{path}: ")


def test_nothing_below_a_folder_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be a home directory, given by mistake."""
    from optimum.exporters.tasks import TasksManager

    monkeypatch.setattr(TasksManager, "get_model_files", lambda *_, **__: pytest.fail("searched"))
    with pytest.raises(SourceError, match=r"no config\.json in it"):
        resolve_as(tmp_path, Wanted(task="auto"))


def test_without_a_task_nothing_is_inferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PyTorch verifies a folder where optimum is not installed."""
    monkeypatch.setattr(tasks, "check", lambda *_, **__: pytest.fail("inferred"))
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2)
    config.save_pretrained(tmp_path)
    assert resolve_as(tmp_path, Wanted(config_only=True)).model_type == "llama"
