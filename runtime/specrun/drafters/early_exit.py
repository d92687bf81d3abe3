"""The target's own first layers draft: its front with its head.

Elhoushi et al., "LayerSkip" (2024); transformers' ``EarlyExitCandidateGenerator``. What the front
computes for a draft is the target's own and is not computed again when the draft is verified, see
:mod:`specrun.split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specrun.drafters.base import Proposal, draw_from_row, proposal_of
from specrun.sampling import Draw, Sampler
from specrun.target import Rows


class EarlyExitTarget(Protocol):
    """A target whose first layers can be run alone; see :class:`specrun.split.SplitTarget`."""

    def start_drafting(self, rows: int) -> int:
        """The first layers are ahead by nothing; returns how many of ``rows`` they can take."""
        ...

    def draft(self, token: int, *, want_logits: bool = False) -> Rows:
        """Feed one token to the first layers only. Raises EngineError."""
        ...


class EarlyExitDrafter:
    """Drafts on the target itself, so it has no rows of its own; it keeps the text for processors.

    A draft costs a run of the front and one of the head.
    """

    max_drafts: int | None = None
    needs_prompt_rows = False

    def __init__(self, target: EarlyExitTarget) -> None:
        self._target = target
        self._tokens: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Remember the prompt; the target reads it."""
        self._tokens = list(tokens)

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """Remember the committed tokens."""
        self._tokens += tokens

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        """Tokens drawn one after the other, as many as the context has room for.

        The first run feeds the last committed token, the others a draft each. The last draft is
        not fed: the target feeds it when it verifies. Raises EngineError.
        """
        target, length = self._target, len(self._tokens)
        # One row for the last committed token, and one for every draft.
        count = max(0, target.start_drafting(1 + count) - 1)
        prefix = np.empty(length + count, dtype=np.int64)
        prefix[:length] = self._tokens
        draws: list[Draw] = []
        for end in range(length, length + count):
            draw = self._draw(prefix[:end], sampler)
            draws.append(draw)
            prefix[end] = draw.token
            if not draw.confident:
                break
        return proposal_of(draws)

    def truncate(self, length: int) -> None:
        """Forget tokens; the rows of the target are truncated by whoever verified them."""
        del self._tokens[length:]

    def _draw(self, prefix: NDArray[np.int64], sampler: Sampler) -> Draw:
        rows = self._target.draft(int(prefix[-1]), want_logits=sampler.needs_draft_logits)
        logits = None if rows.logits is None else rows.logits[0, 0]
        return draw_from_row(sampler, prefix, int(rows.argmax[0, 0]), logits)
