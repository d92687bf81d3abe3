"""Answers in parts, piece by piece: what transformers' parser finds in the whole text."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_template_utils import render_jinja_template

from specexport.response_formats import fixed_texts, of_chat_template, of_response_template
from specrun.chat import render
from specrun.response import ResponseReader
from specrun.response_format import Channel, Region, ResponseFormat
from specrun.stopping import Stopping
from specrun.text import Tokenizer

CHANNELS: tuple[Channel, ...] = ("thinking", "content", "tool_calls")
TEMPLATES = {names[0]: spec for names, spec in _RESPONSE_TEMPLATE_FALLBACKS.items()}
# Special in the vocabulary of Gemma 4; of Qwen added, and not special.
SPECIAL = [
    *("<eos>", "<turn|>", "<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *('<|"|>', "<|tool_response>", "<tool_response|>", "<|im_start|>", "<|im_end|>"),
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def byte_level(*, added: bool) -> Tokenizer:
    """A token per byte, the special ones, and where ``added`` those of Qwen that are not."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if added:
        backend.add_tokens(ADDED)
    return Tokenizer.wrap(backend)


TOKENIZERS = {"tokens of their own": byte_level(added=True), "text": byte_level(added=False)}
FORMATS = {name: of_response_template(spec["fields"]) for name, spec in TEMPLATES.items()}


def read(
    tokenizer: Tokenizer,
    format: ResponseFormat | None,
    text: str,
    *,
    prompt: str = "",
    block: int = 1,
    **options: Any,
) -> ResponseReader:
    """Fed with ``text`` in blocks; the pieces together are what the reader says of each part."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    before = tokenizer.encode(prompt, add_special_tokens=False)
    reader = ResponseReader(tokenizer, format, before, **options)
    pieces = [p for i in range(0, len(ids), block) for p in reader.feed(ids[i : i + block])]
    pieces += reader.finish()
    for channel in CHANNELS:
        joined = "".join(piece.text for piece in pieces if piece.channel == channel)
        assert joined == reader.text_of(channel)
    assert all(piece.text for piece in pieces)
    return reader


QWEN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
GEMMA = "<|turn>user\nHi<turn|>\n<|turn>model\n"
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC < 1"}}\n</tool_call>'
XML = "<tool_call>\n<function=now>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n</tool_call>"
GEMMA_CALL = '<|tool_call>call:now{zone:<|"|>UTC<|"|>}<tool_call|>'
WHOLE = {
    ("qwen2", QWEN, "<think>\nHm, 1 < 2.\n</think>\n\nYes.<|im_end|>"),
    ("qwen2", QWEN, "Just this."),
    ("qwen2", QWEN, f"<think>\na</think>\n\nLet me see.\n{CALL}\n{CALL}<|im_end|>"),
    ("qwen2", QWEN + "<think>\n", "Hm.\n</think>\n\n  Yes, wörld 🙂. \n<|im_end|>"),
    ("qwen2", QWEN + "<think>\n\n</think>\n\n", "Yes."),
    ("qwen2", QWEN, "<think>never at an end"),
    ("qwen3_5", QWEN + "<think>\n", f"Hm.</think>\n\n{XML}<|im_end|>"),
    ("gemma4", GEMMA, "<|channel>thought\nHm.\n<channel|>The answer.<turn|>"),
    ("gemma4", GEMMA, f"<|channel>thought\nHm.<channel|>{GEMMA_CALL}{GEMMA_CALL}<|tool_response>"),
    ("gemma4", GEMMA, "Plain.<turn|>"),
    ("gemma4", GEMMA + "<|channel>thought\n<channel|>", "Plain.<eos>"),
}


@pytest.mark.parametrize("block", [1, 2, 7, 1000])
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("family", "prompt", "text"), sorted(WHOLE))
def test_equals_parse_response(kind: str, family: str, prompt: str, text: str, block: int) -> None:
    """Thought and content as text; tool calls as text that has the same calls in it."""
    template = TEMPLATES[family]
    theirs = parse_response(text, template, prefix=prompt)
    reader = read(TOKENIZERS[kind], FORMATS[family], text, prompt=prompt, block=block)
    assert reader.text_of("thinking") == theirs.get("reasoning_content", "")
    assert reader.text_of("content") == theirs.get("content", "")
    calls = reader.text_of("tool_calls")
    again = parse_response(calls, template, prefix=prompt.split("<think>")[0])
    assert again.get("tool_calls") == theirs.get("tool_calls")
    assert re.sub(r"\s", "", calls) in re.sub(r"\s", "", text)


PARTS = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel>thought\n"),
            *("<channel|>", "<|tool_call>", "<tool_call|>", "<|im_end|>", "<eos>", "<|channel>"),
            *("a", " b", "\n", "  ", "ö", "🙂", "<", "</", "<th", "<tool", "thought\n", "ink>"),
        ]
    ),
    max_size=12,
)
MARKED = {
    "qwen": of_chat_template("<think></think><tool_call></tool_call>"),
    "gemma": of_chat_template("<|channel><channel|><|tool_call><tool_call|>"),
    "several": ResponseFormat(
        thinking=Region(("<think>", "<think>a"), ("</think>", "<eos>")),
        content=Region(("<|channel>",), ("<channel|>", "b")),
    ),
    "no end": ResponseFormat(tool_calls=Region(("<tool_call>",), ())),
}


def oracle(format: ResponseFormat, text: str) -> dict[Channel, str]:
    """What transformers' own streaming parser says, all regions of a part together."""
    fields: dict[str, Any] = {"content": {}}
    for channel, region in format.regions().items():
        ends = {"close": list(region.ends)} if region.ends else {}
        fields[channel] = {"open": list(region.starts), **ends}
    parser = ResponseParser({"start_anchor": "\0", "fields": fields}, prefix="")
    events = parser.feed(text)
    events += parser.finalize()[1]
    found: dict[Channel, str] = {"thinking": "", "content": "", "tool_calls": ""}
    for event in events:
        if event["type"] == "region_chunk":
            found[event["field"]] += event["text"]
    return found


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(MARKED)), st.sampled_from(sorted(TOKENIZERS)), PARTS)
def test_any_text(name: str, kind: str, parts: list[str]) -> None:
    format, text = MARKED[name], "".join(parts)
    assert format is not None
    theirs = oracle(format, text)
    reader = read(TOKENIZERS[kind], format, text)
    special = re.compile("|".join(map(re.escape, SPECIAL)))
    for channel in ("thinking", "content"):
        assert reader.text_of(channel) == special.sub("", theirs[channel]).strip()
    ours = reader.text_of("tool_calls")
    if format.tool_calls is not None:
        for mark in (*format.tool_calls.starts, *format.tool_calls.ends):
            ours, theirs["tool_calls"] = (t.replace(mark, "") for t in (ours, theirs["tool_calls"]))
    assert ours == theirs["tool_calls"]


