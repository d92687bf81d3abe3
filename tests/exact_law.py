"""The law of a sampled text, exactly, and how far counted texts are from it.

The law comes from the transformers model alone: its logits after every text there can be, and
``Sampling.probabilities``, the warpers written out plainly. Nothing of the runtime is used.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Law = NDArray[np.float64]  # [vocabulary] * length: probability of the text that indexes it
Counts = NDArray[np.int64]  # the same shape: how often it came
SIMULATIONS = 10_000
QUANTILE = 0.999
LEAST_EXPECTED = 5  # texts of a cell of the chi-square test


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. ``end``: the id that ends a text; the rest of it counts as ``end``."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    end: int | None = None

    def __str__(self) -> str:
        parts = [f"T {self.temperature:g}"]
        for name in ("top_k", "top_p", "end"):
            if (value := getattr(self, name)) is not None:
                parts.append(f"{name} {value:g}")
        return " ".join(parts)

    def options(self) -> dict[str, Any]:
        """As options of ``generate``."""
        ends = () if self.end is None else (self.end,)
        given = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {**given, "do_sample": True, "eos_token_ids": ends}

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """``logits`` ``[n, vocabulary]`` -> what is drawn from, one row after the other."""
        return np.array([self._row(row.astype(np.float64)) for row in logits])

    def _row(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        p = np.exp(logits / self.temperature)
        if self.top_k is not None:
            p[p < np.sort(p)[-self.top_k]] = 0
        p /= p.sum()
        if self.top_p is not None:
            before = 0.0
            for token in np.argsort(-p):
                mass, p[token] = p[token], p[token] if before < self.top_p else 0
                before += mass
            p /= p.sum()
        return p


def exact_law(
    model: Any,
    prompt: Sequence[int],
    length: int,
    sampling: Sampling,
    allowed: Callable[[tuple[int, ...]], NDArray[np.bool_]] | None = None,
) -> Law:
    """Probability of every text of ``length`` tokens behind ``prompt``.

    ``allowed``: ``[vocabulary]``, which tokens may follow a text; some must.
    """
    size = int(model.config.get_text_config().vocab_size)
    texts = np.array(list(itertools.product(range(size), repeat=length - 1)))
    rows = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
    with torch.no_grad():
        out = model(torch.from_numpy(rows), use_cache=False).logits.float().numpy()
    law = np.ones(())
    for place in range(length):
        # Texts that agree so far follow each other; the first of them stands for all.
        step = size ** (length - 1 - place)
        logits = out[::step, len(prompt) - 1 + place]
        if allowed is not None:
            may = np.array([allowed(tuple(text)) for text in texts[::step, :place].tolist()])
            logits = np.where(may, logits, np.float32(-np.inf))
        given = sampling.probabilities(logits)
        if sampling.end is not None:
            ended = (texts[::step, :place] == sampling.end).any(axis=1)
            given[ended] = np.eye(size)[sampling.end]
        law = law[..., None] * given.reshape((size,) * (place + 1))
    return law


class Tally:
    """Counts texts of ``length`` tokens below ``size``; a text that ended goes on with ``end``."""

    def __init__(self, size: int, length: int, end: int | None = None) -> None:
        self.counts: Counts = np.zeros((size,) * length, dtype=np.int64)
        self.length = length
        self.end = end

    def add(self, tokens: Sequence[int]) -> None:
        """One text."""
        missing = self.length - len(tokens)
        assert missing == 0 or tokens[-1] == self.end, f"{len(tokens)} tokens and no end"
        self.counts[(*tokens, *[self.end] * missing)] += 1


@dataclass(frozen=True)
class Fit:
    """Counted texts against the law.

    ``distance``: total variation. ``noise`` and ``limit``: mean and 99.9 % quantile of the distance
    of as many texts that were drawn from the law itself. ``impossible``: texts that came and have
    probability 0. ``chi_square`` with ``freedom``: over texts that are expected 5 times or more,
    all others are one cell.
    """

    runs: int
    distance: float
    noise: float
    limit: float
    chi_square: float
    freedom: int
    impossible: int

    @property
    def p_value(self) -> float:
        """The chance of a chi-square this large; 1 where there is only one cell."""
        if self.freedom == 0:
            return 1.0
        half = torch.tensor([self.freedom / 2, self.chi_square / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))

    @property
    def good(self) -> bool:
        """Nothing but sampling noise."""
        return self.distance <= self.limit and self.impossible == 0


def windows(table: Law | Counts, width: int) -> Iterator[tuple[range, Any]]:
    """Places and the marginal of the first ``width`` tokens and of the last ``width``."""
    length = table.ndim
    for places in (range(width), range(length - width, length)):
        yield places, table.sum(axis=tuple(set(range(length)) - set(places)))


def fit(counts: Counts, law: Law) -> Fit:
    """Compare, cell by cell."""
    seen, p = counts.ravel(), law.ravel()
    runs = int(seen.sum())
    noise, limit = _sampling_noise(tuple(p.tolist()), runs)
    return Fit(
        runs=runs,
        distance=float(np.abs(seen / runs - p).sum() / 2),
        noise=noise,
        limit=limit,
        impossible=int(seen[p == 0].sum()),
        **_chi_square(seen, p * runs),
    )


def _chi_square(seen: Counts, expected: Law) -> dict[str, Any]:
    large = expected >= LEAST_EXPECTED
    cells = [seen[large], expected[large]]
    if (rest := expected[~large].sum()) >= LEAST_EXPECTED:
        cells = [np.append(cells[0], seen[~large].sum()), np.append(cells[1], rest)]
    chi_square = float(((cells[0] - cells[1]) ** 2 / cells[1]).sum())
    return {"chi_square": chi_square, "freedom": len(cells[0]) - 1}


@functools.cache
def _sampling_noise(p: tuple[float, ...], runs: int) -> tuple[float, float]:
    """Mean and quantile of the distance of ``runs`` texts that are drawn from ``p``."""
    law = np.array(p)
    law /= law.sum()
    drawn = np.random.default_rng(0).multinomial(runs, law, size=SIMULATIONS)
    distances = np.abs(drawn / runs - law).sum(axis=1) / 2
    return float(distances.mean()), float(np.quantile(distances, QUANTILE))
