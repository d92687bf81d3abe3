"""The command chat: answers on stdout, talk on stderr, what a line does, Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from toys import Toy, scripted

from specrun import cli_answer, cli_chat
from specrun.cli import main
from specrun.response import Piece
from specrun.response_format import Region, ResponseFormat

ToyFolder = Callable[[Toy], Path]

CHAT = (
    "{% for message in messages %}{{ '<s>' if message.role == 'system' else '' }}"
    "{{ message.content }}<e>{% endfor %}"
)
SPECIAL = ("<e>", "<s>", "<t>", "</t>")
FORMAT = ResponseFormat(thinking=Region(("<t>",), ("</t>",)))
# Counts on from the last digit, and ends behind a 9.
TOY = Toy(vocabulary=(*"0123456789", *SPECIAL), specials=SPECIAL, modulus=10, chat_template=CHAT)


def call(folder: Path, stdin: str, *arguments: object) -> Result:
    given = ["chat", str(folder), *map(str, arguments)]
    return CliRunner().invoke(main, given, input=stdin)


@pytest.fixture
def folder(toy_folder: ToyFolder) -> Path:
    return toy_folder(TOY)


def test_a_piped_conversation(folder: Path, tmp_path: Path) -> None:
    """<e> is token 10, after which the toy says 1, 2, 3: of a pipe only answers are on stdout."""
    file = tmp_path / "talk.json"
    lines = [
        *("12", "", "/system 7", "3\\", "4", "/undo", "/method draft", "/method prompt-lookup 3"),
        *("/method", "5", f"/save {file}", "/stats", "/reset", "/system off", "6", "/quit", "7"),
    ]
    result = call(folder, "\n".join(lines[:5]) + "\n", "-n", 3)
    assert (result.exit_code, result.stdout) == (0, "123\n123\n")
    assert result.stderr.splitlines() == [CUT, "system message set", CUT]

    lines.remove("/method draft")
    result = call(folder, "\n".join(lines), "-n", 3)
    assert (result.exit_code, result.stdout) == (0, "123\n123\n123\n123\n")
    said = result.stderr.splitlines()
    assert said[:3] == [CUT, "system message set", CUT]
    assert said[3:6] == ["took back: 3…", "method prompt-lookup 3", "method prompt-lookup 3"]
    assert said[6:8] == [CUT, f"wrote {file}"]
    assert said[8].startswith("method ") and "prompt-lookup (speculative)" in said[8]
    assert said[9].split()[1:] == ["12", "prompt", "(3", "of", "them", "read),", "3", "new"]
    assert said[-3:] == ["the conversation is empty", "no system message", CUT]
    assert json.loads(file.read_text(encoding="utf-8")) == [
        {"role": "system", "content": "7"},
        {"role": "user", "content": "12"},
        {"role": "assistant", "content": "123"},
        {"role": "user", "content": "5"},
        {"role": "assistant", "content": "123"},
    ]


CUT = "(cut: there is more to say; see --max-new-tokens and --max-context)"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/nothing", "/nothing: no such command"),
        ("/undo", "undo: the chat has no turn to take back"),
        ("/stats", "/stats: there is no answer yet"),
        ("/method magic", "--method: must be one of auto, plain"),
        ("/method mtp", "--method: 'mtp' needs"),
        ("/method plain x", "/method: K must be a whole number of at least 0, got 'x'"),
        ("/method prompt-lookup -1", "/method: K must be a whole number of at least 0, got '-1'"),
        ("/undo 3", "/undo: takes nothing behind it, got '3'"),
        ("/reset x", "/reset: takes nothing behind it, got 'x'"),
        ("/stats x", "/stats: takes nothing behind it, got 'x'"),
        ("/help me", "/help: takes nothing behind it, got 'me'"),
        ("/think", "/think: must be on, off or auto, got ''"),
        ("/think on", "--thinking: the chat template cannot turn thinking on or off"),
        ("/save", "/save: needs the name of a file"),
        ("/save /nowhere/at/all", "/save: /nowhere/at/all: No such file"),
    ],
)
def test_what_lines_refuse(folder: Path, line: str, says: str) -> None:
    """In a script the next lines are asked nevertheless."""
    result = call(folder, f"\n{line}\n1\n", "-n", 3)
    assert (result.exit_code, result.stdout) == (2, "123\n")
    assert result.stderr.startswith(f"Error: line 2: {says}")
    assert result.stderr.endswith(f"\n{CUT}\n")


MOST = 1 << 20


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (b"caf\xe9\n", "line 1 is not UTF-8"),
        (b"1\\\ncaf\xe9\\\nmore\n", "line 2 is not UTF-8"),
        (b"1" * (MOST + 1) + b"\n", "line 1 has more than 1048576 bytes"),
        (b"1" * (3 * MOST) + b"\\\nmore\n", "line 1 has more than 1048576 bytes"),
    ],
)
def test_lines_that_cannot_be_read(folder: Path, lines: bytes, says: str) -> None:
    """Nor is any of the text that they are part of asked."""
    given = ["chat", str(folder), "-n", "3"]
    result = CliRunner().invoke(main, given, input=lines + b"1\r\n")
    assert (result.exit_code, result.stdout) == (2, "123\n")
    assert [line for line in result.stderr.splitlines() if "hint" not in line] == [
        f"Error: {says}",
        CUT,
    ]


def test_the_first_failure_of_a_script_makes_its_status(folder: Path) -> None:
    """A text that is too long for the context is no error of usage."""
    long = "1" * 1024
    for lines, status in ((f"{long}\n/foo\n", 1), (f"/foo\n{long}\n", 2)):
        result = call(folder, lines)
        assert (result.exit_code, result.stdout) == (status, "")
        errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        assert [error.split(":")[1] for error in errors] == [" line 1", " line 2"]


def test_the_longest_line(folder: Path) -> None:
    result = call(folder, "/system " + "1" * (MOST - 8) + "\n/system off\n")
    said = ["system message set", "no system message"]
    assert (result.exit_code, result.stderr.splitlines()) == (0, said)


def test_what_is_set(folder: Path) -> None:
    lines = ["/method", "/system", "/system say 1", "/system", "/system off", "/system"]
    result = call(folder, "\n".join(lines))
    assert (result.exit_code, result.stderr.splitlines()) == (
        0,
        [
            *("method auto (prompt-lookup)", "no system message", "system message set"),
            *("system message: say 1", "no system message", "no system message"),
        ],
    )


def test_options_of_the_command(folder: Path, toy_folder: ToyFolder) -> None:
    result = call(folder, "1\n", "-n", 2, "--stats", "--method", "plain", "--system", "5")
    assert result.stdout == "12\n"
    assert "plain (plain) on CPUExecutionProvider" in result.stderr
    assert "5 prompt, 2 new" in " ".join(result.stderr.split())  # <s> 5 <e> 1 <e>
    result = call(folder, "1\n", "-n", -1)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --max-new-tokens: must be")
    result = call(folder, "1\n", "--logprobs", 1)  # which a chat does not show
    assert result.exit_code == 2
    assert "No such option" in result.stderr and "--logprobs" in result.stderr
    result = call(toy_folder(Toy()), "1\n")
    assert result.exit_code == 2
    assert "a chat needs a chat template, this folder has none" in result.stderr


@pytest.fixture
def thinking(toy_folder: ToyFolder) -> Path:
    """Says <t>12</t>34, and then nothing but 5."""
    script = (12, 1, 2, 13, 3, 4, 10, 5)
    fields: dict[str, Any] = {"vocabulary": TOY.vocabulary, "specials": SPECIAL, "eos": (10,)}
    return toy_folder(
        scripted(script, prompt_length=2, response=FORMAT, chat_template=CHAT, **fields)
    )


def test_thoughts_go_to_stderr(thinking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (["chat"], ["run", "--prompt", "1"]):
        for quiet, stderr in (([], "12\n"), (["--quiet"], "")):
            given = [*command, str(thinking), *quiet]
            result = CliRunner().invoke(main, given, input="1\n")
            assert (result.exit_code, result.stdout, result.stderr) == (0, "34\n", stderr)
    raw = CliRunner().invoke(main, [str(thinking), "--prompt", "11", "--raw"])
    assert (raw.stdout, raw.stderr) == ("1234\n", "")
    data = json.loads(CliRunner().invoke(main, [str(thinking), "--prompt", "1", "--json"]).stdout)
    parts = {name: data[name] for name in ("text", "thinking", "content", "tool_calls")}
    assert parts == {"text": "1234", "thinking": "12", "content": "34", "tool_calls": ""}


def test_thoughts_are_dim_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = [Piece("thinking", "a"), Piece("content", "b"), Piece("thinking", "c")]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    cli_answer.AnswerWriter(quiet=False).write(pieces)
    assert capsys.readouterr() == ("b\n", "\x1b[2ma\x1b[0m\n\x1b[2mc\x1b[0m\n")
    monkeypatch.setenv("NO_COLOR", "1")
    cli_answer.AnswerWriter(quiet=False).write(pieces)
    assert capsys.readouterr() == ("b\n", "a\nc\n")


class Terminal(cli_chat._Lines):
    """A terminal on which these lines are typed; an exception is what a key does."""

    def __init__(self, typed: Iterable[str | type[BaseException]]) -> None:
        self._typed = iter(typed)
        self.prompts: list[str] = []
        self.on_terminal = True

    def _line(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        line = next(self._typed, None)
        if isinstance(line, type):
            raise line
        return line


def on_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *typed: str | type[BaseException]
) -> tuple[Result, Terminal]:
    terminal = Terminal(typed)
    monkeypatch.setattr(cli_chat, "_Lines", lambda on_terminal: terminal)
    return call(folder, "", "-n", 3), terminal


def test_on_a_terminal_errors_and_ctrl_c_end_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that was begun is dropped, and how to leave is said."""
    typed = ("/bogus", "9\\", KeyboardInterrupt, "1", "/think on", "1" * 1024, "2")
    result, terminal = on_terminal(folder, monkeypatch, *typed)
    assert (result.exit_code, result.stdout) == (0, "123\n123\n")
    assert terminal.prompts == ["> ", "> ", ". ", "> ", "> ", "> ", "> ", "> "]
    said = result.stderr.splitlines()
    assert said[:3] == [HOW, "Error: /bogus: no such command", said[2]]
    assert said[3:5] == ["", HOW]
    assert "Error: --thinking: the chat template cannot turn thinking on or off" in said[6]
    assert "do not fit into the context" in said[8]
    assert said[9] == "hint: take turns back with /undo, or /reset the chat"


HOW = cli_chat.HOW_TO_LEAVE


def test_ctrl_c_stops_the_answer_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = cli_answer.AnswerWriter.write

    def interrupted(self: Any, pieces: Iterable[Piece]) -> None:
        def some() -> Any:
            yield next(iter(pieces))
            raise KeyboardInterrupt

        write(self, some() if not done else pieces)

    done: list[int] = []
    monkeypatch.setattr(cli_answer.AnswerWriter, "write", interrupted)
    result = call(folder, "1\n", "-n", 3)
    assert (result.exit_code, result.stdout) == (0, "1\n")
    assert result.stderr == "(stopped; what came is kept)\n"


def test_lines_of_a_real_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where stdout is none, prompts go to stderr."""
    given: Iterator[str | type[BaseException]] = iter(["1\\", "2", EOFError])

    def typed(prompt: str) -> str:
        assert prompt == expected
        line = next(given)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    lines = cli_chat._Lines(on_terminal=True)
    expected = ""
    assert lines.read() == "1\n2"
    assert capsys.readouterr() == ("", "> . ")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    expected = "> "
    assert lines.read() is None
    assert capsys.readouterr() == ("", "\n")
