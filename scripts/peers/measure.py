"""The rounds: who is asked what, in which order, and what came back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.contestants import PLAIN, Contestant, Setting
from peers.worker import Worker, WorkerError

REFERENCE = "transformers fp32"  # whose plain tokens the others are compared with


@dataclass(frozen=True)
class Task:
    """One workload: its prompt by turn (0 is the warm-up), and how many tokens to write.

    ``prefill``: only the time to the one token counts, and only plain decoding is asked.
    """

    name: str
    prompt: Callable[[int], list[int]]
    max_new_tokens: int
    prefill: bool = False


@dataclass
class Cell:
    """What one contestant did in one setting on one task. Times in seconds, a value per round."""

    tokens: list[int] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    unstable: bool = False  # other tokens in another round
    error: str | None = None

    @property
    def seconds(self) -> float:
        return statistics.median(self.totals)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all of the time, prefill included."""
        return len(self.tokens) / self.seconds

    @property
    def first(self) -> float | None:
        return statistics.median(self.firsts) if self.firsts else None

    @property
    def measured(self) -> bool:
        return bool(self.totals) and self.error is None


Key = tuple[str, Setting, str]  # contestant, setting, task


@dataclass
class Measured:
    """All cells of one model; ``failed``: contestants that do not start or ended, and why.

    ``idle_load``: the share of one core that a worker used while others were working.
    """

    cells: dict[Key, Cell] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    idle_load: dict[str, float] = field(default_factory=dict)


class Race:
    """Workers that are loaded and take turns; only one works at any time."""

    def __init__(self, tasks: Sequence[Task], pause: float, say: Callable[[str], None]) -> None:
        self.tasks = tasks
        self.pause = pause
        self.say = say
        self.result = Measured()
        self._workers: dict[str, Worker] = {}
        self._idle: dict[str, tuple[float, float]] = {}  # processor seconds, seconds

    def start(self, contestants: Sequence[Contestant], threads: int) -> None:
        """Load every contestant, one after the other."""
        for contestant in contestants:
            self.say(f"loading {contestant.name}")
            try:
                worker = Worker(contestant, threads)
            except WorkerError as error:
                self.result.failed[contestant.name] = str(error)
                continue
            self._workers[contestant.name] = worker
            self.result.versions[contestant.name] = worker.versions

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    def run(self, rounds: int) -> Measured:
        """A round that only warms up and compares tokens, then those that count."""
        for turn in range(rounds + 1):
            self.say("warm-up, tokens" if turn == 0 else f"round {turn} of {rounds}")
            for task, setting, worker in self._order():
                self._ask(task, setting, worker, turn)
        for name, (used, during) in self._idle.items():
            self.result.idle_load[name] = used / during if during else 0.0
        return self.result

    def _order(self) -> Iterator[tuple[Task, Setting, Worker]]:
        """Contestants alternate: two settings of one do not follow each other."""
        for task in self.tasks:
            settings = dict.fromkeys(
                setting
                for worker in self._workers.values()
                for setting in worker.contestant.settings
            )
            for setting in [PLAIN] if task.prefill else settings:
                for worker in list(self._workers.values()):
                    if setting in worker.contestant.settings:
                        yield task, setting, worker

    def _ask(self, task: Task, setting: Setting, worker: Worker, turn: int) -> None:
        name = worker.contestant.name
        cell = self.result.cells.setdefault((name, setting, task.name), Cell())
        if cell.error is not None or name in self.result.failed:
            return
        time.sleep(self.pause)
        request: dict[str, Any] = {
            "prompt_ids": task.prompt(turn),
            "max_new_tokens": task.max_new_tokens,
            **setting.as_request(),
        }
        others = [other for other in self._workers.values() if other is not worker and other.alive]
        before = [other.processor_seconds() for other in others]
        start = time.perf_counter()
        try:
            reply = worker.ask(request)
        except WorkerError as error:
            cell.error = str(error)
            if not worker.alive:
                self.result.failed[name] = str(error)
            return
        during = time.perf_counter() - start
        for other, used in zip(others, before, strict=True):
            sums = self._idle.get(other.contestant.name, (0.0, 0.0))
            more = max(0.0, other.processor_seconds() - used)
            self._idle[other.contestant.name] = (sums[0] + more, sums[1] + during)
        if turn == 0:
            cell.tokens = reply["tokens"]
            return
        cell.unstable |= not task.prefill and reply["tokens"] != cell.tokens
        cell.totals.append(reply["total"])
        if reply["first"] is not None:
            cell.firsts.append(reply["first"])


def common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens two texts have in common from their beginning."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))


def differing(one: Sequence[int], two: Sequence[int]) -> int:
    """At how many places two texts differ; what only one of them has counts."""
    same = sum(a == b for a, b in zip(one, two, strict=False))
    return max(len(one), len(two)) - same
