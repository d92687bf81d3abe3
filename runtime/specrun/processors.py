"""Logits processors: what changes the logits of a slot before a token is chosen.

Each is called with exactly the tokens before its slot (prompt, committed, earlier drafts) and the
logits of the slot, and equals the class of the same purpose in transformers'
``generation/logits_process.py`` (5.24). ``build`` puts them in the order of its
``_get_logits_processor``::

    logit bias, repetition penalty, no-repeat n-gram, bad words, min new tokens, the user's own,
    a grammar (:mod:`specrun.constraint`),
    and when sampling: temperature, top-k, top-p, min-p, typical-p

Differences, all on purpose:

* Of equal logits at the border of top-p the lower ids stand, so the argmax always does.
  There it depends on an unstable sort.
* Cumulative sums are float64, there float32: a border may differ where both sides are equal to 7
  digits.
* Min-p compares logits with ``log(min_p)`` below the largest, without a softmax. Same caveat.
* Ids that an engine has no logit for are ignored; ``build`` refuses those that no engine has.
* A temperature so small that logits overflow acts as the limit it stands for, not NaN.

No processor sorts a whole vocabulary: a filter first finds a set that surely holds what it keeps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specrun.errors import UsageError

Prefix = NDArray[np.int64]
Logits = NDArray[np.float32]
TINY = float(np.finfo(np.float32).tiny)
LOWEST = np.finfo(np.float32).min  # everything but -inf is at or above it


class Processor(Protocol):
    """``prefix`` [n] int64, ``logits`` [vocab] float32 -> [vocab] float32; changes no input."""

    def __call__(self, prefix: Prefix, logits: Logits, /) -> Logits: ...


class LogitBias:
    """``logits[token] += bias[token]``. A bias is finite or -inf, which forbids the token."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        for token, value in bias.items():
            _token("logit_bias", token)
            _number("logit_bias", value, "finite or -inf", lambda v: v < math.inf)
        self._ids = np.array(list(bias), dtype=np.int64)
        self._values = np.array(list(bias.values()), dtype=np.float32)

    def __call__(self, prefix: Prefix, logits: Logits) -> Logits:
        here = self._ids < logits.size
        changed = logits.copy()
        changed[self._ids[here]] += self._values[here]
        return changed


class RepetitionPenalty:
    """Keskar et al. 2019: for every token of the prefix::

    l = l * penalty if l < 0 else l / penalty
    """

    def __init__(self, penalty: float) -> None:
        self._penalty = _number(
            "repetition_penalty", penalty, "above 0", lambda v: 0 < v < math.inf
        )

    def __call__(self, prefix: Prefix, logits: Logits) -> Logits:
        seen = prefix[prefix < logits.size]
        old = logits[seen]
        changed = logits.copy()
        # A token that is met twice is written twice with the same value.
        changed[seen] = np.where(old < 0, old * self._penalty, old / self._penalty)
        return changed


class NoRepeatNgram:
    """Forbids every token that would complete an n-gram of the prefix a second time."""

    def __init__(self, size: int) -> None:
        self._size = _whole("no_repeat_ngram_size", size, 1)

    def __call__(self, prefix: Prefix, logits: Logits) -> Logits:
        windows = prefix.size - self._size + 1
        if windows <= 0:
            return logits
        suffix = prefix[prefix.size - self._size + 1 :]
        same = np.ones(windows, dtype=np.bool_)
        for offset, token in enumerate(suffix):
            same &= prefix[offset : offset + windows] == token
        return _forbid(logits, prefix[self._size - 1 :][same])


class BadWords:
    """Forbids the last token of every listed sequence whose other tokens end the prefix.

    As in transformers, a sequence that is one of ``end_ids`` alone is not forbidden.
    """

    def __init__(self, words: Iterable[Sequence[int]], end_ids: Iterable[int] = ()) -> None:
        ends = {(token,) for token in end_ids}
        self._words: list[tuple[NDArray[np.int64], int]] = []
        for word in words:
            ids = _tokens("bad_words_ids", word)
            if ids not in ends:
                self._words.append((np.array(ids[:-1], dtype=np.int64), ids[-1]))

    def __call__(self, prefix: Prefix, logits: Logits) -> Logits:
        last = [
            token
            for start, token in self._words
            if start.size <= prefix.size
            and np.array_equal(prefix[prefix.size - start.size :], start)
        ]
        return _forbid(logits, np.array(last, dtype=np.int64)) if last else logits


