"""``optimum-cli export speculative``: the export of ``specexport``, under optimum's names.

Options that optimum's other exports have are called as there; all others are those of
``specexport export``, taken from it. What is given goes to that command as it stands, so checks,
messages and exit statuses are its own.
"""

from __future__ import annotations

import argparse
from typing import Any

import click
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from specexport import cli
from specexport.cli_options import TEXT_GENERATION
from specrun.cli_errors import reports_errors
from specrun.errors import UsageError

NAME = "optimum-cli export speculative"
LIBRARY = "transformers"
TASKS = ("auto", TEXT_GENERATION)
_RENAMED = {"out", "task", "cache_dir"}  # have optimum's names
_EXAMPLES = f"""\
examples:
  {NAME} -m gemma4-tiny engines/
  {NAME} -m org/target --drafter org/assistant --precision int8 engines/
  {NAME} -m ./my-llama --task text-generation engines/
"""


class SpeculativeExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """The command, as optimum-cli finds it."""

    COMMAND = CommandInfo(
        name="speculative",
        help="Export a model and its drafter as engines for speculative decoding, run by specrun.",
    )

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.description = SpeculativeExportCommand.COMMAND.help
        parser.epilog = _EXAMPLES
        parser.formatter_class = argparse.RawTextHelpFormatter
        own = parser.add_argument_group("as in other exports of optimum")
        own.add_argument(
            "-m",
            "--model",
            required=True,
            help="Preset, hub id, checkpoint folder or .gguf file to export.",
        )
        own.add_argument("output", help="Folder to write.")
        own.add_argument(
            "--task",
            default="auto",
            help="auto: inferred from the checkpoint, and refused where it is another; or"
            f" {TEXT_GENERATION}.",
        )
        own.add_argument("--library", help=f"{LIBRARY}, as no other is exported.")
        own.add_argument("--cache_dir", help="Folder of the hub's cache.")
        own.add_argument(
            "--trust-remote-code",
            action="store_true",
            help="Refused: code that comes with a checkpoint is never run.",
        )
        ours = parser.add_argument_group("as in specexport export")
        for option in cli.export.params:
            if isinstance(option, click.Option) and option.name not in _RENAMED:
                _add(ours, option)

    def run(self) -> None:
        """Export, and exit as ``specexport export`` does."""
        assert self.args is not None, "optimum-cli has parsed them"
        cli.prepare()
        cli.export.main(arguments(self.args), prog_name=NAME)


@reports_errors
def arguments(given: argparse.Namespace) -> list[str]:
    """The arguments of ``specexport export`` that stand for these. Exits for what cannot be."""
    if given.library not in (None, LIBRARY):
        raise UsageError(
            f"--library: only models of {LIBRARY} are exported, got {given.library!r}",
            hint="leave it out",
        )
    if given.trust_remote_code:
        raise UsageError(
            "--trust-remote-code: code that comes with a checkpoint is never run",
            hint="leave it out; see `specexport export --help` for what is supported",
        )
    renamed = {"--out": given.output, "--task": _task(given.task), "--cache-dir": given.cache_dir}
    forwarded = [f"{name}={value}" for name, value in renamed.items() if value is not None]
    return [*forwarded, *getattr(given, "forwarded", ()), "--", given.model]


def _task(given: str) -> str:
    """``auto`` or text generation, by whatever name optimum has for it."""
    task = given.removesuffix("-with-past")  # engines always have a KV
    if task not in TASKS:
        from optimum.exporters.tasks import TasksManager

        task = TasksManager.map_from_synonym(task)
    if task not in TASKS:
        raise UsageError(
            f"--task: only {TEXT_GENERATION} is exported for speculative decoding, got {given!r}",
            hint="leave it out, or give a causal language model",
        )
    return task


class _Forward(argparse.Action):
    """Keeps an option as it was given; ``const`` is its name in ``specexport export``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = f"{self.const}={values}" if self.nargs is None else str(self.const)
        namespace.forwarded = [*getattr(namespace, "forwarded", ()), given]


def _add(group: Any, option: click.Option) -> None:
    """Add an option of ours; of a switch with two names both."""
    for number, names in enumerate((option.opts, option.secondary_opts)):
        if not names:
            continue
        shown = f" [default: {option.default}]" if option.show_default else ""
        help_text = (option.help or "") + shown if number == 0 else f"Not {option.opts[0]}."
        group.add_argument(
            *names,
            action=_Forward,
            const=max(names, key=len),
            nargs=0 if option.is_flag else None,
            dest=f"given_{option.name}",
            default=argparse.SUPPRESS,
            metavar=None if option.is_flag else _metavar(option),
            help=help_text.replace("%", "%%"),
        )


def _metavar(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return "{" + ",".join(map(str, option.type.choices)) + "}"
    return option.metavar or (option.name or "").upper()
