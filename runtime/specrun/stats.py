"""What a generation did: counted while it runs, frozen when it ends.

Counts hold only what stayed in the text. When a cut (end id, stop string) falls inside a block,
the last token kept stands as that round's own token, the drafts before it as drafted and
accepted, and the drafts behind it as ``discarded``: nobody asked whether they were right. So
these hold for every generation with at least one token, cut or not::

    accepted + rejected == drafted
    emitted == accepted + rounds + 1        (1: the token that prefill gives)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specrun.decode import encode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Mode = Literal["speculative", "plain", "fallback"]
VerifierName = Literal["engine", "torch"]
Phase = Literal["prefill", "draft", "verify", "other"]


@dataclass(frozen=True)
class Stats:
    """Counts in tokens, times in seconds.

    ``prefilled``: of the ``prompt_tokens``, those that the target read; it had the others in its
    KV, as a session has those of earlier turns (all but the last one, which is read again).
    ``mode``: ``plain`` when nothing was to be drafted, ``fallback`` when the drafter failed and
    the text was finished without it. ``target_steps``: verification runs of the target, one per
    round; prefill is apart. ``*_by_position[i]``: of the drafts at place i of a proposal.
    ``lossy``: verified against a mix of target and drafter, so the text is not the target's own.
    ``near_ties``: emitted tokens that led the second most probable one by less than what the width
    of a block may change (the manifest's ``width_noise``): there the text may be another one than
    that of method plain. None where that is not so or not known: in exact mode, when sampling, with
    processors, and in folders that were not compared with transformers.
    ``exact_width``: rows of every run of the target in exact mode, None without.
    ``provider``: where the target runs (empty before it did); ``providers``: the same of every
    engine that is open.
    ``verifier``: what verified in the end; ``torch_steps``: of the ``target_steps``, those that
    PyTorch ran; ``verifier_failure``: why it stood in for the engine, None where it did not.
    """

    method: str
    mode: Mode
    prompt_tokens: int
    emitted: int
    rounds: int
    target_steps: int
    drafted: int
    accepted: int
    rejected: int
    discarded: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    num_draft_by_round: tuple[int, ...]
    accepted_by_round: tuple[int, ...]
    seconds: dict[str, float]
    provider: str = ""
    lossy: bool = False
    exact_width: int | None = None
    near_ties: int | None = None
    providers: dict[str, str] = field(default_factory=dict)
    verifier: VerifierName = "engine"
    torch_steps: int = 0
    verifier_failure: str | None = None
    prefilled: int = 0

    def __post_init__(self) -> None:
        if self.accepted + self.rejected != self.drafted:
            raise ValueError(f"accepted + rejected must be drafted: {self}")
        if self.emitted and self.emitted != self.accepted + self.rounds + 1:
            raise ValueError(f"emitted must be accepted + rounds + 1: {self}")

    @property
    def exact(self) -> bool:
        """Whether it ran in exact mode."""
        return self.exact_width is not None

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that the target accepted; 0 when none was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The same by place in the proposal."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return tuple(accepted / drafted for accepted, drafted in pairs)

    @property
    def tokens_per_target_step(self) -> float:
        """Tokens that a verification run gave on average: 1 in plain decoding."""
        return (self.emitted - 1) / self.target_steps if self.target_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all phases, prefill included."""
        total = sum(self.seconds.values())
        return self.emitted / total if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and what follows from them, as plain JSON values."""
        derived = (
            "exact",
            "acceptance",
            "acceptance_by_position",
            "tokens_per_target_step",
            "tokens_per_second",
        )
        return {**encode(self), **{name: encode(getattr(self, name)) for name in derived}}


class Counts(NamedTuple):
    """What one round came to, in tokens; ``emitted`` less the accepted ones is its own token."""

    num_draft: int
    drafted: int
    accepted: int
    discarded: int
    emitted: int

    @classmethod
    def of(cls, num_draft: int, proposed: int, accepted: int, kept: int) -> Counts:
        """Of a round that asked for ``num_draft`` drafts, got ``proposed``, of which ``accepted``
        equal the target's, and ``kept`` tokens of its block stand (``accepted + 1`` without a
        cut)."""
        if kept <= accepted:
            return cls(num_draft, kept - 1, kept - 1, proposed - kept + 1, kept)
        return cls(num_draft, proposed, accepted, 0, kept)


@dataclass
class Meter:
    """Counts and times while a generation runs. One phase at a time; None: not ours (paused).

    A round is entered at once or not at all, so the counts hold wherever a generation breaks off.

    ``tie_below``: a lead smaller than this counts as a near tie; None: they are not counted.
    """

    mode: Mode = "plain"
    prompt_tokens: int = 0
    prefilled: int = 0
    first: int = 0  # tokens that the prompt gave: 1 when it is read
    rounds: list[Counts] = field(default_factory=list)
    tie_below: float | None = None
    near_ties: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefill", "draft", "verify", "other"), 0.0)
    )
    _phase: Phase | None = None
    _since: float = 0.0

    def switch(self, phase: Phase | None) -> None:
        """The current phase ends and ``phase`` begins."""
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] += now - self._since
        self._phase = phase
        self._since = now

    def times(self) -> tuple[float, float]:
        """Seconds of drafting and of verifying so far."""
        return self.seconds["draft"], self.seconds["verify"]

    def since(self, before: tuple[float, float]) -> tuple[float, float]:
        """Seconds of drafting and of verifying since ``times`` gave ``before``."""
        draft, verify = self.times()
        return draft - before[0], verify - before[1]

    @property
    def emitted(self) -> int:
        """New tokens so far."""
        return self.first + sum(counts.emitted for counts in self.rounds)

    def count_first(self) -> None:
        """The prompt is read and gave its token."""
        self.first = 1

    def count_round(self, num_draft: int, proposed: int, accepted: int, kept: int) -> None:
        """A round is over; see :meth:`Counts.of`."""
        self.rounds.append(Counts.of(num_draft, proposed, accepted, kept))

    def count_margins(self, margins: NDArray[np.float32]) -> None:
        """By how much each emitted token led the second most probable one, float32 ``[n]``."""
        if self.tie_below is not None:
            self.near_ties += sum(margin < self.tie_below for margin in margins.tolist())

    def freeze(self, method: str, **others: Any) -> Stats:
        """The statistics of what was counted so far; ``others``: fields that are not counted."""
        rounds = list(self.rounds)  # another thread may count on
        drafted_by_round = [counts.drafted for counts in rounds]
        accepted_by_round = [counts.accepted for counts in rounds]
        drafted, accepted = sum(drafted_by_round), sum(accepted_by_round)
        places = range(max(drafted_by_round, default=0))
        return Stats(
            method=method,
            mode=self.mode,
            prompt_tokens=self.prompt_tokens,
            prefilled=self.prefilled,
            emitted=self.first + sum(counts.emitted for counts in rounds),
            rounds=len(rounds),
            target_steps=len(rounds),
            drafted=drafted,
            accepted=accepted,
            rejected=drafted - accepted,
            discarded=sum(counts.discarded for counts in rounds),
            drafted_by_position=tuple(sum(n > i for n in drafted_by_round) for i in places),
            accepted_by_position=tuple(sum(n > i for n in accepted_by_round) for i in places),
            num_draft_by_round=tuple(counts.num_draft for counts in rounds),
            accepted_by_round=tuple(accepted_by_round),
            seconds=dict(self.seconds),
            near_ties=None if self.tie_below is None else self.near_ties,
            **others,
        )
