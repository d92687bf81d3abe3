"""The server as OpenAI's client sees it: texts, streams, every field, errors, counts."""

from __future__ import annotations

import dataclasses
import json
import string
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import MODEL, TOY, Serving, serving
from toys import Toy

from specrun import Result, Round, UsageError
from specrun.origin import ORIGINS, origins
from specrun.response_format import Region, ResponseFormat
from specrun.serve.problems import of

METHODS = ("plain", "prompt-lookup", "mtp-drafter", "draft")
PROMPT = [1, 2, 3, 1, 2]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("served")) as made:
        yield made


def alone(served: Serving, **options: Any) -> Result:
    """What the engine gives for the prompt that the tests send."""
    return served.alone.generate(PROMPT, **options)


def text_of(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
    texts = [c.delta.content if hasattr(c, "delta") else c.text for c in choices]
    return "".join(text or "" for text in texts)


# Models.


def test_models(served: Serving) -> None:
    assert [model.id for model in served.client.models.list()] == [MODEL]
    assert served.client.models.retrieve(MODEL).max_context == TOY.max_context  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here") as error:
        served.client.models.retrieve("gpt")
    assert error.value.code == "model_not_found"
    for field in ({"model": "gpt"}, {"model": "gpt", "stream": True}):
        answer = served.post(**field)
        assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"
    assert served.post(max_tokens=1).status_code == 200  # there is only one


# Texts.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [None, 1, 4])
def test_texts_are_those_of_the_engine(served: Serving, method: str, k: int | None) -> None:
    """Whole and streamed, chat and completion, every method; and usage counts what is there."""
    wanted = alone(served, method=method, max_new_tokens=30, num_assistant_tokens=k)
    assert wanted.tokens == TOY.plain(PROMPT, 30)
    extra = {"method": method, "num_assistant_tokens": k, "return_stats": True}
    for answer in (
        served.chat(max_tokens=30, extra_body=extra),
        served.complete(max_tokens=30, extra_body=extra),
        served.complete(PROMPT, max_tokens=30, extra_body=extra),
    ):
        (choice,) = answer.choices
        text = choice.message.content if hasattr(choice, "message") else choice.text
        assert (text, choice.finish_reason) == (wanted.text, "length")
        stats = choice.specrun["stats"]
        assert (stats["method"], stats["drafted"]) == (method, wanted.stats.drafted)
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, 30)
        assert usage.total_tokens == 35
        assert stats["accepted"] + stats["rounds"] + 1 == usage.completion_tokens
    for chunks in (
        list(served.chat(max_tokens=30, stream=True, extra_body=extra)),
        list(served.complete(max_tokens=30, stream=True, extra_body=extra)),
    ):
        assert text_of(chunks) == wanted.text
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
            "length"
        ]


def test_a_stream_chunk_by_chunk(served: Serving) -> None:
    options: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
    }
    chunks = list(served.chat(**options, extra_body={"method": "plain"}))
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert [c.choices[0].delta.content for c in middle] == list(
        alone(served, max_new_tokens=4).text
    )
    assert last.choices[0].delta.content is None and last.choices[0].finish_reason == "length"
    assert usage.choices == [] and usage.usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {(chunk.id, chunk.object, chunk.model) for chunk in chunks} == {
        (first.id, "chat.completion.chunk", MODEL)
    }
    without = list(served.chat(stream=True, max_tokens=4))
    assert all(chunk.choices for chunk in without)


