"""The check of a GPU, without one: its checks pass on the CPU, and see faults that are planted.

What a GPU computes, only the script itself can tell, on a machine that has one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import gpu_check
import gpu_kit
import gpu_mid
import gpu_open
import torch
from fake_gpu import Gpu as FakeGpu
from gpu_open import Machine
from gpu_parts import PARTS, Place
from gpu_torch_ops import attention, dequantize_linear, gather_nd, tensor_scatter, unpack
from gpu_verdict import FAILED, NOT_HERE, PASSED, Verdict
from onnx_plans import Workshop

from specrun.drafters.mtp import MtpDrafter
from specrun.kv import KvBuffers
from specrun.probes import Gpu, Gpus, TensorRt

# pytest's log handler would get every shape that torch traces, thousands of lines per export.
logging.getLogger("torch.__trace").disabled = True

RECIPE = "gemma4"  # a drafter that reads the target's KV, and a window
CPU = Machine("cpu", None)
H200 = Machine("cuda", Gpu("NVIDIA H200", 90, "580.1", 1 << 37))
SMALL = gpu_mid.Mid(layers=1, draft_layers=1, hidden=64, heads=4, inner=128, vocabulary=384)


@pytest.fixture(scope="module")
def kit(once: Callable[..., Path]) -> Path:
    """One recipe, in both dialects."""

    def make(folder: Path) -> None:
        gpu_kit.prepare(folder, [RECIPE], ["ort-fp32", "trt-fp16"])

    return once("gpu-kit", make)


@pytest.fixture
def own_kit(kit: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(kit, tmp_path / "kit"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Verdict]:
    """``run(part, kit, machine=the CPU)``: the part in this process."""

    def make(name: str, kit: Path, machine: Machine = CPU) -> Verdict:
        return gpu_check.run_part(name, Place(machine, kit, tmp_path / "work"))

    (tmp_path / "work").mkdir()
    return make


def main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], Any]:
    """Exit status, lines of the table, and the JSON behind them."""
    status = gpu_check.main(arguments)
    *lines, last = capsys.readouterr().out.splitlines()
    return status, lines, json.loads(last)


# Without a GPU.


def test_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_open, "find_gpus", lambda: Gpus((), "nvidia-smi", "no devices"))
    status, lines, said = main(capsys)
    assert status == 0 and not said["failed"]
    assert [part["part"] for part in said["parts"]] == list(PARTS)
    assert {part["verdict"] for part in said["parts"]} == {NOT_HERE}
    assert lines[0].split("  ")[-1] == "not available here (no GPU was found)"
    assert "  nvidia-smi: no devices" in lines


def test_packages_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_open, "_installed", lambda name: name == "torch")
    verdicts = gpu_check.check(None, H200, list(PARTS)[1:], 60, keep=tmp_path)
    reasons = {verdict.part: verdict.reasons[0] for verdict in verdicts}
    assert {verdict.verdict for verdict in verdicts} == {NOT_HERE}
    assert reasons["onnxruntime cuda"] == "not installed: onnxruntime"
    assert reasons["tensorrt-rtx fp16"] == "not installed: tensorrt_rtx, cuda.bindings"
    assert reasons["torch graphs"].startswith("nothing to run: not installed: transformers, onnx")
    assert reasons["torch graphs"].endswith("give --from with a folder that --prepare made")


def test_tensorrt_rtx_builds_for_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    rtx = TensorRt("tensorrt-rtx", "1.7.1", (75, 80, 86, 89, 120))
    monkeypatch.setattr(gpu_open, "_installed", lambda name: True)
    monkeypatch.setattr(gpu_open, "try_tensorrt", lambda: (rtx, TensorRt("tensorrt", "10.15")))
    why = gpu_open.tensorrt_missing(H200, "tensorrt_rtx")
    shown = gpu_check.line(Verdict("tensorrt-rtx fp16", NOT_HERE, (str(why),)))
    assert "not available here (TensorRT-RTX does not build for SM 90)" in shown
    assert gpu_open.tensorrt_missing(H200, "tensorrt") is None


def test_from_a_folder_without_a_kit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(["--from", str(tmp_path)])
    assert stopped.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"--from: {tmp_path} has no kit.json; make one with --prepare {tmp_path}")


# The same checks on the CPU.


@pytest.mark.parametrize(
    "name",
    [
        "torch graphs",
        "onnxruntime cuda",
        "onnxruntime cuda, TensorRT dialect",
        "torch verification",
    ],
)
def test_a_part_passes(run: Callable[..., Verdict], kit: Path, name: str) -> None:
    verdict = run(name, kit)
    assert (verdict.verdict, verdict.reasons) == (PASSED, ())
    if name != "torch verification":  # whose drafter would need an engine on the same device
        assert 0 < verdict.figures["mtp-drafter acceptance"] < 1
    else:
        assert verdict.figures["worst logit (relative)"] > 0  # not the reference itself


def test_the_command(
    capsys: pytest.CaptureFixture[str], kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts in processes of their own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    only = ("--only", "onnxruntime cuda, exact", "--only", "tensorrt-rtx fp16")
    status, lines, said = main(capsys, "--from", str(kit), "--device", "cpu", *only)
    exact, rtx = said["parts"]
    assert (status, exact["verdict"], exact["reasons"]) == (0, PASSED, [])
    assert exact["seconds"] > 0 and lines[0].endswith("  passed")
    assert rtx["reasons"] == ["TensorRT-RTX runs on a GPU only"]


def test_plans_on_a_gpu_that_is_a_fake(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, own_kit: Path, run: Callable[..., Verdict]
) -> None:
    Workshop(monkeypatch).build(own_kit / RECIPE / "trt-fp16")
    machine = Machine("cuda", Gpu("a fake", 86, "1", 1 << 30))
    verdict = run("tensorrt-rtx fp16", own_kit, machine)
    assert (verdict.verdict, verdict.reasons) == (PASSED, ())
    assert verdict.notes == ("gemma4 trt-fp16: TensorRT-RTX 1.7.1.116 (SM 86)",)
    one_too_many(monkeypatch)
    assert run("tensorrt-rtx fp16", own_kit, machine).verdict == FAILED


# Planted faults.


def one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback leaves a row too many."""
    right = KvBuffers.truncate

    def wrong(self: KvBuffers, length: int | Sequence[int]) -> None:
        assert isinstance(length, (int, np.integer))
        right(self, min(int(length) + bool(length), self.length))

    monkeypatch.setattr(KvBuffers, "truncate", wrong)


