"""C68: no more threads are busy than were asked for, and none once a call is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exported import Exported

import specrun
from specrun.errors import UsageError

# Two sessions, target and drafter, in one process: what the CPUs did, as JSON.
MEASURE = """
import json, sys, time
import specrun
engine = specrun.load(sys.argv[1], **json.loads(sys.argv[2]))
ask = dict(max_new_tokens=96, method="mtp-drafter", eos_token_ids=(), do_sample=False)
engine.generate([3, 4, 5, 6], **ask)
wall, cpu = time.perf_counter(), time.process_time()
for _ in range(5):
    engine.generate([3, 4, 5, 6], **ask)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
idle = time.process_time()
time.sleep(0.5)
idle = time.process_time() - idle
print(json.dumps({"threads": engine.options.threads, "busy": cpu / wall, "idle": idle}))
"""


def measure(folder: Path, cpus: set[int] | None = None, **options: Any) -> dict[str, float]:
    """Run MEASURE in a process of its own, on ``cpus`` only where they are given."""
    limit = None if cpus is None else (lambda: os.sched_setaffinity(0, cpus))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), json.dumps(options)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=limit,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.fixture
def folder(exported_pair: Callable[..., Exported]) -> Path:
    return exported_pair(("gemma4-e2b", "assistant-plain")).folder


@pytest.mark.parametrize("spin", [False, True])
def test_two_sessions_use_one_threads_worth(folder: Path, spin: bool) -> None:
    found = measure(folder, threads=1, spin=spin)
    assert found["busy"] <= 1.05
    assert found["idle"] < 0.05


@pytest.mark.parametrize("spin", [False, True])
def test_two_sessions_use_no_more_than_was_asked_for(folder: Path, spin: bool) -> None:
    found = measure(folder, threads=2, spin=spin)
    assert found["busy"] <= 2.05
    assert found["idle"] < 0.05, "a worker goes on spinning after the call"


def test_the_default_is_the_cpus_of_the_process(folder: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    assert measure(folder, {cpus[0]})["threads"] == 1
    assert measure(folder, set(cpus))["threads"] == len(cpus)


def test_spin_is_true_or_false(folder: Path) -> None:
    with pytest.raises(UsageError, match="spin: must be true or false, got 'yes'"):
        specrun.load(folder, spin="yes")


def test_the_measure_sees_a_thread_that_spins() -> None:
    """The control: a busy thread is seen as one."""
    before = time.process_time()
    end = time.perf_counter() + 0.2
    while time.perf_counter() < end:
        pass
    assert time.process_time() - before > 0.05
