"""Hostile inputs, made from valid ones, and what is done with each: the cases of ``fuzz.py``.

A case is made from a seed and its number alone, so that one that was found can be made again. Each
kind starts from a valid file and changes values, types, fields or bytes of it.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "export" / "specexport" / "bundled" / "gemma4-tiny" / "target"
sys.path.insert(0, str(ROOT / "tests"))

import toys  # noqa: E402

from specexport import gguf_header, safetensors_files  # noqa: E402
from specrun import chat, load, manifest, tuning  # noqa: E402
from specrun.manifest_lines import lines  # noqa: E402
from specrun.options import GenerateOptions  # noqa: E402
from specrun.text import Tokenizer  # noqa: E402

CHAT = (
    "{{ bos_token }}{% for message in messages %}<|turn>{{ message.role }}\n"
    "{{ message.content | trim }}<turn|>\n{% endfor %}{% if add_generation_prompt %}7{% endif %}"
)

# Values that somebody may put in place of another.
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 256, 10**6, 10**9, 2**31, 2**32, 2**53, 10**18, 2**63 - 1,
    -(2**63), 2**64, 10**40, 0.0, -0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"),
    "", "x", "hot", "../target.onnx", "/etc/passwd", "..\\x", "a" * 300, "a\0b", "\ud800",
    "\x1b[2J", "target.onnx", "TARGET.onnx", "manifest.json", "*/_ORT_MEM_ADDR_/*", "\u202eevil",
    "float32", "{{ 1 }}", [], {}, [[]], [None], [0], {"a": 1}, ["x"] * 50,
    [[[[[[[[[[[[0]]]]]]]]]]]],
)  # fmt: skip


def mutate_json(rng: random.Random, data: Any, changes: int = 1) -> Any:
    """A copy of ``data`` with values, types and fields of it changed."""
    data = copy.deepcopy(data)
    for _ in range(changes):
        places = _places(data)
        if not places:
            return rng.choice(NASTY)
        holder, key = rng.choice(places)
        _change(rng, holder, key, places)
    return data


def _places(data: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [data]
    while waiting:
        item = waiting.pop()
        pairs = list(item.items()) if isinstance(item, dict) else list(enumerate(item))
        for key, value in pairs:
            found.append((item, key))
            if isinstance(value, (dict, list)):
                waiting.append(value)
    return found


def _change(rng: random.Random, holder: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    what = rng.randrange(8)
    if what == 0:
        del holder[key]
    elif what == 1:
        other, its = rng.choice(places)
        if its in other if isinstance(other, dict) else its < len(other):
            holder[key] = copy.deepcopy(other[its])
    elif what == 2 and isinstance(holder, dict):
        holder[str(rng.choice(["colour", key + "x", key.upper(), "", "a" * 5000]))] = holder[key]
    elif what == 2:
        holder += [copy.deepcopy(holder[key])] * rng.choice([1, 2, 100])
    elif what == 3 and isinstance(holder[key], str) and holder[key]:
        holder[key] = _mutate_text(rng, holder[key])
    elif what == 4 and isinstance(holder[key], int):
        holder[key] += rng.choice([-1, 1, 10, 2**31, -(2**31)])
    else:
        holder[key] = copy.deepcopy(rng.choice(NASTY))


def _mutate_text(rng: random.Random, text: str) -> str:
    place = rng.randrange(len(text))
    piece = rng.choice(["", "/", "..", "\0", "a", "é", "\ud800", "\n", "9" * 50, text])
    return text[:place] + piece + text[place + rng.randrange(3) :]


def dump(rng: random.Random, data: Any) -> bytes:
    """JSON as a hostile writer may have it."""
    text = json.dumps(data, ensure_ascii=rng.random() < 0.9)
    what = rng.randrange(20)
    if what == 0:  # a field twice
        text = text.replace("{", '{"format": 1, "format": 3, ', 1)
    elif what == 1:
        number = rng.choice(["9" * 5000, "1e999", "-1e999", "NaN", "0x10", "1" + "0" * 400 + ".5"])
        start = rng.randrange(len(text) + 1)
        text = text[:start] + text[start:].replace("1", number, 1)
    elif what == 2:
        depth = rng.choice([100, 990, 100_000])
        text = text.replace("1", "[" * depth + "]" * depth, 1)
    data = text.encode("utf-8", "surrogatepass")
    return mutate_bytes(rng, data) if what == 3 else data


def mutate_bytes(rng: random.Random, data: bytes, most: int = 4) -> bytes:
    """``data`` with bits flipped, pieces cut, doubled or moved, and numbers overwritten."""
    out = bytearray(data)
    for _ in range(rng.randint(1, most)):
        place = rng.randrange(len(out) + 1)
        what = rng.randrange(7)
        if what == 0 and out:
            out[place % len(out)] ^= 1 << rng.randrange(8)
        elif what == 1:
            del out[place:]
        elif what == 2:
            del out[place : place + rng.choice([1, 2, 8, 64])]
        elif what == 3:
            out[place:place] = rng.randbytes(rng.choice([1, 4, 8, 64]))
        elif what == 4:
            start = rng.randrange(len(out) + 1)
            out[place:place] = out[start : start + rng.choice([8, 32, 200])]
        else:
            number = rng.choice([0, 1, 2**16, 2**31, 2**32 - 1, 2**60, 2**62, 2**63, 2**64 - 1])
            width = rng.choice([4, 8])
            raw = (number & (256**width - 1)).to_bytes(width, "little")
            out[place : place + width] = raw
    return bytes(out)


class Manifests:
    """A folder whose manifest was changed, or some file of it, is opened and run."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "engines"
        toy = toys.Toy(
            drafter=True,
            chat_template=CHAT,
            max_context=64,
            eos=(9,),
            defaults=(("temperature", 0.7), ("top_k", 3), ("do_sample", True), ("other", [1])),
        )
        toys.write_folder(self.folder, toy)
        self.kept = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.data = json.loads(self.kept[manifest.MANIFEST])

    def run(self, rng: random.Random) -> None:
        """One case."""
        for name, content in self.kept.items():
            (self.folder / name).write_bytes(content)
        if rng.random() < 0.15:
            self._change_file(rng)
        else:
            text = dump(rng, mutate_json(rng, self.data, rng.choice([1, 1, 1, 2, 5])))
            (self.folder / manifest.MANIFEST).write_bytes(text)
        lines(manifest.read(self.folder, integrity="full"))
        with load(self.folder, threads=1) as engine:
            engine.generate("12", max_new_tokens=3)
            engine.generate([1, 2], max_new_tokens=3, method="plain", do_sample=False)

    def _change_file(self, rng: random.Random) -> None:
        """Cut, swapped or changed; the manifest says what it was."""
        names = sorted(self.kept)
        name, other = rng.choice(names), rng.choice(names)
        if rng.random() < 0.3:
            (self.folder / name).write_bytes(self.kept[other])
        elif rng.random() < 0.2:
            (self.folder / name).unlink()
        else:
            (self.folder / name).write_bytes(mutate_bytes(rng, self.kept[name]))


