"""The command ``specrun compare``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from specrun.cli_errors import reports_errors
from specrun.pages import files
from specrun.reading import printable


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the comparison as a page (.html), too.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON line instead of the table.")
@reports_errors
def compare(before: Path, after: Path, plot: Path | None, as_json: bool) -> None:
    """Compare two runs of specrun bench, from the files that its --json wrote.

    Every method on every workload that both have. What else differs (machine, versions, engines,
    options) is shown first, and what it forbids to conclude is a note. A method counts as faster
    or slower only where no run of the one is as fast as a run of the other.

    \b
    Examples:
      specrun compare before.json after.json
      specrun compare before.json after.json --plot compared.html
    """
    if plot is not None:
        files.check("--plot", plot)
    from specrun import bench_compare, bench_page, bench_read

    found = bench_compare.compare(bench_read.read(before), bench_read.read(after))
    if as_json:
        click.echo(json.dumps(found.as_dict(), ensure_ascii=False, allow_nan=False))
    else:
        click.echo(printable(bench_compare.table(found)))
    if plot is not None:
        files.write(plot, bench_page.compared(found))
