"""Progress bars of an export: on a terminal only, on stderr, quiet elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from specexport.exporter import Progress

LABELS = {
    "reference": "Running transformers for comparison",
    "trace": "Tracing",
    "write": "Writing weights",
    "check": "Comparing engines",
}


@contextlib.contextmanager
def bars(*, quiet: bool) -> Iterator[Progress | None]:
    """A callback that draws one bar per stage; None where nobody would see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    label = TextColumn("{task.description}")
    steps = Progress(label, BarColumn(), MofNCompleteColumn(), console=console)
    sizes = Progress(
        label,
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        group = sizes if stage == "write" else steps
        if stage not in tasks:
            (steps if group is sizes else sizes).stop()
            group.start()
            tasks[stage] = group.add_task(LABELS.get(stage, stage), total=total)
        group.update(tasks[stage], completed=done)

    try:
        yield report
    finally:
        steps.stop()
        sizes.stop()
