"""What ``specrun bench`` writes for later: reports read again, compared, and both as pages."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from accessible import violations
from browser import DESKTOP, opened
from click.testing import CliRunner
from test_bench import OWN, PAIR, measure, own, quick  # noqa: F401  two are fixtures

from specrun import UsageError, __version__, bench_compare, bench_page, bench_read
from specrun.bench_compare import Comparison, compare
from specrun.bench_report import BenchReport, ContestantResult
from specrun.cli import main
from specrun.decode import DecodeError
from specrun.pages import charts
from specrun.pages.charts import Bar, Series

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    import specrun

OpenToy = Callable[..., "specrun.Engine"]
NONE = dict.fromkeys(("prefill", "draft", "verify", "other"), 0.0)
SMALL: dict[str, Any] = {"num_assistant_tokens": (2, 4), "rounds": 3}


def call(*arguments: object) -> Any:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture
def report(open_toy: OpenToy) -> BenchReport:
    return measure(open_toy(PAIR), prompts=(*OWN, ("two", "345")), **SMALL)


def faster(report: BenchReport, label: str, times: float, **given: Any) -> BenchReport:
    """The same with all runs of ``label`` so many times as fast."""

    def changed(item: ContestantResult) -> ContestantResult:
        if item.contestant.label != label:
            return item
        runs = [
            dataclasses.replace(run, seconds={k: v / times for k, v in run.seconds.items()})
            for run in item.runs
        ]
        return dataclasses.replace(item, runs=tuple(runs))

    workloads = tuple(
        dataclasses.replace(work, results=tuple(map(changed, work.results)))
        for work in report.workloads
    )
    return dataclasses.replace(report, workloads=workloads, **given)


def steady(report: BenchReport) -> BenchReport:
    """The same with runs that took 1, 1.1 and 1.2 seconds, whoever made them."""

    def changed(item: ContestantResult) -> ContestantResult:
        runs = [
            dataclasses.replace(run, seconds={**NONE, "verify": 1 + at / 10})
            for at, run in enumerate(item.runs)
        ]
        return dataclasses.replace(item, runs=tuple(runs))

    workloads = tuple(
        dataclasses.replace(work, results=tuple(map(changed, work.results)))
        for work in report.workloads
    )
    return dataclasses.replace(report, workloads=workloads)


# Reports that are read again.


def test_what_was_written_is_read_again(report: BenchReport, tmp_path: Path) -> None:
    text = json.dumps(report.as_dict())
    assert bench_read.report(json.loads(text)) == report
    (tmp_path / "bench.json").write_text(text)
    assert bench_read.read(tmp_path / "bench.json") == report
    assert report.specrun == __version__ and report.folder.fingerprint
    assert report.measured.endswith("+00:00")


def test_a_report_that_was_interrupted_and_an_old_one(report: BenchReport) -> None:
    part = dataclasses.replace(report, complete=False, steps=None, prefill=None, workloads=())
    data = json.loads(json.dumps(part.as_dict()))
    assert bench_read.report(data) == part
    for owner, names in ((data, ("specrun", "measured")), (data["folder"], ("fingerprint",))):
        for name in names:
            del owner[name]
    old = bench_read.report(data)
    assert (old.specrun, old.measured, old.folder.fingerprint) == ("", "", "")
    assert compare(old, part).differences == {
        "specrun": ("not told", __version__),
        "fingerprint": ("not told", report.folder.fingerprint),
    }


NO_REPORT = "is no report of specrun bench"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", f"{NO_REPORT}: there are no workloads in it$"),
        ("{}", f"{NO_REPORT}: there are no workloads in it$"),
        ('{"machine": {"cpu": "x"}, "text": "x"}', f"{NO_REPORT}: there are no workloads in it$"),
        ('{"workloads": [], "machine": {}}', f"{NO_REPORT}: it has no read_bandwidth$"),
        ('{"workloads": [], "machine": 3}', f"{NO_REPORT}: a list, an object or a number"),
    ],
)
def test_files_that_are_no_reports(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(f"{file}: ") + ".*" + says) as caught:
        bench_read.read(file)
    assert "--json" in str(caught.value.hint)


def remove_phase(data: Any) -> None:
    del data["workloads"][0]["results"][1]["runs"][0]["seconds"]["prefill"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.update(complete="yes"), "complete: must be bool, got 'yes'"),
        (lambda data: data.update(more=1), "field must be one of .*, got 'more'"),
        (lambda data: data["steps"]["seconds"].update(many=[1.0]), "got 'many'"),
        (lambda data: data["steps"]["seconds"].pop("1"), "those of one row among them"),
        (lambda data: data["steps"]["seconds"]["5"].clear(), "must hold times"),
        (lambda data: data["prefill"]["seconds"].clear(), "prefill.seconds: is empty"),
        (lambda data: data["options"].update(rounds=0), "rounds: must be a whole number"),
        (remove_phase, "seconds: must be those of"),
    ],
)
def test_fields_that_are_wrong(
    report: BenchReport, change: Callable[[Any], object], says: str
) -> None:
    data = json.loads(json.dumps(report.as_dict()))
    change(data)
    with pytest.raises(DecodeError, match=says):
        bench_read.report(data)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = call("compare", tmp_path / "a.json", tmp_path / "b.json")
    assert result.exit_code == 2 and "a.json: No such file" in result.stderr
    assert "hint: give a file that specrun bench --json wrote" in result.stderr


# Two reports.


def test_nothing_changed(report: BenchReport) -> None:
    found = compare(report, report)
    assert found.differences == {} and found.same_machine and found.notes == ()
    assert [(pair.workload, pair.label) for pair in found.pairs] == [
        (work.name, item.contestant.label) for work in report.workloads for item in work.results
    ]
    assert {(pair.ratio, pair.verdict) for pair in found.pairs} == {(1.0, "same")}
    assert bench_compare.table(found).startswith("the same machine, versions, engines and options")


def test_one_method_is_faster(report: BenchReport) -> None:
    before = steady(report)
    after = faster(faster(before, "mtp-drafter 2", 2.0), "prompt-lookup 4", 0.5)
    after = faster(after, "prompt-lookup 2", 1.05)
    found = compare(before, after)
    verdicts = {pair.label: pair.verdict for pair in found.pairs}
    assert verdicts == {
        "plain": "same", "mtp-drafter 2": "faster", "mtp-drafter 4": "same",
        "prompt-lookup 2": "same", "prompt-lookup 4": "slower",
    }  # fmt: skip
    changed = next(pair for pair in found.pairs if pair.label == "mtp-drafter 2")
    assert changed.ratio == pytest.approx(2.0)
    assert changed.before_ratio == 1.0 and changed.after_ratio == pytest.approx(2.0)
    line = next(x for x in bench_compare.table(found).splitlines() if x.startswith("mtp-drafter 2"))
    assert line.split()[-1] == "faster" and " 2.00 " in line
    assert found.notes == ()


def test_a_machine_that_was_busy(report: BenchReport) -> None:
    """Plain decoding is the same in both; where it changed, something else did."""
    before = steady(report)
    after = before
    for label in ("plain", "mtp-drafter 2"):
        after = faster(after, label, 1.5)
    found = compare(before, after)
    (note,) = found.notes
    assert note.startswith("plain decoding changed by itself (times: own 1.50, two 1.50)")
    assert {pair.verdict for pair in found.pairs} == {"unsteady"}
    assert "Plain decoding changed as well" in bench_page.compared(found)
    newer = dataclasses.replace(after, specrun="9.9")
    newer_found = compare(before, newer)
    assert newer_found.notes == ()  # that may be why
    assert {pair.verdict for pair in newer_found.pairs} == {"faster", "same"}


def test_another_machine_version_folder_and_option(report: BenchReport) -> None:
    machine = dataclasses.replace(report.machine, cpu="another", onnxruntime="9")
    folder = dataclasses.replace(report.folder, fingerprint="f" * 16, precision="int8")
    options = dataclasses.replace(report.options, max_new_tokens=13)
    other = dataclasses.replace(
        report, machine=machine, folder=folder, options=options, specrun="9.9", complete=False
    )
    found = compare(report, other)
    assert not found.same_machine
    assert found.differences == {
        "processor": (report.machine.cpu, "another"),
        "onnxruntime": (report.machine.onnxruntime, "9"),
        "specrun": (__version__, "9.9"),
        "precision": ("fp32", "int8"),
        "fingerprint": (report.folder.fingerprint, "f" * 16),
        "new tokens": ("12", "13"),
    }
    assert [note.partition(":")[0] for note in found.notes] == [
        "not the same machine, threads or device",
        "not the same engines",
        "not as many new tokens",
        "now",
    ]
    shown = bench_compare.table(found)
    assert shown.startswith("6 differences beside what is measured\n")
    assert f"specrun      {__version__} -> 9.9" in shown
    model = dataclasses.replace(report.folder, target="other")
    notes = compare(report, dataclasses.replace(report, folder=model)).notes
    assert notes == ("not the same model: acceptance and speed are of other texts",)


def test_what_only_one_of_them_has(open_toy: OpenToy) -> None:
    engine = open_toy(PAIR)
    before = measure(engine, prompts=(("a", "12"), ("b", "3")), **SMALL)
    given = SMALL | {"num_assistant_tokens": (2,)}
    after = measure(engine, prompts=(("a", "12"), ("b", "4"), ("c", "5")), **given)
    found = compare(before, after)
    assert {pair.workload for pair in found.pairs} == {"a"}
    assert {pair.label for pair in found.pairs} == {"plain", "mtp-drafter 2", "prompt-lookup 2"}
    notes = [note for note in found.notes if "plain decoding changed" not in note]
    assert notes == [
        "workload c: only now",
        "a: mtp-drafter 4, prompt-lookup 4: only before",
        "workload b is left out: its prompt is another text",
    ]
    nothing = compare(before, dataclasses.replace(after, workloads=()))
    assert nothing.pairs == () and "nothing in common" in " ".join(nothing.notes)


def test_a_round_or_two_tell_nothing(open_toy: OpenToy) -> None:
    report = measure(open_toy(PAIR), num_assistant_tokens=(2,), rounds=2)
    found = compare(report, report)
    assert {pair.verdict for pair in found.pairs} == {"unknown"}
    assert found.notes == ("fewer than 3 rounds do not tell a change from chance",)


def test_lines_of_80_columns(report: BenchReport) -> None:
    shown = bench_compare.table(compare(report, report))
    assert all(len(line) <= 80 for line in shown.splitlines())


# The commands.


def test_bench_writes_a_page(
    toy_folder: Callable[..., Path],
    own: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    file = tmp_path / "bench.html"
    result = call("bench", toy_folder(PAIR), *own, "--json", "--plot", file)
    assert (result.exit_code, result.stderr) == (0, "")
    report = bench_read.report(json.loads(result.stdout))
    assert file.read_text("utf-8") == bench_page.page(report)


def test_an_interrupted_bench_writes_what_there_is(
    toy_folder: Callable[..., Path],
    own: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from specrun.bench import Benchmark

    def interrupted(self: Benchmark) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Benchmark, "_measure_bandwidth", interrupted)
    file = tmp_path / "bench.html"
    result = call("bench", toy_folder(PAIR), *own, "--plot", file)
    assert result.exit_code == 130
    assert "Not complete: medians of what was measured until then." in file.read_text("utf-8")


def test_a_page_that_cannot_be_written_is_an_error_first(tmp_path: Path) -> None:
    for command in (["bench", tmp_path], ["compare", "a.json", "b.json"]):
        result = call(*command, "--plot", tmp_path / "nowhere" / "out.html")
        assert result.exit_code == 2
        assert result.stderr.startswith("Error: --plot: ") and "cannot be written" in result.stderr


def test_compare(report: BenchReport, tmp_path: Path) -> None:
    before, after, page = (tmp_path / name for name in ("before.json", "after.json", "page.html"))
    before.write_text(json.dumps(report.as_dict()))
    after.write_text(json.dumps(faster(report, "plain", 3.0).as_dict()))
    result = call("compare", before, after, "--plot", page)
    assert result.exit_code == 0 and "\nplain " in result.stdout
    assert "<h1>Two benchmarks compared</h1>" in page.read_text("utf-8")
    data = json.loads(call("compare", before, after, "--json").stdout)
    assert data["same_machine"] is True and data["pairs"][0]["ratio"] == pytest.approx(3.0)


# The pages.


def names_in(svg: str) -> list[str]:
    """All texts of a chart, which must be well-formed."""
    root = ElementTree.fromstring(svg)
    return [text.text or "" for text in root.iter("text")]


def test_figures_of_a_report(report: BenchReport) -> None:
    shown = bench_page.page(report)
    figures = re.findall(r"<h3>(.*?)</h3>", shown)
    each = ["Speed by drafts per round", "Acceptance by drafts per round"]
    each += ["Tokens per target step", "Speed by method"]
    assert figures == [each[0], each[3], *each, *each, "A target step by rows", "Drafting"]
    charts_ = re.findall(r"<svg.*?</svg>", shown, re.S)
    assert len(charts_) == len(figures)
    texts = [names_in(svg) for svg in charts_]
    assert {"mtp-drafter", "prompt-lookup", "2", "4"} <= set(texts[2])
    plain, *others = texts[5][::2]
    assert plain == "plain" and len(others) == 4
    for work in report.workloads:
        assert f"{work.name}, a prompt of {work.prompt_tokens} tokens" in shown


def test_numbers_of_figures_are_the_report_s(report: BenchReport) -> None:
    shown = bench_page.page(report)
    for work in report.workloads:
        for item in work.results[1:]:
            assert item.medians is not None
            drafts = item.contestant.num_assistant_tokens
            cells = f"<td>{drafts}</td><td>{item.medians.acceptance:.0%}</td>"
            assert f'<th scope="row">{item.contestant.method}</th>{cells}' in shown


def test_plain_alone_and_texts_that_are_code(open_toy: OpenToy) -> None:
    report = measure(open_toy(PAIR), prompts=(("<script>", "12"),), methods=("plain",), rounds=1)
    shown = bench_page.page(dataclasses.replace(report, notes=("<b>note</b>",)))
    assert "<script" not in shown and "&lt;script&gt;, a prompt of 2 tokens" in shown
    assert "<b>" not in shown and "Speed by method" not in shown
    assert "script-src &#x27;none&#x27;" in shown


def test_axes_and_labels() -> None:
    assert [charts.nice(value) for value in (0, 0.9, 1, 1.2, 2.88, 7, 97)] == [
        1,
        1,
        1,
        1.5,
        3,
        8,
        100,
    ]
    assert [charts.number(value) for value in (3.0, 2.345, 0.5)] == ["3", "2.35", "0.5"]
    none = [
        charts.bars([], says="", x_title=""), charts.rows([], says=""), charts.pairs([], says=""),
        charts.lines([], says="", x_title=""),
    ]  # fmt: skip
    one = [
        charts.bars([Bar("<1>", 0.0, "&")], says='"', x_title=""),
        charts.lines([Series("one", [(4.0, 2.0)])], says="", x_title=""),
        charts.pairs([("<a>", 0.0, 0.0)], says=""),
    ]
    for svg in (*none, *one):
        assert "nan" not in svg
        names_in(svg)
    many = charts.bars([Bar(str(at), 1.0, "100%") for at in range(64)], says="", x_title="")
    assert len(names_in(many)) < 20  # labels that do not touch
    tall = ElementTree.fromstring(charts.bars([Bar("a", 0.5, "")], says="", x_title="", highest=1))
    (bar,) = tall.iter("rect")
    whole = charts.HEIGHT - charts.BOTTOM - charts.TOP
    assert float(bar.attrib["height"]) == pytest.approx(whole / 2)


@pytest.mark.parametrize("size", [(360, 740), DESKTOP], ids=["phone", "desktop"])
def test_in_a_browser(
    browser: Browser, report: BenchReport, tmp_path: Path, size: tuple[int, int]
) -> None:
    comparison: Comparison = compare(report, faster(report, "plain", 2.0))
    for name, text in (("one", bench_page.page(report)), ("two", bench_page.compared(comparison))):
        file = tmp_path / f"{name}.html"
        file.write_text(text, encoding="utf-8")
        with opened(browser, size) as page:
            page.goto(file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
            assert violations(page) == []
            figures = page.locator("figure")
            assert figures.count() == page.get_by_role("img").count() >= 4
            figures.first.locator("summary").click()
            assert figures.first.locator("table").is_visible()
            assert page.locator("h1").count() == 1 and page.get_by_role("main").count() == 1
            for at in range(figures.count()):
                chart, box = (part.bounding_box() for part in (page.get_by_role("img").nth(at),
                                                               figures.nth(at)))  # fmt: skip
                assert chart is not None and box is not None
                assert chart["x"] >= box["x"] and chart["width"] <= box["width"]
