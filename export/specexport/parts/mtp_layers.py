"""The MTP layers of the target's own checkpoint: one engine each, for the method ``mtp``.

Reference: MtpModel of transformers 5.24, modeling_layers.py, in the order of its forward() and of
MTPCandidateGenerator in generation/candidate_generator.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specexport import models, mtp_weights, tokenizer_files
from specexport.errors import SourceError
from specexport.numbers import agreement, relative_error
from specexport.parts.base import Opened, Settings, TargetRun, engine_spec
from specexport.sources import Source
from specexport.weights import Weights
from specrun.contract import Role, mtp_layer_engine
from specrun.manifest import (
    DrafterSpec,
    DraftMethod,
    EngineSpec,
    MtpLayerContract,
    ParityCase,
)

if TYPE_CHECKING:
    from specgraphs.engine_graph import EngineGraph
    from specgraphs.mtp_layers import MtpPlan
    from specgraphs.trace import FakeModel

TENSOR = "mtp_logits"


@dataclass(frozen=True)
class MtpStep:
    """One run of a layer: fed ``tokens`` int64 ``[rows]`` and ``hidden`` float32 ``[rows, hidden
    size]``, it gives ``logits`` float32 ``[vocabulary]`` at its last row."""

    layer: int
    tokens: NDArray[np.int64] = field(repr=False)
    hidden: NDArray[np.float32] = field(repr=False)
    logits: NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True)
class MtpCase:
    """What the layers draft after ``past_length`` rows of the target, each applied once and the
    last one twice."""

    past_length: int
    steps: tuple[MtpStep, ...]


class MtpLayers:
    """The part of a target's own MTP layers. ``weights``: of the layers, see mtp_weights."""

    method: DraftMethod = "mtp"
    forward_options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, target: Source, own: Weights) -> None:
        self.target = target
        self._own = own

    @property
    def weights(self) -> Mapping[str, Weights]:
        """See :class:`DrafterPart`."""
        from specgraphs.mtp_layers import ORIGIN

        return {ORIGIN: self._own}

    def check(self) -> None:
        """See :class:`DrafterPart`."""
        try:
            self._plan()
        except ValueError as error:
            raise SourceError(
                f"{self.target.id}: {error}", hint="--no-mtp exports the target without them"
            ) from error

    def reference(self, run: TargetRun) -> tuple[MtpCase, ...]:
        """What the layers draft after each of the run's lengths."""
        model, scope = models.load_mtp(self.target, self._own, run.model, run.memory, run.dtype)
        run.note(self.method, scope)
        return tuple(_reference_case(model, run, past) for past in run.past_lengths)

    def noise(self, exact: Any, rounded: Any) -> dict[str, float]:
        """See :class:`DrafterPart`. Later steps may have drafted other tokens."""
        pairs = [(a.steps[0], b.steps[0]) for a, b in zip(rounded, exact, strict=True)]
        worst = max((relative_error(a.logits, b.logits) for a, b in pairs), default=0.0)
        return {TENSOR: worst}

    def trace(self, target: FakeModel, settings: Settings) -> dict[str, EngineGraph]:
        """See :class:`DrafterPart`."""
        from specgraphs.mtp_layers import build_mtp, trace_mtp_layer

        mtp = build_mtp(target, settings.dtype)
        return {
            mtp_layer_engine(layer): trace_mtp_layer(
                mtp, target, layer, settings.dtype, max_context=settings.max_context
            )
            for layer in range(len(self._plan().kv))
        }

    def specs(self, settings: Settings) -> dict[str, EngineSpec]:
        """See :class:`DrafterPart`."""
        plan, config = self._plan(), self.target.config
        return {
            mtp_layer_engine(layer): engine_spec(
                Role.MTP_LAYER,
                mtp_layer_engine(layer),
                settings,
                hidden_size=int(config.hidden_size),
                vocab_size=int(config.vocab_size),
                kv=(kv,),
                all_hidden=True,
                mtp_layer=MtpLayerContract(
                    layer=layer,
                    num_layers=len(plan.kv),
                    concat_order=plan.concat_order,
                    hidden="previous_layer" if layer else "target_after_norm",
                    position="row + 1 + layer",
                    reapply=layer == len(plan.kv) - 1,
                ),
            )
            for layer, kv in enumerate(plan.kv)
        }

    def write_files(self, folder: Path) -> None:
        """Nothing: it has the target's tokenizer."""

    def drafter(
        self, settings: Settings, target_sha256: str, sha256: Mapping[str, str]
    ) -> DrafterSpec:
        """See :class:`DrafterPart`. As many drafts as layers, which is what transformers drafts."""
        layers = len(self._plan().kv)
        return DrafterSpec(
            source=None,
            engines=tuple(mtp_layer_engine(layer) for layer in range(layers)),
            max_num_draft=max(layers, settings.num_draft),
            num_assistant_tokens=layers,
            schedule="constant",
            target_sha256=target_sha256,
            tokenizer_sha256=sha256[tokenizer_files.TOKENIZER],
        )

    def compare(self, opened: Opened, tokens: NDArray[np.int64], seen: Any) -> list[ParityCase]:
        """Every layer fed what the reference fed it."""
        from specrun.drafters.mtp_layers import MtpLayer

        names = opened.manifest.drafters[self.method].engines
        layers = [
            MtpLayer(
                opened.session(name),
                opened.manifest.engines[name],
                max_context=opened.manifest.generation.max_context,
            )
            for name in names
        ]
        cases: list[ParityCase] = []
        for case in seen:
            for layer in layers:
                layer.kv.truncate(0)
            for step in case.steps:
                out = layers[step.layer].run(step.tokens, step.hidden, want_logits=True)
                assert out.logits is not None
                error = relative_error(out.logits, step.logits)
                agreed = agreement(np.array([out.argmax]), step.logits[None])
                rows = len(step.tokens)
                cases.append(
                    ParityCase(names[step.layer], TENSOR, case.past_length, rows, error, agreed)
                )
        return cases

    def _plan(self) -> MtpPlan:
        from specgraphs.mtp_layers import plan_mtp

        return plan_mtp(self.target.config)


