"""A causal model with another tokenizer drafts: universal assisted generation.

Greedy, its text becomes target tokens. Sampling, it draws among the tokens that both vocabularies
have, so that what a token was drawn from is known: Timor et al., "Accelerating LLM Inference with
Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies" (2025). In transformers
these are ``AssistedCandidateGeneratorDifferentTokenizers`` and
``UniversalSpeculativeDecodingGenerator``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.drafters.base import Proposal, proposal_of
from specrun.drafters.model import Reader, common_prefix
from specrun.drafters.retokenize import Follower, continuation, whole_characters
from specrun.drafters.vocabulary import VocabularyPair
from specrun.errors import UsageError
from specrun.sampling import Draw, Sampler
from specrun.target import Target

LOOKBEHIND = 16  # target tokens before the border that are encoded together with a draft
STEPS_PER_TOKEN = 2  # most drafter tokens per target token that is asked for
LEAST_MASS = 0.5  # of the drafter's probability on common tokens, to draw among them


class UniversalDrafter:
    """Follows the committed text in its own tokens and drafts in the target's.

    Its sequence is ``[ids of the committed text | its own drafts]``; the KV holds a part of that
    from the start. What a draft was worth shows when the text is committed: where its tokens are
    those of the drafts, they stay read.
    """

    max_drafts: int | None = None
    needs_prompt_rows = False

    def __init__(self, model: Target, pair: VocabularyPair) -> None:
        self.reader = Reader(model)
        self.pair = pair
        self._follower = Follower(pair.drafter.tokenizer)
        self._sequence: list[int] = []
        self._tokens: list[int] = []
        self._begun = False  # whether the text has a token that is no special one

    def begin(self, tokens: Sequence[int]) -> None:
        """Start over; what the prompt has in common with the text before stays read, unless tokens
        were left out, as a cold run would leave out others."""
        if self.reader.slid:
            self.reset()
        self._follower.begin([] if self.pair.bos is None else [self.pair.bos])
        self._tokens = []
        self._begun = False
        self._follow(tokens)

    def reset(self) -> None:
        """Forget everything: the next text must not depend on those before."""
        self.reader.reset()
        self._sequence = []

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """Follow the committed tokens."""
        self._follow(tokens)

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        """Tokens for what the drafter would say. Raises EngineError.

        When sampling they are drawn among the common tokens; where the drafter wants to say others,
        or the text ends inside a character, its greedy text is proposed, each token certain.
        Which of the two depends on the text so far only, never on what was drawn.
        """
        if not self._sequence:
            return Proposal([])  # neither a text nor a token that begins one
        del self._sequence[len(self._follower.ids) :]
        if sampler.do_sample and not self._follower.pending:
            draws = self._draw(count, sampler)
            if draws:
                return proposal_of(draws)
        return Proposal(self._translate(count, sampler))

    def truncate(self, length: int) -> None:
        """Drafts leave with the next text that is committed; a shorter text is followed anew."""
        if length < len(self._tokens):
            self.begin(self._tokens[:length])

    def _follow(self, tokens: Sequence[int]) -> None:
        """Bring the drafter's ids up to ``tokens`` behind those that are followed."""
        data = b""
        for token in tokens:
            special = self.pair.specials.get(token)
            if special is not None:
                self._follower.write(data)
                self._follower.special(special)
                data = b""
            else:
                data += self._text_of(token)
            self._tokens.append(token)
        self._follower.write(data)
        ids = self._follower.ids
        # What the KV has of these ids stands, drafted or not, and the rest is forgotten; the last
        # id is always fed, as its logits are wanted.
        self.reader.truncate(min(common_prefix(self._sequence, ids), max(0, len(ids) - 1)))
        self._sequence = list(ids)

    def _text_of(self, token: int) -> bytes:
        """What a target's token adds to the text."""
        tokenizer = self.pair.target.tokenizer
        if token in tokenizer.special_ids:
            if token == self.pair.target_bos and not self._tokens:
                return b""  # the drafter has a beginning of its own, or none
            return (tokenizer.name_of(token) or "").encode()
        surface = self.pair.target.of(token) or b""
        if not self._begun:
            self._begun = True
            # Some decoders trim the space that their encoder puts before a text.
            if surface.startswith(b" ") and not tokenizer.decode([token]).startswith(" "):
                return surface[1:]
        return surface

    def _draw(self, count: int, sampler: Sampler) -> list[Draw]:
        """Draws among the common tokens, as long as the drafter has most of its mass there.

        Processors see what they see in the target: the target's tokens and logits by its ids.
        """
        length = len(self._tokens)
        prefix = np.empty(length + count, dtype=np.int64)
        prefix[:length] = self._tokens
        draws: list[Draw] = []
        for place in range(length, length + self.reader.room(len(self._sequence), count)):
            rows = self.reader.read(self._sequence, want_logits=True)
            assert rows.logits is not None
            logits = rows.logits[0, 0]
            if self.pair.mass(logits) < LEAST_MASS:
                break
            try:
                draw = sampler.draw(prefix[:place], self.pair.to_target(logits))
            except UsageError:
                break  # the options leave none of the common tokens
            draws.append(draw)
            prefix[place] = draw.token
            here = self.pair.to_drafter.get(draw.token)
            if here is None or not draw.confident:
                break
            self._sequence.append(here)
        return draws

    def _translate(self, count: int, sampler: Sampler) -> list[int]:
        """The drafter's greedy text as target tokens.

        The last of them may be one that the drafter was about to make longer. It is proposed all
        the same: where it is wrong it costs a row of the target's run.
        """
        before, data = self._before_border(), b""
        found: list[int] = []
        for _ in range(self.reader.room(len(self._sequence), STEPS_PER_TOKEN * count)):
            token, confident = self._step(sampler)
            surface = self.pair.drafter.of(token)
            if surface is None:
                end = self.pair.special_of.get(token)
                if end is not None and not self._follower.pending[len(data) :]:
                    found = [*self._behind(before, data), end]
                break
            data += surface
            self._sequence.append(token)
            found = self._behind(before, data) or found
            if len(found) >= count or not confident:
                break
        return found[:count]

    def _step(self, sampler: Sampler) -> tuple[int, bool]:
        """The drafter's most probable token, and whether it is confident."""
        threshold = sampler.confidence_threshold
        rows = self.reader.read(self._sequence, want_logits=threshold > 0)
        token = int(rows.argmax[0, 0])
        if rows.logits is None:
            return token, True
        logits = rows.logits[0, 0]
        return token, bool(np.exp(logits - logits[token]).sum() * threshold <= 1)

    def _before_border(self) -> bytes:
        """The text of the last committed tokens, back to a special one."""
        data = b""
        for token in self._tokens[: -LOOKBEHIND - 1 : -1]:
            surface = self.pair.target.of(token)
            if surface is None:
                break
            data = surface + data
        return data

    def _behind(self, before: bytes, data: bytes) -> list[int]:
        """Target tokens for the whole characters of the drafted ``data``.

        It begins with the character that the committed text ends inside of, if any; the first
        bytes of that are committed.
        """
        pending = self._follower.pending
        whole = whole_characters(data)
        if not whole.startswith(pending):
            return []
        return continuation(self.pair.target, before, whole[len(pending) :])
