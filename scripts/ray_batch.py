"""A batch job: prompts in, results out, on as many workers as there are CPUs, with Ray Data.

    pip install ".[ray]"
    python scripts/ray_batch.py engines/ prompts.jsonl results.jsonl --workers 2 -n 64
    python scripts/ray_batch.py engines/ prompts.txt results.jsonl --temperature 0.8 --seed 7
    python scripts/ray_batch.py engines/ prompts.jsonl results.jsonl --workers 0    # without Ray

A line of the input is a JSON object, see ``batch_rows.py``, or in any file that does not end in
``.jsonl`` the prompt itself. A line of the output has ``index``, the row's ``id``, ``text``,
``tokens``, ``finish_reason``, ``method``, ``acceptance``, ``drafted``, ``accepted``,
``target_steps`` and, if it was sampled, ``seed``; of a row that is wrong it has ``error`` and
``hint``, and the job goes on. They stand in the order of the input, and are byte for byte those of
``--workers 0`` with as many ``--threads``: every worker is an actor that opens the folder once, and
no row depends on another.

The results appear when all are there. Until then they are in ``OUT.partial``, and the same command
goes on where an earlier one was interrupted. Exit status: 0, 1 where rows have errors or the job
failed, 2 for a wrong request. ``--address`` takes the workers of a Ray cluster, whose machines have
the package installed and the engine folder at the same path.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import batch_rows
from batch_results import Results
from batch_rows import Row, Settings

import specrun
from specrun import cli_errors, reading
from specrun.options import METHODS, GenerateOptions

ROWS_PER_BLOCK = 8  # given to a worker at a time, and written at a time
MOST_BLOCKS = 4096  # Ray's bookkeeping grows with them
OBJECT_STORE_BYTES = 256 << 20


def on_ray(
    settings: Settings, rows: Sequence[Row], *, workers: int, address: str | None = None
) -> Iterator[bytes]:
    """The lines of the results in the order of ``rows``, from ``workers`` actors."""
    ray = import_ray()
    with cluster(ray, address, num_cpus=workers * settings.threads):
        # The machines of a cluster need the package, not these scripts.
        ray.cloudpickle.register_pickle_by_value(batch_rows)
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        blocks = min(MOST_BLOCKS, -(-len(rows) // ROWS_PER_BLOCK))
        items = [dataclasses.asdict(row) for row in rows]
        answered = ray.data.from_items(items, override_num_blocks=blocks).map(
            batch_rows.Worker,
            fn_constructor_args=(settings,),
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=settings.threads,
        )
        try:
            for row in answered.iter_rows():
                yield row["line"]
        except ray.exceptions.RayError as error:
            raise specrun.EngineError(
                f"a worker failed: {reason(error)}",
                hint="the same command goes on with what is left",
            ) from error


def reason(error: BaseException) -> str:
    """The line that names the exception of a worker, of which Ray gives the traces as a text."""
    text = str(error)
    found = re.search(r"^(?!ray\.)[\w.]+(Error|Exception|Interrupt|Full)\b.*", text, re.M)
    return found[0] if found else text


def import_ray() -> Any:
    """Ray with its data sets. Raises UsageError where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when it is imported
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise specrun.UsageError(
            f"workers: Ray is needed: {error}", hint='pip install ".[ray]", or give --workers 0'
        ) from error
    return ray


@contextlib.contextmanager
def cluster(ray: Any, address: str | None, *, num_cpus: int) -> Iterator[None]:
    """Ray of this machine alone, or that at ``address``; one that is connected already stays."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        options |= {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(address=address or "local", **options)
    try:
        yield
    finally:
        ray.shutdown()


def run(options: argparse.Namespace) -> int:
    """Do the job; returns the exit status. Raises SpecrunError, OSError."""
    settings = settings_of(options)
    for warning in settings.check():
        print(f"Warning: {warning}", file=sys.stderr)
    try:
        lines = batch_rows.read_lines(options.prompts)
    except reading.ReadingError as error:
        raise specrun.UsageError(f"{options.prompts}: {error}", hint="give a text file") from error
    fingerprint = settings.fingerprint(lines)
    results = Results(options.out, fingerprint, options.seed, overwrite=options.overwrite)
    generate = {**settings.generate, "seed": results.job.seed}
    settings = dataclasses.replace(settings, generate=generate)
    with results:
        if results.done:
            print(f"goes on behind {results.done} of {len(lines)} rows", file=sys.stderr)
        rows = [Row(i, line) for i, line in enumerate(lines)][results.done :]
        for line in answers(options, settings, rows):
            results.add(line)
    print(f"{results.done} rows, {results.errors} with an error: {options.out}", file=sys.stderr)
    return 1 if results.errors else 0


def answers(
    options: argparse.Namespace, settings: Settings, rows: Sequence[Row]
) -> Iterator[bytes]:
    """The lines of the results, on Ray or in this process."""
    if options.workers == 0 or not rows:
        return batch_rows.in_this_process(settings, rows)
    return on_ray(settings, rows, workers=options.workers, address=options.address)


def settings_of(options: argparse.Namespace) -> Settings:
    """The job that was asked for."""
    names = {field.name for field in dataclasses.fields(GenerateOptions)} - {"seed"}
    given = {name: value for name, value in vars(options).items() if name in names}
    generate = {name: value for name, value in given.items() if value is not None}
    folder = str(options.folder.resolve())
    json_lines = options.prompts.suffix == ".jsonl"
    return Settings(folder, generate, json_lines=json_lines, threads=options.threads)


def parser() -> argparse.ArgumentParser:
    """Options have the names and meanings that they have in ``specrun run``."""
    made = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], epilog="see the head of the script"
    )
    add = made.add_argument
    add("folder", type=Path, help="engine folder")
    add("prompts", type=Path, help="JSON lines where it ends in .jsonl, else a prompt per line")
    add("out", type=Path, help="where the results go, as JSON lines")
    add("--workers", type=whole, default=2, help="0: in this process, without Ray")
    add("--threads", type=positive, default=1, help="of a worker, CPUs that Ray gives it")
    add("--address", help="of a Ray cluster; else one of this machine, for the job alone")
    add("--overwrite", action="store_true", help="in place of results that are there")
    add("--method", choices=METHODS)
    add("-k", "--num-assistant-tokens", type=int)
    add("--schedule", dest="num_assistant_tokens_schedule")
    add("-n", "--max-new-tokens", type=int)
    add("--sample", dest="do_sample", action="store_true", default=None)
    add("--greedy", dest="do_sample", action="store_false")
    add("--temperature", type=float)
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--min-p", type=float)
    add("--seed", type=whole, help="of row 0; row i has the seed plus i (a new one)")
    add("--stop", action="append")
    add("--system")
    add("--raw", action="store_true", default=None)
    return made


def whole(text: str) -> int:
    """A whole number of 0 or more."""
    if (value := int(text)) < 0:
        raise ValueError
    return value


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


@cli_errors.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run(parser().parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
