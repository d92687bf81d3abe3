"""What makes ids of a text and nobody should trust: tokenizers, chat templates, prompts."""

# ruff: noqa: E501 (a template is easier to read in one piece)

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import toys
from hostile import refused, replace_file, write_folder
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from toys import Change, Toy, put

import specrun
from specrun import EngineError, FolderError, UsageError, chat, chat_limits
from specrun.text import Tokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import fuzz_cases  # noqa: E402  # pyright: ignore[reportMissingImports]

USER = [{"role": "user", "content": "Hi there"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


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


def test_waiting_is_no_work() -> None:
    """A machine that is busy with other things stops no template."""
    budget = chat_limits.Budget(0, 0.1)
    time.sleep(0.2)
    assert budget.tick()


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
