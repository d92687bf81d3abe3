"""What ``specrun bench`` is asked for and what it has measured. Standard library only.

Times are in seconds and as they were measured; rates, medians and ratios follow from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specrun.bench_workloads import WORKLOADS
from specrun.decode import encode
from specrun.errors import UsageError
from specrun.options import METHODS, SCHEDULES, Method, ScheduleName
from specrun.tuning import Machine

CONTESTANTS = tuple(name for name in METHODS if name != "auto")


@dataclass(frozen=True)
class BenchOptions:
    """What is compared. Lengths in tokens; what is empty is decided from the folder.

    ``workloads``: names of built-in prompts (all of them, unless ``prompts`` has any).
    ``prompts``: further ones, as pairs of a name and a text.
    ``methods``: beside plain decoding (every one of the folder, and prompt lookup).
    ``num_assistant_tokens``: for every method (the drafter's own number and twice that; prompt
    lookup 4, 8 and 16).
    ``schedules``: for each of these numbers.
    ``max_new_tokens``: of every generation, end ids are ignored. ``rounds``: timed generations.
    ``strict``: a drafter that fails is an error instead of a note.
    """

    workloads: tuple[str, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    methods: tuple[Method, ...] = ()
    num_assistant_tokens: tuple[int, ...] = ()
    schedules: tuple[ScheduleName, ...] = ("constant",)
    max_new_tokens: int = 96
    rounds: int = 5
    strict: bool = False

    def __post_init__(self) -> None:
        spelled = tuple(str(name).replace("-", "_") for name in self.schedules)
        object.__setattr__(self, "schedules", spelled)
        _among("workloads", self.workloads, tuple(WORKLOADS))
        _among("methods", self.methods, CONTESTANTS)
        _among("schedules", self.schedules, SCHEDULES)
        _whole("max_new_tokens", self.max_new_tokens, 2)
        _whole("rounds", self.rounds, 1)
        for number in self.num_assistant_tokens:
            _whole("num_assistant_tokens", number, 1)
        if not self.schedules:
            raise UsageError("schedules: is empty", hint="leave it out, or give 'constant'")
        names = [*dict.fromkeys(self.workloads), *(name for name, _ in self.prompts)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(
                f"prompts: the name {twice!r} is there twice", hint="give every prompt another name"
            )

    @property
    def texts(self) -> dict[str, str]:
        """Name -> text of every workload that is asked for."""
        chosen = self.workloads or (() if self.prompts else tuple(WORKLOADS))
        return {name: WORKLOADS[name] for name in chosen} | dict(self.prompts)


def _among(name: str, values: Iterable[str], choices: Sequence[str]) -> None:
    for value in values:
        if value not in choices:
            listed = ", ".join(choices)
            raise UsageError(
                f"{name}: must be among {listed}, got {value!r}", hint=f"choose from {listed}"
            )


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(
            f"{name}: must be a whole number of at least {least}, got {value!r}",
            hint=f"give {name} a value of {least} or more",
        )


@dataclass(frozen=True)
class Contestant:
    """A way to generate. ``num_assistant_tokens``: 0 for plain decoding."""

    method: Method
    num_assistant_tokens: int
    schedule: ScheduleName = "constant"

    @property
    def label(self) -> str:
        """As tables have it."""
        if self.method == "plain":
            return "plain"
        drafts = f"{self.method} {self.num_assistant_tokens}"
        return (
            drafts if self.schedule == "constant" else f"{drafts} {self.schedule.replace('_', '-')}"
        )


PLAIN = Contestant("plain", 0)


@dataclass(frozen=True)
class Sample:
    """One generation.

    ``first_token_seconds``: from its start until its first piece of text. ``draft_seconds`` and
    ``verify_seconds``: medians over the rounds that drafted, None where none did.
    ``same_tokens``: the first so many are those of plain decoding.
    """

    emitted: int
    rounds: int
    drafted: int
    accepted: int
    seconds: dict[str, float]
    first_token_seconds: float
    draft_seconds: float | None
    verify_seconds: float | None
    same_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all phases, the prompt's included."""
        return _rate(self.emitted, sum(self.seconds.values()))

    @property
    def decode_tokens_per_second(self) -> float:
        """The same without the run of the target over the prompt, and the token it gives."""
        return _rate(self.emitted - 1, sum(self.seconds.values()) - self.seconds["prefill"])

    @property
    def acceptance(self) -> float:
        """Share of the drafts that stood; 0 where nothing was drafted."""
        return _rate(self.accepted, self.drafted)

    @property
    def tokens_per_target_step(self) -> float:
        """1 in plain decoding."""
        return _rate(self.emitted - 1, self.rounds)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, with what follows from them."""
        return {**encode(self), **{name: getattr(self, name) for name in _RATES}}


def _rate(count: float, per: float) -> float:
    return count / per if per else 0.0


_RATES = (
    "tokens_per_second",
    "decode_tokens_per_second",
    "first_token_seconds",
    "acceptance",
    "tokens_per_target_step",
)


@dataclass(frozen=True)
class Medians:
    """Of the timed generations of one contestant on one workload. See :class:`Sample`."""

    tokens_per_second: float
    decode_tokens_per_second: float
    first_token_seconds: float
    acceptance: float
    tokens_per_target_step: float


@dataclass(frozen=True)
class ContestantResult:
    """``check``: the first generation, which warms up. ``runs``: those that are timed."""

    contestant: Contestant
    check: Sample
    runs: tuple[Sample, ...]

    @property
    def medians(self) -> Medians | None:
        """None before the first timed generation."""
        if not self.runs:
            return None
        return Medians(*(statistics.median(getattr(r, name) for r in self.runs) for name in _RATES))

    @property
    def same_tokens(self) -> int:
        """The first so many tokens are plain decoding's, in every generation."""
        return min(run.same_tokens for run in (self.check, *self.runs))

    @property
    def differs(self) -> bool:
        """Whether any generation gave other tokens than plain decoding."""
        return self.same_tokens < self.check.emitted

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, with what follows from them."""
        return {
            **encode(self.contestant),
            "same_tokens": self.same_tokens,
            "medians": encode(self.medians),
            "check": self.check.as_dict(),
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True)
class WorkloadResult:
    """All contestants on one prompt, plain decoding first."""

    name: str
    prompt_tokens: int
    results: tuple[ContestantResult, ...]

    def ratio(self, result: ContestantResult) -> float | None:
        """Tokens per second, prompt included, over those of plain decoding."""
        own, plain = result.medians, self.results[0].medians
        if own is None or plain is None or not plain.tokens_per_second:
            return None
        return own.tokens_per_second / plain.tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, with what follows from them."""
        results = [{**item.as_dict(), "ratio": self.ratio(item)} for item in self.results]
        return {"name": self.name, "prompt_tokens": self.prompt_tokens, "results": results}