def test_other_weights(run: Callable[..., Verdict], own_kit: Path) -> None:
    folder = own_kit / RECIPE / "ort-fp32"
    data = np.memmap(folder / "weights.data", np.float32, "r+")
    data[: data.size // 2] *= 1.05
    data.flush()
    gpu_mid.seal(folder, "weights.data")
    verdict = run("onnxruntime cuda", own_kit)
    assert verdict.verdict == FAILED
    assert verdict.reasons[0].startswith("gemma4 ort-fp32: logits of prefill differs by ")
    assert verdict.reasons[0].endswith("allowed is 2.0e-04")


def test_a_changed_file_is_not_opened(run: Callable[..., Verdict], own_kit: Path) -> None:
    path = own_kit / RECIPE / "ort-fp32" / "weights.data"
    path.write_bytes(path.read_bytes()[:-4] + b"\1\1\1\1")
    (reason,) = run("onnxruntime cuda", own_kit).reasons
    assert reason.startswith("FolderError: ") and "weights.data" in reason


@pytest.mark.parametrize("name", ["torch graphs", "onnxruntime cuda"])
def test_a_rollback_that_is_off_by_one(
    run: Callable[..., Verdict], kit: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    one_too_many(monkeypatch)
    verdict = run(name, kit)
    assert verdict.verdict == FAILED
    assert any("logits of after a rollback differs by" in reason for reason in verdict.reasons)
    assert any("prompt-lookup, prompt 0: token" in reason for reason in verdict.reasons)


def test_a_drafter_that_is_wrong(
    run: Callable[..., Verdict], kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are rejected, so that the text hides it."""
    right = MtpDrafter.propose

    def wrong(self: MtpDrafter, count: int, sampler: Any) -> Any:
        given = right(self, count, sampler)
        return given._replace(tokens=[(token + 1) % 8 for token in given.tokens])

    monkeypatch.setattr(MtpDrafter, "propose", wrong)
    verdict = run("onnxruntime cuda", kit)
    assert len(verdict.reasons) == 1 and "mtp-drafter: 0 of" in verdict.reasons[0]


def test_a_step_that_writes_elsewhere(
    run: Callable[..., Verdict], kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_torch_ops

    def wrong(past: Any, new: Any, start: Any, **attributes: Any) -> Any:
        past[:, :, -1] += 1  # behind all rows that are valid
        return tensor_scatter(past, new, start, **attributes)

    monkeypatch.setitem(gpu_torch_ops.OPERATORS, "TensorScatter", wrong)
    reasons = run("torch graphs", kit).reasons
    assert any("a step wrote behind its rows" in reason for reason in reasons)


def test_processes_that_crash_or_hang(tmp_path: Path) -> None:
    python = [sys.executable, "-c"]
    aborts = "import os, sys; print('why', file=sys.stderr, flush=True); os.abort()"
    words, how = gpu_check._run([*python, aborts], 60)
    assert (words, how) == ("why", "crashed with signal 6")
    _, how = gpu_check._run([*python, "import time; time.sleep(60)"], 1)
    assert how == "did not end within 1 seconds"
    assert gpu_check._run([*python, "pass"], 60) == ("", None)
    (late,) = gpu_check.check(tmp_path, CPU, ["torch graphs"], 0, keep=tmp_path)
    assert late.verdict == FAILED and "--limit" in late.reasons[0]


def test_a_folder_that_is_no_kit(run: Callable[..., Verdict], tmp_path: Path) -> None:
    (reason,) = run("onnxruntime cuda", tmp_path).reasons
    assert reason.startswith(f"ValueError: {tmp_path}: has no kit.json; make one with --prepare")


def test_times_side_by_side() -> None:
    one = Verdict("torch times", PASSED, figures={"1 rows ms": 2.0, "plain tokens/s": 400.0})
    two = Verdict("tensorrt times", PASSED, figures={"1 rows ms": 0.5, "plain tokens/s": 900.0})
    lines = [" ".join(line.split()) for line in gpu_check.table([one, two])]
    assert lines[-2:] == ["torch tensorrt", "1 rows ms 2 (4.0x) 0.5 (1.0x)"]
    assert "plain tokens/s: 900" in lines


def test_parts_are_chosen_by_name() -> None:
    script = Path(gpu_check.__file__)
    done = subprocess.run(
        [sys.executable, script, "--only", "vulkan"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "--only: no part begins with vulkan" in done.stderr


# The operators beside the same in numpy.


def test_integers_of_four_bits() -> None:
    packed = torch.tensor([0x7F, 0x80, 0x1E], dtype=torch.uint8)
    assert unpack(packed, 5).tolist() == [-1, 7, 0, -8, -2]
    scales = torch.tensor([[2.0, 0.5], [1.0, 4.0]])
    rows = torch.tensor([[-1, 7, 0, -8], [1, 2, 3, 4]], dtype=torch.int8)
    blocks = dequantize_linear(rows, scales, axis=1, block_size=2)
    assert blocks.tolist() == [[-2, 14, 0, -4], [1, 2, 12, 16]]
    assert dequantize_linear(rows, scales[0], axis=0)[1].tolist() == [0.5, 1, 1.5, 2]


def test_attention_over_rows_that_are_masked() -> None:
    random = np.random.default_rng(1)
    query, key, value = (random.normal(size=(1, h, r, 4)) for h, r in ((4, 2), (2, 5), (2, 5)))
    mask = np.arange(5) <= np.array([[2], [3]])
    tensors = [torch.from_numpy(array) for array in (query, key, value, mask[None, None])]
    got = attention(tensors[0], tensors[1], tensors[2], tensors[3])
    for head in range(4):
        scores = np.where(mask, query[0, head] @ key[0, head // 2].T, -np.inf)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        want = weights @ value[0, head // 2]
        np.testing.assert_allclose(got[0, head].numpy(), want, rtol=1e-6)


def test_values_by_their_places() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    ids = torch.tensor([[[3], [0], [1]], [[2], [2], [0]]])
    assert gather_nd(x, ids, batch_dims=2).tolist() == [[3, 4, 9], [14, 18, 20]]
    assert gather_nd(x, torch.tensor([[1, 2]])).tolist() == [[20, 21, 22, 23]]


def test_rows_are_written_in_place() -> None:
    past = torch.zeros(2, 1, 4, 1)
    new = torch.arange(4.0).reshape(2, 1, 2, 1) + 1
    made = tensor_scatter(past, new, torch.tensor([0, 2]), axis=2)
    assert made is past and past[:, 0, :, 0].tolist() == [[1, 2, 0, 0], [0, 0, 3, 4]]
    with pytest.raises(ValueError, match=r"rows 3\.\.5 of 4"):
        tensor_scatter(past, new, torch.tensor([0, 3]), axis=2)


# The model of middle size.


@pytest.mark.slow
def test_times(run: Callable[..., Verdict], own_kit: Path, tmp_path: Path) -> None:
    gpu_mid.prepare(SMALL, own_kit)
    home = own_kit / gpu_mid.RECIPE
    assert not (home / "ort-fp16" / "weights.data").exists()
    one, two = (gpu_mid.restore(home / "ort-fp16", tmp_path / name) for name in ("one", "two"))
    assert (one / "weights.data").read_bytes() == (two / "weights.data").read_bytes()
    for name in ("torch times", "onnxruntime cuda, times"):
        verdict = run(name, own_kit)
        assert (verdict.verdict, verdict.reasons) == (PASSED, ())
        named = ("prefill 256 ms", "1 rows ms", "5 rows ms", "17 rows ms", "draft step ms")
        assert all(verdict.figures[figure] > 0 for figure in named)
