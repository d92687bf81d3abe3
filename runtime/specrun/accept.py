"""Acceptance: which drafts stand, and the target's own token behind them.

    rule             drafts           follows exactly
    accept_greedy    any              the target's argmax
    accept_sampled   drawn, or fixed  the target's distribution (weight 1)
    accept_ensemble  greedy           the argmax of the mix; not the target alone

p is the target's distribution after all processors, q the one a draft was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specrun.errors import UsageError
from specrun.sampling import Distribution


@dataclass(frozen=True, slots=True)
class Accepted:
    """``count`` drafts stand, then comes ``token``: the correction, or the bonus after all."""

    count: int
    token: int


def accept_greedy(proposal: Sequence[int], argmax: Sequence[int]) -> Accepted:
    """Accept while the draft equals the target's argmax.

    ``argmax[i]`` is the target's token after the last committed one and ``proposal[:i]``, for
    ``i`` in ``0 .. len(proposal)``::

        count = first i with proposal[i] != argmax[i], or len(proposal)
        token = argmax[count]

    >>> accept_greedy([7, 8, 9], [7, 8, 1, 4])
    Accepted(count=2, token=1)
    """
    count = 0
    for draft, wanted in zip(proposal, argmax, strict=False):
        if draft != wanted:
            break
        count += 1
    return Accepted(count, argmax[count])


def accept_sampled(
    proposal: Sequence[int],
    q: Sequence[Distribution] | None,
    p: Callable[[int], Distribution],
    uniform: Callable[[], float],
    draw: Callable[[Distribution], int],
    weight: float = 1.0,
    mixed: int | None = None,
) -> Accepted:
    """Rejection sampling: Leviathan, Kalman and Matias 2023, algorithm 1.

    ``q[i]``: what ``proposal[i]`` was drawn from; None: every draft was fixed (argmax, lookup), so
    its q is one-hot. ``p(i)``: the target's distribution after ``proposal[:i]``, for ``i`` in
    ``0 .. len(proposal)``, asked for in order and never behind a rejection. ``uniform()``: in
    [0, 1), taken once for each draft that is looked at. ::

        draft x of slot i stands with probability min(1, v(x) / q(x)),  v = w p + (1 - w) q
        else the token is drawn from (v - q)+ / sum = (p - q)+ / sum
        after all drafts the token is drawn from p(len(proposal))

    With ``weight`` w = 1 the tokens follow p exactly. Below 1 it is the static ensemble: more
    drafts stand, 1 - w * TV(p, q) of them, and the result is lossy. Differences from transformers
    (``_speculative_sampling``, ``assistant_ensemble_weight``): w = 1 is allowed, and is the same
    computation; a uniform of 0 never accepts a token that p forbids; the empty residual falls
    back to p for every w, not only below 1; fixed drafts have a one-hot q, not their softmax.

    ``mixed``: w holds for so many of the first drafts (None: all); those behind are left to p
    alone, for what must not come whatever the drafter says.

    Raises UsageError for a weight outside (0, 1], or below 1 without q; ValueError when a draft
    cannot have come from its q.
    """
    check_weight(weight, has_q=q is not None)
    for slot, token in enumerate(proposal):
        target = p(slot)
        given = Distribution.one_hot(token) if q is None else q[slot]
        share = weight if mixed is None or slot < mixed else 1.0
        if uniform() >= acceptance(token, target, given, share):
            return Accepted(slot, draw(residual(target, given)))
    return Accepted(len(proposal), draw(p(len(proposal))))


def accept_ensemble(
    proposal: Sequence[int],
    q: Sequence[Distribution],
    p: Callable[[int], Distribution],
    weight: float,
) -> Accepted:
    """The static ensemble when greedy: accept while the draft is the argmax of the mix.

    ``q[i]`` must be the drafter's whole distribution, the softmax of its processed logits, of
    which ``proposal[i]`` is the argmax. A one-hot q would make every draft win for w < 0.5.
    ``p(i)`` is the softmax of the target's processed logits. ::

        v_i = argmax(w p(i) + (1 - w) q[i]) over x with p(i)(x) > 0
        count = first i with proposal[i] != v_i
        token = v_count, or argmax p(len(proposal)) after all

    As in transformers, except that slots behind a miss are not computed, that what p forbids never
    comes, whatever q says, and that w = 1 is allowed: it gives what accept_greedy gives. Raises
    UsageError for a weight outside (0, 1].
    """
    check_weight(weight, has_q=True)
    for slot, token in enumerate(proposal):
        wanted = _largest(p(slot), q[slot], weight)
        if token != wanted:
            return Accepted(slot, wanted)
    return Accepted(len(proposal), p(len(proposal)).argmax())


def acceptance(token: int, p: Distribution, q: Distribution, weight: float = 1.0) -> float:
    """``min(1, (w p(x) + (1 - w) q(x)) / q(x))``. Raises ValueError when q(x) is 0."""
    given = q.of(token)
    if given <= 0:
        raise ValueError(f"token {token} has probability 0 in what it is said to be drawn from")
    return min(1.0, (weight * p.of(token) + (1.0 - weight) * given) / given)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """``(p - q)+ / sum``: what is drawn from after a rejection; p itself where that is empty.

    The residual of the ensemble is the same: ``(w p + (1 - w) q - q)+ = w (p - q)+``. It is as
    sparse as p. A one-hot q leaves p without that token.

    >>> residual(Distribution(np.array([0.5, 0.3, 0.2])), Distribution(np.array([0.2, 0.6, 0.2])))
    Distribution(probs=array([1., 0., 0.]), ids=None)
    """
    if p.ids is None and q.ids is not None:
        left = p.probs.copy()
        inside = q.ids < left.size
        left[q.ids[inside]] -= q.probs[inside]
    elif p.ids is None:
        left = p.probs.copy()
        common = min(left.size, q.probs.size)
        left[:common] -= q.probs[:common]
    else:
        left = p.probs - q.at(p.ids)
    np.maximum(left, 0.0, out=left)
    return Distribution.normalised(left, p.ids) if left.sum() > 0 else p


def mix(weight: float, p: Distribution, q: Distribution) -> Distribution:
    """``w p + (1 - w) q``; sparse when both are. p itself for w = 1."""
    if weight == 1.0:
        return p
    if p.ids is not None and q.ids is not None:
        ids = np.union1d(p.ids, q.ids)
        return Distribution(weight * p.at(ids) + (1.0 - weight) * q.at(ids), ids)
    size = max(p.size, q.size)
    return Distribution(weight * p.dense(size) + (1.0 - weight) * q.dense(size))


def _largest(p: Distribution, q: Distribution, weight: float) -> int:
    """The argmax of the mix, of tokens that p allows."""
    mixed = mix(weight, p, q)
    ids = np.arange(mixed.probs.size) if mixed.ids is None else mixed.ids
    return int(ids[np.argmax(np.where(p.at(ids) > 0, mixed.probs, -1.0))])


def check_weight(weight: float, *, has_q: bool) -> None:
    """Raise UsageError unless drafts with (``has_q``) or without a q can be mixed like this."""
    name = "assistant_ensemble_weight"
    if not 0 < weight <= 1:
        raise UsageError(
            f"{name}: must be above 0 and at most 1, got {weight!r}",
            hint="1 is lossless; 0.7 is a value to start with",
        )
    if weight < 1 and not has_q:
        raise UsageError(
            f"{name}: needs the probabilities of the drafts, got {weight!r} for drafts without any",
            hint="prompt lookup has none: use a draft model, or leave the weight out",
        )
