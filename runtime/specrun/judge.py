"""Judges a proposal by what the target says: which rule of acceptance holds, on which logits.

The rules themselves are pure functions, see :mod:`specrun.accept`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrun.accept import Accepted, accept_ensemble, accept_greedy, accept_sampled
from specrun.constraint import Constraint
from specrun.drafters.base import Proposal
from specrun.sampling import Distribution, Sampler
from specrun.target import Rows


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """``logprob``: natural logarithm of the probability that the target's own distribution, before
    any processor, gives ``token``; ``top``: its most probable tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Judge:
    """Accepts and rejects for one sequence. ``ensemble_weight`` 1 is lossless.

    ``logprobs``: alternatives to report with every token, None: report nothing. ``constraint``: one
    of the sampler's processors, which holds for the ensemble too.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        ensemble_weight: float = 1.0,
        logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.sampler = sampler
        self.ensemble_weight = ensemble_weight
        self.logprobs = logprobs
        self._constraint = constraint
        # The prefix of a slot is a view of this array: committed tokens, then the drafts before.
        self._tokens: NDArray[np.int64] = np.empty(256, dtype=np.int64)
        self._held = 0

    @property
    def wants_logits(self) -> bool:
        """Whether the target's logits are needed beside its argmax."""
        return self.sampler.needs_logits or self.logprobs is not None

    def judge(self, committed: Sequence[int], proposal: Proposal, rows: Rows) -> Accepted:
        """How much of ``proposal`` stands behind ``committed``, and the token after it.

        Row i of ``rows`` is the target's answer to ``committed`` and ``proposal.tokens[:i]``. Rows
        behind a rejection are never processed.
        """
        drafts, q = proposal
        sampler = self.sampler
        if not sampler.needs_logits:
            return accept_greedy(drafts, rows.argmax[0].tolist())
        logits = rows.logits
        assert logits is not None, "the target was asked for logits"
        tokens = self._sequence(committed, drafts)
        length = len(committed)
        weight = self.ensemble_weight if drafts else 1.0

        def p(slot: int) -> Distribution:
            return sampler.probabilities(tokens[: length + slot], logits[0, slot])

        if sampler.do_sample:
            own = len(drafts)
            if weight < 1 and self._constraint is not None:
                own = self._constraint.count_allowed(committed, drafts)
            draw = sampler.draw_from
            return accept_sampled(drafts, q, p, sampler.uniform, draw, weight, mixed=own)
        if weight < 1:
            return accept_ensemble(drafts, q or (), p, weight)

        def argmax(slot: int) -> int:
            return sampler.draw(tokens[: length + slot], logits[0, slot]).token

        return _accept_lazily(drafts, argmax)

    def logprobs_of(self, tokens: Sequence[int], rows: Rows) -> list[TokenLogprob]:
        """What the target itself gives ``tokens``, of which row i gave ``tokens[i]``."""
        if self.logprobs is None:
            return []
        assert rows.logits is not None
        return [_logprob(token, rows.logits[0, i], self.logprobs) for i, token in enumerate(tokens)]

    def _sequence(self, committed: Sequence[int], drafts: Sequence[int]) -> NDArray[np.int64]:
        """``committed`` and ``drafts`` in one array that nobody else may write to."""
        length = len(committed)
        needed = length + len(drafts)
        if needed > len(self._tokens):
            grown: NDArray[np.int64] = np.empty(2 * needed, dtype=np.int64)
            grown[: self._held] = self._tokens[: self._held]
            self._tokens = grown
        # [0, held) was copied in an earlier round and committed tokens never change.
        self._tokens[self._held : length] = committed[self._held :]
        self._held = length
        self._tokens[length:needed] = drafts
        view = self._tokens[:needed]
        view.flags.writeable = False
        return view


def _accept_lazily(drafts: Sequence[int], argmax: Callable[[int], int]) -> Accepted:
    """As :func:`accept_greedy`, asking for one slot at a time."""
    for slot, draft in enumerate(drafts):
        token = argmax(slot)
        if token != draft:
            return Accepted(slot, token)
    return Accepted(len(drafts), argmax(len(drafts)))


def _logprob(token: int, logits: NDArray[np.float32], count: int) -> TokenLogprob:
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    count = min(count, len(row))
    best = np.argpartition(-row, count - 1)[:count] if count else np.empty(0, dtype=np.int64)
    best = best[np.argsort(-row[best], kind="stable")]
    top = tuple((int(i), float(row[i])) for i in best)
    return TokenLogprob(token, float(row[token]), top)
