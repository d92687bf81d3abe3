"""What the manifest says of plans: refused before TensorRT sees one, and what still opens."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fake_gpu import Gpu
from onnx_plans import PROVIDER, RTX, edit
from small_vocabulary import PROMPT

import specrun
from specrun import manifest as manifests
from specrun.errors import DeviceError, EngineError, FolderError
from specrun.manifest import MANIFEST

OpenEngine = Callable[..., specrun.Engine]
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "eos_token_ids": (), "do_sample": False}
PLAN, DRAFTER_PLAN = "target.sm86.engine", "mtp_drafter.sm86.engine"
BUILD = "specexport build {folder} --backend tensorrt-rtx"


def _plan(data: dict[str, Any], engine: str = "target") -> dict[str, Any]:
    plan: dict[str, Any] = data["engines"][engine]["plans"][0]
    return plan


# Release, flavour and device of a plan.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"version": "1.6.0.12"},
            "was built by TensorRT-RTX 1.6.0.12, 1.7.1.116 is installed, and a plan runs on the"
            " release that built it only",
        ),
        ({"compute_capability": 89}, "was built for SM 89, NVIDIA RTX A2000 is SM 86"),
        ({"flavour": "tensorrt"}, "is a plan of TensorRT, asked for is TensorRT-RTX"),
    ],
)
def test_plans_of_something_else(
    planned: Callable[..., Path], on_gpu: OpenEngine, gpu: Gpu, change: Any, message: str
) -> None:
    """The same folder opens on the CPU. PyTorch does not stand in unasked: it has no GPU here."""
    folder = planned("gemma4")
    edit(folder, lambda data: _plan(data).update(change))
    with pytest.raises(EngineError) as caught:
        on_gpu(folder, verify="engine")
    assert str(caught.value) == f"target: {PLAN} {message}"
    assert caught.value.hint == "build it here: " + BUILD.format(folder=folder)
    with pytest.raises(EngineError, match="and PyTorch cannot verify instead") as caught:
        on_gpu(folder)
    assert message in str(caught.value) and BUILD.format(folder=folder) in str(caught.value.hint)
    assert not gpu.library.made and not gpu.cuda.memory
    with specrun.load(folder, threads=1) as engine:
        assert len(engine.generate(PROMPT, **OPTIONS).tokens) == 6


def test_every_reason_is_told(planned: Callable[..., Path], on_gpu: OpenEngine, gpu: Gpu) -> None:
    folder = planned("gemma4")

    def two(data: dict[str, Any]) -> None:
        plans = data["engines"]["target"]["plans"]
        plans[0]["version"] = "1.6.0.12"
        plans.append(plans[0] | {"version": "1.7.1.116", "compute_capability": 75})

    edit(folder, two)
    with pytest.raises(EngineError, match=r"1\.6\.0\.12, .*; .* was built for SM 75"):
        on_gpu(folder, verify="engine")
    edit(folder, lambda data: data["engines"]["target"].update(plans=[]))
    with pytest.raises(EngineError, match="target: the folder has no plan of it") as caught:
        on_gpu(folder, verify="engine")
    assert BUILD.format(folder=folder) in str(caught.value.hint)
    assert not gpu.library.made


def test_a_folder_without_plans(
    trt_folder: Callable[[str], Path], on_gpu: OpenEngine, gpu: Gpu
) -> None:
    folder = trt_folder("gemma4") / "engines"
    with pytest.raises(EngineError, match="target: the folder has no plan of it") as caught:
        on_gpu(folder, verify="engine")
    assert BUILD.format(folder=folder) in str(caught.value.hint)
    assert not gpu.library.made


def test_a_folder_of_onnx_runtime(
    small_folder: Callable[[str], Path], on_gpu: OpenEngine, gpu: Gpu
) -> None:
    with pytest.raises(EngineError, match="are written for ONNX Runtime") as caught:
        on_gpu(small_folder("gemma4") / "engines")
    assert caught.value.hint == f"export them with specexport SOURCE --backend {RTX}"
    assert not gpu.library.made


def test_the_onnxruntime_that_an_engine_requires(
    planned: Callable[..., Path], on_gpu: OpenEngine
) -> None:
    """Nothing to TensorRT, which does without it."""
    folder = planned("gemma4")
    edit(folder, lambda d: d["engines"]["target"]["requires"].update(onnxruntime="99.1"))
    with pytest.raises(EngineError, match=r"requires onnxruntime 99\.1 or newer") as caught:
        specrun.load(folder, verify="engine")
    assert caught.value.hint == "pip install -U 'onnxruntime>=99.1'"
    assert on_gpu(folder).generate(PROMPT, **OPTIONS).stats.provider == PROVIDER


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"opset": 25}, "must be of opset 25 and IR version 11, is of opset 24 and IR version 11"),
        ({"ir_version": 9}, "must be of opset 24 and IR version 9, is of opset 24 and IR version"),
    ],
)
def test_versions_of_onnx_that_a_graph_has_not(
    planned: Callable[..., Path], on_gpu: OpenEngine, change: Any, message: str
) -> None:
    folder = planned("gemma4")
    edit(folder, lambda data: data["engines"]["target"]["requires"].update(change))
    with pytest.raises(EngineError, match=rf"target\.onnx: {message}") as caught:
        specrun.load(folder, verify="engine")
    assert caught.value.hint == manifests.REEXPORT
    assert on_gpu(folder).generate(PROMPT, **OPTIONS).stats.provider == PROVIDER


REFUSED: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    (
        r"engines\.target\.plans\[0\]: version must be numbers and dots, got 'newest'",
        lambda data: _plan(data).update(version="newest"),
    ),
    (
        r"engines\.target\.plans\[0\]: compute_capability must be in 10\.\.999, got 8",
        lambda data: _plan(data).update(compute_capability=8),
    ),
    (
        r"engines\.target\.plans\[0\]\.flavour: must be one of",
        lambda data: _plan(data).update(flavour="tensorrt-llm"),
    ),
    (
        r"engines\.target\.plans\[0\]: size and sha256 are not those of target\.sm86\.engine",
        lambda data: _plan(data).update(sha256="0" * 64),
    ),
    (
        r"engines\.target\.plans\[0\]: size and sha256 are not those of target\.sm86\.engine",
        lambda data: _plan(data).update(size=1),
    ),
    (
        r"files: 'other\.engine' is used and not listed",
        lambda data: _plan(data).update(file="other.engine"),
    ),
    (r"engines\.target\.plans\[0\]: .*\.\./", lambda data: _plan(data).update(file="../x.engine")),
    (
        r"engines\.target: plans: only an engine of fixed sizes has any",
        lambda data: data["engines"]["target"].update(fixed=None),
    ),
    (r"plans\[0\]: field must be one of .*, got 'more'", lambda data: _plan(data).update(more=1)),
]


@pytest.mark.parametrize(("message", "change"), REFUSED)
@pytest.mark.parametrize("device", ["cpu", RTX])
def test_a_manifest_that_cannot_be(
    planned: Callable[..., Path],
    on_gpu: OpenEngine,
    gpu: Gpu,
    device: str,
    message: str,
    change: Any,
) -> None:
    folder = planned("gemma4")
    edit(folder, change)
    with pytest.raises(FolderError, match=message) as caught:
        on_gpu(folder, device=device)
    assert str(folder / MANIFEST) in str(caught.value) and caught.value.hint
    assert not gpu.library.made


@pytest.mark.parametrize(
    ("engine", "change", "message"),
    [
        ("target", {"capacity": 32}, r"past\.0\.key': must have shape"),
        ("mtp_drafter", {"drafts": 4}, r"'noise': must have shape"),
    ],
)
def test_sizes_that_the_plan_has_not(
    planned: Callable[..., Path], on_gpu: OpenEngine, engine: str, change: Any, message: str
) -> None:
    folder = planned("gemma4")
    edit(folder, lambda data: data["engines"][engine]["fixed"].update(change))
    with pytest.raises(EngineError, match=message):
        on_gpu(folder, verify="engine").generate(PROMPT, strict=True, **OPTIONS)


# Files of plans.


def _missing(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_out(path: Path) -> None:
    outside = path.parent.parent / "outside.engine"
    shutil.move(path, outside)
    path.symlink_to(outside)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (_missing, "the manifest lists it, it is missing"),
    (_cut, r"must have \d+ bytes, has \d+"),
    (_empty, r"must have \d+ bytes, has 0"),
    (_changed, "changed since the export: sha256 must be"),
    (_directory, "is no regular file"),
    (_link_out, "leads out of the engine folder"),
    (_dangling, "is no regular file"),
    (_pipe, "is no regular file"),
]
IDS = [damage.__name__[1:] for damage, _ in DAMAGES]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=IDS)
def test_a_plan_of_the_target_that_is_not_whole(
    planned: Callable[..., Path], on_gpu: OpenEngine, gpu: Gpu, damage: Any, message: str
) -> None:
    """As with a graph, the folder is refused on every device."""
    folder = planned("gemma4")
    damage(folder / PLAN)
    for device in (RTX, "cpu"):
        with pytest.raises(FolderError, match=f"{PLAN}: {message}") as caught:
            on_gpu(folder, device=device)
        again = f"build it again: {BUILD.format(folder=folder)} --compute-capability 86"
        assert caught.value.hint == again
    assert not gpu.library.made


@pytest.mark.parametrize(("damage", "message"), DAMAGES[1:], ids=IDS[1:])
def test_a_plan_of_a_drafter_that_is_not_whole(
    planned: Callable[..., Path], on_gpu: OpenEngine, damage: Any, message: str
) -> None:
    folder = planned("gemma4")
    damage(folder / DRAFTER_PLAN)
    with pytest.raises(FolderError, match=f"{DRAFTER_PLAN}: {message}"):
        on_gpu(folder)


def test_a_plan_of_a_drafter_may_miss(planned: Callable[..., Path], on_gpu: OpenEngine) -> None:
    """As its graph may: what does not need it runs, its method says what is missing."""
    folder = planned("gemma4")
    (folder / DRAFTER_PLAN).unlink()
    engine = on_gpu(folder)
    want = engine.generate(PROMPT, method="plain", **OPTIONS).tokens
    with pytest.raises(EngineError, match=rf"{DRAFTER_PLAN}: cannot be read: No such") as caught:
        engine.generate(PROMPT, method="mtp-drafter", strict=True, **OPTIONS)
    cause = caught.value.__cause__
    assert isinstance(cause, EngineError) and BUILD.format(folder=folder) in str(cause.hint)
    warnings: list[str] = []
    got = engine.generate(PROMPT, method="mtp-drafter", on_warning=warnings.append, **OPTIONS)
    assert got.tokens == want and got.stats.mode == "fallback"
    assert len(warnings) == 1 and DRAFTER_PLAN in warnings[0]
    with specrun.load(folder, threads=1) as other:
        drafted = other.generate(PROMPT, method="mtp-drafter", strict=True, **OPTIONS)
        assert drafted.tokens == want and drafted.stats.drafted
    with pytest.raises(FolderError, match=f"{DRAFTER_PLAN}: the manifest lists it, it is missing"):
        manifests.read(folder)


def test_the_plan_of_another_folder(
    planned: Callable[..., Path], on_gpu: OpenEngine, gpu: Gpu
) -> None:
    folder, other = planned("gemma4"), planned("mtp")
    shutil.copyfile(other / PLAN, folder / PLAN)
    with pytest.raises(FolderError, match=f"{PLAN}: must have .* bytes, has"):
        on_gpu(folder)
    assert not gpu.library.made
    # Also where somebody made the manifest agree.
    blob = (folder / PLAN).read_bytes()
    new = {"size": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}

    def agree(data: dict[str, Any]) -> None:
        _plan(data).update(new)
        next(entry for entry in data["files"] if entry["path"] == PLAN).update(new)

    edit(folder, agree)
    with pytest.raises(EngineError, match=f"{PLAN}: (in|out)put '.*'"):
        on_gpu(folder, verify="engine")
    assert "context" not in gpu.library.made


def test_a_moved_folder_opens(planned: Callable[..., Path], on_gpu: OpenEngine) -> None:
    """The fake's plans have the path of their graph in them, real ones have not."""
    folder = planned("gemma4")
    moved = folder.with_name("moved")
    shutil.copytree(folder, moved)
    assert on_gpu(moved).generate(PROMPT, **OPTIONS).stats.provider == PROVIDER
    assert json.loads((moved / MANIFEST).read_text())["engines"]["target"]["plans"]


def test_another_tensorrt_is_not_installed(
    planned: Callable[..., Path], on_gpu: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody need install it to be told that the folder has no plan of it."""
    folder = planned("gemma4")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(DeviceError, match="the folder has plans of TensorRT-RTX only") as caught:
        on_gpu(folder, device="tensorrt", verify="engine")
    assert str(caught.value.hint).startswith("use --device tensorrt-rtx, or pip install")


def test_two_plans_for_one_gpu(planned: Callable[..., Path]) -> None:
    folder = planned("gemma4")

    def repeat(data: dict[str, Any]) -> None:
        data["engines"]["target"]["plans"] *= 2

    edit(folder, repeat)
    with pytest.raises(FolderError, match="one for each TensorRT and compute capability"):
        manifests.read(folder)
