"""The command ``specrun chat``: answers on stdout, all talk on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from specrun.cli_answer import AnswerWriter
from specrun.cli_errors import reports_errors, with_flags
from specrun.cli_folder import located
from specrun.cli_options import chat_options, engine_options, generate_options, opening_options
from specrun.cli_stats import stats_table
from specrun.errors import ContextFull, SpecrunError, UsageError
from specrun.options import Method
from specrun.reading import printable

if TYPE_CHECKING:
    from specrun.conversation import Chat
    from specrun.stats import Stats

PROMPT, MORE = "> ", ". "
HOW_TO_LEAVE = "(Ctrl-D or /quit to leave, /help for what else there is)"
MAX_LINE = 1 << 20  # bytes
NOT_UTF8 = "is not UTF-8"
COMMANDS = {
    "/system [TEXT]": "say how to answer from now on; off: no system message; alone: show it",
    "/method [NAME [K]]": "what drafts (see --method), and how many tokens; alone: show it",
    "/think on|off|auto": "whether a thought comes first, where the template knows that",
    "/undo": "take back the last turn",
    "/reset": "forget the whole conversation",
    "/stats": "what drafting did for the last answer",
    "/save FILE": "write the messages as JSON",
    "/help": "this",
    "/quit": "leave, as Ctrl-D does",
}
OFF = "off"
ALONE = ("/undo", "/reset", "/stats", "/help")  # take nothing behind them


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@chat_options
@engine_options
@click.option("--stats", is_flag=True, help="Write statistics to stderr after every answer.")
@click.option("-q", "--quiet", is_flag=True, help="No thoughts and no warnings on stderr.")
@reports_errors
def chat(folder: Path, stats: bool, quiet: bool, **given: Any) -> None:
    """Talk with the model in FOLDER, a path or hf://ORG/NAME; every turn reads only what is new.

    A line that ends with a backslash goes on in the next one. Ctrl-C stops an answer, Ctrl-D
    leaves. Thoughts, where the model marks them, go to stderr. /help shows the commands.
    Without a terminal a line that fails is reported and the next one asked; the first failure
    makes the exit status.

    \b
    Examples:
      specrun chat engines/
      specrun chat engines/ --system "Answer in one sentence." --method prompt-lookup -k 8
      printf 'Hello\\nAnd now in French\\n' | specrun chat engines/ -n 64
    """
    opening = opening_options(given)
    options = generate_options({**given, "prompt_file": "-"})
    folder = located(folder, quiet=quiet)
    import specrun

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show is no reason to stop

    with specrun.load(folder, options=opening) as engine, engine.chat(options=options) as talk:
        on_terminal = sys.stdin.isatty()
        status = Conversation(talk, _Lines(on_terminal), stats=stats, quiet=quiet).run()
    if status:
        raise SystemExit(status)


class Conversation:
    """Reads lines and does what they say."""

    def __init__(self, chat: Chat, lines: _Lines, *, stats: bool, quiet: bool) -> None:
        self._chat = chat
        self._lines = lines
        self._always_stats = stats
        self._quiet = quiet
        self._stats: Stats | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._system,
            "/method": self._method,
            "/think": self._think,
            "/undo": self._undo,
            "/reset": self._reset,
            "/stats": self._show_stats,
            "/save": self._save,
            "/help": self._help,
        }

    def run(self) -> int:
        """Until the input ends. Returns the exit status: that of the first line that failed where
        there is no terminal, else 0."""
        if self._lines.on_terminal:
            _say(HOW_TO_LEAVE)
        status = 0
        while True:
            try:
                line = self._lines.read()
                if line is None or (text := line.strip()) in ("/quit", "/exit"):
                    return status
                if text:
                    self._do(text)
            except SpecrunError as error:
                self._report(error)
                if not self._lines.on_terminal:
                    status = status or (2 if isinstance(error, UsageError) else 1)

    def _report(self, error: SpecrunError) -> None:
        """With the number of the line, where nobody saw it typed."""
        full = isinstance(error, ContextFull)
        hint = "take turns back with /undo, or /reset the chat" if full else error.hint
        request = full or isinstance(error, UsageError)
        told = self._lines.on_terminal or isinstance(error, LineError)
        where = "" if told else f"line {self._lines.first}: "
        _say(f"Error: {where}{with_flags(str(error), request=request)}")
        if hint:
            _say(f"hint: {with_flags(hint, request=request)}")

    def _do(self, text: str) -> None:
        if not text.startswith("/"):
            self._answer(text)
            return
        name, _, rest = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise UsageError(
                f"{name}: no such command", hint="/help shows them; a space before the / is text"
            )
        rest = rest.strip()
        if rest and name in ALONE:
            raise UsageError(f"{name}: takes nothing behind it, got {rest!r}", hint=name)
        command(rest)

    def _answer(self, text: str) -> None:
        """Write the answer while it comes. Ctrl-C ends it, and only it."""
        stream = self._chat.stream(text, on_warning=self._warn)
        interrupted = False
        try:
            with stream:
                AnswerWriter(quiet=self._quiet).write(stream)
        except KeyboardInterrupt:
            interrupted = True
        result = stream.partial
        self._stats = result.stats
        if interrupted:
            kept = "what came is kept" if result.tokens else "nothing came of it"
            _say(f"(stopped; {kept})")
        elif result.finish_reason == "length":
            _say("(cut: there is more to say; see --max-new-tokens and --max-context)")
        elif result.finish_reason == "timeout":
            _say(f"(cut: --timeout {result.options.timeout:g} was up)")
        if self._always_stats:
            self._show_stats("")

    def _warn(self, message: str) -> None:
        if not self._quiet:
            _say(f"warning: {message}")

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = None if text == OFF else text
            _say("no system message" if text == OFF else "system message set")
            return
        system = self._chat.system
        _say("no system message" if system is None else f"system message: {system}")

    def _method(self, text: str) -> None:
        name, _, count = text.partition(" ")
        if not name:
            options = self._chat.options
            drafts = options.num_assistant_tokens
            auto = f" ({self._chat.method})" if options.method == "auto" else ""
            _say(f"method {options.method}{auto}" + ("" if drafts is None else f" {drafts}"))
            return
        count = count.strip()
        if count and not count.isdecimal():
            raise UsageError(
                f"/method: K must be a whole number of at least 0, got {count!r}",
                hint="for example 4",
            )
        changed = dataclasses.replace(
            self._chat.options,
            method=cast(Method, name),  # which the options check
            num_assistant_tokens=int(count) if count else None,
        )
        self._chat.options = changed
        _say(f"method {text}")

    def _think(self, text: str) -> None:
        values = {"on": True, "off": False, "auto": None}
        if text not in values:
            raise UsageError(f"/think: must be on, off or auto, got {text!r}", hint="/think on")
        changed = dataclasses.replace(self._chat.options, enable_thinking=values[text])
        self._chat.options = changed
        _say(f"thinking {text}")

    def _undo(self, text: str) -> None:
        gone = self._chat.undo()
        _say(f"took back: {_short(str(gone[0].get('content', '')))}")

    def _reset(self, text: str) -> None:
        self._chat.messages = []
        _say("the conversation is empty")

    def _show_stats(self, text: str) -> None:
        if self._stats is None:
            raise UsageError("/stats: there is no answer yet", hint="say something first")
        _say(stats_table(self._stats))

    def _save(self, text: str) -> None:
        if not text:
            raise UsageError("/save: needs the name of a file", hint="/save talk.json")
        system = self._chat.system
        first = [] if system is None else [{"role": "system", "content": system}]
        written = json.dumps([*first, *self._chat.messages], ensure_ascii=False, indent=2)
        try:
            Path(text).write_text(written + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"/save: {text}: {error.strerror}") from error
        _say(f"wrote {text}")

    def _help(self, text: str) -> None:
        width = max(map(len, COMMANDS))
        _say("\n".join(f"{name:<{width}}  {what}" for name, what in COMMANDS.items()))


class LineError(UsageError):
    """A line that cannot be read."""


class _Lines:
    """Lines of the input, with a prompt and editing where it is a terminal.

    ``first``: number of the line that the last text began with, from 1.
    """

    first = 0
    _number = 0  # lines read
    _fault: LineError | None = None  # the first of the text that is being read

    def __init__(self, on_terminal: bool) -> None:
        self.on_terminal = on_terminal
        if on_terminal:
            with contextlib.suppress(ImportError):  # Windows has none; its own editing is enough
                import readline  # noqa: F401

    def read(self) -> str | None:
        """The next line, joined with those that it goes on in; None at the end.

        Raises LineError behind the last of them, where one is too long or not UTF-8.
        """
        parts: list[str] = []
        self.first, self._fault = self._number + 1, None
        while True:
            try:
                line = self._line(MORE if parts else PROMPT)
            except KeyboardInterrupt:  # not in the middle of an answer: the line is dropped
                if not self.on_terminal:
                    raise
                _say(f"\n{HOW_TO_LEAVE}")
                parts, self._fault = [], None
                continue
            self._number += 1
            if line is None and self.on_terminal:
                _say("")
            if line is not None and line.endswith("\\"):
                parts.append(line[:-1])
                continue
            if self._fault is not None:
                raise self._fault
            if line is None:
                return "\n".join(parts) if parts else None
            return "\n".join([*parts, line])

    def _line(self, prompt: str) -> str | None:
        if not self.on_terminal:
            return self._piped()
        if not sys.stdout.isatty():  # answers go to a file, where prompts are not wanted
            click.echo(prompt, nl=False, err=True)
            prompt = ""
        try:
            line = input(prompt)
            line.encode("utf-8")  # what was no text came as halves of surrogate pairs
        except EOFError:
            return None
        except UnicodeError:
            return self._refused(NOT_UTF8, "type it anew")
        return line

    def _piped(self) -> str | None:
        """A line as UTF-8, whatever the locale says. Of one too long only its end is kept."""
        source = sys.stdin.buffer
        data = source.readline(MAX_LINE + 1)
        if not data:
            return None
        if len(data) > MAX_LINE and not data.endswith(b"\n"):
            while rest := b"" if data.endswith(b"\n") else source.readline(MAX_LINE):
                data = data[-2:] + rest
            goes_on = data.rstrip(b"\r\n").endswith(b"\\")
            why = f"has more than {MAX_LINE} bytes"
            return self._refused(why, "part the text", "\\" if goes_on else "")
        data = data.rstrip(b"\r\n")
        try:
            return data.decode("utf-8-sig" if self._number == 0 else "utf-8")
        except UnicodeDecodeError:
            line = data.decode("utf-8", "replace")
            return self._refused(NOT_UTF8, "convert the input to UTF-8", line)

    def _refused(self, why: str, hint: str, line: str = "") -> str:
        """``line``, to be refused when the text is read to its end."""
        which = "the line" if self.on_terminal else f"line {self._number + 1}"
        self._fault = self._fault or LineError(f"{which} {why}", hint=hint)
        return line


def _say(text: str) -> None:
    click.echo(printable(text) if text else "", err=True)


def _short(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return first if len(first) <= 60 and first == text else f"{first[:60]}…"
