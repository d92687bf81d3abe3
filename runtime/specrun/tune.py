"""Measures what rounds cost on this machine, for every method that an engine folder offers.

What is timed are the rounds of real generations: the loop runs as always, on a schedule that goes
through all numbers of drafts in an order that changes from cycle to cycle, so that drift meets all
of them alike. The first round of each width, which prepares its buffers, does not count. Of the
others the lower quartile does: whatever disturbs a measurement makes it longer.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import onnxruntime
from numpy.typing import NDArray

from specrun import manifest as manifests
from specrun.drafters.base import Drafter, Proposal
from specrun.errors import UsageError
from specrun.generation import Generation
from specrun.lane import Lane
from specrun.loop import Progress
from specrun.options import EngineOptions, GenerateOptions, Method
from specrun.outcome import Outcome
from specrun.request import Request
from specrun.resolve import engines_only, resolve_engine, resolve_generate
from specrun.resources import Resources
from specrun.sampling import Sampler
from specrun.text import Tokenizer
from specrun.tuning import (
    TUNING,
    Entry,
    MethodCosts,
    Points,
    check_writable,
    engine_hashes,
    this_machine,
    write,
)

NUM_DRAFTS = (0, 1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 24, 32)
CONTEXT_LENGTHS = (64, 512)  # tokens
LEAST_CYCLES, CYCLES = 3, 60  # visits of every number of drafts, however long or short they take
SECONDS = 2.5  # of one sweep, between these two
NEW_TOKENS = 192  # of one generation, so that its context stays near the length it stands for
IDLE = 12  # plain steps before a draft that shows what catching up costs

# Repeats itself, so that prompt lookup has something to propose.
TEXT = (
    "The tide went out at noon. Along the shore, children looked for shells, 12 of them white and"
    " 7 grey, and an old man mended his net. When the tide came back, the shells were in a basket"
    " and the net was whole. "
)

OnProgress = Callable[[str, int, int], None]  # what is measured, steps done, steps in all


def tune(
    folder: Path,
    *,
    options: EngineOptions | None = None,
    out: Path | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Entry, Path]:
    """Measure the engines in ``folder`` and write the tuning file; returns both.

    ``out``: the file, in place of the one beside the manifest. Raises FolderError, EngineError, and
    UsageError for exact mode, and for a context too small to draft in.
    """
    manifest = manifests.read(folder, integrity="quick")
    resolved = resolve_engine(engines_only(options or EngineOptions(), manifest), manifest)
    if resolved.exact:
        raise UsageError(
            "exact: costs are measured without it", hint="leave it out; auto learns costs there"
        )
    tokenizer = Tokenizer(folder / manifest.tokenizer.file)
    path = out or folder / TUNING
    check_writable(path)
    resources = Resources(folder, manifest, resolved, tokenizer)
    try:
        entry = measure(resources, on_progress)
    finally:
        resources.close()
    write(path, entry)
    return entry, path


def measure(
    resources: Resources, on_progress: OnProgress | None = None, *, seconds: float = SECONDS
) -> Entry:
    """Time all methods of a folder. ``seconds``: of one sweep; a method takes one or two."""
    manifest, options = resources.manifest, resources.options
    lane = Lane(resources)
    methods = [*manifest.drafters, "prompt-lookup"]
    prompts = _prompts(resources)
    found: dict[str, list[MethodCosts]] = defaultdict(list)
    steps = [(prompt, method) for prompt in prompts for method in methods]
    for done, (prompt, method) in enumerate(steps):
        if on_progress is not None:
            on_progress(f"{method}, {len(prompt)} tokens of context", done, len(steps))
        found[method].append(_measure(lane, prompt, cast(Method, method), seconds))
    if on_progress is not None:
        on_progress("", len(steps), len(steps))
    assert options.threads is not None, "resolved before"
    machine = this_machine(
        threads=options.threads, device=options.device, onnxruntime=onnxruntime.__version__
    )
    return Entry(machine, engine_hashes(manifest), {k: tuple(v) for k, v in found.items()})


def _prompts(resources: Resources) -> list[list[int]]:
    """Token ids at every length of context that leaves room for as much again."""
    most = resources.max_context // 2
    once = resources.tokenizer.encode(TEXT, add_special_tokens=False) or [0]
    lengths = sorted({min(length, most) for length in CONTEXT_LENGTHS})
    if resources.max_context - lengths[0] < 3:
        raise UsageError(
            f"max_context: {resources.max_context} tokens are too few to draft in",
            hint="open the folder with a larger max_context",
        )
    return [(once * (1 + length // len(once)))[:length] for length in lengths]


def _measure(lane: Lane, prompt: list[int], method: Method, seconds: float) -> MethodCosts:
    room = min(NEW_TOKENS, lane.resources.max_context - len(prompt))
    # A round adds a token, prefill one more, so the first round may draft room - 2.
    counts = [count for count in NUM_DRAFTS if count <= room - 2]
    own = Sweep(counts)
    _sweep(lane, prompt, method, own, None, seconds)
    steps = own
    # A drafter that does not always propose leaves widths out; the target's steps are its own.
    if any(count not in own.verify for count in own.expected):
        steps = Sweep(counts)
        _sweep(lane, prompt, method, steps, _Filler(prompt), seconds)
    return MethodCosts(
        len(prompt),
        _points(own.draft),
        tuple((1 + count, value) for count, value in _points(steps.verify)),
        _typical(own.other or [0.0]),
        _catch_up(lane, prompt, method, _points(own.draft)),
    )


@dataclass
class Sweep:
    """A schedule that asks for all of ``counts`` in turn and keeps what the rounds took.

    ``draft`` and ``verify``: seconds by what was drafted; ``other``: the rest of the rounds;
    ``expected``: what a drafter that proposes all it can must have drafted.
    """

    counts: Sequence[int]
    draft: dict[int, list[float]] = field(default_factory=dict)
    verify: dict[int, list[float]] = field(default_factory=dict)
    other: list[float] = field(default_factory=list)
    expected: set[int] = field(default_factory=set)
    cycles: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(0)
        self._order: list[int] = []
        self._seen: set[int] = set()
        self._since: float | None = None
        self._turn()

    @property
    def num_draft(self) -> int:
        """See :class:`specrun.schedule.Schedule`."""
        return self._order[-1]

    def update(self, outcome: Outcome) -> None:
        """Keep the times; the first ones of a width are not typical."""
        now = time.perf_counter()
        asked = self._order.pop()
        if outcome.drafted in self._seen:
            self.draft.setdefault(outcome.drafted, []).append(outcome.draft_seconds)
            self.verify.setdefault(outcome.drafted, []).append(outcome.verify_seconds)
            if self._since is not None:
                self.other.append(
                    max(0.0, now - self._since - outcome.draft_seconds - outcome.verify_seconds)
                )
        self._seen.add(outcome.drafted)
        self._since = now
        if outcome.most is None or asked <= outcome.most:
            self.expected.add(asked)
        else:  # no use asking for more than the drafter can
            self.counts = sorted({min(count, outcome.most) for count in self.counts})
            self._order = [count for count in self._order if count <= outcome.most]
        if not self._order:
            self.cycles += 1
            self._turn()

    def pause(self) -> None:
        """A generation ended: the time to the next round is not the loop's."""
        self._since = None

    def _turn(self) -> None:
        self._order = list(self.counts)
        self._random.shuffle(self._order)


