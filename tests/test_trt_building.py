"""``specexport build``: the folder changes at once or not at all, and only what must is built.

Most of it with plans of the fake, which take no time; the ends with TensorRT for RTX itself.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import pytest

pytest.importorskip("torch")

import small_vocabulary
from click.testing import CliRunner
from onnx_plans import Workshop, edit
from small_vocabulary import ENGINES

import specrun.cli
from specexport import cli, exporter
from specexport.card import CARD
from specexport.errors import ExportError
from specexport.options import ExportOptions
from specexport.sources import resolve
from specexport.trt import build_manifest, building, flavours
from specexport.trt.build_manifest import BUILD_MANIFEST, NO_PLAN
from specrun import manifest as manifests
from specrun.errors import DeviceError, EngineError, FolderError
from specrun.manifest import MANIFEST
from specrun.tuning import TUNING

PLAN, OTHER_PLAN, DRAFTER_PLAN = (
    "target.sm86.engine",
    "target.sm89.engine",
    "mtp_drafter.sm86.engine",
)


@pytest.fixture
def folder(trt_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A target and a drafter, of which no plan is built; alone in its parent."""
    out = tmp_path / "alone" / "engines"
    shutil.copytree(trt_folder("gemma4") / ENGINES, out)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def alone(folder: Path) -> None:
    """Nothing is left beside it."""
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def sound(folder: Path) -> list[str]:
    """Every file is listed with its hash and no other is there; the plans' files."""
    made = manifests.read(folder, integrity="full")
    names = {entry.path for entry in made.files}
    assert names | {MANIFEST, CARD} == set(contents(folder)) - {TUNING}
    assert BUILD_MANIFEST in names
    assert {one.spec.file: one.spec for one in build_manifest.read(folder).built} == made.plans
    return sorted(made.plans)


# What is built, and what stays.


def test_a_first_build(folder: Path, workshop: Workshop) -> None:
    edit(folder, lambda data: data["notes"].append(f"{NO_PLAN} (no GPU); finish on the device"))
    edit(folder, lambda data: data["notes"].append("something else"))
    before = manifests.read(folder)
    stages: list[tuple[str, int, int]] = []
    made, built = workshop.build(folder, progress=lambda *stage: stages.append(stage))
    assert sorted(built) == sound(folder) == [DRAFTER_PLAN, PLAN]
    assert stages == [("build", 0, 2), ("build", 1, 2), ("build", 2, 2)]
    assert made == manifests.read(folder)
    assert made.notes == ("something else",)
    assert before.notes != made.notes and before.files != made.files
    for name in ("target", "tokenizer", "generation", "drafters", "versions"):
        assert getattr(made, name) == getattr(before, name)
    alone(folder)


def test_a_model_card_goes_along(folder: Path, workshop: Workshop) -> None:
    """Also one that somebody changed, which an export would not replace."""
    (folder / CARD).write_text("my own words")
    workshop.build(folder)
    assert sound(folder) == [DRAFTER_PLAN, PLAN]
    assert (folder / CARD).read_text() == "my own words"
    alone(folder)


def test_a_second_build_does_nothing(folder: Path, workshop: Workshop) -> None:
    workshop.build(folder)
    before, inode = contents(folder), (folder / PLAN).stat().st_ino
    _, built = workshop.build(folder)
    assert not built and contents(folder) == before
    assert (folder / PLAN).stat().st_ino == inode  # not even copied
    alone(folder)


def test_another_device_is_added(folder: Path, workshop: Workshop) -> None:
    workshop.build(folder)
    before = contents(folder)
    made, built = workshop.build(folder, 89)
    assert sorted(built) == ["mtp_drafter.sm89.engine", OTHER_PLAN]
    assert sound(folder) == sorted([*built, PLAN, DRAFTER_PLAN])
    assert contents(folder)[PLAN] == before[PLAN]
    assert [plan.compute_capability for plan in made.engines["target"].plans] == [86, 89]
    made, built = workshop.build(folder, 89, 75, 86)
    assert sorted(built) == ["mtp_drafter.sm75.engine", "target.sm75.engine"]
    before = contents(folder)
    _, built = workshop.build(folder, 86)  # of several: the record keeps the others
    assert not built and contents(folder) == before
    assert build_manifest.read(folder).compute_capabilities == (75, 86, 89)


