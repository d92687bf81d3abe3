"""How a checkpoint marks thought and tool calls in its answers, for the manifest.

From its own ``response_template`` (transformers 5.24, utils/chat_parsing), else from its chat
template, which writes the marks of the families below. What a template has as a pattern becomes the
fixed text that the pattern begins or ends with, so that nothing from a folder is ever run as a
regular expression.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specrun.response_format import Region, ResponseFormat

REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates call a thought

# What a chat template spells -> the region that it stands for. The first that fits counts.
_THINKING = (
    (("<|channel>", "<channel|>"), Region(("<|channel>thought\n",), ("<channel|>",))),  # Gemma 4
    (("</think>",), Region(("<think>",), ("</think>",))),  # Qwen3, DeepSeek-R1, GLM-4.5
    (("[THINK]", "[/THINK]"), Region(("[THINK]",), ("[/THINK]",))),  # Magistral
)
_TOOL_CALLS = (
    (("<|tool_call>", "<tool_call|>"), Region(("<|tool_call>",), ("<tool_call|>",))),  # Gemma 4
    (("<tool_call>", "</tool_call>"), Region(("<tool_call>",), ("</tool_call>",))),  # Qwen, GLM
    (  # DeepSeek-V3 and R1: all calls of an answer in one region
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        Region(("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)),
    ),
)


def response_format(tokenizer: Any, chat_template: str | None) -> ResponseFormat | None:
    """What a transformers ``tokenizer`` and its chat template say; None where both say nothing."""
    declared = getattr(tokenizer, "response_template", None)
    if isinstance(declared, Mapping) and isinstance(declared.get("fields"), Mapping):
        return of_response_template(declared["fields"])
    return of_chat_template(chat_template or "")


def of_response_template(fields: Mapping[str, Any]) -> ResponseFormat | None:
    """From the ``fields`` of a ``response_template``; a field without a fixed text is left out."""
    thinking = next((fields[name] for name in REASONING if name in fields), None)
    found = ResponseFormat(
        thinking=_region(thinking),
        tool_calls=_region(fields.get("tool_calls")),
        content=_region(fields.get("content")),
    )
    return found if found.regions() else None


def of_chat_template(text: str) -> ResponseFormat | None:
    """From the marks that a template spells."""
    found = ResponseFormat(_known(_THINKING, text), _known(_TOOL_CALLS, text))
    return found if found.regions() else None


def _known(table: Sequence[tuple[Sequence[str], Region]], text: str) -> Region | None:
    return next((region for marks, region in table if all(m in text for m in marks)), None)


def _region(field: Any) -> Region | None:
    if not isinstance(field, Mapping):
        return None
    starts = _texts(field, "open", last=False)
    ends = _texts(field, "close", last=True)
    try:
        return Region(starts, ends) if starts else None
    except ValueError:  # too many or too long to be marks
        return None


def _texts(field: Mapping[str, Any], name: str, *, last: bool) -> tuple[str, ...]:
    given = field.get(name)
    if given is None:
        pattern = field.get(f"{name}_pattern")
        given = fixed_texts(pattern, last=last) if isinstance(pattern, str) else ()
    texts = [given] if isinstance(given, str) else given
    return tuple(text for text in texts if isinstance(text, str) and text.strip())


def fixed_texts(pattern: str, *, last: bool) -> tuple[str, ...]:
    """The text that every match of a regular expression begins with, blanks left out, or with
    ``last`` ends with; none where there is no such text.

    ``\\s*<tool_call>\\s*<function=(…)>`` begins with ``<tool_call>``.
    """
    try:
        steps = list(re._parser.parse(pattern))  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError):  # or one of the package regex only
        return ()
    if last:
        steps.reverse()
    while steps and _is_blank(steps[0]):
        del steps[0]
    literals = itertools.takewhile(lambda step: str(step[0]) == "LITERAL", steps)
    text = "".join(chr(code) for _, code in literals)
    return (text[::-1] if last else text,) if text.strip() else ()


def _is_blank(step: tuple[Any, Any]) -> bool:
    """Whether a part of a parsed pattern stands for any number of blanks, or for a place."""
    kind, what = step
    if str(kind) == "AT":
        return True
    return str(kind).endswith("REPEAT") and "CATEGORY_SPACE" in str(what[-1])
