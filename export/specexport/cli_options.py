"""What the commands of specexport have in common: options, and the checkpoints that they name."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import click

from specrun.errors import UsageError, install
from specrun.manifest import Precision

if TYPE_CHECKING:
    from specexport.sources import Source, Wanted

Command = TypeVar("Command", bound=Callable[..., object])

Task = Literal["auto", "text-generation"]

TEXT_GENERATION: Task = "text-generation"  # as in specexport.tasks
NO_DRAFTER = "none"
PRECISIONS: tuple[str, ...] = get_args(Precision)
BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")  # as in specexport.options
ACTIVATIONS = ("fp32", "fp16", "bf16")  # as in specgraphs.formats
DEFAULT_BLOCK_SIZE = 32  # as in specgraphs.formats, which needs numpy
DEFAULT_MEMORY_GB = 2.5  # as in specexport.exporter, which needs torch
EXPORT_MODULES = (
    "torch",
    "transformers",
    "accelerate",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "optimum.exporters",
)


def _capabilities(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[int, ...]:
    """Compute capabilities as people write them, 89, sm89 or 8.9, as 10 * major + minor."""
    numbers = []
    for value in given:
        found = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", value.strip().lower())
        if found is None:
            raise click.BadParameter(
                f"{value!r} is no compute capability; write it as 89 or 8.9", context, option
            )
        numbers.append(10 * int(found[1]) + int(found[2]))
    return tuple(dict.fromkeys(numbers))


capability_option = click.option(
    "--compute-capability",
    "capabilities",
    multiple=True,
    metavar="SM",
    callback=_capabilities,
    help="GPU to build for, as 89 or 8.9; repeatable.  [default: the one of this machine]",
)
token_option = click.option(
    "--token",
    metavar="TOKEN",
    help="Of the model hub, for gated and private models.  [default: HF_TOKEN, or the stored"
    " login]",
)


def model_options(*, auto: bool) -> Callable[[Command], Command]:
    """Options that say what is exported and how. ``auto``: whether a precision can be measured."""
    measured = " auto: what is measured to be fastest on this machine." if auto else ""
    options = (
        click.option(
            "--drafter",
            "drafters",
            multiple=True,
            help="Model to draft with: hub id (ORG/NAME or ORG/NAME@REVISION), folder or .gguf"
            " file; repeatable, one per method; none: a target alone.  [default: the preset's]",
        ),
        click.option(
            "--early-exit",
            type=int,
            metavar="LAYERS",
            help="Export the target in parts, so that its first so many layers can draft.",
        ),
        click.option(
            "--mtp/--no-mtp",
            "mtp_layers",
            default=None,
            help="Export the MTP layers of the checkpoint.  [default: where it has any]",
        ),
        click.option(
            "--precision",
            type=click.Choice((*PRECISIONS, "auto") if auto else PRECISIONS),
            default="fp32",
            show_default=True,
            help="Of linear layers. int8, int4: blocks of weights with a scale each. w8a8: weights"
            " and activations in 8 bits, the fastest for several rows. fp16: also activations and"
            f" KV. bf16: the same, for TensorRT.{measured}",
        ),
        click.option(
            "--drafter-precision",
            type=click.Choice(PRECISIONS),
            help="Of drafters.  [default: the same; int8 with w8a8]",
        ),
        click.option(
            "--head-precision",
            type=click.Choice(PRECISIONS),
            help="Of the output head.  [default: the same; int8 with int4]",
        ),
        click.option(
            "--embedding-precision",
            type=click.Choice(PRECISIONS),
            help="Of embedding tables.  [default: the same; int8 with int4]",
        ),
        click.option(
            "--block-size",
            type=int,
            default=DEFAULT_BLOCK_SIZE,
            show_default=True,
            help="Weights that share a scale in int8 and int4: 16, 32, 64, 128 or 256.",
        ),
        click.option("--max-context", type=int, help="Most tokens in all.  [default: the model's]"),
        click.option(
            "--revision", help="Branch, tag or commit of a hub SOURCE; as ORG/NAME@REVISION."
        ),
        token_option,
        click.option(
            "--cache-dir", metavar="DIR", help="Of the model hub's files.  [default: HF_HUB_CACHE]"
        ),
        click.option(
            "--task",
            type=click.Choice(get_args(Task)),
            default="auto",
            show_default=True,
            help="What SOURCE is for. auto: as optimum infers it, and refused if that is no text"
            " generation.",
        ),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def check_installed() -> None:
    """Raise ExportError naming the modules of the extra ``export`` that are not there."""
    missing = [name for name in EXPORT_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        from specexport.errors import ExportError

        raise ExportError(
            f"exporting needs {', '.join(missing)}, not installed here",
            hint=f"{install('export')}; running an engine folder needs none of them",
        )


def sources(source: str, drafters: tuple[str, ...], wanted: Wanted) -> tuple[Source, list[Source]]:
    """The target and its drafters: the preset's own where none is given. Raises SourceError.

    The revision is the target's.
    """
    from specexport.sources import resolve_as, resolve_pair_as

    drafting = replace(wanted, revision=None)
    if not drafters:
        target, own = resolve_pair_as(source, None, wanted, drafting)
        return target, [] if own is None else [own]
    target = resolve_as(source, wanted)
    if NO_DRAFTER in drafters:
        if len(drafters) > 1:
            raise UsageError(
                f"--drafter: 'none' excludes others, got {', '.join(drafters)}", hint="give one"
            )
        return target, []
    return target, [resolve_as(drafter, drafting) for drafter in drafters]
