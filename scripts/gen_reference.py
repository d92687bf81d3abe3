"""Writes the command reference, docs/reference.md, from the help texts of the commands.

    python scripts/gen_reference.py            # after a change to an option or a help text
    python scripts/gen_reference.py --check    # exit 1 if the page is not current

The reference stands between two marker comments; everything else on the page stays as it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import click

from specexport.cli import main as specexport
from specrun.cli import main as specrun

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
BEGIN = "<!-- reference: written by scripts/gen_reference.py -->"
END = "<!-- reference: end -->"
COMMANDS = (
    (specexport, "specexport", ("export", "plan", "build", "check", "presets")),
    (
        specrun,
        "specrun",
        ("run", "chat", "serve", "tune", "bench", "compare", "inspect", "doctor"),
    ),
)
WIDTH = 100  # characters per line of help


def help_text(group: click.Group, program: str, name: str) -> str:
    """What ``program name --help`` prints, at a fixed width."""
    parent = click.Context(group, info_name=program, **group.context_settings)
    command = group.commands[name]
    settings = {"terminal_width": WIDTH, "max_content_width": WIDTH, **command.context_settings}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


def reference() -> str:
    """The whole reference as Markdown, markers included."""
    parts = [BEGIN]
    for group, program, names in COMMANDS:
        for name in names:
            text = help_text(group, program, name)
            parts.append(f"## {program} {name}\n\n```text\n{text}\n```")
    return "\n\n".join([*parts, END])


def with_reference(page: str) -> str:
    """``page`` with the reference as it is now. Raises ValueError without the two markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name}: the lines {BEGIN!r} and {END!r} are needed, in this order")
    return before + reference() + after


def main() -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if not current")
    options = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    new = with_reference(old)
    if options.check and new != old:
        print("Error: docs/reference.md is not current", file=sys.stderr)
        print("hint: python scripts/gen_reference.py", file=sys.stderr)
        return 1
    if new != old:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
