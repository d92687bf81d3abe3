"""Engine folders of ours beside other runtimes: same weights, same prompts, same threads, one run.

    python scripts/bench_peers.py setup
    python scripts/bench_peers.py run --ours fp32=ENGINES --ours w8a8=OTHER [--quick]

Peers are transformers (fp32, bf16), ONNX Runtime GenAI (fp32, int8, int4, made by its own builder),
OpenVINO GenAI and llama.cpp (both from the GGUF file), each in an environment of its own with
pinned versions, which ``setup`` makes. A peer without one is said to be skipped. Each contestant is
one process that loads once and stays. They are asked in turn, contestant by contestant, setting by
setting, and only one works at any time; what the others use of a core meanwhile is reported.

A first round warms up and compares tokens: every plain text with that of transformers in fp32,
every prompt lookup with the contestant's own plain text. Then come the rounds that count, of which
medians are taken: greedy texts of 96 tokens, end ids ignored, as new tokens over all of the time,
prefill included; and prompts of exactly 512 and 2048 tokens with one new token, as the time to it.
Prompts of these begin elsewhere in every round, so that nothing kept from the round before can
serve. The best setting of each contestant counts, by workload. A folder of ours takes part in the
model that it was exported from. Tables for people on stdout, all values in a JSON file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import fetch_models
from peers import contestants, environments, report, workloads
from peers.measure import Race, Task
from peers.workloads import Model

from specrun import chat
from specrun.cli_errors import reports_errors
from specrun.errors import SpecrunError, UsageError
from specrun.options import SCHEDULES
from specrun.text import Tokenizer

CACHE = environments.SCRIPTS.parent / ".cache" / "peers"
QUICK_TASKS = ("copy", "chat")
NAMES = tuple(environments.ENVIRONMENTS)


def say(text: str) -> None:
    """Talk goes to stderr."""
    click.echo(text, err=True)


envs_option = click.option(
    "--envs",
    type=click.Path(file_okay=False, path_type=Path),
    default=CACHE / "envs",
    show_default=".cache/peers/envs of the checkout",
    help="Environments of the peers.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Compare engine folders with other runtimes, side by side in one run.

    \b
    Examples:
      python scripts/bench_peers.py setup
      python scripts/bench_peers.py run --ours fp32=engines/ --quick
    """


@main.command()
@envs_option
@click.option("--only", type=click.Choice(NAMES), multiple=True, help="This peer; repeatable.")
@click.option("--again", is_flag=True, help="Make environments anew that are there.")
@reports_errors
def setup(envs: Path, only: tuple[str, ...], again: bool) -> None:
    """Make the environments of the peers; those that are there are kept.

    llama-cpp has no wheel and is built, which takes a compiler and half an hour of processor time;
    it may fail without failing the command.
    """
    failed = False
    for name in only or NAMES:
        if not again and environments.python_of(envs, name) is not None:
            say(f"{name}: is there")
            continue
        try:
            environments.make(envs, name, say)
        except environments.SetupError as error:
            optional = environments.ENVIRONMENTS[name].optional
            say(f"{name}: failed{', it will be skipped' if optional else ''}: {error}")
            failed |= not optional
        else:
            say(f"{name}: ready")
    raise SystemExit(1 if failed else 0)


@main.command()
@click.option("--ours", metavar="NAME=DIR", multiple=True, help="Engine folder; repeatable.")
@envs_option
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=CACHE,
    show_default=".cache/peers of the checkout",
    help="Where models are kept in the forms that peers read.",
)
@click.option(
    "--model",
    type=click.Choice(tuple(workloads.MODELS)),
    multiple=True,
    help="[default: all]  repeatable.",
)
@click.option("--peer", type=click.Choice(NAMES), multiple=True, help="[default: all]  repeatable.")
@click.option(
    "--workload",
    type=click.Choice(tuple(workloads.WORKLOADS)),
    multiple=True,
    help="[default: all]  repeatable.",
)
@click.option(
    "--prefill",
    type=click.IntRange(2),
    multiple=True,
    help="Tokens of a prompt.  [default: 512, 2048]  repeatable.",
)
@click.option(
    "-k",
    "--drafts",
    type=click.IntRange(1),
    multiple=True,
    default=(3, 5, 10, 16),
    show_default=True,
    help="Drafted per round by prompt lookup; repeatable.",
)
@click.option(
    "--ngram",
    type=click.IntRange(1),
    multiple=True,
    default=(3,),
    show_default=True,
    help="Longest n-gram of prompt lookup; repeatable.",
)
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    multiple=True,
    default=("constant", "heuristic"),
    show_default=True,
    help="Of ours; repeatable.",
)
@click.option("--tokens", type=click.IntRange(2), default=96, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--pause",
    type=click.FloatRange(0),
    default=0.3,
    show_default=True,
    help="Seconds between turns.",
)
@click.option("--wide", is_flag=True, help="More settings of peers, which seldom pay.")
@click.option("--quick", is_flag=True, help="A smoke run: one round, two workloads, one k.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON file.  [default: result.json in --cache]",
)
@reports_errors
def run(
    ours: tuple[str, ...],
    envs: Path,
    cache: Path,
    model: tuple[str, ...],
    peer: tuple[str, ...],
    workload: tuple[str, ...],
    prefill: tuple[int, ...],
    drafts: tuple[int, ...],
    ngram: tuple[int, ...],
    schedule: tuple[str, ...],
    tokens: int,
    threads: int,
    rounds: int,
    pause: float,
    wide: bool,
    quick: bool,
    out: Path | None,
) -> None:
    """Measure and compare.

    \b
    Examples:
      python scripts/bench_peers.py run --ours fp32=engines/ --ours w8a8=engines-w8a8/
      python scripts/bench_peers.py run --model smollm2 --peer openvino --workload copy -k 5 -k 10
    """
    folders = _folders(ours)
    if quick:
        drafts, rounds, tokens = (5,), 1, min(tokens, 24)
        workload, prefill = workload or QUICK_TASKS, prefill or workloads.PREFILL[:1]
    choices = contestants.Choices(
        environments=envs.resolve(),
        cache=cache.resolve(),
        threads=threads,
        drafts=drafts,
        ngrams=ngram,
        schedules=schedule,
        peers=peer or NAMES,
        wide=wide,
    )
    make_tasks = functools.partial(
        tasks_of,
        names=workload or tuple(workloads.WORKLOADS),
        prefill=prefill or workloads.PREFILL,
        tokens=tokens,
    )
    result: dict[str, Any] = {
        "machine": _machine(threads),
        "rounds": rounds,
        "max_new_tokens": tokens,
        "models": [],
    }
    chosen = [workloads.MODELS[name] for name in model or workloads.MODELS]
    unused = set(folders)
    for each in chosen:
        found, race = _race(each, folders, choices, make_tasks, pause)
        unused -= {contestant.name for contestant in found.contestants}
        with contextlib.closing(race):
            race.start(found.contestants, threads)
            measured = race.run(rounds)
        results = report.Results(found.contestants, race.tasks, measured)
        _show(each, results, found, rounds, threads)
        prompts = {task.name: len(task.prompt(0)) for task in race.tasks}
        result["models"].append(
            {
                "model": each.name,
                "prompt_tokens": prompts,
                "skipped": found.skipped,
                **results.as_dict(),
            }
        )
    for name in sorted(unused):
        say(f"{name}: was exported from none of these models, and took no part")
    path = out or choices.cache / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(f"wrote {path}")


