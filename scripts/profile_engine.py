"""Where the time of an engine goes, operator by operator, by ONNX Runtime's own profiler.

    python scripts/profile_engine.py engines/
    python scripts/profile_engine.py engines/ --engine mtp.0 --rows 1 4 --past 512 --threads 2

Runs the engine on random tokens behind ``--past`` rows of KV, ``--steps`` times for each number of
``--rows`` (steps, for an MTP drafter), first without the profiler and then with it: its cost, about
10 us per node, is in every figure but the first, so engines of many small nodes look slower than
they are. Matrix products are split by the shape of their weights. Loops are not counted, as the
nodes in them are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from specrun import contract, manifest, ort
from specrun.devices import DEVICES
from specrun.errors import SpecrunError
from specrun.manifest import EngineSpec
from specrun.memory import HostBuffer
from specrun.options import available_threads
from specrun.runner import Run, Session
from specrun.runs import zeros

PRODUCTS = {"MatMul", "FusedMatMul", "MatMulNBits", "MatMulIntegerToFloat", "Gemm"}
CONTAINERS = {"Loop", "If", "Scan"}
WARM_UP = 5  # runs that are not counted
LINES = 20  # operators shown
NODE_COST = "the profiler itself takes about 10 us per node"


@dataclass
class Cost:
    """Of an operator in all counted runs: nodes that ran, and their microseconds (median of each
    node, times the runs)."""

    nodes: int = 0
    us: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Of runs of ``rows`` rows: milliseconds of the median run without the profiler and with it,
    nodes per run, and operators by name."""

    rows: int
    plain_ms: float
    profiled_ms: float
    runs: int
    costs: dict[str, Cost]


def prepare(session: Session, *, rows: int, past: int, capacity: int) -> Run:
    """A run of ``rows`` random tokens behind ``past`` rows of KV, all of them wanted."""
    spec = session.spec
    sizes = {
        contract.BATCH: 1,
        contract.ROWS: rows,
        contract.WANTED: rows,
        contract.CAPACITY: capacity,
        contract.DRAFTS: rows,
    }
    arrays = {tensor.name: zeros(tensor, **sizes) for tensor in (*spec.inputs, *spec.outputs)}
    rng = np.random.default_rng(0)
    for name, array in arrays.items():
        if name in (contract.TOKENS, contract.TOKEN):
            array[:] = rng.integers(0, spec.vocab_size, array.shape)
        elif name == contract.PAST_LENGTH:
            array[:] = past
        elif name == contract.NUM_DRAFT:
            array[...] = rows
        elif array.dtype.kind == "f":
            array[:] = rng.standard_normal(array.shape)
    kv = {
        contract.past(layer.layer, part): contract.present(layer.layer, part)
        for layer in spec.kv
        for part in contract.Part
    }
    outputs = {tensor.name for tensor in spec.outputs}
    inputs = {tensor.name for tensor in spec.inputs}
    shared = {name: HostBuffer(arrays[name]) for name in kv if name in inputs}
    written = {out: shared[name] for name, out in kv.items() if name in shared and out in outputs}
    return session.prepare(
        {name: arrays[name] for name in inputs - shared.keys()},
        {name: arrays[name] for name in outputs - written.keys()},
        shared,
        written,
    )


def profile(
    folder: Path, spec: EngineSpec, rows: Sequence[int], *, past: int, steps: int, threads: int
) -> list[Profile]:
    """Run the engine for every number of ``rows``, without the profiler and with it."""
    path = folder / spec.file
    capacity = past + max(rows)

    def run(session: Session, count: int) -> float:
        """Milliseconds of the median of ``steps`` runs."""
        prepared = prepare(session, rows=count, past=past, capacity=capacity)
        times = []
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            prepared.run()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times[WARM_UP:])

    session = ort.open_session(path, spec, threads=threads)
    plain = [run(session, count) for count in rows]
    del session
    found = []
    for count, plain_ms in zip(rows, plain, strict=True):
        with tempfile.TemporaryDirectory() as place:
            options = ort._session_options(threads, spin=False)
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(place) / "profile")
            profiled = onnxruntime.InferenceSession(
                str(path), options, providers=list(DEVICES["cpu"].providers)
            )
            profiled_ms = run(ort.OrtSession(profiled, spec), count)
            events = json.loads(Path(profiled.end_profiling()).read_text(encoding="utf-8"))
        runs, costs = by_operator(events, WARM_UP)
        found.append(Profile(count, plain_ms, profiled_ms, runs, costs))
    return found


