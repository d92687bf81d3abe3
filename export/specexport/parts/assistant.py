"""A Gemma 4 assistant: the MTP drafter engine, on the target's KV and hidden states.

Reference: SinglePositionMultiTokenCandidateGenerator of transformers 5.24,
generation/candidate_generator.py, on committed rows only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specexport import tokenizer_files
from specexport.errors import SourceError
from specexport.models import load
from specexport.numbers import agreement, relative_error
from specexport.parts.base import Opened, Settings, TargetRun, engine_spec, read_up_to
from specexport.parts.record import manifest_source, num_assistant_tokens, schedule
from specexport.sources import Source
from specexport.weights import Weights
from specrun import contract
from specrun.contract import MTP_DRAFTER_ENGINE, Role
from specrun.manifest import DrafterSpec, DraftMethod, EngineSpec, MtpContract, ParityCase
from specrun.runner import Run, Session
from specrun.runs import zeros

if TYPE_CHECKING:
    from specgraphs.assistant import AssistantPlan
    from specgraphs.engine_graph import EngineGraph
    from specgraphs.trace import FakeModel

DRAFT_STEPS = 4
COMMON_CANDIDATES = 0.75  # least share of a centroid head's candidates that must be the same


@dataclass(frozen=True)
class DraftCase:
    """What the assistant drafts after ``past_length`` committed KV rows.

    ``fed`` int64 ``[steps]`` and ``hidden`` float32 ``[steps, hidden size]``: what each step was
    given; ``tokens`` int64 ``[steps]`` and ``logits`` float32 ``[steps, known tokens]``: its
    result. Ids that the tokenizer does not have are left out, as the engine never drafts them.
    """

    past_length: int
    fed: NDArray[np.int64] = field(repr=False)
    hidden: NDArray[np.float32] = field(repr=False)
    tokens: NDArray[np.int64] = field(repr=False)
    logits: NDArray[np.float32] = field(repr=False)


class Assistant:
    """The part of a Gemma 4 assistant. ``source`` drafts for ``target``."""

    method: DraftMethod = "mtp-drafter"
    forward_options: dict[str, Any] = {"return_shared_kv_states": True}  # noqa: RUF012

    def __init__(self, source: Source, target: Source) -> None:
        self.source = source
        self.target = target

    @property
    def weights(self) -> Mapping[str, Weights]:
        """See :class:`DrafterPart`."""
        return {"drafter": self.source.weights}

    def check(self) -> None:
        """See :class:`DrafterPart`."""
        self.source.weights.check_complete(self.source.expected_shapes())
        try:
            self._plan()
        except ValueError as error:
            raise SourceError(
                f"{self.source.id} is no drafter of {self.target.id}: {error}"
            ) from error

    def reference(self, run: TargetRun) -> tuple[DraftCase, ...]:
        """What the assistant drafts after each of the run's lengths."""
        assistant, scope = load(self.source, run.memory, run.dtype)
        run.note(self.method, scope)
        known = self._plan().known_tokens
        return tuple(_reference_case(assistant, run, past, known) for past in run.past_lengths)

    def noise(self, exact: Any, rounded: Any) -> dict[str, float]:
        """See :class:`DrafterPart`."""
        pairs = list(zip(rounded, exact, strict=True))
        worst = max((relative_error(a.logits[0], b.logits[0]) for a, b in pairs), default=0.0)
        return {"draft_logits": worst}

    def trace(self, target: FakeModel, settings: Settings) -> dict[str, EngineGraph]:
        """See :class:`DrafterPart`."""
        from specgraphs.assistant import trace_assistant
        from specgraphs.trace import build_fake

        fake = build_fake(*self.source.class_and_config(), settings.dtype, mode=target.mode)
        graph = trace_assistant(
            fake,
            target,
            settings.dtype,
            max_context=settings.max_context,
            tokenizer_size=self._tokenizer_size,
        )
        return {MTP_DRAFTER_ENGINE: graph}

    def specs(self, settings: Settings) -> dict[str, EngineSpec]:
        """See :class:`DrafterPart`."""
        plan = self._plan()
        mtp = MtpContract(
            concat_order=("embedding", "hidden"),
            position="past_length",
            hidden_row="last_committed_kv_row",
            kv_map=plan.kv_map,
            windows=plan.windows,
            head=plan.head,
            candidates=plan.candidates,
        )
        spec = engine_spec(
            Role.MTP_DRAFTER,
            MTP_DRAFTER_ENGINE,
            settings,
            hidden_size=int(self.target.config.hidden_size),
            vocab_size=int(self.target.config.vocab_size),
            kv=plan.kv,
            mtp=mtp,
        )
        return {MTP_DRAFTER_ENGINE: spec}

    def write_files(self, folder: Path) -> None:
        """Nothing: it has the target's tokenizer."""

    def drafter(
        self, settings: Settings, target_sha256: str, sha256: Mapping[str, str]
    ) -> DrafterSpec:
        """See :class:`DrafterPart`."""
        return DrafterSpec(
            source=manifest_source(self.source),
            engines=(MTP_DRAFTER_ENGINE,),
            max_num_draft=settings.num_draft,
            num_assistant_tokens=min(num_assistant_tokens(self.source), settings.num_draft),
            schedule=schedule(self.source),
            target_sha256=target_sha256,
            tokenizer_sha256=sha256[tokenizer_files.TOKENIZER],
        )

    def compare(self, opened: Opened, tokens: NDArray[np.int64], seen: Any) -> list[ParityCase]:
        """See :class:`DrafterPart`."""
        session = opened.session(MTP_DRAFTER_ENGINE)
        spec = opened.manifest.engines[MTP_DRAFTER_ENGINE]
        most = opened.manifest.drafters[self.method].max_num_draft or DRAFT_STEPS
        cases: list[ParityCase] = []
        for draft in seen:
            cases += _check_draft(session, spec, opened.target, draft, tokens, most)
        return cases

    def _plan(self) -> AssistantPlan:
        from specgraphs.assistant import plan_assistant

        return plan_assistant(self.source.full_config, self.target.config, self._tokenizer_size)

    @functools.cached_property
    def _tokenizer_size(self) -> int:
        return len(tokenizer_files.load(self.target.path))


