"""Reports of ``specrun bench`` as pages: acceptance and speed by number of drafts and by method.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrun.bench_compare import Comparison, Pair, identity, row
from specrun.bench_report import BenchReport, Contestant, ContestantResult, WorkloadResult
from specrun.bench_table import COLUMNS, cells
from specrun.pages import charts, html
from specrun.pages.charts import Bar, Series

PAIR_HEADS = (
    *("method", "tok/s before", "now", "times", "times plain before", "now"),
    *("accepted before", "now", "verdict"),
)
PLAIN_IS_1 = "1 is plain decoding, the dotted line."


def page(report: BenchReport) -> str:
    """A report as HTML."""
    folder = report.folder
    body = (
        "<header>",
        html.tag("h1", "What drafting gains on this machine"),
        html.tag("p", html.escape(f"{folder.target}, {folder.precision}, {report.machine.cpu}")),
        *_warnings(report),
        html.tiles(_tiles(report)),
        "</header>",
        "<main>",
        _overall(report),
        *(_workload(report, work, number) for number, work in enumerate(report.workloads)),
        _costs(report),
        _facts("What ran", report, "ran"),
        "</main>",
    )
    return _document(f"Benchmark: {folder.target}", body)


def compared(comparison: Comparison) -> str:
    """Two reports as HTML."""
    names = dict.fromkeys(pair.workload for pair in comparison.pairs)
    body = (
        "<header>",
        html.tag("h1", "Two benchmarks compared"),
        html.tag("p", html.escape(_between(comparison))),
        *(html.tag("p", html.escape(note), class_="note") for note in comparison.notes),
        "</header>",
        "<main>",
        _differences(comparison),
        *(
            _pairs(name, [pair for pair in comparison.pairs if pair.workload == name], number)
            for number, name in enumerate(names)
        ),
        _facts("Before", comparison.before, "before"),
        _facts("Now", comparison.after, "now"),
        "</main>",
    )
    return _document("Two benchmarks compared", body)


def _document(title: str, body: Sequence[str]) -> str:
    return html.document(
        title, "\n".join(body), description="Speed and acceptance of speculative decoding"
    )


# One report.


def _warnings(report: BenchReport) -> list[str]:
    found = list(report.notes)
    if not report.complete:
        found.insert(0, "Not complete: medians of what was measured until then.")
    found += [
        f"{item.contestant.label} on {name} gave other tokens than plain decoding from token"
        f" {item.same_tokens + 1} on."
        for name, item in report.differing
    ]
    return [html.tag("p", html.escape(text), class_="note") for text in found]


def _tiles(report: BenchReport) -> list[tuple[str, str]]:
    found = []
    for label, ratio in list(report.overall.items())[:1]:
        found.append((f"times plain decoding, mean of all workloads: {label}", f"{ratio:.2f}"))
    best = _best(report)
    if best is not None:
        work, item, ratio = best
        found.append(
            (
                f"times plain decoding at best: {item.contestant.label} on {work.name}",
                f"{ratio:.2f}",
            )
        )
    if report.steps is not None:
        found.append(("a target step of one row", f"{report.steps.median(1) * 1e3:.2f} ms"))
    return found


def _best(report: BenchReport) -> tuple[WorkloadResult, ContestantResult, float] | None:
    ratios = [
        (work, item, ratio)
        for work in report.workloads
        for item in work.results
        if item.contestant.method != "plain" and (ratio := work.ratio(item)) is not None
    ]
    return max(ratios, key=lambda found: found[2], default=None)


def _overall(report: BenchReport) -> str:
    if len(report.workloads) < 2 or not report.overall:
        return ""
    by_label = {contestant.label: contestant for contestant in report.contestants}
    values = {by_label[label]: ratio for label, ratio in report.overall.items()}
    figures = [_by_drafts("Speed by drafts per round", values, SPEED), _bars(values)]
    return html.section("All workloads", _grid(figures), id_="all")


def _workload(report: BenchReport, work: WorkloadResult, number: int) -> str:
    measured = [item for item in work.results if item.medians is not None]
    drafting = [item for item in measured if item.contestant.method != "plain"]
    ratios = {item.contestant: ratio for item in drafting if (ratio := work.ratio(item))}
    figures = []
    if ratios:
        shares = {i.contestant: i.medians.acceptance for i in drafting if i.medians is not None}
        steps = {
            i.contestant: i.medians.tokens_per_target_step
            for i in drafting
            if i.medians is not None
        }
        figures = [
            _by_drafts("Speed by drafts per round", ratios, SPEED),
            _by_drafts("Acceptance by drafts per round", shares, ACCEPTANCE),
            _by_drafts("Tokens per target step", steps, STEPS),
            _bars(ratios),
        ]
    numbers = html.table(
        ("method", *COLUMNS[1:]), [cells(work, item) for item in work.results], work.name
    )
    return html.section(
        f"{work.name}, a prompt of {work.prompt_tokens} tokens",
        _grid(figures),
        numbers,
        id_=f"work{number}",
    )


class Kind:
    """What a chart by number of drafts shows."""

    def __init__(
        self, axis: str, show: Callable[[float], str], highest: float | None, level: float | None
    ) -> None:
        self.axis = axis
        self.show = show
        self.highest = highest
        self.level = level


SPEED = Kind("times plain", lambda value: f"{value:.2f}", None, 1.0)
ACCEPTANCE = Kind("share accepted", lambda value: f"{value:.0%}", 1.0, None)
STEPS = Kind("tokens per step", lambda value: f"{value:.2f}", None, 1.0)


def _by_drafts(title: str, values: dict[Contestant, float], kind: Kind) -> str:
    """One line for each method and schedule, over the number of drafts."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for contestant, value in values.items():
        name: str = contestant.method
        if contestant.schedule != "constant":
            name += f", {contestant.schedule.replace('_', '-')}"
        lines.setdefault(name, []).append((contestant.num_assistant_tokens, value))
    series = [Series(name, sorted(points)) for name, points in sorted(lines.items())]
    best = max(values, key=lambda contestant: values[contestant])
    text = f"Highest: {kind.show(values[best])} with {best.label}."
    if kind.level is not None:
        text += f" {PLAIN_IS_1}"
    svg = charts.lines(
        series,
        says=f"{title}. {text}",
        x_title=f"drafts per round ({kind.axis})",
        highest=kind.highest,
        level=kind.level,
        ticks=sorted({x for item in series for x, _ in item.points}),
    )
    rows = [(item.name, charts.number(x), kind.show(y)) for item in series for x, y in item.points]
    return html.figure(title, svg, text, ("method", "drafts", kind.axis), rows)


