"""The MTP drafter engine: all its steps in one run, on the target's KV buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.contract import (
    DRAFT_TOKENS,
    HIDDEN,
    NUM_DRAFT,
    PAST_LENGTH,
    TOKEN,
    Part,
    past,
)
from specrun.kv import KvBuffers
from specrun.manifest import EngineSpec
from specrun.ort import PreparedRun, RunCache, zeros


class MtpDrafter:
    """Reads the target's KV rows, never writes them, and keeps no rows of its own.

    Its state is the last committed token, the hidden state that gave it, and the target's length.
    """

    def __init__(self, session: Any, engine: EngineSpec, kv: KvBuffers) -> None:
        assert engine.mtp is not None, "the manifest refuses an MTP drafter without its contract"
        self.max_drafts: int | None = engine.mtp.max_num_draft
        self._session = session
        self._file = engine.file
        self._kv = kv
        self._layers = [past(layer.layer, part) for layer in engine.kv for part in Part]
        self._specs = {spec.name: spec for spec in (*engine.inputs, *engine.outputs)}
        # The state is kept in the buffers bound as inputs, shared by the runs of every width.
        names = (TOKEN, HIDDEN, PAST_LENGTH)
        self._state = {name: zeros(self._specs[name], batch=kv.batch) for name in names}
        self._runs: RunCache[PreparedRun] = RunCache(self._prepare)

    def begin(self, tokens: Sequence[int]) -> None:
        """Nothing to do: the prompt is in the target's KV."""

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """Keep the last token and a copy of the hidden state."""
        self._state[TOKEN][0, 0] = tokens[-1]
        self._state[HIDDEN][:, 0] = hidden

    def propose(self, count: int) -> Sequence[int]:
        """One run of ``count`` steps. Raises EngineError."""
        run = self._runs.get(self._kv.version, count)
        # [0, past_length): committed tokens in the target's KV; the last one stands behind them.
        self._state[PAST_LENGTH][:] = self._kv.lengths
        run.run()
        proposal: list[int] = run.outputs[DRAFT_TOKENS][0].tolist()
        return proposal

    def truncate(self, length: int) -> None:
        """Nothing to do: the target's length is the drafter's."""

    def _prepare(self, count: int) -> PreparedRun:
        num_draft = zeros(self._specs[NUM_DRAFT])
        num_draft[...] = count
        drafts: NDArray[np.int64] = zeros(
            self._specs[DRAFT_TOKENS], batch=self._kv.batch, drafts=count
        )
        return PreparedRun(
            self._session,
            {**self._state, NUM_DRAFT: num_draft},
            {DRAFT_TOKENS: drafts},
            {name: self._kv.values[name] for name in self._layers},
            {},
            self._file,
        )
