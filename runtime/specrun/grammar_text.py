"""JSON schemas, regular expressions and rules as they are asked for: sizes and JSON are checked.

What they mean is the library's to say, see :mod:`specrun.grammar`. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specrun.errors import UsageError
from specrun.reading import ReadingError, parse_json, shown, unicode_fault

GRAMMARS = ("json_schema", "regex", "grammar")
# Characters, and values in them: the library takes half a second for 2,000 properties, and four
# times as long for twice as many. All else is bounded by the limits in specrun.grammar.
MAX_SCHEMA = 64 << 10
MAX_VALUES = 5_000
MAX_RULES = {"regex": 8 << 10, "grammar": 64 << 10}
OWN = "x-guidance"  # with which a schema would set the library's options


def schema_text(schema: object) -> str | None:
    """A JSON schema as JSON text, without blanks; the order of its properties stays.

    Raises UsageError for what is none, or is too large.
    """
    if schema is None:
        return None
    if schema is True:
        return "{}"
    text = schema if isinstance(schema, str) else _written(schema)
    if len(text) > MAX_SCHEMA:
        raise UsageError(
            f"json_schema: has {len(text)} characters, at most {MAX_SCHEMA} are read",
            hint="give a smaller schema; parts that come several times go to $defs",
        )
    try:
        data = parse_json(text, max_items=MAX_VALUES)
    except ReadingError as error:
        raise UsageError(f"json_schema: {error}, got {shown(schema)}", hint=_HINT) from error
    if data is True:
        data = {}
    if not isinstance(data, dict):
        raise UsageError(f"json_schema: must be a JSON object, got {shown(schema)}", hint=_HINT)
    if OWN in data:
        raise UsageError(f"json_schema: holds {OWN!r}, which no schema may", hint="leave it out")
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def check_rules(name: str, text: object) -> None:
    """Raise UsageError unless this is a text that can be a regular expression, or rules."""
    if text is None:
        return
    if not isinstance(text, str):
        raise UsageError(f"{name}: must be a text, got {shown(text)}", hint="give a string")
    if len(text) > MAX_RULES[name]:
        raise UsageError(
            f"{name}: has {len(text)} characters, at most {MAX_RULES[name]} are read",
            hint="give a shorter one",
        )
    if (fault := unicode_fault(text)) is not None:
        raise UsageError(f"{name}: {fault}", hint="give it as UTF-8")


def _written(schema: object) -> str:
    if not isinstance(schema, Mapping):
        raise UsageError(f"json_schema: must be a schema, got {shown(schema)}", hint=_HINT)
    try:
        return json.dumps(_plain(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "is nested too deep" if isinstance(error, RecursionError) else error
        raise UsageError(f"json_schema: {reason}, got {shown(schema)}", hint=_HINT) from error


def _plain(value: Any) -> Any:
    """Mappings that are no dict as such; the rest is json's to refuse."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


_HINT = 'give a JSON schema, for example {"type": "object"}, or {} for any JSON'
