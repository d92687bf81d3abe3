"""What a model's linear layers are fed, and how each is best put into 8 bits: measured on a text.

transformers runs the model in fp32 over the calibration text; hooks see the input of every linear
layer. From that come the importance of each column, for 4-bit blocks, and the smoothing, rotation
and number of terms of each layer, for 8-bit rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specexport import encoders
from specexport.datafile import CHUNK_BYTES
from specexport.sources import Source
from specexport.weights import Weights
from specgraphs.formats import HEAD, KEEP_FLOAT, LinearFormat
from specgraphs.rotation import rotated, size_for

SAMPLE_ROWS = 128  # rows of a layer's input that formats are tried on
SAMPLE_OUTPUTS, SAMPLE_VALUES = 8192, 4 << 20  # most rows of a weight that formats are tried on
STRENGTHS = (0.2, 0.35, 0.5, 0.65, 0.8)  # of smoothing; its alpha in the paper
# Relative error from which rotating is worth it, and a second term where that is not enough: behind
# a norm, where it goes into scores and gates, and elsewhere, where it is added to the residual.
MOST_ERROR = {True: 0.012, False: 0.0175}

EIGHT_BITS_BUDGET = 0.15  # of a step's bytes, for the layers of a 4-bit model that have 8
RESIDUAL_WEIGHT = 4.0  # of an error that is added to the residual, against one that is not


@dataclass(frozen=True)
class Layers:
    """Linear layers that read the same rows, by the names of their weights.

    ``sample`` float32 ``[rows, columns]``; ``largest`` and ``importance`` float32 ``[columns]``:
    largest magnitude and mean square of a column of the input. ``after_norm``: a norm gives it,
    whose scale can take a factor per column at no cost.
    """

    names: tuple[str, ...]
    after_norm: bool
    sample: NDArray[np.float32] = field(repr=False)
    largest: NDArray[np.float32] = field(repr=False)
    importance: NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True)
class Choice:
    """What was chosen for linear layers that read the same rows.

    ``strength``: of smoothing (None: none); ``error``: of their output, relative, on the sample.
    """

    names: tuple[str, ...]
    format: LinearFormat
    strength: float | None
    error: float


def observe(
    source: Source, model: Any, tokens: Sequence[int], see: Callable[[Layers], None]
) -> None:
    """``see`` what linear layers are fed while transformers' fp32 ``model`` reads a text.

    Called once for layers that belong together, when they have run; nothing is kept.
    """
    watch = _Watch(see)
    handles = [
        module.register_forward_pre_hook(watch.hook(f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" in source.weights
    ]
    handles += [
        module.register_forward_pre_hook(watch.experts(name, source.weights))
        for name, module in model.named_modules()
        if hasattr(module, "gate_up_proj") and f"{name}.gate_up_proj" in source.weights
    ]
    handles += [
        module.register_forward_hook(watch.norm)
        for module in model.modules()
        if type(module).__name__.endswith("RMSNorm")
    ]
    # The head is fed a sample of the rows: its logits for all of them would take gigabytes.
    kept = torch.arange(0, len(tokens), max(1, len(tokens) // SAMPLE_ROWS))
    with torch.no_grad():
        model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=kept)
    for handle in handles:
        handle.remove()
    watch.flush()


class _Watch:
    """Collects inputs; layers called in a row with one and the same tensor belong together."""

    def __init__(self, see: Callable[[Layers], None]) -> None:
        self._see = see
        self._names: list[str] = []
        self._stats: tuple[Any, ...] = ()
        self._last: Any = None
        self._normed: Any = None
        self._seen: set[str] = set()

    def hook(self, name: str) -> Any:
        def watch(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if name in self._seen:  # a layer that is called again tells nothing new
                return
            self._seen.add(name)
            if x is self._last:
                self._names.append(name)
                return
            self.flush()
            self._last = x
            self._names = [name]
            self._stats = (x is self._normed, *_stats(x))

        return watch

    def experts(self, name: str, weights: Weights) -> Any:
        """All experts of a layer as one: each is fed some of the rows, chosen by the router.

        What the second matrix is fed is computed for a sample of rows, by each one's first expert.
        """
        both, down = f"{name}.gate_up_proj", f"{name}.down_proj"

        def watch(module: Any, args: tuple[Any, ...]) -> None:
            if both in self._seen:
                return
            self._seen.add(both)
            self.flush()
            x, chosen = args[0].detach(), args[1]
            # In their branch no norm is before them that could take a factor.
            self._see(Layers((both,), False, *_stats(x)))
            rows = x[:: max(1, len(x) // SAMPLE_ROWS)][:SAMPLE_ROWS].float()
            first = chosen[:: max(1, len(x) // SAMPLE_ROWS)][:SAMPLE_ROWS, 0]
            inner = torch.zeros(len(rows), weights.shape(down)[-1])
            for expert in first.unique().tolist():
                matrix = np.concatenate(list(weights.chunks(both, CHUNK_BYTES, expert)))
                gate, up = (rows[first == expert] @ torch.from_numpy(matrix).float().T).chunk(2, -1)
                inner[first == expert] = module.act_fn(gate) * up
            self._see(Layers((down,), False, *_stats(inner)))

        return watch

    def norm(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Called with what a norm gave."""
        self._normed = output

    def flush(self) -> None:
        """Hand out what was collected."""
        if self._names:
            self._see(Layers(tuple(self._names), *self._stats))
        self._names, self._stats, self._last = [], (), None