def _reference_case(assistant: Any, run: TargetRun, past: int, known: int) -> DraftCase:
    """The reference loop on committed rows only, among the first ``known`` tokens."""
    import torch

    embedding = run.model.get_input_embeddings()
    token = torch.tensor([[run.tokens[past]]])
    state = run.hidden[None, past - 1 : past]
    shared = run.out.shared_kv_states
    kv = {kind: (k[:, :, :past], v[:, :, :past]) for kind, (k, v) in shared.items()}
    fed, states, drafted, scores = [], [], [], []
    for _ in range(DRAFT_STEPS):
        fed.append(int(token))
        states.append(state[0, 0].float().numpy())
        out = assistant(
            inputs_embeds=torch.cat([embedding(token), state], dim=-1),
            position_ids=torch.tensor([[past]]),
            shared_kv_states=kv,
            attention_mask=None,
            use_cache=False,
        )
        logits = out.logits[..., :known]
        token, state = logits.argmax(-1), out.last_hidden_state
        drafted.append(int(token))
        scores.append(logits[0, 0].float().numpy())
    return DraftCase(past, np.array(fed), np.stack(states), np.array(drafted), np.stack(scores))


def _check_draft(
    session: Session,
    spec: EngineSpec,
    target: Any,
    draft: DraftCase,
    tokens: NDArray[np.int64],
    most: int,
) -> list[ParityCase]:
    """Each step fed what the reference fed it, then all steps feeding themselves.

    A rounding difference grows from step to step, so the second comparison allows more
    (CHAIN_FACTOR); it is there for the feedback, the first one for the arithmetic.
    """
    assert spec.mtp is not None, "the manifest refuses an MTP drafter without its contract"
    read_up_to(target, tokens, draft.past_length)
    steps = min(DRAFT_STEPS, most)
    cases = []
    for name, count in (("draft_logits", 1), ("draft_chain", steps)):
        run = _draft_run(session, spec, target, count)
        for first in range(steps if count == 1 else 1):
            run.inputs[contract.TOKEN][:] = draft.fed[first]
            run.inputs[contract.HIDDEN][:] = draft.hidden[first]
            run.inputs[contract.PAST_LENGTH][:] = draft.past_length
            run.run()
            error, agreed = _compare_draft(
                run, draft, first, count, spec.mtp.head, integers=spec.weights is not None
            )
            cases.append(
                ParityCase(MTP_DRAFTER_ENGINE, name, draft.past_length, count, error, agreed)
            )
    return cases


