"""Defaults of generation, as a checkpoint gives them: which are honoured, and what they may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specrun.errors import UsageError
from specrun.options import DEFAULT_MAX_NEW_TOKENS, GenerateOptions

# Options of generation_config.json that are honoured, and what they are where it has none.
DEFAULTS: dict[str, Any] = {
    "max_new_tokens": DEFAULT_MAX_NEW_TOKENS,
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "typical_p": None,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
}
MAX_DEPTH = 8  # of lists and objects in a value that is shown and not used


def check(defaults: Mapping[str, Any], vocab_size: int) -> None:
    """Raise UsageError, naming the option and its value, for what no generation could run with."""
    names = (*DEFAULTS, "bad_words_ids")
    given = {name: defaults[name] for name in names if defaults.get(name) is not None}
    made = GenerateOptions(**given)
    for word in made.bad_words_ids or ():
        for token in word:
            if token >= vocab_size:
                raise UsageError(
                    f"bad_words_ids: must hold token ids below {vocab_size}, got {token}"
                )
    if not isinstance(defaults.get("do_sample"), bool | None):
        raise UsageError(f"do_sample: must be true or false, got {defaults['do_sample']!r}")
    for name, value in defaults.items():
        if not _is_shallow(value, MAX_DEPTH):
            raise UsageError(f"{name}: must be nested less than {MAX_DEPTH} deep")


def _is_shallow(value: object, depth: int) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list):
        return True
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in value)