def _sweep(
    lane: Lane,
    prompt: list[int],
    method: Method,
    sweep: Sweep,
    drafter: Drafter | None,
    seconds: float,
) -> None:
    """Generate from ``prompt`` until all counts have had their turns."""
    end = time.perf_counter() + seconds

    def enough() -> bool:
        return sweep.cycles >= (LEAST_CYCLES if time.perf_counter() > end else CYCLES)

    while not enough():
        for _ in _generate(lane, prompt, method, sweep, drafter):
            if enough():
                break
        sweep.pause()


def _catch_up(lane: Lane, prompt: list[int], method: Method, draft: Points) -> float:
    """What a token committed without drafting adds to the next draft, in seconds."""
    room = min(NEW_TOKENS, lane.resources.max_context - len(prompt)) - 3
    idle = min(IDLE, room)
    one = dict(draft).get(1)
    if idle < 1 or one is None:
        return 0.0
    samples: list[float] = []
    for _ in range(3):
        after = _AfterIdling(idle)
        for _ in _generate(lane, prompt, method, after, None):
            if after.seconds is not None:
                break
        if after.seconds is not None:
            samples.append(after.seconds)
    # The first run of that width prepares its buffers, the least of three does not.
    return max(0.0, min(samples, default=one) - one) / idle


class _AfterIdling:
    """So many plain steps, then one draft: ``seconds`` of its round, where one was proposed."""

    def __init__(self, idle: int) -> None:
        self._left = idle
        self.seconds: float | None = None

    @property
    def num_draft(self) -> int:
        """See :class:`specrun.schedule.Schedule`."""
        return int(self._left <= 0)

    def update(self, outcome: Outcome) -> None:
        """Count the plain steps."""
        self._left -= 1
        if outcome.drafted == 1 and self.seconds is None:
            self.seconds = outcome.draft_seconds


class _Filler:
    """Always proposes as many tokens as it is asked for; which ones does not matter."""

    max_drafts: int | None = None
    needs_prompt_rows = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._token = tokens[0]

    def begin(self, tokens: Sequence[int]) -> None:
        """Nothing to do."""

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """Nothing to do."""

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        """The same token again and again."""
        return Proposal([self._token] * count)

    def truncate(self, length: int) -> None:
        """Nothing to do."""


def _generate(
    lane: Lane, prompt: list[int], method: Method, schedule: Any, drafter: Drafter | None
) -> Any:
    """Text pieces of a greedy generation behind ``prompt``, whose rows are kept where they can."""
    given = GenerateOptions(
        method=method,
        max_new_tokens=NEW_TOKENS,
        num_assistant_tokens=1,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
        do_sample=False,
        eos_token_ids=(),
        strict=True,
    )
    request = Request(
        options=resolve_generate(given, lane.resources.manifest),
        bad_words_ids=(),
        drafter=drafter,
        logits_processors=(),
        make_schedule=lambda _, __: schedule,
        on_round=None,
        on_warning=_no_warning,
    )
    progress = Progress(lane.target, list(prompt))
    return Generation(request, lane.resources).run(lane, progress)


def _no_warning(message: str) -> None:
    """A strict request has none."""


def _points(samples: dict[int, list[float]]) -> Points:
    """By count, ascending. More never takes less time: what says so was disturbed."""
    points: list[tuple[int, float]] = []
    for count in sorted(samples, reverse=True):
        seconds = _typical(samples[count])
        points.append((count, min(seconds, points[-1][1]) if points else seconds))
    return tuple(reversed(points))


def _typical(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 4]