def part(target: Source, wanted: bool | None) -> MtpLayers | None:
    """The part for a target with MTP layers in its checkpoint, unless they are not ``wanted``.

    None for ``wanted`` takes them where they are there and can be exported. Raises SourceError
    where they are wanted and are not there, WeightsError where some of them are missing.
    """
    from specgraphs import families

    if wanted is False:
        return None
    if wanted is None and target.config.model_type not in families.MTP_LAYERS:
        return None
    own = mtp_weights.read(target)
    if own is not None:
        return MtpLayers(target, own)
    if wanted:
        raise SourceError(f"{target.id}: its checkpoint has no MTP layers")
    return None


def _reference_case(model: Any, run: TargetRun, past: int) -> MtpCase:
    """The layers in a row on ``past`` rows of the target, then the last one on its own state."""
    import torch
    from transformers.cache_utils import MtpCache

    cache = MtpCache(config=model.config)
    tokens = torch.from_numpy(run.tokens)[None, 1 : past + 1]
    positions = torch.arange(1, past + 1)[None]
    hidden = run.hidden[None, :past]
    steps: list[MtpStep] = []
    count = len(model.layers)
    for layer in (*range(count), count - 1):
        if len(steps) == count:  # once more: only the row behind the others
            tokens, positions, hidden = tokens[:, -1:], positions[:, -1:], hidden[:, -1:]
        fed = tokens[0].numpy(), hidden[0].float().numpy()
        hidden = model.forward_layer(layer, hidden, positions, cache, input_ids=tokens)
        logits = model._project_to_logits(hidden[:, -1:])[0, 0]
        steps.append(MtpStep(layer, *fed, logits.float().numpy()))
        tokens = torch.cat([tokens[:, 1:], logits.argmax().view(1, 1)], dim=1)
        positions = positions + 1
    return MtpCase(past, tuple(steps))