def _compare_draft(
    run: Run, draft: DraftCase, first: int, count: int, head: str, *, integers: bool
) -> tuple[float, float]:
    tokens = run.outputs[contract.DRAFT_TOKENS][0]
    logits = run.outputs[contract.DRAFT_LOGITS][0]
    ids = run.outputs[contract.DRAFT_CANDIDATES][0]
    full = draft.logits[first : first + count]
    # After a tie that falls differently the two loops draft from other tokens: compare up to it.
    same = int((tokens == draft.tokens[first : first + count]).cumprod().sum())
    compared = min(count, same + 1)
    errors = []
    for step in range(compared):
        found = _existing(logits[step], ids[step], full.shape[1])
        if found is None:
            errors.append(float("inf"))
        elif head == "plain":
            errors.append(_plain_error(*found, full[step]))
        else:
            # Steps that feed themselves drift apart, and with them the last of the clusters; so do
            # weights in integers.
            least = COMMON_CANDIDATES if count == 1 and not integers else 0.0
            errors.append(_centroid_error(*found, full[step], least))
    return max(errors), agreement(tokens[:compared], full[:compared])


Candidates = tuple[NDArray[np.float32], NDArray[np.int64]]


def _existing(logits: NDArray[np.float32], ids: NDArray[np.int64], known: int) -> Candidates | None:
    """The candidates that exist; None unless they are in order, each once, and -inf marks exactly
    those that the tokenizer does not have."""
    exist = ids < known
    in_order = (logits[:-1] >= logits[1:]).all() and np.unique(ids).size == ids.size
    if not in_order or not (np.isneginf(logits) == ~exist).all() or not exist.any():
        return None
    return logits[exist], ids[exist]


def _plain_error(
    logits: NDArray[np.float32], ids: NDArray[np.int64], full: NDArray[np.float32]
) -> float:
    """Each candidate has its own logit, and there is no larger one that was left out.

    The second is a comparison in order, as candidates that tie may change places.
    """
    best = np.sort(full)[::-1][: logits.size]
    return max(relative_error(logits, full[ids]), relative_error(logits, best))


def _centroid_error(
    logits: NDArray[np.float32], ids: NDArray[np.int64], full: NDArray[np.float32], least: float
) -> float:
    """Error over the candidates that both selected.

    The reference fills what it did not select with one value below all others. Which cluster is
    the last to be selected may be a tie, so a few candidates may differ; fewer than the share
    ``least`` in common, or none, is an error, counted both ways.
    """
    wanted = full[ids]
    both = wanted > full.min()
    best = np.argsort(-full, kind="stable")[: logits.size]
    best = best[full[best] > full.min()]
    found = float(np.isin(best, ids).mean()) if best.size else 0.0
    if min(found, float(both.mean())) < least or not both.any():
        return float("inf")
    # Over the largest of all, as what is in common may be small.
    share = float(np.abs(wanted[both]).max() / max(np.abs(full[best]).max(), 1e-30))
    return share * relative_error(logits[both], wanted[both])


def _draft_run(session: Session, spec: EngineSpec, target: Any, steps: int) -> Run:
    sizes = {contract.BATCH: 1, contract.DRAFTS: steps}
    kv = {contract.past(kv.layer, part) for kv in spec.kv for part in contract.Part}
    inputs = {i.name: zeros(i, **sizes) for i in spec.inputs if i.name not in kv}
    inputs[contract.NUM_DRAFT][...] = steps
    return session.prepare(
        inputs,
        {o.name: zeros(o, **sizes) for o in spec.outputs},
        {name: target.kv.buffers[name] for name in kv},
        {},
    )
