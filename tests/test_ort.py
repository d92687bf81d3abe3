"""Opening an engine: what the manifest says of it is compared with the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toys
from toys import Toy, change, put

import specrun
from specrun import EngineError
from specrun.contract import DType


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return toys.write_folder(tmp_path / "engines", Toy(drafter=True))


@pytest.mark.parametrize(
    ("swapped", "says"),
    [
        (Toy(vocabulary=tuple("0123456789ab")), "'logits': must have shape .*10.*, has .*12"),
        (Toy(kv_dtype=DType.FLOAT16), "'past.0.key': must be float32, is float16"),
    ],
)
def test_an_engine_that_is_not_what_is_declared(tmp_path: Path, swapped: Toy, says: str) -> None:
    folder = toys.write_folder(tmp_path / "engines", Toy())
    toys.write_target(folder / "target.onnx", swapped)
    entry = toys.entry(folder, "target.onnx")
    change(folder, put("files", 0, "size", value=entry.size))
    change(folder, put("files", 0, "sha256", value=entry.sha256))
    with pytest.raises(EngineError, match=f"target.onnx: (in|out)put {says}"):
        specrun.load(folder)


def test_an_older_onnxruntime_says_what_to_install(folder: Path) -> None:
    change(folder, put("engines", "target", "requires", "onnxruntime", value="99.1"))
    with pytest.raises(EngineError, match=r"requires onnxruntime 99\.1 or newer") as caught:
        specrun.load(folder, verify="engine")
    assert caught.value.hint == "pip install -U 'onnxruntime>=99.1'"


def test_a_file_that_is_no_engine(folder: Path) -> None:
    (folder / "target.onnx").write_bytes(b"no engine")
    entry = toys.entry(folder, "target.onnx")
    change(folder, lambda data: (data["engines"].pop("mtp_drafter"), data["drafters"].clear()))
    change(folder, put("files", 0, "size", value=entry.size))
    change(folder, put("files", 0, "sha256", value=entry.sha256))
    with pytest.raises(EngineError, match=r"target\.onnx: does not load"):
        specrun.load(folder)


@pytest.mark.parametrize(
    ("flags", "loads"),
    [("fma avx avx2", False), ("avx2 avx512_vnni", True), ("avx2 avx_vnni", True)],
)
def test_a_processor_without_integer_products(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: str, loads: bool
) -> None:
    """An engine in w8a8 is refused where ONNX Runtime would compute it wrongly."""
    change(folder, put("engines", "target", "precision", value="w8a8"))
    read = Path.read_text

    def cpuinfo(path: Path, *arguments: Any, **options: Any) -> str:
        told = str(path) == "/proc/cpuinfo"
        return f"flags : {flags}\n" if told else read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", cpuinfo)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    if loads:
        specrun.load(folder, verify="engine").close()
        return
    with pytest.raises(EngineError, match=r"w8a8 needs 8-bit products .* \(VNNI\)") as caught:
        specrun.load(folder, verify="engine")
    assert caught.value.hint == "export with --precision int8 for this machine"