class MinNewTokens:
    """Forbids ``end_ids`` until ``count`` tokens stand behind a prompt of ``prompt_length``."""

    def __init__(self, count: int, prompt_length: int, end_ids: Iterable[int]) -> None:
        self._length = _whole("min_new_tokens", count, 0) + _whole(
            "prompt_length", prompt_length, 0
        )
        self._ends = np.array(sorted(end_ids), dtype=np.int64)

    def __call__(self, prefix: Prefix, logits: Logits) -> Logits:
        return _forbid(logits, self._ends) if prefix.size < self._length else logits


class UserProcessor:
    """A callable of the user's, ``(prefix, logits) -> logits``, whose result is checked.

    It gets a read-only view of the prefix and a copy of the logits, so it may work in place.
    Raises UsageError unless the result has the shape of the logits, is of real numbers, without
    NaN or +inf, and allows a token. Errors that it raises itself pass through.
    """

    def __init__(self, function: Callable[[Prefix, Logits], Any]) -> None:
        if not callable(function):
            raise UsageError(
                f"logits_processor: must be callable with (prefix, logits), got {function!r}",
                hint="give functions that take the token ids so far and the logits",
            )
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__qualname__)

    def __call__(self, prefix: Prefix, logits: Logits) -> Logits:
        tokens = prefix.view()
        tokens.flags.writeable = False
        return self._checked(self._function(tokens, logits.copy()), logits.shape)

    def _checked(self, result: Any, shape: tuple[int, ...]) -> Logits:
        if result is None:
            raise self._error("returned None", "return the logits, also after a change in place")
        array = np.asarray(result)
        if array.dtype.kind not in "fiu":
            raise self._error(f"returned dtype {array.dtype}", "return real numbers (float32)")
        if array.shape != shape:
            raise self._error(
                f"returned shape {array.shape} for logits of shape {shape}",
                "return one logit for each token",
            )
        with np.errstate(over="ignore"):
            changed = np.asarray(array, dtype=np.float32)
        top = changed.max()
        if np.isnan(top):
            raise self._error("returned NaN", "use -inf to forbid a token")
        if top == np.inf:
            raise self._error("returned +inf", "use a large finite logit to prefer a token")
        if top == -np.inf:
            raise self._error("returned -inf for every token", "leave at least one token")
        return changed

    def _error(self, what: str, hint: str) -> UsageError:
        return UsageError(f"logits_processor {self._name}: {what}", hint=hint)


class Temperature:
    """``logits / temperature``; above 0. At 0 sampling is greedy, which the caller decides."""

    def __init__(self, temperature: float) -> None:
        self.temperature = _number("temperature", temperature, "above 0 to sample", _is_positive)

    def __call__(self, prefix: Prefix, logits: Logits) -> Logits:
        with np.errstate(over="ignore"):
            scaled = logits / max(self.temperature, TINY)
            if np.isfinite(scaled.max()):
                return scaled
            # Too large for float32. Only differences count, and those below the largest may
            # overflow to -inf: the limit for temperature -> 0.
            below: Logits = logits - logits.max()
            return below / max(self.temperature, TINY)


class Filter(ABC):
    """A warper that only takes tokens out, by their logits alone. At least one stands."""

    @abstractmethod
    def keep(self, logits: Logits) -> NDArray[np.intp]:
        """Positions that stand, ascending. ``logits`` [n] are finite or -inf, one is finite."""

    def __call__(self, prefix: Prefix, logits: Logits) -> Logits:
        kept = self.keep(logits)
        changed = np.full_like(logits, -np.inf)
        changed[kept] = logits[kept]
        return changed


