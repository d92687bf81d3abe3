"""Compares written engines with transformers, through the runtime that will run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import specrun
from specexport.engines import declared_io
from specexport.errors import ParityError
from specexport.numbers import agreement, relative_error
from specexport.parts.base import DrafterPart, Opened, read_up_to
from specexport.reference import SEED, Case, Reference
from specexport.sources import Source
from specrun.manifest import (
    DraftMethod,
    Manifest,
    ParityCase,
    ParityReport,
    Precision,
)
from specrun.target import Verifier

# Largest difference over largest reference value; in integers loose, on random
# tokens: what a precision costs is measured on a text, see specexport.quality.
TOLERANCE: dict[Precision, float] = {
    "fp32": 1e-4,
    "fp16": 5e-3,
    "bf16": 4e-2,
    "int8": 0.25,
    "w8a8": 0.75,
    "int4": 1.5,
}
ROUTED_FACTOR = 4.0  # in integers, where rounding sends a row to another expert at a near tie
NOISE_FACTOR = 4.0  # of transformers' own loss in the export's precision, where it was measured
SELF_CHECK_TOKENS = 24
SELF_CHECK_TOKENS_OF_FEW = 2  # where a run takes minutes
CHAIN = "_chain"  # ends the names of tensors computed from the engine's own results
CHAIN_FACTOR = 100.0  # of the tolerance, for draft steps that feed themselves


def check_declared_io(folder: Path, manifest: Manifest) -> None:
    """Every written engine has exactly the inputs and outputs of the contract."""
    for engine in manifest.engines.values():
        if engine.backend == "torch":
            continue
        # What the manifest says is the contract's: it was checked when the manifest was made.
        wanted = engine.file_io
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
    target: Source | None = None,
    threads: int,
    mapped: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ParityReport:
    """Run every engine against ``reference``. Raises ParityError naming the worst tensor.

    ``target``: the checkpoint, where PyTorch is the target. ``mapped``: open engines on mapped
    weights, for those that do not fit into memory.
    """
    check_declared_io(folder, manifest)
    opened = Opened(folder, manifest, threads, mapped, target)
    cases: list[ParityCase] = []
    done, total = 0, len(reference.cases) + len(parts)
    for case in reference.cases:
        cases += _check_target(opened.target, reference, case)
        done = _tick(progress, done, total)
    for part in parts:
        cases += part.compare(opened, reference.tokens, reference.drafts[part.method])
        done = _tick(progress, done, total)
    wanted = SELF_CHECK_TOKENS_OF_FEW if reference.few else SELF_CHECK_TOKENS
    count = min(wanted, manifest.generation.max_context, len(reference.tokens))
    block, single = _in_two_widths(opened.target, reference.tokens[None, :count])
    noise = _lead_noise(block, single)
    return _report(cases, reference, manifest, noise)


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
    block, single = _in_two_widths(target, tokens)
    worst = max(relative_error(one, row) for one, row in zip(single, block, strict=True))
    if not worst <= TOLERANCE[spec.precision]:
        name = spec.file or "PyTorch"
        raise ParityError(
            f"{name}: one block of {count} rows and single rows differ by {worst:.2e},"
            f" allowed is {TOLERANCE[spec.precision]:.1e}"
        )
    if manifest.drafters:
        _draft_once(folder, tokens[0].tolist(), tuple(manifest.drafters), threads)
    return worst


def _in_two_widths(
    target: Verifier, tokens: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits ``[n, vocabulary]`` of ``tokens`` ``[1, n]`` in one block, and row by row."""
    target.truncate(0)
    block = target.verify(tokens, want_logits=True).logits
    assert block is not None
    block = block[0].copy()
    target.truncate(0)
    single = np.empty_like(block)
    for row in range(tokens.shape[1]):
        one = target.verify(tokens[:, row : row + 1], want_logits=True).logits
        assert one is not None
        single[row] = one[0, 0]
    target.truncate(0)
    return block, single


def _lead_noise(block: NDArray[np.float32], single: NDArray[np.float32]) -> float:
    """Largest difference, between the two, of how far the best logit of a row leads the second."""
    best = np.argsort(-block, axis=1)[:, :2]
    leads = [np.take_along_axis(rows, best, axis=1) for rows in (block, single)]
    one, other = (pair[:, 0].astype(np.float64) - pair[:, 1] for pair in leads)
    return float(np.abs(one - other).max())


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


def _report(
    cases: list[ParityCase], reference: Reference, manifest: Manifest, width_noise: float
) -> ParityReport:
    def allowed(case: ParityCase) -> float:
        tolerance = TOLERANCE[_coarsest(manifest, case.engine)]
        if reference.routed and tolerance > TOLERANCE["fp16"]:
            tolerance *= ROUTED_FACTOR
        limit = max(tolerance, NOISE_FACTOR * _noise(reference, case.tensor))
        return limit * (CHAIN_FACTOR if case.tensor.endswith(CHAIN) else 1.0)

    worst = max(cases, key=lambda case: case.error / allowed(case))
    report = ParityReport(
        scope=reference.scope,
        tolerance=allowed(worst),
        worst_error=worst.error,
        worst_tensor=f"{worst.engine}.{worst.tensor}",
        argmax_agreement=min(case.argmax_agreement for case in cases),
        width_noise=width_noise,
        cases=tuple(cases),
    )
    if not worst.error <= allowed(worst):
        raise ParityError(
            f"{report.worst_tensor} differs from transformers by {worst.error:.2e}"
            f" (relative; {worst.rows} rows after {worst.past_length}),"
            f" allowed is {allowed(worst):.1e}",
            hint="--no-check writes the folder without this comparison",
        )
    exact = [case for case in cases if _coarsest(manifest, case.engine) == "fp32"]
    agreed = min((case.argmax_agreement for case in exact), default=1.0)
    if agreed < 1:
        raise ParityError(
            f"the most probable token differs from transformers' in"
            f" {1 - agreed:.0%} of the rows of a case, and not in a tie"
        )
    return report


def _coarsest(manifest: Manifest, engine: str) -> Precision:
    """Of what the results of ``engine`` depend on: its own weights, and those of the target, whose
    KV and hidden states a drafter reads."""
    specs = [manifest.target_engine, manifest.engines.get(engine, manifest.target_engine)]
    used: set[Precision] = {spec.precision for spec in specs}
    for formats in (spec.weights for spec in specs if spec.weights is not None):
        used |= {formats.head, formats.embedding}
    return max(used, key=lambda precision: TOLERANCE[precision])


def _noise(reference: Reference, tensor: str) -> float:
    """What transformers itself loses; a chain of steps is measured by its first one, and a drafter
    loses no less than the hidden states that it reads."""
    single = tensor.removesuffix(CHAIN) + "_logits" if tensor.endswith(CHAIN) else tensor
    read = () if tensor == "logits" else ("hidden",)
    return max(reference.noise.get(name, 0.0) for name in (single, *read))


def _check_target(target: Any, reference: Reference, case: Case) -> list[ParityCase]:
    past_length, rows = case.past_length, case.rows
    tokens = reference.tokens[None, : past_length + rows]
    read_up_to(target, reference.tokens, past_length)
    if past_length == 0:
        out = target.prefill(tokens, want_logits=True)
    else:
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
