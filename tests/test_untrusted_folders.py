"""Engine folders that nobody should trust: manifests, engines, files that are something else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import onnx
import pytest
import toys
from hostile import refused, replace_file, write_folder
from onnx import TensorProto, helper
from toys import Change, Toy, change, put

import specrun
from specrun import EngineError, SpecrunError, graph_file, manifest
from specrun.cli import main as command
from specrun.reading import ReadingError, parse_json, printable, read_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


# JSON.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[NaN]", "holds NaN, which is no number"),
        ("[-Infinity]", "holds -Infinity"),
        ("[1e999]", "the number '1e999' is too large"),
        ("[" + "1" * 5000 + ".5]", "is too large or too long"),
        ("[" + "1" * 5000 + "]", "does not fit into 64 bits"),
        ("[9223372036854775808]", "does not fit into 64 bits"),
        ('{"a": 1, "a": 2}', "the field 'a' comes twice"),
        ('["\\ud800"]', "is not valid Unicode"),
        ('{"\\udfff": 1}', "is not valid Unicode"),
        ("[" * 100_000, "nested too deep"),
        ("[" + "[]," * 2_000_000 + "[]]", "holds some .* values, at most"),
        (b"\xff\xfe", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_json_that_is_refused(text: str | bytes, says: str) -> None:
    with pytest.raises(ReadingError, match=says) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 300


def test_json_that_is_read() -> None:
    for value in ({"a": [1, -(2**63), 2**63 - 1, 1.5, "\U0010ffff", None, True, {}]}, "x", 0):
        assert parse_json(json.dumps(value)) == value


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_bytes(b"12345")
    (tmp_path / "out").symlink_to("/etc/passwd")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name, says in (("pipe", "no regular file"), ("big", "has 5 bytes, at most 4")):
        with pytest.raises(ReadingError, match=says):
            read_bytes(tmp_path / name, 4)
    for name in ("out", "circle"):
        with pytest.raises(ReadingError, match="leads out of"):
            read_bytes(tmp_path / name, 1 << 20, inside=tmp_path)
    assert read_bytes(tmp_path / "big", 5, inside=tmp_path) == b"12345"


def test_a_terminal_obeys_no_message() -> None:
    assert printable("a\x1b[2J\u202eb\n\té\ud800") == "a\\x1b[2J\\u202eb\n\té\\ud800"


# Manifests.


def twice(data: dict[str, Any]) -> None:
    data["files"].append(data["files"][0])


def other_case(data: dict[str, Any]) -> None:
    data["files"].append(data["files"][0] | {"path": data["files"][0]["path"].upper()})


def big_heads(data: dict[str, Any]) -> None:
    data["engines"]["target"]["kv"][0]["heads"] = 10**9


TARGET = ("engines", "target")
DEFAULTS = ("generation", "defaults")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (put("generation", "max_context", value=10**18), "max_context must be in 2.."),
        (put("generation", "max_context", value=10**30), "does not fit into 64 bits"),
        (put("generation", "max_context", value=float("nan")), "holds NaN"),
        (put("generation", "max_context", value=2.0), "max_context: must be int"),
        (put("generation", "eos_token_ids", value=[10**9]), "eos_token_ids: must be in 0..9"),
        (put("generation", "eos_token_ids", value=[-1]), "eos_token_ids: must be in 0..9"),
        (big_heads, "heads must be in 1.."),
        (put(*TARGET, "hidden_size", value=10**12), "hidden_size must be in 1.."),
        (put(*TARGET, "vocab_size", value=0), "vocab_size must be in 1.."),
        (put(*TARGET, "step_bytes", value=-1), "step_bytes must be in 0.."),
        (put(*TARGET, "kv", value=[]), "kv: must hold a layer|must be inputs|not in the contract"),
        (put(*TARGET, "exact_rows", value=0), "exact_rows must be in 1.."),
        (put("tokenizer", "vocab_size", value=10**12), "vocab_size must be in 1.."),
        (put("tokenizer", "vocab_size", value=11), "has 10 tokens, 11 in the manifest"),
        (put("tokenizer", "sha256", value="x"), "sha256 must be 64 hexadecimal digits"),
        (put("drafters", "mtp-drafter", "max_num_draft", value=10**9), "max_num_draft must be in"),
        (put("files", 0, "size", value=-1), "size must be in 0.."),
        (put("files", 0, "sha256", value="A" * 64), "sha256 must be 64 hexadecimal digits"),
        (put("a" * 100_000, value=1), r"got 'aaa.*\.\.\."),
        (put("engines", "\x1b[2J", value=1), r"engines\.'\\x1b\[2J'"),
        (twice, "are the same name"),
        (other_case, "are the same name"),
        (put(*DEFAULTS, value={"temperature": "hot"}), "defaults.temperature: must be a number"),
        (put(*DEFAULTS, value={"temperature": -1}), "defaults.temperature: must be a number"),
        (put(*DEFAULTS, value={"top_k": 1.5}), "defaults.top_k: must be a whole number"),
        (put(*DEFAULTS, value={"top_p": 2}), "defaults.top_p: must be a number above 0"),
        (put(*DEFAULTS, value={"do_sample": "yes"}), "defaults.do_sample: must be true or false"),
        (put(*DEFAULTS, value={"max_new_tokens": [1]}), "defaults.max_new_tokens: must be a whole"),
        (
            put(*DEFAULTS, value={"bad_words_ids": [[99]]}),
            "bad_words_ids: must hold token ids below 10",
        ),
        (put(*DEFAULTS, value={"bad_words_ids": "x"}), "defaults.bad_words_ids"),
        (put(*DEFAULTS, value={"repetition_penalty": True}), "defaults.repetition_penalty"),
        (
            put(*DEFAULTS, value={"other": [[[[[[[[[[1]]]]]]]]]]}),
            "other: must be nested less than 8",
        ),
    ],
)
def test_values_of_a_manifest(folder: Path, edit: Change, says: str) -> None:
    change(folder, edit)
    refused(folder, says)


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "../target.onnx", "a/../../b", "..", ".", "", "./target.onnx", "a//b"),
        *("a\\b", "C:x", "*/_ORT_MEM_ADDR_/*", "a\0b", "a\nb", "\u202ea", "target.onnx/"),
        *("a" * 256, "a/" * 600 + "b"),
    ],
)
def test_paths_of_a_manifest(folder: Path, path: str) -> None:
    change(folder, put("files", 0, "path", value=path))
    refused(folder, "path must (stay inside the folder|be a plain file name)")


def test_a_manifest_that_is_too_large(folder: Path) -> None:
    os.truncate(folder / manifest.MANIFEST, 3 << 30)  # of which the disk has nothing
    refused(folder, "has 3221225472 bytes, at most")


@pytest.mark.parametrize("name", [manifest.MANIFEST, "target.onnx", "chat_template.jinja"])
def test_links_and_what_is_no_file(folder: Path, tmp_path: Path, name: str) -> None:
    kept = tmp_path / "kept"
    (folder / name).rename(kept)
    os.mkfifo(folder / name)
    refused(folder, "is no regular file")
    (folder / name).unlink()
    (folder / name).symlink_to(kept)
    refused(folder, "leads out of the engine folder")
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    refused(folder, "leads out of the engine folder")
    (folder / name).unlink()
    kept.rename(folder / "kept")
    (folder / name).symlink_to("kept")  # a link that stays inside
    specrun.load(folder).close()


def test_a_folder_in_it_that_is_a_link_out_of_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (folder / "target.onnx").rename(tmp_path / "outside" / "target.onnx")
    (folder / "sub").symlink_to(tmp_path / "outside")

    def move(data: dict[str, Any]) -> None:
        data["files"][0]["path"] = data["engines"]["target"]["file"] = "sub/target.onnx"

    change(folder, move)
    refused(folder, "leads out of the engine folder")


@pytest.mark.parametrize("size", [0, 1 << 21])
def test_a_chat_template_that_is_too_large_or_no_text(folder: Path, size: int) -> None:
    replace_file(folder, "chat_template.jinja", b"\xff" if not size else b"a" * size)
    refused(folder, "not UTF-8 text" if not size else f"has {size} bytes, at most")


# Engines.


def test_swapped_engines(folder: Path) -> None:
    target, drafter = folder / "target.onnx", folder / "mtp_drafter.onnx"
    kept = target.read_bytes()
    target.write_bytes(drafter.read_bytes())
    drafter.write_bytes(kept)
    refused(folder, "must have|changed since the export")


def reading_from(location: str, extra: tuple[tuple[str, str], ...] = ()) -> bytes:
    """The graph of a toy with one more tensor, whose bytes are elsewhere."""
    tensor = TensorProto(name="elsewhere", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), *extra):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    model = onnx.load_from_string(TARGET_GRAPH)
    model.graph.initializer.append(tensor)
    return bytes(model.SerializeToString())


@pytest.fixture(scope="module", autouse=True)
def _target_graph(tmp_path_factory: pytest.TempPathFactory) -> None:
    global TARGET_GRAPH
    path = tmp_path_factory.mktemp("graph") / "target.onnx"
    toys.write_target(path, Toy())
    TARGET_GRAPH = path.read_bytes()


TARGET_GRAPH = b""


@pytest.mark.parametrize(
    ("location", "extra"),
    [
        ("/etc/passwd", ()),
        ("../../../../../../etc/passwd", ()),
        ("sub/../tokenizer.json", ()),
        ("unlisted.bin", ()),
        ("link.bin", ()),
        ("*/_ORT_MEM_ADDR_/*", (("offset", "94000000000000"), ("length", "16"))),
        ("", ()),
        ("manifest.json", ()),
        ("tokenizer.json", (("offset", "1000000"),)),
        ("tokenizer.json", (("length", "1000000"),)),
        ("tokenizer.json", (("offset", "-4"),)),
        ("tokenizer.json", (("offset", "9" * 40),)),
        ("tokenizer.json", (("location", "/etc/passwd"),)),
        ("/dev/zero", ()),
    ],
)
def test_engines_that_read_elsewhere(
    folder: Path, location: str, extra: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before ONNX Runtime sees the file, also where the manifest vouches for it."""
    (folder / "unlisted.bin").write_bytes(bytes(64))
    (folder / "link.bin").symlink_to("/etc/passwd")
    replace_file(folder, "target.onnx", reading_from(location, extra))
    monkeypatch.setattr("specrun.ort.open_session", None)
    with pytest.raises(EngineError, match=r"it reads|two values for") as caught:
        specrun.load(folder)
    assert "target.onnx" in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("where", ["attribute", "subgraph", "function", "sparse", "split"])
