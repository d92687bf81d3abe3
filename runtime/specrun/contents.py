"""Tells what stands in a rendered chat from what its template wrote, where it matters.

A message that spells a special token ("<eos>") must not become one, while the template's own
must. So the messages are rendered once more with every such spelling marked, and the marks show
where it went. A template may look at a message and do with it as it likes; that the marks changed
nothing is seen from the text, which without them must be that of the first rendering:

1. A character before and after each spelling, of those that no text has. Right for templates that
   trim, part, search or change the case of what they are given.
2. Such characters in place of it, as many. Right for those that count or cut characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specrun.chat import texts
from specrun.errors import UsageError
from specrun.text import Span, Tokenizer

_UNUSED = [*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900)]  # no characters; of private use

Given = Sequence[Any]  # messages, or those and more that a template writes
Render = Callable[[Given], str]


def special_spans(
    rendered: str, messages: Given, render: Render, tokenizer: Tokenizer
) -> list[Span]:
    """Where in ``rendered`` a message, and not the template, spells a special token.

    ``messages``: all that the caller has of the text, nested as it may be. ``render``: gives the
    rendering of others in their place. Raises UsageError where that cannot be told.
    """
    if not any(tokenizer.special_spans(text) for text in texts(messages)):
        return []
    used = set(rendered).union(*texts(messages))
    marks = [char for code in _UNUSED if (char := chr(code)) not in used][:2]
    for way in (_around, _instead) if len(marks) == 2 else ():
        spans = way(rendered, messages, render, tokenizer, marks)
        if spans is not None:
            return spans
    raise UsageError(
        "prompt: a message spells a special token, and the chat template changes it so that it"
        " cannot be told from the template's own",
        hint="take the token out of the message, or let it count as one with --parse-special"
        " (parse_special=True)",
    )


def _around(
    rendered: str,
    messages: Given,
    render: Render,
    tokenizer: Tokenizer,
    marks: Sequence[str],
) -> list[Span] | None:
    """Way 1; None where the text is another one then."""
    before, after = marks

    def mark(text: str, spans: list[Span]) -> str:
        return _replaced(text, spans, lambda spelled: f"{before}{spelled}{after}")

    marked = _rendered(render, _changed(messages, mark, tokenizer))
    if marked is None or marked.replace(before, "").replace(after, "") != rendered:
        return None
    spans: list[Span] = []
    start, place = None, 0
    for char in marked:
        if char == before:
            start = place
        elif char == after:
            if start is not None and start < place:
                spans.append((start, place))
            start = None
        else:
            place += 1
    return spans


def _instead(
    rendered: str,
    messages: Given,
    render: Render,
    tokenizer: Tokenizer,
    marks: Sequence[str],
) -> list[Span] | None:
    """Way 2; None where the text is another one then."""
    filler = marks[0]

    def mark(text: str, spans: list[Span]) -> str:
        return _replaced(text, spans, lambda spelled: filler * len(spelled))

    marked = _rendered(render, _changed(messages, mark, tokenizer))
    if marked is None or len(marked) != len(rendered):
        return None
    if any(new not in (old, filler) for new, old in zip(marked, rendered, strict=True)):
        return None
    # Two that stand side by side are one span, which is as right.
    return [match.span() for match in re.finditer(f"{filler}+", marked)]


def _replaced(text: str, spans: list[Span], by: Callable[[str], str]) -> str:
    parts, place = [], 0
    for start, end in spans:
        parts += [text[place:start], by(text[start:end])]
        place = end
    return "".join([*parts, text[place:]])


def _rendered(render: Render, messages: Given) -> str | None:
    try:
        return render(messages)
    except UsageError:  # it looked at what is marked, and did not like the marks
        return None


def _changed(value: Any, mark: Callable[[str, list[Span]], str], tokenizer: Tokenizer) -> Any:
    """``value`` with every text in it marked; what it was is not touched."""
    if isinstance(value, str):
        return mark(value, tokenizer.special_spans(value))
    if isinstance(value, Mapping):
        return {key: _changed(item, mark, tokenizer) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_changed(item, mark, tokenizer) for item in value]
    return value
