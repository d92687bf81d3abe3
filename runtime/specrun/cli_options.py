"""Options of the command line that say how engines are opened and how texts are generated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from specrun.cli_device import cuda_graph_option, device_options
from specrun.cli_input import read_grammars
from specrun.errors import UsageError
from specrun.options import METHODS, SCHEDULES, EngineOptions, GenerateOptions, Integrity, Verify
from specrun.reading import ReadingError, parse_json, read_bytes

MAX_TOOLS_BYTES = 4 << 20

ENGINE = EngineOptions()
GENERATE = GenerateOptions()

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Dashed(click.Choice[str]):
    """A choice that may be written with underscores too, as transformers does."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See :class:`click.Choice`."""
        return super().convert(str(value).replace("_", "-"), param, ctx)


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
    switch = click.option(
        "--sample/--greedy",
        "do_sample",
        default=None,
        help="Draw tokens, or take the most probable.  [default: the checkpoint's, or greedy]",
    )
    for option in (bias, words):
        command = option(command)
    for flag, kind, text in reversed(SAMPLING):
        command = click.option(flag, type=kind, help=text)(command)
    return switch(command)


logprobs_option = click.option(
    "--logprobs",
    type=int,
    help="With --json or --trace: log-probabilities, and so many alternatives.",
)

_SCHEMA = 'The text is JSON by this schema: a file, - for stdin, or the schema itself ("{...}").'
_BIAS = "Add a number to the logit of a token id, for example 42:-100; repeatable."


_GENERATION: tuple[Decorator, ...] = (
    click.option("--system", default=GENERATE.system, help="System message for the chat template."),
    click.option(
        "--thinking/--no-thinking",
        "enable_thinking",
        default=GENERATE.enable_thinking,
        help="Ask for a thought before the answer, or for none.  [default: as the template does]",
    ),
    click.option(
        "--tools",
        "tools_file",
        type=click.Path(path_type=Path),
        help="JSON file with a list of functions that the model may call, for the chat template.",
    ),
    click.option(
        "--parse-special",
        is_flag=True,
        help="Special tokens that the prompt spells count as such; else they are text.",
    ),
    click.option(
        "--method",
        type=click.Choice(METHODS),
        default=GENERATE.method,
        show_default=True,
        help="What drafts; auto: the best drafter in the folder.",
    ),
    click.option(
        "-k",
        "--num-assistant-tokens",
        type=int,
        default=GENERATE.num_assistant_tokens,
        help="Tokens drafted per round; 0: plain decoding.  [default: the folder's, or 5]",
    ),
    click.option(
        "--schedule",
        type=Dashed([name.replace("_", "-") for name in SCHEDULES]),
        default=GENERATE.num_assistant_tokens_schedule,
        help="How that number changes from round to round.  [default: the folder's, or constant]",
    ),
    click.option(
        "--max-matching-ngram-size",
        type=int,
        default=GENERATE.max_matching_ngram_size,
        show_default=True,
        help="Longest n-gram that prompt lookup searches for.",
    ),
    click.option(
        "--confidence-threshold",
        "assistant_confidence_threshold",
        type=float,
        default=GENERATE.assistant_confidence_threshold,
        help="End a proposal with a draft less probable than this.  [default: 0, off]",
    ),
    click.option(
        "--ensemble-weight",
        type=float,
        default=GENERATE.ensemble_weight,
        show_default=True,
        help="Verify against this much target and the rest drafter; below 1 the text is another"
        " one.",
    ),
    click.option(
        "-n",
        "--max-new-tokens",
        type=int,
        default=GENERATE.max_new_tokens,
        help="Most tokens to generate.  [default: the checkpoint's, or 256]",
    ),
    sampling_options,
    logprobs_option,
    click.option(
        "--eos-token-id",
        type=int,
        multiple=True,
        help="End id instead of the folder's; repeatable.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Do not end at any end id."),
    click.option("--stop", multiple=True, help="End before this string; repeatable."),
    click.option("--json-schema", metavar="FILE", help=_SCHEMA),
    click.option("--regex", metavar="PATTERN", help="The whole text matches this."),
    click.option("--grammar", metavar="FILE", help="The text follows these rules, in Lark's form."),
    click.option(
        "--timeout",
        type=float,
        default=GENERATE.timeout,
        metavar="SECONDS",
        help="End after so long with what there is.",
    ),
    click.option(
        "--strict", is_flag=True, help="A drafter that fails is an error, and so is an engine."
    ),
)

