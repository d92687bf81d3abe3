"""Tool calls as templates want them back, from the text that a model wrote. Standard library only.

Two spellings are read, those of Qwen and Hermes (JSON with name and arguments) and of Gemma 4
(``call:name{key:<|"|>text<|"|>}``). Whoever has another one parses the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from specrun.reading import ReadingError, parse_json
from specrun.response_format import Region

_QUOTE = '<|"|>'  # around texts in Gemma 4's calls
_CALL = re.compile(r"\s*(?:call:)?([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_KEY = re.compile(r"([{,]\s*)([\w.-]+)(\s*:)")


def parsed(text: str, region: Region) -> list[dict[str, Any]] | None:
    """The calls in ``text``, all of a reader's channel "tool_calls"; None where one is not read.

    Each is ``{"type": "function", "function": {"name": …, "arguments": {…}}}``.
    """
    found = [_call(body) for body in _bodies(text, region)]
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else None


def _bodies(text: str, region: Region) -> list[str]:
    """What stands between the marks."""
    starts, ends = ("|".join(map(re.escape, marks)) for marks in (region.starts, region.ends))
    bodies = re.split(starts, text)[1:]
    return [re.split(ends, body, maxsplit=1)[0] if ends else body for body in bodies]


def _call(body: str) -> dict[str, Any] | None:
    try:
        spelled = _CALL.fullmatch(body)
        if spelled is None:
            found = parse_json(body.strip())
            name, arguments = found["name"], found["arguments"]
        else:
            name, arguments = spelled[1], parse_json(_as_json(spelled[2]))
    except (ReadingError, KeyError, TypeError):  # in another spelling, or broken off
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _as_json(text: str) -> str:
    """Arguments as Gemma 4 writes them: keys without quotes, its own token around texts."""
    parts = text.split(_QUOTE)
    return "".join(
        json.dumps(part) if index % 2 else _KEY.sub(r'\1"\2"\3', part)
        for index, part in enumerate(parts)
    )