class Engines(Manifests):
    """A graph that was changed, in a folder whose manifest says that it is right."""

    def run(self, rng: random.Random) -> None:
        """One case."""
        for name, content in self.kept.items():
            (self.folder / name).write_bytes(content)
        name = rng.choice(["target.onnx", "mtp_drafter.onnx"])
        content = mutate_bytes(rng, self.kept[name], rng.choice([1, 2]))
        (self.folder / name).write_bytes(content)
        data = copy.deepcopy(self.data)
        sha256 = hashlib.sha256(content).hexdigest()
        for entry in data["files"]:
            if entry["path"] == name:
                entry.update(size=len(content), sha256=sha256)
        if name == "target.onnx":
            data["drafters"]["mtp-drafter"]["target_sha256"] = sha256
        (self.folder / manifest.MANIFEST).write_text(json.dumps(data))
        with load(self.folder, threads=1) as engine:
            engine.generate("12", max_new_tokens=3, strict=True)


class Tunings:
    """A tuning file that was changed is read, and a schedule is asked for."""

    def __init__(self, root: Path) -> None:
        self.path = root / "tuning.json"
        self.machine = tuning.Machine("cpu", 2, "cpu", "1.32")
        points = ((0, 0.0), (1, 0.01), (4, 0.02))
        costs = tuple(
            tuning.MethodCosts(length, points, ((1, 0.1), (4, 0.2)), 0.001, 0.002)
            for length in (64, 512)
        )
        entry = tuning.Entry(self.machine, {"target.onnx": "0" * 64}, {"mtp": costs})
        tuning.write(self.path, entry)
        self.data = json.loads(self.path.read_bytes())

    def run(self, rng: random.Random) -> None:
        """One case."""
        changed = mutate_json(rng, self.data, rng.choice([1, 1, 2, 4]))
        self.path.write_bytes(dump(rng, changed))
        found = tuning.read(self.path, inside=self.path.parent)
        for entry in found.entries:
            for method in entry.methods:
                for length in (0, 100, 10**6):
                    costs = entry.costs(method, length)
                    if costs is not None:
                        assert len(costs.rounds(16)) == 17
        found.find(self.machine, {"target.onnx": "0" * 64})