def test_what_goes_over_the_wire(served: Serving) -> None:
    """Server-sent events, each one line of JSON, and the end of them."""
    answer = served.post(max_tokens=3, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert event.startswith("data: {") and "\n" not in event
        json.loads(event[6:])


def test_several_prompts_and_answers(served: Serving) -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    answer = served.complete(prompts, max_tokens=6, n=2)
    texts = [served.alone.generate(prompt, max_new_tokens=6).text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [t for t in texts for _ in range(2)]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 36)
    chunks = list(served.complete(["123", "45"], max_tokens=6, n=1, stream=True))
    assert [text_of(chunks, index) for index in range(2)] == texts[:2]


@pytest.mark.parametrize("stop", ["60", ["77", "804", "88"]])
@pytest.mark.parametrize("method", METHODS)
def test_stop(served: Serving, stop: Any, method: Any) -> None:
    wanted = alone(served, stop=stop, max_new_tokens=200, method=method)
    assert wanted.finish_reason == "stop" and 1 < len(wanted.tokens) < 200
    extra = {"method": method}
    answer = served.chat(stop=stop, max_tokens=200, extra_body=extra)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (wanted.text, "stop")
    assert answer.usage.completion_tokens == len(wanted.tokens)
    chunks = list(served.complete(stop=stop, max_tokens=200, stream=True, extra_body=extra))
    assert text_of(chunks) == wanted.text


def test_end_ids(tmp_path: Any) -> None:
    toy = dataclasses.replace(TOY, eos=(8,))
    with serving(tmp_path, toy) as served:
        answer = served.chat(max_completion_tokens=50, max_tokens=50, logprobs=True)
        wanted = alone(served, max_new_tokens=50, logprobs=0)
        choice = answer.choices[0]
        assert (choice.finish_reason, wanted.finish_reason) == ("stop", "eos")
        assert answer.usage.completion_tokens == len(wanted.tokens) > 2
        entries = choice.logprobs.content
        assert [entry.token for entry in entries] == [str(t) for t in wanted.tokens[:-1]]
        answer = served.chat(max_tokens=50, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 50


def test_the_longest_text(tmp_path: Any) -> None:
    """Without a limit: the server's, the checkpoint's own, else what the context has room for."""
    toy = Toy(chat_template=TOY.chat_template, max_context=40)
    with serving(tmp_path / "a", toy) as served:
        assert served.chat().usage.completion_tokens == 35
        assert served.chat(max_tokens=0).choices[0].message.content == ""
        with pytest.raises(openai.BadRequestError, match="40 tokens do not fit into") as error:
            served.complete("1" * 40)
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")
    with serving(tmp_path / "b", toy, max_new_tokens=7) as served:
        assert served.chat().usage.completion_tokens == 7
        assert served.chat(max_tokens=9).usage.completion_tokens == 9
    toy = dataclasses.replace(toy, defaults=(("max_new_tokens", 6),))
    with serving(tmp_path / "c", toy) as served:
        assert served.chat().usage.completion_tokens == 6


# Sampling.


@pytest.mark.parametrize("method", ["plain", "draft"])
def test_seeds(served: Serving, method: Any) -> None:
    sampled: dict[str, Any] = {
        "temperature": 8.0,
        "max_tokens": 20,
        "extra_body": {"method": method},
    }
    wanted = [
        alone(served, temperature=8.0, seed=7 + i, max_new_tokens=20, method=method).text
        for i in range(3)
    ]
    assert len(set(wanted)) == 3
    for _ in range(2):
        answer = served.chat(seed=7, n=3, **sampled)
        assert [choice.message.content for choice in answer.choices] == wanted
    chunks = list(served.chat(seed=8, stream=True, **sampled))
    assert text_of(chunks) == wanted[1]
    texts = {served.chat(**sampled).choices[0].message.content for _ in range(3)}
    assert len(texts) == 3  # no seed: a new one each time
    same = {served.chat(seed=-5, **sampled).choices[0].message.content for _ in range(2)}
    assert len(same) == 1


def test_what_clients_send_without_meaning_it(served: Serving) -> None:
    """Defaults of OpenAI's that turn nothing on."""
    wanted = alone(served, max_new_tokens=12).text
    for fields in (
        {"top_p": 1},
        {"temperature": 0},
        {"temperature": 0, "top_p": 0.5},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": 1},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"response_format": {"type": "text"}, "modalities": ["text"], "stop": None, "tools": []},
        {"extra_body": {"repetition_penalty": 1, "top_k": 0, "echo": False, "best_of": 1}},
    ):
        assert served.chat(max_tokens=12, **fields).choices[0].message.content == wanted


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("presence", "frequency"), [(0, 2), (2, 1.5), (-2, 2)])
def test_penalties(served: Serving, method: str, presence: float, frequency: float) -> None:
    """Against the formula, on logits that are 10 for one token and 0 for the others."""
    tokens: list[int] = []
    for _ in range(60):
        logits = np.zeros(10, dtype=np.float32)
        logits[TOY.next([*PROMPT, *tokens])] = 10
        for token in set(tokens):
            logits[token] -= presence + frequency * tokens.count(token)
        tokens.append(int(np.argmax(logits)))
    assert tokens != TOY.plain(PROMPT, 60)
    answer = served.chat(
        max_tokens=60,
        presence_penalty=presence,
        frequency_penalty=frequency,
        extra_body={"method": method},
    )
    assert answer.choices[0].message.content == "".join(map(str, tokens))


def test_logit_bias(served: Serving) -> None:
    answer = served.chat(max_tokens=5, logit_bias={"7": 100})
    assert answer.choices[0].message.content == "77777"


def test_our_own_options_take_effect(served: Serving) -> None:
    for name, value in (("min_new_tokens", 3), ("no_repeat_ngram_size", 2), ("bad_words", ["8"])):
        wanted = alone(served, max_new_tokens=30, **{name: value})
        answer = served.chat(max_tokens=30, extra_body={name: value})
        assert answer.choices[0].message.content == wanted.text, name
    extra = {"return_stats": True, "num_assistant_tokens_schedule": "heuristic"}
    wanted = alone(served, max_new_tokens=60, num_assistant_tokens_schedule="heuristic")
    stats = served.chat(max_tokens=60, extra_body=extra).choices[0].specrun["stats"]
    assert stats["num_draft_by_round"] == list(wanted.stats.num_draft_by_round)
    assert len(set(stats["num_draft_by_round"])) > 1


def test_a_schedule_of_the_folder_starts_anew(tmp_path: Any) -> None:
    """What a request drafts does not depend on those before it."""

    def edit(data: dict[str, Any]) -> None:
        data["drafters"]["mtp-drafter"]["schedule"] = "heuristic"

    from toys import change, write_folder

    folder = write_folder(tmp_path / "engines", TOY)
    change(folder, edit)
    made = Serving(folder, {}, {})
    try:
        rounds = [
            made.chat(max_tokens=40, extra_body={"return_stats": True})
            .choices[0]
            .specrun["stats"]["num_draft_by_round"]
            for _ in range(2)
        ]
    finally:
        made.close()
    assert rounds[0] == rounds[1] and len(set(rounds[0])) > 1


# Log-probabilities.


def test_logprobs_of_a_chat(served: Serving) -> None:
    wanted = alone(served, max_new_tokens=9, logprobs=3).logprobs
    assert wanted is not None
    whole = served.chat(max_tokens=9, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    chunks = served.chat(max_tokens=9, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    for found in (whole, streamed):
        assert [entry.token for entry in found] == [str(entry.token) for entry in wanted]
        assert [entry.logprob for entry in found] == [entry.logprob for entry in wanted]
        for entry, want in zip(found, wanted, strict=True):
            assert entry.bytes == list(entry.token.encode())
            top = [(int(item.token), item.logprob) for item in entry.top_logprobs]
            assert top == list(want.top)
    bare = served.chat(max_tokens=2, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in bare] == [[], []]
    assert served.chat(max_tokens=2).choices[0].logprobs is None


def test_logprobs_of_a_completion(served: Serving) -> None:
    wanted = alone(served, max_new_tokens=9, logprobs=2).logprobs
    assert wanted is not None
    found = served.complete(max_tokens=9, logprobs=2).choices[0].logprobs
    assert found.tokens == [str(entry.token) for entry in wanted]
    assert found.token_logprobs == [entry.logprob for entry in wanted]
    assert found.text_offset == list(range(9))
    assert found.top_logprobs == [{str(t): value for t, value in e.top} for e in wanted]
    chunks = list(served.complete(max_tokens=9, logprobs=2, stream=True))
    offsets = [
        o for c in chunks if c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset
    ]
    assert offsets == list(range(9))


# Where tokens come from.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [None, "60"])
def test_origins(served: Serving, method: str, stop: str | None) -> None:
    extra = {"method": method, "return_token_origins": True}
    chunks = list(served.chat(max_tokens=40, stop=stop, stream=True, extra_body=extra))
    pieces = [
        piece
        for chunk in chunks
        for piece in (getattr(chunk.choices[0], "specrun", None) or {}).get("tokens", [])
    ]
    assert "".join(piece["text"] for piece in pieces) == text_of(chunks)
    whole = served.chat(max_tokens=40, stop=stop, extra_body=extra).choices[0]
    assert whole.specrun["tokens"] == pieces
    rounds: list[Round] = []
    options: dict[str, Any] = {"stop": stop} if stop else {}
    alone(served, method=method, max_new_tokens=40, on_round=rounds.append, **options)
    found, wanted = [piece["origin"] for piece in pieces], origins(rounds)
    if stop is None:
        assert found == wanted and len(found) == 40
    else:  # the 6 before the first 8 may begin the stop string, and comes with that 8
        assert text_of(chunks) == "240688"
        assert found == [wanted[place] for place in (0, 1, 2, 4, 5)]
    bare = list(served.chat(max_tokens=5, stream=True))
    assert not any(hasattr(chunk.choices[0], "specrun") for chunk in bare)


# Thoughts, tools and messages.

THINKING = Toy(
    vocabulary=(*string.digits, *"abcdefghij"),
    specials=("<t>", "</t>", "<eos>"),
    script=(0, 20, 10, 11, 21, 1, 2, 22, 22),
    eos=(22,),
    padded_vocab=23,
    response=ResponseFormat(thinking=Region(("<t>",), ("</t>",))),
    chat_template=(
        "{% if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
        "{% for message in messages %}{{ message.role[0] }}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}"
        "{% endfor %}{% if enable_thinking %}9{% endif %}"
    ),
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("thinking"), THINKING) as made:
        yield made


def test_a_thought_stands_apart(thinking: Serving) -> None:
    message = [{"role": "a", "content": "1"}]
    body: dict[str, Any] = {"messages": message, "max_tokens": 20, "return_token_origins": True}
    whole = thinking.post(**body).json()
    found = whole["choices"][0]["message"]
    assert (found["reasoning_content"], found["content"]) == ("ab", "12")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    tokens = whole["choices"][0]["specrun"]["tokens"]
    assert [t["channel"] for t in tokens] == ["thinking", "thinking", "content", "content"]
    lines = thinking.post(**body, stream=True).text.split("\n\n")[:-2]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "ab"
    assert "".join(delta.get("content", "") for delta in deltas) == "12"


def test_what_the_template_is_told(thinking: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    encode = type(thinking.engine).encode

    def kept(self: Any, prompt: Any, options: Any = None) -> list[int]:
        seen.append(encode(self, prompt, options))
        return seen[-1]

    monkeypatch.setattr(type(thinking.engine), "encode", kept)
    tool = {"type": "function", "function": {"name": "h7", "parameters": {}}}
    call = {"id": "x", "type": "function", "function": {"name": "h7", "arguments": '{"a": 5}'}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [tool]}, "h7a1"),
        ({"tools": [tool], "tool_choice": "none"}, "a1"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "a19"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "a1"),
        ({"messages": [{"role": "b", "content": [{"type": "text", "text": "34"}]}]}, "b34"),
        ({"messages": [{"role": "a", "content": None, "tool_calls": [call]}]}, "a5"),
        ({"messages": [{"role": "developer", "content": "8"}]}, "08"),  # "s" is not in the toy
    ]
    for body, wanted in cases:
        answer = thinking.post(
            **{"messages": [{"role": "a", "content": "1"}], **body}, max_tokens=0
        )
        assert answer.status_code == 200, answer.text
        names = [thinking.alone.tokenizer.name_of(token) for token in seen[-1]]
        assert "".join(name or "" for name in names) == wanted


CALLING = Toy(
    vocabulary=(*string.digits, *'{}":, anmegurts', "x"),
    specials=("<c>", "</c>", "<eos>"),
    response=ResponseFormat(tool_calls=Region(("<c>",), ("</c>",))),
    chat_template=TOY.chat_template,
)


@pytest.mark.parametrize("readable", [True, False])
def test_tool_calls(tmp_path: Any, readable: bool) -> None:
    """As OpenAI's clients know them; in the content, as it is, where nobody can read it."""
    call = '{"name": "m1", "arguments": {"a": 5}}' if readable else '{"name": m1}'
    names = [*CALLING.vocabulary, *CALLING.specials]
    text = ["1", "<c>", *call, "</c>", "<c>", *call, "</c>", "<eos>"]
    script = tuple(names.index(name) for name in text)
    toy = dataclasses.replace(
        CALLING, script=script, eos=(names.index("<eos>"),), padded_vocab=len(names)
    )
    with serving(tmp_path, toy) as served:
        (choice,) = served.chat("1", max_tokens=200).choices
        chunks = list(served.chat("1", max_tokens=200, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        streamed = [item for delta in deltas for item in delta.tool_calls or []]
        finish = chunks[-1].choices[0].finish_reason
        content = text_of(chunks)
    if not readable:
        whole = f"1<c>{call}</c><c>{call}</c>"
        assert (choice.message.content, choice.finish_reason) == (whole, "stop")
        assert (content, finish, streamed) == (whole, "stop", [])
        return
    assert choice.finish_reason == finish == "tool_calls"
    assert choice.message.content == content == "1"
    for found in (choice.message.tool_calls, streamed):
        assert [item.function.name for item in found] == ["m1", "m1"]
        assert [json.loads(item.function.arguments) for item in found] == [{"a": 5}] * 2
        assert len({item.id for item in found}) == 2
        assert {item.type for item in found} == {"function"}
    assert [item.index for item in streamed] == [0, 1]


# Structured output.


@pytest.mark.parametrize("method", ["plain", "draft"])
@pytest.mark.parametrize("kind", ["json_object", "json_schema", "regex"])
def test_structured_output(tmp_path: Any, method: str, kind: str) -> None:
    """What the engine gives with the same grammar."""
    names = (*string.digits, *'{}":,abc')
    own: dict[str, Any] = {
        "vocabulary": names,
        "specials": ("<e>",),
        "padded_vocab": len(names) + 1,
    }
    draft = Toy(max_context=TOY.max_context, **own)
    toy = dataclasses.replace(TOY, **own, eos=(len(names),), draft=draft)
    described = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    fields: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "json_object": (
            {"response_format": {"type": "json_object"}},
            {"json_schema": {"type": "object"}},
        ),
        "json_schema": ({"response_format": described}, {"json_schema": SCHEMA}),
        "regex": ({"regex": "[0-3]{5}a"}, {"regex": "[0-3]{5}a"}),
    }
    given, option = fields[kind]
    with serving(tmp_path, toy) as served:
        answer = served.post(**given, max_tokens=40, method=method)
        wanted = alone(served, **option, max_new_tokens=40, method=method)
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == wanted.text
    if kind == "json_schema":
        assert set(json.loads(wanted.text)) == {"a"}


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


# What is refused.

BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": [{"content": "1"}]}, "messages", "role: must be a text, got None"),
    ({"messages": [{"role": "user"}]}, "messages", "content: must be a text or parts, got None"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        "only parts of text are read, got 'image_url'",
    ),
    ({"temperature": -1}, "temperature", "greater than or equal to 0, got -1"),
    ({"temperature": "1"}, "temperature", "valid number, got '1'"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 1000}, "n", "1000 texts at once are more than the 4 that run and the 64 that wait"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
    ({"stop": [""]}, "stop", "must be strings that are not empty"),
    ({"stop": ["x"] * 99}, "stop", ""),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
    ({"top_logprobs": 2}, "top_logprobs", "wants logprobs to be true, got None"),
    ({"top_logprobs": 0, "logprobs": False}, "top_logprobs", "to be true, got False"),
    (
        {"max_tokens": 3, "max_completion_tokens": 4},
        "max_completion_tokens",
        "another name of max_tokens, got 4 and 3",
    ),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids numbers from -100 to 100, got 'x': 1"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"10": 1}}, "logit_bias", "must hold token ids below 10, got 10"),
    ({"method": "magic"}, "method", "'plain'"),
    ({"method": "mtp"}, "method", "'mtp' needs a drafter engine, this folder has none"),
    ({"num_assistant_tokens": 99}, "num_assistant_tokens", "for at most 16, got 99"),
    ({"num_assistant_tokens": -1}, "num_assistant_tokens", "greater than or equal to 0"),
    ({"num_assistant_tokens_schedule": "x"}, "num_assistant_tokens_schedule", "'constant'"),
    ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"stream_options": {"x": 1}}, "stream_options.x", "no such field"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "no such field"),
    (
        {"chat_template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs.enable_thinking",
        "cannot turn",
    ),
    (
        {"chat_template_kwargs": {"enable_thinking": "no"}},
        "chat_template_kwargs.enable_thinking",
        "valid boolean, got 'no'",
    ),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs", "got 1"),
    ({"tools": [{"type": "function"}]}, "tools", "knows nothing of tools"),
    ({"tool_choice": "required"}, "tool_choice", "must be none or auto, got 'required'"),
    ({"response_format": {"type": "x"}}, "response_format", "json_object, or json_schema"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "not supported, got 'low'"),
    ({"store": True}, "store", "not supported"),
    ({"functions": [{}]}, "functions", "not supported"),
    ({"echo": 0}, "echo", "not supported, got 0"),
    ({"timeout": 0}, "timeout", "greater than 0"),
    ({"what": 1}, "what", "there is no such field"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input(
    served: Serving, body: dict[str, Any], param: str | None, message: str, stream: bool
) -> None:
    answer = served.post(**body, stream=stream)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param or "messages")
    assert message in error["message"]


@pytest.mark.parametrize("fields", [{}, {"prompt": None}])
def test_a_completion_wants_a_prompt(served: Serving, fields: dict[str, Any]) -> None:
    """An empty text is one, which the engine judges."""
    answer = served.post("/v1/completions", **fields, max_tokens=1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert answer.json()["error"]["message"].startswith("prompt: ")


def test_a_template_that_refuses(tmp_path: Any) -> None:
    """What it refuses is said, and nothing of options that only a command line has."""
    refusing = "{{ raise_exception('roles are user and assistant') }}"
    with serving(tmp_path, dataclasses.replace(TOY, chat_template=refusing)) as served:
        error = served.post(messages=[{"role": "x", "content": "1"}]).json()["error"]
    assert error["message"] == "the chat template refuses the prompt: roles are user and assistant"
    assert error["param"] == "messages"


def test_hints_of_the_command_line_are_left_out() -> None:
    for hint, shown in (
        ("give 2 or less, or export with a larger --num-draft", "x: y (hint: give 2 or less)"),
        ("give a=False (--no-a), or a prompt that ends it", "x: y"),
        ("give one, or none", "x: y (hint: give one, or none)"),
    ):
        assert of(UsageError("x: y", hint=hint), prompt="prompt").message == shown


def test_errors_are_those_of_the_client(served: Serving) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        served.chat(temperature=-1)
    assert (error.value.param, error.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="must not be an empty list"):
        served.complete([])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nonsense", b'{"n": NaN}', b'{"n":1,"n":2}'])
def test_bodies_that_are_no_requests(served: Serving, body: bytes) -> None:
    for data in (body, b"[" * 100_000, b'{"a": "\xff"}', b'{"seed": 1' + b"0" * 5000 + b"}"):
        answer = served.http.post(
            "/v1/completions", content=data, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/nothing", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405),
])  # fmt: skip
def test_addresses_that_are_not_there(served: Serving, method: str, path: str, status: int) -> None:
    answer = served.http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats(-3, 3) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=5,
)
FIELDS = [
    "messages", "prompt", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options",
    "stop", "seed", "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "method", "tools",
    "num_assistant_tokens", "response_format", "chat_template_kwargs", "top_k", "tool_choice",
]  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4), chat=st.booleans())
def test_any_body_is_answered(served: Serving, body: dict[str, Any], chat: bool) -> None:
    """By a text or by an error that says what is wrong, never by a fault of ours."""
    most = {"max_tokens": 2, "timeout": 5}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = served.post(path, **{**most, **body})
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "internal" not in answer.text


