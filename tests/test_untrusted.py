"""Input that nobody should trust: one clear error, in bounded time and memory, or the right result.

Tables of what somebody might try, then inputs made at random from valid ones, as
``scripts/fuzz.py`` makes them by the thousands.
"""

# ruff: noqa: E501 (a template is easier to read in one piece)

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny_models
import tokenizers
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from onnx import TensorProto, helper
from toys import Change, Toy, change, put

import specrun
from specexport import gguf_header, safetensors_files
from specexport.errors import SourceError, WeightsError
from specexport.sources import resolve
from specrun import EngineError, FolderError, SpecrunError, UsageError, chat, graph_file, manifest
from specrun.cli import main as command
from specrun.reading import ReadingError, parse_json, printable, read_bytes
from specrun.text import Tokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import fuzz_cases  # noqa: E402  # pyright: ignore[reportMissingImports]

USER = [{"role": "user", "content": "Hi there"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return toys.write_folder(tmp_path / "engines", Toy(drafter=True, chat_template="{{ 1 }}"))


def refused(folder: Path, says: str) -> None:
    with pytest.raises(FolderError, match=says) as caught:
        specrun.load(folder)
    assert str(folder) in str(caught.value) and caught.value.hint
    assert len(str(caught.value)) < 1000


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


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Another content, and a manifest that says that it is the right one."""
    (folder / name).write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()

    def edit(data: dict[str, Any]) -> None:
        for entry in data["files"]:
            if entry["path"] == name:
                entry.update(size=len(content), sha256=sha256)
        field = {"target.onnx": "target_sha256", "tokenizer.json": "tokenizer_sha256"}.get(name)
        for drafter in data["drafters"].values() if field else ():
            drafter[field] = sha256
        if name == "tokenizer.json":
            data["tokenizer"]["sha256"] = sha256

    change(folder, edit)


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


# Tokenizers.


def regex(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


TEMPLATE_POST: dict[str, Any] = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    "edit",
    [
        put("normalizer", value={"type": "Precompiled", "precompiled_charsmap": "AAAA////"}),
        put("normalizer", value={"type": "Precompiled", "precompiled_charsmap": 5}),
        put(
            "post_processor",
            value=TEMPLATE_POST | {"single": [{"SpecialToken": {"id": "zz", "type_id": 0}}]},
        ),
        put("post_processor", value=TEMPLATE_POST | {"single": [SEQUENCE] * 100}),
        put(
            "post_processor",
            value=TEMPLATE_POST
            | {
                "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}] * 4000,
                "special_tokens": {
                    "<bos>": {"id": "<bos>", "ids": [2] * 100_000, "tokens": ["<bos>"] * 100_000}
                },
            },
        ),
        put(
            "normalizer",
            value={"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1000},
        ),
        put("normalizer", value={"type": "Prepend", "prepend": "b" * 1000}),
        put(
            "normalizer",
            value={
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
                ]
                * 3,
            },
        ),
        put(
            "decoder", value={"type": "Replace", "pattern": {"String": "1"}, "content": "b" * 1000}
        ),
        put("pre_tokenizer", value=regex("(")),
        put("model", value={"type": "Unigram", "unk_id": 0, "vocab": []}),
        put("model", value={"type": "WordLevel", "vocab": "x", "unk_token": "?"}),
        put("model", value=None),
        put("version", value=[]),
        lambda data: data.clear(),
    ],
)
def test_tokenizers_that_do_not_load(folder: Path, edit: Change) -> None:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    edit(data)
    replace_file(folder, "tokenizer.json", json.dumps(data).encode())
    refused(folder, r"tokenizer\.json: (does not load|has)")


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"[" * 100_000, b"{" * 1000, b"\xff" * 50, b"null"]
)
def test_tokenizers_that_are_none(folder: Path, content: bytes) -> None:
    replace_file(folder, "tokenizer.json", content)
    refused(folder, "tokenizer.json: does not load")


def test_a_tokenizer_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 1 << 30)
    with pytest.raises(FolderError, match="has 1073741824 bytes, at most"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_a_regular_expression_that_takes_for_ever(tmp_path: Path) -> None:
    """The library gives up by itself and panics; what it does in less steps is not bounded."""
    data = json.loads(toys.toy_tokenizer(Toy()).to_str())
    data["pre_tokenizer"] = regex("(a+)+$")
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(EngineError, match=r"the library fails on this text: .*retry-limit"):
        tokenizer.encode("a" * 40 + "b", add_special_tokens=False)


def test_ids_that_nothing_has(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"]["vocab"]["1"] = 4_000_000_000
    replace_file(folder, "tokenizer.json", json.dumps(data).encode())
    with (
        specrun.load(folder) as engine,
        pytest.raises(FolderError, match="gives the token id 4000000000 of 10 tokens"),
    ):
        engine.generate("1", raw=True)


# Chat templates.

GROWING = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = GROW %}{% endfor %}"
)


def growing(start: str, grow: str, use: str) -> str:
    return GROWING.replace("START", start).replace("GROW", grow) + use


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop with a test": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "text times number": "{{ 'a' * 1000000000 }}",
    "number times text": "{{ 1000000000 * 'a' }}",
    "list times number": "{{ [1] * 1000000000 }}",
    "power": "{{ 10 ** 1000000000 }}",
    "power of power": "{{ 2 ** 20000 ** 2 }}",
    "squares": growing("3", "ns.x * ns.x", "{{ ns.x }}"),
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1.0 }}",
    "filter format": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format inner": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "format of Markup": "{{ ('{:>1000000000}'|safe).format(1) }}",
    "format attribute": "{{ '{0.__class__}'.format(1) + 1 }}",
    "center": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "rjust": "{{ 'a'.rjust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "filter center": "{{ 'a'|center(1000000000) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "filter replace": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "filter join": "{{ (['a' * 100000] * 100000)|join }}",
    "filter join of numbers": "{{ range(100000)|join('a' * 100000) }}",
    "indent": "{{ ('a\n' * 100000)|indent(100000) }}",
    "wordwrap": "{{ ('a ' * 1000000)|wordwrap(1) }}",
    "striptags": "{{ ('<!--' * 1000000)|striptags }}",
    "urlize": "{{ ('www.a.b ' * 400000)|urlize }}",
    "list in itself, as JSON": growing("[1]", "[ns.x, ns.x]", "{{ ns.x|tojson }}"),
    "list in itself, written": growing("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "list in itself, joined": growing("[1]", "[ns.x, ns.x]", "{{ 'a' ~ ns.x }}"),
    "list in itself, compared": growing(
        "[1]", "[ns.x, ns.x]", growing("[1]", "[ns.x, ns.x]", "").replace("ns", "m")
    )
    + "{{ ns.x == m.x }}",
    "list in itself, a key": growing("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
    "list in itself, found": growing("(1,)", "(ns.x, ns.x)", "{{ {}[ns.x] }}"),
    "list in itself, formatted": growing("[1]", "[ns.x, ns.x]", "{{ '{0.x}'.format(ns) }}"),
    "list in itself, in an error": growing("[1]", "[ns.x, ns.x]", "{{ raise_exception(ns.x) }}"),
    "list in itself, called": growing("[1]", "[ns.x, ns.x]", "{{ ns.x() }}"),
    "object in itself": growing("{'a': 1}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x|string }}"),
    "doubled": growing("'a'", "ns.x ~ ns.x", "{{ ns.x }}"),
    "added": growing("'a'", "ns.x + ns.x", "{{ ns.x }}"),
    "list added": growing("[1]", "ns.x + ns.x", "{{ ns.x|length }}"),
    "macro for ever": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "macro twice": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "loop again": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "sum of lists": "{{ ([[1] * 1000] * 100000)|sum(start=[]) }}",
    "long output": "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "long text": "{% for a in range(99999) %}" + "x" * 5000 + "{% endfor %}",
    "many live texts": "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}"
    "{% set ns.x = [ns.x, 'x' * 1000000 ~ a] %}{% endfor %}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "idna": "{{ ('a' * 100000).encode('idna') }}",
    "punycode": "{{ ('ü' * 100000).encode('punycode') }}",
    "strip": "{{ ('a' * 1000000).strip('b' * 1000000 ~ 'a') }}",
    "filter trim": "{{ ('a' * 1000000)|trim('b' * 1000000 ~ 'a') }}",
    "rfind": "{{ ('a' * 4000000).rfind('b' ~ 'a' * 2000000) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "fromkeys": "{{ {}.fromkeys(range(99999)) }}",
    "dict": "{{ dict(range(99999)|map('string')|batch(2)) }}",
    "deep list": "{{ " + "[" * 2000 + "]" * 2000 + " }}",
    "deep if": "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "deep for": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "long sum": "{{ " + "+".join(["1"] * 20000) + " }}",
    "signs": "{{ " + "-" * 20000 + "1 }}",
    "pipeline": "{{ range(99999)" + "|map('abs')" * 500 + "|list|length }}",
    "many tags": "{{ a }}" * 60_000,
    "long list": "{{ [" + "1," * 400_000 + "] }}",
    "long number": "{{ " + "1" * 900_000 + " }}",
    "long time": "{{ strftime_now('%Y' * 1000000) }}",
    "indented JSON": "{{ [[[1]]]|tojson(indent=1000000000) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}",
    "extends": "{% extends '/etc/passwd' %}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.x }}",
    "attr": "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).x }}",
    "too long": "a" * (1 << 20) + "b",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrun.chat_limits.SECONDS", 0.3)
    with pytest.raises(UsageError, match="the chat template") as caught:
        chat.render(HOSTILE[name], USER, {})
    assert "--raw" in str(caught.value.hint)
    assert len(str(caught.value)) < 700


def test_a_template_that_is_stopped_stops_nothing_else() -> None:
    """No thread is left, no signal, no trace function; the next rendering is as the first."""
    before = chat.render("{{ messages[0].content }}", USER, {})
    with pytest.raises(UsageError, match="was stopped: it takes more than 2 seconds"):
        chat.render(HOSTILE["loops"], USER, {})
    assert sys.gettrace() is None
    assert chat.render("{{ messages[0].content }}", USER, {}) == before


# The kinds of things that published templates do, and one of each for the rest of the sandbox.
HARMLESS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] | trim + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% set ns = namespace(found=false, text='') %}{% for m in messages %}{% if loop.first and m.role =="
    " 'system' %}{% set ns.found = true %}{% endif %}{% set ns.text = ns.text + m.content %}"
    "{% endfor %}{{ ns.found }}{{ ns.text }}",
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest ="
    " messages %}{% endif %}{% for m in rest %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}"
    "{{ m.content.strip() }}{% endfor %}",
    "{% macro line(m, end='\n') %}{{ m.role ~ ': ' ~ m.content ~ end }}{% endmacro %}"
    "{% for m in messages %}{{ line(m) }}{{ line(m, end='') }}{% endfor %}",
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}x{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{{ m | tojson }}{{ m | tojson(indent=4) }}"
    "{% endfor %}",
    "{{ messages | length }}{{ messages | map(attribute='role') | join(', ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{%- for m in messages %}\n  {%- if m.content is string %}{{ m.content | upper }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}\n{%- endfor %}",
    "{% for m in messages[::-1] %}{{ m.content[:2] }}{{ m.content[-2:] }}{% if loop.index > 1 %}"
    "{% break %}{% endif %}{% endfor %}",
    "{{ '%s %5d|%-6s|%.2f' % ('a', 3, 'b', 2.5) }}{{ '%s' | format('x') }}{{ '{:>4}'.format(1) }}",
    "{{ 'a b c'.split() }}{{ ['x', 'y'] | join('-') }}{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 // 2 }}",
    "{{ 'Hello' | replace('l', 'L') }}{{ 'a,b'.replace(',', ';') }}{{ ' x '.strip() }}{{ 'x'.center(5) }}",
    "{{ [3, 1, 2] | sort }}{{ [1, 2] | sum }}{{ [[1], [2]] | sum(start=[]) }}{{ {'a': 1}.items() | list }}",
    "{{ ['a', 'b'] | batch(1) | list }}{{ 'text' | indent(2, true) }}{{ range(3) | list }}{{ 1.25 | round(1) }}",
    "{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.next() }}{% set j = joiner(',') %}{{ j() }}{{ j() }}",
    "{% for x in [[1, [2]], 3] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}"
    "{% endfor %}",
    "{% set x %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ x | length }}{{ x }}",
    "{% filter upper %}a{{ messages[0].content }}{% endfilter %}{{ dict(a=1, b=[2]) }}{{ none }}{{ nothing }}",
    "{{ '<' | e }}{{ '<' | safe }}{{ 'a' ~ ('<' | e) ~ '>' }}{{ 'x' in 'xyz' }}{{ 3 not in [1, 2] }}",
    "{% autoescape true %}{{ '<' ~ 'a' }}{{ messages[0].content ~ ('<' | safe) }}{{ ('%s' | safe) % '<' }}{% endautoescape %}",
    "{% call(x) f() %}{{ x }}{% endcall %}".replace("f()", "f(2)").join(
        ["{% macro f(n) %}{{ caller(n) }}{{ varargs }}{{ kwargs }}{% endmacro %}", ""]
    ),
    "{% block a %}{{ messages[0].content }}{% endblock %}{{ self.a() }}",
)
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b>.\n"},
    {"role": "user", "content": " Hi ü </think> there "},
    {"role": "assistant", "content": "Yes", "more": [{"x": 1.5}, None]},
]


@pytest.mark.parametrize("template", [*HARMLESS, fuzz_cases.CHAT], ids=range(len(HARMLESS) + 1))
def test_limits_change_no_text(template: str) -> None:
    """As jinja2's own sandbox renders it, which is what transformers uses."""
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension]
    )
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    variables = {"bos_token": "<s>", "add_generation_prompt": True}
    expected = plain.from_string(template).render(messages=CONVERSATION, **variables)
    assert chat.render(template, CONVERSATION, {"bos_token": "<s>"}) == expected