class Ggufs:
    """The header of a GGUF file whose bytes were changed is read."""

    def __init__(self, root: Path) -> None:
        from gguf import GGUFWriter

        self.path = root / "model.gguf"
        writer = GGUFWriter(self.path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_rope_freq_base(10000.0)
        writer.add_token_list([f"t{i}" for i in range(12)])
        writer.add_token_scores([0.5] * 12)
        writer.add_chat_template(CHAT)
        writer.add_array("llama.list", [1, 2, 3])
        for name in ("token_embd.weight", "output_norm.weight"):
            writer.add_tensor(name, np.ones((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.content = self.path.read_bytes()

    def run(self, rng: random.Random) -> None:
        """One case."""
        self.path.write_bytes(mutate_bytes(rng, self.content))
        header = gguf_header.read(self.path)
        assert all(
            entry.offset + entry.nbytes <= self.path.stat().st_size for entry in header.tensors
        )


class Safetensors:
    """A checkpoint folder whose headers or index were changed is read, every tensor of it."""

    def __init__(self, root: Path) -> None:
        from safetensors.numpy import save

        self.folder = root / "checkpoint"
        self.folder.mkdir()
        (root / "outside.safetensors").write_bytes(save({"secret": np.ones(4, np.float32)}))
        self.content: bytes = save(
            {"a": np.ones((4, 3), np.float32), "b": np.ones(5, np.float16), "c": np.ones((), "i4")}
        )
        self.index = {
            "metadata": {},
            "weight_map": {"a": "one.safetensors", "b": "two.safetensors"},
        }

    def run(self, rng: random.Random) -> None:
        """One case."""
        for path in self.folder.iterdir():
            path.unlink()
        names = ["one.safetensors", "two.safetensors"]
        for name in names:
            (self.folder / name).write_bytes(self.content)
        what = rng.randrange(4)
        if what == 0:
            (self.folder / names[0]).write_bytes(mutate_bytes(rng, self.content))
        elif what == 1:
            (self.folder / names[0]).write_bytes(self._other_header(rng))
        elif what == 2:
            (self.folder / safetensors_files.INDEX).write_bytes(
                dump(rng, mutate_json(rng, self.index, rng.choice([1, 2])))
            )
        else:
            path = self.folder / names[1]
            path.unlink()
            path.symlink_to(
                rng.choice(["../outside.safetensors", "/etc/passwd", names[0], names[1]])
            )
        safetensors_files.check_links(self.folder)
        for tensor in safetensors_files.read_folder(self.folder).values():
            tensor.rows(0, tensor.shape[0] if tensor.shape else 1)

    def _other_header(self, rng: random.Random) -> bytes:
        length = int.from_bytes(self.content[:8], "little")
        header = json.loads(self.content[8 : 8 + length])
        text = dump(rng, mutate_json(rng, header, rng.choice([1, 1, 2, 3])))
        return len(text).to_bytes(8, "little") + text + self.content[8 + length :]


# What templates are put together from.
WHOLE = (
    "'a'", "1", "99999", "1000000000", "[1]", "{'a': 1}", "messages", "x", "ns.x", "ns",
    "range(99999)", "messages[0].content", "bos_token", "none", "true", "2.5", "'%s'", "'%9999d'",
    "'{:>9}'", "loop", "'a' * 99999", "range(9)", "namespace(x=1)", "cycler(1, 2)", "joiner(',')",
    "dict(a=1)",
)  # fmt: skip
FILTERS = (
    "abs", "attr('x')", "batch(3)", "capitalize", "center(99999)", "center(50)", "default('')",
    "dictsort", "escape", "filesizeformat", "first", "float", "format(1, 2)", "groupby('role')",
    "indent(9999)", "int", "items", "join", "join('ab')", "last", "length", "list", "lower",
    "map('upper')", "map(attribute='x')", "max", "min", "pprint", "random", "reject",
    "replace('a', 'bbbbbbbb')", "reverse", "round(2)", "round(999999, 'ceil')", "safe", "select",
    "slice(3)", "slice(999999999)", "sort", "string", "striptags", "sum", "sum(start=[])", "title",
    "tojson", "tojson(indent=2)", "trim", "truncate(3)", "unique", "upper", "urlencode", "urlize",
    "wordcount", "wordwrap(1)", "xmlattr",
)  # fmt: skip
METHODS = (
    "upper()", "split('a')", "split()", "join(['a', 'b'])", "replace('', 'aaaaaa')", "format(1)",
    "format_map({})", "center(999999)", "zfill(9)", "ljust(10**9)", "encode('idna')", "encode()",
    "strip('ab')", "translate({97: 'aaaa'})", "expandtabs(99999)", "__class__", "items()", "keys()",
    "append(1)", "get('a')", "copy()", "count('a')", "index(1)", "to_bytes(999999999, 'big')",
    "bit_length()", "fromkeys([1, 2])", "x", "next()", "splitlines()", "rsplit('a')", "title()",
)  # fmt: skip
OPERATORS = ("+", "-", "*", "**", "/", "//", "%", "~", "==", "<", "in", "and", "or", "not in", ">=")


def template(rng: random.Random, depth: int = 0) -> str:
    """Statements that may mean anything."""
    return "".join(_statement(rng, depth) for _ in range(rng.randint(1, 4)))


def _statement(rng: random.Random, depth: int) -> str:
    what = rng.randrange(10 if depth < 4 else 4)
    value = _expression(rng)
    if what < 3:
        return f"{{{{ {value} }}}}"
    if what == 3:
        return f"{{% set {rng.choice(['x', 'ns.x', 'ns', 'x'])} = {value} %}}"
    body = template(rng, depth + 1)
    if what < 7:
        test = f" if {_expression(rng)}" if rng.random() < 0.2 else ""
        again = " recursive" if rng.random() < 0.1 else ""
        return f"{{% for x in {value}{test}{again} %}}{body}{{% endfor %}}"
    if what == 7:
        return f"{{% if {value} %}}{body}{{% else %}}b{{% endif %}}"
    if what == 8:
        call = rng.choice(["", "{{ m(x) }}", "{{ m(1) }}{{ m(2) }}"])
        return f"{{% macro m(x) %}}{body}{call}{{% endmacro %}}{{{{ m({value}) }}}}"
    return f"{{% set x %}}{body}{{% endset %}}"


def _expression(rng: random.Random, depth: int = 0) -> str:
    what = rng.randrange(8 if depth < 4 else 1)
    if what < 2:
        return rng.choice(WHOLE)
    inner = _expression(rng, depth + 1)
    if what < 4:
        return f"({inner} {rng.choice(OPERATORS)} {_expression(rng, depth + 1)})"
    if what == 4:
        return f"({inner})|{rng.choice(FILTERS)}"
    if what == 5:
        return f"({inner}).{rng.choice(METHODS)}"
    if what == 6:
        return rng.choice([f"[{inner}, {inner}]", f"({inner}, x)", f"{{{inner}: 1}}"])
    return f"({inner})[{rng.choice(['0', '-1', '1:', '::-1', '999', repr('x')])}]"


class Templates:
    """A template that was put together at random, or a real one that was changed, is rendered."""

    def __init__(self, root: Path) -> None:
        del root
        self.real = [CHAT, (TINY / "chat_template.jinja").read_text(encoding="utf-8")]
        self.messages = [
            {"role": "user", "content": "Hi <b> & ü\nthere"},
            {"role": "assistant", "content": "Yes"},
        ]

    def run(self, rng: random.Random) -> None:
        """One case."""
        if rng.random() < 0.2:
            text = rng.choice(self.real)
            for _ in range(rng.randint(1, 5)):
                text = _mutate_text(rng, text)
        else:
            text = "{% set ns = namespace(x='a') %}" + template(rng)
        out = chat.render(text, self.messages, {"bos_token": "<s>"})
        assert len(out) < 70 << 20


PIECES = (
    "a", " ", "\n", "\0", "\ud800", "\u202e", "\u0301", "👨‍👩‍👧", "<eos>", "<bos>", "<|turn>",
    "<turn|>", "<EOS>", "<|TURN>", "<e", "os>", "\ufdd0", "\ufdd1", "\ue000", "\uffff", "\x1b[2J",
    "한", "é", "<pad>", "<|turn>model\n", "<0x41>", "▁", "the ", "{{ 1 }}", "\u2028", "\U0010ffff",
)  # fmt: skip


class Prompts:
    """A text of strange characters and special tokens, as prompt and as messages."""

    def __init__(self, root: Path) -> None:
        backend = _tokenizer(TINY / "tokenizer.json")
        toy = toys.Toy(tokenizer=backend, chat_template=CHAT, max_context=1 << 20, bos=2)
        toys.write_folder(root / "engines", toy)
        self.engine = load(root / "engines", threads=1)
        self.special = self.engine.tokenizer.special_ids

    def run(self, rng: random.Random) -> None:
        """One case."""
        pieces = [
            rng.choice(PIECES) * rng.choice([1, 1, 1, 2, 50]) for _ in range(rng.randrange(12))
        ]
        text = "".join(pieces)
        if rng.random() < 0.02:
            text = (text * (50_000 // max(1, len(text))))[:50_000]
        raw = rng.random() < 0.4
        options = GenerateOptions(raw=raw, system=None if raw else rng.choice([None, "<eos>", "b"]))
        ids = self.engine.encode(text, options)
        counts = sum(id_ in self.special for id_ in ids)
        messages = 0 if raw else 1 + (options.system is not None)
        if text or not raw:
            bos = 1 if raw or text or options.system else 0
            written = 2 * messages if text or options.system else 0
            assert counts <= max(1, bos + written), (text, ids)
        self.engine.tokenizer.decode(ids)


def _tokenizer(path: Path) -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(path))


class Tokenizers:
    """A tokenizer file that was changed is opened, and encodes and decodes."""

    def __init__(self, root: Path) -> None:
        self.path = root / "tokenizer.json"
        tiny = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
        kept = dict(list(tiny["model"]["vocab"].items())[:400])
        tiny["model"]["vocab"] = kept
        tiny["model"]["merges"] = [
            pair for pair in tiny["model"]["merges"] if {*pair, "".join(pair)} <= kept.keys()
        ]
        toy = json.loads(toys.toy_tokenizer(toys.Toy(specials=("<s>",))).to_str())
        self.bases = [tiny, toy, self._unigram(tiny)]

    def _unigram(self, tiny: Any) -> Any:
        vocab = [["<unk>", 0.0], ["a", -1.0], ["▁", -2.0], ["b", -3.0]]
        model = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}
        charsmap = base64.b64encode(bytes(8)).decode()
        normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
        return tiny | {"model": model, "normalizer": normalizer, "added_tokens": []}

    def run(self, rng: random.Random) -> None:
        """One case."""
        base = rng.choice(self.bases)
        if rng.random() < 0.7:  # the vocabulary is the largest part and the least interesting
            small = {key: value for key, value in base.items() if key != "model"}
            changed = mutate_json(rng, small, rng.choice([1, 2, 4]))
            data = changed | {"model": base["model"]} if isinstance(changed, dict) else changed
        else:
            data = mutate_json(rng, base, rng.choice([1, 2]))
        self.path.write_bytes(dump(rng, data))
        tokenizer = Tokenizer(self.path)
        for text in ("hello <eos> ab", "", "a" * 3000, "12\0é👨‍👩‍👧 " * 20):
            ids = tokenizer.encode(text, add_special_tokens=True, parse_special=False)
            tokenizer.encode_parts(text, tokenizer.special_spans(text)[:1])
            tokenizer.decode(ids[:500])


KINDS: dict[str, Callable[[Path], Any]] = {
    "manifest": Manifests,
    "engine": Engines,
    "tuning": Tunings,
    "gguf": Ggufs,
    "safetensors": Safetensors,
    "template": Templates,
    "prompt": Prompts,
    "tokenizer": Tokenizers,
}


def rng_of(kind: str, seed: int, number: int) -> random.Random:
    """The random numbers of one case."""
    return random.Random(f"{kind} {seed} {number}")


def fresh(root: Path) -> Path:
    """An empty folder for the files of one kind."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    return root
