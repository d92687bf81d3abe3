"""Checks that sampled texts follow the target's law exactly, whatever drafts for it.

    python scripts/check_sampling.py
    python scripts/check_sampling.py --runs 3000 --only draft mtp

Builds tiny random models with a vocabulary of 8 (``tests/small_vocabulary.py``), exports them, and
generates 5 tokens behind a fixed prompt with as many seeds as ``--runs`` says, by every method and
with up to 3 drafts a round: the first token is the prefill's, the next four are drafts, corrections
and bonus tokens. The exact law of these texts comes from the transformers model (fp32) by writing
down all 32,768 of them (``tests/exact_law.py``). Compared are the first and the last 3 tokens::

    TV        total variation of what was drawn to the exact law
    perfect   the mean TV of a perfect sampler with as many runs, and its 99.9 % quantile
    chi2, p   chi-square over texts that are expected 5 times, and the chance of a larger one

A line is right where TV is within the quantile, no impossible text came and some of the drafts
stood, but not all. One line in a thousand misses by chance: it is right with another ``--seed``.
All lines have the same seeds, so those with the same target and law are no independent tests.

The lines of transformers are its own ``generate``, alone and with ``assistant_model``, on the same
Gemma 4 pairs, with ``--reference-runs`` seeds; they are shown, and do not count.

A table for people, one JSON line last. The exit status is 1 where a line is wrong. About 20 minutes
on two cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import small_vocabulary
import torch
import transformers
from exact_law import Counts, Fit, Sampling, Tally, exact_law, fit, windows
from small_vocabulary import PAIRS, PROMPT

import specrun
from specexport.sources import resolve

LENGTH, WINDOW = 5, 3
DRAFTS = 3
CHUNK = 1000  # runs of one job
SAMPLINGS = (Sampling(), Sampling(temperature=0.7, top_k=5, top_p=0.9, end=7))
COLD = Sampling(temperature=0.4)  # the MTP drafter drafts its argmax here
LIKELY = (0.03, 0.97)  # acceptance that tells something about both ways


@dataclass(frozen=True)
class Case:
    """A method on an engine folder; ``reference``: transformers on the same checkpoints."""

    pair: str
    method: str
    samplings: Sequence[Sampling] = SAMPLINGS
    reference: bool = False

    @property
    def name(self) -> str:
        return f"transformers, {self.method}" if self.reference else self.method


CASES = (
    Case("llama", "plain"),
    Case("llama", "prompt-lookup"),
    Case("llama", "draft"),
    Case("llama", "universal"),
    Case("llama-words", "universal"),
    Case("early-exit", "early-exit"),
    Case("deepseek", "mtp"),
    Case("glm4-moe", "mtp"),
    Case("gemma4", "mtp-drafter", (*SAMPLINGS, COLD)),
    Case("gemma4-centroid", "mtp-drafter", (*SAMPLINGS, COLD)),
    Case("gemma4", "plain", SAMPLINGS[:1], reference=True),
    Case("gemma4", "mtp-drafter", reference=True),
    Case("gemma4-centroid", "mtp-drafter", SAMPLINGS[:1], reference=True),
)


class Drawn(NamedTuple):
    """Texts as they came, and what became of the drafts (None: not told)."""

    counts: Counts
    drafted: int | None
    accepted: int | None

    def __add__(self, other: object) -> Drawn:
        assert isinstance(other, Drawn)
        if self.drafted is None or self.accepted is None:
            return Drawn(self.counts + other.counts, None, None)
        assert other.drafted is not None and other.accepted is not None
        drafted, accepted = self.drafted + other.drafted, self.accepted + other.accepted
        return Drawn(self.counts + other.counts, drafted, accepted)


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    case: Case
    sampling: Sampling
    places: range
    acceptance: float | None
    fit: Fit = field(repr=False)

    @property
    def verdict(self) -> str:
        """Of transformers' lines only the law is judged: it does not tell its acceptance."""
        if not self.fit.good:
            return "BIASED" if self.case.reference else "FAIL"
        drafts = self.case.method != "plain" and not self.case.reference
        if drafts and not LIKELY[0] < (self.acceptance or 0) < LIKELY[1]:
            return "FAIL: acceptance"
        return "PASS"

    def __str__(self) -> str:
        fit = self.fit
        tokens = f"{self.places[0] + 1}-{self.places[-1] + 1}"
        accepted = "" if self.acceptance is None else f"{self.acceptance:.3f}"
        return (
            f"{self.case.name:26}{self.case.pair:16}{self.sampling!s:30}{tokens:>6}{fit.runs:>7}"
            f"{accepted:>9}{fit.distance:>9.4f}{fit.noise:>9.4f}{fit.limit:>8.4f}"
            f"{fit.chi_square:>8.0f} / {fit.freedom:<4}{fit.p_value:>8.4f}  {self.verdict}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        case = {"method": self.case.name, "pair": self.case.pair, "sampling": str(self.sampling)}
        found = {"tokens": list(self.places), "acceptance": self.acceptance, **asdict(self.fit)}
        return {**case, **found, "p_value": self.fit.p_value, "verdict": self.verdict}


HEADER = (
    f"{'method':26}{'models':16}{'sampling':30}{'tokens':>6}{'runs':>7}{'accepted':>9}{'TV':>9}"
    f"{'perfect':>9}{'99.9 %':>8}{'chi2 / freedom':>15}{'p':>8}"
)


def draw(folder: Path, case: Case, sampling: Sampling, seeds: range) -> Drawn:
    """One text per seed through the engines."""
    engine = _engine(folder / small_vocabulary.ENGINES)
    tally = Tally(small_vocabulary.SIZE, LENGTH, sampling.end)
    drafted = accepted = 0
    for seed in seeds:
        result = engine.generate(
            PROMPT,
            method=case.method,
            seed=seed,
            max_new_tokens=LENGTH,
            num_assistant_tokens=0 if case.method == "plain" else DRAFTS,
            num_assistant_tokens_schedule="constant",
            strict=True,
            **sampling.options(),
        )
        tally.add(result.tokens)
        drafted += result.stats.drafted
        accepted += result.stats.accepted
    return Drawn(tally.counts, drafted, accepted)


def draw_reference(folder: Path, case: Case, sampling: Sampling, seeds: range) -> Drawn:
    """One text per seed by transformers' ``generate``."""
    pair = PAIRS[case.pair]
    model = _model(folder / pair.target)
    options: dict[str, Any] = {}
    if case.method != "plain":
        assistant = options["assistant_model"] = _model(folder / pair.drafters[0])
        assistant.generation_config.num_assistant_tokens = DRAFTS
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
    ids = torch.tensor([PROMPT])
    tally = Tally(small_vocabulary.SIZE, LENGTH, sampling.end)
    for seed in seeds:
        torch.manual_seed(seed)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p or 1.0,
            eos_token_id=sampling.end,
            pad_token_id=sampling.end or 0,
            **options,
        )
        tally.add(out[0, len(PROMPT) :].tolist())
    return Drawn(tally.counts, None, None)


