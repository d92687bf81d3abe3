"""The report of ``specrun bench`` for people: 80 columns, unless the labels are long ones."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bench_report import BenchReport, ContestantResult, WorkloadResult
from specrun.cli_errors import with_flags

NOTHING = "-"
COLUMNS = ("", "tok/s", "decode", "first ms", "accept", "tok/step", "x plain", "same")
NUMBERS = (6, 6, 8, 6, 8, 7, 8)  # characters of the columns behind the first, of all workloads


def table(report: BenchReport) -> str:
    """All of the report, in blocks of lines."""
    widest = max(len(contestant.label) for contestant in report.contestants)
    blocks = [_heading(report), _steps(report)]
    blocks += [_workload(work, widest) for work in report.workloads]
    blocks += [_drafts(report), _overall(report), _notes(report)]
    return "\n\n".join(block for block in blocks if block)


def same(result: ContestantResult) -> str:
    """How many tokens are plain decoding's."""
    return f"{result.same_tokens} of {result.check.emitted}" if result.differs else "all"


def _heading(report: BenchReport) -> str:
    machine, folder, options = report.machine, report.folder, report.options
    width = folder.exact_width
    mode = "not exact" if width is None else f"exact in blocks of {width}"
    lines = [
        f"{machine.cpu}, {count(machine.threads, 'thread')}, {machine.device},"
        f" onnxruntime {machine.onnxruntime}",
        f"{folder.target} ({folder.architecture}), {folder.precision}, {mode}",
        f"{options.max_new_tokens} new tokens, greedy; medians of {count(options.rounds, 'round')}",
    ]
    if prefill := report.prefill:
        rate = speed(prefill.tokens_per_second)
        lines.append(f"prefill of {count(prefill.tokens, 'token')}: {rate} tok/s")
    if report.read_bandwidth:
        lines.append(f"memory read at {report.read_bandwidth / 1e9:.1f} GB/s")
    return "\n".join(lines)


def _steps(report: BenchReport) -> str:
    steps = report.steps
    if steps is None:
        return ""
    one = steps.median(1)
    rows = [
        (str(width), f"{steps.median(width) * 1e3:.2f}", f"{steps.median(width) / one:.2f}")
        for width in steps.seconds
    ]
    lines = [f"target step behind {count(steps.context_length, 'token')}"]
    lines += columned([("rows", "ms", "x one row"), *rows])
    floor, share = report.step_floor, report.share_of_ceiling
    if floor is not None and share is not None and steps.weight_bytes is not None:
        lines.append(
            f"floor {floor * 1e3:.2f} ms, {steps.weight_bytes / 1e6:.1f} MB of weights at the speed"
            f" of memory: {share:.0%} of one row"
        )
    return "\n".join(lines)


def _workload(work: WorkloadResult, widest: int) -> str:
    rows = [cells(work, item) for item in work.results]
    lines = columned([COLUMNS, *rows], least=(widest, *NUMBERS))
    return "\n".join([f"{work.name}, prompt of {count(work.prompt_tokens, 'token')}", *lines])


def cells(work: WorkloadResult, item: ContestantResult) -> tuple[str, ...]:
    """A row of the table, by COLUMNS."""
    found, ratio = item.medians, work.ratio(item)
    plain = item.contestant.method == "plain"
    verdict = NOTHING if plain and not item.differs else same(item)
    if found is None or ratio is None:
        return (item.contestant.label, *[NOTHING] * 6, verdict)
    return (
        item.contestant.label,
        speed(found.tokens_per_second),
        speed(found.decode_tokens_per_second),
        f"{found.first_token_seconds * 1e3:.0f}",
        NOTHING if plain else f"{found.acceptance:.0%}",
        f"{found.tokens_per_target_step:.2f}",
        f"{ratio:.2f}",
        verdict,
    )


def _drafts(report: BenchReport) -> str:
    if not report.drafts or report.steps is None:
        return ""
    one = report.steps.median(1)
    rows = [
        (
            cost.contestant.label,
            f"{cost.draft_seconds * 1e3:.2f}",
            f"{cost.draft_seconds / one:.2f}",
            f"{cost.verify_seconds * 1e3:.2f}",
            f"{cost.share_of_round:.0%}",
        )
        for cost in report.drafts
    ]
    heads = ("", "draft ms", "x one-row step", "verify ms", "draft's share")
    return "\n".join(["rounds that drafted", *columned([heads, *rows])])


def _overall(report: BenchReport) -> str:
    if len(report.workloads) < 2 or not report.overall:
        return ""
    rows = [(label, f"{ratio:.2f}") for label, ratio in report.overall.items()]
    return "\n".join(["all workloads, geometric mean", *columned([("", "x plain"), *rows])])


def _notes(report: BenchReport) -> str:
    notes = list(report.notes)
    if not report.complete:
        notes.insert(0, "not complete: medians of what was measured until then")
    return "\n".join(f"note: {with_flags(note)}" for note in notes)


def count(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def speed(value: float) -> str:
    """Tokens per second."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def columned(rows: Sequence[Sequence[str]], least: Sequence[int] | None = None) -> list[str]:
    """Columns as wide as they must be, or ``least``: labels to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if least is not None:
        widths = [max(pair) for pair in zip(widths, least, strict=True)]
    labelled = rows[0][0] == ""
    return [
        "  ".join(
            cell.ljust(width) if labelled and place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