def test_places_where_a_graph_may_hide_a_tensor(folder: Path, where: str) -> None:
    model = onnx.load_from_string(reading_from("/etc/passwd"))
    tensor = model.graph.initializer.pop()
    if where == "attribute":
        model.graph.node.append(helper.make_node("Constant", [], ["hidden_one"], value=tensor))
    elif where == "subgraph":
        graph = helper.make_graph([], "inner", [], [], [tensor])
        model.graph.node.append(helper.make_node("If", ["c"], ["hidden_one"], then_branch=graph))
    elif where == "function":
        node = helper.make_node("Constant", [], ["out"], value=tensor)
        opset = [helper.make_opsetid("", 20)]
        model.functions.append(helper.make_function("own", "f", [], ["out"], [node], opset))
    elif where == "sparse":
        sparse = model.graph.sparse_initializer.add()
        sparse.values.CopyFrom(tensor)
    data = model.SerializeToString()
    if where == "split":  # a message that comes twice is one; of an entry the last value counts
        entry = b"\x0a\x08location\x12\x0dtokenizer.json"[:-1] + b"\x12\x0b/etc/passwd"
        inner = b"\x08\x04\x10\x01\x42\x01w\x6a" + bytes([len(entry)]) + entry + b"\x70\x01"
        graph_bytes = b"\x2a" + bytes([len(inner)]) + inner
        data += b"\x3a" + bytes([len(graph_bytes)]) + graph_bytes
    replace_file(folder, "target.onnx", data)
    with pytest.raises(EngineError, match="it reads the file '/etc/passwd'"):
        specrun.load(folder)


