"""specexport plan: the same bytes as a real export, from config.json alone."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import shapes  # pyright: ignore[reportMissingImports]

from specexport import exporter, plan_costs
from specexport import plan as plans
from specexport.cli import main
from specexport.datafile import DATA_FILE
from specexport.options import ExportOptions
from specexport.plan import ExportPlan
from specexport.sources import Source, resolve
from specgraphs.formats import LinearFormat
from specrun.errors import UsageError
from specrun.manifest import Manifest, Precision

ALLOWED = 0.02  # of the bytes of a real export
EVERY: tuple[Precision, ...] = ("fp32", "fp16", "int8", "w8a8", "int4")
INTEGERS: tuple[Precision, ...] = ("w8a8", "int4")  # the ones with rules of their own
THOROUGH = ("assistant-plain", "deepseek-mtp1")  # with these every precision, else one in turn
CASES: list[tuple[str, str | None]] = [
    *tiny_models.PAIRS,
    *((name, None) for name in tiny_models.MTP_LAYERS),
    ("qwen3", "llama"),
]
PRECISE = [
    (target, drafter, precision)
    for index, (target, drafter) in enumerate(CASES)
    for precision in (EVERY if {target, drafter} & set(THOROUGH) else (INTEGERS[index % 2],))
]
PAIR = ("gemma4-e2b", "assistant-plain")
OPTIONS: list[tuple[str, str | None, dict[str, Any]]] = [
    (*PAIR, {"early_exit": 2}),
    (*PAIR, {"block_size": 16, "max_context": 64}),
    (*PAIR, {"drafter_precision": "w8a8"}),
    (*PAIR, {"head_precision": "w8a8", "embedding_precision": "int4"}),
    ("glm4-moe-mtp1", None, {"mtp_layers": False}),
    ("llama", None, {"precision": "w8a8", "early_exit": 1}),
]


def config_alone(source: Source, folder: Path) -> Source:
    """The same checkpoint without its weights and its tokenizer."""
    alone = folder / f"{source.id}-config"
    alone.mkdir()
    for name in ("config.json", "generation_config.json"):
        (alone / name).write_bytes((source.path / name).read_bytes())
    return resolve(alone, config_only=True)


def check_same(target: str, drafter: str | None, options: ExportOptions, folder: Path) -> None:
    """Export without the comparison and plan from the configurations: the same bytes."""
    names = [target] if drafter is None else [target, drafter]
    sources = [resolve(tiny_models.save(name, folder)) for name in names]
    out = folder / "engines"
    made = exporter.export(sources[0], sources[1:], out, dataclasses.replace(options, check=False))
    alone = [config_alone(source, folder) for source in sources]
    real = (out / DATA_FILE).stat().st_size
    least = plans.make(alone[0], alone[1:], options)
    exact = plans.make(alone[0], alone[1:], options, kept_int8(made, options.block_size))
    assert exact.nbytes == pytest.approx(real, rel=ALLOWED)
    at_most = least.nbytes + least.calibration_bytes
    assert least.nbytes * (1 - ALLOWED) <= real <= at_most * (1 + ALLOWED)
    check_described(made, exact)


def kept_int8(made: Manifest, block_size: int) -> dict[str, LinearFormat]:
    """What calibration of a 4-bit model decided, as the manifest has it."""
    eight = LinearFormat("blocks", bits=8, block_size=block_size)
    weights = [engine.weights for engine in made.engines.values() if engine.weights is not None]
    return {name: eight for one in weights for name in one.kept_int8}


def check_described(made: Manifest, planned: ExportPlan) -> None:
    """Engines, their files, their precision and their KV are those of the manifest."""
    assert {engine.name: engine.file for engine in planned.engines} == {
        name: engine.file for name, engine in made.engines.items()
    }
    assert {engine.name: engine.precision for engine in planned.engines} == {
        name: engine.precision for name, engine in made.engines.items()
    }
    item = 2 if planned.settings.dtype == "fp16" else 4
    for engine in planned.engines:
        spec = made.engines[engine.name]
        own = () if engine.name == "mtp_drafter" else spec.kv  # which binds the target's
        assert sum(use.token_bytes for use in engine.kv) == sum(
            2 * item * kv.heads * kv.head_size for kv in own
        )
        assert sum(use.layers for use in engine.kv) == len(own)


def test_as_many_bytes_as_an_export_of_a_small_model(tmp_path: Path) -> None:
    """With tables of sines, one layer kept in 8 bits, and a head that is also the embedding."""
    check_same("llama", None, ExportOptions(precision="int4"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "drafter", "precision"), PRECISE)
def test_as_many_bytes_as_an_export(
    target: str, drafter: str | None, precision: Precision, tmp_path: Path
) -> None:
    check_same(target, drafter, ExportOptions(precision=precision), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "drafter", "given"), OPTIONS, ids=str)
def test_options_change_what_they_change_in_an_export(
    target: str, drafter: str | None, given: dict[str, Any], tmp_path: Path
) -> None:
    check_same(target, drafter, ExportOptions(**{"precision": "int8"} | given), tmp_path)


def full(name: str, folder: Path, precision: Precision, **options: Any) -> ExportPlan:
    """The plan of a full-size shape."""
    target, drafter = shapes.configs(name)
    target.save_pretrained(folder / "target")
    sources = []
    if drafter is not None:
        drafter.save_pretrained(folder / "assistant")
        sources.append(resolve(folder / "assistant", config_only=True))
    given = ExportOptions(precision=precision, **options)
    return plans.make(resolve(folder / "target", config_only=True), sources, given)


def test_e2b_is_as_measured(tmp_path: Path) -> None:
    """README: 18.8 GB written, 0.60 GB of memory, 1.63 GB with the comparison."""
    made = full("gemma4-e2b", tmp_path, "fp32")
    assert made.nbytes == pytest.approx(18.8e9, rel=0.005)
    assert {use.kind: use.layers for use in made.kv} == {"full": 3, "sliding": 12}
    # 15 layers of one KV head: 3 of 512 and 12 of 256 values, keys and values, 4 bytes.
    assert sum(use.token_bytes for use in made.kv) == 2 * 4 * (3 * 512 + 12 * 256)
    costs = plan_costs.costs(made)
    assert costs.export_bytes == pytest.approx(0.6e9, rel=0.05)
    assert costs.kv_bytes == 4096 * sum(use.token_bytes for use in made.kv)
    assert costs.disk_bytes > made.nbytes
    assert costs.checkpoint_bytes == pytest.approx(2 * (4.63 + 0.078) * 1e9, rel=0.01)
    assert costs.seconds > 0


def test_the_largest_shape_is_planned_without_its_weights(tmp_path: Path) -> None:
    """DeepSeek-V3 in int8: a byte and an eighth for almost every weight, experts too."""
    made = full("deepseek-v3", tmp_path, "int8", max_context=4096)
    assert 1.125 < made.nbytes / (671.03e9 + 11.61e9) < 1.16
    assert [engine.name for engine in made.engines] == ["target", "mtp.0"]
    # Latent attention: 512 + 64 values a layer.
    assert {use.engine: use.token_bytes for use in made.kv} == {"target": 61 * 2304, "mtp.0": 2304}


def test_kv_grows_by_doubling_up_to_its_context(tmp_path: Path) -> None:
    made = full("qwen3-0.6b", tmp_path, "fp32", max_context=3000)
    token = 28 * 2 * 8 * 128 * 4
    for tokens, rows in ((1, 256), (256, 256), (257, 512), (2100, 3000), (9000, 3000)):
        assert plan_costs.kv_bytes(made, tokens) == rows * token


# The command.


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    target, _ = shapes.configs("qwen3-0.6b", 2)
    target.save_pretrained(tmp_path / "qwen")
    return tmp_path / "qwen"


def test_plan_as_json(config: Path) -> None:
    result = call(config, "--precision", "int4", "--max-context", 512, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["target"] == "qwen"
    assert data["engines"]["target"]["file"] == "target.onnx"
    assert data["engines"]["target"]["precision"] == "int4"
    assert data["bytes"] < data["bytes_at_most"] < 1.15 * data["bytes"]
    assert data["kv"] == [
        {
            "engine": "target",
            "kind": "full",
            "layers": 2,
            "token_bytes": 2 * 2 * 8 * 128 * 4,
            "max_context": 512,
        }
    ]
    assert data["costs"]["context"] == 512


def test_plan_for_people(config: Path) -> None:
    """Weights: 155.6 M of the table and 31.5 M of two layers, 9 bits each."""
    result = call(config, "--precision", "int8", "--early-exit", 1)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["engine", "file", "precision", "weights", "computes"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["front", "front.onnx", "int8"],
        ["back", "back.onnx", "int8"],
        ["head", "head.onnx", "int8"],
    ]
    assert lines[4].split() == ["stored", "once", "weights.data", "210", "MB"]
    said = {line[:18].strip() for line in lines[-4:]}
    assert said == {"memory to run", "memory to export", "disk to export", "time to export"}
    assert "\n\n" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message", "hint"),
    [
        (["{empty}"], 1, "no config.json in it", "save_pretrained"),
        (["{bert}"], 1, "model type 'bert' is not supported", "supported: llama, "),
        (["{qwen}", "--drafter", "{assistant}"], 1, "is no drafter of qwen: ", ""),
        (["{qwen}", "--mtp"], 1, "its configuration announces no MTP layers", ""),
        (["{qwen}", "--early-exit", "3"], 2, "early-exit", "give 1 to 2"),
        (["{qwen}", "--max-context", "99999"], 2, "has 40960 positions", "at most 40960"),
        (["{qwen}", "--precision", "auto"], 2, "'auto' is not one of", ""),
    ],
)
def test_plan_errors(
    arguments: list[str], code: int, message: str, hint: str, config: Path, tmp_path: Path
) -> None:
    _, assistant = shapes.configs("gemma4-e2b")
    assert assistant is not None
    assistant.save_pretrained(tmp_path / "assistant")
    for name in ("empty", "bert"):
        (tmp_path / name).mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    paths = {name: tmp_path / name for name in ("empty", "bert", "assistant", "qwen")}
    result = call(*(argument.format(**paths) for argument in arguments))
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert message in result.stderr
    assert hint in result.stderr


def test_a_plan_cannot_measure(config: Path) -> None:
    with pytest.raises(UsageError, match="auto is decided by measuring"):
        plans.make(resolve(config, config_only=True), [], ExportOptions(precision="auto"))