@dataclass(frozen=True)
class Prefill:
    """Runs of the target over a prompt of ``tokens``."""

    tokens: int
    seconds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        """Median."""
        return _rate(self.tokens, statistics.median(self.seconds))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, with what follows from them."""
        return {**encode(self), "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class Steps:
    """Steps of the target behind ``context_length`` tokens: rows -> seconds of each.

    ``weight_bytes``: what a step of one row reads of the weights.
    """

    context_length: int
    seconds: dict[int, tuple[float, ...]]
    weight_bytes: int

    def median(self, rows: int) -> float:
        """Seconds of a step over ``rows`` rows."""
        return statistics.median(self.seconds[rows])

    def floor(self, read_bandwidth: float | None) -> float | None:
        """Seconds below which no step can be: its weights at so many bytes per second."""
        if not read_bandwidth:
            return None
        return self.weight_bytes / read_bandwidth

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, with what follows from them."""
        medians = {rows: self.median(rows) for rows in self.seconds}
        ratios = {rows: seconds / medians[1] for rows, seconds in medians.items()}
        return {**encode(self), "medians": encode(medians), "ratios": encode(ratios)}


@dataclass(frozen=True)
class DraftCost:
    """Medians of the rounds of one contestant that drafted, over all workloads, in seconds."""

    contestant: Contestant
    draft_seconds: float
    verify_seconds: float

    @property
    def share_of_round(self) -> float:
        """Of draft and verification together, the draft."""
        return _rate(self.draft_seconds, self.draft_seconds + self.verify_seconds)