def test_engines_that_read_what_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.onnx"
    path.parent.mkdir()
    path.write_bytes(reading_from("weights.data", (("offset", "16"), ("length", "16"))))
    graph_file.check(path, tmp_path, {"sub/weights.data": 32})
    with pytest.raises(EngineError, match="up to byte 32, which has 31"):
        graph_file.check(path, tmp_path, {"sub/weights.data": 31})
    with pytest.raises(EngineError, match="which the manifest does not list"):
        graph_file.check(path, tmp_path, {"weights.data": 32})


@pytest.mark.parametrize(
    "content",
    [b"", b"\0", b"\xff" * 100, b"GGUF" * 10, b"\x3a\xff\xff\xff\xff\x0f", b"<html>", b"\x0b\x0c"],
)
def test_engines_that_are_no_graph(folder: Path, content: bytes) -> None:
    replace_file(folder, "target.onnx", content)
    with pytest.raises(SpecrunError, match=r"target\.onnx: does not load") as caught:
        specrun.load(folder)
    assert caught.value.hint


def test_engines_of_other_sizes_than_declared(folder: Path) -> None:
    """The manifest vouches for the file; its tensors are compared with what it declares."""
    toys.write_target(folder / "other.onnx", Toy(padded_vocab=11))
    replace_file(folder, "target.onnx", (folder / "other.onnx").read_bytes())
    with pytest.raises(EngineError, match="must have shape"):
        specrun.load(folder)


def test_an_engine_that_does_not_load_says_so_once(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = onnx.load_from_string(TARGET_GRAPH)
    model.graph.node[0].op_type = "Nonsense"
    replace_file(folder, "target.onnx", model.SerializeToString())
    with pytest.raises(EngineError, match="does not load"):
        specrun.load(folder)
    assert capfd.readouterr().out == ""


# The command.


@pytest.mark.parametrize("arguments", [["inspect"], ["run", "--prompt", "1"]])
def test_the_command_shows_no_traceback(folder: Path, arguments: list[str]) -> None:
    from click.testing import CliRunner

    change(folder, put("engines", "\x1b[2J\ud83d\ude00", value=float("1")))
    result = CliRunner().invoke(command, [arguments[0], str(folder), *arguments[1:]])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 2 and "\x1b" not in result.stderr