class TopK(Filter):
    """The ``k`` largest logits, and those that equal the last of them."""

    def __init__(self, k: int) -> None:
        self._k = _whole("top_k", k, 1)

    def keep(self, logits: Logits) -> NDArray[np.intp]:
        return np.flatnonzero(logits >= max(kth_largest(logits, self._k), LOWEST))


class TopP(Filter):
    """Holtzman et al. 2020: the fewest tokens, most probable first, whose mass reaches ``top_p``::

    token i stands  <=>  (mass of the tokens before it) < top_p
    """

    def __init__(self, top_p: float) -> None:
        self._top_p = _number("top_p", top_p, "from 0 to 1", lambda v: 0 <= v <= 1)

    def keep(self, logits: Logits) -> NDArray[np.intp]:
        if self._top_p == 1.0:  # a sum that rounds to 1 before its end must not end here
            return np.flatnonzero(logits >= LOWEST)
        weights = _weights(logits)
        total = float(weights.sum(dtype=np.float64))
        border, count = _reach(logits, weights, self._top_p * total)
        kept = np.flatnonzero(logits >= border)
        surplus = kept.size - count
        if surplus == 0:
            return kept
        equal = np.flatnonzero(logits[kept] == border)
        return np.delete(kept, equal[equal.size - surplus :])


class MinP(Filter):
    """Nguyen et al. 2024: tokens with a probability of at least ``min_p`` times the largest."""

    def __init__(self, min_p: float) -> None:
        self._min_p = _number("min_p", min_p, "from 0 to 1", lambda v: 0 <= v <= 1)

    def keep(self, logits: Logits) -> NDArray[np.intp]:
        distance = math.log(self._min_p) if self._min_p > 0 else -math.inf
        return np.flatnonzero(logits - logits.max() >= distance)


class TypicalP(Filter):
    """Meister et al. 2022: tokens whose surprise is closest to the entropy, up to ``typical_p``::

        | -log p(x) - H |  =  | l(x) - sum_y p(y) l(y) |

    The first tokens in this order whose mass reaches ``typical_p``, and those as close as the last.
    """

    def __init__(self, typical_p: float) -> None:
        self._mass = _number("typical_p", typical_p, "above 0, below 1", lambda v: 0 < v < 1)

    def keep(self, logits: Logits) -> NDArray[np.intp]:
        weights = _weights(logits)
        total = float(weights.sum(dtype=np.float64))
        shifted = logits - logits.max()
        # 0 * -inf would be NaN: what has no weight adds nothing.
        expected = np.zeros_like(weights)
        np.multiply(weights, shifted, out=expected, where=weights > 0)
        shifted -= np.float32(expected.sum(dtype=np.float64) / total)
        closeness = np.negative(np.abs(shifted, out=shifted), out=shifted)
        border, _ = _reach(closeness, weights, self._mass * total)
        return np.flatnonzero(closeness >= border)


class Processors(NamedTuple):
    """In the order in which they are called; ``warpers`` only when sampling."""

    processors: tuple[Processor, ...] = ()
    warpers: tuple[Processor, ...] = ()


