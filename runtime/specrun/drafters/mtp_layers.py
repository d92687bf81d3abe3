"""The MTP layers of the target's checkpoint as a drafter, one engine per layer.

Reference: MTPCandidateGenerator of transformers 5.24, generation/candidate_generator.py. With K
layers and L committed tokens, of which the target has seen all but the last, so that H = L - 1 of
its hidden rows are known::

    row i of layer k  is computed from token i + 1 + k and row i of layer k - 1
    row i of layer 0  from token i + 1 and row i of the target
    draft k           comes from row H - 1 of layer k, whose token is draft k - 1

The last k rows of layer k therefore hold drafts: of these rows only those stand whose drafts were
accepted, and the others are computed again from the target's rows. Of the target's rows those are
kept that some layer has not seen with committed tokens: about K, and the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrun.contract import ARGMAX, HIDDEN, LOGITS, NEXT_HIDDEN, PAST_LENGTH, TOKENS
from specrun.drafters.base import Proposal, draw_from_row, proposal_of
from specrun.drafters.model import common_prefix
from specrun.kv import INITIAL_CAPACITY, KvBuffers
from specrun.manifest import EngineSpec
from specrun.runner import Run, Session
from specrun.runs import RunCache
from specrun.sampling import Draw, Sampler
from specrun.target import KvEngine, at_most

SETTLE_ROWS = 64  # target rows that may wait for a layer before all layers catch up


class MtpLayersDrafter:
    """Drafts token k with layer k, and any beyond with the last layer applied to itself.

    ``sessions`` and ``engines``: one per layer, in order. ``max_drafts``: most tokens that are
    proposed. ``block``: rows of one run over a prompt. Lengths in tokens.
    """

    needs_prompt_rows = True

    def __init__(
        self,
        sessions: Sequence[Session],
        engines: Sequence[EngineSpec],
        *,
        max_context: int,
        max_drafts: int | None,
        block: int = 512,
        initial_capacity: int = INITIAL_CAPACITY,
    ) -> None:
        self.max_drafts: int | None = max_drafts
        self.block = at_most(block, sessions[0].most_rows)
        self._layers = [
            MtpLayer(session, engine, max_context=max_context, initial_capacity=initial_capacity)
            for session, engine in zip(sessions, engines, strict=True)
        ]
        width, dtype = engines[0].hidden_size, engines[0].kv_dtype
        self._none: NDArray[Any] = np.zeros((0, width), dtype=dtype.numpy)
        self.begin(())

    def begin(self, tokens: Sequence[int]) -> None:
        """Start over; ``tokens`` is the first one of the prompt, the others come by observe()."""
        self._tokens = list(tokens)
        self._rows = self._none  # hidden rows of the target, from row self._first on
        self._first = 0
        for layer in self._layers:
            layer.kv.truncate(0)

    def resume(self, tokens: Sequence[int], most: int) -> int:
        """Start over with what the layers have of a prompt; see :class:`drafters.base.Resuming`.

        Row i of layer k comes from the tokens up to i + 1 + k, so of r tokens in common the first
        r - K rows stand in all K layers, and the target's rows from there on are wanted again.
        """
        if self._first + len(self._rows) == self._known:  # not so where a round was broken off
            self._settle()
        common = common_prefix(self._tokens, tokens) - len(self._layers)
        rows = max(0, min(common, most, *(layer.kv.length for layer in self._layers)))
        self._tokens = list(tokens[: rows + 1])
        self._rows, self._first = self._none, rows
        for layer in self._layers:
            layer.kv.truncate(rows)
        return rows

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """Keep the tokens and copies of their rows; a long prompt goes through the layers now."""
        self._tokens += tokens
        seen = min(layer.kv.length for layer in self._layers)
        self._rows = np.concatenate([self._rows[seen - self._first :], hidden])
        self._first = seen
        self._check()
        if len(self._rows) >= min(SETTLE_ROWS, self.block):  # which all go into one run
            self._settle()

    def propose(self, count: int, sampler: Sampler) -> Proposal:
        """One run per draft. Raises EngineError, ContextFull."""
        known, layers = self._known, self._layers[:count]
        if known == 0:
            return Proposal([])
        start = min(known - 1, *(layer.kv.length for layer in layers))
        hidden = self._rows[start - self._first :]
        drafts: list[int] = []
        draws: list[Draw] = []
        layer = layers[0]
        for step in range(count):
            if step < len(layers):
                layer = layers[step]
                # [0, start) of each layer stand; [start, known) are new, or held wrong drafts.
                layer.kv.truncate(start)
                tokens = [*self._tokens, *drafts][start + 1 + step :]
            else:
                # The last layer once more, one row on: its own state stands in for a target row.
                tokens, hidden = drafts[-1:], hidden[-1:]
            out = layer.run(tokens, hidden, want_logits=sampler.needs_draft_logits)
            hidden = out.hidden
            draws.append(self._draw(out, drafts, sampler))
            drafts.append(draws[-1].token)
            if not draws[-1].confident:
                break
        return proposal_of(draws)

    def truncate(self, length: int) -> None:
        """Keep the rows whose tokens are among the first ``length``.

        Raises ValueError where rows of the target that were dropped would be needed again.
        """
        known = max(0, min(len(self._tokens), length) - 1)
        stand = [
            max(0, min(layer.kv.length, known, length - 1 - index))
            for index, layer in enumerate(self._layers)
        ]
        if min(stand) < self._first:
            raise ValueError(f"cannot truncate to {length}: row {self._first} is the first kept")
        for layer, rows in zip(self._layers, stand, strict=True):
            layer.kv.truncate(rows)
        del self._tokens[length:]
        self._rows = self._rows[: known - self._first]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless tokens, rows and KV lengths belong together."""
        self._check()
        for layer in self._layers:
            layer.kv.check_integrity()

    @property
    def _known(self) -> int:
        """Rows of the target that are known: one per token but the last."""
        return max(0, len(self._tokens) - 1)

    def _check(self) -> None:
        if self._first + len(self._rows) != self._known:
            raise RuntimeError(
                f"{len(self._tokens)} tokens with {self._first + len(self._rows)} hidden rows"
            )

    def _settle(self) -> None:
        """Every layer over the rows that committed tokens give, but for the one to draft from.

        Those are all but the last k + 1 of layer k.
        """
        known = self._known
        for start in range(self._first, known, self.block):
            stop = min(start + self.block, known)
            hidden = self._rows[start - self._first : stop - self._first]
            for index, layer in enumerate(self._layers):
                end = min(stop, known - index - 1)
                if end <= start:
                    break
                layer.kv.truncate(start)
                tokens = self._tokens[start + 1 + index : end + 1 + index]
                hidden = layer.run(tokens, hidden[: end - start], want_logits=False).hidden

    def _draw(self, out: LayerRows, drafts: list[int], sampler: Sampler) -> Draw:
        prefix = np.array([*self._tokens, *drafts], dtype=np.int64)
        return draw_from_row(sampler, prefix, out.argmax, out.logits)


