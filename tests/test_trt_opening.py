"""Plans of TensorRT: which are refused and with what words, closing, forks, compiled kernels."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import Error
from fake_gpu import Gpu, Opened
from fake_trt import ICudaEngine
from toy_plans import CAPACITY, KEY, ToyPlan, write_plan
from toys import Toy

from specrun.errors import DeviceError, EngineError, UsageError

TOY = Toy(history_weight=3, modulus=7, max_context=CAPACITY)


def test_closing_frees_in_order_and_twice_is_once(gpu: Gpu, tmp_path: Path) -> None:
    opened = Opened(write_plan(tmp_path, TOY))
    run = opened.run(2, 1)
    assert gpu.library.made == ["runtime", "engine", "context", "context"]
    opened.session.close()
    assert gpu.library.freed == ["context", "context", "engine", "runtime"]
    opened.session.close()
    with pytest.raises(UsageError, match="the engine is closed"):
        run.run()
    with pytest.raises(UsageError, match="the engine is closed"):
        opened.run(2, 1)


def test_without_close_it_goes_with_the_last_reference(gpu: Gpu, tmp_path: Path) -> None:
    session = write_plan(tmp_path, TOY).open()
    del session
    assert gpu.library.freed == ["context", "context", "engine", "runtime"]
    gpu.cuda.check_clean()


def test_a_fork_frees_nothing(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(write_plan(tmp_path, TOY))
    run = opened.run(2, 1)
    calls = list(gpu.cuda.calls)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        with pytest.raises(UsageError, match="a fork of it"):
            run.run()
        with pytest.raises(UsageError, match="a fork of it"):
            opened.kv[KEY].read()
        opened.session.close()
        del run, opened
        gc.collect()
        assert gpu.cuda.calls == calls
        assert not gpu.library.freed
    gpu.cuda.broken = Error.cudaErrorIllegalAddress  # what is left is left on purpose


def test_kernels_are_compiled_once(gpu: Gpu, tmp_path: Path) -> None:
    """The next process has them from the user's cache; one that is refused is written anew."""
    made = write_plan(tmp_path, TOY)

    def runs() -> list[str]:
        gpu.library.compiled.clear()
        opened = Opened(made)
        opened.run(2, 1).run()
        opened.session.close()
        return list(gpu.library.compiled)

    assert runs() == ["target.1"]
    (file,) = (tmp_path / "cache" / "specrun" / "tensorrt_rtx").iterdir()
    assert file.stem == made.plan.sha256
    assert runs() == []
    file.write_bytes(b"other")
    assert runs() == ["target.1"]
    assert runs() == []
    file.unlink()
    file.parent.rmdir()
    file.parent.write_bytes(b"no folder")  # nothing can be written: it compiles again
    assert runs() == ["target.1"]


def test_nothing_is_printed(gpu: Gpu, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = write_plan(tmp_path, TOY)
    gpu.library.fails["deserialize_cuda_engine"] = "corrupt"
    with pytest.raises(EngineError, match=r"target.sm86.engine: does not load: corrupt") as caught:
        made.open()
    assert f"specexport build {tmp_path} --backend tensorrt-rtx" in str(caught.value.hint)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("create_execution_context", "profile prefill: no memory for a context"),
        ("set_runtime_cache", "the cache of compiled kernels cannot be used"),
    ],
)
def test_contexts_that_cannot_be_made(gpu: Gpu, tmp_path: Path, fails: str, message: str) -> None:
    gpu.library.fails[fails] = "no memory for a context"
    with pytest.raises(EngineError, match=message):
        write_plan(tmp_path, TOY).open()
    assert gpu.library.freed[-1] == "runtime"


