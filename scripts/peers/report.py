"""What was measured, as JSON values and as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peers.contestants import PLAIN, Contestant, Setting
from peers.measure import REFERENCE, Cell, Measured, Task, common_prefix, differing

SPINNING = 0.02  # of a core; an idle worker that uses more disturbs the others
LOOKUP_TASKS = ("copy", "copy-town", "edit")  # whose ratios are shown
ANY = "any"


@dataclass(frozen=True)
class Score:
    """A figure, more is better, and who reached it in which setting."""

    value: float
    name: str
    setting: Setting


class Results:
    """The cells of one model, by contestant, setting and task."""

    def __init__(
        self,
        contestants: Sequence[Contestant],
        tasks: Sequence[Task],
        measured: Measured,
    ) -> None:
        self.contestants = [c for c in contestants if c.name not in measured.failed]
        self.tasks = tasks
        self.measured = measured

    def cell(self, name: str, setting: Setting, task: str) -> Cell | None:
        """None where it was not asked or failed."""
        found = self.measured.cells.get((name, setting, task))
        return found if found is not None and found.measured else None

    def differs(self, name: str, setting: Setting, task: str) -> int | None:
        """Tokens in which a setting differs from the contestant's own plain decoding."""
        plain, other = self.cell(name, PLAIN, task), self.cell(name, setting, task)
        return None if plain is None or other is None else differing(plain.tokens, other.tokens)

    def prefix(self, name: str, task: str) -> int | None:
        """Tokens that plain decoding has in common with the reference's."""
        base, plain = self.cell(REFERENCE, PLAIN, task), self.cell(name, PLAIN, task)
        return None if base is None or plain is None else common_prefix(base.tokens, plain.tokens)

    def best(
        self, contestants: Iterable[Contestant], task: str, *, plain: bool = True
    ) -> Score | None:
        """The most tokens per second on a task; ``plain``: plain decoding counts too."""
        scores = (
            Score(cell.tokens_per_second, contestant.name, setting)
            for contestant in contestants
            for setting in contestant.settings
            if (plain or setting.drafts) and (cell := self.cell(contestant.name, setting, task))
        )
        return max(scores, key=lambda score: score.value, default=None)

    def best_plain(self, contestants: Iterable[Contestant]) -> Score | None:
        """The highest geometric mean of plain decoding over the tasks that write text."""
        tasks = [task.name for task in self.tasks if not task.prefill]
        scores = []
        for contestant in contestants:
            cells = [self.cell(contestant.name, PLAIN, task) for task in tasks]
            speeds = [cell.tokens_per_second for cell in cells if cell is not None]
            if speeds and len(speeds) == len(tasks):
                mean = statistics.geometric_mean(speeds)
                scores.append(Score(mean, contestant.name, PLAIN))
        return max(scores, key=lambda score: score.value, default=None)

    def ratios(self) -> Iterator[dict[str, Any]]:
        """Every folder of ours against the best peer of every precision, and of any."""
        peers = [contestant for contestant in self.contestants if not contestant.ours]
        groups = [*sorted({peer.precision for peer in peers}), ANY]
        for ours in (contestant for contestant in self.contestants if contestant.ours):
            for group in groups:
                rivals = [peer for peer in peers if group in (peer.precision, ANY)]
                yield from self._ratios_with(ours, group, rivals)

    def _ratios_with(
        self, ours: Contestant, group: str, rivals: list[Contestant]
    ) -> Iterator[dict[str, Any]]:
        pairs = [("plain", self.best_plain([ours]), self.best_plain(rivals))]
        for task in self.tasks:
            mine, best = self.best([ours], task.name), self.best(rivals, task.name)
            if task.name in LOOKUP_TASKS:
                mine = self.best([ours], task.name, plain=False)
                pairs.append((f"lookup {task.name}", mine, best))
            elif task.prefill:
                pairs.append((task.name, mine, best))
        for what, one, other in pairs:
            if one is not None and other is not None:
                yield {
                    "ours": ours.name,
                    "against": group,
                    "what": what,
                    "ratio": round(one.value / other.value, 3),
                    "our_tokens_per_second": round(one.value, 2),
                    "our_setting": one.setting.label,
                    "peer_tokens_per_second": round(other.value, 2),
                    "peer": other.name,
                    "peer_setting": other.setting.label,
                }

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, every round in them."""
        return {
            "contestants": [self._contestant(contestant) for contestant in self.contestants],
            "failed": self.measured.failed,
            "ratios": list(self.ratios()),
        }

    def _contestant(self, contestant: Contestant) -> dict[str, Any]:
        name = contestant.name
        return {
            "name": name,
            "ours": contestant.ours,
            "precision": contestant.precision,
            "versions": self.measured.versions[name],
            "idle_load": round(self.measured.idle_load.get(name, 0.0), 4),
            "cells": [
                {
                    "task": task,
                    "setting": setting.label,
                    **setting.as_request(),
                    "error": cell.error,
                    "new_tokens": len(cell.tokens),
                    "seconds": cell.totals,
                    "first_seconds": cell.firsts,
                    "tokens_per_second": cell.tokens_per_second if cell.measured else None,
                    "differs_from_plain": self.differs(name, setting, task),
                    "common_prefix": self.prefix(name, task) if setting == PLAIN else None,
                    "unstable": cell.unstable,
                    "tokens": cell.tokens,
                }
                for (who, setting, task), cell in self.measured.cells.items()
                if who == name
            ],
        }


def lines(results: Results) -> Iterator[str]:
    """The tables, in the order in which they are to be read: tokens before times."""
    yield from _tokens_table(results)
    yield ""
    yield from _times_table(results)
    yield ""
    yield from _ratios_table(results)
    yield ""
    yield from _notes(results)


def _tokens_table(results: Results) -> Iterator[str]:
    tasks = [task.name for task in results.tasks if not task.prefill]
    yield (
        f"Tokens: in common with {REFERENCE} from the beginning / the most in which a lookup"
        " differs from the contestant's own plain decoding"
    )
    yield _row("", "", [f"{task:>13}" for task in tasks])
    for contestant in results.contestants:
        shown = []
        for task in tasks:
            prefix = results.prefix(contestant.name, task)
            counts = [results.differs(contestant.name, s, task) for s in contestant.settings[1:]]
            known = [count for count in counts if count is not None]
            differs = max(known) if known else "-"
            shown.append(f"{'-' if prefix is None else prefix} / {differs}".rjust(13))
        yield _row(contestant.name, contestant.precision, shown)


def _times_table(results: Results) -> Iterator[str]:
    yield (
        "Speed: tokens per second with prefill, median; of lookups the best draft length k;"
        " * where its tokens differ from plain; prefill in ms to the first token"
    )
    heads = [f"{task.name:>13}" for task in results.tasks]
    yield _row("", "", heads)
    for contestant in results.contestants:
        plain = [_plain_cell(results, contestant, task) for task in results.tasks]
        yield _row(contestant.name, contestant.precision, plain)
        if len(contestant.settings) > 1:
            lookup = [_lookup_cell(results, contestant, task) for task in results.tasks]
            yield _row("  prompt lookup", "", lookup)


def _plain_cell(results: Results, contestant: Contestant, task: Task) -> str:
    cell = results.cell(contestant.name, PLAIN, task.name)
    if cell is None:
        return f"{'-':>13}"
    return f"{1000 * cell.seconds:13.0f}" if task.prefill else f"{cell.tokens_per_second:13.1f}"


def _lookup_cell(results: Results, contestant: Contestant, task: Task) -> str:
    best = None if task.prefill else results.best([contestant], task.name, plain=False)
    if best is None:
        return " " * 13
    star = "*" if results.differs(contestant.name, best.setting, task.name) else ""
    short = "h" if best.setting.schedule.startswith("heuristic") else ""
    return f"{best.value:.1f}{star} k{best.setting.drafts}{short}".rjust(13)


def _ratios_table(results: Results) -> Iterator[str]:
    yield "Ratios: ours to the best peer's best setting, above 1 ours is faster (tokens per second)"
    for ratio in results.ratios():
        ours, peer = ratio["our_tokens_per_second"], ratio["peer_tokens_per_second"]
        yield (
            f"{ratio['ours']:22} against {ratio['against']:7} {ratio['what']:14}"
            f" {ratio['ratio']:6.2f}   {ours:8.2f} ({ratio['our_setting']})"
            f"   {peer:8.2f} {ratio['peer']} ({ratio['peer_setting']})"
        )


def _notes(results: Results) -> Iterator[str]:
    for name, why in results.measured.failed.items():
        yield f"failed: {name}: {why}"
    errors = {
        f"{name}, {setting.label}, {task}: {cell.error}": None
        for (name, setting, task), cell in results.measured.cells.items()
        if cell.error is not None and name not in results.measured.failed
    }
    yield from (f"failed: {error}" for error in errors)
    unstable = sum(cell.unstable for cell in results.measured.cells.values())
    if unstable:
        yield f"not the same tokens in every round: {unstable} cells, named in the JSON file"
    loads = {name: load for name, load in results.measured.idle_load.items() if load > SPINNING}
    for name, load in loads.items():
        yield f"not idle while others worked: {name} used {load:.0%} of a core"
    if not loads:
        yield f"idle workers used less than {SPINNING:.0%} of a core each"


def _row(name: str, precision: str, cells: Iterable[str]) -> str:
    return f"{name:22}{precision:7}" + "".join(cells)
