"""The command ``specrun``: data on stdout, talk on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from specrun import __version__
from specrun.cli_answer import AnswerWriter
from specrun.cli_bench import bench
from specrun.cli_chat import chat
from specrun.cli_compare import compare
from specrun.cli_errors import reports_errors
from specrun.cli_folder import located
from specrun.cli_input import MAX_PROMPT_BYTES, read_input
from specrun.cli_options import (
    ENGINE,
    engine_options,
    generate_options,
    generation_options,
    opening_options,
)
from specrun.cli_serve import serve
from specrun.cli_stats import sampling, stats_lines, table
from specrun.cli_trace import ALTERNATIVES, Tracing, trace_option
from specrun.cli_tune import tune
from specrun.errors import UsageError
from specrun.options import Integrity
from specrun.response_format import CHANNELS

if TYPE_CHECKING:
    from specrun.engine import Engine
    from specrun.options import GenerateOptions
    from specrun.response import ResponseReader
    from specrun.result import Result
    from specrun.stream import TextStream


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
      specrun chat engines/
      specrun inspect engines/
      specrun doctor

    The sub-command run may be left out; see "specrun run --help" for its options.
    """


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", help="Text to answer or to continue.")
@click.option("--prompt-file", help="Read the prompt from this file; - for stdin.")
@click.option("--raw", is_flag=True, help="Give the prompt as it is, without the chat template.")
@generation_options
@engine_options
@click.option("--stats", is_flag=True, help="Write statistics to stderr at the end.")
@trace_option
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No warnings on stderr.")
@reports_errors
def run(
    folder: Path,
    prompt: str | None,
    prompt_file: str | None,
    stats: bool,
    trace: Path | None,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Generate text from the engines in FOLDER, a path or hf://ORG/NAME on the model hub.

    Where the model marks its thoughts they go to stderr, and the answer to stdout.

    \b
    Examples:
      specrun engines/ --prompt "Write a joke about RAM" --stats
      specrun hf://org/engines --prompt "Write a joke about RAM"
      specrun engines/ --prompt "Once upon a time" --raw --method plain
      echo "Hello" | specrun engines/ --prompt-file - -n 64 --stop "."
      specrun engines/ --prompt "List the planets" --json
      specrun engines/ --prompt "List the planets" --trace trace.html
    """
    if given["logprobs"] is not None and not as_json and trace is None:
        raise UsageError(
            "--logprobs: are shown with --json and --trace only", hint="give one of them too"
        )
    tracing = None if trace is None else Tracing(trace)
    if tracing is not None and given["logprobs"] is None:
        given["logprobs"] = ALTERNATIVES
    opening = opening_options(given)
    options = generate_options({**given, "prompt_file": prompt_file})
    text = _prompt(prompt, prompt_file)
    folder = located(folder, quiet=quiet)
    import specrun

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character is no reason to stop in the middle of a text.
        sys.stdout.reconfigure(errors="replace")

    with specrun.load(folder, options=opening) as engine:
        warn = _silent if quiet else _warn
        on_round = None if tracing is None else tracing.recorder
        stream = engine.stream(text, options=options, on_round=on_round, on_warning=warn)
        reader = _reader(engine, text, options)
        with tracing.of(engine, stream, text, warn) if tracing else contextlib.nullcontext():
            if as_json or reader is None:
                interrupted = _show(stream, as_json=as_json)
            else:
                interrupted = _show_parts(stream, reader(), quiet=quiet)
            result = stream.partial
            if result.finish_reason == "timeout":
                warn(f"the text is not finished: --timeout {result.options.timeout:g} was up")
            if result.options.structured and result.finish_reason == "length":
                warn("the text is not complete, as no more tokens may come: see --max-new-tokens")
            auto = result.options.num_assistant_tokens_schedule == "auto"
            not_tuned = engine.not_tuned if auto else None
            if as_json:
                inputs = {"folder": str(folder), "prompt": text, "stats": stats, "quiet": quiet}
                inputs["trace"] = None if trace is None else str(trace)
                given = {**inputs, **dataclasses.asdict(engine.options)}
                click.echo(_json_result(result, given, None if reader is None else reader()))
            elif reader is None:
                click.echo()
    if stats:
        told = {**stats_lines(result.stats), "sampling": sampling(result.options)}
        if auto:
            told["step costs"] = not_tuned or "as measured by specrun tune"
        click.echo(table(told), err=True)
    if interrupted:
        raise KeyboardInterrupt


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write the manifest as JSON.")
@click.option(
    "--integrity",
    type=click.Choice(get_args(Integrity)),
    default=ENGINE.integrity,
    show_default=True,
    help="quick: hash small files; full: hash all files of the folder.",
)
@reports_errors
def inspect(folder: Path, as_json: bool, integrity: Integrity) -> None:
    """Check the engine FOLDER and show what is in it. No engine is opened.

    \b
    Examples:
      specrun inspect engines/
      specrun inspect engines/ --integrity full
      specrun inspect engines/ --json
    """
    from specrun.manifest import dumps, read
    from specrun.manifest_lines import lines

    manifest = read(located(folder), integrity=integrity)
    click.echo(dumps(manifest) if as_json else table(lines(manifest)), nl=not as_json)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@reports_errors
def doctor(as_json: bool) -> None:
    """Show versions and devices, and what is wrong with the installation (exit 1).

    Every provider of onnxruntime runs a small model, TensorRT is loaded and GPUs are looked for,
    each in a process of its own, so this takes some seconds.

    \b
    Examples:
      specrun doctor
      specrun doctor --json
    """
    from specrun.doctor import examine, lines

    report = examine()
    text = json.dumps(dataclasses.asdict(report), indent=2) if as_json else table(lines(report))
    click.echo(text)
    for problem in report.problems:
        click.echo(f"Error: {problem}", err=True)
    if report.problems:
        raise SystemExit(1)


def _show(stream: TextStream, *, as_json: bool) -> bool:
    """Write the text while it comes, unless it comes as JSON in the end.

    Returns whether Ctrl-C ended it.
    """
    try:
        with stream:
            for piece in stream:
                if not as_json:
                    click.echo(piece, nl=False)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        return True
    return False


def _reader(
    engine: Engine, prompt: str, options: GenerateOptions
) -> Callable[[], ResponseReader] | None:
    """Makes what parts the answer; None where it is shown as it is: with --raw, or where nobody
    knows how the checkpoint marks its parts."""
    if options.raw or engine.manifest.tokenizer.response is None:
        return None
    ids = engine.encode(prompt, options)
    return functools.partial(engine.response_reader, ids, stop=options.stop)


def _show_parts(stream: TextStream, reader: ResponseReader, *, quiet: bool) -> bool:
    """The same where thought and answer are told apart."""
    from specrun.response import read_stream

    try:
        with stream:
            AnswerWriter(quiet=quiet).write(read_stream(stream, reader))
    except KeyboardInterrupt:
        return True
    return False


def _prompt(prompt: str | None, prompt_file: str | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other", hint="give one of them")
    if prompt is not None:
        return prompt
    if prompt_file is None:
        raise UsageError(
            "no prompt given", hint="give --prompt TEXT, or --prompt-file FILE (- for stdin)"
        )
    return read_input(
        "--prompt-file",
        prompt_file,
        MAX_PROMPT_BYTES,
        "no context is that long: give a shorter text",
    )


def _warn(message: str) -> None:
    click.echo(f"warning: {message}", err=True)


def _silent(message: str) -> None:
    pass


def _json_result(result: Result, options: dict[str, Any], reader: ResponseReader | None) -> str:
    data = result.as_dict()
    if reader is not None:
        reader.feed(result.tokens)
        reader.finish()
        data |= {channel: reader.text_of(channel) for channel in CHANNELS}
    data["options"] = {**options, **data["options"]}
    return json.dumps(data, ensure_ascii=False, indent=2)


main.add_command(tune)
main.add_command(bench)
main.add_command(serve)
main.add_command(chat)
main.add_command(compare)


if __name__ == "__main__":
    main()
