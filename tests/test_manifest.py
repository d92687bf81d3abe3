"""The folder is refused, with file, field and a way out, before any engine is opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import toys
from toys import Change, Toy, change, put

import specrun
from specrun import FolderError, manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return toys.write_folder(tmp_path / "engines", Toy(drafter=True))


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here gets as far as opening an engine."""
    monkeypatch.setattr("specrun.ort.open_session", None)


def refused(folder: Path, says: str) -> None:
    with pytest.raises(FolderError, match=says) as caught:
        specrun.load(folder)
    assert str(folder) in str(caught.value)
    assert caught.value.hint


def test_written_and_read_is_the_same(folder: Path) -> None:
    read = manifest.read(folder, integrity="full")
    text = (folder / manifest.MANIFEST).read_text(encoding="utf-8")
    assert manifest.dumps(read) == text


def by_torch(name: str) -> Change:
    """An engine is none: PyTorch is to run it."""

    def change(data: Any) -> None:
        data["engines"][name] |= {"backend": "torch", "file": ""}

    return change


DRAFTER = ("engines", "mtp_drafter")
METHOD = ("drafters", "mtp-drafter")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (put("colour", value="red"), r"field must be one of \[.*\], got 'colour'"),
        (put("tokenizer", "kind", value="bpe"), "tokenizer: field must be one of .* got 'kind'"),
        (put("format", value=6), "format: this specrun reads up to 5, got 6"),
        (put("format", value="5"), "format: must be 5, got '5'"),
        (put("format", value=4), "format: must be 5, got 4"),
        (put("tokenizer", "response", value={"regex": "a*"}), "response: field must be one of"),
        (
            put("tokenizer", "response", value={"thinking": {"starts": [""], "ends": []}}),
            "tokenizer.response.thinking: starts must be texts of 1 to 200 characters",
        ),
        (lambda data: data.pop("generation"), "field 'generation' is missing"),
        (put("generation", "max_context", value="32"), "generation.max_context: must be int"),
        (put("generation", "max_context", value=True), "generation.max_context: must be int"),
        (
            put("generation", "max_context", value=1),
            r"max_context must be in 2\.\..*, got 1",
        ),
        (put("engines", "target", "kv_dtype", value="float8"), "kv_dtype: must be one of"),
        (put("engines", "target", "precision", value="int3"), "precision: must be one of .*'int4'"),
        (put("engines", "target", "step_bytes", value="1 GB"), "step_bytes: must be int"),
        (put("engines", "target", "weights", value={}), "weights: field 'block_size' is missing"),
        (lambda data: data.pop("quality"), "field 'quality' is missing"),
        (put("drafters", "critic", value={}), "drafters key: must be one of"),
        (put("engines", "critic", value={}), "engines.critic: field 'role' is missing"),
        (put("engines", "target", "role", value="critic"), "role: must be one of"),
        (put("engines", "target", "backend", value="torch"), "file: is empty with backend torch"),
        (put("engines", "target", "file", value=""), "file: is empty with backend torch only"),
        (by_torch("mtp_drafter"), "mtp_drafter.backend: PyTorch runs the whole target only"),
        (lambda data: data["engines"].pop("target"), "engines: field 'target' is missing"),
        (lambda data: data["engines"]["target"]["inputs"].pop(0), "inputs: must hold .*tokens"),
        (put("engines", "target", "file", value="other.onnx"), "'other.onnx' is used and not"),
        (put("files", 0, "path", value="../target.onnx"), "path must stay inside the folder"),
        (put("files", 0, "path", value="/etc/passwd"), "path must stay inside the folder"),
        (put(*METHOD, "target_sha256", value="0" * 64), "exported for target 000000000000"),
        (
            put(*METHOD, "tokenizer_sha256", value="1" * 64),
            "exported for tokenizer 111111111111, the folder has [0-9a-f]{12}",
        ),
        (put(*DRAFTER, "mtp", "candidates", value=0), "candidates"),
        (put(*METHOD, "engines", value=["other"]), "'other' is not among the engines"),
        (put(*METHOD, "engines", value=[]), r"engines: must be one engine, got \[\]"),
        (put(*METHOD, "engines", value=["target"]), "'target' is a target, must be a mtp_drafter"),
        (
            put("engines", "target", "requires", "onnxruntime", value="x"),
            "onnxruntime must be a version, got 'x'",
        ),
        (put(*METHOD, "schedule", value="never"), "schedule: must be one of"),
        (put(*DRAFTER, "mtp", value=None), "field 'mtp' is missing"),
        (put(*DRAFTER, "mtp", "kv_map", value={"full_attention": 3}), "must name the layers in kv"),
        (put(*METHOD, "num_assistant_tokens", value=99), "must be in 1..16, got 99"),
    ],
)
def test_a_manifest_that_is_not_right(folder: Path, edit: Change, says: str) -> None:
    change(folder, edit)
    refused(folder, says)


