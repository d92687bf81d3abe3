"""Compares written engines with transformers, through the runtime that will run them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines import declared_io
from specexport.errors import ExportError
from specexport.reference import DRAFT_STEPS, SEED, DraftCase, Reference, relative_error
from specrun import contract
from specrun.contract import Role
from specrun.manifest import EngineSpec, Manifest, ParityCase, ParityReport, expected_io
from specrun.ort import PreparedRun, open_session, zeros
from specrun.target import Target

TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3}  # largest difference over largest reference value
NOISE_FACTOR = 4.0  # of transformers' own loss in the export's precision, where it was measured
COMMON_CANDIDATES = 0.75  # least share of a centroid head's candidates that must be the same
SELF_CHECK_TOKENS = 24
CHAIN_FACTOR = 100.0  # of the tolerance, for draft steps that feed themselves
TIE = 1e-4  # a differing argmax is a tie if the two reference logits are this close (relative)


class ParityError(ExportError):
    """An engine computes something else than transformers."""


def check_declared_io(folder: Path, manifest: Manifest) -> None:
    """Every written engine has exactly the inputs and outputs of the contract."""
    for role, engine in manifest.engines.items():
        wanted = expected_io(role, engine)
        for what, want, got in zip(
            ("input", "output"), wanted, declared_io(folder / engine.file), strict=True
        ):
            if want != got:
                wrong = next(pair for pair in zip(want, got, strict=False) if pair[0] != pair[1])
                raise ParityError(f"{engine.file}: {what} must be {wrong[0]}, is {wrong[1]}")


def check(
    folder: Path,
    manifest: Manifest,
    reference: Reference,
    *,
    threads: int,
    mapped: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ParityReport:
    """Run every engine against ``reference``. Raises ParityError naming the worst tensor.

    ``mapped``: open the engines on mapped weights, for those that do not fit into memory.
    """
    check_declared_io(folder, manifest)
    cases: list[ParityCase] = []
    done, total = 0, len(reference.cases) + len(reference.drafts)
    spec = manifest.engines[Role.TARGET]
    target = Target(
        open_session(folder / spec.file, spec, threads=threads, mapped=mapped),
        spec,
        max_context=manifest.generation.max_context,
    )
    for case in reference.cases:
        cases += _check_target(target, reference, case.past_length, case.rows)
        done = _tick(progress, done, total)
    drafter = manifest.engines.get(Role.MTP_DRAFTER)
    if drafter is not None:
        session = open_session(folder / drafter.file, drafter, threads=threads, mapped=mapped)
        for draft in reference.drafts:
            cases += _check_draft(session, drafter, target, draft, reference.tokens)
            done = _tick(progress, done, total)
    return _report(cases, reference, spec.precision)


def _tick(progress: Callable[[int, int], None] | None, done: int, total: int) -> int:
    if progress is not None:
        progress(done + 1, total)
    return done + 1


def check_itself(folder: Path, manifest: Manifest, *, threads: int) -> float:
    """Without a reference: the target says the same in one block as token by token.

    Returns the largest relative difference of the logits. Raises ParityError above the tolerance,
    and where a value is not finite.
    """
    check_declared_io(folder, manifest)
    spec = manifest.engines[Role.TARGET]
    context = manifest.generation.max_context
    target = Target(
        open_session(folder / spec.file, spec, threads=threads), spec, max_context=context
    )
    count = min(SELF_CHECK_TOKENS, context)
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
    drafter = manifest.engines.get(Role.MTP_DRAFTER)
    if drafter is not None:
        session = open_session(folder / drafter.file, drafter, threads=threads)
        run = _draft_run(session, drafter, target, 1)
        run.inputs[contract.PAST_LENGTH][:] = count
        run.run()
        if not np.isfinite(run.outputs[contract.DRAFT_LOGITS]).all():
            raise ParityError(f"{drafter.file}: logits are not finite")
    return worst


def _report(cases: list[ParityCase], reference: Reference, precision: str) -> ParityReport:
    def allowed(case: ParityCase) -> float:
        tensor = "draft_logits" if case.tensor == "draft_chain" else case.tensor
        limit = max(TOLERANCE[precision], NOISE_FACTOR * reference.noise.get(tensor, 0.0))
        return limit * (CHAIN_FACTOR if case.tensor == "draft_chain" else 1.0)

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


def _check_target(
    target: Target, reference: Reference, past_length: int, rows: int
) -> list[ParityCase]:
    tokens = reference.tokens[None, : past_length + rows]
    target.truncate(0)
    if past_length == 0:
        out = target.prefill(tokens, want_logits=True)
        positions = [rows - 1]
    else:
        target.prefill(tokens[:, :past_length])
        out = target.verify(tokens[:, past_length:], want_logits=True)
        positions = list(range(past_length, past_length + rows))
    assert out.logits is not None
    logits = np.stack([reference.logits[p] for p in positions])
    agreement = _agreement(out.argmax[0], logits)
    return [
        ParityCase(
            "target", "logits", past_length, rows, relative_error(out.logits[0], logits), agreement
        ),
        ParityCase(
            "target",
            "hidden",
            past_length,
            rows,
            relative_error(out.hidden[0], reference.hidden[positions]),
            1.0,
        ),
    ]


def _check_draft(
    session: Any, spec: EngineSpec, target: Target, draft: DraftCase, tokens: NDArray[np.int64]
) -> list[ParityCase]:
    """Each step fed what the reference fed it, then all steps feeding themselves.

    A rounding difference grows from step to step, so the second comparison allows more
    (CHAIN_FACTOR); it is there for the feedback, the first one for the arithmetic.
    """
    assert spec.mtp is not None
    target.truncate(0)
    target.prefill(tokens[None, : draft.past_length])
    steps = min(DRAFT_STEPS, spec.mtp.max_num_draft)
    cases = []
    for name, count in (("draft_logits", 1), ("draft_chain", steps)):
        run = _draft_run(session, spec, target, count)
        for first in range(steps if count == 1 else 1):
            run.inputs[contract.TOKEN][:] = draft.fed[first]
            run.inputs[contract.HIDDEN][:] = draft.hidden[first]
            run.inputs[contract.PAST_LENGTH][:] = draft.past_length
            run.run()
            error, agreement = _compare_draft(run, draft, first, count)
            cases.append(
                ParityCase("mtp_drafter", name, draft.past_length, count, error, agreement)
            )
    return cases


def _compare_draft(
    run: PreparedRun, draft: DraftCase, first: int, count: int
) -> tuple[float, float]:
    tokens = run.outputs[contract.DRAFT_TOKENS][0]
    logits = run.outputs[contract.DRAFT_LOGITS][0]
    ids = run.outputs.get(contract.DRAFT_CANDIDATES)
    full = draft.logits[first : first + count]
    # After a tie that falls differently the two loops draft from other tokens: compare up to it.
    same = int((tokens == draft.tokens[first : first + count]).cumprod().sum())
    compared = min(count, same + 1)
    if ids is None:
        errors = [relative_error(logits[i], full[i]) for i in range(compared)]
    else:
        # Steps that feed themselves drift apart, and with them which clusters are the last ones.
        least = COMMON_CANDIDATES if count == 1 else 0.0
        errors = [_sparse_error(logits[i], ids[0, i], full[i], least) for i in range(compared)]
    return max(errors), _agreement(tokens[:compared], full[:compared])


def _sparse_error(
    logits: NDArray[np.float32], ids: NDArray[np.int64], full: NDArray[np.float32], least: float
) -> float:
    """Error over the candidates that both selected.

    The reference fills what it did not select with one value below all others. Which cluster is
    the last to be selected may be a tie, so a few candidates may differ; fewer than the share
    ``least`` in common, or none, is an error.
    """
    wanted = full[ids]
    both = wanted > full.min()
    if both.mean() < least or not both.any():
        return float("inf")
    return relative_error(logits[both], wanted[both])


def _draft_run(session: Any, spec: EngineSpec, target: Target, steps: int) -> PreparedRun:
    sizes = {contract.BATCH: 1, contract.DRAFTS: steps}
    kv = {contract.past(kv.layer, part) for kv in spec.kv for part in contract.Part}
    inputs = {i.name: zeros(i, **sizes) for i in spec.inputs if i.name not in kv}
    inputs[contract.NUM_DRAFT][...] = steps
    return PreparedRun(
        session,
        inputs,
        {o.name: zeros(o, **sizes) for o in spec.outputs},
        {name: target.kv.values[name] for name in kv},
        {},
        spec.file,
    )


def _agreement(tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> float:
    """Share of rows whose token is the reference's argmax, or ties with it."""
    best = logits.max(axis=1)
    chosen = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return float((best - chosen <= TIE * np.maximum(1.0, np.abs(best))).mean())
