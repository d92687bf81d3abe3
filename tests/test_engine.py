"""The Python API: prompts, fallback, busy engines, folders that move."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting import Failing, Oracle
from toys import Toy

import specrun
from specrun import ContextFull, Engine, EngineError, UsageError

OpenToy = Callable[..., Engine]
ToyFolder = Callable[[Toy], Path]

CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "8{{ message.content }}8{% else %}9{{ message.content }}9{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}7{% endif %}"
)
CHATTY = Toy(
    vocabulary=tuple("0123456789"), specials=("<s>",), bos=10, chat_template=CHAT, modulus=10
)


def test_the_three_lines(toy_folder: ToyFolder) -> None:
    engine = specrun.load(toy_folder(Toy(drafter=True)))
    result = engine.generate("12", max_new_tokens=5)
    assert (result.text, result.tokens, result.finish_reason) == (
        "34567",
        [3, 4, 5, 6, 7],
        "length",
    )
    assert result.stats.method == "mtp-drafter"
    assert "".join(engine.stream("12", max_new_tokens=5)) == "34567"


def test_auto_takes_the_best_drafter_there_is(open_toy: OpenToy) -> None:
    assert open_toy(Toy(drafter=True)).generate([1]).stats.method == "mtp-drafter"
    assert open_toy(Toy()).generate([1]).stats.method == "prompt-lookup"


def test_a_missing_method_is_an_error(open_toy: OpenToy) -> None:
    with pytest.raises(UsageError, match="'mtp-drafter' needs a drafter engine") as caught:
        open_toy(Toy()).generate([1], method="mtp-drafter")
    assert "prompt-lookup" in str(caught.value.hint)


def test_modes(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(drafter=True))
    modes = {
        "plain": engine.generate([1], method="plain"),
        "k=0": engine.generate([1], num_assistant_tokens=0),
        "mtp": engine.generate([1]),
    }
    assert {name: result.stats.mode for name, result in modes.items()} == {
        "plain": "plain",
        "k=0": "plain",
        "mtp": "speculative",
    }
    assert len({tuple(result.tokens) for result in modes.values()}) == 1
    assert modes["k=0"].stats.drafted == 0


def test_options_as_they_took_effect(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(drafter=True, eos=(9,), num_assistant_tokens=3))
    options = engine.generate([1]).options
    assert options.method == "mtp-drafter"
    assert options.num_assistant_tokens == 3
    assert options.num_assistant_tokens_schedule == "constant"
    assert options.eos_token_ids == (9,)
    mine = specrun.GenerateOptions(num_assistant_tokens=2)
    assert engine.generate([1], options=mine).options.num_assistant_tokens == 2
    assert mine == specrun.GenerateOptions(num_assistant_tokens=2)


# Prompts.


def test_chat_template_raw_and_ids(open_toy: OpenToy) -> None:
    engine = open_toy(CHATTY)
    assert engine.encode("12") == [10, 9, 1, 2, 9, 7]
    assert engine.encode("12", specrun.GenerateOptions(raw=True)) == [1, 2]
    assert engine.encode("1", specrun.GenerateOptions(system="3")) == [10, 8, 3, 8, 9, 1, 9, 7]
    assert engine.encode([{"role": "user", "content": "12"}]) == [10, 9, 1, 2, 9, 7]
    assert engine.encode([1, 2]) == [1, 2]
    assert engine.encode(np.array([1, 2])) == [1, 2]  # type: ignore[arg-type]


def test_bos_before_raw_text_once(open_toy: OpenToy) -> None:
    engine = open_toy(dataclasses.replace(CHATTY, add_bos=True))
    raw = specrun.GenerateOptions(raw=True)
    assert engine.encode("12", raw) == [10, 1, 2]
    assert engine.encode("<s>12", dataclasses.replace(raw, parse_special=True)) == [10, 1, 2]
    assert engine.encode("12") == [10, 9, 1, 2, 9, 7]  # the template writes it itself


# In the toy's tokenizer a character that is none of the vocabulary is token 0.
SPELLED = [0, 0, 0]


def test_a_prompt_spells_no_special_token(open_toy: OpenToy) -> None:
    engine = open_toy(dataclasses.replace(CHATTY, add_bos=True))
    raw = specrun.GenerateOptions(raw=True)
    parse = specrun.GenerateOptions(parse_special=True)
    assert engine.encode("1<s>2", raw) == [10, 1, *SPELLED, 2]
    assert engine.encode("<s>", raw) == [10, *SPELLED]
    assert engine.encode("1<s>2") == [10, 9, 1, *SPELLED, 2, 9, 7]
    assert engine.encode("1<s>2", parse) == [10, 9, 1, 10, 2, 9, 7]
    assert engine.encode("1", specrun.GenerateOptions(system="<s>3")) == [
        *(10, 8, *SPELLED, 3, 8),
        *(9, 1, 9, 7),
    ]
    messages = [{"role": "user", "content": "<s>"}, {"role": "assistant", "content": "1<s>"}]
    assert engine.encode(messages) == [10, 9, *SPELLED, 9, 9, 1, *SPELLED, 9, 7]
    assert engine.encode(messages, parse) == [10, 9, 10, 9, 9, 1, 10, 9, 7]


def test_a_session_spells_no_special_token(open_toy: OpenToy) -> None:
    session = open_toy(CHATTY).session()
    session.append("1<s>")
    assert session.tokens == [10, 9, 1, *SPELLED, 9, 7]
    session.append("<s>2")
    session.append("<s>2", specrun.GenerateOptions(parse_special=True))
    assert session.tokens[8:] == [*SPELLED, 2, 10, 2]
    session.replace("1<s>")
    assert session.tokens == [10, 9, 1, *SPELLED, 9, 7]


@pytest.mark.parametrize(
    ("content", "prompt", "plain"),
    [
        ("{{ c | trim }}", " 1<s>2 ", [1, *SPELLED, 2]),
        ("{{ c | upper }}", "1<s>2", [1, *SPELLED, 2]),
        ("{{ c[:4] }}", "<s>123", [*SPELLED, 1]),
        ("{{ c[1:] }}", "<s>1", [0, 0, 1]),
        ("{{ c.split('<s>')[0] }}<s>{{ c.split('<s>')[1] }}", "1<s>2", None),
        ("{{ c }}<s>{{ c }}", "1<s>", [1, *SPELLED, 10, 1, *SPELLED]),
        ("{% if c.startswith('<s>') %}<s>{{ c[3:] }}{% endif %}", "<s>1", None),
        ("{% if '<s>' in c %}5{% endif %}{{ c.replace('<s>', '6') }}", "1<s>2", [5, 1, 6, 2]),
        ("{{ c.replace('<s>', '<s><s>') }}", "1<s>", [1, *SPELLED * 2]),
        ("<s>{{ c }}<s>", "<s><s>", [10, *SPELLED * 2, 10]),
        ("{{ [c] | tojson | length }}", "<s>", [7]),
        ("{{ c | reverse }}", "<s>1", [1, *SPELLED]),
        ("{{ c | length }}", "<s>", [3]),
        ("{% if c | length > 3 %}<s>{% endif %}{{ c }}", "<s>", SPELLED),
    ],
)
def test_templates_that_change_what_they_are_given(
    open_toy: OpenToy, content: str, prompt: str, plain: list[int] | None
) -> None:
    """Told apart, or refused where that is not possible; never a token of the prompt's own."""
    template = f"{{% set c = messages[0].content %}}{content}"
    engine = open_toy(dataclasses.replace(CHATTY, chat_template=template))
    if plain is not None:
        assert engine.encode(prompt) == plain
        return
    try:
        assert engine.encode(prompt).count(10) <= 1
    except UsageError as error:
        assert "spells a special token" in str(error) and "--parse-special" in str(error.hint)


