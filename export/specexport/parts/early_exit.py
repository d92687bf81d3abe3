"""Early exit: the target in front, back and head, and its own first layers as the drafter.

Reference: EarlyExitCandidateGenerator of transformers 5.24, generation/candidate_generator.py,
which runs the model with ``num_hidden_layers = E``: final norm and head behind layer E - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specexport import tokenizer_files
from specexport.numbers import agreement, relative_error
from specexport.parts.base import Opened, Settings, TargetRun, engine_spec, read_up_to
from specexport.parts.record import num_assistant_tokens, schedule
from specexport.parts.target import check_target
from specexport.sources import Source
from specexport.weights import Weights
from specrun.contract import BACK_ENGINE, FRONT_ENGINE, HEAD_ENGINE, Role
from specrun.errors import UsageError
from specrun.manifest import DrafterSpec, DraftMethod, EngineSpec, ParityCase

if TYPE_CHECKING:
    from specgraphs.engine_graph import EngineGraph
    from specgraphs.split import SplitPlan
    from specgraphs.trace import FakeModel

DRAFT_STEPS = 4
TENSOR = "exit_logits"


class TargetInParts:
    """A causal model as front, back and head, cut behind ``early_exit`` layers."""

    def __init__(self, source: Source, early_exit: int) -> None:
        self.source = source
        self.early_exit = early_exit

    def check(self) -> None:
        """See :class:`TargetPart`. Raises UsageError for a layer that is not there."""
        check_target(self.source)
        try:
            self._plan()
        except ValueError as error:
            layers = int(self.source.config.num_hidden_layers)
            raise UsageError(f"{self.source.id}: {error}", hint=f"give 1 to {layers}") from error

    def trace(self, fake: FakeModel, settings: Settings) -> dict[str, EngineGraph]:
        """See :class:`TargetPart`."""
        from specgraphs.split import trace_split

        return trace_split(
            fake,
            settings.dtype,
            early_exit=self.early_exit,
            max_context=settings.max_context,
        )

    def specs(self, settings: Settings) -> dict[str, EngineSpec]:
        """See :class:`TargetPart`."""
        plan, config = self._plan(), self.source.config
        common: dict[str, Any] = {
            "hidden_size": int(config.hidden_size),
            "vocab_size": int(config.vocab_size),
            "all_hidden": plan.contract.shared_from is None,
            "split": plan.contract,
        }
        kinds = [(Role.FRONT, FRONT_ENGINE, plan.front)]
        if plan.contract.has_back:
            kinds.append((Role.BACK, BACK_ENGINE, plan.back))
        kinds.append((Role.HEAD, HEAD_ENGINE, ()))
        return {
            name: engine_spec(role, name, settings, kv=kv, **common) for role, name, kv in kinds
        }

    def _plan(self) -> SplitPlan:
        from specgraphs.split import plan_split

        return plan_split(self.source.config, self.early_exit)


@dataclass(frozen=True)
class ExitCase:
    """What the exit says behind ``past_length`` rows: ``logits`` float32 ``[steps, vocabulary]``
    at the rows of the next ``steps`` tokens, which are fed whatever it says."""

    past_length: int
    logits: NDArray[np.float32] = field(repr=False)


class EarlyExit:
    """The drafter that is in the target: no engine, no weights, no tokenizer of its own."""

    method: DraftMethod = "early-exit"
    weights: Mapping[str, Weights] = {}
    forward_options: dict[str, Any] = {"output_hidden_states": True}  # noqa: RUF012

    def __init__(self, target: Source, early_exit: int) -> None:
        self.target = target
        self.early_exit = early_exit

    def check(self) -> None:
        """Nothing: :class:`TargetInParts` has."""

    def reference(self, run: TargetRun) -> tuple[ExitCase, ...]:
        """Final norm and head over the hidden states behind the exit."""
        return tuple(self._case(run, past) for past in run.past_lengths)

    def noise(self, exact: Any, rounded: Any) -> dict[str, float]:
        """See :class:`DrafterPart`."""
        pairs = zip(rounded, exact, strict=True)
        worst = max((relative_error(a.logits, b.logits) for a, b in pairs), default=0.0)
        return {TENSOR: worst}

    def trace(self, target: FakeModel, settings: Settings) -> dict[str, EngineGraph]:
        """Nothing: the target's engines are enough."""
        return {}

    def specs(self, settings: Settings) -> dict[str, EngineSpec]:
        """Nothing, as in ``trace``."""
        return {}

    def write_files(self, folder: Path) -> None:
        """Nothing: it has the target's tokenizer."""

    def drafter(
        self, settings: Settings, target_sha256: str, sha256: Mapping[str, str]
    ) -> DrafterSpec:
        """See :class:`DrafterPart`."""
        return DrafterSpec(
            source=None,
            engines=(),
            max_num_draft=None,
            num_assistant_tokens=num_assistant_tokens(self.target),
            schedule=schedule(self.target),
            target_sha256=target_sha256,
            tokenizer_sha256=sha256[tokenizer_files.TOKENIZER],
        )

    def compare(self, opened: Opened, tokens: NDArray[np.int64], seen: Any) -> list[ParityCase]:
        """See :class:`DrafterPart`."""
        return [_check_exit(opened.target, tokens, case) for case in seen]

    def _case(self, run: TargetRun, past: int) -> ExitCase:
        import torch

        from specgraphs import families

        states = run.out.hidden_states
        rows = states[self.early_exit][:, past : past + DRAFT_STEPS]
        # transformers returns the last hidden state behind the final norm, the others before it.
        last = self.early_exit == len(states) - 1
        logits = run.model.lm_head(rows if last else run.model.model.norm(rows))[0]
        if (cap := families.softcap(run.model.config)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return ExitCase(past, logits.float().numpy())


def _check_exit(target: Any, tokens: NDArray[np.int64], case: ExitCase) -> ParityCase:
    """Token by token behind a prefill, as drafting feeds them."""
    read_up_to(target, tokens, case.past_length)
    count = len(case.logits)
    target.start_drafting(count)
    logits = np.empty_like(case.logits)
    best = np.empty(count, dtype=np.int64)
    for step in range(count):
        rows = target.draft(int(tokens[case.past_length + step]), want_logits=True)
        logits[step], best[step] = rows.logits[0, 0], rows.argmax[0, 0]
    return ParityCase(
        HEAD_ENGINE,
        TENSOR,
        case.past_length,
        count,
        relative_error(logits, case.logits),
        agreement(best, case.logits),
    )
