"""What the loop asks of a drafter: four verbs and a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from specrun.sampling import Distribution, Draw, Sampler


class Proposal(NamedTuple):
    """Drafted tokens. ``q[i]``: what ``tokens[i]`` was drawn from; None: each was certain."""

    tokens: list[int]
    q: list[Distribution] | None = None


def draw_from_row(
    sampler: Sampler, prefix: NDArray[np.int64], argmax: int, logits: NDArray[np.float32] | None
) -> Draw:
    """The token behind ``prefix``: the engine's own argmax where no ``logits`` were asked for."""
    return Draw(argmax, None, True) if logits is None else sampler.draw(prefix, logits)


def proposal_of(draws: Sequence[Draw]) -> Proposal:
    """The drawn tokens, with what they were drawn from unless they were certain."""
    q = [draw.q for draw in draws if draw.q is not None]
    return Proposal([draw.token for draw in draws], q if draws and len(q) == len(draws) else None)


class Drafter(Protocol):
    """Proposes tokens that may follow the committed ones. It is told everything committed.

    Per call: ``begin`` once, ``observe`` with the first token; then in every round ``propose``
    (unless nothing may be drafted), ``truncate`` and ``observe``.

    One that ``needs_prompt_rows`` may have a fifth verb, :meth:`Resuming.resume`, called instead of
    ``begin``.
    """

    @property
    def max_drafts(self) -> int | None:
        """Most tokens that one proposal can hold; None: any number."""
        ...

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether it must see the target's hidden state at every row of the prompt."""
        ...

    def begin(self, tokens: Sequence[int]) -> None:
        """Start over with a prompt, which the target has not read yet.

        With ``needs_prompt_rows`` only the first token comes here, the others by ``observe``.
        """
        ...

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """``tokens`` are committed now; the last of them is not in the target's KV yet.

        ``hidden`` ``[len(tokens), hidden size]``: ``hidden[i]`` is the target's hidden state, after
        the final norm, at the row that gave ``tokens[i]``; a view that the next target run
        overwrites.
        """
        ...

    def propose(self, count: int, sampler: Sampler) -> Proposal | Sequence[int]:
        """Up to ``count`` tokens (at least 1) that may follow; fewer or none is fine.

        A drafter with a distribution draws with ``sampler`` and returns what it drew from; plain
        tokens are drafts that were certain.
        """
        ...

    def truncate(self, length: int) -> None:
        """Only the first ``length`` tokens of what was committed and proposed stand."""
        ...


class Resuming(Protocol):
    """A drafter that needs the rows of the prompt and keeps what it made of those of before."""

    def resume(self, tokens: Sequence[int], most: int) -> int:
        """Start over with the prompt ``tokens``, of which at least one comes by ``observe``.

        Returns how many of the target's rows, from the first on, it need not see, at most ``most``:
        the tokens from that number + 1 on come by ``observe``.
        """
        ...


def resume(drafter: Drafter, tokens: Sequence[int], most: int) -> int:
    """``drafter.resume``, or where there is none, ``begin`` with the first token and 0."""
    if callable(getattr(type(drafter), "resume", None)):
        return cast(Resuming, drafter).resume(tokens, most)
    drafter.begin(tokens[:1])
    return 0
