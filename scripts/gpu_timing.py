"""Times of the model of middle size, taken after its logits were compared.

Medians of several runs, in milliseconds, on the device and, for two of them, on the CPU by the same
program in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import gpu_mid
import gpu_observe
import numpy as np
from gpu_engines import relative_error
from gpu_mid import RECIPE
from gpu_verdict import Found, NotHere

import specrun
from specrun.target import Verifier

PREFILL = 256  # tokens
ROWS = (1, 5, 17)  # of a step
ON_CPU = (1, 5)
REPEATS, REPEATS_ON_CPU = 9, 3
NEW_TOKENS = 48
NUM_DRAFT = 4
Open = Callable[[str], AbstractContextManager[specrun.Engine]]  # by the device


def folder_of(kit: Path, variant: str, work: Path) -> Path:
    """The folder with its weights, made at its first use. Raises NotHere where the kit has none."""
    if not (kit / RECIPE).is_dir():
        raise NotHere("the kit was made without the model of middle size")
    out = work / f"{RECIPE}-{variant}"
    return out if out.is_dir() else gpu_mid.restore(kit / RECIPE / variant, out)


def check(
    kit: Path, reference: Path, open_: Open, device: str, tolerance: float, found: Found
) -> None:
    """Compare logits with the reference, then time the device and the CPU."""
    mid = gpu_mid.read(kit)
    with open_(device) as engine:
        _compare(engine, mid, reference, tolerance, found)
        if found.failures:
            return  # times of wrong results are of no use
        times = steps(engine.target, mid.vocabulary, mid.long, ROWS, REPEATS)
        found.figures |= {f"{name} ms": 1e3 * value for name, value in times.items()}
        _generate(engine, mid.vocabulary, found)
    if device == "cpu":
        return
    try:
        _compare_with_cpu(open_, mid, times, found)
    except ImportError as error:
        found.notes.append(f"not compared with the CPU: {error}")


def _compare_with_cpu(open_: Open, mid: gpu_mid.Mid, times: dict[str, float], found: Found) -> None:
    with open_("cpu") as engine:
        slow = steps(engine.target, mid.vocabulary, mid.long, ON_CPU, REPEATS_ON_CPU)
    for name, value in slow.items():
        found.figures[f"{name} on the CPU ms"] = 1e3 * value
        found.figures[f"{name}, times as fast as the CPU"] = value / times[name]


def _compare(
    engine: specrun.Engine, mid: gpu_mid.Mid, reference: Path, tolerance: float, found: Found
) -> None:
    want, _ = gpu_observe.read(reference)
    got = gpu_observe.logits(engine.target, mid.vocabulary, mid.long)
    for name, values in want.items():
        error = relative_error(got[name][:, :: mid.every], values.astype(np.float32))
        found.at_most(error, tolerance, f"logits of {name}")
        found.keep_worst("worst logit (relative)", error)


def steps(
    target: Verifier, size: int, long: int, rows: tuple[int, ...], repeats: int
) -> dict[str, float]:
    """Median seconds of a prefill of 256 tokens, and of steps of so many rows behind ``long``."""
    text = np.array([gpu_observe.tokens(long + max(ROWS), size)], dtype=np.int64)

    def prefill() -> None:
        target.truncate(0)
        target.prefill(text[:, :PREFILL])

    times = {f"prefill {PREFILL}": _median(prefill, repeats)}
    target.truncate(0)
    target.prefill(text[:, :long])
    for count in rows:

        def step(count: int = count) -> None:
            target.truncate(long)
            target.verify(text[:, long : long + count])

        times[f"{count} rows"] = _median(step, repeats)
    target.truncate(0)
    return times


def _median(run: Callable[[], None], repeats: int) -> float:
    """Of ``repeats`` runs, after two that are not counted: they bind buffers and find kernels."""
    taken = []
    for number in range(repeats + 2):
        start = time.perf_counter()
        run()
        if number >= 2:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _generate(engine: specrun.Engine, size: int, found: Found) -> None:
    """Tokens per second of plain decoding, and milliseconds of a step of the draft model."""
    prompt = gpu_observe.tokens(64, size)
    asked = gpu_observe.GREEDY | {"max_new_tokens": NEW_TOKENS}
    engine.generate(prompt, method="plain", **asked)
    plain = engine.generate(prompt, method="plain", **asked)
    found.figures["plain tokens/s"] = plain.stats.tokens_per_second
    drafting = {"method": "draft", "num_assistant_tokens": NUM_DRAFT, **asked}
    engine.generate(prompt, **drafting)
    drafted = engine.generate(prompt, **drafting)
    found.expect(drafted.stats.drafted > 0, "draft: nothing was drafted")
    spent = drafted.stats.seconds["draft"]
    found.figures["draft step ms"] = 1e3 * spent / max(1, drafted.stats.drafted)
