"""The checkpoint's chat template, rendered as Hugging Face templates expect, in a sandbox."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from specrun import chat_limits
from specrun.chat_limits import Budget, LimitError
from specrun.chat_sandbox import Sandbox
from specrun.errors import UsageError
from specrun.limits import MAX_TEMPLATE_BYTES

Message = Mapping[str, Any]

RAW = "use --raw (raw=True) to give the text as it is"
MAX_FORMAT = 100  # characters of what strftime_now is given
MAX_SHOWN = 500  # characters of a template's own message


def render(
    template: str,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    *,
    now: datetime.datetime | None = None,
) -> str:
    """The messages as one text that ends where the assistant's answer begins.

    ``special_tokens`` (``bos_token`` and so on) are variables of the template; ``now``: the time
    that it is told. Raises UsageError when the template refuses the messages, is broken, or takes
    more time or memory than a template needs.
    """
    if len(template) > MAX_TEMPLATE_BYTES:
        raise UsageError(
            f"the chat template has {len(template)} characters, at most {MAX_TEMPLATE_BYTES}"
            " are read",
            hint=RAW,
        )
    budget = Budget(sum(map(len, texts(messages))), chat_limits.SECONDS)
    environment = Sandbox(budget)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _Clock(now or datetime.datetime.now()).strftime_now
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except LimitError as error:
        raise UsageError(f"the chat template was stopped: {error}", hint=RAW) from error
    except jinja2.TemplateError as error:
        raise UsageError(
            f"the chat template refuses the prompt: {str(error)[:MAX_SHOWN]}", hint=RAW
        ) from error
    except Exception as error:  # whatever a template can make Python raise
        raise UsageError(
            f"the chat template failed: {type(error).__name__}: {str(error)[:MAX_SHOWN]}", hint=RAW
        ) from error


def texts(value: object) -> Iterator[str]:
    """Every text in messages, those inside of lists and objects too."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item


class _Clock:
    """The time that a template is told."""

    def __init__(self, now: datetime.datetime) -> None:
        self._now = now

    def strftime_now(self, format: str) -> str:
        """The time in a format of strftime, without widths."""
        if not isinstance(format, str) or len(format) > MAX_FORMAT:
            raise LimitError(f"it writes the time in a format of more than {MAX_FORMAT} characters")
        return self._now.strftime(format)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