@settings(max_examples=200, deadline=None)
@given(PARTS, st.lists(st.sampled_from(["a", " b", "\n<", "ink", "öa", "b\n"]), max_size=2))
def test_without_a_format_it_is_the_text(parts: list[str], stop: list[str]) -> None:
    """The very text of a generation, its stop strings included."""
    tokenizer = TOKENIZERS["text"]
    ids = tokenizer.encode("".join(parts), add_special_tokens=False)
    stopping = Stopping(tokenizer, eos_token_ids=(), stop=stop, max_tokens=len(ids) + 1)
    cut = stopping.take(ids)
    whole = cut.text + ("" if cut.reason else stopping.finish())
    reader = ResponseReader(tokenizer, None, stop=stop)
    pieces = [piece for id_ in ids[: cut.kept] for piece in reader.feed([id_])] + reader.finish()
    assert "".join(piece.text for piece in pieces) == whole
    assert {piece.channel for piece in pieces} <= {"content"}


def test_a_stop_string_across_parts() -> None:
    """It is looked for in the text without special tokens, as the generation does."""
    tokenizer = TOKENIZERS["text"]
    text = "<|channel>thought\nab<channel|>cd"
    reader = read(tokenizer, FORMATS["gemma4"], text, stop=["bc"])
    assert [reader.text_of(channel) for channel in CHANNELS] == ["a", "", ""]


def test_a_special_token_that_is_only_spelled() -> None:
    """A model that quotes a mark has not given it."""
    tokenizer = TOKENIZERS["text"]
    spelled = tokenizer.encode("<|tool_call>x", add_special_tokens=False, parse_special=False)
    reader = ResponseReader(tokenizer, FORMATS["gemma4"])
    assert reader.feed(spelled) + reader.finish()
    assert reader.text_of("content") == "<|tool_call>x"


