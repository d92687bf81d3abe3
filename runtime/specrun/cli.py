"""The command ``specrun``: data on stdout, talk on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_args

import click

from specrun import __version__
from specrun.cli_bench import bench
from specrun.cli_compare import compare
from specrun.cli_device import cuda_graph_option, device_options
from specrun.cli_errors import reports_errors
from specrun.cli_folder import located
from specrun.cli_input import MAX_PROMPT_BYTES, read_grammars, read_input
from specrun.cli_trace import ALTERNATIVES, Tracing, trace_option
from specrun.cli_tune import tune
from specrun.errors import UsageError
from specrun.options import METHODS, SCHEDULES, EngineOptions, GenerateOptions, Integrity, Verify
from specrun.reading import printable

if TYPE_CHECKING:
    from specrun.result import Result
    from specrun.stats import Stats
    from specrun.stream import TextStream

P = ParamSpec("P")
R = TypeVar("R")

ENGINE = EngineOptions()
GENERATE = GenerateOptions()


class Dashed(click.Choice[str]):
    """A choice that may be written with underscores too, as transformers does."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See :class:`click.Choice`."""
        return super().convert(str(value).replace("_", "-"), param, ctx)


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
      specrun inspect engines/
      specrun doctor

    The sub-command run may be left out; see "specrun run --help" for its options.
    """


SAMPLING: tuple[tuple[str, Any, str], ...] = (
    ("--temperature", float, "Sample, from logits divided by this; 0: greedy."),
    ("--top-k", int, "Sample from this many most probable tokens."),
    ("--top-p", float, "Sample from the most probable tokens that make up this probability."),
    ("--min-p", float, "Sample from tokens at least this probable, relative to the best."),
    ("--typical-p", float, "Sample from the most typical tokens that make up this probability."),
    ("--seed", int, "Of the random numbers.  [default: a new one, shown with --json]"),
    ("--repetition-penalty", float, "Above 1: tokens of the text so far become less probable."),
    ("--no-repeat-ngram-size", int, "No n-gram of this size comes twice."),
    ("--min-new-tokens", int, "No end id before so many tokens."),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of sampling. What is not given is as the checkpoint says, or off."""
    bias = click.option("--logit-bias", multiple=True, metavar="ID:NUMBER", help=_BIAS)
    words = click.option(
        "--bad-word",
        multiple=True,
        help="Text that must not come as its own tokens; repeatable.",
    )
    logprobs = click.option(
        "--logprobs",
        type=int,
        help="With --json or --trace: log-probabilities, and so many alternatives.",
    )
    switch = click.option(
        "--sample/--greedy",
        "do_sample",
        default=None,
        help="Draw tokens, or take the most probable.  [default: the checkpoint's, or greedy]",
    )
    for option in (logprobs, bias, words):
        command = option(command)
    for flag, kind, text in reversed(SAMPLING):
        command = click.option(flag, type=kind, help=text)(command)
    return switch(command)


