"""How commands write an answer while it comes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from specrun.response import Piece


class AnswerWriter:
    """An answer as it comes: thoughts to stderr, dim on a terminal, the rest to stdout."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")

    def write(self, pieces: Iterable[Piece]) -> None:
        """All of it, and a line's end."""
        thinking = False
        try:
            for channel, text in pieces:
                if (channel == "thinking") != thinking:
                    self._switch(thinking)
                    thinking = not thinking
                if not thinking:
                    click.echo(text, nl=False)
                    sys.stdout.flush()
                elif not self._quiet:
                    click.echo(text, nl=False, err=True)
        finally:
            if thinking:
                self._switch(True)
            click.echo()

    def _switch(self, thinking: bool) -> None:
        """A thought ends, or begins."""
        if self._quiet:
            return
        if self._dim:
            click.echo("\x1b[0m" if thinking else "\x1b[2m", nl=False, err=True)
        if thinking:
            click.echo(err=True)
