"""The command ``specrun tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.cli_device import device_options
from specrun.cli_errors import reports_errors
from specrun.cli_folder import located
from specrun.cli_options import max_context_option, threads_option
from specrun.options import EngineOptions

if TYPE_CHECKING:
    from specrun.costs import StepCosts
    from specrun.tuning import Entry


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@threads_option
@max_context_option
@device_options
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write here instead of FOLDER/tuning.json, for a folder that is read-only.",
)
@click.option("--json", "as_json", is_flag=True, help="Write what was measured as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@reports_errors
def tune(
    folder: Path,
    threads: int | None,
    max_context: int | None,
    device: str,
    device_id: int,
    provider_library: str | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure what drafts and target steps cost on this device, for --schedule auto.

    Run it once, with nothing else running, and with the threads that generations will have. Takes
    about ten seconds per method and keeps what other devices and settings have measured.

    \b
    Examples:
      specrun tune engines/
      specrun tune engines/ --threads 2 --json
      specrun tune /mnt/readonly/engines --out tuning.json
    """
    options = EngineOptions(
        threads=threads,
        max_context=max_context,
        device=device,
        device_id=device_id,
        provider_library=provider_library,
    )
    from specrun.decode import encode
    from specrun.tune import tune as run

    def show(step: str, done: int, total: int) -> None:
        if step:
            click.echo(f"{done + 1}/{total} {step}", err=True)

    folder = located(folder, quiet=quiet)
    entry, path = run(folder, options=options, out=out, on_progress=None if quiet else show)
    if not quiet:
        click.echo(f"wrote {path}", err=True)
    click.echo(json.dumps(encode(entry), indent=2) if as_json else table(entry))


def table(entry: Entry) -> str:
    """For people: milliseconds, and how many tokens a round must give to be worth it."""
    machine = entry.machine
    lines = [
        f"{machine.cpu}, {machine.threads} threads, {machine.device},"
        f" onnxruntime {machine.onnxruntime}"
    ]
    for method, measured in entry.methods.items():
        for item in measured:
            costs = item.step_costs()
            counts = sorted({rows - 1 for rows, _ in item.verify_seconds})
            lines += ["", f"{method}, {item.context_length} tokens of context"]
            lines.append("drafts  draft ms  verify ms  pays from tokens per round")
            lines += [_row(costs, count) for count in counts]
    return "\n".join(lines)


def _row(costs: StepCosts, count: int) -> str:
    whole = costs.rounds(max(count, 1))
    draft, verify = costs.draft(count) * 1e3, costs.verify(1 + count) * 1e3
    return f"{count:6}  {draft:8.3f}  {verify:9.3f}  {whole[count] / whole[0]:8.2f}"
