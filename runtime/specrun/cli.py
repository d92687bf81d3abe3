"""The command ``specrun``: data on stdout, talk on stderr."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_args

import click

from specrun import __version__
from specrun.errors import SpecrunError, UsageError
from specrun.options import METHODS, SCHEDULES, EngineOptions, GenerateOptions, Verify

if TYPE_CHECKING:
    from specrun.doctor import Report
    from specrun.manifest import Manifest
    from specrun.result import Result
    from specrun.stats import Stats

P = ParamSpec("P")
R = TypeVar("R")

ENGINE = EngineOptions()
GENERATE = GenerateOptions()
FLAGS = {
    field.name: "--" + field.name.replace("_", "-")
    for cls in (EngineOptions, GenerateOptions)
    for field in dataclasses.fields(cls)
} | {
    "num_assistant_tokens_schedule": "--schedule",
    "eos_token_ids": "--eos-token-id",
    "num_draft": "--num-draft",  # of specexport, which reports its errors with the same function
}


class DefaultGroup(click.Group):
    """A group whose sub-command ``default`` may be left out."""

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default before what is neither a sub-command nor an option of the group."""
        own = {"--help", "-h", "--version"}
        if args and args[0] not in self.commands and args[0] not in own:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Errors raised on purpose as ``Error:`` and ``hint:``; exit 2 for usage, else 1."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except SpecrunError as error:
            click.echo(f"Error: {_with_flags(str(error))}", err=True)
            if error.hint:
                click.echo(f"hint: {_with_flags(error.hint)}", err=True)
            raise SystemExit(2 if isinstance(error, UsageError) else 1) from error
        except BrokenPipeError:
            # The reader went away, as `| head` does; say nothing at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            click.echo(f"Error: {where}{error.strerror or error}", err=True)
            raise SystemExit(1) from error

    return wrapped


@click.group(
    cls=DefaultGroup,
    default="run",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="specrun")
def main() -> None:
    """Speculative decoding over an engine folder that specexport wrote.

    \b
    Examples:
      specrun engines/ --prompt "Write a joke about RAM"
      specrun engines/ --prompt-file question.txt --json > answer.json
      specrun inspect engines/
      specrun doctor

    The sub-command run may be left out; see "specrun run --help" for its options.
    """


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", help="Text to answer or to continue.")
@click.option("--prompt-file", help="Read the prompt from this file; - for stdin.")
@click.option("--system", default=GENERATE.system, help="System message for the chat template.")
@click.option("--raw", is_flag=True, help="Give the prompt as it is, without the chat template.")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default=GENERATE.method,
    show_default=True,
    help="What drafts; auto: the best drafter in the folder.",
)
@click.option(
    "-k",
    "--num-assistant-tokens",
    type=int,
    default=GENERATE.num_assistant_tokens,
    help="Tokens drafted per round; 0: plain decoding.  [default: the folder's, or 5]",
)
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    default=GENERATE.num_assistant_tokens_schedule,
    help="How that number changes from round to round.  [default: the folder's, or constant]",
)
@click.option(
    "--max-matching-ngram-size",
    type=int,
    default=GENERATE.max_matching_ngram_size,
    show_default=True,
    help="Longest n-gram that prompt lookup searches for.",
)
@click.option(
    "-n",
    "--max-new-tokens",
    type=int,
    default=GENERATE.max_new_tokens,
    show_default=True,
    help="Most tokens to generate.",
)
@click.option(
    "--eos-token-id", type=int, multiple=True, help="End id instead of the folder's; repeatable."
)
@click.option("--ignore-eos", is_flag=True, help="Do not end at any end id.")
@click.option("--stop", multiple=True, help="End before this string; repeatable.")
@click.option("--threads", type=int, default=ENGINE.threads, help="[default: the CPUs we may use]")
@click.option("--max-context", type=int, default=ENGINE.max_context, help="Most tokens in all.")
@click.option("--prefill-chunk", type=int, default=ENGINE.prefill_chunk, show_default=True)
@click.option("--device", default=ENGINE.device, show_default=True, help="Where engines run.")
@click.option(
    "--verify",
    type=click.Choice(get_args(Verify)),
    default=ENGINE.verify,
    show_default=True,
    help="quick: hash small files; full: hash all files of the folder.",
)
@click.option("--strict", is_flag=True, help="A drafter that fails is an error.")
@click.option("--stats", is_flag=True, help="Write statistics to stderr at the end.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No warnings on stderr.")
@reports_errors
def run(
    folder: Path,
    prompt: str | None,
    prompt_file: str | None,
    stats: bool,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Generate text from the engines in FOLDER.

    \b
    Examples:
      specrun engines/ --prompt "Write a joke about RAM" --stats
      specrun engines/ --prompt "Once upon a time" --raw --method plain
      echo "Hello" | specrun engines/ --prompt-file - -n 64 --stop "."
      specrun engines/ --prompt "List the planets" --json
    """
    engine_options = _pick(EngineOptions, given)
    generate_options = _generate_options(given)
    text = _prompt(prompt, prompt_file)
    import specrun

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character is no reason to stop in the middle of a text.
        sys.stdout.reconfigure(errors="replace")

    with specrun.load(folder, options=engine_options) as engine:
        warn = _silent if quiet else _warn
        with engine.stream(text, options=generate_options, on_warning=warn) as stream:
            for piece in stream:
                if not as_json:
                    click.echo(piece, nl=False)
                    sys.stdout.flush()
        result = stream.result
        if as_json:
            inputs = {"folder": str(folder), "prompt": text, "stats": stats, "quiet": quiet}
            options = {**inputs, **dataclasses.asdict(engine.options)}
            click.echo(_json_result(result, options))
        else:
            click.echo()
    if stats:
        click.echo(_stats_table(result.stats), err=True)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write the manifest as JSON.")
@click.option(
    "--verify",
    type=click.Choice(get_args(Verify)),
    default=ENGINE.verify,
    show_default=True,
    help="quick: hash small files; full: hash all files of the folder.",
)
@reports_errors
def inspect(folder: Path, as_json: bool, verify: Verify) -> None:
    """Check the engine FOLDER and show what is in it. No engine is opened.

    \b
    Examples:
      specrun inspect engines/
      specrun inspect engines/ --verify full
      specrun inspect engines/ --json
    """
    from specrun.manifest import dumps, read

    manifest = read(folder, verify=verify)
    click.echo(dumps(manifest) if as_json else _manifest_table(manifest), nl=not as_json)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@reports_errors
def doctor(as_json: bool) -> None:
    """Show versions and devices, and what is wrong with the installation (exit 1).

    \b
    Examples:
      specrun doctor
      specrun doctor --json
    """
    from specrun.doctor import examine

    report = examine()
    text = json.dumps(dataclasses.asdict(report), indent=2) if as_json else _report_table(report)
    click.echo(text)
    for problem in report.problems:
        click.echo(f"Error: {problem}", err=True)
    if report.problems:
        raise SystemExit(1)


def _with_flags(message: str) -> str:
    """An option's field name, where a message names one, as the flag it has here."""
    for name, flag in FLAGS.items():
        message = re.sub(rf"(^|give ){name}\b", rf"\1{flag}", message)
    return message


def _pick(cls: type[EngineOptions], given: dict[str, Any]) -> EngineOptions:
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: given[name] for name in names})