def build(
    *,
    vocab_size: int,
    prompt_length: int,
    end_ids: Iterable[int] = (),
    do_sample: bool = False,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    bad_words_ids: Sequence[Sequence[int]] = (),
    min_new_tokens: int = 0,
    logits_processors: Sequence[Callable[[Prefix, Logits], Any]] = (),
    constraint: Processor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Processors:
    """The processors of one generation; those that would change nothing are left out.

    ``prompt_length`` in tokens; ``vocab_size`` is the target's. Without ``do_sample`` the options
    from ``temperature`` on do nothing. Raises UsageError that names the option.
    """
    ends = tuple(end_ids)
    for token in logit_bias or ():
        _token("logit_bias", token, vocab_size)
    for word in bad_words_ids:
        for token in _tokens("bad_words_ids", word):
            _token("bad_words_ids", token, vocab_size)

    before: list[Processor] = []
    if logit_bias:
        before.append(LogitBias(logit_bias))
    if repetition_penalty != 1.0:
        before.append(RepetitionPenalty(repetition_penalty))
    if no_repeat_ngram_size != 0:
        before.append(NoRepeatNgram(no_repeat_ngram_size))
    if len(bad_words_ids) > 0:
        before.append(BadWords(bad_words_ids, ends))
    if min_new_tokens != 0 and ends:
        before.append(MinNewTokens(min_new_tokens, prompt_length, ends))
    before += [UserProcessor(function) for function in logits_processors]
    if constraint is not None:
        before.append(constraint)

    warpers: list[Processor] = []
    if do_sample:
        if temperature != 1.0:
            warpers.append(Temperature(temperature))
        if top_k != 0:
            warpers.append(TopK(top_k))
        if top_p != 1.0:
            warpers.append(TopP(top_p))
        if min_p != 0.0:
            warpers.append(MinP(min_p))
        if typical_p != 1.0:
            warpers.append(TypicalP(typical_p))
    return Processors(tuple(before), tuple(warpers))


def kth_largest(values: Logits, k: int) -> np.float32:
    """The k-th largest of ``values`` [n], the smallest when k > n. Exact, without a sort.

    The k-th largest of the column maxima has k values at or above it, so what is looked for is at
    or above it too, and few other values are.
    """
    columns = max(512, 4 * k)
    rows = values.size // columns
    if rows >= 8:
        maxima = values[: rows * columns].reshape(rows, columns).max(axis=0)
        values = values[values >= np.partition(maxima, columns - k)[columns - k]]
    k = min(k, values.size)
    smallest: np.float32 = np.partition(values, values.size - k)[values.size - k]
    return smallest


def _weights(logits: Logits) -> Logits:
    """``exp(l - max)`` [n]: probabilities but for a factor."""
    weights: Logits = logits - logits.max()
    np.exp(weights, out=weights)
    return weights


def _reach(rank: Logits, weights: Logits, wanted: float) -> tuple[np.float32, int]:
    """How far to go through ``rank`` [n], largest first, until ``weights`` [n] sum to ``wanted``.

    Returns the rank of the last one, and how many there are, at least 1; all when rounding keeps
    the sum below, but none of -inf. Looks at 1024 of them, and at 16 times as many while their sum
    is too small.
    """
    first = 1024
    while True:
        near = np.flatnonzero(rank >= max(kth_largest(rank, first), LOWEST))
        near = near[np.argsort(-rank[near])]
        mass = np.cumsum(weights[near], dtype=np.float64)
        if mass[-1] >= wanted or first >= rank.size:
            last = min(int(np.searchsorted(mass, wanted)), near.size - 1)
            return np.float32(rank[near[last]]), last + 1
        first *= 16


def _forbid(logits: Logits, ids: NDArray[np.int64]) -> Logits:
    changed = logits.copy()
    changed[ids[ids < logits.size]] = -np.inf
    return changed


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _number(name: str, value: Any, wanted: str, right: Callable[[float], bool]) -> float:
    """``value`` as a float. Raises UsageError unless it is a number for which ``right``."""
    number = isinstance(value, (int, float, np.integer, np.floating))
    if not number or isinstance(value, bool) or not right(float(value)):
        raise UsageError(
            f"{name}: must be {wanted}, got {value!r}",
            hint=f"give {name} a number that is {wanted}",
        )
    return float(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _whole(name: str, value: Any, least: int) -> int:
    if not _is_whole(value) or value < least:
        raise UsageError(
            f"{name}: must be a whole number of at least {least}, got {value!r}",
            hint=f"give {name} a value of {least} or more",
        )
    return int(value)


def _token(name: str, value: Any, vocab_size: int | None = None) -> int:
    if not _is_whole(value) or not 0 <= value < (vocab_size or math.inf):
        most = "" if vocab_size is None else f" below {vocab_size}"
        raise UsageError(
            f"{name}: must be token ids of 0 or more{most}, got {value!r}",
            hint=f"give {name} ids of the model's vocabulary",
        )
    return int(value)


def _tokens(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise UsageError(
            f"{name}: must be lists of token ids that are not empty, got {value!r}",
            hint="give for example [[5], [6, 7]]",
        )
    return tuple(_token(name, token) for token in value)
