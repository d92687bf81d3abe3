"""What a caller may ask for: how an engine is opened, and how a text is generated with it.

Standard library only. Every field is checked where the object is born; an error names the option,
the value it got and what it may be.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from specrun import devices
from specrun.errors import UsageError
from specrun.grammar_text import GRAMMARS, check_rules, schema_text

Method = Literal[
    "auto", "plain", "mtp-drafter", "mtp", "draft", "universal", "early-exit", "prompt-lookup"
]
ScheduleName = Literal["constant", "heuristic", "heuristic_transient", "auto"]
Integrity = Literal["quick", "full"]
Verify = Literal["auto", "engine", "torch"]

METHODS: tuple[str, ...] = get_args(Method)
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
DEFAULT_NUM_ASSISTANT_TOKENS = 5  # where the manifest names none
DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_EXACT_WIDTH = 16
DEFAULT_MAX_BATCH = 4  # texts at work at once in a pool
DEFAULT_MAX_WAITING = 64  # that wait for them
PREFILL_CHUNK = 256  # rows; more take no less time each, and attention does more for nothing

T = TypeVar("T", bound="EngineOptions | GenerateOptions")


MAX_THREADS = 1024
MAX_EXACT_WIDTH = 1024
LARGEST = 1e30  # of an option that is a number; larger ones are a mistake


@dataclass(frozen=True)
class EngineOptions:
    """How the engines of a folder are opened.

    ``threads``: of one engine run (None: the CPUs this process may use).
    ``max_context``: tokens, at most the manifest's (None: the manifest's).
    ``device``: where engines run (``cpu``, ``cuda``, ``plugin:NAME``, see
    :mod:`specrun.devices`); one that is not there is an error, never another device.
    ``device_id``: which of several. ``provider_library``: shared library of a provider that
    ONNX Runtime does not bring. ``user_compute_stream``: address of the CUDA stream to run on.
    ``cuda_graph``: runs of the target are recorded on the device and replayed, in exact mode only.
    ``integrity``: ``full`` hashes every file of the folder, ``quick`` only those below 64 MiB.
    ``verify``: what verifies: ``engine``; ``torch``, the checkpoint's transformers model; ``auto``,
    the engine, and PyTorch where there is none, it does not load or a run of it fails.
    ``target``: the checkpoint for PyTorch (None: found again from what the manifest says).
    ``prefill_chunk``: most prompt tokens per target run.
    ``tuning``: a file that ``specrun tune --out`` wrote (None: the folder's own, if it has one).
    ``spin``: threads wait for each other without sleeping while an engine runs: faster by a few
    percent on an idle machine, much slower on a busy one; between runs they always sleep.
    ``exact``: greedy text and logits are bit for bit those of method plain opened the same way.
    ``exact_width``: rows of every run of the target then; a round drafts at most one less.
    """

    threads: int | None = None
    max_context: int | None = None
    device: str = "cpu"
    device_id: int = 0
    provider_library: str | None = None
    user_compute_stream: int | None = None
    cuda_graph: bool = False
    integrity: Integrity = "quick"
    verify: Verify = "auto"
    target: str | None = None
    prefill_chunk: int = PREFILL_CHUNK
    tuning: str | None = None
    spin: bool = False
    exact: bool = False
    exact_width: int = DEFAULT_EXACT_WIDTH

    def __post_init__(self) -> None:
        at_least("threads", self.threads, 1)
        if self.threads is not None and self.threads > MAX_THREADS:
            raise UsageError(
                f"threads: must be at most {MAX_THREADS}, got {self.threads}",
                hint="give the number of CPU cores, or leave it out",
            )
        at_least("max_context", self.max_context, 2)
        at_least("prefill_chunk", self.prefill_chunk, 1)
        _one_of("integrity", self.integrity, get_args(Integrity))
        _one_of("verify", self.verify, get_args(Verify))
        if self.target is not None and (
            not isinstance(self.target, str) or not self.target or "\0" in self.target
        ):
            raise UsageError(
                f"target: must be the name or path of a checkpoint, got {self.target!r}",
                hint="give a preset, a hub id, a folder or a .gguf file",
            )
        if self.verify == "engine" and self.target is not None:
            raise UsageError(
                f"target: PyTorch does not verify with verify engine, got {self.target!r}",
                hint="leave one of the two out",
            )
        self._check_exact()
        self._check_device()

    @property
    def fixed_width(self) -> int | None:
        """Rows of every run of the target; None: as many as there are to compute."""
        return self.exact_width if self.exact else None

    def _check_device(self) -> None:
        if not isinstance(self.device, str):
            raise UsageError(
                f"device: must be the name of a device, got {self.device!r}",
                hint=f"devices are {', '.join(devices.DEVICES)}",
            )
        at_least("device_id", self.device_id, 0)
        at_least("user_compute_stream", self.user_compute_stream, 0)
        _truth("cuda_graph", self.cuda_graph, optional=False)
        library = self.provider_library
        if library is not None and (not isinstance(library, str) or not library):
            raise UsageError(
                f"provider_library: must be the path of a shared library, got {library!r}",
                hint="give the path, or leave it out",
            )
        devices.check(self)

    def _check_exact(self) -> None:
        _truth("exact", self.exact, optional=False)
        _truth("spin", self.spin, optional=False)
        at_least("exact_width", self.exact_width, 2)
        if self.exact_width > MAX_EXACT_WIDTH:
            raise UsageError(
                f"exact_width: must be at most {MAX_EXACT_WIDTH}, got {self.exact_width}",
                hint=f"give {MAX_EXACT_WIDTH} or less; {DEFAULT_EXACT_WIDTH} is the default",
            )
        if not self.exact and self.exact_width != DEFAULT_EXACT_WIDTH:
            raise UsageError(
                f"exact_width: has no effect without exact, got {self.exact_width}",
                hint="give exact too, or leave exact_width out",
            )
        if self.exact and self.tuning is not None:
            raise UsageError(
                f"tuning: costs are measured without exact, got {self.tuning!r} together with it",
                hint="leave one of the two out; the schedule auto learns the costs in exact mode",
            )


@dataclass(frozen=True)
class GenerateOptions:
    """How one text is generated. Lengths in tokens.

    What is None is the checkpoint's own default, as the manifest has it, else what is in
    parentheses. Sampling is on with ``do_sample``, a ``temperature`` above 0 or one of the options
    that only sampling has.

    ``max_new_tokens``: (256) 0 is an empty result without a run of the target.
    ``num_assistant_tokens``: drafted per round (the drafter's, or 5); 0: plain decoding.
    ``num_assistant_tokens_schedule``: how that changes from round to round (the drafter's, or
    constant).
    ``assistant_confidence_threshold``: a proposal ends with a draft less probable than this (0).
    ``max_matching_ngram_size``: longest n-gram that prompt lookup searches for.
    ``ensemble_weight``: verify against a mix of so much target and the rest drafter; 1 is
    lossless, less is not.
    ``do_sample``: draw tokens instead of taking the most probable (False).
    ``temperature``: (1) 0 is greedy. ``top_k``, ``top_p``, ``min_p``, ``typical_p``: what they do
    in transformers (off, also ``top_k``, which is 50 there).
    ``seed``: of this generation's random numbers; row i of a batch has ``seed + i`` (a new one).
    ``repetition_penalty``: (1). ``no_repeat_ngram_size``, ``min_new_tokens``: (0).
    ``bad_words``: texts whose tokens must not come in a row, alone or behind a space; other tokens
    that spell the same may. ``bad_words_ids``: the same as token ids.
    ``logit_bias``: token id -> what is added to its logit.
    ``logprobs``: report the log-probability of every token, and so many alternatives.
    ``eos_token_ids``: end ids (None: the manifest's; an int, a list, or an empty list for none).
    ``stop``: strings that end the text; they are not part of it.
    ``json_schema``: the text is compact JSON that this schema allows: a mapping, or JSON text;
    True is any JSON. ``regex``: the whole text matches this regular expression. ``grammar``: it
    follows these rules, in Lark's form. At most one of the three; needs the extra ``structured``.
    ``raw``: take a text prompt as it is, without the chat template.
    ``system``: system message for the chat template. ``enable_thinking``: whether it asks for a
    thought before the answer (None: as the template does by itself). ``tools``: functions that the
    model may call, as JSON schemas ``{"type": "function", "function": {…}}``, for the template.
    ``parse_special``: special tokens that the prompt spells ("<eos>") count as such; else they are
    text, and only those that the chat template writes count.
    ``strict``: a drafter that fails is an error instead of plain decoding with a warning, and so is
    an engine of the target for which PyTorch would stand in.
    ``timeout``: seconds after which the generation ends with what it has, within a round or a chunk
    of the prompt; the time that a stream's consumer takes counts (no limit).
    """

    max_new_tokens: int | None = None
    method: Method = "auto"
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: ScheduleName | None = None
    assistant_confidence_threshold: float | None = None
    max_matching_ngram_size: int = 2
    ensemble_weight: float = 1.0
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    raw: bool = False
    system: str | None = None
    enable_thinking: bool | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    parse_special: bool = False
    strict: bool = False
    timeout: float | None = None

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        for name in ("raw", "parse_special", "strict", "do_sample", "enable_thinking"):
            optional = name in ("do_sample", "enable_thinking")
            _truth(name, getattr(self, name), optional=optional)
        if self.system is not None and not isinstance(self.system, str):
            raise UsageError(f"system: must be a text, got {self.system!r}", hint="give a string")
        for name in ("max_matching_ngram_size", "ensemble_weight"):
            if getattr(self, name) is None:
                raise UsageError(f"{name}: must be a number, got None", hint=f"leave {name} out")
        if self.num_assistant_tokens_schedule is not None:
            name = "num_assistant_tokens_schedule"
            spelled = str(self.num_assistant_tokens_schedule).replace("-", "_")
            object.__setattr__(self, name, spelled)
            _one_of(name, spelled, SCHEDULES)
        for name, least in _LEAST.items():
            at_least(name, getattr(self, name), least)
        for name, bounds in _BOUNDS.items():
            _within(name, getattr(self, name), bounds)
        object.__setattr__(self, "eos_token_ids", _ids("eos_token_ids", self.eos_token_ids))
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        object.__setattr__(self, "bad_words_ids", _id_lists("bad_words_ids", self.bad_words_ids))
        object.__setattr__(self, "logit_bias", _bias("logit_bias", self.logit_bias))
        self._check_sampling()
        self._check_grammar()
        object.__setattr__(self, "tools", _objects("tools", self.tools))
        for name in ("system", "enable_thinking", "tools"):
            value = getattr(self, name)
            if value is not None and self.raw:
                raise UsageError(
                    f"{name}: got {value!r} together with raw, which skips the chat template",
                    hint="give one of the two",
                )

    def _check_sampling(self) -> None:
        if self.do_sample and self.temperature == 0:
            raise UsageError(
                "temperature: 0 is greedy, which do_sample excludes",
                hint="give a temperature above 0, or leave do_sample out",
            )
        if self.do_sample is not False:
            return
        for name in SAMPLING_ONLY:
            if getattr(self, name):
                raise UsageError(
                    f"{name}: has no effect with do_sample False, got {getattr(self, name)!r}",
                    hint=f"leave {name} or do_sample out",
                )

    @property
    def structured(self) -> bool:
        """Whether the text must follow a grammar."""
        return any(getattr(self, name) is not None for name in GRAMMARS)

    def _check_grammar(self) -> None:
        object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        for name in ("regex", "grammar"):
            check_rules(name, getattr(self, name))
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(
                f"{given[1]}: excludes {given[0]}, got both", hint="give one of the two"
            )
        if given and self.enable_thinking:
            raise UsageError(
                f"{given[0]}: excludes enable_thinking, as a thought would have to follow the"
                " grammar",
                hint="give one of the two",
            )


SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "typical_p")

_LEAST = {
    "max_new_tokens": 0,
    "num_assistant_tokens": 0,
    "max_matching_ngram_size": 1,
    "top_k": 0,
    "seed": 0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "logprobs": 0,
}


@dataclass(frozen=True)
class _Range:
    """Values between the two; ``open_below``: the lower one itself is not allowed."""

    low: float
    high: float
    open_below: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_below else value >= self.low
        return above and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        least = "above" if self.open_below else "of at least"
        most = "" if math.isinf(self.high) else f" and at most {self.high:g}"
        return f"a number {least} {self.low:g}{most}"


_BOUNDS = {
    "assistant_confidence_threshold": _Range(0, 1),
    "ensemble_weight": _Range(0, 1, open_below=True),
    "temperature": _Range(0, math.inf),
    "top_p": _Range(0, 1, open_below=True),
    "min_p": _Range(0, 1),
    "typical_p": _Range(0, 1, open_below=True),
    "repetition_penalty": _Range(0, math.inf, open_below=True),
    "timeout": _Range(0, math.inf, open_below=True),
}


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


def at_least(name: str, value: object, least: int) -> None:
    """Raise UsageError for what is neither None nor a whole number of at least ``least``."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(
            f"{name}: must be a whole number of at least {least}, got {value!r}",
            hint=f"give {name} a value of {least} or more",
        )


def _truth(name: str, value: object, *, optional: bool) -> None:
    if isinstance(value, bool) or (optional and value is None):
        return
    raise UsageError(f"{name}: must be true or false, got {value!r}", hint="give True or False")


def _within(name: str, value: object, bounds: _Range) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or abs(cast(float, value)) > LARGEST or float(cast(float, value)) not in bounds:
        raise UsageError(
            f"{name}: must be {bounds}, got {value!r}", hint=f"give {name} another value"
        )


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(choices)
        raise UsageError(
            f"{name}: must be one of {listed}, got {value!r}", hint=f"choose one of {listed}"
        )


def _ids(name: str, value: object, *, unique: bool = True) -> tuple[int, ...] | None:
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
    return tuple(dict.fromkeys(items)) if unique else tuple(items)


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


def _objects(name: str, value: object) -> tuple[Mapping[str, Any], ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, Mapping) for v in value):
        raise UsageError(
            f"{name}: must be a list of objects, got {value!r}",
            hint='give for example [{"type": "function", "function": {"name": "now"}}]',
        )
    return tuple(value)


def _id_lists(name: str, value: object) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    found = tuple(_ids(name, item, unique=False) for item in items)
    if not all(found):
        raise UsageError(
            f"{name}: every entry must hold token ids, got {value!r}",
            hint="give a list of lists of token ids",
        )
    return tuple(item for item in found if item)


def _bias(name: str, value: object) -> Mapping[int, float] | None:
    if value is None:
        return None
    right = isinstance(value, Mapping) and all(
        isinstance(token, int)
        and not isinstance(token, bool)
        and token >= 0
        and isinstance(bias, (int, float))
        and (abs(bias) <= LARGEST or abs(bias) == math.inf)
        for token, bias in value.items()
    )
    if not right:
        raise UsageError(
            f"{name}: must give token ids a number each, got {value!r}",
            hint="give for example {42: -100}",
        )
    assert isinstance(value, Mapping)
    return {int(token): float(bias) for token, bias in value.items()}