def _tensor(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(tensor for tensor in data["tensors"] if tensor["name"] == name)


EDITS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("has no input 'wanted_rows'", lambda d: d["tensors"].remove(_tensor(d, "wanted_rows"))),
    ("input 'wanted' is not in", lambda d: _tensor(d, "wanted_rows").update(name="wanted")),
    ("has no output 'margin'", lambda d: d["tensors"].remove(_tensor(d, "margin"))),
    (
        "input 'odd' is not in the manifest",
        lambda d: d["tensors"].append(
            {"name": "odd", "mode": "INPUT", "shape": [1], "dtype": "FLOAT"}
        ),
    ),
    (
        "input 'tokens': must be INT64, is INT32",
        lambda d: _tensor(d, "tokens").update(dtype="INT32"),
    ),
    ("has no input 'tokens'", lambda d: _tensor(d, "tokens").update(mode="OUTPUT")),
    (
        r"output 'logits': must have shape \['batch', 'wanted', 10\], has \[-1, -1, 11\]",
        lambda d: _tensor(d, "logits").update(shape=["batch", "wanted", 11]),
    ),
    (
        "input 'past_length': must be on the device",
        lambda d: _tensor(d, "past_length").update(location="HOST"),
    ),
    (
        "output 'present.0.key' must be written over 'past.0.key', the plan writes it over nothing",
        lambda d: _tensor(d, "present.0.key").pop("alias"),
    ),
    ("must have 2 profiles, has 1", lambda d: d["profiles"].pop()),
    (
        r"profile decode of 'tokens' must be \[1, 1\]..\[1, 12\], is \[1, 1\]..\[1, 8\]",
        lambda d: d["profiles"][1].update(tokens=[[1, 1], [1, 8], [1, 8]]),
    ),
]


@pytest.mark.parametrize(("message", "edit"), EDITS)
def test_a_plan_must_be_what_the_manifest_says(
    gpu: Gpu, tmp_path: Path, message: str, edit: Any
) -> None:
    good = write_plan(tmp_path, TOY)
    data = json.loads(good.path.read_bytes())
    edit(data)
    path = tmp_path / "bad.engine"
    path.write_bytes(json.dumps(data).encode())
    with pytest.raises(EngineError, match=message):
        ToyPlan(path, good.plan, good.spec).open()
    assert gpu.library.freed == ["engine", "runtime"]


@pytest.mark.parametrize(
    ("device", "version", "message"),
    [
        ({"capability": (8, 9)}, "1.7.1.116", "was built for SM 86, NVIDIA RTX A2000 is SM 89"),
        ({}, "1.8.0.5", "was built by TensorRT-RTX 1.7.1.116, 1.8.0.5 is installed"),
    ],
)
def test_plans_of_elsewhere_never_reach_tensorrt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: Any, version: str, message: str
) -> None:
    gpu = Gpu.installed(monkeypatch, **device)
    monkeypatch.setattr(gpu.library, "__version__", version)
    with pytest.raises(EngineError, match=message) as caught:
        write_plan(tmp_path, TOY).open()
    assert f"specexport build {tmp_path} --backend tensorrt-rtx" in str(caught.value.hint)
    assert not gpu.library.made
    gpu.cuda.check_clean()


def test_a_plan_that_lies_of_its_device_is_refused_by_its_head(gpu: Gpu, tmp_path: Path) -> None:
    made = write_plan(tmp_path, TOY, edit=lambda data: data.update(capability=[9, 0]))
    with pytest.raises(EngineError, match=r"does not run here: TensorRT says UNSUPPORTED_CC"):
        made.open()
    made.path.write_bytes(b"garbage")
    with pytest.raises(EngineError, match="MALFORMED_ENGINE"):
        made.open()
    made.path.write_bytes(b"")
    with pytest.raises(EngineError, match="cannot be read"):
        made.open()
    assert "engine" not in gpu.library.made


def test_a_tensorrt_that_cannot_update_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu.installed(monkeypatch, "tensorrt")
    monkeypatch.delattr(ICudaEngine, "get_aliased_input_tensor")
    with pytest.raises(EngineError, match="cannot update KV buffers in place") as caught:
        write_plan(tmp_path, TOY, flavour="tensorrt").open()
    assert "10.15" in str(caught.value.hint)
    assert not gpu.cuda.memory


def test_no_gpu_no_driver_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = write_plan(tmp_path, TOY)
    Gpu.installed(monkeypatch, missing=Error.cudaErrorInsufficientDriver)
    with pytest.raises(
        DeviceError, match=r"no NVIDIA GPU can be used: cudaErrorInsufficientDriver"
    ):
        made.open()
    Gpu.installed(monkeypatch)
    with pytest.raises(DeviceError, match="there is no GPU 1, this machine has 1"):
        made.open(device=1)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(DeviceError, match=r"cuda-python: does not load"):
        made.open()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(DeviceError, match=r"package tensorrt_rtx does not load") as caught:
        made.open()
    assert caught.value.hint == "pip install 'specrun[tensorrt-rtx]'"
