"""The checkpoint's chat template, rendered as Hugging Face templates expect, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specrun.errors import UsageError

Message = Mapping[str, Any]


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text; here it is plain."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
    """The messages as one text that ends where the assistant's answer begins.

    ``special_tokens`` (``bos_token`` and so on) are variables of the template. Raises UsageError
    when the template refuses the messages or is broken.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except jinja2.TemplateError as error:
        raise UsageError(
            f"the chat template refuses the prompt: {error}",
            hint="use --raw (raw=True) to give the text as it is",
        ) from error
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise UsageError(
            f"the chat template failed: {type(error).__name__}: {error}",
            hint="use --raw (raw=True) to give the text as it is",
        ) from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without jinja2's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
