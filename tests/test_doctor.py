"""What specrun doctor finds, on machines that have none of it and, replaced, on some that do."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specrun import probe, probes
from specrun.cli import main
from specrun.doctor import Report, examine, lines
from specrun.probes import Gpu, Gpus, Provider, TensorRt, find_gpus, try_provider, try_tensorrt

Modules = Callable[[str, str], None]
SMI_LINE = "NVIDIA H200, 9.0, 570.86.15, 143771"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Modules:
    """``modules(name, code)``: a module that processes of this test find before any other."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``program(script)``: nvidia-smi, a shell script."""

    def write(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return write


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    there = probes._there
    monkeypatch.setattr(probes, "_there", lambda name: name not in names and there(name))


def test_this_machine() -> None:
    report = examine()
    assert "CPUExecutionProvider" in report.providers
    assert report.problems == () and report.threads >= 1
    shown = lines(report)
    assert list(report.versions)[:3] == ["specrun", "python", "onnxruntime"]
    assert shown["onnxruntime"] == report.versions["onnxruntime"]


def test_as_json() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert set(data) == set(Report.__dataclass_fields__)
    assert {"tensorrt", "tensorrt-rtx", "cuda-python", "torch"} <= data["versions"].keys()
    assert set(data["gpus"]) == {"found", "source", "why"}


def test_a_machine_with_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "tensorrt", "tensorrt_rtx", "cuda.bindings")
    monkeypatch.setattr("specrun.probes.shutil.which", lambda name: None)
    assert try_tensorrt() == ()
    assert find_gpus() == Gpus((), "")
    assert lines(examine())["GPUs"] == "none found"


def test_providers() -> None:
    assert try_provider("CPUExecutionProvider") == Provider("CPUExecutionProvider")
    why = try_provider("CUDAExecutionProvider").why
    assert why is not None and "would run on CPUExecutionProvider instead" in why


def test_a_provider_whose_library_is_missing(modules: Modules) -> None:
    """onnxruntime says which library on stderr, in colour, and goes on with the CPU."""
    modules(
        "onnxruntime",
        "import sys\n"
        "class SessionOptions: pass\n"
        "class InferenceSession:\n"
        "    def __init__(self, *_, **__):\n"
        "        print('\\x1b[1;31m[E:onnxruntime] Failed to load library lib_cuda.so with error:"
        " libcudnn.so.9: cannot open shared object file\\x1b[m', file=sys.stderr)\n"
        "        print('Please follow the guide', file=sys.stderr)\n"
        "    def get_providers(self): return ['CPUExecutionProvider']\n",
    )
    want = "onnxruntime would run on CPUExecutionProvider instead: libcudnn.so.9: cannot open"
    assert try_provider("CUDAExecutionProvider").why == f"{want} shared object file"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise OSError('libnvinfer.so.11: cannot open')", "OSError: libnvinfer.so.11: cannot"),
        ("import os; os.abort()", "it crashed with signal 6"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import time; time.sleep(60)", "it did not end within 2 seconds"),
        ("raise SystemExit", "nothing was found"),
        ("print('hello')", "AttributeError"),
    ],
)
def test_a_tensorrt_that_does_not_load(
    modules: Modules, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    without(monkeypatch, "tensorrt_rtx")
    monkeypatch.setattr(probes, "SECONDS", 2)
    modules("tensorrt", code)
    (found,) = try_tensorrt()
    assert found.name == "tensorrt" and found.version == ""
    assert found.why is not None and found.why.startswith(why)


def test_a_tensorrt_that_loads(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "tensorrt_rtx")
    modules(
        "tensorrt",
        "print('talk')\n__version__ = '11.4'\nclass ComputeCapability: SM120 = SM75 = NONE = 1",
    )
    assert try_tensorrt() == (TensorRt("tensorrt", "11.4", (75, 120)),)


def test_gpus_by_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver(cuInit=0))
    found = probe.gpus("")["gpus"]
    assert found == [{"name": "A GPU", "sm": 90, "driver": "CUDA 13.1", "memory_bytes": 1 << 34}]
    monkeypatch.setattr(probes, "_there", lambda name: True)
    monkeypatch.setattr(probes, "_probe", lambda kind, name: {"gpus": found})
    assert find_gpus() == Gpus((Gpu("A GPU", 90, "CUDA 13.1", 1 << 34),), "cuda-python")
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver(cuInit=100))
    with pytest.raises(RuntimeError, match="cuInit: CUDA_ERROR_NO_DEVICE"):
        probe.gpus("")


