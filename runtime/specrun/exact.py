"""A target whose answers have the same bits however its tokens are fed.

Sums are added in another order in a run of another shape: over more rows, behind another number of
KV rows. (ONNX Runtime's attention on the CPU reads the KV in pieces and sums a short last one in
another way where heads are larger than 128, so that even the place of a row in a run shows.) So
positions are cut into blocks of ``width`` once and for all, and a token is computed in the block of
its position only, and only whole blocks are run::

    position   start .. length - 1    length .. length + rows - 1    .. start + width - 1
    row        fed again              what is asked for              token 0, dropped

``start`` is a multiple of ``width``, so two runs that give the same row have the same shapes and
the same rows before it. As attention looks back only, its bits depend on the tokens up to it and on
nothing else: not on drafts, rejections, chunks, buffers or what a session read before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specrun.errors import ContextFull
from specrun.kv import KvBuffers
from specrun.target import BetweenChunks, OnRows, Rows, Verifier

PADDING = 0  # the token of rows that stand for nothing


class ExactTarget:
    """``target`` in blocks of ``width`` rows, for one sequence of at most ``max_context`` tokens.

    ``target`` must have room for whole blocks, and take one of them in one run.
    """

    def __init__(self, target: Verifier, width: int, *, max_context: int) -> None:
        self.target = target
        self.width = width
        self.max_context = max_context
        # Those of the KV rows, and more after a run that failed: entered before they are fed.
        self._tokens: list[int] = []

    @property
    def kv(self) -> KvBuffers:
        """The KV buffers that drafters may read."""
        return self.target.kv

    @property
    def length(self) -> int:
        """Tokens in the KV buffers."""
        return self.target.length

    @property
    def room(self) -> int:
        """Rows that the next ``verify`` can take: to the end of the block or of the context."""
        return min(self.width - self.length % self.width, self.max_context - self.length)

    def prefill(
        self,
        tokens: NDArray[np.int64],
        *,
        want_logits: bool = False,
        on_rows: OnRows | None = None,
        between_chunks: BetweenChunks | None = None,
    ) -> Rows:
        """Feed ``tokens`` ``[1, n]`` block by block; returns the last row.

        ``on_rows`` gets every hidden row. Raises ContextFull before anything is written,
        EngineError, and what ``between_chunks`` raises between two blocks.
        """
        self._check_context(tokens.shape[1])
        while (room := self.room) < tokens.shape[1]:
            self._read(tokens[:, :room], on_rows)
            tokens = tokens[:, room:]
            if between_chunks is not None:
                between_chunks()
        start = self.length
        rows = self.verify(tokens, want_logits=want_logits)
        if on_rows is not None:
            on_rows(start, rows.hidden[0])
        return _slice(rows, tokens.shape[1] - 1, tokens.shape[1])

    def verify(self, tokens: NDArray[np.int64], *, want_logits: bool = False) -> Rows:
        """Feed ``tokens`` ``[1, rows]``, at most ``room``; returns every row.

        Raises ContextFull, EngineError; ValueError for rows beyond the block.
        """
        count, length = tokens.shape[1], self.length
        self._check_context(count)
        if count > self.room:
            raise ValueError(f"{count} rows in a block that has room for {self.room}")
        block = self._block(tokens)
        # The rows [start, length) are written again, with the bits that they have.
        start = length - length % self.width
        self._tokens[length:] = tokens[0].tolist()
        self.target.truncate(start)
        rows = self.target.verify(block, want_logits=want_logits)
        self.target.truncate(length + count)
        return _slice(rows, length - start, length - start + count)

    def truncate(self, length: int) -> None:
        """Forget KV rows from ``length`` on. Raises ValueError when there are fewer."""
        self.target.truncate(length)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless lengths, tokens and buffers belong together."""
        self.target.check_integrity()
        if self.length > min(len(self._tokens), self.max_context):
            raise RuntimeError(
                f"{self.length} rows of {len(self._tokens)} tokens, context {self.max_context}"
            )

    def _read(self, tokens: NDArray[np.int64], on_rows: OnRows | None) -> None:
        """The same to the end of the block, where nobody asks for what the target says.

        The head, the last of what is run, may be left out of it: no KV row depends on it.
        """
        length = self.length
        offset = length % self.width

        def skip(start: int, hidden: NDArray[np.float32]) -> None:
            if on_rows is not None:
                on_rows(start + offset, hidden[offset:])

        block = self._block(tokens)
        self._tokens[length:] = tokens[0].tolist()
        self.target.truncate(length - offset)
        self.target.prefill(block, on_rows=None if on_rows is None else skip)

    def _block(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The whole block ``[1, width]`` that ``tokens`` stand in, behind those it has."""
        offset = self.length % self.width
        block = np.full((1, self.width), PADDING, dtype=np.int64)
        block[0, :offset] = self._tokens[self.length - offset : self.length]
        block[:, offset : offset + tokens.shape[1]] = tokens
        return block

    def _check_context(self, rows: int) -> None:
        if self.length + rows > self.max_context:
            raise ContextFull(
                f"{self.length + rows} tokens do not fit into the context of {self.max_context}",
                hint="shorten the prompt, or export with a larger context",
            )


def _slice(rows: Rows, start: int, stop: int) -> Rows:
    """Some of the rows, as views."""
    logits = None if rows.logits is None else rows.logits[:, start:stop]
    margin = rows.margin[:, start:stop]
    return Rows(rows.argmax[:, start:stop], rows.hidden[:, start:stop], logits, margin)