class LayerRows(NamedTuple):
    """What a layer says: the argmax at its last row, the hidden state ``[rows, hidden size]`` of
    every row, and where asked for the last row's logits ``[vocabulary]``. Views."""

    argmax: int
    hidden: NDArray[Any]
    logits: NDArray[np.float32] | None


class MtpLayer:
    """The session of one MTP layer with its KV buffers."""

    def __init__(
        self,
        session: Session,
        engine: EngineSpec,
        *,
        max_context: int,
        initial_capacity: int = INITIAL_CAPACITY,
    ) -> None:
        self.engine = engine
        self.kv = KvBuffers(
            engine.kv,
            engine.kv_dtype,
            max_context=max_context,
            initial_capacity=initial_capacity,
            memory=session.memory,
            fixed=engine.fixed,
        )
        self._on_kv = KvEngine(session, engine, self.kv)
        self._runs: RunCache[Run] = RunCache()

    def run(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        hidden: NDArray[Any],
        *,
        want_logits: bool,
    ) -> LayerRows:
        """Append rows: ``tokens`` ``[rows]``, ``hidden`` ``[rows, hidden size]``.

        Raises EngineError, or ContextFull before anything is written.
        """
        self.kv.reserve(len(tokens))
        run = self._runs.get(self._prepare, self.kv.version, len(tokens), int(want_logits))
        run.inputs[TOKENS][0] = tokens
        run.inputs[HIDDEN][0] = hidden
        run.inputs[PAST_LENGTH][:] = self.kv.lengths
        run.run()
        self.kv.advance(len(tokens))
        logits = run.outputs[LOGITS][0, 0] if want_logits else None
        return LayerRows(int(run.outputs[ARGMAX][0, 0]), run.outputs[NEXT_HIDDEN][0], logits)

    def _prepare(self, rows: int, want_logits: int) -> Run:
        on_kv = self._on_kv
        inputs = on_kv.arrays((TOKENS, HIDDEN, PAST_LENGTH), rows=rows) | on_kv.first_row(rows - 1)
        names = (ARGMAX, NEXT_HIDDEN, LOGITS) if want_logits else (ARGMAX, NEXT_HIDDEN)
        return on_kv.prepare(inputs, on_kv.arrays(names, rows=rows, wanted=1))