class Status(int):
    name = "CUDA_ERROR_NO_DEVICE"


def driver(cuInit: int) -> Any:
    """The functions of cuda.bindings.driver that are used, of a machine with one GPU."""
    major, minor = "major", "minor"
    values = {"major": 9, "minor": 0}
    return types.SimpleNamespace(
        CUdevice_attribute=types.SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=major,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=minor,
        ),
        cuInit=lambda flags: (Status(cuInit),),
        cuDriverGetVersion=lambda: (Status(0), 13010),
        cuDeviceGetCount=lambda: (Status(0), 1),
        cuDeviceGet=lambda index: (Status(0), index),
        cuDeviceGetName=lambda size, device: (Status(0), b"A GPU".ljust(size, b"\0")),
        cuDeviceGetAttribute=lambda which, device: (Status(0), values[which]),
        cuDeviceTotalMem=lambda device: (Status(0), 1 << 34),
    )


def test_gpus_by_nvidia_smi(
    program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "cuda.bindings")
    program(f"echo '{SMI_LINE}'; echo '{SMI_LINE}'")
    gpu = Gpu("NVIDIA H200", 90, "570.86.15", 143771 << 20)
    assert find_gpus() == Gpus((gpu, gpu), "nvidia-smi")
    shown = lines(examine())
    assert shown["GPU 1"] == "NVIDIA H200, SM 90, driver 570.86.15, 140.4 GiB"
    assert "GPUs" not in shown


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'No devices were found'; exit 6", "exit status 6"),
        ("echo 'couldn'\"'\"'t talk to the driver' >&2; exit 9", "couldn't talk to the driver"),
        ("echo 'H200, [N/A], 570, [N/A]'", "H200, [N/A], 570, [N/A]"),
        ("true", "it lists none"),
    ],
)
def test_an_nvidia_smi_that_fails(
    program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    without(monkeypatch, "cuda.bindings")
    program(script)
    assert find_gpus() == Gpus((), "nvidia-smi", why)


def test_nothing_in_the_working_directory_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert try_provider("CPUExecutionProvider").why is None


def test_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(
        {"specrun": "1.0", "tensorrt": None},
        ("CPUExecutionProvider",),
        (Provider("CUDAExecutionProvider", "libcudnn.so.9: cannot open"),),
        (
            TensorRt("tensorrt", why="OSError: no libnvinfer"),
            TensorRt("tensorrt-rtx", "1.7", (89,)),
        ),
        Gpus((), "cuda-python", "no driver"),
        2,
        ("a problem",),
    )
    assert lines(report) == {
        "specrun": "1.0",
        "tensorrt": "not installed",
        "providers": "CPUExecutionProvider",
        "CUDAExecutionProvider": "does not load: libcudnn.so.9: cannot open",
        "engines of tensorrt": "does not load: OSError: no libnvinfer",
        "engines of tensorrt-rtx": "1.7 loads, builds for SM 89",
        "GPUs": "none found (cuda-python: no driver)",
        "threads": "2",
    }
    monkeypatch.setattr("specrun.doctor.examine", lambda: report)
    result = CliRunner().invoke(main, ["doctor"])
    assert (result.exit_code, result.stderr) == (1, "Error: a problem\n")