def test_long_conversations_are_rendered() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 1000
    assert len(chat.render(fuzz_cases.CHAT, messages, {"bos_token": ""})) > 1_000_000


# Checkpoints.


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
    """In the hub's cache files are links to blobs beside the snapshot; elsewhere they stay inside."""
    (tmp_path / "outside.safetensors").write_bytes(header(one()))
    folder = tmp_path / "models--org--name" / "snapshots" / "0123"
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


# Prompts.


@pytest.mark.parametrize(
    "prompt",
    [
        "\0",
        "\u202eabc",
        "e\u0301" * 50,
        "👨‍👩‍👧‍👦",
        "a" * 100_000,
        " " * 100_000,
        "\ufdd0\ufdd1\ufdd2",
    ],
)
def test_strange_prompts(tmp_path: Path, prompt: str) -> None:
    backend = tokenizers.Tokenizer.from_file(str(fuzz_cases.TINY / "tokenizer.json"))
    toy = Toy(tokenizer=backend, chat_template=fuzz_cases.CHAT, max_context=1 << 20)
    with specrun.load(toys.write_folder(tmp_path / "e", toy)) as engine:
        parse = specrun.GenerateOptions(parse_special=True)
        assert engine.encode(prompt) == engine.encode(prompt, parse)
        raw = engine.encode(prompt, dataclasses.replace(parse, raw=True))
        assert engine.tokenizer.decode(raw) == prompt


