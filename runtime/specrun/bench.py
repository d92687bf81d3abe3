"""Measures an engine folder on this machine: every method against plain decoding.

    report = specrun.bench.run(engine, BenchOptions(rounds=3))

Tokens come first: before anything is timed, every contestant generates once on every workload, and
its tokens are compared with plain decoding's. That warms up as well: KV buffers have grown and
runs are prepared. Then the contestants take turns, round by round, each round beginning with
another one, so that a machine that becomes slower does so for all of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from specrun import __version__
from specrun.bandwidth import cache_bytes, read_bandwidth
from specrun.bench_report import (
    PLAIN,
    BenchOptions,
    BenchReport,
    Contestant,
    ContestantResult,
    Folder,
    Prefill,
    Sample,
    Steps,
    WorkloadResult,
)
from specrun.contract import BACK_ENGINE, FRONT_ENGINE, HEAD_ENGINE, TARGET_ENGINE
from specrun.engine import Engine
from specrun.errors import ContextFull, SpecrunError, UsageError
from specrun.identity import fingerprint
from specrun.manifest import DraftMethod, Manifest
from specrun.options import GenerateOptions, Method
from specrun.outcome import Outcome
from specrun.schedule import Schedule
from specrun.tuning import this_machine

__all__ = ["BenchOptions", "BenchReport", "Benchmark", "run"]

PROMPT_LOOKUP_DRAFTS = (4, 8, 16)
PREFILL_TOKENS = 512
STEP_CONTEXT = 128  # tokens in front of the steps that are timed
STEP_ROWS = (1, 5, 8, 16)
LEAST_STEPS, LEAST_PREFILLS = 3, 1  # that are timed, however long they take
REPEATS = 25  # the most, however short they are
SECONDS = 4.0  # between these two

OnProgress = Callable[[str, int, int], None]  # what is measured, steps done, steps in all


def run(
    engine: Engine, options: BenchOptions | None = None, *, progress: OnProgress | None = None
) -> BenchReport:
    """Measure everything. ``progress``: called with what comes next, steps done, steps in all.

    Raises UsageError; ContextFull where no workload fits; EngineError where the target fails, or
    with ``strict`` a drafter.
    """
    return Benchmark(engine, options).run(progress)


@dataclass
class _Cell:
    """One contestant on one workload. ``failed``: it takes no further part."""

    check: Sample | None = None
    runs: list[Sample] = field(default_factory=list)
    failed: bool = False


class Benchmark:
    """The same in steps: ``report()`` is what is there when ``run()`` was interrupted."""

    def __init__(self, engine: Engine, options: BenchOptions | None = None) -> None:
        engine.check_free()
        self.engine = engine
        self.options = options or BenchOptions()
        self._notes: list[str] = []
        self.contestants = (PLAIN, *self._contestants())
        self._prompts = self._encode()
        self._plain_tokens: dict[str, list[int]] = {}
        self._cells = {(w, c): _Cell() for w in self._prompts for c in self.contestants}
        self._prefill: Prefill | None = None
        self._steps: Steps | None = None
        self._bandwidth: float | None = None
        self._complete = False

    def run(self, progress: OnProgress | None = None) -> BenchReport:
        """Measure; see :func:`run`."""
        on_progress = progress or _silent
        machine = (
            ("prompt of the target", self._measure_prefill),
            ("steps of the target", self._measure_steps),
            ("memory", self._measure_bandwidth),
        )
        rounds, workloads = self.options.rounds, list(self._prompts)
        turns = [(f"tokens of {w}", w, c, True) for w in workloads for c in self.contestants]
        for index in range(rounds):
            for workload in workloads:
                name = f"round {index + 1} of {rounds}, {workload}"
                turns += [(name, workload, c, False) for c in _rotated(self.contestants, index)]
        total = len(machine) + len(turns)
        for done, (name, measure) in enumerate(machine):
            on_progress(name, done, total)
            measure()
        for done, (name, workload, contestant, checks) in enumerate(turns, len(machine)):
            on_progress(f"{name}: {contestant.label}", done, total)
            self._take_turn(workload, contestant, checks)
        self._complete = True
        on_progress("", total, total)
        return self.report()

    def report(self) -> BenchReport:
        """All that is measured by now. Generations that were interrupted do not count."""
        engine = self.engine
        threads = engine.options.threads
        assert threads is not None, "resolved when the folder was opened"
        return BenchReport(
            complete=self._complete,
            machine=this_machine(
                threads=threads,
                device=engine.options.device,
                onnxruntime=onnxruntime.__version__,
            ),
            read_bandwidth=self._bandwidth,
            cache_bytes=cache_bytes(),
            folder=_folder(engine),
            options=self.options,
            contestants=self.contestants,
            prefill=self._prefill,
            steps=self._steps,
            workloads=tuple(self._workloads()),
            notes=tuple(dict.fromkeys(self._notes)),
            specrun=__version__,
            measured=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def _workloads(self) -> list[WorkloadResult]:
        found = []
        for name, prompt in self._prompts.items():
            cells = [(c, self._cells[name, c]) for c in self.contestants]
            results = tuple(
                ContestantResult(contestant, cell.check, tuple(cell.runs))
                for contestant, cell in cells
                if cell.check is not None and not cell.failed
            )
            if results:
                found.append(WorkloadResult(name, len(prompt), results))
        return found

    # What takes part.

    def _contestants(self) -> list[Contestant]:
        """All that the folder can run. Raises UsageError for a method that it does not have."""
        options, drafters = self.options, self.engine.manifest.drafters
        methods = options.methods or (*drafters, "prompt-lookup")
        found: list[Contestant] = []
        refused: UsageError | None = None
        for method in dict.fromkeys(methods):
            if method == "plain":
                continue
            self.engine.resolve(GenerateOptions(method=method))  # raises where it is not there
            for number in dict.fromkeys(options.num_assistant_tokens or self._numbers(method)):
                for schedule in dict.fromkeys(options.schedules):
                    contestant = Contestant(method, number, schedule)
                    try:
                        self.engine.resolve(self._generate_options(contestant))
                    except UsageError as error:  # too many drafts for this one
                        refused = error
                        self._notes.append(f"{contestant.label} is left out: {error}")
                    else:
                        found.append(contestant)
        if refused is not None and not found:
            raise refused
        if "auto" in options.schedules and (why := self.engine.not_tuned):
            self._notes.append(f"schedule auto learns what steps cost: {why}")
        return found

    def _numbers(self, method: Method) -> list[int]:
        """Of drafts, where none were asked for: no more than can be."""
        numbers: tuple[int, ...] = PROMPT_LOOKUP_DRAFTS
        most = self.engine.max_context
        drafter = self.engine.manifest.drafters.get(cast(DraftMethod, method))
        if drafter is not None:
            own = drafter.num_assistant_tokens
            numbers = own, 2 * own
            most = drafter.max_num_draft or most
        if (width := self.engine.options.fixed_width) is not None:
            most = min(most, width - 1)
        return [min(number, most) for number in numbers]

    def _encode(self) -> dict[str, list[int]]:
        """Ids of every prompt that fits. Raises ContextFull where none does."""
        new, most = self.options.max_new_tokens, self.engine.max_context
        prompts: dict[str, list[int]] = {}
        for name, text in self.options.texts.items():
            try:
                tokens = self.engine.encode(text)
            except ContextFull as error:
                self._notes.append(f"workload {name} is left out: {error}")
                continue
            if len(tokens) + new <= most:
                prompts[name] = tokens
            else:
                self._notes.append(
                    f"workload {name} is left out: {len(tokens)} tokens and {new} new ones do not"
                    f" fit into the context of {most}"
                )
        if not prompts:
            raise ContextFull(
                f"no workload fits: {self._notes[-1]}",
                hint="give a shorter prompt of your own, or fewer new tokens",
            )
        return prompts

    # The target alone.

    def _measure_prefill(self) -> None:
        tokens = self._some_tokens(min(PREFILL_TOKENS, self.engine.max_context - 1))
        target = self.engine.target
        seconds: list[float] = []
        end = time.perf_counter() + SECONDS
        while _wants_more(len(seconds), LEAST_PREFILLS, end):
            target.truncate(0)
            start = time.perf_counter()
            target.prefill(tokens)
            seconds.append(time.perf_counter() - start)
        self._prefill = Prefill(tokens.shape[1], tuple(seconds[1:]))

    def _measure_steps(self) -> None:
        """All numbers of rows in turn. The first step of each prepares its buffers."""
        context = min(STEP_CONTEXT, max(1, self.engine.max_context // 2))
        context -= context % min(context, self.engine.options.fixed_width or 1)  # a whole block
        tokens = self._some_tokens(context + max(STEP_ROWS))
        target = self.engine.target
        target.truncate(0)
        target.prefill(tokens[:, :context])
        counts = [rows for rows in STEP_ROWS if rows <= target.room]
        seconds: dict[int, list[float]] = {rows: [] for rows in counts}
        end = time.perf_counter() + SECONDS
        while _wants_more(len(seconds[1]), LEAST_STEPS, end):
            for rows, samples in seconds.items():
                start = time.perf_counter()
                target.verify(tokens[:, context : context + rows])
                samples.append(time.perf_counter() - start)
                target.truncate(context)
        timed = {rows: tuple(samples[1:]) for rows, samples in seconds.items()}
        self._steps = Steps(context, timed, _weight_bytes(self.engine.manifest))

    def _measure_bandwidth(self) -> None:
        options = self.engine.options
        assert options.threads is not None, "resolved when the folder was opened"
        if options.device != "cpu":
            self._notes.append(f"bandwidth is not measured on device {options.device}")
            return
        try:
            self._bandwidth = read_bandwidth(options.threads)
        except MemoryError as error:
            self._notes.append(f"bandwidth is not measured: {error or 'too little memory'}")
            return
        weights, caches = _weight_bytes(self.engine.manifest), cache_bytes()
        if caches is not None and weights < caches:
            self._notes.append(
                f"the weights of a step ({weights / 1e6:.0f} MB) fit into the machine's caches"
                f" ({caches / 1e6:.0f} MB), so a step may be faster than memory"
            )

    def _some_tokens(self, count: int) -> NDArray[np.int64]:
        """Tokens ``[1, count]`` of the workloads, again and again."""
        tokens = [token for prompt in self._prompts.values() for token in prompt]
        return np.resize(np.array(tokens, dtype=np.int64), (1, count))

    # Generations.

    def _take_turn(self, workload: str, contestant: Contestant, checks: bool) -> None:
        """One generation. A drafter that fails takes no further part in this workload."""
        cell = self._cells[workload, contestant]
        if cell.failed:
            return
        try:
            sample = self._generate(workload, contestant)
        except SpecrunError as error:
            if contestant == PLAIN or self.options.strict:
                raise
            cell.failed = True
            self._notes.append(f"{contestant.label} is left out of {workload}: {error}")
            return
        if checks:
            cell.check = sample
        else:
            cell.runs.append(sample)

    def _generate(self, workload: str, contestant: Contestant) -> Sample:
        watch = _Watch()
        request = self.engine.request(
            self._generate_options(contestant), on_warning=self._notes.append
        )
        make = request.make_schedule
        request = dataclasses.replace(
            request, make_schedule=lambda given, length: watch.over(make(given, length))
        )
        start = time.perf_counter()
        with self.engine._stream(self._prompts[workload], request) as stream:
            next(stream, None)
            first = time.perf_counter() - start
            result = stream.drain()
        stats = result.stats
        plain = self._plain_tokens.setdefault(workload, result.tokens)
        return Sample(
            emitted=stats.emitted,
            rounds=stats.rounds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            seconds=stats.seconds,
            first_token_seconds=first,
            draft_seconds=statistics.median(watch.draft) if watch.draft else None,
            verify_seconds=statistics.median(watch.verify) if watch.verify else None,
            same_tokens=_common(plain, result.tokens),
        )

    def _generate_options(self, contestant: Contestant) -> GenerateOptions:
        return GenerateOptions(
            method=contestant.method,
            num_assistant_tokens=contestant.num_assistant_tokens,
            num_assistant_tokens_schedule=contestant.schedule,
            max_new_tokens=self.options.max_new_tokens,
            do_sample=False,
            eos_token_ids=(),
            strict=True,
        )


class _Watch:
    """A schedule of somebody else's, and the seconds of the rounds in which it had drafts."""

    def __init__(self) -> None:
        self.draft: list[float] = []
        self.verify: list[float] = []
        self._schedule: Schedule | None = None

    def over(self, schedule: Schedule) -> Schedule:
        """Watch ``schedule``."""
        self._schedule = schedule
        return self

    @property
    def num_draft(self) -> int:
        """See :class:`specrun.schedule.Schedule`."""
        assert self._schedule is not None
        return self._schedule.num_draft

    def update(self, outcome: Outcome) -> None:
        """See :class:`specrun.schedule.Schedule`."""
        assert self._schedule is not None
        self._schedule.update(outcome)
        if outcome.drafted:
            self.draft.append(outcome.draft_seconds)
            self.verify.append(outcome.verify_seconds)


def _folder(engine: Engine) -> Folder:
    target = engine.manifest.target
    return Folder(
        path=str(engine.folder),
        target=target.id,
        architecture=target.architecture,
        precision=engine.manifest.target_engine.precision,
        exact_width=engine.options.fixed_width,
        fingerprint=fingerprint(engine.manifest),
    )


def _weight_bytes(manifest: Manifest) -> int:
    """What a step of one row of the target reads, of a target in parts all of them."""
    names = (TARGET_ENGINE, FRONT_ENGINE, BACK_ENGINE, HEAD_ENGINE)
    return sum(manifest.engines[name].step_bytes for name in names if name in manifest.engines)


def _wants_more(done: int, least: int, end: float) -> bool:
    """Whether to measure once more; the first time does not count."""
    return done <= (least if time.perf_counter() > end else REPEATS)


def _rotated(items: Sequence[Contestant], by: int) -> list[Contestant]:
    by %= len(items)
    return [*items[by:], *items[:by]]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _silent(what: str, done: int, total: int) -> None:
    """Nobody watches."""