_SCHEMA = 'The text is JSON by this schema: a file, - for stdin, or the schema itself ("{...}").'
_BIAS = "Add a number to the logit of a token id, for example 42:-100; repeatable."


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", help="Text to answer or to continue.")
@click.option("--prompt-file", help="Read the prompt from this file; - for stdin.")
@click.option("--system", default=GENERATE.system, help="System message for the chat template.")
@click.option("--raw", is_flag=True, help="Give the prompt as it is, without the chat template.")
@click.option(
    "--parse-special",
    is_flag=True,
    help="Special tokens that the prompt spells count as such; else they are text.",
)
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
    type=Dashed([name.replace("_", "-") for name in SCHEDULES]),
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
    "--confidence-threshold",
    "assistant_confidence_threshold",
    type=float,
    default=GENERATE.assistant_confidence_threshold,
    help="End a proposal with a draft less probable than this.  [default: 0, off]",
)
@click.option(
    "--ensemble-weight",
    type=float,
    default=GENERATE.ensemble_weight,
    show_default=True,
    help="Verify against this much target and the rest drafter; below 1 the text is another one.",
)
@click.option(
    "-n",
    "--max-new-tokens",
    type=int,
    default=GENERATE.max_new_tokens,
    help="Most tokens to generate.  [default: the checkpoint's, or 256]",
)
@sampling_options
@click.option(
    "--eos-token-id", type=int, multiple=True, help="End id instead of the folder's; repeatable."
)
@click.option("--ignore-eos", is_flag=True, help="Do not end at any end id.")
@click.option("--stop", multiple=True, help="End before this string; repeatable.")
@click.option("--json-schema", metavar="FILE", help=_SCHEMA)
@click.option("--regex", metavar="PATTERN", help="The whole text matches this.")
@click.option("--grammar", metavar="FILE", help="The text follows these rules, in Lark's form.")
@click.option(
    "--timeout",
    type=float,
    default=GENERATE.timeout,
    metavar="SECONDS",
    help="End after so long with what there is.",
)
@click.option("--threads", type=int, default=ENGINE.threads, help="[default: the CPUs we may use]")
@click.option("--max-context", type=int, default=ENGINE.max_context, help="Most tokens in all.")
@click.option("--prefill-chunk", type=int, default=ENGINE.prefill_chunk, show_default=True)
@device_options
@cuda_graph_option
@click.option(
    "--integrity",
    type=click.Choice(get_args(Integrity)),
    default=ENGINE.integrity,
    show_default=True,
    help="quick: hash small files; full: hash all files of the folder.",
)
@click.option(
    "--verify",
    type=click.Choice(get_args(Verify)),
    default=ENGINE.verify,
    show_default=True,
    help="What verifies: the engine, PyTorch, or auto: PyTorch where the engine fails.",
)
@click.option(
    "--target",
    metavar="SOURCE",
    help="Checkpoint for PyTorch.  [default: the one of the manifest, found again]",
)
@click.option(
    "--tuning",
    type=click.Path(),
    default=ENGINE.tuning,
    help="Costs of steps that specrun tune --out wrote.  [default: the folder's own, if there]",
)
@click.option(
    "--spin",
    is_flag=True,
    help="Threads wait for each other without sleeping: for machines that do nothing else.",
)
@click.option(
    "--exact",
    is_flag=True,
    help="Greedy text and logits bit for bit those of --method plain --exact, near ties included.",
)
@click.option(
    "--exact-width",
    type=int,
    default=ENGINE.exact_width,
    show_default=True,
    help="Rows of every run of the target with --exact; a round drafts at most one less.",
)
@click.option(
    "--strict", is_flag=True, help="A drafter that fails is an error, and so is an engine."
)
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
    as_json: bool,
    quiet: bool,
    trace: Path | None,
    **given: Any,
) -> None:
    """Generate text from the engines in FOLDER, a path or hf://ORG/NAME on the model hub.

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
    engine_options = _pick(EngineOptions, given)
    generate_options = _generate_options({**given, "prompt_file": prompt_file})
    text = _prompt(prompt, prompt_file)
    import specrun

    folder = located(folder, quiet=quiet)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character is no reason to stop in the middle of a text.
        sys.stdout.reconfigure(errors="replace")

    with specrun.load(folder, options=engine_options) as engine:
        warn = _silent if quiet else _warn
        on_round = None if tracing is None else tracing.recorder
        stream = engine.stream(text, options=generate_options, on_round=on_round, on_warning=warn)
        with tracing.of(engine, stream, text, warn) if tracing else contextlib.nullcontext():
            interrupted = _show(stream, as_json=as_json)
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
                options = {**inputs, **dataclasses.asdict(engine.options)}
                click.echo(_json_result(result, options))
            else:
                click.echo()
    if stats:
        click.echo(_stats_table(result.stats), err=True)
        click.echo(_options_line(result.options), err=True)
        if auto:
            click.echo(_table({"step costs": not_tuned or "as measured by specrun tune"}), err=True)
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
    click.echo(dumps(manifest) if as_json else _table(lines(manifest)), nl=not as_json)


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
    text = json.dumps(dataclasses.asdict(report), indent=2) if as_json else _table(lines(report))
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


def _pick(cls: type[EngineOptions], given: dict[str, Any]) -> EngineOptions:
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: given[name] for name in names if name in given})


def _generate_options(given: dict[str, Any]) -> GenerateOptions:
    if given["ignore_eos"] and given["eos_token_id"]:
        raise UsageError("--ignore-eos and --eos-token-id exclude each other", hint="give one")
    same = {field.name for field in dataclasses.fields(GenerateOptions)} & given.keys()
    renamed = {
        "num_assistant_tokens_schedule": given["schedule"],
        "eos_token_ids": () if given["ignore_eos"] else given["eos_token_id"] or None,
        "bad_words": given["bad_word"],
        "logit_bias": _bias(given["logit_bias"]),
        **read_grammars(given),
    }
    return GenerateOptions(**{name: given[name] for name in same} | renamed)


def _bias(items: tuple[str, ...]) -> dict[int, float] | None:
    found: dict[int, float] = {}
    for item in items:
        token, _, number = item.partition(":")
        try:
            found[int(token)] = float(number)
        except ValueError:
            raise UsageError(
                f"--logit-bias: must be ID:NUMBER, got {item!r}", hint="for example 42:-100"
            ) from None
    return found or None


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


def _json_result(result: Result, options: dict[str, Any]) -> str:
    data = result.as_dict()
    data["options"] = {**options, **data["options"]}
    return json.dumps(data, ensure_ascii=False, indent=2)


def _stats_table(stats: Stats) -> str:
    by_position = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position) or "-"
    seconds = " ".join(f"{phase} {value:.3f}" for phase, value in stats.seconds.items())
    lossy = ", lossy" if stats.lossy else ""
    exact = f", exact in runs of {stats.exact_width} rows" if stats.exact else ""
    lines = {
        "method": f"{stats.method} ({stats.mode}{lossy}{exact}) on {stats.provider}",
        "tokens": f"{stats.prompt_tokens} prompt, {stats.emitted} new",
        "drafted": f"{stats.drafted}, accepted {stats.accepted} ({stats.acceptance:.0%})",
        "acceptance by position": by_position,
        "tokens per target step": f"{stats.tokens_per_target_step:.2f}",
        "seconds": f"{seconds} ({stats.tokens_per_second:.1f} tokens/s)",
    }
    if stats.verifier_failure is not None:
        lines["verified"] = (
            f"by PyTorch in {stats.torch_steps} of {stats.target_steps} steps:"
            f" {stats.verifier_failure}"
        )
    if stats.near_ties is not None:
        share = f"{stats.near_ties} of {stats.emitted} tokens"
        lines["near ties"] = f"{share} could be others in blocks of another width (see --exact)"
    return _table(lines)


def _options_line(options: GenerateOptions) -> str:
    """The options of sampling that took effect, the checkpoint's own among them."""
    names = (*(flag[2:].replace("-", "_") for flag, _, _ in SAMPLING), "ensemble_weight")
    neutral = (None, 0, 1)
    given = {name: getattr(options, name) for name in names}
    shown = [
        f"{name} {value}"
        for name, value in given.items()
        if value is not None and (name == "seed" or value not in neutral)
    ]
    if words := len(options.bad_words) + len(options.bad_words_ids or ()):
        shown.append(f"{words} bad words")
    sampled = "sampled" if options.do_sample else "greedy"
    return _table({"sampling": ", ".join([sampled, *shown])})


def _table(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return printable("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))


main.add_command(tune)
main.add_command(bench)
main.add_command(compare)


if __name__ == "__main__":
    main()
