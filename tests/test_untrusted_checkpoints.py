"""Checkpoints that nobody should trust: headers, indices, links, code, pickled weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from specexport import gguf_header, safetensors_files
from specexport.errors import SourceError, WeightsError
from specexport.sources import resolve


def gguf(*entries: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, tensors, len(entries) if count is None else count)
    return head + b"".join(entries)


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


FAR = 2**60


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "does not start with GGUF"),
        (b"GGUF", "ends within its header"),
        (gguf(count=FAR), "entries"),
        (gguf(tensors=FAR), "tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "version 9"),
        (gguf(struct.pack("<Q", FAR)), f"a string of {FAR} bytes"),
        (gguf(entry(b"a", 8, struct.pack("<Q", FAR))), f"a string of {FAR} bytes"),
        (gguf(entry(b"a", 9, struct.pack("<IQ", 0, FAR))), f"a list of {FAR} items"),
        (gguf(entry(b"a", 9, struct.pack("<IQ", 8, FAR))), f"a list of {FAR} items"),
        (gguf(entry(b"a", 9, struct.pack("<IQ", 8, 10**6))), "ends within its header"),
        (gguf(entry(b"a", 9, struct.pack("<IQIQ", 9, 1, 9, 1))), "a list of type 9"),
        (gguf(entry(b"a", 99, b"")), "metadata of type 99"),
        (gguf(entry(b"a", 6, struct.pack("<f", float("nan")))), "a number of the metadata is nan"),
        (gguf(entry(b"\xff", 4, bytes(4))), "utf-8"),
        (gguf(*[entry(b"a", 4, bytes(4))] * 2), "'a' comes twice"),
        (gguf(entry(b"general.alignment", 4, bytes(4))), "general.alignment is 0"),
        (gguf(entry(b"general.alignment", 4, struct.pack("<I", 3))), "general.alignment is 3"),
        (gguf(entry(b"general.alignment", 8, struct.pack("<Q", 0))), "general.alignment is ''"),
        (gguf(entry(b"split.count", 8, struct.pack("<Q", 0))), "split.count is ''"),
        (gguf(tensor(b"t", (4,), 999, 0), tensors=1, count=0), "of the unknown type 999"),
        (gguf(tensor(b"t", (FAR, FAR), 0, 0), tensors=1, count=0), "has the shape"),
        (gguf(tensor(b"t", (4,), 0, FAR), tensors=1, count=0), "ends at byte"),
        (gguf(tensor(b"t", (2**30,), 0, 0), tensors=1, count=0), "ends at byte"),
        (gguf(tensor(b"t", (5,), 8, 0), tensors=1, count=0), "rows of 5 in blocks of 32"),
        (gguf(tensor(b"t", (1,) * 9, 0, 0), tensors=1, count=0), "has 9 axes"),
        (
            gguf(tensor(b"t", (4,), 0, 0), tensor(b"u", (4,), 0, 4), tensors=2, count=0)
            + bytes(99),
            "'u' begins within 't'",
        ),
        (
            gguf(tensor(b"t", (4,), 0, 0), tensor(b"t", (4,), 0, 32), tensors=2, count=0)
            + bytes(99),
            "a tensor comes twice",
        ),
    ],
)
def test_gguf_headers(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(SourceError, match="not a whole GGUF file") as caught:
        gguf_header.read(path)
    assert says in str(caught.value) and str(path) in str(caught.value) and caught.value.hint


def header(text: str | bytes, data: bytes = bytes(64)) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + data


def one(**fields: Any) -> str:
    return json.dumps({"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | fields})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "a header of 0 bytes"),
        ((2**60).to_bytes(8, "little") + b"{}", f"a header of {2**60} bytes"),
        (header("[" * 50_000), "nested too deep"),
        (header("[]"), "its header is []"),
        (header(b"\xff\xff"), "not JSON"),
        (header('{"t": 5}'), "'t' is 5"),
        (header('{"t": {}}'), "dtype"),
        (header(one(shape=[-4])), "'t' is"),
        (header(one(shape=[4.0])), "'t' is"),
        (header(one(shape=[True])), "'t' is"),
        (header(one(shape="4")), "'t' is"),
        (header(one(shape=[2**62, 4])), "has 16 bytes for"),
        (header(one(shape=[1] * 99)), "of shape"),
        (header(one(dtype=5)), "'t' is"),
        (header(one(data_offsets=[0])), "lies at [0]"),
        (header(one(data_offsets=[16, 0])), "lies at [16, 0]"),
        (header(one(data_offsets=[0, -16])), "'t' is"),
        (header(one(data_offsets=[2**62, 2**62 + 16])), "ends at byte"),
        (header(one(shape=[float("nan")])), "holds NaN"),
        (header(one(data_offsets=[64, 80])), "ends at byte"),
        (header('{"t": {}, "t": {}}'), "comes twice"),
        (
            header(json.dumps(json.loads(one()) | {"u": json.loads(one())["t"]})),
            "'u' begins within 't'",
        ),
    ],
)
def test_safetensors_headers(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="not a whole safetensors file") as caught:
        safetensors_files.read_folder(tmp_path)
    assert says in str(caught.value) and str(path) in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"a": "../outside.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "sub/x.safetensors"}}',
        '{"weight_map": {"a": "a\\u0000b"}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": ["a"]}',
        '{"weight_map": NaN}',
        "[]",
        "{",
    ],
)
def test_indices_of_shards(tmp_path: Path, index: str) -> None:
    (tmp_path / "outside.safetensors").write_bytes(header(one()))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / safetensors_files.INDEX).write_text(index)
    with pytest.raises(WeightsError) as caught:
        safetensors_files.read_folder(folder)
    assert str(folder) in str(caught.value) and caught.value.hint


def test_links_of_a_checkpoint(tmp_path: Path) -> None:
    """In the hub's cache files are links to blobs beside the snapshot; else they stay inside."""
    (tmp_path / "outside.safetensors").write_bytes(header(one()))
    folder = tmp_path / "models--org--name" / "snapshots" / ("0123456789" * 4)
    folder.mkdir(parents=True)
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    (blobs / "abc").write_bytes(header(one()))
    (folder / "model.safetensors").symlink_to("../../blobs/abc")
    safetensors_files.check_links(folder)
    (folder / "tokenizer.json").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(SourceError, match=r"tokenizer\.json: is a link that leads out of"):
        safetensors_files.check_links(folder)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a.safetensors").write_bytes(header(one()))
    (plain / "model.safetensors").symlink_to("a.safetensors")
    (plain / "notes").symlink_to("/etc")  # nothing that is read
    safetensors_files.check_links(plain)
    (plain / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(SourceError, match=r"config\.json: is a link that leads out of"):
        resolve(plain)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    folder = tiny_models.save("llama", tmp_path)
    proof = tmp_path / "it ran"
    code = f"open({str(proof)!r}, 'w').close()\nfrom transformers import LlamaConfig as Own\n"
    (folder / "planted.py").write_text(code)
    planted = {
        "AutoConfig": "planted.Own",
        "AutoModelForCausalLM": "planted.Own",
        "AutoTokenizer": ["planted.Own", "planted.Own"],
    }
    for name in ("config.json", "tokenizer_config.json"):
        data = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(data | {"auto_map": planted}))
    out = tmp_path / "out"
    out.mkdir()
    source = resolve(folder)
    source.write_tokenizer(out)
    source.load_reference()
    assert not proof.exists()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(SourceError, match="its weights are pickled"):
        safetensors_files.read_folder(tmp_path)