# Counts.


def test_metrics(tmp_path: Any) -> None:
    with serving(tmp_path) as served:
        answers = [
            served.chat(max_tokens=12, extra_body={"method": method, "return_stats": True})
            for method in METHODS
        ]
        served.post(temperature=-1)
        stats = [answer.choices[0].specrun["stats"] for answer in answers]
        counts = {o: served.metric("specrun_tokens_total", origin=o) for o in ORIGINS}
        assert sum(counts.values()) == 48
        assert counts["accepted"] == sum(item["accepted"] for item in stats)
        assert counts["plain"] >= 12
        assert served.metric("specrun_prompt_tokens_total") == 20
        for method, item in zip(METHODS, stats, strict=True):
            labels = {"method": method}
            assert served.metric("specrun_drafted_tokens_total", **labels) == item["drafted"]
            assert served.metric("specrun_accepted_tokens_total", **labels) == item["accepted"]
            assert served.metric("specrun_target_steps_total", **labels) == item["target_steps"]
            ended = served.metric("specrun_generations_total", **labels, outcome="completed")
            assert ended == 1
        for name in ("queue", "time_to_first_token", "time_per_token", "generation"):
            assert served.metric(f"specrun_{name}_seconds_count") == 4
        path = "/v1/chat/completions"
        assert served.metric("specrun_responses_total", path=path, status="200") == 4
        assert served.metric("specrun_responses_total", path=path, status="400") == 1
        assert served.metric("specrun_running") == served.metric("specrun_waiting") == 0
        health = served.http.get("/health")
        assert health.json() == {"status": "ok", "model": MODEL, "running": 0, "waiting": 0}
