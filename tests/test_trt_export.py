"""What is exported for TensorRT is built by it: every kind of engine, precision and GPU.

With the real TensorRT for RTX, which builds ahead of time on a CPU. Nothing runs here: that takes
the GPU, see scripts/gpu_check.py; what the graphs compute is shown on ONNX Runtime.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import needs
import pytest
import small_vocabulary
from click.testing import CliRunner

import specrun
from specexport import exporter
from specexport.cli import main as specexport
from specexport.trt.building import Asked, build_folder
from specgraphs.static_rules import static_rules
from specrun import manifest as manifests
from specrun.cli import main
from specrun.contract import DType, Role
from specrun.errors import EngineError

needs.tensorrt_rtx()
CAPABILITIES = (86, 89, 120)
KINDS = {
    "llama": {Role.FRONT, Role.BACK, Role.HEAD, Role.TARGET},
    "mtp": {Role.TARGET, Role.MTP_LAYER},
    "gemma4": {Role.TARGET, Role.MTP_DRAFTER},
}
KV = {"fp16": DType.FLOAT16, "bf16": DType.BFLOAT16, "int8": DType.FLOAT16, "int4": DType.BFLOAT16}
HALF = {"int8": "fp16", "int4": "bf16"}
Folder = Callable[[str, str], Path]


@pytest.fixture
def exported_for(once: Callable[..., Path]) -> Folder:
    """``exported_for(name, precision)``: one of small_vocabulary.FOLDERS in that precision."""

    def make(name: str, precision: str) -> Path:
        def export(path: Path) -> None:
            small_vocabulary.export(
                small_vocabulary.FOLDERS[name],
                path,
                check=False,
                num_draft=3,
                backend="tensorrt-rtx",
                precision=precision,
                activations=HALF.get(precision),
                block_size=16,
            )

        return once(f"trt-{name}-{precision}", export) / small_vocabulary.ENGINES

    return make


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int4"])
def test_every_engine_builds(
    exported_for: Folder, tmp_path: Path, name: str, precision: str
) -> None:
    """For three generations of GPUs; the manifest lists the plans, and inspect shows them."""
    folder = shutil.copytree(exported_for(name, precision), tmp_path / "engines")
    made = build_folder(folder, Asked("tensorrt_rtx", CAPABILITIES))
    assert {engine.role for engine in made.engines.values()} == KINDS[name]
    for engine_name, engine in made.engines.items():
        assert engine.kv_dtype is KV[precision]
        assert [plan.compute_capability for plan in engine.plans] == list(CAPABILITIES)
        files = {f"{engine_name}.sm{number}.engine" for number in CAPABILITIES}
        assert {plan.file for plan in engine.plans} == files <= made.sizes.keys()
        names = [profile.name for profile in engine.plans[0].profiles]
        drafts = engine.role is Role.MTP_DRAFTER
        assert names == (["decode"] if drafts else ["prefill", "decode"])
    assert manifests.read(folder, integrity="full") == made
    shown = CliRunner().invoke(main, ["inspect", str(folder)]).output
    for plan in (plan for engine in made.engines.values() for plan in engine.plans):
        assert f"plan {plan.file}" in shown


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "int4"])
def test_graphs_keep_the_rules(exported_for: Folder, name: str, precision: str) -> None:
    folder = exported_for(name, precision)
    for path in sorted(folder.glob("*.onnx")):
        assert static_rules(path) == []


def test_bf16_says_why_it_does_not_run_on_a_cpu(exported_for: Folder) -> None:
    """And with what it runs; what can be checked of such a folder is."""
    folder = exported_for("llama", "bf16")
    with pytest.raises(EngineError, match="it computes in bf16") as caught:
        specrun.load(folder, threads=1, verify="engine")
    assert "--device tensorrt" in str(caught.value.hint)
    assert exporter.check_itself(folder) is None
    done = CliRunner().invoke(specexport, ["check", str(folder)])
    assert done.exit_code == 0 and "engines in bf16 do not run on a CPU" in done.output


def test_weights_in_integers_stay_so(exported_for: Folder) -> None:
    """They are smaller than floats, in the graph as in what is built of it."""
    sizes = {}
    for precision in ("fp16", "int8", "int4"):
        data = exported_for("llama", precision) / "weights.data"
        sizes[precision] = data.stat().st_size
    assert sizes["int4"] < sizes["int8"] < sizes["fp16"]


def test_building_again_gives_the_same_bytes(exported_for: Folder, tmp_path: Path) -> None:
    """See test_trt_builder for why one pair of four is looked for."""
    found: dict[str, list[str]] = {}
    for place in ("one", "two", "three", "four"):
        folder = shutil.copytree(exported_for("mtp", "fp16"), tmp_path / place)
        made = build_folder(folder, Asked("tensorrt_rtx", (89,)))
        for engine in made.engines.values():
            found.setdefault(engine.plans[0].key, []).append(engine.plans[0].sha256)
        if all(len(set(hashes)) < len(hashes) for hashes in found.values()):
            break
    assert len(found) == len(made.engines)  # the keys, which say what they are made from
    assert all(len(set(hashes)) < len(hashes) for hashes in found.values())
