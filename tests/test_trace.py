"""A generation as data and as a page: origins, spans of text, counts, escaping, what stays of a
generation that broke off."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from drafting import Failing, Oracle, RightFor, Scripted, Wrong
from test_text import TEXTS, TOKENIZERS, byte_fallback, byte_level
from toys import Toy, scripted, toy_tokenizer

import specrun
from specrun import Engine, UsageError, writing
from specrun.cli import main
from specrun.origin import ORIGINS
from specrun.pages import html as pages
from specrun.spelling import names
from specrun.text import Tokenizer
from specrun.trace import Recorder, Trace
from specrun.trace.page import data, inline, page
from specrun.trace.spans import spans, visible

OpenToy = Callable[..., Engine]
EVIL = ("<", "/", "script", ">", "&", '"', "'", "\n", "\u202e", "\u2028", "<!--", "\0")
SHORT = {"plain": "p", "accepted": "a", "correction": "c", "bonus": "b"}


def traced(engine: Engine, prompt: Any, **given: Any) -> Trace:
    recorder = Recorder()
    result = engine.generate(prompt, on_round=recorder, **given)
    return recorder.trace(engine, result)


def pattern(found: Trace) -> str:
    """Origins, one letter each."""
    return "".join(SHORT[token.origin] for token in found.tokens)


def joined(found: Trace) -> str:
    return "".join(token.text for token in found.tokens)


class Shown(HTMLParser):
    """Text and class of every token element, and every element's name."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tokens: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self._depth = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        if given.get("role") == "option":
            self.tokens.append(("", str(given["class"])))
            self._depth = 1
        elif self._depth:
            self._depth += 1

    def handle_endtag(self, tag: str) -> None:
        self._depth = max(0, self._depth - 1)

    def handle_data(self, data: str) -> None:
        if self._depth:
            text, kind = self.tokens[-1]
            self.tokens[-1] = (text + data, kind)


# Tokens, rounds and counts.


def test_origins_rounds_and_texts(open_toy: OpenToy) -> None:
    toy = Toy(max_context=100)
    found = traced(
        open_toy(toy), [1], max_new_tokens=11, drafter=RightFor(toy, [2, 0, 3]),
        num_assistant_tokens=3,
    )  # fmt: skip
    assert pattern(found) == "p" + "aac" + "c" + "aaab" + "ab"  # the last ones fill what remains
    assert [token.text for token in found.tokens] == list("23456789012")
    assert [token.round for token in found.tokens] == [None, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3]
    first, second, third, last = found.rounds
    assert (first.proposal, first.accepted, first.token) == ((3, 4, 6), 2, 5)
    assert [done.rejected for done in found.rounds] == [(6,), (7, 8, 9), (), ()]
    assert [(done.first, done.emitted) for done in found.rounds] == [(1, 3), (4, 1), (5, 4), (9, 2)]
    assert all(done.draft_seconds >= 0 and done.verify_seconds > 0 for done in found.rounds)
    assert (second.accepted, third.accepted, last.accepted) == (0, 3, 1)


def test_counts_are_those_of_the_statistics(open_toy: OpenToy) -> None:
    toy = Toy(max_context=100)
    for drafter in (RightFor(toy, [2, 0, 3]), Oracle(toy), Wrong(toy)):
        found = traced(
            open_toy(toy), [1], max_new_tokens=30, drafter=drafter, num_assistant_tokens=3
        )
        stats = found.stats
        assert found.origins["accepted"] == stats.accepted
        assert sum(found.origins.values()) == stats.emitted == len(found.tokens)
        assert found.origins["correction"] + found.origins["bonus"] + found.origins["plain"] == (
            stats.rounds + 1
        )
        assert sum(len(done.rejected) for done in found.rounds) == stats.rejected
        assert sum(len(done.proposal) for done in found.rounds) == stats.drafted + stats.discarded
        assert [done.num_draft for done in found.rounds] == list(stats.num_draft_by_round)
        assert tuple(done.accepted for done in found.rounds) == stats.accepted_by_round
        measured = sum(done.verify_seconds for done in found.rounds)
        assert measured == pytest.approx(stats.seconds["verify"])
        assert sum(done.draft_seconds for done in found.rounds) <= stats.seconds["draft"] + 1e-9


def test_plain_decoding(open_toy: OpenToy) -> None:
    found = traced(open_toy(Toy()), [1], max_new_tokens=6, method="plain")
    assert pattern(found) == "p" * 6 and not any(done.proposal for done in found.rounds)
    shown = page(found)
    assert "Acceptance by position" not in shown and "nothing drafted" in shown


