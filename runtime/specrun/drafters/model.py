"""A smaller causal model with the target's tokenizer drafts, token by token.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023);
transformers' ``AssistedCandidateGenerator``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.drafters.base import Proposal, draw_from_row, proposal_of
from specrun.errors import UsageError
from specrun.sampling import Draw, Sampler
from specrun.target import BetweenChunks, Rows, Target

STAND_IN = 0  # read in place of a token that the draft model's vocabulary does not have


class Reader:
    """A model and the tokens that its KV holds: all of a text, or its first and its last ones.

    A text longer than the model's context is read again from the middle of what fits, behind its
    first token, which models pay attention to whatever follows (Xiao et al., "Efficient Streaming
    Language Models with Attention Sinks", 2024)::

        token   0  skipped …  |  skipped + 1 … length - 1  |  not read yet
        KV row  0                1 … rows - 1

    That costs one row more per token of a text without end. Lengths count the text's tokens.
    ``between_chunks``: see :meth:`specrun.target.Verifier.prefill`.
    """

    def __init__(self, model: Target) -> None:
        self.model = model
        self.between_chunks: BetweenChunks | None = None
        self._skipped = 0

    @property
    def length(self) -> int:
        """The first so many tokens are read."""
        rows = self.model.length
        return rows + self._skipped if rows else 0

    @property
    def max_context(self) -> int:
        """Rows that the KV can hold."""
        return self.model.kv.max_context

    @property
    def slid(self) -> bool:
        """Whether tokens in the middle of the text are left out."""
        return self._skipped > 0

    def reset(self) -> None:
        """Nothing is read."""
        self.model.truncate(0)
        self._skipped = 0

    def truncate(self, length: int) -> None:
        """No more than the first ``length`` tokens are read."""
        if length >= self.length:
            return
        if length <= self._skipped:
            self.reset()
        else:
            self.model.truncate(length - self._skipped)

    def room(self, length: int, drafts: int) -> int:
        """How many of ``drafts`` can be drafted behind ``length`` tokens.

        Where that is none, the reader starts over with fewer of the tokens. The last draft needs
        no row.
        """
        wanted = min(drafts, self.max_context // 2)
        if self._left(length) < wanted:
            self._slide(length)
        return min(drafts, self._left(length))

    def read(self, tokens: Sequence[int], *, want_logits: bool = False) -> Rows:
        """Feed what is not read of ``tokens``, or the last one again; returns the last row."""
        self.truncate(len(tokens) - 1)
        start = self.length
        new = np.array([tokens[start:]], dtype=np.int64)
        if start == 0 and self._skipped:
            new = np.array([[tokens[0], *tokens[1 + self._skipped :]]], dtype=np.int64)
        new[new >= self.model.engine.vocab_size] = STAND_IN
        return self.model.prefill(new, want_logits=want_logits, between_chunks=self.between_chunks)

    def _left(self, length: int) -> int:
        return self.max_context - (length - self._skipped) + 1

    def _slide(self, length: int) -> None:
        self.reset()
        self._skipped = max(0, length - max(2, self.max_context // 2))


class ModelDrafter:
    """A draft model with a session and KV buffers of its own; never looks at hidden states.

    ``vocab_size``: ids that the target and its tokenizer have; ``table_size``: those that the
    target scores. Tables are padded differently, so the draft model's may be larger or smaller.
    """

    max_drafts: int | None = None
    needs_prompt_rows = False

    def __init__(self, model: Target, *, vocab_size: int, table_size: int) -> None:
        self.reader = Reader(model)
        self.vocab_size = min(vocab_size, model.engine.vocab_size)
        self.table_size = table_size
        self._tokens: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Remember the prompt; it is read with the first proposal.

        What it has in common with the text before stays read: the next turn of a chat. Not where
        tokens were left out, as a cold run would leave out others.
        """
        if self.reader.slid:
            self.reset()
        self.reader.truncate(common_prefix(self._tokens, tokens))
        self._tokens = list(tokens)

    def reset(self) -> None:
        """Forget everything: the next text must not depend on those before."""
        self.reader.reset()
        self._tokens = []

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """Remember the committed tokens."""
        self._tokens += tokens

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        """Tokens drawn one after the other. Raises EngineError.

        The first run feeds what was committed since the last one, the others a draft each; the
        last draft is not fed.
        """
        text = list(self._tokens)
        prefix = np.empty(len(text) + count, dtype=np.int64)
        prefix[: len(text)] = text
        draws: list[Draw] = []
        for _ in range(self.reader.room(len(text), count)):
            try:
                draw = self._draw(text, prefix[: len(text)], sampler)
            except UsageError:
                break  # the options leave none of the tokens that both models have
            if draw.token >= self.vocab_size:
                break  # the engine's own argmax, among tokens that do not exist
            draws.append(draw)
            prefix[len(text)] = draw.token
            text.append(draw.token)
            if not draw.confident:
                break
        return proposal_of(draws)

    def truncate(self, length: int) -> None:
        """Forget what was read of the tokens from ``length`` on."""
        del self._tokens[length:]
        # [0, length) stands. The KV holds no more than that, and one token less when every draft
        # was accepted: the last one was never fed.
        self.reader.truncate(length)

    def _draw(self, text: Sequence[int], prefix: NDArray[np.int64], sampler: Sampler) -> Draw:
        rows = self.reader.read(text, want_logits=sampler.needs_draft_logits)
        logits = None if rows.logits is None else self._common(rows.logits[0, 0])
        return draw_from_row(sampler, prefix, int(rows.argmax[0, 0]), logits)

    def _common(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits ``[table_size]``, minus infinity for ids that not all three have."""
        if len(logits) == self.vocab_size == self.table_size:
            return logits
        row = np.full(self.table_size, -np.inf, dtype=np.float32)
        row[: self.vocab_size] = logits[: self.vocab_size]
        return row


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(a), len(b))
    if list(a[:shorter]) == list(b[:shorter]):
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