def test_spelling_makes_no_difference_where_there_is_none(open_toy: OpenToy) -> None:
    engine = open_toy(CHATTY)
    parse = specrun.GenerateOptions(parse_special=True)
    for text in ("", "12", "<s", "s>", "<\u200bs>", "\ufdd0", "\ue000<t>"):
        assert engine.encode(text) == engine.encode(text, parse)


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt(open_toy: OpenToy, prompt: Any) -> None:
    """C71: the beginning of a text where there is a token for it."""
    assert open_toy(CHATTY).encode(prompt) == [10]
    with pytest.raises(UsageError, match="prompt: is empty, and this model has no beginning"):
        open_toy(Toy()).generate(prompt)


@pytest.mark.parametrize("text", [" ", "\n", " \t "])
def test_a_prompt_of_whitespace(open_toy: OpenToy, text: str) -> None:
    """C71: a text like any other, with the token that begins one and without."""
    blank = Toy(vocabulary=tuple(" \n\t3456789"))
    ids = [" \n\t".index(character) for character in text]
    for bos in (None, 9):
        toy = dataclasses.replace(blank, bos=bos, add_bos=bos is not None)
        engine = open_toy(toy)
        prompt = ids if bos is None else [bos, *ids]
        assert engine.encode(text) == prompt
        assert engine.generate(text, max_new_tokens=4).tokens == toy.plain(prompt, 4)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([[1, 2], 3], "is a list of 2 prompts, one is wanted here"),
        ([1, 10], "token id 10 at 1 is not in the vocabulary of 10"),
        ([-1], "token id -1 at 0 is not in the vocabulary"),
        ([1.5], "must be a text, token ids or messages, got 1.5 at 0"),
        ([{"role": "user", "content": "1"}], "messages need a chat template"),
        ("\ud800", "not valid Unicode text"),
    ],
)
def test_prompts_that_cannot_be_meant(open_toy: OpenToy, prompt: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_toy(Toy()).generate(prompt)


def test_system_needs_a_chat_template(open_toy: OpenToy) -> None:
    with pytest.raises(UsageError, match="system: this folder has no chat template"):
        open_toy(Toy()).generate("1", system="2")
    with pytest.raises(UsageError, match="tools: this folder has no chat template"):
        open_toy(Toy()).generate("1", tools=[{}])


def test_a_special_token_in_a_tool_is_text(open_toy: OpenToy) -> None:
    """As one in a message is; the template's own counts."""
    template = "{{ bos_token }}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
    engine = open_toy(dataclasses.replace(CHATTY, chat_template=template))
    options = specrun.GenerateOptions(tools=({"name": "<s>1"},))
    plain = engine.tokenizer.encode("<s>1", add_special_tokens=False, parse_special=False)
    assert engine.encode("0", options) == [10, *plain]
    assert 10 not in plain


@pytest.mark.parametrize("length", [16, 17, 40])
def test_a_prompt_that_fills_the_context(open_toy: OpenToy, length: int) -> None:
    engine = open_toy(Toy(max_context=16))
    with pytest.raises(ContextFull, match=f"{length} tokens do not fit into the context of 16"):
        engine.generate([1] * length)
    assert len(engine.generate([1] * 15).tokens) == 1


def test_a_smaller_context(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(max_context=64), max_context=20)
    assert len(engine.generate([1] * 10).tokens) == 10
    with pytest.raises(UsageError, match="max_context: the engine was exported for 64, got 65"):
        open_toy(Toy(max_context=64), max_context=65)


# A drafter that fails.


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_drafter_that_fails_is_a_warning(open_toy: OpenToy, at: int) -> None:
    toy = Toy()
    said: list[str] = []
    result = open_toy(toy).generate(
        [1], drafter=Failing(toy, at), max_new_tokens=40, on_warning=said.append
    )
    assert result.tokens == toy.plain([1], 40)
    assert result.stats.mode == "fallback"
    assert result.stats.drafted == 5 * at
    assert said == [
        "the drafter failed: RuntimeError: the drafter broke; going on with plain decoding"
    ]


def test_a_drafter_that_fails_when_strict(open_toy: OpenToy) -> None:
    toy = Toy()
    engine = open_toy(toy)
    with pytest.raises(EngineError, match="the drafter failed: RuntimeError: the drafter broke"):
        engine.generate([1], drafter=Failing(toy, 1), strict=True)
    assert engine.generate([1], max_new_tokens=3).tokens == [2, 3, 4]


def test_a_drafter_engine_that_is_gone(toy_folder: ToyFolder) -> None:
    toy = Toy(drafter=True)
    folder = toy_folder(toy)
    (folder / "mtp_drafter.onnx").unlink()
    with specrun.load(folder) as engine:
        with pytest.warns(RuntimeWarning, match="the drafter failed: .*mtp_drafter.onnx"):
            result = engine.generate([1], max_new_tokens=9)
        assert result.tokens == toy.plain([1], 9)
        assert (result.stats.mode, result.stats.drafted) == ("fallback", 0)
        with pytest.raises(EngineError, match="mtp_drafter"):
            engine.generate([1], strict=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert engine.generate([1], method="prompt-lookup").stats.mode == "speculative"


# One generation at a time.


def test_a_busy_engine_refuses(open_toy: OpenToy) -> None:
    engine = open_toy(Toy())
    with engine.stream([1], max_new_tokens=50) as stream:
        assert next(stream) == "2"
        with pytest.raises(UsageError, match="busy with another generation"):
            engine.generate([1])
        with pytest.raises(UsageError, match="the stream has not ended"):
            _ = stream.result
    assert engine.generate([1], max_new_tokens=2).text == "23"


def test_a_failed_generation_frees_the_engine(open_toy: OpenToy) -> None:
    engine = open_toy(Toy())

    def fail(round_: specrun.Round) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([1], on_round=fail)
    assert engine.generate([1], max_new_tokens=2).text == "23"


def test_a_closed_engine_says_so(open_toy: OpenToy) -> None:
    engine = open_toy(Toy())
    engine.close()
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.generate([1])


def test_generations_do_not_leak_into_each_other(open_toy: OpenToy) -> None:
    toy = Toy(history_weight=3, modulus=7)
    engine = open_toy(toy)
    for prompt in ([1, 2, 3], [4], [5, 6]):
        result = engine.generate(prompt, drafter=Oracle(toy), max_new_tokens=30)
        assert result.tokens == toy.plain(prompt, 30)


# Folders.


def test_a_folder_may_be_moved_and_read_only(
    toy_folder: ToyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new place äöü"
    shutil.move(toy_folder(Toy()), folder)
    for path in [*folder.iterdir(), folder]:
        path.chmod(path.stat().st_mode & 0o555)
    monkeypatch.chdir(tmp_path)
    engine = specrun.load("new place äöü")
    monkeypatch.chdir("/")
    assert engine.generate([1], max_new_tokens=3).text == "234"
    folder.chmod(0o755)


def test_a_device_that_is_not_there_is_an_error(toy_folder: ToyFolder) -> None:
    """C73: never another device, and where it ran is in the statistics."""
    folder = toy_folder(Toy())
    for device in ("cuda", "gpu3"):
        with pytest.raises(EngineError, match=f"device: '{device}' is not available") as caught:
            specrun.load(folder, device=device)
        assert "--device cpu" in str(caught.value.hint)
    assert specrun.load(folder).generate([1]).stats.provider == "CPUExecutionProvider"


def test_no_cpu_between_calls(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(drafter=True), threads=2)
    engine.generate([1], max_new_tokens=50)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.03


def test_a_target_that_fails_is_an_error(
    open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is made up, and the engine is usable again."""
    engine = open_toy(Toy())

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("onnxruntime.InferenceSession.run_with_iobinding", fail)
        with pytest.raises(EngineError, match=r"target.onnx: a run failed: out of memory"):
            engine.generate([1])
    assert engine.generate([1], max_new_tokens=2).text == "23"


def test_threads_default_to_the_cpus_we_may_use(open_toy: OpenToy) -> None:
    assert open_toy(Toy(), threads=None).options.threads == len(os.sched_getaffinity(0))


class Meddling(Oracle):
    """Writes into what it is given, as nobody should."""

    def begin(self, tokens: Any) -> None:
        super().begin(list(tokens))
        tokens.append(7)

    def observe(self, tokens: Any, hidden: Any) -> None:
        super().observe(list(tokens), hidden)
        tokens.clear()


def test_a_drafter_cannot_change_the_text(open_toy: OpenToy) -> None:
    toy = Toy()
    result = open_toy(toy).generate([1, 2], drafter=Meddling(toy), max_new_tokens=20, strict=True)
    assert result.tokens == toy.plain([1, 2], 20)


class Outside(Oracle):
    """Drafts an id that the target does not have."""

    def draft(self, token: int, place: int) -> int:
        return -1 if place == 1 else token


class NeedsRows(Oracle):
    """Asks for hidden rows of the prompt, which the toy's target does not return."""

    needs_prompt_rows = True


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Outside, "token -1 was drafted, ids are 0 to 9"),
        (NeedsRows, r"target\.onnx returns no hidden states of the prompt"),
    ],
)
def test_a_drafter_that_asks_or_says_what_cannot_be(
    open_toy: OpenToy, kind: type[Oracle], says: str
) -> None:
    toy = Toy()
    engine = open_toy(toy)
    with pytest.raises(specrun.EngineError, match=says):
        engine.generate([1], drafter=kind(toy), max_new_tokens=20, strict=True)
    said: list[str] = []
    result = engine.generate([1], drafter=kind(toy), max_new_tokens=20, on_warning=said.append)
    assert result.tokens == toy.plain([1], 20) and result.stats.mode == "fallback"
    assert len(said) == 1 and re.search(says, said[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"raw": "no"}, "raw: must be true or false, got 'no'"),
        ({"do_sample": "yes"}, "do_sample: must be true or false, got 'yes'"),
        ({"strict": None}, "strict: must be true or false, got None"),
        ({"system": 5}, "system: must be a text, got 5"),
        ({"enable_thinking": 1}, "enable_thinking: must be true or false, got 1"),
        ({"tools": {"name": "now"}}, "tools: must be a list of objects, got"),
        ({"tools": ["now"]}, "tools: must be a list of objects, got"),
        ({"num_assistant_tokens_schedule": 5}, "num_assistant_tokens_schedule: must be one of"),
        ({"max_matching_ngram_size": None}, "max_matching_ngram_size: must be a number, got None"),
        ({"ensemble_weight": None}, "ensemble_weight: must be a number, got None"),
        ({"temperature": 10**400}, "temperature: must be a number of at least 0, got 1000"),
        ({"logit_bias": {True: 1.0}}, "logit_bias: must give token ids a number each"),
        ({"logit_bias": {1: 10**400}}, "logit_bias: must give token ids a number each"),
        ({"logits_processor": 5}, "logits_processor: must be functions, got 5"),
        ({"do_sample": True, "temperature": 0}, "temperature: 0 is greedy, which do_sample"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens: must be at most"),
        ({"eos_token_ids": [99]}, "eos_token_ids: must hold token ids below 10, got 99"),
        ({"assistant_confidence_threshold": 0.5, "method": "plain"}, "assistant_confidence_thr"),
        ({"ensemble_weight": 0.5, "num_assistant_tokens": 0}, "ensemble_weight: needs the"),
        ({"num_assistant_tokens": 17}, "num_assistant_tokens: the drafter was exported for at"),
        ({"drafter": Oracle(Toy()), "method": "plain"}, "drafter: method 'plain' drafts nothing"),
    ],
)
def test_options_of_no_use_or_of_the_wrong_kind(
    open_toy: OpenToy, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        open_toy(Toy(drafter=True)).generate([1], **options)
    assert says in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("prompt", [None, 5, 3.5, b"12", {"a": 1}])
def test_prompts_of_the_wrong_kind(open_toy: OpenToy, prompt: Any) -> None:
    engine = open_toy(Toy())
    with pytest.raises(UsageError, match="prompt: must be a text"):
        engine.generate(prompt)
    with pytest.raises(UsageError, match="prompt: must be a text"):
        engine.session().append(prompt)


@pytest.mark.parametrize("folder", [None, 5, b"engines"])
def test_folders_of_the_wrong_kind(folder: Any) -> None:
    with pytest.raises(UsageError, match="folder: must be a path, got"):
        specrun.load(folder)


def test_a_tuning_file_that_is_not_there(open_toy: OpenToy) -> None:
    with pytest.raises(UsageError, match=r"tuning: 'nope\.json' is no file"):
        open_toy(Toy(), tuning="nope.json")