def test_a_stop_string_cuts_text_and_rounds(open_toy: OpenToy) -> None:
    toy = Toy(max_context=100)
    found = traced(
        open_toy(toy), [1], max_new_tokens=30, drafter=Oracle(toy), num_assistant_tokens=4,
        stop="67",
    )  # fmt: skip
    assert (found.text, joined(found)) == ("2345", "2345")
    assert [token.text for token in found.tokens] == ["2", "3", "4", "5", "", ""]
    assert pattern(found) == "paaaab"
    found = traced(
        open_toy(toy), [1], max_new_tokens=30, drafter=Oracle(toy), num_assistant_tokens=4,
        stop="56",
    )  # fmt: skip
    assert pattern(found) == "paaaa" and found.rounds[0].rejected == ()
    assert (found.origins["accepted"], found.stats.accepted) == (4, 3)
    assert "The text ended inside a draft" in page(found)


def test_end_ids_are_shown_by_name(open_toy: OpenToy) -> None:
    toy = scripted([1, 2], vocabulary=("a", "b"), specials=("<eos>",), eos=(2,))
    found = traced(open_toy(toy), [0], max_new_tokens=5, method="plain")
    assert found.text == "b" and found.names[2] == "<eos>"
    tokens = Shown(page(found)).tokens
    assert tokens == [("b", "t plain"), ("", "t plain")]
    assert 'data-c="&lt;eos&gt;"' in page(found)


def test_sampled_text(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(drafter=True, table=((0.1,) * 10,) * 10))
    given: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3}
    found = traced(engine, [1], logprobs=2, **given)
    assert [token.id for token in found.tokens] == engine.generate([1], **given).tokens
    assert found.origins["accepted"] == found.stats.accepted
    assert {round(token.logprob or 0, 3) for token in found.tokens} == {round(math.log(0.1), 3)}
    assert found.options["seed"] == 3


def test_every_row_of_a_batch(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(drafter=True))
    recorder = Recorder()
    results = engine.generate([[1], [5]], max_new_tokens=7, on_round=recorder)
    for row, result in enumerate(results):
        found = recorder.trace(engine, result, sequence=row)
        assert joined(found) == result.text
        assert [token.id for token in found.tokens] == result.tokens
    with pytest.raises(UsageError, match="not those of the rounds that were recorded"):
        recorder.trace(engine, results[1], sequence=0)


def test_a_session_and_one_recorder_for_all_of_it(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(drafter=True))
    session = engine.session()
    session.append([1])
    recorder = Recorder()
    for _ in range(2):
        result = session.generate(max_new_tokens=5, on_round=recorder)
        assert joined(recorder.trace(engine, result)) == result.text
    one = session.generate(max_new_tokens=1, on_round=recorder)
    assert len(recorder.trace(engine, one).tokens) == 1
    none = session.generate(max_new_tokens=0, on_round=recorder)
    empty = recorder.trace(engine, none)
    assert empty.tokens == () and Shown(page(empty)).tokens == []


def test_another_recorder_is_an_error(open_toy: OpenToy) -> None:
    engine = open_toy(Toy())
    result = engine.generate([1], max_new_tokens=5)
    with pytest.raises(UsageError, match="not those of the rounds") as caught:
        Recorder().trace(engine, result)
    assert "on_round=" in str(caught.value.hint)


def test_asking_for_alternatives_changes_no_token(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(drafter=True, history_weight=3, max_context=200))
    for method in ("plain", "mtp-drafter", "prompt-lookup"):
        given: dict[str, Any] = {"max_new_tokens": 60, "method": method}
        found = traced(engine, [1, 2], logprobs=5, **given)
        result = engine.generate([1, 2], **given)
        assert [token.id for token in found.tokens] == result.tokens
        for token in found.tokens:
            assert len(token.top) == 5 and token.top[0] == (token.id, token.logprob)


# A generation that breaks off.


def test_what_an_error_leaves(open_toy: OpenToy) -> None:
    toy = Toy(max_context=100)
    engine, recorder = open_toy(toy), Recorder()
    stream = engine.stream(
        [1], max_new_tokens=30, drafter=Failing(toy, at=3), num_assistant_tokens=3, strict=True,
        on_round=recorder,
    )  # fmt: skip
    with pytest.raises(specrun.EngineError):
        stream.drain()
    found = recorder.trace(engine, stream.partial, error="it <broke>")
    assert pattern(found) == "p" + "aaab" * 3
    assert found.finish_reason == "error"
    assert "An error ended it: it &lt;broke&gt;" in page(found)