def test_both_tensorrts_in_a_folder(
    folder: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans for one GPU, side by side: none takes the other's place."""
    workshop.build(folder)
    before = contents(folder)
    made, built = Workshop(monkeypatch, "tensorrt").build(folder)
    assert sorted(built) == ["mtp_drafter.sm86.plan", "target.sm86.plan"]
    assert [plan.flavour for plan in made.engines["target"].plans] == ["tensorrt", "tensorrt_rtx"]
    assert sound(folder) == sorted([*built, PLAN, DRAFTER_PLAN])
    assert contents(folder)[PLAN] == before[PLAN]


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "directory", "dangling"])
def test_a_plan_that_is_not_whole_is_built_again(
    folder: Path, workshop: Workshop, damage: str
) -> None:
    workshop.build(folder)
    before, plan = contents(folder), folder / PLAN
    if damage == "cut":
        plan.write_bytes(before[PLAN][:-1])
    elif damage == "changed":
        plan.write_bytes(before[PLAN].replace(b"INPUT", b"input"))
    else:
        plan.unlink()
    if damage == "directory":
        plan.mkdir()
    if damage == "dangling":
        plan.symlink_to("nowhere")
    _, built = workshop.build(folder)
    assert built == [PLAN] and contents(folder) == before
    assert sound(folder) and not plan.is_symlink()


def test_a_plan_that_stays_must_be_whole(folder: Path, workshop: Workshop) -> None:
    """It was of another device, and would be listed with the hash of what is there now."""
    workshop.build(folder, 86, 89)
    whole = (folder / OTHER_PLAN).read_bytes()
    (folder / OTHER_PLAN).write_bytes(whole.replace(b"8", b"9"))
    before = contents(folder)
    with pytest.raises(
        FolderError, match=f"{OTHER_PLAN}: the plan was changed after it was built"
    ) as caught:
        workshop.build(folder, 86)
    assert "--compute-capability 89" in str(caught.value.hint)
    assert contents(folder) == before
    _, built = workshop.build(folder, 86, 89)
    assert built == [OTHER_PLAN] and sound(folder) and (folder / OTHER_PLAN).read_bytes() == whole


