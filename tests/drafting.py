"""Scripted drafters: any accept pattern on demand.

Each checks what the loop tells it: the committed tokens grow without a gap, the hidden row is the
one that gave the last token, and a truncation is at the tokens that stood.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specrun.drafters.base import Proposal
from specrun.sampling import Sampler


class Truth(Protocol):
    """What the target will say: a toy, or a text that is known already."""

    @property
    def modulus(self) -> int: ...

    def plain(self, prompt: Sequence[int], count: int) -> list[int]: ...


@dataclass(frozen=True)
class KnownText:
    """A prompt of ``prompt_length`` tokens with what a real target says behind it.

    ``modulus``: its vocabulary. ``hidden``: its hidden state at every row of ``tokens``.
    """

    tokens: list[int]
    prompt_length: int
    modulus: int
    hidden: NDArray[np.float32] = field(repr=False)

    @property
    def prompt(self) -> list[int]:
        """The tokens that are given."""
        return self.tokens[: self.prompt_length]

    @property
    def new(self) -> list[int]:
        """The tokens that the target says."""
        return self.tokens[self.prompt_length :]

    def plain(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens, as far as they are known."""
        assert self.tokens[: len(prompt)] == list(prompt)
        return self.tokens[len(prompt) : len(prompt) + count]


def check_hidden(truth: Truth, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
    """The last row is that of the last token but one: the row that gave the last token."""
    row = len(tokens) - 2
    if isinstance(truth, KnownText):
        first = row + 1 - len(hidden)
        np.testing.assert_allclose(hidden, truth.hidden[first : row + 1], atol=1e-4, rtol=1e-4)
    else:
        # The toy's hidden state is (position, token).
        rows = [[at, tokens[at]] for at in range(row + 1 - len(hidden), row + 1)]
        assert hidden.tolist() == rows


class Scripted:
    """Drafts the target's own tokens, changed by ``draft``; the oracle as it is."""

    max_drafts: int | None = None
    needs_prompt_rows = False

    def __init__(self, toy: Truth) -> None:
        self.toy = toy
        self.tokens: list[int] = []
        self.held = 0  # tokens that a drafter with a cache of its own would hold
        self.asked: list[int] = []
        self.proposals: list[list[int]] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.held = len(tokens)

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        assert self.held <= len(self.tokens) + len(tokens)
        assert len(hidden) == len(tokens)
        self.tokens += tokens
        check_hidden(self.toy, self.tokens, hidden)

    def propose(self, count: int, sampler: Sampler) -> Proposal | Sequence[int]:
        assert self.held <= len(self.tokens)
        self.asked.append(count)
        right = self.toy.plain(self.tokens, count)
        proposal = [self.draft(token, place) for place, token in enumerate(right)]
        self.proposals.append(proposal)
        self.held = len(self.tokens) + len(proposal)
        return proposal

    def truncate(self, length: int) -> None:
        assert len(self.tokens) <= length <= max(self.held, len(self.tokens))
        self.held = min(self.held, length)

    def draft(self, token: int, place: int) -> int:
        """What to draft where ``token`` is right."""
        return token


class Oracle(Scripted):
    """Never wrong."""


class Wrong(Scripted):
    """Never right."""

    def draft(self, token: int, place: int) -> int:
        return (token + 1) % self.toy.modulus


class Noisy(Scripted):
    """Wrong with probability 0.3."""

    def __init__(self, toy: Truth, seed: int = 0) -> None:
        super().__init__(toy)
        self.random = random.Random(seed)

    def draft(self, token: int, place: int) -> int:
        return (token + 1) % self.toy.modulus if self.random.random() < 0.3 else token


class RightFor(Scripted):
    """Right for as many tokens as the pattern says, round by round, then wrong."""

    def __init__(self, toy: Truth, pattern: Sequence[int]) -> None:
        super().__init__(toy)
        self.pattern = pattern

    def draft(self, token: int, place: int) -> int:
        right = self.pattern[(len(self.asked) - 1) % len(self.pattern)]
        return token if place < right else (token + 1) % self.toy.modulus


class CorruptEvery(Scripted):
    """Every n-th token it drafts, over all rounds, is wrong."""

    def __init__(self, toy: Truth, every: int) -> None:
        super().__init__(toy)
        self.every = every
        self.drafted = 0

    def draft(self, token: int, place: int) -> int:
        self.drafted += 1
        return (token + 1) % self.toy.modulus if self.drafted % self.every == 0 else token


class Replay(Scripted):
    """Drafts from a given list, by position in the new text."""

    def __init__(self, toy: Truth, tokens: Sequence[int], prompt_length: int) -> None:
        super().__init__(toy)
        self.replayed = list(tokens)
        self.prompt_length = prompt_length

    def propose(self, count: int, sampler: Sampler) -> Proposal | Sequence[int]:
        done = len(self.tokens) - self.prompt_length
        proposal = self.replayed[done : done + count]
        self.held = len(self.tokens) + len(proposal)
        return proposal


class Failing(Scripted):
    """Raises at its n-th proposal."""

    def __init__(self, toy: Truth, at: int) -> None:
        super().__init__(toy)
        self.at = at

    def propose(self, count: int, sampler: Sampler) -> Proposal | Sequence[int]:
        if len(self.asked) == self.at:
            raise RuntimeError("the drafter broke")
        return super().propose(count, sampler)
