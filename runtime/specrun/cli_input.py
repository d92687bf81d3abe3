"""Texts that the command reads from files, or from stdin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from specrun.errors import UsageError
from specrun.grammar_text import MAX_SCHEMA

MAX_PROMPT_BYTES = 64 << 20
FORMS = 'give a file, - for stdin, or the schema itself, which begins with "{"'
MAX_GRAMMAR_BYTES = 4 * MAX_SCHEMA  # a character takes up to four


def read_input(option: str, source: str, most: int, hint: str, *, absent: str | None = None) -> str:
    """The UTF-8 text of a file, or with - of stdin. Raises UsageError, with ``hint`` where it has
    more than ``most`` bytes, and with ``absent`` where it cannot be read."""
    try:
        if source == "-":
            data = sys.stdin.buffer.read(most + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(most + 1)
        if len(data) > most:  # a device or a pipe may have no end
            raise UsageError(f"{option}: {source}: more than {most} bytes", hint=hint)
        return data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{option}: {source}: {error.strerror}", hint=absent) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{option}: {source}: not UTF-8 text at byte {error.start}",
            hint="convert the file to UTF-8",
        ) from error


def read_grammars(given: dict[str, Any]) -> dict[str, str | None]:
    """``--json-schema`` and ``--grammar`` as options of a generation."""
    sources = {"--prompt-file": given["prompt_file"]}
    found: dict[str, str | None] = {}
    for name in ("json_schema", "grammar"):
        option = f"--{name.replace('_', '-')}"
        source = sources[option] = given[name]
        if [*sources.values()].count("-") > 1:
            both = " and ".join(option for option, source in sources.items() if source == "-")
            raise UsageError(f"{both}: stdin is read once", hint="give a file to one of them")
        if source is None or (name == "json_schema" and source.lstrip().startswith("{")):
            found[name] = source
        else:
            hint = "no schema or grammar that large is read"
            absent = FORMS if name == "json_schema" else "give a file with rules, or - for stdin"
            found[name] = read_input(option, source, MAX_GRAMMAR_BYTES, hint, absent=absent)
    return found
