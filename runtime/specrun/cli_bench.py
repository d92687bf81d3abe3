"""The command ``specrun bench``."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bench_report import CONTESTANTS, BenchOptions
from specrun.bench_table import same, table
from specrun.bench_workloads import WORKLOADS
from specrun.cli_device import cuda_graph_option, device_options
from specrun.cli_errors import INTERRUPTED, reports_errors
from specrun.cli_folder import located
from specrun.cli_options import max_context_option, threads_option
from specrun.errors import SpecrunError
from specrun.options import SCHEDULES, EngineOptions
from specrun.pages import files

if TYPE_CHECKING:
    from specrun.bench_report import BenchReport
    from specrun.engine import Engine

BENCH = BenchOptions()
ENGINE = EngineOptions()
DASHED = {"token_normalize_func": lambda name: name.replace("_", "-")}


@click.command(context_settings=DASHED)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--workload",
    "workloads",
    type=click.Choice(tuple(WORKLOADS)),
    multiple=True,
    help="Built-in prompt; repeatable.  [default: all, or none with --prompt-file]",
)
@click.option(
    "--prompt-file",
    "prompt_files",
    multiple=True,
    help="Prompt of your own, - for stdin; repeatable.",
)
@click.option(
    "--method",
    "methods",
    type=click.Choice(CONTESTANTS),
    multiple=True,
    help="Against plain; repeatable.  [default: all of the folder, and prompt-lookup]",
)
@click.option(
    "-k",
    "--num-assistant-tokens",
    type=int,
    multiple=True,
    help="Tokens drafted per round; repeatable.  [default: the drafter's own and twice that;"
    " prompt-lookup 4, 8 and 16]",
)
@click.option(
    "--schedule",
    "schedules",
    type=click.Choice([name.replace("_", "-") for name in SCHEDULES]),
    default=BENCH.schedules,
    multiple=True,
    help="How that number changes; repeatable.  [default: constant]",
)
@click.option(
    "-n",
    "--max-new-tokens",
    type=int,
    default=BENCH.max_new_tokens,
    show_default=True,
    help="Tokens of every generation; end ids are ignored.",
)
@click.option(
    "--rounds",
    type=int,
    default=BENCH.rounds,
    show_default=True,
    help="Timed generations of every method on every workload.",
)
@threads_option
@max_context_option
@device_options
@cuda_graph_option
@click.option("--exact", is_flag=True, help="Open the folder in exact mode; see specrun run.")
@click.option(
    "--exact-width",
    type=int,
    default=ENGINE.exact_width,
    show_default=True,
    help="Rows of every run of the target then.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Tokens other than plain's, or a drafter that fails, are an error (exit 1).",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a page (.html) of acceptance and speed by drafts and method, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Write all that was measured as a JSON line.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@reports_errors
def bench(
    folder: Path,
    prompt_files: tuple[str, ...],
    threads: int | None,
    max_context: int | None,
    device: str,
    device_id: int,
    provider_library: str | None,
    cuda_graph: bool,
    exact: bool,
    exact_width: int,
    plot: Path | None,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Compare the methods of FOLDER with plain decoding on this device.

    Every method first generates once on every workload, and its tokens are compared with plain's;
    then all take turns and are timed. Run it with nothing else running. Ctrl-C ends it and shows
    what was measured by then.

    \b
    Examples:
      specrun bench engines/
      specrun bench engines/ --workload chat --workload code --method prompt-lookup -k 8
      specrun bench engines/ --prompt-file question.txt -n 256 --rounds 3 --json > bench.json
      specrun bench engines/ -k 1 -k 2 -k 4 -k 8 --plot bench.html
    """
    if plot is not None:
        files.check("--plot", plot)
    engine_options = EngineOptions(
        threads=threads,
        max_context=max_context,
        device=device,
        device_id=device_id,
        provider_library=provider_library,
        cuda_graph=cuda_graph,
        exact=exact,
        exact_width=exact_width,
    )
    options = BenchOptions(prompts=tuple((_name(f), _read(f)) for f in prompt_files), **given)
    import specrun
    from specrun import manifest
    from specrun.resolve import engines_only

    folder = located(folder, quiet=quiet)
    engine_options = engines_only(engine_options, manifest.read(folder, drafters_may_miss=True))
    try:
        with specrun.load(folder, options=engine_options) as engine:
            report = _measure(engine, options, plot=plot, as_json=as_json, quiet=quiet)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise SystemExit(INTERRUPTED) from None
    if options.strict:
        _check_same(report)


def _measure(
    engine: Engine, options: BenchOptions, *, plot: Path | None, as_json: bool, quiet: bool
) -> BenchReport:
    """Measure and show, what was measured before an interruption or an error too."""
    from specrun.bench import Benchmark

    benchmark = Benchmark(engine, options)
    progress = _Progress(shown=sys.stderr.isatty() and not quiet)
    try:
        benchmark.run(progress)
    finally:
        progress.clear()
        report = benchmark.report()
        if report.prefill is not None:
            _show(report, as_json)
            if plot is not None:
                _plot(report, plot)
    return report


def _show(report: BenchReport, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.as_dict(), ensure_ascii=False, allow_nan=False))
    else:
        click.echo(table(report))


def _plot(report: BenchReport, path: Path) -> None:
    from specrun import bench_page

    files.write(path, bench_page.page(report))


def _check_same(report: BenchReport) -> None:
    if report.differing:
        listed = "; ".join(
            f"{name}, {item.contestant.label}: {same(item)}" for name, item in report.differing
        )
        raise SpecrunError(
            f"tokens are other than plain decoding's (equal up to: {listed})",
            hint="at a near tie rounding decides, which --exact rules out; without --strict it is"
            " only shown",
        )


class _Progress:
    """One line on a terminal, written again and again."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._start = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._shown:
            return
        self.clear()
        if what:
            line = f"{done + 1}/{total} {what}{self._left(done, total)}"
            click.echo(line[: _columns()], nl=False, err=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            click.echo(f"\r{' ' * _columns()}\r", nl=False, err=True)

    def _left(self, done: int, total: int) -> str:
        if done < max(5, total // 20):
            return ""
        seconds = (time.monotonic() - self._start) / done * (total - done)
        return f", {seconds / 60:.0f} min left" if seconds > 90 else f", {seconds:.0f} s left"


def _columns() -> int:
    return max(1, shutil.get_terminal_size().columns - 1)


def _name(file: str) -> str:
    return "stdin" if file == "-" else file


def _read(file: str) -> str:
    from specrun.cli import _prompt

    return _prompt(None, file)
