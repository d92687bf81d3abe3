"""Imports run one way, and importing the lean half loads nothing heavy."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "numpy", "tokenizers", "jinja2")
SERVE = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client")
MAY_IMPORT = {
    "runtime/specrun": {"specrun"},
    "graphs/specgraphs": {"specrun", "specgraphs"},
    "export/specexport": {"specrun", "specgraphs", "specexport"},
    "export/optimum": {"specexport"},
}
OURS = {"specrun", "specgraphs", "specexport", "tests", "scripts"}
FOLDERS = {"runtime", "graphs", "export"}
NEVER_IN_RUNTIME = {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors"}


def loaded(code: str) -> set[str]:
    """Modules of a fresh interpreter after running ``code``."""
    code += "\nimport sys, json; sys.stderr.write(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stderr))


@pytest.mark.parametrize(
    "code",
    [
        "import specrun; dir(specrun); specrun.UsageError; specrun.GenerateOptions",
        "import specrun.contract, specrun.manifest, specrun.plans",
        "from specrun.cli import main; main(['--help'], standalone_mode=False)",
        "from specrun.cli import main; main(['run', '--help'], standalone_mode=False)",
        "from specrun.cli import main; main(['serve', '--help'], standalone_mode=False)",
        "from specrun.serve import ServeOptions; ServeOptions()",
    ],
)
def test_nothing_heavy_until_needed(code: str) -> None:
    assert not loaded(code) & {*HEAVY, *SERVE}


def test_running_loads_no_exporter() -> None:
    assert not loaded("import specrun; specrun.load") & {"torch", "transformers", "onnx"}


def test_only_the_server_needs_its_extra() -> None:
    assert not loaded("import specrun.pool, specrun.cli_serve") & set(SERVE)
    for path in sorted((ROOT / "runtime/specrun").rglob("*.py")):
        if path.parent.name != "serve":
            assert not imports(path) & set(SERVE), path


def test_tensorrt_is_loaded_with_a_plan() -> None:
    """Not with the runner, whose packages need not be there."""
    assert not loaded("import specrun.trt_session") & {"tensorrt", "tensorrt_rtx", "cuda"}


def test_import_time() -> None:
    """Best of three, in milliseconds: below 100 (measured: about 15)."""
    times = []
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "import specrun"],
            capture_output=True,
            text=True,
            check=True,
        )
        line = next(line for line in run.stderr.splitlines() if line.endswith(" specrun"))
        times.append(int(line.split("|")[1]) / 1000)
    assert min(times) < 100


def imports(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        found = imports(path)
        assert not found & (OURS - MAY_IMPORT[package]), path
        assert not found & FOLDERS, path
        if package == "runtime/specrun":
            assert not found & NEVER_IN_RUNTIME, path


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_only_the_cli_writes_to_the_terminal(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.name == "cli.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            prints = isinstance(node, ast.Name) and node.id == "print"
            assert not prints, f"{path}: print"


def test_all_is_what_there_is() -> None:
    import specrun

    assert sorted(specrun.__all__) == specrun.__all__ == dir(specrun)
    for name in specrun.__all__:
        assert getattr(specrun, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = specrun.nothing


def test_version_is_the_distribution() -> None:
    import specrun

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.*)"$', text, re.M)
    assert found is not None and found[1] == specrun.__version__
