"""The checkpoint's chat template, rendered as Hugging Face templates expect, in a sandbox."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from specrun import chat_limits
from specrun.chat_limits import Budget, LimitError
from specrun.chat_sandbox import Sandbox
from specrun.errors import UsageError
from specrun.limits import MAX_TEMPLATE_BYTES

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

SWITCHES = ("enable_thinking", "thinking")  # what templates call it; the first that one knows
RAW = "use --raw (raw=True) to give the text as it is"
MAX_FORMAT = 100  # characters of what strftime_now is given
MAX_SHOWN = 500  # characters of a template's own message


def render(
    template: str,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    *,
    tools: Sequence[Tool] | None = None,
    enable_thinking: bool | None = None,
    now: datetime.datetime | None = None,
) -> str:
    """The messages as one text that ends where the assistant's answer begins.

    ``special_tokens`` (``bos_token`` and so on) are variables of the template, and so are
    ``tools`` (JSON schemas of functions) and ``enable_thinking``, which is left undefined where it
    is None; ``now``: the time that it is told. Raises UsageError when the template refuses the
    messages, knows nothing of tools or of thinking where those are given, is broken, or takes more
    time or memory than a template needs.
    """
    if len(template) > MAX_TEMPLATE_BYTES:
        raise UsageError(
            f"the chat template has {len(template)} characters, at most {MAX_TEMPLATE_BYTES}"
            " are read",
            hint=RAW,
        )
    budget = Budget(sum(map(len, texts([messages, tools]))), chat_limits.SECONDS)
    environment = Sandbox(budget)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _Clock(now or datetime.datetime.now()).strftime_now
    try:
        known = _variables(environment, template) if tools or enable_thinking is not None else ()
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            tools=_tools(tools, known),
            documents=None,
            add_generation_prompt=True,
            **_switch(enable_thinking, known),
            **special_tokens,
        )
    except UsageError:
        raise
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


def _variables(environment: jinja2.Environment, template: str) -> frozenset[str]:
    """What the template reads and does not define itself."""
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))


def _tools(tools: Sequence[Tool] | None, known: Collection[str]) -> list[dict[str, Any]] | None:
    """As a variable of the template, which must know it."""
    if not tools:
        return None
    if "tools" not in known:
        raise UsageError(
            f"tools: the chat template knows nothing of tools, got {len(tools)}",
            hint="leave tools out, or describe them in the system message",
        )
    return [dict(tool) for tool in tools]


def _switch(enable_thinking: bool | None, known: Collection[str]) -> dict[str, bool]:
    """The variable of the template that turns thinking on or off."""
    if enable_thinking is None:
        return {}
    for name in SWITCHES:
        if name in known:
            return {name: enable_thinking}
    raise UsageError(
        f"enable_thinking: the chat template cannot turn thinking on or off, got {enable_thinking}",
        hint="leave enable_thinking out",
    )


def check_known(
    template: str, *, tools: Sequence[Tool] | None, enable_thinking: bool | None
) -> None:
    """Raise UsageError where the template knows nothing of what is given, as ``render`` does."""
    if not tools and enable_thinking is None:
        return
    try:
        known = _variables(Sandbox(Budget(0, chat_limits.SECONDS)), template)
    except Exception:  # a template that is broken; its rendering says how
        return
    _tools(tools, known)
    _switch(enable_thinking, known)


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