def test_other_profiles_build_again(
    folder: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.build(folder)
    with monkeypatch.context() as patch:
        patch.setattr(building, "MAX_DRAFT", 7)
        made, built = workshop.build(folder)
    assert built == [PLAN]  # the drafter's runs have one size
    assert made.engines["target"].plans[0].profiles[-1].inputs["tokens"].max == (1, 8)


def test_the_tuning_file_stays(folder: Path, workshop: Workshop) -> None:
    (folder / TUNING).write_text("{}", encoding="utf-8")
    workshop.build(folder)
    assert (folder / TUNING).read_text(encoding="utf-8") == "{}" and sound(folder)


def test_hard_links_of_the_old_folder_do_not_change(folder: Path, workshop: Workshop) -> None:
    """Files are shared between the old and the new folder, and never written in place."""
    workshop.build(folder)
    kept = folder.parent.parent / "kept"
    shutil.copytree(folder, kept, copy_function=os.link)
    before = contents(kept)
    (folder / PLAN).unlink()
    (folder / PLAN).write_bytes(b"damaged")
    _, built = workshop.build(folder, 86, 89)
    assert PLAN in built and contents(kept) == before
    assert manifests.read(kept, integrity="full")
    weights = "weights.data"
    assert (folder / weights).stat().st_ino == (kept / weights).stat().st_ino


def test_a_disk_without_links(
    folder: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    workshop.build(folder)
    assert sound(folder)


def test_by_another_name(folder: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``.``, with ``..`` in it, and through a link."""
    link = folder.parent.parent / "link"
    link.symlink_to(folder)
    _, built = workshop.build(link)
    assert len(built) == 2 and link.is_symlink() and sound(folder)
    monkeypatch.chdir(folder)
    for capability, name in ((89, "."), (75, "../engines")):
        workshop.build(Path(name), capability)
        os.chdir(folder)  # which is another one now
        assert f"target.sm{capability}.engine" in sound(folder)
    alone(folder)


# All or nothing.


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (EngineError("TensorRT does not build the graph: no"), EngineError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(143), SystemExit),
        (OSError(errno.ENOSPC, "No space left on device"), ExportError),
    ],
)
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("built_before", [False, True])
def test_a_failure_leaves_the_folder_as_it_was(
    folder: Path, workshop: Workshop, built_before: bool, after: int, error: Any, raised: Any
) -> None:
    if built_before:
        workshop.build(folder)
    before = contents(folder)
    with pytest.raises(raised):
        workshop.build(folder, 89, fails_at={after: error})
    assert contents(folder) == before
    alone(folder)
    workshop.build(folder, 89)
    assert sound(folder)


def test_files_that_are_not_ours(folder: Path, workshop: Workshop) -> None:
    """They would be gone with the old folder."""
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    before = contents(folder)
    with pytest.raises(ExportError, match=r"holds notes\.txt"):
        workshop.build(folder)
    assert contents(folder) == before
    alone(folder)


@pytest.mark.parametrize("name", ["target.onnx", "weights.data", "build.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_anything_else_must_be_whole(
    folder: Path, workshop: Workshop, name: str, damage: str
) -> None:
    workshop.build(folder)
    if damage == "missing":
        (folder / name).unlink()
    else:
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(bytes(data))
    before = contents(folder)
    with pytest.raises(FolderError, match=re.escape(name)):
        workshop.build(folder)
    assert contents(folder) == before
    alone(folder)


def test_folders_that_cannot_be_built(
    small_folder: Callable[[str], Path], workshop: Workshop, tmp_path: Path
) -> None:
    theirs = small_folder("gemma4") / ENGINES
    with pytest.raises(ExportError, match="its graphs are written for ONNX Runtime") as caught:
        workshop.build(theirs)
    assert caught.value.hint == "export them with specexport SOURCE --backend tensorrt-rtx"
    with pytest.raises(FolderError, match="no such folder"):
        workshop.build(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FolderError, match=r"no manifest\.json in it"):
        workshop.build(tmp_path / "empty")


@pytest.mark.slow
def test_exporting_over_it(
    folder: Path, workshop: Workshop, trt_folder: Callable[[str], Path]
) -> None:
    workshop.build(folder)
    source = resolve(trt_folder("gemma4") / "gemma4")
    exporter.export(source, None, folder, ExportOptions(check=False))
    made = manifests.read(folder, integrity="full")
    assert not made.plans and {BUILD_MANIFEST, PLAN}.isdisjoint(contents(folder))
    alone(folder)


# The command, with TensorRT for RTX itself.


@pytest.fixture
def real(once: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny Llama in fp16 with a plan for SM 86."""
    needs.tensorrt_rtx()

    def make(path: Path) -> None:
        pair = small_vocabulary.Pair("llama")
        chosen: dict[str, Any] = {"backend": "tensorrt-rtx", "precision": "fp16", "check": False}
        small_vocabulary.export(pair, path, compute_capabilities=(86,), **chosen)

    out = tmp_path / "alone" / "engines"
    shutil.copytree(once("small-vocabulary-rtx-llama", make) / ENGINES, out)
    return out


def build(folder: Path, *arguments: str) -> Any:
    given = ["build", str(folder), "--backend", "tensorrt-rtx", *arguments]
    return CliRunner().invoke(cli.main, given)


def test_the_command(real: Path) -> None:
    before = contents(real)
    assert sound(real) == [PLAN]
    same = build(real, "--compute-capability", "8.6", "-q")
    assert (same.exit_code, same.stderr) == (0, "")
    assert re.fullmatch(
        r"target\.sm86\.engine  \d+\.\d MB  TensorRT-RTX [\d.]+, SM 86\n", same.stdout
    )
    assert contents(real) == before
    more = build(real, "--compute-capability", "sm89", "--compute-capability", "86", "--json")
    plans = json.loads(more.stdout)["plans"]
    assert [plan["compute_capability"] for plan in plans] == [86, 89]
    assert {plan["sha256"] for plan in plans} == {
        plan.sha256 for plan in manifests.read(real).plans.values()
    }
    assert sound(real) == [PLAN, OTHER_PLAN] and contents(real)[PLAN] == before[PLAN]
    (real / PLAN).write_bytes(b"damaged")
    assert build(real, "--compute-capability", "86", "-q").exit_code == 0
    assert contents(real)[PLAN] == before[PLAN]  # the same bytes from the same graph
    shown = CliRunner().invoke(specrun.cli.main, ["inspect", str(real), "--integrity", "full"])
    assert shown.exit_code == 0
    assert "TensorRT-RTX" in shown.stdout and "SM 89" in shown.stdout
    checked = CliRunner().invoke(cli.main, ["check", str(real)])
    assert checked.exit_code == 0, checked.output
    assert "sound: blocks and single rows differ by" in checked.stdout
    alone(real)


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ("9.0", 1, "does not build for compute capability 90 here\nhint: it builds for 75, 80, 86"),
        (
            "sm90",
            1,
            "does not build for compute capability 90 here\nhint: it builds for 75, 80, 86",
        ),
        ("fast", 2, "'fast' is no compute capability; write it as 89 or 8.9"),
        ("8", 2, "'8' is no compute capability; write it as 89 or 8.9"),
        ("", 2, "'' is no compute capability; write it as 89 or 8.9"),
    ],
)
def test_devices_that_are_none(real: Path, given: str, code: int, message: str) -> None:
    before = contents(real)
    said = build(real, "--compute-capability", given)
    assert said.exit_code == code and message in said.stderr and not said.stdout
    assert contents(real) == before
    alone(real)


def test_without_a_device_one_must_be_named(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise DeviceError("device: no NVIDIA GPU can be used: cudaErrorNoDevice")

    monkeypatch.setattr("specexport.trt.flavours.present_capability", none)
    said = build(real)
    assert said.exit_code == 1
    assert "no compute capability was given to build for" in said.stderr
    assert "give --compute-capability, one of 75, 80, 86, 89" in said.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_killed(real: Path, number: signal.Signals) -> None:
    """The folder is as it was; what a SIGKILL leaves beside it, the next build removes."""
    before = contents(real)
    command = [sys.executable, "-c", "from specexport.cli import main; main()", "build", str(real)]
    command += ["--quiet", "--backend", "tensorrt-rtx", "--compute-capability", "75"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        _wait_for(lambda: bool(list(real.parent.glob(".engines.*.partial/target.onnx"))))
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert contents(real) == before
    if number == signal.SIGKILL:
        assert len(list(real.parent.iterdir())) == 2
        assert build(real, "--compute-capability", "86").exit_code == 0
    alone(real)


def _wait_for(there: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not begin"
        time.sleep(0.01)


def test_a_gpu_that_tensorrt_does_not_build_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the graphs, and says why there is no plan; another one may be asked for."""
    monkeypatch.setattr(flavours, "present_capability", lambda: 90)
    reason = building.can_build(building.Asked("tensorrt_rtx"))
    assert reason is not None and "does not build for compute capability 90" in reason
    assert building.can_build(building.Asked("tensorrt_rtx", (89,))) is None
    with pytest.raises(DeviceError, match="compute capability 90"):
        building.can_build(building.Asked("tensorrt_rtx", (90,)))
