"""The command ``specexport``: data on stdout, talk on stderr."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport import cli_options
from specexport.cli_options import Task
from specexport.cli_plan import plan
from specrun import __version__
from specrun.cli import DefaultGroup, inspect
from specrun.cli_errors import reports_errors
from specrun.cli_folder import located
from specrun.decode import encode
from specrun.errors import UsageError
from specrun.hub import is_address, parse
from specrun.plans import PRODUCTS

if TYPE_CHECKING:
    from specrun.manifest import Manifest, ParityReport, QualityReport


NOT_COMPARED = "not compared with transformers"  # begins the line, or the note, that says why


@click.group(
    cls=DefaultGroup,
    default="export",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="specexport")
def main() -> None:
    """Export a Hugging Face model and its drafter as engines that run without PyTorch.

    \b
    Examples:
      specexport gemma4 --out engines/
      specexport path/to/target --drafter path/to/assistant --out engines/
      specexport model.gguf --out engines/
      specexport plan gemma4 --precision w8a8
      specexport build engines/ --backend tensorrt-rtx --compute-capability 89
      specexport check engines/
      specexport inspect engines/

    The sub-command export may be left out; see "specexport export --help" for its options and
    "specexport presets" for the names it knows.
    """
    prepare()


def prepare() -> None:
    """What every export sets up in a process of its own: quiet libraries, an orderly end."""
    _quiet_libraries()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, _: object) -> None:
    """End as Ctrl-C does, so that a half-written folder is removed."""
    raise SystemExit(128 + number)


@main.command()
@click.argument("source")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder to write."
)
@cli_options.model_options(auto=True)
@click.option(
    "--num-draft",
    type=int,
    help="Most tokens that the MTP drafter can draft in a round; TensorRT always drafts as many."
    "  [default: 16; 4 for TensorRT]",
)
@click.option(
    "--backend",
    type=click.Choice(cli_options.BACKENDS),
    default="onnxruntime",
    show_default=True,
    help="Whose dialect the graphs are written in.",
)
@click.option(
    "--activations",
    type=click.Choice(cli_options.ACTIVATIONS),
    help="Beside int8 and int4 weights for TensorRT.  [default: the checkpoint's half precision]",
)
@cli_options.capability_option
@click.option(
    "--memory",
    "memory_gb",
    type=float,
    default=cli_options.DEFAULT_MEMORY_GB,
    show_default=True,
    metavar="GB",
    help="Memory that the export may take; more of it makes comparing faster.",
)
@click.option(
    "--skip",
    type=click.Choice(["target"]),
    help="Export the drafters only; PyTorch verifies, from the checkpoint.",
)
@click.option("--no-check", is_flag=True, help="Do not compare with transformers.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bars.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
@reports_errors
def export(
    source: str,
    out: Path,
    drafters: tuple[str, ...],
    early_exit: int | None,
    mtp_layers: bool | None,
    max_context: int | None,
    num_draft: int | None,
    revision: str | None,
    token: str | None,
    cache_dir: str | None,
    task: Task,
    memory_gb: float,
    skip: str | None,
    capabilities: tuple[int, ...],
    no_check: bool,
    quiet: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Export SOURCE, and whatever drafts for it, to the folder --out.

    SOURCE is a preset, a hub id (org/name), a checkpoint folder or a .gguf file. The folder
    appears when it is whole and agrees with transformers, or not at all.

    \b
    Examples:
      specexport gemma4-tiny --out engines/
      specexport google/gemma-4-E4B-it --drafter google/gemma-4-E4B-it-assistant --out engines/
      specexport ./my-llama --out engines/ --max-context 4096
      specexport ./my-llama --out engines/ --precision w8a8
      specexport ./my-llama --out engines/ --backend tensorrt-rtx --precision bf16
    """
    cli_options.check_installed()
    from specexport.exporter import export as run_export
    from specexport.options import ExportOptions
    from specexport.progress import bars
    from specexport.sources import Wanted

    options = ExportOptions(
        **how,
        max_context=max_context,
        num_draft=num_draft,
        early_exit=early_exit,
        mtp_layers=mtp_layers,
        skip_target=skip is not None,
        compute_capabilities=capabilities,
        check=not no_check,
        memory_gb=memory_gb,
    )
    wanted = Wanted(revision, token, cache_dir=cache_dir, task=task)
    target, drafting = cli_options.sources(source, drafters, wanted)
    with bars(quiet=quiet or as_json) as progress:
        made = run_export(target, drafting, out, options, progress=progress)
    if as_json:
        click.echo(json.dumps(_summary(out, made), indent=2))
        return
    click.echo(f"{out}")
    for note in made.notes:
        click.echo(note, err=True)
    if not any(note.startswith(NOT_COMPARED) for note in made.notes):
        click.echo(_outcome(made.parity), err=True)
    if made.quality is not None:
        click.echo(_quality(made.quality), err=True)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--backend",
    type=click.Choice(cli_options.BACKENDS[1:]),
    required=True,
    help="Which TensorRT builds.",
)
@cli_options.capability_option
@click.option(
    "--level",
    type=click.IntRange(0, 5),
    default=3,
    show_default=True,
    help="How long TensorRT looks for faster kernels (builder_optimization_level).",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder where plans are kept and taken from, by what they are made of.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress bars.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
@reports_errors
def build(
    folder: Path,
    backend: str,
    capabilities: tuple[int, ...],
    level: int,
    cache: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Build plans of TensorRT for the engines in FOLDER, which was exported with such a backend.

    Plans that are up to date stay. The folder changes when all are built, or not at all.

    \b
    Examples:
      specexport build engines/ --backend tensorrt
      specexport build engines/ --backend tensorrt-rtx --compute-capability 89
    """
    cli_options.check_installed()
    if is_address(folder):
        raise UsageError(
            f"{parse(folder)}: plans are built into a folder of your own, not into the hub's cache",
            hint="fetch it with `hf download ORG/NAME --local-dir DIR`, and give DIR",
        )
    from specexport.progress import bars
    from specexport.trt.building import Asked, build_folder
    from specrun.plans import of_backend

    asked = Asked(of_backend(backend), capabilities, level, cache)
    with bars(quiet=quiet or as_json) as progress:
        made = build_folder(folder, asked, progress)
    plans = [plan for engine in made.engines.values() for plan in engine.plans]
    if as_json:
        click.echo(json.dumps({"out": str(folder), "plans": [encode(plan) for plan in plans]}))
        return
    for one in plans:
        about = f"{PRODUCTS[one.flavour]} {one.version}, SM {one.compute_capability}"
        click.echo(f"{one.file}  {one.size / 1e6:.1f} MB  {about}")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("source", required=False)
@click.option(
    "--drafter", "drafters", multiple=True, help="As the folder was exported with; repeatable."
)
@cli_options.token_option
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
@reports_errors
def check(
    folder: Path,
    source: str | None,
    drafters: tuple[str, ...],
    token: str | None,
    as_json: bool,
) -> None:
    """Check the engine FOLDER: every byte, every engine's inputs and outputs, and its results.

    Without SOURCE the target is compared with itself, a block of rows with single rows, and every
    drafter is run. With the checkpoint it came from, every engine is compared with transformers
    again.

    \b
    Examples:
      specexport check engines/
      specexport check engines/ gemma4-tiny
      specexport check engines/ path/to/target --drafter path/to/assistant
    """
    cli_options.check_installed()
    from specexport import exporter
    from specexport.sources import Wanted

    folder = located(folder)
    if source is None and drafters:
        raise UsageError(
            "--drafter: has no use without the SOURCE that the folder was exported from",
            hint="give SOURCE too, or neither",
        )
    if source is None:
        worst = exporter.check_itself(folder)
        outcome = (
            "bytes, inputs and outputs are right; engines in bf16 do not run on a CPU"
            if worst is None
            else f"sound: blocks and single rows differ by {worst:.1e} at most"
        )
        data: dict[str, object] = {"folder": str(folder), "ok": True, "self_error": worst}
    else:
        report = exporter.recheck(
            folder, *cli_options.sources(source, drafters, Wanted(token=token))
        )
        outcome = _outcome(report)
        data = {"folder": str(folder), "ok": True, "parity": _parity(report)}
    click.echo(json.dumps(data, indent=2) if as_json else f"{folder}: {outcome}")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
@reports_errors
def presets(as_json: bool) -> None:
    """List the presets: names for a target with its drafter."""
    from specexport.presets import PRESETS

    if as_json:
        click.echo(json.dumps({name: preset.about for name, preset in PRESETS.items()}, indent=2))
        return
    for name, preset in PRESETS.items():
        click.echo(f"{name:16} {preset.about}")


main.add_command(plan)
main.add_command(inspect)


def _summary(out: Path, made: Manifest) -> dict[str, object]:
    return {
        "out": str(out),
        "target": made.target.id,
        "drafters": {
            method: None if drafter.source is None else drafter.source.id
            for method, drafter in made.drafters.items()
        },
        "engines": {name: engine.file for name, engine in made.engines.items()},
        "bytes": sum(entry.size for entry in made.files),
        "parity": None if made.parity is None else _parity(made.parity),
        "notes": list(made.notes),
        "quality": None if made.quality is None else dataclasses.asdict(made.quality),
    }


def _parity(report: ParityReport) -> dict[str, object]:
    return {
        "scope": report.scope,
        "worst_error": report.worst_error,
        "worst_tensor": report.worst_tensor,
        "tolerance": report.tolerance,
        "argmax_agreement": report.argmax_agreement,
        "cases": len(report.cases),
    }


def _outcome(report: ParityReport | None) -> str:
    if report is None:
        return f"{NOT_COMPARED} (--no-check)"
    return (
        f"agrees with transformers ({report.scope}): {len(report.cases)} comparisons,"
        f" worst {report.worst_tensor} {report.worst_error:.1e}, {report.tolerance:.1e} allowed"
    )


def _quality(report: QualityReport) -> str:
    return (
        f"against fp32 on {report.tokens} tokens: perplexity {report.perplexity:.4g}"
        f" ({report.loss:+.1%}), {report.argmax_agreement:.1%} of the most probable tokens the same"
    )


def _quiet_libraries() -> None:
    """transformers and torch talk on stderr about things that do not concern the user."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("torch").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