def _generate_options(given: dict[str, Any]) -> GenerateOptions:
    if given["ignore_eos"] and given["eos_token_id"]:
        raise UsageError("--ignore-eos and --eos-token-id exclude each other", hint="give one")
    eos = () if given["ignore_eos"] else given["eos_token_id"] or None
    return GenerateOptions(
        max_new_tokens=given["max_new_tokens"],
        method=given["method"],
        num_assistant_tokens=given["num_assistant_tokens"],
        num_assistant_tokens_schedule=given["schedule"],
        max_matching_ngram_size=given["max_matching_ngram_size"],
        eos_token_ids=eos,
        stop=given["stop"],
        raw=given["raw"],
        system=given["system"],
        strict=given["strict"],
    )


def _prompt(prompt: str | None, prompt_file: str | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other", hint="give one of them")
    if prompt is not None:
        return prompt
    if prompt_file is None:
        raise UsageError(
            "no prompt given", hint="give --prompt TEXT, or --prompt-file FILE (- for stdin)"
        )
    try:
        if prompt_file == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig")
        return Path(prompt_file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--prompt-file: {prompt_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--prompt-file: {prompt_file}: not UTF-8 text at byte {error.start}",
            hint="convert the file to UTF-8",
        ) from error


def _warn(message: str) -> None:
    click.echo(f"warning: {message}", err=True)


def _silent(message: str) -> None:
    pass


def _json_result(result: Result, options: dict[str, Any]) -> str:
    data = result.as_dict()
    data["options"] = {**options, **data["options"]}
    return json.dumps(data, ensure_ascii=False, indent=2)


def _stats_table(stats: Stats) -> str:
    by_position = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position) or "-"
    seconds = " ".join(f"{phase} {value:.3f}" for phase, value in stats.seconds.items())
    lines = {
        "method": f"{stats.method} ({stats.mode}) on {stats.provider}",
        "tokens": f"{stats.prompt_tokens} prompt, {stats.emitted} new",
        "drafted": f"{stats.drafted}, accepted {stats.accepted} ({stats.acceptance:.0%})",
        "acceptance by position": by_position,
        "tokens per target step": f"{stats.tokens_per_target_step:.2f}",
        "seconds": f"{seconds} ({stats.tokens_per_second:.1f} tokens/s)",
    }
    return _table(lines)


def _manifest_table(manifest: Manifest) -> str:
    generation = manifest.generation
    lines = {
        "target": f"{manifest.target.id} ({manifest.target.architecture})",
        "drafter": manifest.drafter.id if manifest.drafter is not None else "-",
        "vocabulary": f"{manifest.tokenizer.vocab_size} tokens",
        "chat template": manifest.tokenizer.chat_template or "-",
        "end ids": " ".join(map(str, generation.eos_token_ids)) or "-",
        "max context": f"{generation.max_context} tokens",
    }
    for role, engine in manifest.engines.items():
        kv = f", {engine.kv_bytes_per_token} bytes of KV per token" if role == "target" else ""
        mtp = engine.mtp
        drafts = f", drafts up to {mtp.max_num_draft} tokens" if mtp is not None else ""
        lines[f"engine {role.value}"] = f"{engine.file}, {engine.precision}{kv}{drafts}"
    for entry in manifest.files:
        lines[f"file {entry.path}"] = f"{entry.size} bytes, sha256 {entry.sha256[:12]}…"
    parity = manifest.parity
    if parity is not None:
        lines["parity"] = f"{parity.scope}: worst error {parity.worst_error:.2g}"
    return _table(lines)


def _report_table(report: Report) -> str:
    lines = {name: version or "not installed" for name, version in report.versions.items()}
    lines["providers"] = ", ".join(report.providers) or "-"
    lines["threads"] = str(report.threads)
    return _table(lines)


def _table(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


if __name__ == "__main__":
    main()
