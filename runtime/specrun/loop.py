"""Speculative decoding: propose, verify, accept, commit, truncate.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023).
Plain decoding is the same loop with empty proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specrun.accept import accept_greedy
from specrun.drafters.base import Drafter
from specrun.options import ScheduleName
from specrun.schedule import next_num_draft
from specrun.stats import Meter
from specrun.stopping import FinishReason, Stopping
from specrun.target import Target


@dataclass(frozen=True)
class Round:
    """What one round did, for whoever watches. ``emitted`` is what a cut left of
    ``proposal[:accepted]`` and ``token``; the target's KV holds ``committed_length - 1`` rows."""

    index: int
    num_draft: int
    proposal: tuple[int, ...]
    accepted: int
    token: int
    emitted: tuple[int, ...]
    committed_length: int


OnRound = Callable[[Round], None]


class Commit(NamedTuple):
    """Tokens and text that became final; ``reason`` when they are the last."""

    tokens: list[int]
    text: str
    reason: FinishReason | None


@dataclass(frozen=True)
class DraftPlan:
    """How much to draft. ``num_draft``: in the first round. Ids from ``vocab_size`` on do not
    exist in the tokenizer and are not drafted; nor is anything behind one of ``end_ids``."""

    num_draft: int
    schedule: ScheduleName
    vocab_size: int
    end_ids: frozenset[int]

    def usable(self, proposal: Sequence[int]) -> list[int]:
        """The part of a drafter's proposal that is worth verifying."""
        kept: list[int] = []
        for token in proposal:
            if not 0 <= token < self.vocab_size:
                break
            kept.append(token)
            if token in self.end_ids:
                break
        return kept


@dataclass
class Progress:
    """The committed tokens, prompt first, and the target that has all but the last in its KV."""

    target: Target
    committed: list[int]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the lengths belong together. Holds between rounds."""
        self.target.kv.check_integrity()
        if self.target.length != len(self.committed) - 1:
            raise RuntimeError(
                f"the KV holds {self.target.length} rows for {len(self.committed)} tokens"
            )


def speculate(
    progress: Progress,
    drafter: Drafter,
    stopping: Stopping,
    plan: DraftPlan,
    meter: Meter,
    on_round: OnRound | None = None,
) -> Generator[Commit, None, None]:
    """Generate from ``progress.committed``, the prompt, until ``stopping`` gives a reason.

    The target must be empty and ``stopping`` allow a token. Raises EngineError when the target
    fails; errors of the drafter pass through.
    """
    target, committed = progress.target, progress.committed

    meter.switch("prefill")
    rows = target.prefill(np.array([committed], dtype=np.int64))
    token = int(rows.argmax[0, 0])
    meter.switch("draft")
    drafter.begin(committed)
    drafter.observe([token], rows.hidden[:, 0])

    meter.switch("other")
    cut = stopping.take([token])
    committed.append(token)
    meter.emitted += 1
    meter.switch(None)
    yield Commit([token], cut.text, cut.reason)

    num_draft = plan.num_draft
    index = 0
    while cut.reason is None:
        # The target adds a token of its own, so a proposal may fill all but one of what remains.
        meter.switch("draft")
        most = drafter.max_drafts
        wanted = min(num_draft, stopping.remaining - 1, num_draft if most is None else most)
        proposal = plan.usable(drafter.propose(wanted)[:wanted]) if wanted > 0 else []

        # Row 0 is the last committed token, which no run has seen yet; row i is draft i - 1.
        meter.switch("verify")
        rows = target.verify(np.array([[committed[-1], *proposal]], dtype=np.int64))

        meter.switch("other")
        verdict = accept_greedy(proposal, rows.argmax[0].tolist())
        accepted, token = verdict.count, verdict.token
        block = [*proposal[:accepted], token]
        cut = stopping.take(block)
        emitted = block[: cut.kept]
        stood = len(committed) + min(accepted, cut.kept)
        committed.extend(emitted)
        # [0, committed - 1) stands in the KV; the last token is not fed yet (or its row, in a
        # block that was cut, is dropped); [committed - 1, ...) were rejected or cut off.
        target.truncate(len(committed) - 1)
        meter.count_round(num_draft, len(proposal), accepted, cut.kept)

        meter.switch("draft")
        drafter.truncate(stood)
        drafter.observe(emitted, rows.hidden[:, len(emitted) - 1])
        if wanted > 0:
            num_draft = next_num_draft(
                plan.schedule, num_draft, drafted=len(proposal), accepted=accepted, most=most
            )

        meter.switch("other")
        if on_round is not None:
            on_round(
                Round(
                    index,
                    meter.num_draft_by_round[-1],
                    tuple(proposal),
                    accepted,
                    token,
                    tuple(emitted),
                    len(committed),
                )
            )
        index += 1
        meter.switch(None)
        yield Commit(emitted, cut.text, cut.reason)