def _bars(ratios: dict[Contestant, float]) -> str:
    ordered = sorted(ratios.items(), key=lambda item: -item[1])
    items = [Bar("plain", 1.0, "1.00")]
    items += [Bar(contestant.label, ratio, f"{ratio:.2f}") for contestant, ratio in ordered]
    best, ratio = ordered[0]
    slower = sum(value < 1 for value in ratios.values())
    text = f"Fastest: {best.label}, {ratio:.2f} times plain decoding. {slower} slower than plain."
    svg = charts.rows(items, says=f"Speed by method. {text}")
    rows = [(item.label, item.shown) for item in items]
    return html.figure("Speed by method", svg, text, ("method", "times plain"), rows)


def _costs(report: BenchReport) -> str:
    steps = report.steps
    if steps is None:
        return ""
    points = [(float(rows), steps.median(rows) * 1e3) for rows in steps.seconds]
    one, last = points[0][1], points[-1]
    text = f"{last[0]:.0f} rows cost {last[1] / one:.2f} times one row."
    svg = charts.lines(
        [Series("a step of the target", points)],
        says=f"Milliseconds of a target step by rows. {text}",
        x_title="rows (milliseconds)",
        ticks=[x for x, _ in points],
    )
    rows = [(charts.number(x), f"{y:.2f}", f"{y / one:.2f}") for x, y in points]
    heads = ("rows", "ms", "times one row")
    figures = [html.figure("A target step by rows", svg, text, heads, rows)]
    if report.drafts:
        costs = [
            Bar(
                cost.contestant.label,
                cost.draft_seconds * 1e3,
                f"{cost.draft_seconds * 1e3:.2f} ms, {cost.share_of_round:.0%} of the round",
            )
            for cost in report.drafts
        ]
        text = "Median time that drafting took in a round that drafted."
        svg = charts.rows(costs, says=f"Cost of drafting. {text}")
        each = [(cost.label, f"{cost.value:.3f}") for cost in costs]
        figures.append(html.figure("Drafting", svg, text, ("method", "ms"), each))
    return html.section("Costs", _grid(figures), id_="costs")


