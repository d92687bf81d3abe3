"""The MTP drafter engine: all its steps in one run, on the target's KV buffers.

The engine draws too. Each step picks, among its most likely tokens (the candidates), the largest
``logit + noise``, and what noise it gets decides how it drafts::

    argmax    noise 0                        the most likely token; q is one-hot
    sampled   noise temperature * Gumbel     a sample of q = softmax(logits / temperature)

(Gumbel 1954; Maddison, Tarlow and Minka, "A* Sampling", 2014.) q is over the candidates alone,
which is what was drawn from, and a token that the tokenizer does not have is no candidate.

Drafts are sampled by default. On the bundled pair that is never worse, and at high temperatures
much better (4 drafts; tokens per round, computed from p and q by scripts/drafter_sampling.py):

    ===========  ====  ====  ====  ====  ====  =========================
    temperature  0.1   0.3   0.7   1.0   1.3   1.0, top-k 64, top-p 0.95
    ===========  ====  ====  ====  ====  ====  =========================
    sampled      3.45  3.18  2.34  2.14  1.95  2.25
    argmax       3.44  3.06  1.82  1.41  1.26  1.50
    ===========  ====  ====  ====  ====  ====  =========================

Only the temperature is applied to q. Top-k, top-p, penalties and all other processors change the
target's distribution only: the result follows it for every q that the drafts were really drawn
from, whatever that q leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specrun.contract import (
    DRAFT_CANDIDATES,
    DRAFT_LOGITS,
    DRAFT_TOKENS,
    HIDDEN,
    NOISE,
    NUM_DRAFT,
    PAST_LENGTH,
    TOKEN,
    Part,
    past,
)
from specrun.drafters.base import Proposal
from specrun.errors import EngineError
from specrun.kv import KvBuffers, check_memory
from specrun.manifest import EngineSpec
from specrun.runner import Run, Session
from specrun.runs import RunCache, zeros
from specrun.sampling import Distribution, Sampler

Draws = Literal["sampled", "argmax"]
HOTTEST = 1e30  # above it noise would overflow float32; q is uniform long before


class MtpDrafter:
    """Reads the target's KV rows, never writes them, and keeps no rows of its own.

    Its state is the last committed token, the hidden state that gave it, and the target's length.
    ``max_num_draft``: most tokens of a proposal, None for any number. ``draws``: how to draft when
    sampling; drafts that must have a q are sampled. Raises EngineError where the engine does not
    read the memory that the target's KV is in.
    """

    needs_prompt_rows = False

    def __init__(
        self,
        session: Session,
        engine: EngineSpec,
        kv: KvBuffers,
        *,
        max_num_draft: int | None,
        draws: Draws = "sampled",
    ) -> None:
        assert engine.mtp is not None, "the manifest refuses an MTP drafter without its contract"
        check_memory(session, kv)
        self.max_drafts = max_num_draft
        self._draws = draws
        self._session = session
        self._file = engine.file
        self._kv = kv
        self._layers = [past(layer.layer, part) for layer in engine.kv for part in Part]
        self._specs = {spec.name: spec for spec in (*engine.inputs, *engine.outputs)}
        # The state is kept in the buffers bound as inputs, shared by the runs of every width.
        names = (TOKEN, HIDDEN, PAST_LENGTH)
        self._state = {name: zeros(self._specs[name], batch=kv.batch) for name in names}
        self._runs: RunCache[Run] = RunCache()

    def begin(self, tokens: Sequence[int]) -> None:
        """Nothing to do: the target reads the prompt into its KV."""

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """Keep the last token and a copy of its hidden state."""
        self._state[TOKEN][0, 0] = tokens[-1]
        self._state[HIDDEN][0, 0] = hidden[-1]

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        """One run of ``count`` steps. Raises EngineError."""
        run = self._runs.get(self._prepare, self._kv.version, count)
        # [0, past_length): committed tokens in the target's KV; the last one stands behind them.
        self._state[PAST_LENGTH][:] = self._kv.lengths
        temperature = min(sampler.temperature, HOTTEST)
        drawn = sampler.do_sample and (self._draws == "sampled" or sampler.wants_q)
        noise = run.inputs[NOISE]
        noise[...] = temperature * sampler.rng.gumbel(size=noise.shape) if drawn else 0.0
        run.run()
        tokens: list[int] = run.outputs[DRAFT_TOKENS][0].tolist()
        with_q = drawn or sampler.wants_q
        if not with_q and sampler.confidence_threshold <= 0:
            return Proposal(tokens)
        q: list[Distribution] = []
        for token, logits, ids in zip(
            tokens, run.outputs[DRAFT_LOGITS][0], run.outputs[DRAFT_CANDIDATES][0], strict=True
        ):
            if logits[0] == -np.inf:
                break  # no candidate exists, and so there is no draft
            q.append(self._distribution(logits, ids, temperature))
            # The draft itself stays: to drop it for its value would change what is sampled.
            if q[-1].of(token) < sampler.confidence_threshold:
                break
        return Proposal(tokens[: len(q)], q if with_q else None)

    def truncate(self, length: int) -> None:
        """Nothing to do: the target's length is the drafter's."""

    def _distribution(
        self, logits: NDArray[np.float32], ids: NDArray[np.int64], temperature: float
    ) -> Distribution:
        """``softmax(logits / temperature)`` of the candidates that exist, by ascending id."""
        if not np.isfinite(logits[0]) or np.isnan(logits).any():
            raise EngineError(f"{self._file}: logits are not finite")
        order = np.argsort(ids)
        order = order[logits[order] > -np.inf]
        below = logits[order].astype(np.float64) - logits[0]
        with np.errstate(over="ignore"):  # far below the first, in the limit: probability 0
            return Distribution.normalised(np.exp(below / temperature), ids[order])

    def _prepare(self, count: int) -> Run:
        def array(name: str) -> NDArray[Any]:
            return zeros(self._specs[name], batch=self._kv.batch, drafts=count)

        num_draft = array(NUM_DRAFT)
        num_draft[...] = count
        return self._session.prepare(
            {**self._state, NUM_DRAFT: num_draft, NOISE: array(NOISE)},
            {name: array(name) for name in (DRAFT_TOKENS, DRAFT_LOGITS, DRAFT_CANDIDATES)},
            {name: self._kv.buffers[name] for name in self._layers},
            {},
        )
