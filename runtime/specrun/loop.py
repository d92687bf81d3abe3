"""Speculative decoding: propose, verify, accept, commit, truncate.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023).
Plain decoding is the same loop with empty proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrun.constraint import Constraint
from specrun.drafters.base import Drafter, Proposal, resume
from specrun.judge import Judge, TokenLogprob
from specrun.outcome import Outcome
from specrun.schedule import Schedule
from specrun.stats import Meter
from specrun.stopping import FinishReason, Stopping
from specrun.target import Rows, Verifier


@dataclass(frozen=True)
class Round:
    """What one round did, for whoever watches. ``emitted`` is what a cut left of
    ``proposal[:accepted]`` and ``token``; the target's KV holds ``committed_length - 1`` rows.
    ``sequence``: of a batch, which one. ``draft_seconds``: drafting, and telling the drafter what
    came of it; ``verify_seconds``: the target's run."""

    index: int
    num_draft: int
    proposal: tuple[int, ...]
    accepted: int
    token: int
    emitted: tuple[int, ...]
    committed_length: int
    sequence: int = 0
    draft_seconds: float = field(default=0.0, compare=False)
    verify_seconds: float = field(default=0.0, compare=False)


OnRound = Callable[[Round], None]


class Commit(NamedTuple):
    """Tokens and text that became final; ``reason`` when they are the last."""

    tokens: list[int]
    text: str
    reason: FinishReason | None


@dataclass(frozen=True)
class DraftPlan:
    """How much to draft. Ids from ``vocab_size`` on do not exist in the tokenizer, so that a draft
    of one is not worth a row; nor is anything behind one of ``end_ids``, or behind what
    ``constraint`` forbids."""

    schedule: Schedule
    vocab_size: int
    end_ids: frozenset[int]
    constraint: Constraint | None = None

    def usable(self, proposal: Proposal, committed: Sequence[int]) -> Proposal:
        """The part of a drafter's proposal that is worth verifying behind ``committed``.

        A token that was drawn is never dropped by its value, only behind one that stays: anything
        else would change the law of what is sampled. One that was certain may be.
        """
        kept = 0
        for token in proposal.tokens:
            if proposal.q is None and not 0 <= token < self.vocab_size:
                break
            kept += 1
            if token in self.end_ids:
                break
        q = proposal.q
        if self.constraint is not None and kept:
            allowed = self.constraint.count_allowed(committed, proposal.tokens[:kept])
            kept = min(kept, allowed if q is None else allowed + 1)
        return Proposal(proposal.tokens[:kept], None if q is None else q[:kept])


@dataclass
class Progress:
    """The committed tokens, prompt first, and the target that has all but the last in its KV.

    ``behind``: it may have fewer of them, as the prompt is not read, or something went wrong.
    ``logprobs``: of the tokens of the last generation, where asked for.
    """

    target: Verifier
    committed: list[int]
    behind: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def begin(self) -> None:
        """A generation starts. The last token is fed again, so that it has a row to start from."""
        self.rewind(len(self.committed))
        self.behind = True
        self.logprobs = []

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens, and the rows of all but the last of them."""
        del self.committed[length:]
        self.target.truncate(min(self.target.length, max(0, len(self.committed) - 1)))

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the lengths belong together. Holds between rounds."""
        self.target.check_integrity()
        missing = len(self.committed) - 1 - self.target.length
        if missing < 0 or (missing and not self.behind):
            raise RuntimeError(
                f"the KV holds {self.target.length} rows for {len(self.committed)} tokens"
            )


def go_on() -> None:
    """Nothing ends the generation early."""


