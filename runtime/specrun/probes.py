"""What of the installation really works: each thing is tried in a process of its own."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from specrun.decode import decode
from specrun.reading import ReadingError, parse_json

SECONDS = 60  # for one of them: CUDA on a cold machine takes a while
MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
MAX_REASON = 300  # characters
SMI = ("name", "compute_cap", "driver_version", "memory.total")


@dataclass(frozen=True)
class Provider:
    """A provider of ONNX Runtime. ``why``: it does not run a model, and that is the reason."""

    name: str
    why: str | None = None


@dataclass(frozen=True)
class TensorRt:
    """A TensorRT that is installed. ``builds_for``: SMs for which it builds engines on a machine
    without them. ``why``: it does not load, and that is the reason."""

    name: str
    version: str = ""
    builds_for: tuple[int, ...] = ()
    why: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU of NVIDIA's. ``sm``: compute capability times ten. ``driver``: the driver's version,
    or that of the newest CUDA that it runs."""

    name: str
    sm: int
    driver: str
    memory_bytes: int


@dataclass(frozen=True)
class Gpus:
    """All GPUs, and what said so. ``source``: a package or program, empty where there is none."""

    found: tuple[Gpu, ...]
    source: str
    why: str | None = None


def try_provider(name: str) -> Provider:
    """Whether ONNX Runtime runs a model with the provider."""
    return Provider(name, _probe("provider", name).get("why"))


def try_tensorrt() -> tuple[TensorRt, ...]:
    """Every TensorRT whose package is installed."""
    return tuple(_tensorrt(name, module) for name, module in MODULES.items() if _there(module))


def find_gpus() -> Gpus:
    """By cuda-python where it is installed and finds a driver, else by nvidia-smi."""
    why = None
    if _there("cuda.bindings"):
        answer = _probe("gpus", "")
        why = answer.get("why")
        if why is None:
            return Gpus(tuple(decode(Gpu, gpu) for gpu in answer["gpus"]), "cuda-python")
    if shutil.which("nvidia-smi"):
        return _by_nvidia_smi()
    return Gpus((), "cuda-python" if why else "", why)


def _tensorrt(name: str, module: str) -> TensorRt:
    answer = _probe("tensorrt", module)
    if (why := answer.get("why")) is not None:
        return TensorRt(name, why=why)
    return TensorRt(name, str(answer["version"]), tuple(answer["builds_for"]))


def _by_nvidia_smi() -> Gpus:
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"]
    output, why = _run(command)
    found = [gpu for line in output.splitlines() if (gpu := _smi_line(line)) is not None]
    if not found and why is None:
        why = _short(output) or "it lists none"
    return Gpus(tuple(found), "nvidia-smi", None if found else why)


def _smi_line(line: str) -> Gpu | None:
    """``NVIDIA H200, 9.0, 570.86, 143771``, the memory in MiB."""
    name, *rest = (part.strip() for part in line.split(","))
    if len(rest) != 3 or not re.fullmatch(r"\d+\.\d", rest[0]) or not rest[2].isdigit():
        return None
    return Gpu(name, int(rest[0].replace(".", "")), rest[1], int(rest[2]) << 20)


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _probe(kind: str, name: str) -> dict[str, Any]:
    """What :mod:`specrun.probe` found; ``why`` where it did not come to an end."""
    # -P: a file in the working directory must not stand in for a module.
    output, why = _run([sys.executable, "-P", "-m", "specrun.probe", kind, name])
    try:
        found = parse_json(output.strip().rpartition("\n")[2])
    except ReadingError:
        return {"why": why or "nothing was found"}
    if not isinstance(found, dict):
        return {"why": "nothing was found"}
    if found.get("why") is not None:
        found["why"] = _short(f"{found['why']}: {why}" if why else str(found["why"]))
    return found


def _run(command: list[str]) -> tuple[str, str | None]:
    """What a command wrote, and a reason where it failed or complained."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"it did not end within {SECONDS} seconds"
    except OSError as error:
        return "", f"{command[0]}: {error.strerror or error}"
    complaint = _complaint(done.stderr.decode(errors="replace"))
    if done.returncode < 0:
        complaint = f"it crashed with signal {-done.returncode}"
    elif done.returncode and complaint is None:
        complaint = f"exit status {done.returncode}"
    return done.stdout.decode(errors="replace"), complaint


def _complaint(text: str) -> str | None:
    """The line of the talk of libraries that says most: of the library that was not found."""
    lines = [line for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if line.strip()]
    telling = [line for line in lines if "with error:" in line]
    chosen = (telling or lines[-1:])[:1]
    return _short(chosen[0].rpartition("with error:")[2]) if chosen else None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 3] + "..."