def tasks_of(
    model: Model,
    hf_folder: Path,
    *,
    names: tuple[str, ...],
    prefill: tuple[int, ...],
    tokens: int,
) -> list[Task]:
    """The workloads of ``model``, as token ids of its own tokenizer."""
    tokenizer = Tokenizer(hf_folder / "tokenizer.json")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def template(text: str) -> str:
        source = (hf_folder / "chat_template.jinja").read_text(encoding="utf-8")
        return chat.render(source, [{"role": "user", "content": text}], {})

    tasks = []
    for name in names:
        ids = workloads.prompt_ids(model, name, encode, template)
        tasks.append(Task(name, functools.partial(_same, ids), tokens))
    for length in prefill:
        prompt = functools.partial(_by_turn, model, length, encode)
        tasks.append(Task(f"prefill {length}", prompt, 1, prefill=True))
    return tasks


def _same(ids: list[int], turn: int) -> list[int]:
    return ids


def _by_turn(model: Model, length: int, encode: Callable[[str], list[int]], turn: int) -> list[int]:
    return workloads.prefill_ids(model, length, turn, encode)


def _race(
    model: Model,
    folders: dict[str, Path],
    choices: contestants.Choices,
    make_tasks: Callable[[Model, Path], list[Task]],
    pause: float,
) -> tuple[contestants.Field, Race]:
    """Who takes part, and the race that they are to run."""
    try:
        gguf = fetch_models.fetch(model.file)
        found = contestants.peers(model, gguf, choices, say)
        hf_folder = contestants.hf_folder(model, gguf, choices, say)
    except (fetch_models.FetchError, contestants.ConversionError) as error:
        raise SpecrunError(f"{model.name}: {error}") from error
    for name, folder in folders.items():
        entry = contestants.folder_of_ours(name, folder, gguf, choices)
        if entry is not None:
            found.contestants.append(entry)
    for name, why in found.skipped.items():
        say(f"{model.name}: skipped {name}: {why}")
    return found, Race(make_tasks(model, hf_folder), pause, say)


def _folders(ours: tuple[str, ...]) -> dict[str, Path]:
    """``NAME=DIR`` by name."""
    folders: dict[str, Path] = {}
    for entry in ours:
        name, equals, folder = entry.partition("=")
        if not (name and equals and folder):
            raise UsageError(f"--ours: must be NAME=DIR, got {entry!r}", hint="--ours fp32=engines")
        if name in folders:
            raise UsageError(f"--ours: two folders are named {name!r}", hint="name one otherwise")
        if not (Path(folder) / "manifest.json").is_file():
            raise UsageError(
                f"--ours: {folder!r} is no engine folder", hint="give one that specexport wrote"
            )
        folders[name] = Path(folder)
    return folders


def _machine(threads: int) -> dict[str, Any]:
    """What it ran on."""
    about = Path("/proc/cpuinfo")
    names = about.read_text().splitlines() if about.is_file() else []
    models = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def _show(
    model: Model,
    results: report.Results,
    found: contestants.Field,
    rounds: int,
    threads: int,
) -> None:
    click.echo(f"\n{model.name} ({model.file}), {threads} threads, medians of {rounds} rounds\n")
    for line in report.lines(results):
        click.echo(line)
    for name, why in found.skipped.items():
        click.echo(f"skipped: {name}: {why}")


if __name__ == "__main__":
    main()
