"""What the documents say to type: blocks of shell, of shell with its output, and of Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "runtime", "graphs", "export", "tests", "scripts")
LANGUAGES = ("sh", "console", "python", "text", "json")  # text and json are shown, not typed


class Block(NamedTuple):
    """``where``: document and line of the fence, for messages."""

    document: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}"


class Command(NamedTuple):
    """A command line; ``output``: what is shown below it, None where nothing is."""

    text: str
    output: str | None = None


def documents() -> list[str]:
    """Paths of all pages, from the root of the checkout."""
    pages = [
        *ROOT.glob("*.md"),
        *(page for name in FOLDERS for page in ROOT.glob(f"{name}/**/*.md")),
    ]
    return sorted(page.relative_to(ROOT).as_posix() for page in pages)


def read(document: str) -> str:
    """The text of a page."""
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, text: str | None = None) -> list[Block]:
    """All fenced blocks of a page."""
    text = read(document) if text is None else text
    found = re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.M | re.S)
    assert text.count("```") == 2 * len(re.findall(r"^ *```\w*\n.*?^ *```$", text, re.M | re.S)), (
        f"{document}: a fence without an end"
    )
    return [
        Block(document, text[: match.start()].count("\n") + 1, match[2], match[3])
        for match in found
    ]


def all_blocks(*languages: str) -> Iterator[Block]:
    """Those in one of these languages, of all pages."""
    for document in documents():
        yield from (block for block in blocks(document) if block.language in languages)


def commands(block: Block) -> list[Command]:
    """The command lines of a block, without comments and with continued lines joined.

    In a ``console`` block they begin with ``$`` and what follows one is its output.
    """
    text = re.sub(r"\\\n\s*", "", block.text)
    if block.language != "console":
        found = (without_comment(line) for line in text.splitlines())
        return [Command(line) for line in found if line]
    _, *parts = re.split(r"^\$ ", text, flags=re.M)
    split = (part.partition("\n") for part in parts)
    return [Command(without_comment(line), output) for line, _, output in split]


def inline_commands() -> Iterator[Command]:
    """Command lines in running text and tables that generate from the bundled model."""
    for document in documents():
        prose = re.sub(r"```.*?```", "", read(document), flags=re.S)
        for line in re.findall(r"`(specrun engines/ [^`]+)`", prose):
            yield Command(line)


def without_comment(line: str) -> str:
    """A line of shell up to its comment."""
    quoted = re.match(r"""(?:[^"'#]|"(?:\\.|[^"\\])*"|'[^']*'|(?<=\S)#)*""", line)
    assert quoted is not None
    return quoted[0].strip()


def calls(line: str, program: str) -> list[list[str]]:
    """Arguments of every call of ``program`` in a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    found: list[list[str]] = []
    current: list[str] | None = None
    for token in lexer:
        if token == program and current is None:
            current = []
            found.append(current)
        elif set(token) <= set("|&;<>()"):
            current = None
        elif current is not None:
            current.append(token)
    return found