def by_operator(events: Iterable[dict[str, Any]], warm_up: int) -> tuple[int, dict[str, Cost]]:
    """How many runs there are behind the first ``warm_up``, and what operators took in them."""
    events = list(events)
    starts = sorted(event["ts"] for event in events if event["name"] == "model_run")
    first = starts[warm_up] if warm_up < len(starts) else float("inf")
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        operator = event["args"]["op_name"]
        if event["ts"] < first or operator in CONTAINERS:
            continue
        times[_label(operator, event["args"]), event["name"]].append(event["dur"])
    costs: dict[str, Cost] = defaultdict(Cost)
    for (label, _), found in times.items():
        # The median, as other work on the machine only ever adds.
        costs[label].nodes += len(found)
        costs[label].us += len(found) * statistics.median(found)
    return max(0, len(starts) - warm_up), dict(costs)


def _label(operator: str, args: dict[str, Any]) -> str:
    """The operator, and the shape of its weights where it is a matrix product."""
    given = args.get("input_type_shape", [])
    shapes: list[list[int]] = [next(iter(one.values()), []) for one in given]
    if operator in PRODUCTS and len(shapes) > 1:
        return f"{operator} {' x '.join(map(str, shapes[1]))}"
    return operator


def show(found: Profile) -> str:
    """A table of the operators that took longest."""
    total = sum(cost.us for cost in found.costs.values()) or 1.0
    runs = max(1, found.runs)
    nodes = sum(cost.nodes for cost in found.costs.values()) / runs
    lines = [
        f"{found.rows} rows: {found.plain_ms:.2f} ms; with the profiler {found.profiled_ms:.2f} ms,"
        f" {total / runs / 1e3:.2f} ms of it in {nodes:.0f} nodes"
    ]
    ranked = sorted(found.costs.items(), key=lambda item: -item[1].us)
    for name, cost in ranked[:LINES]:
        lines.append(
            f"  {name:44s} {cost.us / runs / 1e3:8.3f} ms {cost.us / total:6.1%}"
            f" {cost.nodes / runs:6.0f} nodes {cost.us / cost.nodes:9.1f} us each"
        )
    if rest := ranked[LINES:]:
        left = sum(cost.us for _, cost in rest)
        lines.append(
            f"  {f'{len(rest)} others':44s} {left / runs / 1e3:8.3f} ms {left / total:6.1%}"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--engine", default=contract.TARGET_ENGINE)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--past", type=int, default=128, help="rows in the KV before")
    parser.add_argument("--steps", type=int, default=30, help="runs that are counted")
    parser.add_argument("--threads", type=int, default=available_threads())
    options = parser.parse_args()
    for name in ("rows", "steps", "threads", "past"):
        given = getattr(options, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{name}: must be at least 1, got {given}")
    return options


def main() -> int:
    """Profile and print; returns the exit status."""
    options = arguments()
    try:
        made = manifest.read(options.folder)
        if options.engine not in made.engines:
            print(
                f"Error: --engine: must be one of {', '.join(made.engines)}, got {options.engine}"
            )
            return 2
        spec = made.engines[options.engine]
        most = made.generation.max_context
        if options.past + max(options.rows) > most:
            print(f"Error: --past: {options.past} + {max(options.rows)} rows are more than {most}")
            return 2
        found = profile(
            options.folder,
            spec,
            options.rows,
            past=options.past,
            steps=options.steps,
            threads=options.threads,
        )
    except SpecrunError as error:
        print(f"Error: {error}")
        return 1
    read = f", reads {spec.step_bytes / 1e6:.1f} MB of weights a step"
    print(
        f"{spec.file}, {spec.precision}, {options.threads} threads, {options.past} rows in the KV"
    )
    print(f"median of {options.steps} runs{read}; {NODE_COST}\n")
    print("\n\n".join(show(each) for each in found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