@dataclass(frozen=True)
class Folder:
    """What was opened. ``exact_width``: rows of every run in exact mode, None without.
    ``fingerprint``: of all its files, empty in reports of before there was one."""

    path: str
    target: str
    architecture: str
    precision: str
    exact_width: int | None
    fingerprint: str = ""


@dataclass(frozen=True)
class BenchReport:
    """What was measured so far; ``complete``: that is all there was to measure.

    ``read_bandwidth``: bytes per second that ``machine.threads`` threads read from memory.
    ``cache_bytes``: of the last level, None where the system does not say.
    ``contestants``: all that take part, plain decoding first.
    ``specrun``: its version; ``measured``: when, ISO 8601 in UTC. Both are empty in reports of
    before they were kept.
    """

    complete: bool
    machine: Machine
    read_bandwidth: float | None
    cache_bytes: int | None
    folder: Folder
    options: BenchOptions
    contestants: tuple[Contestant, ...]
    prefill: Prefill | None
    steps: Steps | None
    workloads: tuple[WorkloadResult, ...]
    notes: tuple[str, ...]
    specrun: str = ""
    measured: str = ""

    @property
    def differing(self) -> tuple[tuple[str, ContestantResult], ...]:
        """Workload and result of every contestant that gave other tokens than plain decoding."""
        return tuple(
            (work.name, item) for work in self.workloads for item in work.results if item.differs
        )

    @property
    def step_floor(self) -> float | None:
        """Seconds that reading the weights of one step takes."""
        return None if self.steps is None else self.steps.floor(self.read_bandwidth)

    @property
    def share_of_ceiling(self) -> float | None:
        """The floor of a step over a step of one row. Above 1 the caches hold weights."""
        floor = self.step_floor
        return None if floor is None or self.steps is None else floor / self.steps.median(1)

    @property
    def drafts(self) -> tuple[DraftCost, ...]:
        """What drafting costs, of every contestant that drafts with an engine."""
        found = []
        for contestant in self.contestants:
            runs = [run for item in self._results(contestant) for run in item.runs]
            draft = [run.draft_seconds for run in runs if run.draft_seconds is not None]
            verify = [run.verify_seconds for run in runs if run.verify_seconds is not None]
            if draft and verify and contestant.method != "prompt-lookup":
                cost = DraftCost(contestant, statistics.median(draft), statistics.median(verify))
                found.append(cost)
        return tuple(found)

    @property
    def overall(self) -> dict[str, float]:
        """Label -> geometric mean of the ratios of all workloads, the best first.

        A contestant that failed on one of them has none.
        """
        means: dict[str, float] = {}
        for contestant in self.contestants[1:]:
            ratios = [
                work.ratio(item)
                for work in self.workloads
                for item in work.results
                if item.contestant == contestant
            ]
            known = [ratio for ratio in ratios if ratio]
            if known and len(known) == len(self.workloads):
                means[contestant.label] = statistics.geometric_mean(known)
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    def _results(self, contestant: Contestant) -> list[ContestantResult]:
        return [r for work in self.workloads for r in work.results if r.contestant == contestant]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: all that was measured, and what follows from it."""
        return {
            "complete": self.complete,
            "specrun": self.specrun,
            "measured": self.measured,
            "machine": {
                **encode(self.machine),
                "read_bandwidth": self.read_bandwidth,
                "cache_bytes": self.cache_bytes,
            },
            "folder": encode(self.folder),
            "options": encode(self.options),
            "contestants": encode(self.contestants),
            "prefill": self.prefill and self.prefill.as_dict(),
            "steps": self.steps and self.steps.as_dict(),
            "step_floor": self.step_floor,
            "share_of_ceiling": self.share_of_ceiling,
            "workloads": [work.as_dict() for work in self.workloads],
            "drafts": [
                {**encode(draft), "share_of_round": draft.share_of_round} for draft in self.drafts
            ],
            "overall": self.overall,
            "notes": list(self.notes),
        }
