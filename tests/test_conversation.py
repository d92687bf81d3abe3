"""Chats: every answer is that of a cold run of the same ids, and only what is new is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_vocabulary
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from toys import Toy, scripted
from transformers.utils.chat_parsing import parse_response

import specrun
from specrun import Chat, ContextFull, Reply, UsageError, tool_calls
from specrun.common_text import common_text
from specrun.drafters.base import resume
from specrun.drafters.guard import GuardedDrafter
from specrun.lane import Lane
from specrun.loop import Round
from specrun.response_format import Region, ResponseFormat
from specrun.text import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

OpenToy = Callable[..., specrun.Engine]
DIGITS = tuple("0123456789")
SPECIAL = ("<e>", "<u>", "<a>", "<t>", "</t>", "<c>", "</c>")
END = DIGITS.index("9") + 1  # <e>
CHAT = (
    "{% for message in messages %}{{ '<a>' if message.role == 'assistant' else '<u>' }}"
    "{{ message.content }}<e>{% endfor %}<a>"
)
THINKS = (
    "{% for message in messages %}{{ '<a>' if message.role == 'assistant' else '<u>' }}"
    "{% if message.reasoning_content and loop.last %}<t>{{ message.reasoning_content }}</t>"
    "{% endif %}{{ message.content }}<e>{% endfor %}<a>{% if enable_thinking %}<t>{% endif %}"
)
FORMAT = ResponseFormat(Region(("<t>",), ("</t>",)), Region(("<c>",), ("</c>",)))
FIELDS: dict[str, Any] = {
    "vocabulary": (*DIGITS, *SPECIAL),
    "specials": SPECIAL,
    "modulus": 11,  # so that <e> comes too
    "history_weight": 5,
    "eos": (END,),
}
TOY = Toy(chat_template=CHAT, drafter=True, draft=Toy(**FIELDS), **FIELDS)
METHODS = ("plain", "prompt-lookup", "mtp-drafter", "draft")
USER = ["1", "23", "4", "55", "601", "7", "8", "12", "9", "34"]


def spelled(engine: specrun.Engine, ids: Sequence[int]) -> str:
    """Text of ids with special tokens."""
    text: str = engine.tokenizer._tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


def before(chat: Chat, reply: Reply) -> list[int]:
    """The ids that were read and generated up to an answer."""
    tokens, count = chat.tokens, len(reply.result.tokens)
    assert tokens[len(tokens) - count :] == reply.result.tokens
    return tokens[: len(tokens) - count]


def is_cold(engine: specrun.Engine, chat: Chat, reply: Reply, **options: Any) -> int:
    """Assert that a cold run says the same; returns how many tokens stand before the answer."""
    ids = before(chat, reply)
    said = chat.messages[:-1]
    assert chat.messages[-1] == reply.message
    assert spelled(engine, ids) == spelled(engine, engine.encode(said))
    cold = engine.generate(ids, **options)
    assert (cold.tokens, cold.finish_reason) == (reply.result.tokens, reply.result.finish_reason)
    # What drafts has the state of a cold run too: it proposes what it would there.
    assert cold.stats.accepted_by_round == reply.result.stats.accepted_by_round
    assert cold.stats.prefilled == cold.stats.prompt_tokens == len(ids)
    assert reply.result.stats.prompt_tokens == len(ids)
    chat.check_integrity()
    return len(ids)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampled", [False, True])
def test_ten_turns_with_rewinds(open_toy: OpenToy, method: Any, sampled: bool) -> None:
    """Some answers end by themselves, some are cut; every third turn is taken back."""
    toy = TOY
    if sampled:
        rows = [[1.0 + (i - j) % 5 if j < 11 else 1e-9 for j in range(17)] for i in range(17)]
        table = tuple(tuple(p / sum(each) for p in each) for each in rows)
        changes: dict[str, Any] = {"table": table, "history_weight": 0}
        draft = Toy(**FIELDS | changes)
        toy = Toy(chat_template=CHAT, drafter=True, draft=draft, **FIELDS | changes)
    engine = open_toy(toy)
    options: dict[str, Any] = {"method": method, "num_assistant_tokens": 4, "max_new_tokens": 6}
    options["strict"] = True
    chat = engine.chat()
    ends = set()
    for turn, text in enumerate(USER):
        draw = {"do_sample": True, "seed": turn, "temperature": 2.0} if sampled else {}
        held = len(chat.tokens)
        reply = chat.ask(text, **options, **draw)
        count = is_cold(engine, chat, reply, **options, **draw)
        new = count - held
        stays = turn % 3 != 0 or turn == 0  # nothing was taken back before
        if stays:
            # All that was committed but the last token is in the KV.
            assert reply.result.stats.prefilled == new + (held > 0)
        ends.add(reply.result.finish_reason)
        if turn % 3 == 2:
            gone = chat.undo()
            assert [message["content"] for message in gone] == [text, reply.content]
    assert ends == {"eos", "length"}
    assert len(chat.messages) == 2 * 7
    chat.close()


LETTERS = "{% for m in messages %}{{ m.content }}{{ 'h' if m.role == 'user' else 'g' }}{% endfor %}"


FOLDERS = [*small_vocabulary.METHODS.items(), ("mtp", "glm4-moe")]  # which has two MTP layers


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("method", "name"), FOLDERS)
def test_ten_turns_on_exported_engines(
    small_folder: Callable[[str], Path], method: Any, name: str, sampled: bool
) -> None:
    """Every method there is, with text in 8 letters; every third turn is taken back."""
    folder = small_folder(name) / small_vocabulary.ENGINES
    options: dict[str, Any] = {"method": method, "num_assistant_tokens": 3, "max_new_tokens": 3}
    options |= {"strict": True}
    # MTP layers see rows of the target once more, one for each layer.
    extra = {"mtp": 1, "glm4-moe": 2}.get(name, 0)
    drafted = 0
    with specrun.load(folder, threads=1) as engine:
        engine.chat_template = LETTERS
        chat = engine.chat()
        for turn in range(10):
            draw = {"do_sample": True, "seed": turn} if sampled else {}
            held = len(chat.tokens)
            reply = chat.ask("abcdefab"[turn % 7], **options, **draw)
            new = is_cold(engine, chat, reply, **options, **draw) - held
            if turn % 3 or not turn:
                assert reply.result.stats.prefilled == new + (1 + extra if held else 0)
            if turn % 3 == 2:
                chat.undo()
            drafted += reply.result.stats.drafted
    assert (drafted > 0) == (method != "plain")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "mtp-drafter"])
def test_a_chat_with_the_bundled_pair(once: Callable[..., Path], method: Any) -> None:
    """In exact mode, where no tie can fall the other way; a late turn reads as much as an early."""
    import check_tiny

    folder = once("gemma4-tiny", lambda folder: check_tiny.export(folder / "engines")) / "engines"
    options: dict[str, Any] = {"method": method, "max_new_tokens": 12, "strict": True}
    with specrun.load(folder, threads=1, exact=True) as engine:
        chat = engine.chat(system="You answer questions.", **options)
        read = []
        for turn in range(10):
            reply = chat.ask(f"What is number {turn}?")
            ids = before(chat, reply)
            assert engine.generate(ids, **options).tokens == reply.result.tokens
            said = [{"role": "system", "content": chat.system}, *chat.messages[:-1]]
            assert spelled(engine, ids) == spelled(engine, engine.encode(said))
            read.append(reply.result.stats.prefilled)
            if turn in (3, 7):
                chat.undo()
        assert max(read[1:]) <= read[0] + 12 < len(chat.tokens) / 4


@pytest.mark.parametrize("method", METHODS)
def test_an_undone_turn_is_read_from_where_it_began(open_toy: OpenToy, method: Any) -> None:
    engine = open_toy(TOY)
    chat = engine.chat(method=method, max_new_tokens=5, system="3")
    for text in ("1", "2", "44"):
        chat.ask(text)
    chat.undo()
    reply = chat.ask("45")
    said = [{"role": "system", "content": "3"}, *chat.messages[:-1]]
    ids = before(chat, reply)
    assert spelled(engine, ids) == spelled(engine, engine.encode(said))
    cold = engine.generate(ids, method=method, max_new_tokens=5)
    assert cold.tokens == reply.result.tokens
    assert reply.result.stats.prefilled == len("5ea") + 1  # and the token before the 5 again


class Rows:
    """Needs the rows of a prompt; ``resume`` says ``given``, or raises it."""

    needs_prompt_rows, max_drafts = True, None

    def __init__(self, given: Any) -> None:
        self.given = given
        self.began: list[int] | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        self.began = list(tokens)

    def resume(self, tokens: Sequence[int], most: int) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.mark.parametrize("given", [ZeroDivisionError(), -1, 4, "3", None])
def test_a_drafter_that_cannot_resume(given: Any) -> None:
    """It drafts no more, and so needs no rows."""
    failures: list[Exception] = []
    drafter: Any = Rows(given)
    guarded = GuardedDrafter(drafter, failures.append, vocab_size=10)
    assert guarded.resume([1, 2, 3, 4, 5], 3) == 3
    assert len(failures) == 1
    assert guarded.resume([1], 0) == 0
    assert len(failures) == 1


def test_drafters_that_resume_and_that_do_not() -> None:
    drafter: Any = Rows(2)
    assert resume(drafter, [1, 2, 3, 4], 3) == 2
    assert drafter.began is None
    monkey: Any = type("Other", (), {"begin": Rows.begin})()
    assert resume(monkey, [1, 2, 3, 4], 3) == 0
    assert monkey.began == [1]


def test_an_answer_that_was_cut(open_toy: OpenToy) -> None:
    """The template writes the end token that the model did not give; nothing is read twice."""
    engine = open_toy(TOY)
    chat = engine.chat(max_new_tokens=2)
    first = chat.ask("12")
    assert first.result.finish_reason == "length"
    held = chat.tokens
    second = chat.ask("3")
    assert before(chat, second) == [*held, END, *engine.encode([{"role": "user", "content": "3"}])]
    assert second.result.stats.prefilled == 1 + len("eu3ea")


def answers(text: str, prompt: str, **fields: Any) -> Toy:
    """A toy that says ``text`` after a prompt, both in characters, special tokens as ``SHORT``."""
    ids = [SHORT.index(char) for char in text]
    return scripted(ids, prompt_length=len(prompt), **FIELDS | {"chat_template": CHAT} | fields)


SHORT = "0123456789euat/c+"


def test_thought_and_answer(open_toy: OpenToy) -> None:
    """The thought goes back to the template, which has it for the last answer only."""
    engine = open_toy(answers("t12/345e", "u1ea", response=FORMAT, chat_template=THINKS))
    chat = engine.chat(max_new_tokens=20)
    stream = chat.stream("1")
    pieces = list(stream)
    assert {piece.channel for piece in pieces} == {"thinking", "content"}
    reply = stream.reply
    assert (reply.thinking, reply.content, reply.tool_calls) == ("12", "345", "")
    message = {"role": "assistant", "content": "345", "reasoning_content": "12"}
    assert reply.message == message == chat.messages[-1]
    assert reply.result.text == "12345"
    # The template leaves it out of the next turn's text, so 345 is read again, behind <a>.
    second = chat.ask("2", max_new_tokens=1)
    assert spelled(engine, before(chat, second)) == "<u>1<e><a>345<e><u>2<e><a>"
    assert second.result.stats.prefilled == 1 + len("345eu2ea")


def test_a_thought_that_the_template_began(open_toy: OpenToy) -> None:
    engine = open_toy(answers("12/345e", "u1eat", response=FORMAT, chat_template=THINKS))
    chat = engine.chat(max_new_tokens=20, enable_thinking=True)
    assert chat.ask("1").thinking == "12"
    chat.messages = []
    chat.options = specrun.GenerateOptions(enable_thinking=False, max_new_tokens=1)
    assert spelled(engine, before(chat, chat.ask("1"))) == "<u>1<e><a>"
    with pytest.raises(UsageError, match="cannot turn thinking on or off"):
        open_toy(TOY).chat(enable_thinking=True).ask("1")


def test_a_thought_and_a_grammar(open_toy: OpenToy) -> None:
    """A grammar is for all that comes, so there is none where a thought comes first."""
    engine = open_toy(answers("12/345e", "u1ea", response=FORMAT, chat_template=THINKS))
    assert engine.chat().ask("1", regex="12", max_new_tokens=9).content == "12"
    with pytest.raises(UsageError, match="regex: excludes enable_thinking"):
        engine.chat(enable_thinking=True).ask("1", regex="12")
    begun = THINKS.replace("{% if enable_thinking %}<t>{% endif %}", "<t>")
    engine = open_toy(answers("12/345e", "u1eat", response=FORMAT, chat_template=begun))
    chat = engine.chat()
    with pytest.raises(UsageError, match="regex: the prompt has begun a thought"):
        chat.ask("1", regex="12")
    assert chat.ask("1").thinking == "12"


def test_calls_of_tools(open_toy: OpenToy) -> None:
    """As the model wrote them; in no spelling that is known, they stay in the message."""
    engine = open_toy(answers("7c1u2+c3+e", "u1ea", response=FORMAT))
    reply = engine.chat().ask("1")
    assert (reply.content, reply.tool_calls) == ("7", "<c>1<u>2</c><c>3</c>")
    assert reply.message == {"role": "assistant", "content": "7<c>1<u>2</c><c>3</c>"}


def test_ctrl_c(open_toy: OpenToy) -> None:
    """What was committed is the answer; the next turn goes on behind it."""
    engine = open_toy(TOY)
    options: dict[str, Any] = {"method": "draft", "num_assistant_tokens": 2}
    options |= {"eos_token_ids": (), "max_new_tokens": 50}
    chat = engine.chat(**options)

    def interrupt(done: Round) -> None:
        if done.index == 1:
            raise KeyboardInterrupt

    stream = chat.stream("12", on_round=interrupt)
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    assert stream.reply.result.finish_reason == "cancelled"
    assert stream.reply.content == stream.partial.text != ""
    assert chat.messages[-1] == {"role": "assistant", "content": stream.reply.content}
    assert is_cold(engine, chat, chat.ask("3"), **options)

    with chat.stream("4") as stream:
        next(stream)
        with pytest.raises(UsageError, match="the chat is busy with an answer"):
            chat.undo()
    assert chat.messages[-1]["content"] == stream.reply.content != ""
    assert is_cold(engine, chat, chat.ask("3"), **options)


def test_nothing_came_of_a_turn(open_toy: OpenToy) -> None:
    """An error, or an end before the first token: the chat is as before."""
    engine = open_toy(TOY)
    chat = engine.chat(max_new_tokens=5)
    chat.ask("1")
    said = chat.messages

    def fail(done: Round) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        chat.ask("2", on_round=fail)
    token = specrun.CancelToken()
    token.cancel()
    reply = chat.ask("2", cancel=token)
    assert (reply.result.finish_reason, reply.content) == ("cancelled", "")
    chat.stream("2").close()
    with pytest.raises(ContextFull):
        chat.ask("2" * 2000)
    assert chat.messages == said
    is_cold(engine, chat, chat.ask("2"), max_new_tokens=5)


def test_what_a_chat_refuses(open_toy: OpenToy) -> None:
    with pytest.raises(UsageError, match="a chat needs a chat template, this folder has none"):
        open_toy(Toy()).chat()
    chat = open_toy(TOY).chat()
    bare: tuple[Any, ...] = ({"role": "user"}, {"role": "user", "content": 1}, b"1", None, 5)
    for message in ([], [{"content": "1"}], [1], {"role": 1}, *bare):
        with pytest.raises(UsageError, match=r"^message: "):
            chat.ask(message)
    with pytest.raises(UsageError, match=r"^message: must be a text .* got {'role': 'user'}"):
        chat.messages = [{"role": "user"}]
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    chat.messages = [called]
    assert chat.messages == [called]
    chat.messages = []
    with pytest.raises(UsageError, match="undo: the chat has no turn to take back"):
        chat.undo()
    with pytest.raises(UsageError, match="raw: got True for a chat"):
        chat.options = specrun.GenerateOptions(raw=True)
    for name, value in (("system", "1"), ("raw", True)):
        with pytest.raises(UsageError, match=f"{name}: is not for one answer of a chat"):
            chat.ask("1", **{name: value})
    with pytest.raises(UsageError, match="system: must be a text, got 5"):
        chat.system = 5  # type: ignore[assignment]
    stream = chat.stream("1")
    with pytest.raises(UsageError, match="reply: the answer has not ended"):
        _ = stream.reply
    chat.close()
    with pytest.raises(UsageError, match="the session is closed"):
        chat.ask("1")


def test_a_stop_string_ends_the_parts_too(open_toy: OpenToy) -> None:
    engine = open_toy(answers("t12/345e", "u1ea", response=FORMAT))
    for stop, parts in (("34", ("12", "")), ("23", ("1", "")), ("45", ("12", "3"))):
        reply = engine.chat(stop=stop).ask("1")
        assert (reply.thinking, reply.content) == parts
        assert reply.result.text == "".join(parts)


# The same text in other tokens.


def merging() -> tokenizers.Tokenizer:
    """Bytes, two words of several letters, and special tokens."""
    bytes_ = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ["ab", "abc", "Ġa", "..", "ÃĹ"]  # the last one is a character of two bytes
    vocabulary = {token: i for i, token in enumerate([*bytes_, *words])}
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), (".", "."), ("Ã", "Ĺ")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<e>", "<u>", "<a>"])
    return backend


WORDS = Tokenizer.wrap(merging())


def ids_of(*parts: str) -> list[int]:
    """Parts encoded one by one."""
    return [i for part in parts for i in WORDS.encode(part, add_special_tokens=False)]


QUOTED = WORDS.encode("<u>", add_special_tokens=False, parse_special=False)


@pytest.mark.parametrize(
    ("have", "want", "kept", "left"),
    [
        (ids_of("<a>", "a", "b", "c", "<e>"), ids_of("<a>abc<e>x"), 5, ids_of("x")),
        (ids_of("<a>", "ab", "c"), ids_of("<a>abc<e>"), 3, ids_of("<e>")),
        (ids_of("<a>", "abc"), ids_of("<a>ab<e>"), 1, ids_of("ab<e>")),
        (ids_of("<a>", "."), ids_of("<a>..x"), 1, ids_of("..x")),  # not a whole token of its own
        (ids_of("x", " ", "a"), ids_of("x a"), 3, []),
        (ids_of("a", "<e>", "b"), ids_of("ab"), 0, ids_of("ab")),
        (ids_of("<u>"), QUOTED, 0, QUOTED),
        (ids_of("abc"), ids_of("abc"), 1, []),
        (ids_of("abc", "x"), ids_of("abc"), 1, []),
    ],
)
def test_common_text(have: list[int], want: list[int], kept: int, left: list[int]) -> None:
    common = common_text(have, want, WORDS)
    assert (common.have, want[common.want :]) == (kept, left)


CHARACTERS = st.lists(st.sampled_from([*"abc. x", "×", "<e>", "🙂"]), max_size=10)


@settings(max_examples=300, deadline=None)
@given(CHARACTERS, CHARACTERS, st.data())
def test_common_text_spells_what_is_wanted(ours: Any, theirs: Any, data: Any) -> None:
    """However the first text is parted in tokens; and a text in common is kept as a whole."""
    bytes_ = [i for part in ours for i in _bytes(part)]
    at = data.draw(st.integers(0, len(ours)))
    have = [*ids_of("".join(ours[:at])), *(i for part in ours[at:] for i in _bytes(part))]
    for mine in (have, bytes_):
        want = ids_of("".join(ours), "<u>", "".join(theirs))
        common = common_text(mine, want, WORDS)
        assert common.have == len(mine)
        other = ids_of("".join(theirs))
        common = common_text(mine, other, WORDS)
        found = [*mine[: common.have], *other[common.want :]]
        whole = WORDS._tokenizer.decode(found, skip_special_tokens=False)
        assert whole == "".join(theirs)


def _bytes(part: str) -> list[int]:
    """A character in one token per byte."""
    if part.startswith("<"):
        return ids_of(part)
    names = [name for piece in part for name in _names(piece)]
    return [i for name in names if (i := WORDS.id_of(name)) is not None]


def _names(char: str) -> list[str]:
    [(text, _)] = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(char)
    return list(text)


def test_an_answer_in_other_tokens_stays(open_toy: OpenToy) -> None:
    """The model says "abc" in three tokens, the tokenizer has it as one."""
    backend = merging()
    a, u, e = ids_of("<a><u><e>")
    said = ids_of("a", "b", "c")
    toy = Toy(
        script=(0,) * 3 + (*said, e, *said, e),
        tokenizer=backend,
        vocabulary=(),
        chat_template=CHAT,
        eos=(e,),
    )
    chat = open_toy(toy).chat()
    first = chat.ask("x")
    assert (first.content, first.result.tokens) == ("abc", [*said, e])
    second = chat.ask("x")
    assert before(chat, second) == [u, *ids_of("x"), e, a, *said, e, u, *ids_of("x"), e, a]
    assert second.result.stats.prefilled == 1 + 4


# Calls of tools as messages.

QWEN = Region(("<tool_call>",), ("</tool_call>",))
GEMMA = Region(("<|tool_call>call:",), ("<tool_call|>",))


@pytest.mark.parametrize("start", ["<|tool_call>", "<|tool_call>call:"])
@pytest.mark.parametrize(
    "arguments", ["{}", '{zone:<|"|>U"TC: {a,b:1}<|"|>,n:1}', '{a:{b:[1,true,{c:<|"|>x<|"|>}]}}']
)
def test_gemma_calls_are_those_of_transformers(start: str, arguments: str) -> None:
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

    template = next(v for k, v in _RESPONSE_TEMPLATE_FALLBACKS.items() if "gemma4" in k)
    text = f"<|tool_call>call:now{arguments}<tool_call|>" * 2
    theirs = parse_response(text, template, prefix="")["tool_calls"]
    assert tool_calls.parsed(text, Region((start,), ("<tool_call|>",))) == theirs


def test_calls_in_json() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {"zone": "ö"}}\n</tool_call>'
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "ö"}}}
    assert tool_calls.parsed(text + text, QWEN) == [call, call]
    assert tool_calls.parsed(text[:-20], QWEN) is None
    for body in ("[]", "1", '{"name": "now"}', '{"name": 1, "arguments": {}}', "now <arg>"):
        assert tool_calls.parsed(f"<tool_call>{body}</tool_call>", QWEN) is None


def test_tokens_of_a_stream(open_toy: OpenToy) -> None:
    """At any piece those of ``partial``, without the rest of it."""
    stream = open_toy(TOY).stream("1", max_new_tokens=7, eos_token_ids=())
    assert stream.tokens == []
    for _ in stream:
        assert stream.tokens == stream.partial.tokens != []
    assert stream.tokens == stream.result.tokens


def test_the_script_that_shows_what_turns_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import chat_turns
    import toys

    folder = toys.write_folder(tmp_path / "engines", TOY)
    assert chat_turns.main([str(folder), "--turns", "3", "--words", "2", "--new", "3"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["turn", "tokens", "read"]
    tokens, read = ([int(row.split()[column]) for row in rows] for column in (1, 2))
    assert read[0] == tokens[0]
    assert tokens[2] - tokens[1] >= read[2] - 1 > 0


@pytest.mark.parametrize("name", ["mtp", "glm4-moe"])
@pytest.mark.parametrize("back", [0, 1, 2, 5])
def test_rows_that_layers_keep(small_folder: Callable[[str], Path], name: str, back: int) -> None:
    """Those of a cold run over the same tokens, whatever stood behind them before."""
    options: dict[str, Any] = {"method": "mtp", "num_assistant_tokens": 2, "max_new_tokens": 9}
    with specrun.load(small_folder(name) / small_vocabulary.ENGINES, threads=1) as engine:
        session = engine.session()
        session.append([1, 2, 3, 4])
        session.generate(**options)
        session.rewind(len(session.tokens) - back)
        session.append([7, 6, 5])
        text = session.tokens
        options["max_new_tokens"] = 6
        session.generate(**options)
        engine.generate(text, **options)
        rows = [_layer_rows(lane) for lane in (session._open()[0], engine._open_lane())]
        assert len(rows[0]) == 2 * {"mtp": 1, "glm4-moe": 2}[name]
        for warm, cold in zip(*rows, strict=True):
            length = min(warm.shape[2], cold.shape[2])
            assert length > len(text)
            np.testing.assert_allclose(warm[:, :, :length], cold[:, :, :length], atol=1e-5)


def _layer_rows(lane: Lane) -> list[NDArray[Any]]:
    """Keys and values of every MTP layer, ``[1, heads, rows, head size]``."""
    drafter: Any = lane._drafters["mtp"]
    layers = [layer.kv for layer in drafter._layers]
    return [kv.read_rows(name, 0, kv.length) for kv in layers for name in kv.buffers]
