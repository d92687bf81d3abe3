"""Options are checked where they are born; the messages name option, value and way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specrun import EngineOptions, GenerateOptions, UsageError
from specrun.options import build


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_new_tokens", -1, "max_new_tokens: must be a whole number of at least 0, got -1"),
        ("max_new_tokens", 1.5, "max_new_tokens: must be a whole number of at least 0, got 1.5"),
        ("max_new_tokens", True, "got True"),
        ("num_assistant_tokens", -2, "num_assistant_tokens: must be .* got -2"),
        ("max_matching_ngram_size", 0, "max_matching_ngram_size: must be .* 1, got 0"),
        ("method", "magic", "method: must be one of auto, plain, .* got 'magic'"),
        ("num_assistant_tokens_schedule", "x", "num_assistant_tokens_schedule: must be one of"),
        ("eos_token_ids", "2", "eos_token_ids: must be token ids of 0 or more, got '2'"),
        ("eos_token_ids", [1, -2], "eos_token_ids"),
        ("stop", [""], r"stop: must be strings that are not empty, got \[''\]"),
        ("stop", 5, "stop: must be strings"),
        ("bogus", 1, "bogus: no such option, got 1"),
    ],
)
def test_bad_generate_options(name: str, value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        build(GenerateOptions, {name: value})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", 0), ("max_context", 1), ("prefill_chunk", 0), ("integrity", "never")],
)
def test_bad_engine_options(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name}: must be .* got {value!r}"):
        build(EngineOptions, {name: value})


def test_end_ids_are_one_or_many_or_none() -> None:
    assert GenerateOptions().eos_token_ids is None
    assert build(GenerateOptions, {"eos_token_ids": 3}).eos_token_ids == (3,)
    assert build(GenerateOptions, {"eos_token_ids": [3, 1, 3]}).eos_token_ids == (3, 1)
    assert build(GenerateOptions, {"eos_token_ids": []}).eos_token_ids == ()


def test_one_stop_string_is_not_a_list_of_characters() -> None:
    assert build(GenerateOptions, {"stop": "ab"}).stop == ("ab",)


def test_system_and_raw_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="system: got 'be kind' together with raw"):
        GenerateOptions(system="be kind", raw=True)


def test_options_are_frozen_and_build_keeps_the_base() -> None:
    base = GenerateOptions(max_new_tokens=7)
    changed = build(GenerateOptions, {"method": "plain"}, base)
    assert (changed.max_new_tokens, changed.method, base.method) == (7, "plain", "auto")
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.max_new_tokens = 1  # type: ignore[misc]
