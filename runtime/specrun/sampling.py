"""Sampling: from the logits of a slot to a distribution, and from it to a token.

Milliseconds of ``Sampler.draw`` for one slot of 262,144 logits, best of 31 in one run, on one core
of a server CPU with AVX-512 that others were using too. Peaked: N(0, 3²) with 50 tokens raised by
12; flat: N(0, 0.5²), the worst case of a cut by mass, as almost everything stands and is sorted::

    options                                          peaked    flat
    temperature 0.7                                     1.3     1.1
    temperature 0.7, top_k 64, top_p 0.95               0.4     0.5
     + repetition penalty, no repeated 3-gram (2000)    0.6     0.6
    top_p 0.95                                          0.8      46
    min_p 0.05                                          0.2     7.9
    typical_p 0.9                                       1.5      48

(2000: tokens of the prefix.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrun.errors import EngineError, UsageError
from specrun.processors import Filter, Logits, Prefix, Processor, Temperature

BLOCK = 512  # probabilities


@dataclass(frozen=True, eq=False)
class Distribution:
    """What a token was, or is to be, drawn from.

    ``probs`` [n] float64 sum to 1. ``ids`` [n]: the token of each, ascending; None: token i has
    ``probs[i]`` (dense). Every token that is not listed has probability 0.
    """

    probs: NDArray[np.float64]
    ids: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.ids is not None:
            if self.ids.shape != self.probs.shape:
                raise ValueError(f"{self.ids.shape} ids for {self.probs.shape} probabilities")
            if self.ids[0] < 0 or (np.diff(self.ids) <= 0).any():
                raise ValueError("ids must be ascending, from 0, and each only once")
        # Written so that NaN fails too.
        if not (abs(self.probs.sum() - 1.0) <= 1e-6 and self.probs.min() >= 0):
            raise ValueError("probabilities must be 0 or more and sum to 1")

    @staticmethod
    def one_hot(token: int) -> Distribution:
        """The one that always gives ``token``."""
        return Distribution(np.ones(1), np.array([token], dtype=np.int64))

    @staticmethod
    def normalised(
        weights: NDArray[np.float64], ids: NDArray[np.int64] | None = None
    ) -> Distribution:
        """``weights`` [n] of 0 or more, with a sum above 0, divided by their sum."""
        return Distribution(weights / weights.sum(), ids)

    @property
    def size(self) -> int:
        """Every token with a probability is below this."""
        return self.probs.size if self.ids is None else int(self.ids[-1]) + 1

    def of(self, token: int) -> float:
        """The probability of ``token``; 0 outside."""
        if self.ids is None:
            return float(self.probs[token]) if 0 <= token < self.probs.size else 0.0
        index = int(np.searchsorted(self.ids, token))
        found = index < self.ids.size and self.ids[index] == token
        return float(self.probs[index]) if found else 0.0

    def at(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """The probabilities of ``ids`` [m], each 0 or more; 0 outside."""
        if self.ids is None:
            index = np.minimum(ids, self.probs.size - 1)
            found = ids < self.probs.size
        else:
            index = np.minimum(np.searchsorted(self.ids, ids), self.ids.size - 1)
            found = self.ids[index] == ids
        return np.where(found, self.probs[index], 0.0)

    def dense(self, size: int) -> NDArray[np.float64]:
        """[size]: the probability of every token. Raises ValueError when one lies beyond."""
        ids = slice(self.probs.size) if self.ids is None else self.ids
        dense = np.zeros(max(size, self.size))
        dense[ids] = self.probs
        if dense[size:].any():
            raise ValueError(f"tokens up to {self.size - 1} do not fit into {size}")
        return dense[:size]

    def argmax(self) -> int:
        """The most probable token, the lowest of equal ones."""
        index = int(np.argmax(self.probs))
        return index if self.ids is None else int(self.ids[index])

    def pick(self, uniform: float) -> int:
        """The token at ``uniform`` in [0, 1) of the cumulative distribution; never one with 0.

        It is the first whose cumulative sum is above ``uniform * sum``, which is below the sum for
        every float in [0, 1). Found in two steps, the block and then the token, so that a large
        vocabulary needs no cumulative sum of its own.
        """
        sums = np.cumsum(np.add.reduceat(self.probs, np.arange(0, self.probs.size, BLOCK)))
        place = uniform * sums[-1]
        # Where a cumulative sum rises above the place there is a probability.
        block = int(np.searchsorted(sums, place, side="right"))
        inside = self.probs[block * BLOCK : (block + 1) * BLOCK]
        rest = place - (sums[block - 1] if block else 0.0)
        index = int(np.searchsorted(np.cumsum(inside), rest, side="right"))
        if index == inside.size:  # the block's two sums round differently: its last token
            index = int(np.flatnonzero(inside)[-1])
        index += block * BLOCK
        return index if self.ids is None else int(self.ids[index])


class Draw(NamedTuple):
    """A token, the distribution it was drawn from (None: it is the argmax, one-hot), and
    whether its probability reaches the confidence threshold."""

    token: int
    q: Distribution | None
    confident: bool


class Sampler:
    """Processors, random numbers and confidence of one generation.

    ``warpers`` (temperature, top-k, …) belong to ``do_sample`` only. ``seed``: of this sampler's
    own generator, PCG64; None takes one from the system. numpy's global state is never used.
    ``confidence_threshold``: a draw below this probability is not confident; 0 is off.
    ``keep_q``: greedy draws also carry the softmax that they are the argmax of, which the ensemble
    (``accept.accept_ensemble``) mixes with the target's.
    """

    def __init__(
        self,
        *,
        do_sample: bool = False,
        seed: int | None = None,
        processors: Sequence[Processor] = (),
        warpers: Sequence[Processor] = (),
        confidence_threshold: float = 0.0,
        keep_q: bool = False,
    ) -> None:
        if warpers and not do_sample:
            raise ValueError("warpers are for sampling")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            raise UsageError(
                f"seed: must be a whole number of at least 0, got {seed!r}",
                hint="give a seed of 0 or more, or leave it out for another text each time",
            )
        if not 0 <= confidence_threshold <= 1:
            raise UsageError(
                f"confidence_threshold: must be from 0 to 1, got {confidence_threshold!r}",
                hint="give a probability; 0 never stops drafting early",
            )
        self.do_sample = do_sample
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.confidence_threshold = confidence_threshold
        self._processors = tuple(processors)
        self._warpers = tuple(warpers)
        self._keep_q = keep_q

    @property
    def temperature(self) -> float:
        """For engines that draw in their graph; 1 where there is none, also when greedy."""
        found = (w.temperature for w in self._warpers if isinstance(w, Temperature))
        return next(found, 1.0)

    @property
    def wants_q(self) -> bool:
        """Whether a draft must say what it was drawn from even when greedy."""
        return self._keep_q

    @property
    def needs_logits(self) -> bool:
        """False: greedy with nothing to process, so the engine's own argmax is the answer."""
        return self.do_sample or self._keep_q or bool(self._processors)

    @property
    def needs_draft_logits(self) -> bool:
        """The same for drafters, whose confidence may be asked for too."""
        return self.needs_logits or self.confidence_threshold > 0

    def uniform(self) -> float:
        """The next random number in [0, 1)."""
        return float(self.rng.random())

    def process(self, prefix: Prefix, logits: Logits) -> Logits:
        """[vocab]: the logits after all processors, and after the warpers when sampling.

        Raises UsageError when they leave no token, EngineError when ``logits`` are no numbers.
        """
        values, ids = self._processed(prefix, logits)
        if ids is None:
            return values
        dense = np.full(np.shape(logits), -np.inf, dtype=np.float32)
        dense[ids] = values
        return dense

    def probabilities(self, prefix: Prefix, logits: Logits) -> Distribution:
        """The softmax of ``process()``, also when greedy; sparse where a filter took tokens out."""
        return softmax(*self._processed(prefix, logits))

    def distribution(self, prefix: Prefix, logits: Logits) -> Distribution:
        """What the next token is drawn from. Greedy: the argmax, one-hot."""
        if self.do_sample:
            return self.probabilities(prefix, logits)
        values, _ = self._processed(prefix, logits)
        return Distribution.one_hot(int(np.argmax(values)))

    def draw(self, prefix: Prefix, logits: Logits) -> Draw:
        """A token, with the very Distribution that it was drawn from."""
        if not self.do_sample and not self._keep_q and self.confidence_threshold <= 0:
            values, _ = self._processed(prefix, logits)
            return Draw(int(np.argmax(values)), None, True)
        q = self.probabilities(prefix, logits)
        token = self.draw_from(q) if self.do_sample else q.argmax()
        confident = self.confidence_threshold <= 0 or q.of(token) >= self.confidence_threshold
        return Draw(token, q if self.do_sample or self._keep_q else None, confident)

    def draw_from(self, distribution: Distribution) -> int:
        """A token of ``distribution``. Takes one random number."""
        return distribution.pick(self.uniform())

    def _processed(self, prefix: Prefix, logits: Logits) -> tuple[Logits, NDArray[np.int64] | None]:
        """The logits that are left, and whose they are (None: token i has logit i)."""
        prefix = np.asarray(prefix, dtype=np.int64)
        values = np.asarray(logits, dtype=np.float32)
        if not np.isfinite(values.max()):
            raise EngineError(
                f"the largest logit after {prefix.size} tokens is {values.max()}",
                hint="the engine computes no numbers here; try another precision",
            )
        for processor in self._processors:
            values = processor(prefix, values)
        if self._processors:
            _check_left(values, prefix.size)

        ids: NDArray[np.int64] | None = None
        for warper in self._warpers:
            if not isinstance(warper, Filter):
                values = warper(prefix, values)
                continue
            kept = warper.keep(values)
            if kept.size < values.size:
                values, ids = values[kept], kept if ids is None else ids[kept]
        return values, ids


def softmax(logits: Logits, ids: NDArray[np.int64] | None = None) -> Distribution:
    """``exp(l - max) / sum`` of logits [n] float32 that are finite or -inf, in float64.

    Differences are exact near the largest, so logits that differ do not become equal there.
    """
    probs = np.exp(logits - logits.max(), dtype=np.float64)
    probs /= probs.sum()
    return Distribution(probs, ids)


def _check_left(logits: Logits, length: int) -> None:
    top = logits.max()
    if top == -np.inf:
        raise UsageError(
            f"no token is left to choose after {length} tokens: the options forbid every one",
            hint="forbid fewer tokens (logit_bias, bad_words_ids, no_repeat_ngram_size, "
            "min_new_tokens), or ask for a text that needs none of them (json_schema, regex)",
        )
    if not np.isfinite(top):
        raise UsageError(
            f"the largest logit after {length} tokens is {top} once the options are applied",
            hint="give logit_bias and repetition_penalty smaller values",
        )