def test_pieces_come_as_soon_as_they_are_sure() -> None:
    tokenizer = TOKENIZERS["text"]
    reader = ResponseReader(tokenizer, FORMATS["qwen2"])
    pieces = []
    for char in "<think>\nab</think>\n\nc <d \n":
        ids = tokenizer.encode(char, add_special_tokens=False)
        pieces.append([(piece.channel[0], piece.text) for piece in reader.feed(ids)])
    pieces.append([(piece.channel[0], piece.text) for piece in reader.finish()])
    said = [(i, *piece) for i, found in enumerate(pieces) for piece in found]
    assert said == [
        (8, "t", "a"),
        (9, "t", "b"),
        (20, "c", "c"),
        (23, "c", " <d"),
    ]


def test_an_end_id_is_no_part_of_a_call() -> None:
    tokenizer = TOKENIZERS["text"]
    eos = tokenizer.id_of("<eos>")
    assert eos is not None
    reader = read(tokenizer, FORMATS["qwen2"], '<tool_call><|"|>{<eos>', end_ids=[eos])
    assert reader.text_of("tool_calls") == '<tool_call><|"|>{'


@pytest.mark.parametrize(
    ("pattern", "start", "end"),
    [
        (r"\s*<tool_call>", ("<tool_call>",), ("<tool_call>",)),
        (r"<\|tool_call>call:(?P<name>\w+)", ("<|tool_call>call:",), ()),
        (r"</function>\s*</tool_call>\s*$", ("</function>",), ("</tool_call>",)),
        (r"a|b", (), ()),
        (r"<x>+", ("<x",), ()),
        (r"[abc]", (), ()),
        (r"\s*", (), ()),
        (r"((", (), ()),
        (r"a++", (), ()),
    ],
)
def test_fixed_texts_of_patterns(
    pattern: str, start: tuple[str, ...], end: tuple[str, ...]
) -> None:
    assert fixed_texts(pattern, last=False) == start
    assert fixed_texts(pattern, last=True) == end


# In the manner of Qwen3's: thoughts, calls, tools, and a switch.
TEMPLATE = r"""{%- for t in tools or [] %}{{ '<tools>' + (t | tojson) }}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}
{%- endif %}{% endif %}"""


@pytest.mark.parametrize("thinking", [None, True, False])
def test_messages_with_thoughts_and_calls_are_rendered_as_by_transformers(thinking: Any) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "ü"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [call]},
        {"role": "tool", "content": "12:30"},
    ]
    tools: Any = [{"type": "function", "function": {"name": "now", "description": "<ü>"}}]
    switch = {} if thinking is None else {"enable_thinking": thinking}
    [theirs], _ = render_jinja_template(
        conversations=[messages],
        chat_template=TEMPLATE,
        tools=tools,
        add_generation_prompt=True,
        **switch,
    )
    assert render(TEMPLATE, messages, {}, tools=tools, enable_thinking=thinking) == theirs
    assert "<think>Hm</think>" in theirs
    assert ("</think>\n\n" in theirs) == (thinking is False)


def test_formats_of_families() -> None:
    assert of_chat_template("{{ messages }}") is None
    r1 = of_chat_template("{% set content = content.split('</think>')[-1] %}")
    assert r1 == ResponseFormat(thinking=Region(("<think>",), ("</think>",)))
    for start, end in (("[THINK]", "[/THINK]"), ("<think>", "</think>")):
        found = of_chat_template(f"'{start}' + thought + '{end}'")
        assert found == ResponseFormat(thinking=Region((start,), (end,)))
    deepseek = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    for start, end in (("<tool_call>", "</tool_call>"), deepseek):
        found = of_chat_template(f"'{start}' + call + '{end}'")
        assert found == ResponseFormat(tool_calls=Region((start,), (end,)))
    gemma = FORMATS["gemma4"]
    assert gemma is not None and gemma.tool_calls is not None
    assert gemma.thinking == Region(("<|channel>thought\n",), ("<channel|>",))
    assert gemma.tool_calls.starts == ("<|tool_call>call:",)
    assert of_response_template({"content": {}, "thinking": {"open_pattern": "a|b"}}) is None
    assert of_response_template({"thinking": {"open": ["x" * 300]}}) is None


@pytest.mark.parametrize(
    ("starts", "ends", "says"),
    [
        ([], ["a"], "starts must hold a text"),
        ([" "], ["a"], "starts must be texts of 1 to 200 characters that are not all blank"),
        (["a"], ["x" * 201], "ends must be texts of 1 to 200 characters"),
        (["a"] * 17, [], "starts must be at most 16 texts, got 17"),
    ],
)
def test_what_a_region_refuses(starts: list[str], ends: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Region(tuple(starts), tuple(ends))
