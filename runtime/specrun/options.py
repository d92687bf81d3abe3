"""What a caller may ask for: how an engine is opened, and how a text is generated with it.

Standard library only. Every field is checked where the object is born; an error names the option,
the value it got and what it may be.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from specrun.errors import UsageError

Method = Literal["auto", "plain", "mtp-drafter", "prompt-lookup"]
ScheduleName = Literal["constant", "heuristic"]
Verify = Literal["quick", "full"]

METHODS: tuple[str, ...] = get_args(Method)
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
DEFAULT_NUM_ASSISTANT_TOKENS = 5  # where the manifest names none

T = TypeVar("T", bound="EngineOptions | GenerateOptions")


MAX_THREADS = 1024


@dataclass(frozen=True)
class EngineOptions:
    """How the engines of a folder are opened.

    ``threads``: of one engine run (None: the CPUs this process may use).
    ``max_context``: tokens, at most the manifest's (None: the manifest's).
    ``device``: where engines run; a device that is not there is an error, never another device.
    ``verify``: ``full`` hashes every file of the folder, ``quick`` only those below 64 MiB.
    ``prefill_chunk``: prompt tokens per target run.
    """

    threads: int | None = None
    max_context: int | None = None
    device: str = "cpu"
    verify: Verify = "quick"
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        _at_least("threads", self.threads, 1)
        if self.threads is not None and self.threads > MAX_THREADS:
            raise UsageError(
                f"threads: must be at most {MAX_THREADS}, got {self.threads}",
                hint="give the number of CPU cores, or leave it out",
            )
        _at_least("max_context", self.max_context, 2)
        _at_least("prefill_chunk", self.prefill_chunk, 1)
        _one_of("verify", self.verify, get_args(Verify))


@dataclass(frozen=True)
class GenerateOptions:
    """How one text is generated. Lengths in tokens.

    ``max_new_tokens``: 0 is an empty result without a run of the target.
    ``num_assistant_tokens``: drafted per round (None: the manifest's, or 5; 0: plain decoding).
    ``num_assistant_tokens_schedule``: how that changes from round to round (None: the
    manifest's, or constant).
    ``max_matching_ngram_size``: longest n-gram that prompt lookup searches for.
    ``eos_token_ids``: end ids (None: the manifest's; an int, a list, or an empty list for none).
    ``stop``: strings that end the text; they are not part of it.
    ``raw``: take a text prompt as it is, without the chat template.
    ``system``: system message for the chat template.
    ``strict``: a drafter that fails is an error instead of plain decoding with a warning.
    """

    max_new_tokens: int = 256
    method: Method = "auto"
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: ScheduleName | None = None
    max_matching_ngram_size: int = 2
    eos_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    raw: bool = False
    system: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        _at_least("max_new_tokens", self.max_new_tokens, 0)
        _one_of("method", self.method, METHODS)
        _at_least("num_assistant_tokens", self.num_assistant_tokens, 0)
        if self.num_assistant_tokens_schedule is not None:
            name = "num_assistant_tokens_schedule"
            _one_of(name, self.num_assistant_tokens_schedule, SCHEDULES)
        _at_least("max_matching_ngram_size", self.max_matching_ngram_size, 1)
        object.__setattr__(self, "eos_token_ids", _ids("eos_token_ids", self.eos_token_ids))
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        if self.system is not None and self.raw:
            raise UsageError(
                f"system: got {self.system!r} together with raw, which skips the chat template",
                hint="give one of the two",
            )


def build(cls: type[T], values: Mapping[str, Any], base: T | None = None) -> T:
    """``base`` (or the defaults) with ``values`` changed. Raises UsageError for unknown names."""
    names = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in names:
            raise UsageError(
                f"{name}: no such option, got {values[name]!r}", hint=f"options: {', '.join(names)}"
            )
    return dataclasses.replace(base, **values) if base is not None else cls(**values)


def available_threads() -> int:
    """CPUs that this process may run on, which a container or taskset may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def _at_least(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(
            f"{name}: must be a whole number of at least {least}, got {value!r}",
            hint=f"give {name} a value of {least} or more",
        )


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(choices)
        raise UsageError(
            f"{name}: must be one of {listed}, got {value!r}", hint=f"choose one of {listed}"
        )


def _ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    items = [value] if isinstance(value, int) else value
    right = isinstance(items, (list, tuple, set, frozenset)) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items
    )
    if not right:
        raise UsageError(
            f"{name}: must be token ids of 0 or more, got {value!r}",
            hint="give one id, a list of ids, or an empty list for no end id",
        )
    assert isinstance(items, (list, tuple, set, frozenset))
    return tuple(dict.fromkeys(items))


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    right = isinstance(items, (list, tuple)) and all(
        isinstance(item, str) and item for item in items
    )
    if not right:
        raise UsageError(
            f"{name}: must be strings that are not empty, got {value!r}",
            hint="give a string or a list of strings",
        )
    assert isinstance(items, (list, tuple))
    return tuple(items)