class BreaksAt(Scripted):
    """Raises when it is told of a round, after the round was counted and before it is told."""

    def __init__(self, toy: Toy, right: int, at: int) -> None:
        super().__init__(toy)
        self.right, self.at = right, at

    def draft(self, token: int, place: int) -> int:
        return token if place < self.right else (token + 1) % self.toy.modulus

    def observe(self, tokens: Any, hidden: Any) -> None:
        if len(self.proposals) == self.at:
            raise KeyboardInterrupt
        super().observe(tokens, hidden)


@pytest.mark.parametrize(("right", "last"), [(0, "c"), (1, "ac"), (2, "aab")])
def test_a_round_that_was_counted_and_not_told(open_toy: OpenToy, right: int, last: str) -> None:
    """Its origins follow from the counts."""
    toy = Toy(max_context=100)
    engine, recorder = open_toy(toy), Recorder()
    stream = engine.stream(
        [1], max_new_tokens=30, drafter=BreaksAt(toy, right, at=2), num_assistant_tokens=2,
        on_round=recorder,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        stream.drain()
    found = recorder.trace(engine, stream.partial)
    assert len(found.rounds) == 1 and pattern(found) == "p" + 2 * last
    assert [token.round for token in found.tokens][-len(last) :] == [None] * len(last)
    assert joined(found) == stream.partial.text == found.text


def test_a_round_that_was_cut_and_not_told(open_toy: OpenToy) -> None:
    toy = Toy(max_context=100, eos=(4,))
    engine, recorder = open_toy(toy), Recorder()
    stream = engine.stream(
        [1], max_new_tokens=30, drafter=BreaksAt(toy, 3, at=1), num_assistant_tokens=3, stop="4",
        on_round=recorder, eos_token_ids=[],
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        stream.drain()
    found = recorder.trace(engine, stream.partial)
    assert found.rounds == () and pattern(found) == "paa"


# Which token gave which text.


@pytest.mark.parametrize("made", TOKENIZERS)
def test_spans_together_are_the_text(made: str) -> None:
    tokenizer = Tokenizer.wrap(TOKENIZERS[made])
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(ids)
        found = spans(tokenizer, ids, whole)
        assert "".join(span.text for span in found) == whole
        for cut in (0, 1, len(whole) // 2):
            assert "".join(span.text for span in spans(tokenizer, ids, whole[:cut])) == whole[:cut]
        half = spans(
            tokenizer, ids[:-1], tokenizer.decode(ids[:-1])
        )  # in the middle of a character
        assert "".join(span.text for span in half) == tokenizer.decode(ids[:-1])
    with pytest.raises(ValueError, match="not that of the tokens"):
        spans(tokenizer, [5], "something else")


def test_tokens_of_one_character_belong_together() -> None:
    tokenizer = Tokenizer.wrap(byte_level())
    ids = tokenizer.encode("a🦊b", add_special_tokens=False)
    found = spans(tokenizer, ids, "a🦊b")
    assert [(span.text, span.group) for span in found] == [
        ("a", 0), ("", 1), ("", 1), ("", 1), ("🦊", 1), ("b", 5),
    ]  # fmt: skip
    eos = tokenizer.id_of("</s>")
    assert eos is not None
    found = spans(tokenizer, [ids[0], eos, ids[5]], "ab")
    assert [(span.text, span.group) for span in found] == [("a", 0), ("", 1), ("b", 2)]


def test_a_character_in_parts_on_the_page(open_toy: OpenToy) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("🦊é", add_special_tokens=False).ids
    engine = open_toy(scripted(ids, tokenizer=tokenizer))
    found = traced(engine, [0], max_new_tokens=len(ids), method="plain")
    shown = page(found)
    assert [text for text, _ in Shown(shown).tokens] == ["", "", "", "🦊", "", "é"]
    assert [f'data-c="{part}/4"' in shown for part in (1, 2, 3, 4)] == [True, True, True, False]
    packed = data(found)["tokens"]
    assert [token[5] for token in packed] == [[1, 4], [2, 4], [3, 4], [4, 4], [1, 2], [2, 2]]
    assert packed[3][6] == "🦊"


def test_names_of_tokens() -> None:
    tokenizer = Tokenizer.wrap(byte_fallback(strip=True))
    word, byte, end = (tokenizer.id_of(name) for name in ("▁words", "<0xF0>", "</s>"))
    assert word is not None and byte is not None and end is not None
    assert names(tokenizer, [word, byte, end, 99_999]) == {
        word: " words", byte: "<0xF0>", end: "</s>", 99_999: "#99999",
    }  # fmt: skip
    assert visible(" a\n\t\u200b\x07é") == "␣a⏎⇥U+200BU+0007é"


# The page.


def evil(open_toy: OpenToy) -> Trace:
    """A model whose tokens are what would break a page, in a folder that is no better."""
    toy = scripted(range(len(EVIL)), vocabulary=EVIL)
    engine = open_toy(toy)
    found = traced(engine, [0], max_new_tokens=len(EVIL), method="plain", logprobs=3)
    bad = "</script><script>alert(1)</script><!--"
    folder = dataclasses.replace(found.folder, target=bad, path=bad)
    return dataclasses.replace(found, folder=folder, prompt=bad, error=bad)


def test_nothing_of_a_text_is_code(open_toy: OpenToy) -> None:
    found = evil(open_toy)
    shown = page(found)
    harmless = page(traced(open_toy(Toy()), [0], max_new_tokens=5, method="plain"))
    assert Shown(shown).tags.count("script") == Shown(harmless).tags.count("script") == 2
    assert "alert(1)</script>" not in shown and "<!--" not in shown
    assert "\u202e" not in shown and "\0" not in shown
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', shown, re.S)
    assert block is not None and not re.search("[<>&]", block[1])
    packed = json.loads(block[1])
    assert packed["names"]["5"] == '"' and packed["names"]["10"] == "<!--"
    assert packed == json.loads(json.dumps(data(found)))


def test_invisible_characters_are_shown() -> None:
    assert inline("a\nb") == 'a<i class="nl"></i>\nb'
    for char, shown in (
        ("\u200b", "U+200B"),
        ("\x1b", "U+001B"),
        ("\t", "⇥"),
        ("\ufffd", "\ufffd"),
    ):
        assert inline(f"a{char}") == f'a<i class="ch" data-c="{shown}"></i>'
    assert inline("👩\u200d💻") == "👩\u200d💻"  # what joins an emoji stays
    assert inline("a\u200db") == 'a<i class="ch" data-c="U+200D"></i>b'
    assert inline(" <b> ") == " &lt;b&gt; "


def test_the_text_of_the_page_is_the_text(open_toy: OpenToy) -> None:
    toy = Toy(max_context=100, vocabulary=tuple("0123\n56 8é"))
    found = traced(
        open_toy(toy), [1], max_new_tokens=25, drafter=RightFor(toy, [1, 2, 0]),
        num_assistant_tokens=2, logprobs=2,
    )  # fmt: skip
    tokens = Shown(page(found)).tokens
    assert "".join(text for text, _ in tokens) == found.text
    assert [kind for _, kind in tokens] == [f"t {token.origin}" for token in found.tokens]
    for origin, count in found.origins.items():
        if count:
            assert re.search(rf'data-origin="{origin}".*? {count} \(', page(found)), origin


def test_the_page_needs_nothing_else(open_toy: OpenToy) -> None:
    shown = page(evil(open_toy))
    for loads in ("<link", "<img", "<iframe", "@import", "url(", "http://", "https://", " style="):
        assert loads not in shown, loads
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', shown)
    assert policy is not None
    style = re.search("<style>(.*?)</style>", shown, re.S)
    code = re.findall("<script>(.*?)</script>", shown, re.S)
    assert style is not None and len(code) == 1
    allowed = html.unescape(policy[1])
    assert "default-src 'none'" in allowed
    assert f"style-src {pages._hashes([style[1]])}" in allowed
    assert f"script-src {pages._hashes([code[0]])}" in allowed


def test_what_ran_is_told(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(drafter=True), exact=True, exact_width=8)
    recorder = Recorder()
    result = engine.generate("12", max_new_tokens=9, on_round=recorder, stop="x")
    found = recorder.trace(engine, result, prompt="12")
    assert found.folder.target == "toy" and found.folder.drafter == "toy-drafter"
    assert re.fullmatch("[0-9a-f]{16}", found.folder.fingerprint)
    assert found.engine["exact_width"] == 8 and found.options["stop"] == ["x"]
    shown = page(found)
    for text in ("toy-drafter", found.folder.fingerprint, str(engine.folder), "onnxruntime"):
        assert html.escape(text) in shown
    assert f"<dd>{result.stats.tokens_per_target_step:.2f}</dd>" in shown


def test_a_change_of_a_file_changes_the_fingerprint(open_toy: OpenToy) -> None:
    one, same, other = (
        traced(open_toy(toy), [1], max_new_tokens=2, method="plain").folder.fingerprint
        for toy in (Toy(), Toy(), Toy(history_weight=1))
    )
    assert one == same != other


# The command.


@pytest.fixture
def folder(toy_folder: Callable[[Toy], Path]) -> Path:
    return toy_folder(Toy(drafter=True, max_context=64))


def call(folder: Path, *arguments: object) -> Any:
    given = [str(folder), "--prompt", "12", "-n", "9", *map(str, arguments)]
    return CliRunner().invoke(main, given)


def test_the_command_writes_a_page(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    result = call(folder, "--trace", file)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "345678901\n", "")
    assert "".join(text for text, _ in Shown(file.read_text("utf-8")).tokens) == "345678901"
    assert [path.name for path in tmp_path.glob("*out*")] == ["out.html"]


def test_the_command_writes_data(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = call(folder, "--trace", file, "--json")
    shown, found = json.loads(result.stdout), json.loads(file.read_text("utf-8"))
    assert found["stats"] == shown["stats"] and found["text"] == shown["text"]
    assert [token["id"] for token in found["tokens"]] == shown["tokens"]
    assert set(found["origins"]) == set(ORIGINS) and found["prompt"] == "12"
    assert shown["options"]["logprobs"] == 5 and shown["options"]["trace"] == str(file)
    assert all(len(token["top"]) == 5 for token in found["tokens"])
    call(folder, "--trace", file, "--logprobs", "2")
    tokens = json.loads(file.read_text("utf-8"))["tokens"]
    assert all(len(token["top"]) == 2 for token in tokens)
    assert json.loads(call(folder, "--json").stdout)["options"]["logprobs"] is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("out.txt", "must end in .html or .htm or .json"),
        ("nowhere/out.html", "cannot be written: No such file or directory"),
        ("folder.html", "cannot be written: is a folder"),
    ],
)
def test_a_file_that_cannot_be_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    """One error, before anything is generated."""
    (tmp_path / "folder.html").mkdir()
    monkeypatch.setattr(specrun, "load", lambda *_, **__: pytest.fail("the engine was opened"))
    result = call(folder, "--trace", tmp_path / name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: --trace: ") and says in result.stderr
    assert len(result.stderr.splitlines()) == 2


def interrupt(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Raise ``error`` behind the second round."""
    told = Recorder.__call__

    def then_raise(self: Recorder, done: specrun.Round) -> None:
        told(self, done)
        if done.index == 1:
            raise error

    monkeypatch.setattr(Recorder, "__call__", then_raise)


def test_ctrl_c_writes_what_there_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    interrupt(monkeypatch, KeyboardInterrupt())
    result = call(folder, "--trace", file, "-k", "1")
    assert result.exit_code == 130 and "interrupted" in result.stderr
    found = json.loads(file.read_text("utf-8"))
    assert found["text"] == "34567" and len(found["rounds"]) == 2
    assert (found["finish_reason"], found["error"]) == ("cancelled", None)


def test_an_error_writes_what_there_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    interrupt(monkeypatch, specrun.EngineError("it broke", hint="mend it"))
    result = call(folder, "--trace", file, "-k", "1")
    assert (result.exit_code, result.stderr) == (1, "Error: it broke\nhint: mend it\n")
    found = json.loads(file.read_text("utf-8"))
    assert (found["text"], found["finish_reason"], found["error"]) == ("34567", "error", "it broke")

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "replace", full)
    both = call(folder, "--trace", file, "-k", "1")
    assert both.exit_code == 1 and "Error: it broke" in both.stderr
    assert f"warning: {file}: cannot be written: No space left on device" in both.stderr


def test_a_disk_that_is_full(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there stays, and nothing half written."""
    file = tmp_path / "out.html"
    file.write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = call(folder, "--trace", file)
    assert (result.exit_code, result.stdout) == (2, "345678901\n")
    assert f"Error: {file}: cannot be written: No space left on device" in result.stderr
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.glob("*out*")] == ["out.html"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    writing.replace(tmp_path / "link.html", "text")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text() == "text"


def test_a_toy_has_a_tokenizer_of_its_own() -> None:
    """What the tests above take for granted: one token for each entry, in its order."""
    made = toy_tokenizer(Toy(vocabulary=EVIL))
    assert [made.id_to_token(index) for index in range(len(EVIL))] == list(EVIL)
