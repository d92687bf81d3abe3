"""Compares written engines with transformers, through the runtime that will run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import specrun
from specexport.engines import declared_io
from specexport.errors import ParityError
from specexport.numbers import agreement, relative_error
from specexport.parts.base import DrafterPart, Opened
from specexport.reference import SEED, Case, Reference
from specrun.manifest import DraftMethod, Manifest, ParityCase, ParityReport, expected_io

TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3}  # largest difference over largest reference value
NOISE_FACTOR = 4.0  # of transformers' own loss in the export's precision, where it was measured
SELF_CHECK_TOKENS = 24
CHAIN = "_chain"  # ends the names of tensors computed from the engine's own results
CHAIN_FACTOR = 100.0  # of the tolerance, for draft steps that feed themselves


def check_declared_io(folder: Path, manifest: Manifest) -> None:
    """Every written engine has exactly the inputs and outputs of the contract."""
    for engine in manifest.engines.values():
        wanted = expected_io(engine)
        for what, want, got in zip(
            ("input", "output"), wanted, declared_io(folder / engine.file), strict=True
        ):
            if want != got:
                wrong = next(pair for pair in zip(want, got, strict=False) if pair[0] != pair[1])
                raise ParityError(f"{engine.file}: {what} must be {wrong[0]}, is {wrong[1]}")


def check(
    folder: Path,
    manifest: Manifest,
    parts: Sequence[DrafterPart],
    reference: Reference,
    *,
    threads: int,
    mapped: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ParityReport:
    """Run every engine against ``reference``. Raises ParityError naming the worst tensor.

    ``mapped``: open engines on mapped weights, for those that do not fit into memory.
    """
    check_declared_io(folder, manifest)
    opened = Opened(folder, manifest, threads, mapped)
    cases: list[ParityCase] = []
    done, total = 0, len(reference.cases) + len(parts)
    for case in reference.cases:
        cases += _check_target(opened.target, reference, case)
        done = _tick(progress, done, total)
    for part in parts:
        cases += part.compare(opened, reference.tokens, reference.drafts[part.method])
        done = _tick(progress, done, total)
    return _report(cases, reference, manifest.target_engine.precision)


def _tick(progress: Callable[[int, int], None] | None, done: int, total: int) -> int:
    if progress is not None:
        progress(done + 1, total)
    return done + 1


def check_itself(folder: Path, manifest: Manifest, *, threads: int) -> float:
    """Without a reference: the target says the same in one block as token by token, and with
    every drafter of the folder what it says without.

    Returns the largest relative difference of the logits. Raises ParityError above the tolerance,
    and EngineError where a drafter fails or draws from what is not finite.
    """
    check_declared_io(folder, manifest)
    spec = manifest.target_engine
    target = Opened(folder, manifest, threads, mapped=False).target
    count = min(SELF_CHECK_TOKENS, manifest.generation.max_context)
    tokens = np.random.default_rng(SEED).integers(0, spec.vocab_size, (1, count), dtype=np.int64)
    block = target.verify(tokens, want_logits=True).logits
    assert block is not None
    block = block.copy()
    target.truncate(0)
    worst = 0.0
    for row in range(count):
        single = target.verify(tokens[:, row : row + 1], want_logits=True).logits
        assert single is not None
        worst = max(worst, relative_error(single[0, 0], block[0, row]))
    if not worst <= TOLERANCE[spec.precision]:
        raise ParityError(
            f"{spec.file}: one block of {count} rows and single rows differ by {worst:.2e},"
            f" allowed is {TOLERANCE[spec.precision]:.0e}"
        )
    if manifest.drafters:
        _draft_once(folder, tokens[0].tolist(), tuple(manifest.drafters), threads)
    return worst


def _draft_once(
    folder: Path, prompt: list[int], methods: Sequence[DraftMethod], threads: int
) -> None:
    """Greedy drafting changes nothing; sampled drafting draws from every drafter's logits."""
    with specrun.load(folder, threads=threads) as engine:
        prompt = prompt[: max(1, engine.max_context - SELF_CHECK_TOKENS)]
        room = engine.max_context - len(prompt)
        common: dict[str, Any] = {"max_new_tokens": min(SELF_CHECK_TOKENS, room), "strict": True}
        greedy = {"do_sample": False, "eos_token_ids": (), **common}
        plain = engine.generate(prompt, method="plain", **greedy)
        for method in methods:
            drafted = engine.generate(prompt, method=method, **greedy)
            if plain.tokens != drafted.tokens:
                raise ParityError(f"{method}: greedy tokens differ from those of plain decoding")
            engine.generate(prompt, method=method, temperature=1.0, seed=SEED, **common)


def _report(cases: list[ParityCase], reference: Reference, precision: str) -> ParityReport:
    def allowed(case: ParityCase) -> float:
        limit = max(TOLERANCE[precision], NOISE_FACTOR * _noise(reference, case.tensor))
        return limit * (CHAIN_FACTOR if case.tensor.endswith(CHAIN) else 1.0)

    worst = max(cases, key=lambda case: case.error / allowed(case))
    report = ParityReport(
        scope=reference.scope,
        tolerance=allowed(worst),
        worst_error=worst.error,
        worst_tensor=f"{worst.engine}.{worst.tensor}",
        argmax_agreement=min(case.argmax_agreement for case in cases),
        cases=tuple(cases),
    )
    if not worst.error <= allowed(worst):
        raise ParityError(
            f"{report.worst_tensor} differs from transformers by {worst.error:.2e}"
            f" (relative; {worst.rows} rows after {worst.past_length}),"
            f" allowed is {allowed(worst):.0e}",
            hint="--no-check writes the folder without this comparison",
        )
    if precision == "fp32" and report.argmax_agreement < 1:
        raise ParityError(
            f"the most probable token differs from transformers' in"
            f" {1 - report.argmax_agreement:.0%} of the rows of a case, and not in a tie"
        )
    return report


def _noise(reference: Reference, tensor: str) -> float:
    """What transformers itself loses; a chain of steps is measured by its first one."""
    single = tensor.removesuffix(CHAIN) + "_logits" if tensor.endswith(CHAIN) else tensor
    return reference.noise.get(single, 0.0)


def _check_target(target: Any, reference: Reference, case: Case) -> list[ParityCase]:
    past_length, rows = case.past_length, case.rows
    tokens = reference.tokens[None, : past_length + rows]
    target.truncate(0)
    if past_length == 0:
        out = target.prefill(tokens, want_logits=True)
    else:
        target.prefill(tokens[:, :past_length])
        out = target.verify(tokens[:, past_length:], want_logits=True)
    assert out.logits is not None
    logits = np.stack([reference.logits[p] for p in case.positions])
    hidden = reference.hidden[list(case.positions)]
    agreed = agreement(out.argmax[0], logits)
    return [
        ParityCase(
            "target", "logits", past_length, rows, relative_error(out.logits[0], logits), agreed
        ),
        ParityCase(
            "target", "hidden", past_length, rows, relative_error(out.hidden[0], hidden), 1.0
        ),
    ]
