"""What precision costs: perplexity and agreement of the written target against fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport import texts
from specexport.errors import ParityError
from specexport.parts.base import Opened
from specexport.sources import Source
from specrun.manifest import Manifest, QualityReport
from specrun.options import available_threads

PIECE = 128  # rows whose logits are in memory at a time
LEAST_AGREEMENT = 0.25  # below this an engine is broken, not coarse (C67)
TRAINED_BELOW = 0.5  # of the vocabulary: perplexity from which a model predicts anything at all


@dataclass(frozen=True)
class Judged:
    """What transformers in fp32 says of the evaluation text.

    ``tokens`` int64 ``[n]``; ``best`` int64 ``[n - 1]``: its argmax at each position;
    ``loss``: mean negative log-likelihood of the next token, nats; ``scope``: how it was run.
    """

    tokens: NDArray[np.int64] = field(repr=False)
    best: NDArray[np.int64] = field(repr=False)
    loss: float
    scope: str


def reference(source: Source, model: Any, scope: str, max_context: int) -> Judged:
    """Run transformers' fp32 ``model`` of ``source`` over the evaluation text, as many of its
    tokens as the engine takes."""
    import torch

    from specgraphs import families

    ids = np.array(texts.tokens(source, texts.EVALUATION)[:max_context], dtype=np.int64)
    best: list[NDArray[np.int64]] = []
    losses: list[NDArray[np.float64]] = []
    with torch.no_grad():
        hidden = model.model(torch.from_numpy(ids)[None], use_cache=False).last_hidden_state[0]
        cap = families.softcap(model.config)
        for start in range(0, len(ids) - 1, PIECE):
            piece = hidden[start : min(start + PIECE, len(ids) - 1)]
            rows = families.head_logits(model, piece, cap)
            found, loss = _judge(rows.numpy(), ids[start + 1 : start + 1 + len(rows)])
            best.append(found)
            losses.append(loss)
    return Judged(ids, np.concatenate(best), float(np.concatenate(losses).mean()), scope)


def measure(
    folder: Path, manifest: Manifest, judged: Judged, report: Callable[[str, int, int], None]
) -> QualityReport:
    """Run the written target over the same text. Raises ParityError where it is broken."""
    opened = Opened(folder, manifest, available_threads(), mapped=False)
    target: Any = opened.target
    target.truncate(0)
    ids = judged.tokens
    best: list[NDArray[np.int64]] = []
    losses: list[NDArray[np.float64]] = []
    for start in range(0, len(ids) - 1, PIECE):
        report("quality", start, len(ids))
        piece = ids[start : min(start + PIECE, len(ids) - 1)]
        logits = target.verify(piece[None], want_logits=True).logits[0]
        found, loss = _judge(logits, ids[start + 1 : start + 1 + len(piece)])
        best.append(found)
        losses.append(loss)
    report("quality", len(ids), len(ids))
    agreed = float((np.concatenate(best) == judged.best).mean())
    made = QualityReport(
        text=texts.EVALUATION.name,
        scope=judged.scope,
        tokens=len(ids) - 1,
        reference_perplexity=float(np.exp(judged.loss)),
        perplexity=float(np.exp(np.concatenate(losses).mean())),
        argmax_agreement=agreed,
    )
    if not np.isfinite(made.perplexity) or _broken(made, manifest):
        raise ParityError(
            f"the target's perplexity is {made.perplexity:.4g} against"
            f" {made.reference_perplexity:.4g} in fp32, and {agreed:.0%} of its most probable"
            " tokens are the same",
            hint="export with a finer --precision; --no-check writes the folder as it is",
        )
    return made


def _judge(
    logits: NDArray[np.float32], wanted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Argmax and negative log-likelihood of ``wanted`` at each row."""
    rows = logits.astype(np.float64)
    top = rows.max(axis=1, keepdims=True)
    norm = np.log(np.exp(rows - top).sum(axis=1)) + top[:, 0]
    return logits.argmax(axis=1), norm - rows[np.arange(len(rows)), wanted]


def _broken(made: QualityReport, manifest: Manifest) -> bool:
    """A model that predicts something at all must still predict it."""
    trained = made.reference_perplexity < TRAINED_BELOW * manifest.target_engine.vocab_size
    return trained and made.argmax_agreement < LEAST_AGREEMENT
