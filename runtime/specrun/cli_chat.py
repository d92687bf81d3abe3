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
from specrun.cli_errors import reports_errors
from specrun.cli_folder import located
from specrun.cli_options import (
    engine_options,
    generate_options,
    generation_options,
    opening_options,
)
from specrun.cli_stats import stats_table
from specrun.errors import ContextFull, SpecrunError, UsageError
from specrun.options import Method
from specrun.reading import printable

if TYPE_CHECKING:
    from specrun.conversation import Chat
    from specrun.stats import Stats

PROMPT, MORE = "> ", ". "
HOW_TO_LEAVE = "(Ctrl-D or /quit to leave, /help for what else there is)"
MAX_LINE = 1 << 20  # characters
COMMANDS = {
    "/system [TEXT]": "say how to answer from now on; without TEXT: no system message",
    "/method NAME [K]": "what drafts (see --method), and how many tokens",
    "/think on|off|auto": "whether a thought comes first, where the template knows that",
    "/undo": "take back the last turn",
    "/reset": "forget the whole conversation",
    "/stats": "what drafting did for the last answer",
    "/save FILE": "write the messages as JSON",
    "/help": "this",
    "/quit": "leave, as Ctrl-D does",
}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@generation_options
@engine_options
@click.option("--stats", is_flag=True, help="Write statistics to stderr after every answer.")
@click.option("-q", "--quiet", is_flag=True, help="No thoughts and no warnings on stderr.")
@reports_errors
def chat(folder: Path, stats: bool, quiet: bool, **given: Any) -> None:
    """Talk with the model in FOLDER, a path or hf://ORG/NAME; every turn reads only what is new.

    A line that ends with a backslash goes on in the next one. Ctrl-C stops an answer, Ctrl-D
    leaves. Thoughts, where the model marks them, go to stderr. /help shows the commands.

    \b
    Examples:
      specrun chat engines/
      specrun chat engines/ --system "Answer in one sentence." --method prompt-lookup -k 8
      printf 'Hello\\nAnd now in French\\n' | specrun chat engines/ -n 64
    """
    if given["logprobs"] is not None:
        raise UsageError("--logprobs: a chat does not show them", hint="use specrun run --json")
    opening = opening_options(given)
    options = generate_options({**given, "prompt_file": "-"})
    folder = located(folder, quiet=quiet)
    import specrun

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show is no reason to stop

    with specrun.load(folder, options=opening) as engine, engine.chat(options=options) as talk:
        on_terminal = sys.stdin.isatty()
        Conversation(talk, _Lines(on_terminal), stats=stats, quiet=quiet).run()


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

    def run(self) -> None:
        """Until the input ends. Without a terminal the first error ends it, as in a script."""
        if self._lines.on_terminal:
            _say(HOW_TO_LEAVE)
        while (line := self._lines.read()) is not None:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            if not text:
                continue
            try:
                self._do(text)
            except SpecrunError as error:
                if not self._lines.on_terminal:
                    raise
                full = isinstance(error, ContextFull)
                hint = "take turns back with /undo, or /reset the chat" if full else error.hint
                _say(f"Error: {error}")
                if hint:
                    _say(f"hint: {hint}")

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
        command(rest.strip())

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
        self._chat.system = text or None
        _say("system message set" if text else "no system message")

    def _method(self, text: str) -> None:
        name, _, count = text.partition(" ")
        if not name:
            options = self._chat.options
            drafts = options.num_assistant_tokens
            _say(f"method {options.method}" + ("" if drafts is None else f" {drafts}"))
            return
        if count and not count.strip().isdecimal():
            raise UsageError(f"/method: K must be a number, got {count!r}", hint="for example 4")
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


class _Lines:
    """Lines of the input, with a prompt and editing where it is a terminal."""

    def __init__(self, on_terminal: bool) -> None:
        self.on_terminal = on_terminal
        if on_terminal:
            with contextlib.suppress(ImportError):  # Windows has none; its own editing is enough
                import readline  # noqa: F401

    def read(self) -> str | None:
        """The next line, joined with those that it goes on in; None at the end."""
        parts: list[str] = []
        while True:
            try:
                line = self._line(MORE if parts else PROMPT)
            except KeyboardInterrupt:  # not in the middle of an answer: the line is dropped
                if not self.on_terminal:
                    raise
                _say(f"\n{HOW_TO_LEAVE}")
                parts = []
                continue
            if line is None:
                if self.on_terminal:
                    _say("")
                return "\n".join(parts) if parts else None
            if not line.endswith("\\"):
                return "\n".join([*parts, line])
            parts.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        if self.on_terminal:
            if not sys.stdout.isatty():  # answers go to a file, where prompts are not wanted
                click.echo(prompt, nl=False, err=True)
                prompt = ""
            try:
                return input(prompt)
            except EOFError:
                return None
        data = sys.stdin.readline(MAX_LINE + 1)
        if len(data) > MAX_LINE:
            raise UsageError(f"a line of more than {MAX_LINE} characters", hint="part the text")
        return data.removesuffix("\n") if data else None


def _say(text: str) -> None:
    click.echo(printable(text) if text else "", err=True)


def _short(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return first if len(first) <= 60 and first == text else f"{first[:60]}…"