def test_halves_of_characters_in_a_prompt(tmp_path: Path) -> None:
    toy = Toy(chat_template=fuzz_cases.CHAT)
    with specrun.load(toys.write_folder(tmp_path / "e", toy)) as engine:
        for prompt in ("\ud800", [{"role": "user", "content": "\ud800"}]):
            with pytest.raises(UsageError, match="not valid Unicode") as caught:
                engine.generate(prompt, raw=isinstance(prompt, str))
            assert caught.value.hint


# The command.


@pytest.mark.parametrize("arguments", [["inspect"], ["run", "--prompt", "1"]])
def test_the_command_shows_no_traceback(folder: Path, arguments: list[str]) -> None:
    from click.testing import CliRunner

    change(folder, put("engines", "\x1b[2J\ud83d\ude00", value=float("1")))
    result = CliRunner().invoke(command, [arguments[0], str(folder), *arguments[1:]])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 2 and "\x1b" not in result.stderr


# At random.

EXAMPLES = {"manifest": 150, "template": 100, "prompt": 60, "tokenizer": 100}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def make(kind: str) -> Any:
        if kind not in made:
            made[kind] = fuzz_cases.KINDS[kind](tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


@pytest.mark.parametrize("kind", [kind for kind in fuzz_cases.KINDS if kind != "engine"])
def test_changed_at_random(kind: str, cases: Callable[[str], Any]) -> None:
    """Anything but an error raised on purpose, with a message, fails here."""
    found = cases(kind)

    @settings(max_examples=EXAMPLES.get(kind, 300), derandomize=True, database=None, deadline=None)
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        try:
            found.run(random.Random(seed))
        except SpecrunError as error:
            assert str(error)

    run()


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(st.lists(st.sampled_from(fuzz_cases.PIECES), max_size=12).map("".join))
def test_parts_with_nothing_plain_are_the_text(text: str) -> None:
    if not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text):
        return
    ids = TINY.encode(text, add_special_tokens=False)
    assert TINY.encode_parts(text, []) == ids
    spans = TINY.special_spans(text)
    plain = TINY.encode(text, add_special_tokens=False, parse_special=False)
    assert TINY.encode_parts(text, spans) == plain
    assert not TINY.special_ids & set(plain)
    if not spans:
        assert plain == ids


TINY = Tokenizer(fuzz_cases.TINY / "tokenizer.json")


def test_the_fuzzer_sees_what_is_opened_elsewhere(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import fuzz; from pathlib import Path;"
        "watch = fuzz.Watch(Path(sys.argv[2])); open(sys.argv[2] + '/a', 'w').close();"
        "assert not watch.seen, watch.seen; open('/etc/passwd').close();"
        "assert watch.seen == ['/etc/passwd'], watch.seen"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT / "scripts"), str(tmp_path)], check=True)


def test_the_fuzzer_runs() -> None:
    script = [
        sys.executable,
        str(ROOT / "scripts" / "fuzz.py"),
        "--count",
        "30",
        "--only",
        "tuning",
    ]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    counts = last["kinds"]["tuning"]
    assert counts["accepted"] + counts["refused"] == 30
    assert np.sum(list(counts.values())) == 30
