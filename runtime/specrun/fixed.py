"""Engines in the dialect of TensorRT, seen as the contract has them.

Their tensors are those of :attr:`specrun.manifest.EngineSpec.file_io`: rows are wanted by their
numbers, and an MTP drafter always drafts the same number of tokens. The loop knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.contract import (
    DRAFT_CANDIDATES,
    DRAFT_LOGITS,
    DRAFT_TOKENS,
    FED,
    FIRST_ROW,
    NOISE,
    NUM_DRAFT,
    ROWS_AXIS,
    WANTED_ROWS,
    FixedSizes,
)
from specrun.errors import EngineError
from specrun.runner import Buffer, Memory, Run, Session

PER_DRAFT = (NOISE, DRAFT_TOKENS, DRAFT_LOGITS, DRAFT_CANDIDATES)  # [batch, drafts, ...]


def as_contract(session: Session) -> Session:
    """``session``, or where its engine has fixed sizes one that takes what the contract has."""
    fixed = session.spec.fixed
    return session if fixed is None else FixedSession(session, fixed)


class FixedSession:
    """See :class:`specrun.runner.Session`. ``inner``: runs the engine as its file has it."""

    def __init__(self, inner: Session, fixed: FixedSizes) -> None:
        self.inner = inner
        self.spec = inner.spec
        self._fixed = fixed

    @property
    def memory(self) -> Memory:
        """Where the KV buffers it is given must be."""
        return self.inner.memory

    @property
    def provider(self) -> str:
        """What runs it."""
        return self.inner.provider

    @property
    def most_rows(self) -> int | None:
        """Most rows of a run."""
        return self.inner.most_rows

    @property
    def most_wanted(self) -> int | None:
        """Most of them whose logits can be had."""
        return self.inner.most_wanted

    def prepare(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        past: Mapping[str, Buffer],
        present: Mapping[str, Buffer],
    ) -> Run:
        """See :class:`specrun.runner.Session`; ``first_row`` is read now, not by each run."""
        if NUM_DRAFT in inputs:
            return self._drafting(inputs, outputs, past)
        given = dict(inputs)
        if FIRST_ROW in given:
            first = int(given.pop(FIRST_ROW)[0])
            rows = next(given[name].shape[ROWS_AXIS] for name in FED if name in given)
            given[WANTED_ROWS] = np.arange(first, rows, dtype=np.int64)
        return self.inner.prepare(given, outputs, past, present)

    def _drafting(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        past: Mapping[str, Buffer],
    ) -> DraftRun:
        drafts, count = self._fixed.drafts or 0, int(inputs[NUM_DRAFT])
        if count > drafts:
            raise EngineError(
                f"{self.spec.file}: drafts {drafts} tokens, {count} were asked for",
                hint=f"give num_assistant_tokens {drafts} or less, or export with --num-draft",
            )

        def whole(name: str, array: NDArray[Any]) -> NDArray[Any]:
            shape = (array.shape[0], drafts, *array.shape[2:])
            return np.zeros(shape, array.dtype) if name in PER_DRAFT else array

        given = {name: whole(name, array) for name, array in inputs.items() if name != NUM_DRAFT}
        made = {name: whole(name, array) for name, array in outputs.items()}
        return DraftRun(self.inner.prepare(given, made, past, {}), inputs, outputs, count)


class DraftRun:
    """A run that drafts more tokens than are wanted: the first ``count`` of them."""

    def __init__(
        self,
        run: Run,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        count: int,
    ) -> None:
        self.name = run.name
        self.inputs = inputs
        self.outputs = outputs
        self._run = run
        self._count = count

    def run(self) -> None:
        """Run the engine. Raises EngineError."""
        self._run.inputs[NOISE][:, : self._count] = self.inputs[NOISE]
        self._run.run()
        for name, array in self.outputs.items():
            array[...] = self._run.outputs[name][:, : self._count]
