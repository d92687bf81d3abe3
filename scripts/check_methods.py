"""Every method on real small models: same tokens as plain decoding, acceptance, and time.

    python scripts/check_methods.py [--tokens 64] [--keep FOLDER]

SmolLM2-135M-Instruct and Gemma 3 270M (``fetch_models.py``) draft for each other through their
texts, SmolLM2 drafts for itself by early exit, and prompt lookup has a text to summarise and one to
edit. Tokens are compared first: a greedy text must be that of ``--method plain``, or part from it
at a near tie, where the target's two best log-probabilities are close; it is shown then. Times
are decoding alone, medians of runs that take turns, so only their ratio means anything. A table
for people, one JSON line last; exit status 1 where tokens differ without a tie.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fetch_models
from peers.workloads import CODE, HARBOUR

import specrun
from specexport import exporter
from specexport.options import ExportOptions
from specexport.sources import resolve
from specrun.options import Method

SMOLLM2, GEMMA3 = fetch_models.MODELS
EARLY_EXIT = 10  # of SmolLM2's 30 layers
NEAR_TIE = 1e-3  # in log-probability
REPEATS = 3
PROMPTS = {
    "summarise": f"Summarise this text in two sentences, in its own words.\n\n{HARBOUR}",
    "edit": f"Rename `result` to `value` in this code and give all of it.\n\n{CODE}",
    "question": "Why is the sky blue? Answer in one paragraph.",
}


@dataclass(frozen=True)
class Pair:
    """A target, who drafts for it, and whether its first layers do."""

    target: str
    drafter: str
    early_exit: int | None
    methods: tuple[Method, ...]


PAIRS = (
    Pair(GEMMA3, SMOLLM2, None, ("universal", "prompt-lookup")),
    Pair(SMOLLM2, GEMMA3, EARLY_EXIT, ("universal", "early-exit", "prompt-lookup")),
)


def export(pair: Pair, folder: Path) -> Path:
    """The engines of ``pair``, exported once into ``folder``."""
    out = folder / f"{pair.target}-by-{pair.drafter}"
    if not out.exists():
        target, drafter = (
            resolve(fetch_models.fetch(name)) for name in (pair.target, pair.drafter)
        )
        exporter.export(target, drafter, out, ExportOptions(early_exit=pair.early_exit))
    return out


def compare(engine: specrun.Engine, name: str, methods: tuple[Method, ...], tokens: int) -> Any:
    """A row per method for the prompt ``name``."""
    common: dict[str, Any] = {
        "max_new_tokens": tokens,
        "eos_token_ids": (),
        "do_sample": False,
        "strict": True,
    }
    prompt = PROMPTS[name]
    runs: dict[str, list[specrun.Result]] = {method: [] for method in ("plain", *methods)}
    for _ in range(REPEATS):
        for method, results in runs.items():
            results.append(engine.generate(prompt, method=method, **common))
    plain = runs["plain"][0]
    close = engine.generate(prompt, method="plain", logprobs=2, **common).logprobs or []
    base = seconds(runs["plain"])
    for method in methods:
        result = runs[method][0]
        at = parts_at(plain.tokens, result.tokens)
        gap = None if at is None else close[at].top[0][1] - close[at].top[1][1]
        yield {
            "prompt": name,
            "method": method,
            "equal": at is None,
            "tie": gap is not None and gap <= NEAR_TIE,
            "gap": gap,
            "acceptance": round(result.stats.acceptance, 3),
            "tokens_per_step": round(result.stats.tokens_per_target_step, 2),
            "speed": round(base / seconds(runs[method]), 2),
        }


def parts_at(one: list[int], two: list[int]) -> int | None:
    """The first place where two texts differ; None where they do not."""
    places = (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    return next(places, None if len(one) == len(two) else min(len(one), len(two)))


def seconds(results: list[specrun.Result]) -> float:
    """Median decoding time per token, without prefill."""
    phases = ("draft", "verify", "other")
    return statistics.median(
        sum(r.stats.seconds[phase] for phase in phases) / max(1, r.stats.emitted - 1)
        for r in results
    )


def rows_of(folder: Path, tokens: int) -> Iterator[dict[str, Any]]:
    """All rows, pair by pair."""
    for pair in PAIRS:
        with specrun.load(export(pair, folder)) as engine:
            for name in PROMPTS:
                for row in compare(engine, name, pair.methods, tokens):
                    yield {"target": pair.target, **row}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--keep", type=Path, help="export into this folder, or use what is there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = []
        print("target          prompt     method         equal  accepted  tokens/step  speed")
        for row in rows_of(given.keep or Path(scratch), given.tokens):
            rows.append(row)
            equal = "yes" if row["equal"] else "tie" if row["tie"] else "NO"
            print(
                f"{row['target'][:15]:15} {row['prompt']:10} {row['method']:14} {equal:5}"
                f"  {row['acceptance']:8.0%}  {row['tokens_per_step']:11}  {row['speed']:5}",
                flush=True,
            )
    print(json.dumps({"rows": rows}))
    raise SystemExit(0 if all(row["equal"] or row["tie"] for row in rows) else 1)


if __name__ == "__main__":
    main()
