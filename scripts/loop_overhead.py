"""What the loop adds in Python to the target engine's own steps, as a share of a round.

    python scripts/loop_overhead.py ENGINES [--rows 1 8] [--tokens 128]

One row is plain decoding; r rows is a drafter that proposes the r - 1 tokens which plain decoding
wrote before, so every round verifies r rows. Inside the same run every engine call is timed, and
what is left of the rounds is the loop: numbers of two runs are never compared. A table for people,
one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from numpy.typing import NDArray

import specrun
from specrun.loop import Round
from specrun.ort import PreparedRun
from specrun.sampling import Sampler

PROMPT = "The Moon is Earth's only natural satellite. It orbits at an average distance of"


class Replay:
    """Proposes what the text is known to go on with; ``text`` is prompt and continuation."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)
        self.committed = 0
        self.max_drafts: int | None = None
        self.needs_prompt_rows = False

    def begin(self, tokens: Sequence[int]) -> None:
        self.committed = len(tokens)

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        self.committed += len(tokens)

    def propose(self, count: int, sampler: Sampler) -> Sequence[int]:
        return self.text[self.committed : self.committed + count]

    def truncate(self, length: int) -> None:
        pass


def measure(engine: specrun.Engine, rows: int, tokens: int) -> dict[str, float]:
    """Medians over the rounds of one generation; milliseconds, and the share of the loop."""
    prompt = engine.encode(PROMPT, specrun.GenerateOptions(raw=True))
    options: dict[str, Any] = {"eos_token_ids": (), "strict": True}
    known = engine.generate(prompt, method="plain", max_new_tokens=tokens + rows, **options)
    engine_time, run = 0.0, PreparedRun.run
    steps: list[float] = []
    rounds: list[float] = []
    last = 0.0

    def timed(self: PreparedRun) -> None:
        nonlocal engine_time
        start = time.perf_counter()
        run(self)
        engine_time += time.perf_counter() - start

    def after(done: Round) -> None:
        nonlocal engine_time, last
        now = time.perf_counter()
        if done.index and len(done.proposal) == rows - 1:
            rounds.append(now - last)
            steps.append(engine_time)
        engine_time, last = 0.0, time.perf_counter()

    with patch.object(PreparedRun, "run", timed):
        engine.generate(
            prompt,
            drafter=Replay([*prompt, *known.tokens]),
            num_assistant_tokens=rows - 1,
            max_new_tokens=tokens,
            on_round=after,
            **options,
        )
    step, whole = statistics.median(steps), statistics.median(rounds)
    added = statistics.median(w - s for w, s in zip(rounds, steps, strict=True))
    return {
        "rows": rows,
        "rounds": len(rounds),
        "step_ms": round(step * 1e3, 3),
        "round_ms": round(whole * 1e3, 3),
        "loop_ms": round(added * 1e3, 3),
        "share": round(added / whole, 4),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    results = []
    print("rows  rounds  engine step ms  round ms  loop adds ms  share")
    with specrun.load(given.engines, threads=given.threads) as engine:
        for rows in given.rows:
            measure(engine, rows, given.tokens)  # warms up
            result = measure(engine, rows, given.tokens)
            results.append(result)
            print(
                f"{rows:4}  {result['rounds']:6}  {result['step_ms']:14.2f}"
                f"  {result['round_ms']:8.2f}  {result['loop_ms']:12.3f}  {result['share']:.2%}"
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
