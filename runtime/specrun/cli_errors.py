"""How a command shows the errors that are raised on purpose."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import click

from specrun.errors import ContextFull, SpecrunError, UsageError
from specrun.options import EngineOptions, GenerateOptions
from specrun.reading import printable

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPTED = 130  # as shells have it: 128 and the number of the signal

FLAGS = {
    field.name: "--" + field.name.replace("_", "-")
    for cls in (EngineOptions, GenerateOptions)
    for field in dataclasses.fields(cls)
} | {
    "num_assistant_tokens_schedule": "--schedule",
    "assistant_confidence_threshold": "--confidence-threshold",
    "do_sample": "--sample",
    "bad_words": "--bad-word",
    "eos_token_ids": "--eos-token-id",
    "enable_thinking": "--thinking",
    # Of specrun serve.
    "max_batch": "--max-batch",
    "max_waiting": "--max-waiting",
    "max_prompt_tokens": "--max-prompt-tokens",
    "max_body_bytes": "--max-body-bytes",
    "model_name": "--model-name",
    "cors_origins": "--cors-origin",
    "host": "--host",
    "port": "--port",
    "grace": "--grace",
    # Of specrun bench.
    "rounds": "--rounds",
    # Of specexport, which reports its errors with the same function.
    "num_draft": "--num-draft",
    "early_exit": "--early-exit",
    "precision": "--precision",
    "drafter_precision": "--drafter-precision",
    "head_precision": "--head-precision",
    "embedding_precision": "--embedding-precision",
    "block_size": "--block-size",
    "memory_gb": "--memory",
}


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Errors raised on purpose as ``Error:`` and ``hint:``; exit 2 for usage, 130 for an
    interruption, else 1."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except SpecrunError as error:
            # Others speak of files, whose fields may have the same names.
            request = isinstance(error, (UsageError, ContextFull))
            click.echo(f"Error: {_shown(str(error), request=request)}", err=True)
            if error.hint:
                click.echo(f"hint: {_shown(error.hint, request=request)}", err=True)
            raise SystemExit(2 if isinstance(error, UsageError) else 1) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader went away, as `| head` does; say nothing at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            click.echo(f"Error: {where}{error.strerror or error}", err=True)
            raise SystemExit(1) from error

    return wrapped


def _shown(message: str, *, request: bool) -> str:
    """With flags, and without what a terminal would obey: names may come from anywhere."""
    return printable(with_flags(message, request=request))


def with_flags(message: str, *, request: bool = True) -> str:
    """An option's field name, where a message names one, as the flag it has here.

    Where an option is meant; and where the message is about a ``request``, anywhere if the name has
    several words, like exact_width.
    """
    for name, flag in FLAGS.items():
        anywhere = request and "_" in name
        before = r"(?<![\w-])" if anywhere else r"(?:^|(?<=give )|(?<=leave )|(?<=without ))"
        message = re.sub(rf"{before}{name}\b(?!\.\w)", flag, message)
    return message