def _grid(figures: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(figures)}</div>' if figures else ""


def _facts(title: str, report: BenchReport, id_: str) -> str:
    facts: dict[str, object] = dict(identity(report))
    facts["folder"] = report.folder.path
    facts["measured"] = report.measured or None
    if report.read_bandwidth:
        facts["memory read at"] = f"{report.read_bandwidth / 1e9:.1f} GB/s"
    if report.prefill is not None:
        tokens = f"{report.prefill.tokens} tokens"
        facts[f"prefill of {tokens}"] = f"{report.prefill.tokens_per_second:.0f} tokens/s"
    return html.section(title, html.definitions(facts), id_=id_)


# Two reports.


def _between(comparison: Comparison) -> str:
    texts = []
    for report in (comparison.before, comparison.after):
        texts.append(f"{report.folder.target} of {report.measured or 'an unknown day'}")
    return f"Before: {texts[0]}. Now: {texts[1]}."


def _differences(comparison: Comparison) -> str:
    rows = [(name, *values) for name, values in comparison.differences.items()]
    inner = (
        html.table(("", "before", "now"), rows, "What differs beside what is measured")
        if rows
        else "<p>Nothing: machine, versions, engines and options are the same.</p>"
    )
    return html.section("What differs", inner, id_="differs")


def _pairs(name: str, pairs: Sequence[Pair], number: int) -> str:
    both = [
        (pair.label, pair.before.tokens_per_second, pair.after.tokens_per_second) for pair in pairs
    ]
    faster = sum(pair.verdict == "faster" for pair in pairs)
    slower = sum(pair.verdict == "slower" for pair in pairs)
    text = f"{faster} faster, {slower} slower, of {len(pairs)}; the others within the spread."
    if any(pair.verdict == "unknown" for pair in pairs):
        text = "Too few rounds to tell a change from chance."
    elif any(pair.verdict == "unsteady" for pair in pairs):
        text = "Plain decoding changed as well: not the same load in both."
    svg = charts.pairs(both, says=f"Tokens per second before and now. {text}")
    rows = [(label, f"{old:.1f}", f"{new:.1f}") for label, old, new in both]
    speed = html.figure("Tokens per second", svg, text, ("method", "before", "now"), rows)
    drafting = [pair for pair in pairs if pair.label != "plain"]
    figures = [speed]
    if drafting:
        shares = [
            (pair.label, 100 * pair.before.acceptance, 100 * pair.after.acceptance)
            for pair in drafting
        ]
        changed = sum(pair.before.acceptance != pair.after.acceptance for pair in drafting)
        text = f"{changed} of {len(drafting)} changed. In percent."
        svg = charts.pairs(shares, says=f"Acceptance before and now. {text}")
        rows = [(label, f"{old:.1f}", f"{new:.1f}") for label, old, new in shares]
        figures.append(html.figure("Acceptance", svg, text, ("method", "before", "now"), rows))
    numbers = html.table(PAIR_HEADS, [row(pair) for pair in pairs], name)
    return html.section(name, _grid(figures), numbers, id_=f"pair{number}")
