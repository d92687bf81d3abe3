"""The environments of the peers: pinned packages, each set in a venv of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
STAMP = "installed.txt"  # what an environment holds; written last


@dataclass(frozen=True)
class Environment:
    """``steps``: package sets, installed one after the other. ``variables``: for building.

    ``optional``: has no wheel, so it needs a C++ compiler, and may fail.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    variables: dict[str, str] = field(default_factory=dict)
    optional: bool = False

    @property
    def stamp(self) -> str:
        lines = [" ".join(step) for step in self.steps]
        lines += [f"{name}={value}" for name, value in self.variables.items()]
        return "\n".join(lines) + "\n"


TORCH = ("torch==2.13.0",)  # first, else an open range takes a build for GPUs
# llama.cpp's AMX kernels end in an illegal instruction in its second thread; without them it works.
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"

ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(
            "transformers",
            (
                TORCH,
                ("transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0", "jinja2==3.1.6"),
            ),
        ),
        Environment(
            "genai",
            (
                TORCH,
                (
                    "onnxruntime-genai==0.18.0",
                    "onnxruntime==1.32.0",
                    "onnx==1.23.2",
                    "onnx-ir==1.1.0",
                    "transformers==5.24.0",
                ),
            ),
        ),
        Environment("openvino", (("openvino-genai==2026.4.1.0", "numpy==2.4.6"),)),
        Environment(
            "llama-cpp",
            (("llama-cpp-python==0.3.36",),),
            {"CFLAGS": NO_AMX, "CXXFLAGS": NO_AMX},
            optional=True,
        ),
    )
}


class SetupError(RuntimeError):
    """An environment cannot be made; the message says why."""


def python_of(folder: Path, name: str) -> Path | None:
    """The interpreter of an environment, or None where it is missing or holds other packages."""
    stamp = folder / name / STAMP
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != ENVIRONMENTS[name].stamp:
        return None
    return folder / name / "bin" / "python"


def variables(threads: int | None = None) -> dict[str, str]:
    """Of a process in an environment: no hub, and the threads for libraries that ask there."""
    changed = {
        **os.environ,
        "PYTHONPATH": str(SCRIPTS),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    changed.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        changed["OMP_NUM_THREADS"] = str(threads)
    return changed


def make(folder: Path, name: str, say: Callable[[str], None]) -> None:
    """Make the environment ``name`` anew in ``folder``. Raises SetupError."""
    environment = ENVIRONMENTS[name]
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(place)], {})
    for step in environment.steps:
        say(f"{name}: {' '.join(step)}")
        command = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", *step]
        _run(command, environment.variables)
    (place / STAMP).write_text(environment.stamp, encoding="utf-8")


def _run(command: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = [line for line in lines if not line.startswith(("WARNING", "[notice]"))]
        errors = [line for line in said if "error" in line.lower()] or said
        last = f": {errors[-1]}" if errors else ""
        raise SetupError(f"{command[1]} {command[2]}: status {done.returncode}{last}")