def _stats(x: torch.Tensor) -> tuple[NDArray[np.float32], ...]:
    """Sample, largest magnitude and mean square of inputs ``[..., columns]``."""
    rows = x.detach().reshape(-1, x.shape[-1]).float()
    step = max(1, len(rows) // SAMPLE_ROWS)
    found = (rows[::step][:SAMPLE_ROWS].clone(), rows.abs().amax(0), rows.square().mean(0))
    return tuple(value.numpy() for value in found)


def choose_rows(layers: Sequence[Layers], weights: Weights) -> list[Choice]:
    """For every layer the 8-bit row format with the least error on its sample.

    Rotated, or else with a second term, where they leave more than MOST_ERROR; the head always has
    a second term, as its error is that of the logits.
    """
    return [
        _choose(group, weights)
        for group in layers
        if not any(KEEP_FLOAT.search(name) for name in group.names)
    ]


class BlockBudget:
    """Which layers of a 4-bit model are worth 8 bits: the most error per byte first, for as many
    bytes as EIGHT_BITS_BUDGET allows. The head is no candidate, its bytes count.

    ``size``: columns of a block. Measured on SmolLM2-135M and Gemma 3 270M: perplexity +8 and
    +16 % without, +5 and +4 % with.
    """

    def __init__(self, weights: Weights, size: int) -> None:
        self.weights = weights
        self.size = size
        self._total = 0.0
        self._candidates: list[tuple[float, float, Choice]] = []

    def see(self, group: Layers) -> None:
        """Take layers into account."""
        size = self.size
        count = sum(math.prod(self.weights.shape(name)) for name in group.names)
        if any(HEAD.search(name) for name in group.names):
            self._total += count * _block_bytes(8, size)
            return
        self._total += count * _block_bytes(4, size)
        if any(KEEP_FLOAT.search(name) for name in group.names):
            return
        errors = [_block_error(group, name, self.weights, size) for name in group.names]
        gain = sum(error**2 for error in errors) * (1.0 if group.after_norm else RESIDUAL_WEIGHT)
        more = count * (_block_bytes(8, size) - _block_bytes(4, size))
        chosen = LinearFormat("blocks", bits=8, block_size=size)
        self._candidates.append((gain / more, more, Choice(group.names, chosen, None, max(errors))))

    def choices(self) -> list[Choice]:
        """Those that have 8 bits."""
        left = EIGHT_BITS_BUDGET * self._total
        found = []
        for _, more, choice in sorted(self._candidates, key=lambda item: -item[0]):
            if more <= left:
                found.append(choice)
                left -= more
        return found


def _block_bytes(bits: int, size: int) -> float:
    """Bytes per weight, with its share of a float32 scale and a zero point."""
    return bits / 8 + (4 + (0.5 if bits == 4 else 0)) / size


def _block_error(group: Layers, name: str, weights: Weights, size: int) -> float:
    """Relative error of a layer's output on the sample, in 4-bit blocks."""
    weight = _sampled_weight((name,), weights)
    stored = encoders.decoded_blocks(
        encoders.blocks(weight, 4, size, group.importance), 4, weight.shape[1]
    )
    wanted = group.sample @ weight.T
    lost = group.sample @ (stored - weight).T
    return float(np.sqrt(np.square(lost).sum() / max(np.square(wanted).sum(), 1e-30)))


def _choose(group: Layers, weights: Weights) -> Choice:
    """The cheapest way that is good enough: as it is, rotated, with a second term."""
    weight = torch.from_numpy(_sampled_weight(group.names, weights))
    x = torch.from_numpy(group.sample)
    wanted = x @ weight.T
    scale = float(wanted.square().sum()) or 1.0
    column = weight.abs().amax(0).clamp(min=1e-9)
    largest = torch.from_numpy(group.largest).clamp(min=1e-9)

    def best(rotation: int, terms: int) -> Choice:
        found: list[Choice] = []
        for strength in (None, *STRENGTHS) if group.after_norm else (None,):
            smoothing = None if strength is None else _smoothing(largest, column, strength)
            parts = encoders.columns(weight.numpy(), smoothing, rotation)
            stored = torch.from_numpy(parts.values * parts.scales[:, None])
            fed = group.sample if smoothing is None else group.sample / smoothing
            got = _rounded(torch.from_numpy(rotated(fed, rotation)), terms) @ stored.T
            error = math.sqrt(float((got - wanted).square().sum()) / scale)
            chosen = LinearFormat("rows", smoothing=smoothing, terms=terms, rotation=rotation)
            found.append(Choice(group.names, chosen, strength, error))
        return min(found, key=lambda choice: choice.error)

    most = MOST_ERROR[group.after_norm]
    if not any(HEAD.search(name) for name in group.names):
        size = size_for(weight.shape[1])
        for rotation in (0, size) if size else (0,):
            choice = best(rotation, 1)
            if choice.error <= most:
                return choice
    return best(0, 2)


def _sampled_weight(names: Sequence[str], weights: Weights) -> NDArray[np.float32]:
    """Rows of the weights one below the other; of a large one every so many."""
    pieces = []
    for name in names:
        *lead, columns = weights.shape(name)
        most = max(1, min(SAMPLE_OUTPUTS, SAMPLE_VALUES // columns))
        step = max(1, math.prod(lead) // most)
        chunks = weights.chunks(name, CHUNK_BYTES)
        pieces += [chunk[::step].astype(np.float32) for chunk in chunks]
    return np.concatenate(pieces)


def _smoothing(largest: torch.Tensor, column: torch.Tensor, strength: float) -> NDArray[np.float32]:
    """``largest ** strength / column ** (1 - strength)``, its median 1 (Xiao et al. 2023)."""
    found = largest**strength / column ** (1 - strength)
    return (found / found.median()).clamp(min=1e-3, max=1e3).numpy()


def _rounded(x: torch.Tensor, terms: int) -> torch.Tensor:
    """Rows in 8 bits, twice with two terms; see apply_formats for the formula."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    unit = x / largest
    q = (unit * encoders.QMAX).round() / encoders.QMAX
    if terms == 2:
        finer = encoders.QMAX * 2 * encoders.QMAX
        q = q + ((unit - q) * finer).round() / finer
    return q * largest


def formats(choices: Sequence[Choice]) -> Mapping[str, LinearFormat]:
    """Name of a weight -> what was chosen for it; one object for layers that go together."""
    return {name: choice.format for choice in choices for name in choice.names}
