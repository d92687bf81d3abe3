"""The target engine: feeds tokens, returns what it says after each, keeps the KV and its length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specrun.contract import (
    ARGMAX,
    FIRST_ROW,
    HIDDEN,
    LOGITS,
    PAST_LENGTH,
    TOKENS,
    Part,
    TensorSpec,
    past,
    present,
)
from specrun.errors import EngineError
from specrun.kv import INITIAL_CAPACITY, KvBuffers
from specrun.manifest import EngineSpec
from specrun.ort import TYPES, PreparedRun, RunCache, zeros


class Rows(NamedTuple):
    """What the target says at the wanted rows; views that the next run overwrites.

    ``argmax`` int64 ``[batch, wanted]``; ``hidden`` ``[batch, wanted, hidden size]`` in the KV
    dtype; ``logits`` float32 ``[batch, wanted, vocabulary]`` where asked for.
    """

    argmax: NDArray[np.int64]
    hidden: NDArray[Any]
    logits: NDArray[np.float32] | None


# Position of the first row, and hidden states [rows, hidden size]: a view, valid in the call only.
OnRows = Callable[[int, NDArray[Any]], None]


class Verifier(Protocol):
    """What the loop asks of a target: one engine, or several that act as one."""

    @property
    def kv(self) -> KvBuffers:
        """The KV buffers that drafters may read."""
        ...

    @property
    def length(self) -> int:
        """Tokens in the KV buffers."""
        ...

    def prefill(
        self,
        tokens: NDArray[np.int64],
        *,
        want_logits: bool = False,
        on_rows: OnRows | None = None,
    ) -> Rows:
        """Feed ``tokens`` ``[1, n]``; returns the last row. ``on_rows`` gets every hidden row.

        Raises ContextFull before anything is written, EngineError.
        """
        ...

    def verify(self, tokens: NDArray[np.int64], *, want_logits: bool = False) -> Rows:
        """Feed ``tokens`` ``[1, rows]``; returns every row. Raises ContextFull, EngineError."""
        ...

    def truncate(self, length: int) -> None:
        """Forget KV rows from ``length`` on. Raises ValueError when there are fewer."""
        ...

    def check_integrity(self) -> None:
        """Raise RuntimeError unless lengths and buffers belong together."""
        ...


class Target:
    """A target session with its KV buffers."""

    def __init__(
        self,
        session: Any,
        engine: EngineSpec,
        *,
        max_context: int,
        batch: int = 1,
        prefill_chunk: int = 512,
        initial_capacity: int = INITIAL_CAPACITY,
    ) -> None:
        self.engine = engine
        self.prefill_chunk = prefill_chunk
        types = {node.name: TYPES[node.type] for node in session.get_inputs()}
        dtype = types[past(engine.kv[0].layer, Part.KEY)]
        self.kv = KvBuffers(
            engine.kv,
            dtype,
            max_context=max_context,
            batch=batch,
            initial_capacity=initial_capacity,
        )
        self._session = session
        self._specs = {spec.name: spec for spec in (*engine.inputs, *engine.outputs)}
        self._runs: RunCache[PreparedRun] = RunCache(self._prepare)

    @property
    def length(self) -> int:
        """Tokens in the KV buffers."""
        return self.kv.length

    def prefill(
        self,
        tokens: NDArray[np.int64],
        *,
        want_logits: bool = False,
        on_rows: OnRows | None = None,
    ) -> Rows:
        """Feed ``tokens`` ``[batch, n]`` in chunks; returns the last row only.

        ``on_rows`` gets the hidden states of every chunk (first sequence).
        Raises ContextFull before anything is written, EngineError.
        """
        if on_rows is not None and not self.engine.all_hidden:
            raise EngineError(
                f"{self.engine.file}: returns no hidden states of the prompt",
                hint="this drafter needs a target without layers that share KV",
            )
        count, chunk = tokens.shape[1], self.prefill_chunk
        self.kv.reserve(count)
        last = (count - 1) // chunk * chunk
        for start in range(0, last, chunk):
            self._step(tokens[:, start : start + chunk], chunk - 1, False, on_rows)
        return self._step(tokens[:, last:], count - last - 1, want_logits, on_rows)

    def verify(self, tokens: NDArray[np.int64], *, want_logits: bool = False) -> Rows:
        """Feed ``tokens`` ``[batch, rows]``; returns every row."""
        self.kv.reserve(tokens.shape[1])
        return self._step(tokens, 0, want_logits)

    def truncate(self, length: int) -> None:
        """Forget KV rows from ``length`` on. Raises ValueError when there are fewer."""
        self.kv.truncate(length)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless lengths and buffers belong together."""
        self.kv.check_integrity()

    def _step(
        self,
        tokens: NDArray[np.int64],
        first_row: int,
        want_logits: bool,
        on_rows: OnRows | None = None,
    ) -> Rows:
        rows = tokens.shape[1]
        run = self._runs.get(self.kv.version, rows, first_row, int(want_logits))
        run.inputs[TOKENS][:] = tokens
        run.inputs[PAST_LENGTH][:] = self.kv.lengths
        run.run()
        # [0, length) was valid; [length, length + rows) is written now, and kept or truncated
        # by the caller once it knows which of these tokens stand.
        self.kv.advance(rows)
        hidden = run.outputs[HIDDEN]
        if on_rows is not None:
            on_rows(int(self.kv.lengths[0]) - rows, hidden[0])
        wanted = hidden[:, first_row:] if self.engine.all_hidden else hidden
        return Rows(run.outputs[ARGMAX], wanted, run.outputs.get(LOGITS))

    def _prepare(self, rows: int, first_row: int, want_logits: int) -> PreparedRun:
        def array(name: str) -> NDArray[Any]:
            spec: TensorSpec = self._specs[name]
            return zeros(spec, batch=self.kv.batch, rows=rows, wanted=rows - first_row)

        inputs = {name: array(name) for name in (TOKENS, PAST_LENGTH, FIRST_ROW)}
        inputs[FIRST_ROW][0] = first_row
        outputs = (ARGMAX, HIDDEN, LOGITS) if want_logits else (ARGMAX, HIDDEN)
        layers = [(kv.layer, part) for kv in self.kv.layers for part in Part]
        return PreparedRun(
            self._session,
            inputs,
            {name: array(name) for name in outputs},
            self.kv.values,
            {present(*key): self.kv.values[past(*key)] for key in layers},
            self.engine.file,
        )