@functools.cache
def _engine(folder: Path) -> specrun.Engine:
    return specrun.load(folder, threads=1)


@functools.cache
def _model(path: Path) -> Any:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    return resolve(path).load_reference()


def start(
    pool: Executor, root: Path, case: Case, sampling: Sampling, seeds: range
) -> list[Future[Drawn]]:
    """The jobs of one case."""
    function = draw_reference if case.reference else draw
    parts = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    return [pool.submit(function, root / case.pair, case, sampling, part) for part in parts]


def finish(case: Case, sampling: Sampling, jobs: Sequence[Future[Drawn]], law: Any) -> list[Line]:
    """Wait for the jobs of one case and compare with the law."""
    drawn = jobs[0].result()
    for done, job in enumerate(jobs[1:], start=2):
        drawn += job.result()
        _say(f"{case.name}, {case.pair}, {sampling}: {done} of {len(jobs)}")
    acceptance = drawn.accepted / drawn.drafted if drawn.drafted and drawn.accepted else None
    return [
        Line(case, sampling, places, acceptance, fit(counts, exact))
        for (places, counts), (_, exact) in zip(
            windows(drawn.counts, WINDOW), windows(law, WINDOW), strict=True
        )
    ]


def export(root: Path, names: Sequence[str]) -> None:
    """The engine folders of the pairs called ``names``."""
    logging.getLogger("torch.__trace").disabled = True
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in dict.fromkeys(names):
        _say(f"export of {name}")
        small_vocabulary.export(PAIRS[name], root / name)


def check(root: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Every case, line by line."""
    cases = [case for case in CASES if not options.only or case.method in options.only]
    export(root, [case.pair for case in cases])
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        settings = [(case, sampling) for case in cases for sampling in case.samplings]
        started = []
        for case, sampling in settings:
            runs = options.reference_runs if case.reference else options.runs
            seeds = range(options.seed, options.seed + runs)
            started.append(start(pool, root, case, sampling, seeds))

        @functools.cache
        def law(target: Path, sampling: Sampling) -> Any:
            return exact_law(_model(target), PROMPT, LENGTH, sampling)

        for (case, sampling), jobs in zip(settings, started, strict=True):
            target = root / case.pair / PAIRS[case.pair].target
            yield from finish(case, sampling, jobs, law(target, sampling))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status is 1 where a line is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=20_000, help="texts per method")
    parser.add_argument("--reference-runs", type=int, default=3000, help="texts by transformers")
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="these methods alone")
    jobs = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=jobs, help="processes (default: all cores)")
    options = parser.parse_args(arguments)
    print(f"{LENGTH} tokens behind a prompt, up to {DRAFTS} drafts a round")
    print(HEADER, flush=True)
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        for line in check(Path(scratch), options):
            print(line, flush=True)
            lines.append(line)
    print(json.dumps([line.as_dict() for line in lines]))
    wrong = [line for line in lines if line.verdict.startswith("FAIL")]
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
