"""A smaller causal model that drafts: one engine, as a target's, with KV buffers of its own.

With the target's tokenizer (their tables may be padded differently) it is for the method ``draft``;
with another one for ``universal``, and its tokenizer goes into the folder.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specexport import tokenizer_files
from specexport.models import load
from specexport.numbers import agreement, relative_error
from specexport.parts.base import Opened, Settings, TargetRun
from specexport.parts.record import (
    manifest_source,
    manifest_tokenizer,
    num_assistant_tokens,
    schedule,
)
from specexport.parts.target import causal_spec, check_target
from specexport.sources import Source
from specexport.tokenizer_files import TokenizerInfo
from specexport.weights import Weights
from specrun.contract import DRAFT_ENGINE, UNIVERSAL_ENGINE
from specrun.manifest import DrafterSpec, DraftMethod, EngineSpec, ParityCase
from specrun.options import DEFAULT_NUM_ASSISTANT_TOKENS

if TYPE_CHECKING:
    from specgraphs.engine_graph import EngineGraph, Origin
    from specgraphs.trace import FakeModel

TOKENIZER = "drafter_tokenizer.json"
ROWS = 4  # tokens fed together behind a prefill, to compare
SEED = 21
OTHER_CONTEXT = 2  # times the target's: room for a tokenizer that needs more tokens for a text


@dataclass(frozen=True)
class DraftRun:
    """transformers' draft model on ``tokens`` int64 ``[n]``: ``logits`` position -> float32
    ``[vocabulary]``, for prefills of ``past_lengths`` tokens and ``ROWS`` behind each."""

    tokens: NDArray[np.int64] = field(repr=False)
    past_lengths: tuple[int, ...]
    logits: dict[int, NDArray[np.float32]] = field(repr=False)


class DraftModel:
    """The part of a draft model ``source`` for ``target``."""

    forward_options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, source: Source, target: Source) -> None:
        self.source = source
        self.target = target
        self._tokenizer: TokenizerInfo | None = None

    @property
    def method(self) -> DraftMethod:
        """See :class:`DrafterPart`. Both tokenizers are loaded for it. Raises SourceError."""
        return "draft" if self._same_tokenizer else "universal"

    @functools.cached_property
    def _same_tokenizer(self) -> bool:
        return same_tokenizer(self.source.path, self.target.path)

    @property
    def engine(self) -> str:
        """The name of its engine."""
        return DRAFT_ENGINE if self.method == "draft" else UNIVERSAL_ENGINE

    @property
    def weights(self) -> Mapping[str, Weights]:
        """See :class:`DrafterPart`."""
        return {self._origin: self.source.weights}

    def check(self) -> None:
        """See :class:`DrafterPart`."""
        check_target(self.source)

    def reference(self, run: TargetRun) -> DraftRun:
        """One forward pass over random tokens of its own vocabulary."""
        import torch

        lengths = self._past_lengths(run)
        count = max(lengths) + ROWS
        size = int(self.source.config.vocab_size)
        tokens = np.random.default_rng(SEED).integers(0, size, count, dtype=np.int64)
        positions = sorted({p for n in lengths for p in range(n - 1, n + ROWS)})
        model, scope = load(self.source, run.memory, run.dtype)
        run.note(self.method, scope)
        with torch.no_grad():
            out = model(
                torch.from_numpy(tokens)[None],
                use_cache=False,
                logits_to_keep=torch.tensor(positions),
            )
        rows = out.logits[0].float().numpy()
        return DraftRun(tokens, lengths, dict(zip(positions, rows, strict=True)))

    def noise(self, exact: Any, rounded: Any) -> dict[str, float]:
        """See :class:`DrafterPart`."""
        pairs = ((rounded.logits[p], exact.logits[p]) for p in exact.logits)
        return {self._tensor: max(relative_error(a, b) for a, b in pairs)}

    def trace(self, target: FakeModel, settings: Settings) -> dict[str, EngineGraph]:
        """See :class:`DrafterPart`."""
        from specgraphs.target import trace_target
        from specgraphs.trace import build_fake

        fake = build_fake(*self.source.class_and_config(), settings.dtype)
        graph = trace_target(
            fake,
            settings.dtype,
            max_context=self._max_context(settings),
            origin=self._origin,
        )
        return {self.engine: graph}

    def specs(self, settings: Settings) -> dict[str, EngineSpec]:
        """See :class:`DrafterPart`."""
        context = self._max_context(settings)
        return {self.engine: causal_spec(self.engine, self.source, settings, context)}

    def write_files(self, folder: Path) -> None:
        """Its tokenizer, where that is another one than the target's."""
        if self.method == "draft":
            return
        with tempfile.TemporaryDirectory() as own:
            info = self.source.write_tokenizer(Path(own))
            shutil.copyfile(Path(own) / info.file, folder / TOKENIZER)
        # It never makes a prompt, so it needs no template for one.
        self._tokenizer = dataclasses.replace(
            info, file=TOKENIZER, chat_template=None, response=None
        )

    def drafter(
        self, settings: Settings, target_sha256: str, sha256: Mapping[str, str]
    ) -> DrafterSpec:
        """See :class:`DrafterPart`."""
        info = self._tokenizer
        return DrafterSpec(
            source=manifest_source(self.source),
            engines=(self.engine,),
            max_num_draft=None,
            num_assistant_tokens=num_assistant_tokens(self.source, DEFAULT_NUM_ASSISTANT_TOKENS),
            schedule=schedule(self.source),
            target_sha256=target_sha256,
            tokenizer_sha256=sha256[tokenizer_files.TOKENIZER],
            max_context=self._max_context(settings),
            tokenizer=None if info is None else manifest_tokenizer(info, sha256[info.file]),
        )

    def compare(self, opened: Opened, tokens: NDArray[np.int64], seen: Any) -> list[ParityCase]:
        """A prefill of every length, and rows behind it, through the runtime's own target."""
        from specrun.target import Target

        spec = opened.manifest.engines[self.engine]
        model = Target(
            opened.session(self.engine), spec, max_context=len(seen.tokens), prefill_chunk=32
        )
        cases = []
        for past in seen.past_lengths:
            model.truncate(0)
            first = model.prefill(seen.tokens[None, :past], want_logits=True)
            cases.append(self._case(first, seen, past, 0))
            block = model.verify(seen.tokens[None, past : past + ROWS], want_logits=True)
            cases.append(self._case(block, seen, past, ROWS))
        return cases

    def _case(self, rows: Any, seen: DraftRun, past: int, fed: int) -> ParityCase:
        """``fed`` rows behind a prefill, or its own last one."""
        start, count = (past, fed) if fed else (past - 1, 1)
        wanted = np.stack([seen.logits[p] for p in range(start, start + count)])
        return ParityCase(
            self.engine,
            self._tensor,
            past if fed else 0,
            fed or past,
            relative_error(rows.logits[0], wanted),
            agreement(rows.argmax[0], wanted),
        )

    @property
    def _origin(self) -> Origin:
        return "draft" if self.method == "draft" else "universal"

    @property
    def _tensor(self) -> str:
        return f"{self.method}_model_logits"

    def _max_context(self, settings: Settings) -> int:
        """Its own limit. A text has other lengths in the two tokenizers, so the target's bounds
        only a draft model with the same one."""
        own = int(self.source.config.max_position_embeddings)
        if self.method == "draft":
            return min(own, settings.max_context)
        # Buffers of a fixed size are paid for whole.
        return min(own, OTHER_CONTEXT * settings.max_context) if settings.tensorrt else own

    def _past_lengths(self, run: TargetRun) -> tuple[int, ...]:
        """The target's, as far as they fit, and one behind a sliding window of its own."""
        from specgraphs import families

        config = self.source.config
        most = int(config.max_position_embeddings) - ROWS
        window = families.sliding_window(config)
        lengths = {*run.past_lengths, *([window + 9] if window is not None else [])}
        return tuple(sorted(n for n in lengths if n <= most)) or (1,)


def same_tokenizer(a: Path, b: Path) -> bool:
    """Whether two checkpoints have one vocabulary, up to added tokens and padding.

    Every id that both have, and one of them as an ordinary token, is written the same; and one of
    them has all ordinary tokens of the other. Raises SourceError.
    """
    ours, theirs = (_Vocabulary(tokenizer_files.load(path)) for path in (a, b))
    if not (ours.ordinary <= theirs.ordinary or theirs.ordinary <= ours.ordinary):
        return False
    common = ours.written.keys() & theirs.written.keys()
    compared = common & (ours.ordinary | theirs.ordinary)
    return all(ours.written[id_] == theirs.written[id_] for id_ in compared)


class _Vocabulary:
    """Id -> written form; and the ids of tokens that were not added to the vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self.written: dict[int, str] = {i: name for name, i in tokenizer.get_vocab().items()}
        self.ordinary = self.written.keys() - set(tokenizer.added_tokens_decoder)