threads_option = click.option(
    "--threads", type=int, default=ENGINE.threads, help="[default: the CPUs we may use]"
)
max_context_option = click.option(
    "--max-context", type=int, default=ENGINE.max_context, help="Most tokens in all."
)

_ENGINE: tuple[Decorator, ...] = (
    threads_option,
    max_context_option,
    click.option("--prefill-chunk", type=int, default=ENGINE.prefill_chunk, show_default=True),
    device_options,
    cuda_graph_option,
    click.option(
        "--integrity",
        type=click.Choice(get_args(Integrity)),
        default=ENGINE.integrity,
        show_default=True,
        help="quick: hash small files; full: hash all files of the folder.",
    ),
    click.option(
        "--verify",
        type=click.Choice(get_args(Verify)),
        default=ENGINE.verify,
        show_default=True,
        help="What verifies: the engine, PyTorch, or auto: PyTorch where the engine fails.",
    ),
    click.option(
        "--target",
        metavar="SOURCE",
        help="Checkpoint for PyTorch.  [default: the one of the manifest, found again]",
    ),
    click.option(
        "--tuning",
        type=click.Path(),
        default=ENGINE.tuning,
        help="Costs of steps that specrun tune --out wrote.  [default: the folder's own, if there]",
    ),
    click.option(
        "--spin",
        is_flag=True,
        help="Threads wait for each other without sleeping: for machines that do nothing else.",
    ),
    click.option(
        "--exact",
        is_flag=True,
        help="Greedy text and logits bit for bit those of --method plain --exact, near ties"
        " included.",
    ),
    click.option(
        "--exact-width",
        type=int,
        default=ENGINE.exact_width,
        show_default=True,
        help="Rows of every run of the target with --exact; a round drafts at most one less.",
    ),
)


def generation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of one generation; :func:`generate_options` takes them."""
    return _with(_GENERATION, command)


def chat_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a chat, which shows no log-probabilities."""
    return _with(tuple(option for option in _GENERATION if option is not logprobs_option), command)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of opening a folder; :func:`opening_options` takes them."""
    return _with(_ENGINE, command)


def _with(options: tuple[Decorator, ...], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def opening_options(given: dict[str, Any]) -> EngineOptions:
    """What was ``given`` to a command with :func:`engine_options`. Raises UsageError."""
    names = [field.name for field in dataclasses.fields(EngineOptions)]
    return EngineOptions(**{name: given[name] for name in names if name in given})


def generate_options(given: dict[str, Any]) -> GenerateOptions:
    """What was ``given`` to a command with :func:`generation_options`, and its ``prompt_file``: a
    dash where it reads stdin itself. Raises UsageError."""
    if given["ignore_eos"] and given["eos_token_id"]:
        raise UsageError("--ignore-eos and --eos-token-id exclude each other", hint="give one")
    same = {field.name for field in dataclasses.fields(GenerateOptions)} & given.keys()
    renamed = {
        "num_assistant_tokens_schedule": given["schedule"],
        "eos_token_ids": () if given["ignore_eos"] else given["eos_token_id"] or None,
        "bad_words": given["bad_word"],
        "logit_bias": _bias(given["logit_bias"]),
        "tools": _tools(given["tools_file"]),
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


def _tools(path: Path | None) -> list[Any] | None:
    """The content of the file, which :class:`GenerateOptions` checks."""
    if path is None:
        return None
    try:
        found = parse_json(read_bytes(path, MAX_TOOLS_BYTES))
    except (ReadingError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--tools: {path}: {why}", hint="give a JSON file with a list of functions"
        ) from error
    return found if isinstance(found, list) else [found]
