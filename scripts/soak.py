"""Thousands of generations of every kind in one process: tokens, state and memory stay right.

    python scripts/soak.py FOLDER [--generations 3000] [--hours H] [--seed 0] [--tokens 24]

Drawn from the seed, one after the other: prompts, lengths and methods (all that the folder has),
greedy and sampled; sessions that grow and are rewound; batches; streams that are closed in the
middle; generations that are cancelled, that run out of time, whose callback raises, whose drafter
fails. After each the engine must be free and whole, and its tokens belong to its text. Every so
often a probe, a fixed prompt with every method, must give the tokens it gave at first, and a
rewound session those of a cold run, or part from them at a near tie (runs of other widths round
otherwise; not with ``--exact``). At first every buffer is made as large as it may become; from
the first generations on memory (RssAnon) may grow by less than 3 %, and what is in use of the C
heap, which free room inside it does not hide, by less than 10 %, as it depends on what sessions
hold at that moment. A table for people, one JSON line last; exit status 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import specrun
from specrun.options import Method

WARM = 100  # generations before memory counts
PROBE_EVERY = 50
SHOWN = 20  # lines of the table
MOST_GROWTH = 0.03
MOST_HEAP_GROWTH = 0.10
PROBE_TOKENS = 16
MOST_ROWS = 4  # of a batch
SESSIONS = 3  # open at the same time
LONGEST = 16  # times the most new tokens: length of a session's text
NEAR_TIE = 0.05  # between the two best log-probabilities


class Meant(Exception):
    """Raised by a callback of ours."""


@dataclass
class Report:
    """What was done and what was wrong."""

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    probes: int = 0
    near_ties: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    @property
    def generations(self) -> int:
        """All that were made, probes apart."""
        return self.kinds.total()

    @property
    def growth(self) -> float:
        """Share by which memory grew after the first generations; 0 where there were no more."""
        return self._growth(lambda memory: memory.anonymous)

    @property
    def heap_growth(self) -> float:
        """The same of what is in use of the C heap; 0 where that is not known."""
        return self._growth(lambda memory: memory.heap)

    @property
    def right(self) -> bool:
        """Whether all was as it must be."""
        small = self.growth < MOST_GROWTH and self.heap_growth < MOST_HEAP_GROWTH
        return small and not self.wrong

    def _growth(self, size: Callable[[Memory], int]) -> float:
        later = [size(memory) for memory in self.memory if memory.generation >= WARM]
        return later[-1] / later[0] - 1 if len(later) > 1 and later[0] else 0.0


class Memory(NamedTuple):
    """Bytes after a generation: those that no file backs, and those in use of the C heap (0: not
    known)."""

    generation: int
    anonymous: int
    heap: int


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2() returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def memory(generation: int) -> Memory:
    """Measure, after the garbage is collected."""
    gc.collect()
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    if found is None:
        raise SystemExit("this system does not say how much memory is anonymous")
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    heap = 0
    if mallinfo2 is not None:
        mallinfo2.restype = _Mallinfo
        info = mallinfo2()
        heap = info.uordblks + info.hblkhd
    return Memory(generation, 1024 * int(found[1]), heap)


class Soak:
    """One engine, and everything that is done to it."""

    def __init__(self, engine: specrun.Engine, *, seed: int, most: int) -> None:
        self.engine = engine
        self.most = most
        self.report = Report()
        self.methods = methods_of(engine)
        self._random = random.Random(seed)
        self._sessions = [engine.session() for _ in range(SESSIONS)]
        self._longest = min(LONGEST * most, engine.max_context)
        self._probed = self._probe()
        self._fill()
        self._kinds: dict[str, Callable[[], specrun.Result | None]] = {
            "once": self._once,
            "session": self._session,
            "rewound": self._rewound,
            "new session": self._new_session,
            "batch": self._batch,
            "closed stream": self._closed,
            "cancelled": self._cancelled,
            "out of time": self._out_of_time,
            "callback raises": self._raising,
            "drafter fails": self._failing,
        }

    def step(self) -> None:
        """One generation, and a look at what it left."""
        kind = self._random.choice(list(self._kinds))
        self._watched(kind, self._kinds[kind])
        self.report.kinds[kind] += 1
        if self.report.generations % PROBE_EVERY == 0:
            self._watched("probe", self._compare_probe)

    def _watched(self, kind: str, work: Callable[[], specrun.Result | None]) -> None:
        try:
            result = work()
            if result is not None:
                self._look(result)
            self.engine.check_free()
            self.engine.check_integrity()
            for session in self._sessions:
                session.check_integrity()
        except Exception as error:  # any is a finding
            self.report.wrong.append(
                f"generation {self.report.generations}: {kind}: {type(error).__name__}: {error}"
            )

    def close(self) -> None:
        """Free the sessions."""
        for session in self._sessions:
            session.close()

    def _fill(self) -> None:
        """Every buffer as large as it may become, and runs of every width prepared, so that memory
        can be compared from then on."""
        long = [place % self._vocabulary for place in range(self._longest - self.most)]
        for session in self._sessions:
            for length in range(1, len(long)):
                session.rewind(0)
                session.append(long[:length])
                session.generate(max_new_tokens=1, method="plain", logprobs=2)
        for method in self.methods:
            common: Any = {"method": method, "max_new_tokens": self.most, "eos_token_ids": ()}
            for session in self._sessions:
                session.replace(long)
                session.generate(**common)
            self.engine.generate([long[: 4 * self.most]] * MOST_ROWS, **common)

    def _compare_probe(self) -> None:
        self.report.probes += 1
        for method, tokens in self._probe().items():
            if tokens != self._probed[method]:
                raise ValueError(f"{method} gave other tokens than at first")

    def _probe(self) -> dict[Method, list[int]]:
        common: Any = {"max_new_tokens": PROBE_TOKENS, "do_sample": False, "eos_token_ids": ()}
        prompt = [(7 * place + 3) % self._vocabulary for place in range(23)]
        return {
            method: self.engine.generate(prompt, method=method, **common).tokens
            for method in self.methods
        }

    # What is drawn.

    @property
    def _vocabulary(self) -> int:
        return self.engine.manifest.tokenizer.vocab_size

    def _prompt(self, least: int = 1) -> list[int]:
        """Ids of which some come again, so that there is something to look up."""
        length = self._random.randint(least, 4 * self.most)
        few = [self._random.randrange(self._vocabulary) for _ in range(1 + length // 3)]
        return [self._random.choice(few) for _ in range(length)]

    def _options(self, *, sampled: bool | None = None) -> dict[str, Any]:
        draw = self._random
        method = draw.choice(self.methods)
        self.report.methods[method] += 1
        options: dict[str, Any] = {
            "method": method,
            "max_new_tokens": draw.randint(0, self.most),
            "strict": True,
        }
        if draw.random() < 0.3:
            options["eos_token_ids"] = [draw.randrange(self._vocabulary) for _ in range(8)]
        if method != "plain":
            options["num_assistant_tokens"] = draw.randint(1, 6)
            options["num_assistant_tokens_schedule"] = draw.choice(
                ["constant", "heuristic", "auto"]
            )
        if draw.random() < 0.4 if sampled is None else sampled:
            options |= {"temperature": 0.5 + draw.random(), "seed": draw.randrange(1000)}
            options |= draw.choice([{}, {"top_k": 20}, {"top_p": 0.9}])
        if draw.random() < 0.2:
            options |= {"logprobs": 2, "repetition_penalty": 1.1}
        return options

    def _growing(self) -> specrun.Session:
        """A session with room for another turn."""
        session = self._random.choice(self._sessions)
        if len(session.tokens) + 5 * self.most >= self._longest:
            session.rewind(self._random.randrange(len(session.tokens) // 2))
        session.append(self._prompt())
        return session

    # Kinds of generations.

    def _once(self) -> specrun.Result:
        return self.engine.generate(self._prompt(), **self._options())

    def _session(self) -> specrun.Result:
        return self._growing().generate(**self._options())

    def _rewound(self) -> specrun.Result:
        session = self._growing()
        session.rewind(self._random.randint(1, len(session.tokens)))
        options = self._options(sampled=False) | {"logprobs": 2, "repetition_penalty": 1.0}
        cold = self.engine.generate(session.tokens, **options)
        result = session.generate(**options)
        self._compare(result, cold)
        return result

    def _compare(self, result: specrun.Result, cold: specrun.Result) -> None:
        """The same tokens, up to a near tie at most. Raises ValueError."""
        pairs = zip(result.tokens, cold.tokens, strict=False)
        at = next((place for place, (one, two) in enumerate(pairs) if one != two), None)
        if at is None:
            if len(result.tokens) != len(cold.tokens):
                raise ValueError(f"{len(result.tokens)} tokens, a cold run {len(cold.tokens)}")
            return
        assert cold.logprobs is not None
        (_, best), (_, second) = cold.logprobs[at].top
        if best - second > NEAR_TIE or self.engine.options.exact:
            raise ValueError(f"other tokens than a cold run from {at} on, {best - second} apart")
        self.report.near_ties += 1

    def _new_session(self) -> specrun.Result:
        place = self._random.randrange(SESSIONS)
        if self._random.random() < 0.5:
            self._sessions[place].close()
        self._sessions[place] = self.engine.session()
        self._sessions[place].append(self._prompt())
        return self._sessions[place].generate(**self._options())

    def _batch(self) -> None:
        prompts = [self._prompt() for _ in range(self._random.randint(1, MOST_ROWS))]
        for result in self.engine.generate(prompts, **self._options()):
            self._look(result)

    def _closed(self) -> specrun.Result:
        stream = self._stream()
        for _ in range(self._random.randint(0, self.most // 2)):
            next(stream, None)
        if self._random.random() < 0.7:
            stream.close()
        partial = stream.partial
        del stream  # which ends it, if it was not closed
        return partial

    def _cancelled(self) -> specrun.Result:
        token, at = specrun.CancelToken(), self._random.randint(-1, self.most // 3)
        if at < 0:
            token.cancel()

        def watch(done: specrun.Round) -> None:
            if done.index >= at:
                token.cancel()

        return self._stream(cancel=token, on_round=watch).drain()

    def _out_of_time(self) -> specrun.Result:
        return self._stream(timeout=10 ** self._random.uniform(-5, -1)).drain()

    def _raising(self) -> specrun.Result:
        at = self._random.randint(0, self.most // 3)
        seen = 0

        def processor(tokens: Any, logits: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen > at:
                raise Meant
            return logits

        def watch(done: specrun.Round) -> None:
            if done.index >= at:
                raise Meant

        callbacks: list[dict[str, Any]] = [{"on_round": watch}, {"logits_processor": processor}]
        options = self._random.choice(callbacks)
        stream = self._stream(strict=False, on_warning=lambda _: None, **options)
        try:
            stream.drain()
        except Meant:
            if stream.partial.finish_reason != "error":
                raise ValueError(f"it ended with {stream.partial.finish_reason}") from None
        return stream.partial

    def _failing(self) -> specrun.Result:
        drafter = Failing(self._random.randint(0, 4), self._vocabulary)
        options = self._options() | {"strict": False}
        options.pop("method")
        return self.engine.generate(
            self._prompt(), drafter=drafter, on_warning=lambda _: None, **options
        )

    def _stream(self, **options: Any) -> specrun.TextStream:
        """Of the engine or of a session."""
        given = self._options() | options
        if self._random.random() < 0.5:
            return self.engine.stream(self._prompt(), **given)
        return self._growing().stream(**given)

    def _look(self, result: specrun.Result) -> None:
        """Its parts belong together."""
        self.report.reasons[result.finish_reason] += 1
        self.report.tokens += len(result.tokens)
        if result.stats.emitted != len(result.tokens):
            raise ValueError(f"{len(result.tokens)} tokens, {result.stats.emitted} counted")
        if result.finish_reason != "unfinished":
            text = self.engine.tokenizer.decode(result.tokens)
            if text != result.text:
                raise ValueError(f"the text is not that of its tokens: {result.text!r}, {text!r}")
        if result.logprobs is not None and len(result.logprobs) != len(result.tokens):
            raise ValueError(
                f"{len(result.tokens)} tokens, {len(result.logprobs)} log-probabilities"
            )


class Failing:
    """Drafts anything, and fails at its n-th proposal."""

    max_drafts: int | None = None
    needs_prompt_rows = False

    def __init__(self, at: int, vocabulary: int) -> None:
        self._left = at
        self._vocabulary = vocabulary

    def begin(self, tokens: Sequence[int]) -> None:
        """Nothing to do."""

    def observe(self, tokens: Sequence[int], hidden: Any) -> None:
        """Nothing to do."""

    def propose(self, count: int, sampler: Any) -> list[int]:
        """The first tokens there are."""
        self._left -= 1
        if self._left < 0:
            raise Meant
        return [place % self._vocabulary for place in range(count)]

    def truncate(self, length: int) -> None:
        """Nothing to do."""


def methods_of(engine: specrun.Engine) -> list[Method]:
    """All that the folder has."""
    always = ("plain", "prompt-lookup")
    return [m for m in get_args(Method) if m in always or m in engine.manifest.drafters]


def soak(
    folder: Path,
    *,
    generations: int,
    hours: float | None = None,
    seed: int = 0,
    most: int = 24,
    show: Callable[[str], None] = print,
    **options: Any,
) -> Report:
    """Go on until ``generations`` or ``hours`` are over. ``most``: new tokens of a generation."""
    until = None if hours is None else time.monotonic() + 3600 * hours
    with specrun.load(folder, threads=1, **options) as engine:
        one = Soak(engine, seed=seed, most=most)
        show(f"methods: {', '.join(one.methods)}")
        show("generations     tokens  wrong  RssAnon MB  heap MB")
        marks = set(range(0, generations + 1, max(1, generations // SHOWN)))
        for done in range(1, generations + 1):
            one.step()
            if done in marks | {WARM, generations}:
                report = one.report
                report.memory.append(memory(done))
                _, anonymous, heap = report.memory[-1]
                show(
                    f"{done:11}  {report.tokens:9}  {len(report.wrong):5}"
                    f"  {anonymous / 1e6:10.2f}  {heap / 1e6:7.2f}"
                )
            if until is not None and time.monotonic() > until:
                break
        one.close()
    return one.report


def lines(report: Report) -> Iterator[str]:
    """What came of it, for people."""
    for name in ("kinds", "reasons", "methods"):
        counts = getattr(report, name)
        yield f"{name}: " + ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
    yield f"probes: {report.probes}; near ties: {report.near_ties}"
    yield (
        f"memory after the first {WARM}: {report.growth:+.2%}, {MOST_GROWTH:.0%} allowed;"
        f" heap in use {report.heap_growth:+.2%}, {MOST_HEAP_GROWTH:.0%} allowed"
    )
    yield from (f"WRONG {what}" for what in report.wrong[:SHOWN])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status is 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--generations", type=int, default=3000)
    parser.add_argument("--hours", type=float, help="end after so long, or after --generations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=24, help="most new ones of a generation")
    parser.add_argument("--exact", action="store_true", help="in exact mode")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    report = soak(
        given.folder,
        generations=given.generations,
        hours=given.hours,
        seed=given.seed,
        most=given.tokens,
        exact=given.exact,
    )
    for line in lines(report):
        print(line)
    print(
        json.dumps(
            {
                "folder": given.folder.name,
                "seed": given.seed,
                "generations": report.generations,
                "seconds": round(time.monotonic() - started, 1),
                "tokens": report.tokens,
                "kinds": report.kinds,
                "reasons": report.reasons,
                "methods": report.methods,
                "probes": report.probes,
                "near_ties": report.near_ties,
                "growth": round(report.growth, 5),
                "heap_growth": round(report.heap_growth, 5),
                "memory": report.memory,
                "wrong": report.wrong,
            }
        )
    )
    return 0 if report.right else 1


if __name__ == "__main__":
    raise SystemExit(main())
