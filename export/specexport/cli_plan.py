"""The command ``specexport plan``: what an export would write and cost, from configurations."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from specexport import cli_options
from specrun.cli_errors import reports_errors

if TYPE_CHECKING:
    from specexport.plan import ExportPlan
    from specexport.plan_costs import Costs

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@click.command()
@click.argument("source")
@cli_options.model_options(auto=False)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
@reports_errors
def plan(
    source: str,
    drafters: tuple[str, ...],
    early_exit: int | None,
    mtp_layers: bool | None,
    max_context: int | None,
    revision: str | None,
    token: str | None,
    cache_dir: str | None,
    task: cli_options.Task,
    as_json: bool,
    **precisions: Any,
) -> None:
    """Say what an export of SOURCE would write, and what it and a run would cost.

    Only configurations are read: a folder with nothing but config.json will do, and of a hub model
    nothing else is downloaded. Sizes follow from the model's modules and the export's own rules;
    times are estimated from one piece that is encoded here.

    \b
    Examples:
      specexport plan gemma4-tiny --precision int8
      specexport plan google/gemma-4-E4B-it --drafter google/gemma-4-E4B-it-assistant
      specexport plan ./my-llama --precision int4 --max-context 8192 --json
    """
    cli_options.check_installed()
    from specexport import plan as plans
    from specexport.options import ExportOptions
    from specexport.plan_costs import costs
    from specexport.sources import Wanted

    wanted = Wanted(revision, token, config_only=True, cache_dir=cache_dir, task=task)
    target, drafting = cli_options.sources(source, drafters, wanted)
    options = ExportOptions(
        **precisions, max_context=max_context, early_exit=early_exit, mtp_layers=mtp_layers
    )
    made = plans.make(target, drafting, options)
    found = costs(made)
    if as_json:
        click.echo(json.dumps(summary(made, found), indent=2))
        return
    for line in (*_engines(made), "", *_kv(made), "", *_costs(made, found)):
        click.echo(line)
    for note in made.notes:
        click.echo(note, err=True)


def summary(made: ExportPlan, found: Costs) -> dict[str, object]:
    """The plan as plain data; bytes and seconds."""
    return {
        "target": made.target.id,
        "revision": made.target.revision,
        "engines": {
            engine.name: {
                "file": engine.file,
                "about": engine.about,
                "precision": engine.precision,
                "bytes": engine.nbytes,
            }
            for engine in made.engines
        },
        "bytes": made.nbytes,
        "bytes_at_most": made.nbytes + made.calibration_bytes,
        "max_context": made.settings.max_context,
        "kv": [dataclasses.asdict(use) for use in made.kv],
        "costs": dataclasses.asdict(found),
        "notes": list(made.notes),
    }


def _engines(made: ExportPlan) -> list[str]:
    lines = [f"{'engine':12} {'file':17} {'precision':9} {'weights':>9}  computes"]
    for engine in made.engines:
        lines.append(
            f"{engine.name:12} {engine.file:17} {engine.precision:9} {size(engine.nbytes):>9}"
            f"  {engine.about}"
        )
    at_most = made.nbytes + made.calibration_bytes
    more = "" if size(at_most) == size(made.nbytes) else f", up to {size(at_most)} (calibration)"
    stored = f"{size(made.nbytes):>9}{more}"
    return [*lines, f"{'stored once':12} {'weights.data':17} {'':9} {stored}"]


def _kv(made: ExportPlan) -> list[str]:
    lines = [f"{'KV of':12} {'attention':17} {'layers':9} {'a token':>9}  at its full context"]
    for use in made.kv:
        full = use.token_bytes * use.max_context
        lines.append(
            f"{use.engine:12} {use.kind:17} {use.layers:<9} {size(use.token_bytes):>9}"
            f"  {size(full)} for {use.max_context:,} tokens"
        )
    if any(use.kind == "sliding" for use in made.kv):
        lines.append("layers with a sliding window keep all rows, as the others do")
    return lines


def _costs(made: ExportPlan, found: Costs) -> list[str]:
    run = f"{size(found.run_bytes)} with {found.context:,} tokens ({size(found.kv_bytes)} of KV)"
    peak = f"{size(found.export_bytes)} with --no-check, else up to {size(found.checked_bytes)}"
    if made.precisions.needs_calibration:
        peak = f"up to {size(found.checked_bytes)} (calibration runs the model)"
    download = f"and {size(found.checkpoint_bytes)} for the checkpoint if it is not here yet"
    rows = (
        ("memory to run", run),
        ("memory to export", peak),
        ("disk to export", f"{size(found.disk_bytes)}, {download}"),
        ("time to export", f"about {_duration(found.seconds)} here, without the comparison"),
    )
    return [f"{name:18} {text}" for name, text in rows]


def size(nbytes: int) -> str:
    """Bytes with three digits and a decimal unit."""
    for unit, name in UNITS:
        if nbytes >= unit:
            return (
                f"{nbytes / unit:.3g} {name}"
                if nbytes < 1000 * unit
                else f"{nbytes / unit:,.0f} {name}"
            )
    return f"{nbytes} B"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
