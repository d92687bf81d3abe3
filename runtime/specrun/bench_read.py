"""Reads what ``specrun bench --json`` wrote. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from specrun.bench_report import BenchReport
from specrun.decode import DecodeError, decode
from specrun.errors import UsageError
from specrun.reading import ReadingError, parse_json, read_text
from specrun.stats import Phase

MAX_REPORT_BYTES = 64 << 20
PHASES = set(get_args(Phase))
HINT = "give a file that specrun bench --json wrote"
FOLLOWS = {  # what the report itself computes again
    "report": ("step_floor", "share_of_ceiling", "drafts", "overall"),
    "prefill": ("tokens_per_second",),
    "steps": ("medians", "ratios"),
    "result": ("same_tokens", "medians", "ratio"),
    "sample": (
        "tokens_per_second",
        "decode_tokens_per_second",
        "acceptance",
        "tokens_per_target_step",
    ),
}


def read(path: str | Path) -> BenchReport:
    """The report in a file. Raises UsageError where there is none."""
    path = Path(path)
    try:
        return report(parse_json(read_text(path, MAX_REPORT_BYTES)))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint=HINT) from error
    except (ReadingError, DecodeError) as error:
        raise UsageError(f"{path}: {error}", hint=HINT) from error


def report(data: object) -> BenchReport:
    """The inverse of :meth:`BenchReport.as_dict`. Raises DecodeError for anything else."""
    if not isinstance(data, dict) or "workloads" not in data:
        raise DecodeError("is no report of specrun bench: there are no workloads in it")
    try:
        return decode(BenchReport, _report(data))
    except KeyError as error:
        raise DecodeError(f"is no report of specrun bench: it has no {error.args[0]}") from error
    except (TypeError, AttributeError) as error:
        reason = "a list, an object or a number stands where another is expected"
        raise DecodeError(f"is no report of specrun bench: {reason}") from error


def _report(data: Any) -> dict[str, Any]:
    found = _without(data, "report")
    machine = dict(found["machine"])
    for name in ("read_bandwidth", "cache_bytes"):
        found[name] = machine.pop(name)
    found["machine"] = machine
    found["prefill"] = found["prefill"] and _prefill(found["prefill"])
    found["steps"] = found["steps"] and _steps(found["steps"])
    found["workloads"] = [
        {**work, "results": [_result(item) for item in work["results"]]}
        for work in found["workloads"]
    ]
    return found


def _prefill(data: Any) -> dict[str, Any]:
    if not data["seconds"]:
        raise DecodeError("prefill.seconds: is empty")
    return _without(data, "prefill")


def _steps(data: Any) -> dict[str, Any]:
    found = _without(data, "steps")
    found["seconds"] = {_rows(rows): seconds for rows, seconds in found["seconds"].items()}
    if 1 not in found["seconds"] or not all(found["seconds"].values()):
        raise DecodeError("steps.seconds: must hold times, those of one row among them")
    return found


def _rows(text: str) -> int:
    if not text.isdecimal():
        raise DecodeError(f"steps.seconds: must be numbers of rows, got {text!r}")
    return int(text)


def _result(data: Any) -> dict[str, Any]:
    found = _without(data, "result")
    check, runs = found.pop("check"), found.pop("runs")
    return {"contestant": found, "check": _sample(check), "runs": [_sample(run) for run in runs]}


def _sample(data: Any) -> dict[str, Any]:
    if set(data["seconds"]) != PHASES:
        raise DecodeError(f"seconds: must be those of {sorted(PHASES)}")
    return _without(data, "sample")


def _without(data: Any, kind: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in FOLLOWS[kind]}
