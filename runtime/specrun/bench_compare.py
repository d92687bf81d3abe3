"""Two reports of ``specrun bench`` side by side, and what forbids to compare them.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specrun.bench_report import BenchReport, ContestantResult, Medians, WorkloadResult
from specrun.bench_table import NOTHING, columned, count, speed
from specrun.decode import encode

Verdict = Literal["faster", "slower", "same", "unknown", "unsteady"]
HEADS = ("", "tok/s", "now", "x", "x plain", "now", "accept", "now", "")
LEAST_ROUNDS = 3  # with 2, one time in 3 all runs of the one are faster by mere chance
STEADY = 0.05  # that plain decoding may change where nothing did
SAID = {
    "faster": "faster",
    "slower": "slower",
    "same": "within spread",
    "unknown": NOTHING,  # too few rounds
    "unsteady": "not steady",  # plain decoding changed as well, and nothing that could be why
}


@dataclass(frozen=True)
class Pair:
    """One contestant on one workload in both reports. ``*_ratio``: its tokens per second over those
    of plain decoding in the same report."""

    workload: str
    label: str
    before: Medians
    after: Medians
    before_ratio: float | None
    after_ratio: float | None
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        """Tokens per second, after over before."""
        old = self.before.tokens_per_second
        return self.after.tokens_per_second / old if old else None


@dataclass(frozen=True)
class Comparison:
    """``pairs``: what both have measured. ``differences``: in what the runs differ beside what is
    measured, each with both values. ``notes``: what follows from that, and what is left out."""

    before: BenchReport
    after: BenchReport
    pairs: tuple[Pair, ...]
    differences: dict[str, tuple[str, str]]
    notes: tuple[str, ...]

    @property
    def same_machine(self) -> bool:
        """Whether the ratios say something about a change, not about two machines."""
        return not self.differences.keys() & {"processor", "threads", "device"}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "same_machine": self.same_machine,
            "differences": encode(self.differences),
            "pairs": [{**encode(pair), "ratio": pair.ratio} for pair in self.pairs],
            "notes": list(self.notes),
        }


def compare(before: BenchReport, after: BenchReport) -> Comparison:
    """Match contestants by workload and label."""
    matching = _Matching(before, after)
    pairs = matching.pairs()
    differences = _differences(before, after)
    drifted: dict[str, float] = {}
    if not differences.keys() & CHANGES_PLAIN:
        drifted = {
            pair.workload: pair.ratio
            for pair in pairs
            if pair.label == "plain" and pair.ratio and abs(pair.ratio - 1) > STEADY
        }
    pairs = [
        replace(pair, verdict="unsteady")
        if pair.workload in drifted and pair.verdict != "unknown"
        else pair
        for pair in pairs
    ]
    found = Comparison(before, after, tuple(pairs), differences, ())
    return replace(found, notes=(*_warnings(found, drifted), *matching.notes))


def table(comparison: Comparison) -> str:
    """For people: what differs, one table for each workload, notes."""
    blocks = [_differing(comparison)]
    names = dict.fromkeys(pair.workload for pair in comparison.pairs)
    for name in names:
        rows = [row(pair) for pair in comparison.pairs if pair.workload == name]
        blocks.append("\n".join([name, *columned([HEADS, *rows])]))
    blocks.append("\n".join(f"note: {note}" for note in comparison.notes))
    return "\n\n".join(block for block in blocks if block)


def row(pair: Pair) -> tuple[str, ...]:
    """A pair as the table has it."""
    old, new = pair.before, pair.after
    plain = pair.label == "plain"
    return (
        pair.label,
        speed(old.tokens_per_second),
        speed(new.tokens_per_second),
        _times(pair.ratio),
        _times(pair.before_ratio),
        _times(pair.after_ratio),
        NOTHING if plain else f"{old.acceptance:.0%}",
        NOTHING if plain else f"{new.acceptance:.0%}",
        SAID[pair.verdict],
    )


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.2f}"


def verdict(before: ContestantResult, after: ContestantResult) -> Verdict:
    """Faster or slower only where no run of the one is as fast as one of the other."""
    old = [run.tokens_per_second for run in before.runs]
    new = [run.tokens_per_second for run in after.runs]
    if min(len(old), len(new)) < LEAST_ROUNDS:
        return "unknown"
    if min(new) > max(old):
        return "faster"
    return "slower" if max(new) < min(old) else "same"


@dataclass
class _Matching:
    before: BenchReport
    after: BenchReport
    notes: list[str] = field(default_factory=list)

    def pairs(self) -> list[Pair]:
        """What both have; ``notes`` gets the rest."""
        old, new = ({work.name: work for work in r.workloads} for r in (self.before, self.after))
        self._only("workload", set(old), set(new))
        found: list[Pair] = []
        for name in [name for name in old if name in new]:
            texts = [dict(r.options.prompts).get(name) for r in (self.before, self.after)]
            if texts[0] != texts[1]:
                self.notes.append(f"workload {name} is left out: its prompt is another text")
                continue
            counts = old[name].prompt_tokens, new[name].prompt_tokens
            if counts[0] != counts[1]:
                self.notes.append(f"the prompt of {name} had {counts[0]} tokens, now {counts[1]}")
            results = [
                {item.contestant.label: item for item in work.results if item.medians is not None}
                for work in (old[name], new[name])
            ]
            self._only(f"{name}:", set(results[0]), set(results[1]))
            found += [
                _pair(old[name], new[name], item, results[1][label])
                for label, item in results[0].items()
                if label in results[1]
            ]
        if not found:
            self.notes.insert(0, "the two have nothing in common that could be compared")
        return found

    def _only(self, what: str, old: set[str], new: set[str]) -> None:
        for names, where in ((old - new, "before"), (new - old, "now")):
            if names:
                self.notes.append(f"{what} {', '.join(sorted(names))}: only {where}")


def _pair(
    old: WorkloadResult, new: WorkloadResult, before: ContestantResult, after: ContestantResult
) -> Pair:
    assert before.medians is not None and after.medians is not None
    return Pair(
        workload=old.name,
        label=before.contestant.label,
        before=before.medians,
        after=after.medians,
        before_ratio=old.ratio(before),
        after_ratio=new.ratio(after),
        verdict=verdict(before, after),
    )


def identity(report: BenchReport) -> dict[str, str]:
    """What a run was made with, by name."""
    machine, folder, options = report.machine, report.folder, report.options
    return {
        "processor": machine.cpu,
        "threads": str(machine.threads),
        "device": machine.device,
        "onnxruntime": machine.onnxruntime,
        "specrun": report.specrun or "not told",
        "target": folder.target,
        "architecture": folder.architecture,
        "precision": folder.precision,
        "fingerprint": folder.fingerprint or "not told",
        "exact width": str(folder.exact_width or "not exact"),
        "new tokens": str(options.max_new_tokens),
        "rounds": str(options.rounds),
    }


def _differences(before: BenchReport, after: BenchReport) -> dict[str, tuple[str, str]]:
    old, new = identity(before), identity(after)
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}


CHANGES_PLAIN = {"processor", "threads", "device", "onnxruntime", "specrun", "target", "precision"}
CHANGES_PLAIN |= {"fingerprint", "exact width", "new tokens"}


def _warnings(comparison: Comparison, drifted: dict[str, float]) -> list[str]:
    differing = comparison.differences.keys()
    found = []
    if not comparison.same_machine:
        found.append(
            "not the same machine, threads or device: the speeds compare those, not a change of"
            " software or model"
        )
    if differing & {"target", "architecture"}:
        found.append("not the same model: acceptance and speed are of other texts")
    elif differing & {"precision", "fingerprint", "exact width"}:
        found.append("not the same engines: the texts, and so acceptance, may be others")
    if "new tokens" in differing:
        found.append("not as many new tokens: speeds with the prompt's run are not comparable")
    if any(pair.verdict == "unknown" for pair in comparison.pairs):
        found.append(f"fewer than {LEAST_ROUNDS} rounds do not tell a change from chance")
    if drifted:
        listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in drifted.items())
        found.append(
            f"plain decoding changed by itself (times: {listed}): the machine was not as busy in"
            " both; x plain is what to look at"
        )
    for report, name in ((comparison.before, "before"), (comparison.after, "now")):
        if not report.complete:
            found.append(f"{name}: the benchmark was not complete")
        if report.differing:
            labels = sorted({item.contestant.label for _, item in report.differing})
            found.append(f"{name}: tokens other than plain decoding's: {', '.join(labels)}")
    return found


def _differing(comparison: Comparison) -> str:
    if not comparison.differences:
        return "the same machine, versions, engines and options"
    rows = [(name, *values) for name, values in comparison.differences.items()]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name:<{width}}  {old} -> {new}" for name, old, new in rows]
    total = count(len(lines), "difference")
    return "\n".join([f"{total} beside what is measured", *lines])