def speculate(
    progress: Progress,
    drafter: Drafter,
    judge: Judge,
    stopping: Stopping,
    plan: DraftPlan,
    meter: Meter,
    on_round: OnRound | None = None,
    check: Callable[[], None] = go_on,
) -> Generator[Commit, None, None]:
    """Generate from ``progress.committed``, the prompt, until ``stopping`` gives a reason.

    The target may hold the first rows of the prompt already, all but the last at most, and
    ``stopping`` must allow a token. ``check`` is called before every round and between the chunks
    of the prompt, and may raise. Raises EngineError when the target fails; errors of the drafter
    pass through. Whatever is raised, what ``meter`` has counted is committed.
    """
    target, committed, schedule = progress.target, progress.committed, plan.schedule

    rows = _prefill(progress, drafter, judge, meter, check)
    progress.behind = False
    meter.switch("other")
    token = judge.judge(committed, Proposal([]), rows).token
    cut = stopping.take([token])
    progress.logprobs += judge.logprobs_of([token], rows)
    committed.append(token)
    meter.count_first()
    meter.count_margins(rows.margin[0])
    meter.switch("draft")
    drafter.observe([token], rows.hidden[0])
    meter.switch(None)
    yield Commit([token], cut.text, cut.reason)

    index = 0
    while cut.reason is None:
        check()
        # A proposal may fill all but one of what remains, as the target adds a token of its own,
        # and all but one of the rows that fit, as the last committed token has none yet.
        before = meter.times()
        meter.switch("draft")
        num_draft, most = schedule.num_draft, drafter.max_drafts
        fitting = min(stopping.remaining, target.room) - 1
        wanted = min(num_draft, fitting, num_draft if most is None else most)
        proposal = Proposal([])
        if wanted > 0:
            proposal = plan.usable(_propose(drafter, wanted, judge), committed)

        # Row 0 is the last committed token, which no run has seen yet; row i is draft i - 1.
        meter.switch("verify")
        block: NDArray[np.int64] = np.array([[committed[-1], *proposal.tokens]], dtype=np.int64)
        rows = target.verify(block, want_logits=judge.wants_logits)

        meter.switch("other")
        verdict = judge.judge(committed, proposal, rows)
        drafts, accepted, token = proposal.tokens, verdict.count, verdict.token
        found = [*drafts[:accepted], token]
        cut = stopping.take(found)
        emitted = found[: cut.kept]
        progress.logprobs += judge.logprobs_of(emitted, rows)
        stood = len(committed) + min(accepted, cut.kept)
        committed.extend(emitted)
        # [0, committed - 1) stands in the KV; the last token is not fed yet (or its row, in a
        # block that was cut, is dropped); [committed - 1, ...) were rejected or cut off.
        target.truncate(len(committed) - 1)
        meter.count_round(num_draft, len(drafts), accepted, cut.kept)
        meter.count_margins(rows.margin[0, : len(emitted)])

        meter.switch("draft")
        drafter.truncate(stood)
        drafter.observe(list(emitted), rows.hidden[0, : len(emitted)])
        meter.switch("other")
        spent = meter.since(before)
        if wanted > 0 or num_draft == 0:
            schedule.update(Outcome(wanted, len(drafts), accepted, most, *spent))
        if on_round is not None:
            on_round(
                Round(
                    index,
                    num_draft,
                    tuple(drafts),
                    accepted,
                    token,
                    tuple(emitted),
                    len(committed),
                    draft_seconds=spent[0],
                    verify_seconds=spent[1],
                )
            )
        index += 1
        meter.switch(None)
        yield Commit(emitted, cut.text, cut.reason)


def _prefill(
    progress: Progress, drafter: Drafter, judge: Judge, meter: Meter, check: Callable[[], None]
) -> Rows:
    """Both read the prompt; the drafter sees the target's hidden rows where it needs them."""
    prompt, target = progress.committed, progress.target
    meter.switch("draft")
    by_rows = drafter.needs_prompt_rows
    if by_rows:
        # Rows that are in the KV already are not returned again, so the drafter must have them.
        target.truncate(resume(drafter, prompt, target.length))
    else:
        drafter.begin(list(prompt))

    def on_rows(start: int, hidden: NDArray[np.float32]) -> None:
        # Row i gave token i + 1. The row of the last token gives one that is not known yet.
        known = prompt[start + 1 : start + 1 + len(hidden)]
        meter.switch("draft")
        if known:
            drafter.observe(known, hidden[: len(known)])
        meter.switch("prefill")

    meter.switch("prefill")
    meter.prefilled = len(prompt) - target.length
    return target.prefill(
        np.array([prompt[target.length :]], dtype=np.int64),
        want_logits=judge.wants_logits,
        on_rows=on_rows if by_rows else None,
        between_chunks=check,
    )


def _propose(drafter: Drafter, count: int, judge: Judge) -> Proposal:
    """What the drafter proposes, cut to ``count``; plain tokens are drafts that were certain."""
    given = drafter.propose(count, judge.sampler)
    tokens, q = given if isinstance(given, Proposal) else (list(given), None)
    return Proposal(list(tokens[:count]), None if q is None else list(q[:count]))