def test_a_drafter_of_another_family(tmp_path: Path) -> None:
    """C51: of equal width, taken over from its own folder; both tokenizers are named."""
    ours = toys.write_folder(tmp_path / "ours", Toy())
    theirs = toys.write_folder(
        tmp_path / "theirs", Toy(vocabulary=tuple("9876543210"), drafter=True)
    )
    shutil.copy(theirs / "mtp_drafter.onnx", ours)
    other = json.loads((theirs / manifest.MANIFEST).read_text(encoding="utf-8"))
    own = manifest.sha256_of(ours / "tokenizer.json")

    def take_over(data: dict[str, Any]) -> None:
        data["drafters"] = other["drafters"]
        data["engines"]["mtp_drafter"] = other["engines"]["mtp_drafter"]
        data["files"] += [file for file in other["files"] if file["path"] == "mtp_drafter.onnx"]
        data["drafters"]["mtp-drafter"]["target_sha256"] = data["files"][0]["sha256"]

    change(ours, take_over)
    hashes = f"tokenizer {other['tokenizer']['sha256'][:12]}, the folder has {own[:12]}"
    refused(ours, f"this drafter was exported for {hashes}")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_a_manifest_that_is_not_one(folder: Path, text: str) -> None:
    (folder / manifest.MANIFEST).write_text(text, encoding="utf-8")
    refused(folder, "manifest.json: (not JSON|format: must be 5, got None)")


def test_a_newer_format_says_what_to_upgrade(folder: Path) -> None:
    change(folder, put("format", value=9))
    with pytest.raises(FolderError) as caught:
        specrun.load(folder)
    assert caught.value.hint == "upgrade specrun"


@pytest.mark.parametrize("name", ["target.onnx", "tokenizer.json", "mtp_drafter.onnx"])
def test_a_changed_file(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    refused(folder, f"{name}: changed since the export: sha256 must be")
    (folder / name).write_bytes(content[:-1])
    refused(folder, f"{name}: must have {len(content)} bytes, has {len(content) - 1}")


@pytest.mark.parametrize("name", ["target.onnx", "tokenizer.json"])
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refused(folder, f"{name}: the manifest lists it, it is missing")


def test_a_drafter_of_another_target(folder: Path, tmp_path: Path) -> None:
    other = toys.write_folder(tmp_path / "other", Toy(drafter=True, modulus=9))
    (folder / "mtp_drafter.onnx").write_bytes((other / "mtp_drafter.onnx").read_bytes())
    refused(folder, "mtp_drafter.onnx: (must have|changed since)")


def test_a_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.onnx").write_bytes((folder / "target.onnx").read_bytes())
    (folder / "target.onnx").unlink()
    (folder / "target.onnx").symlink_to(tmp_path / "elsewhere.onnx")
    refused(folder, "target.onnx: leads out of the engine folder")


def test_no_folder_and_no_manifest(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such folder")
    refused(tmp_path, "no manifest.json in it")
