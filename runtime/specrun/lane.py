"""One sequence's engines at work: a target with KV buffers of its own, and drafters over them.

Sessions, and with them the weights, are shared by all lanes of a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specrun import graph_file, ort
from specrun.contract import MTP_DRAFTER_ENGINE
from specrun.drafters.base import Drafter
from specrun.drafters.mtp_layers import MtpLayersDrafter
from specrun.drafters.ngram import NgramDrafter
from specrun.manifest import DraftMethod, Manifest
from specrun.opening import open_target
from specrun.options import EngineOptions, GenerateOptions
from specrun.target import Target, Verifier
from specrun.text import Tokenizer

if TYPE_CHECKING:
    from specrun.drafters.vocabulary import VocabularyPair


@dataclass
class Resources:
    """What all lanes of an engine folder share. Sessions are opened at their first use."""

    folder: Path
    manifest: Manifest
    options: EngineOptions
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self._sessions: dict[str, Any] = {}
        self._pair: VocabularyPair | None = None

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and text together."""
        assert self.options.max_context is not None, "resolved when the folder was opened"
        return self.options.max_context

    @property
    def width_noise(self) -> float | None:
        """What the width of a block may change in the lead of a token; None: not measured."""
        parity = self.manifest.parity
        return None if parity is None else parity.width_noise

    def session(self, name: str) -> Any:
        """The session of the engine called ``name``. Raises EngineError."""
        if name not in self._sessions:
            spec = self.manifest.engines[name]
            assert self.options.threads is not None, "resolved when the folder was opened"
            path = self.folder / spec.file
            graph_file.check(path, self.folder, self.manifest.sizes)
            self._sessions[name] = ort.open_session(
                path,
                spec,
                threads=self.options.threads,
                device=self.options.device,
                spin=self.options.spin,
            )
        return self._sessions[name]

    def vocabulary_pair(self) -> VocabularyPair:
        """The target's tokenizer and that of the universal drafter; made once."""
        if self._pair is None:
            self._pair = _vocabulary_pair(self)
        return self._pair

    def close(self) -> None:
        """Free the sessions."""
        self._sessions.clear()

    def provider(self) -> str:
        """Where the target runs; its session is open."""
        return str(next(iter(self._sessions.values())).get_providers()[0])


class Lane:
    """The state that one generation at a time works on. Buffers are used again by the next."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self.target: Verifier = open_target(
            resources.manifest,
            resources.session,
            max_context=resources.max_context,
            prefill_chunk=resources.options.prefill_chunk,
            exact_width=resources.options.fixed_width,
        )
        self._drafters: dict[DraftMethod, Drafter] = {}

    def reset(self) -> None:
        """Forget the text, so that the next one does not depend on it in the last bit."""
        self.target.truncate(0)
        for drafter in self._drafters.values():
            reset = getattr(drafter, "reset", None)
            if reset is not None:
                reset()

    def drafter(self, options: GenerateOptions) -> Drafter:
        """What drafts by the resolved method of ``options``. Raises EngineError, FolderError."""
        if options.method == "prompt-lookup":
            return NgramDrafter(options.max_matching_ngram_size)
        method = cast(DraftMethod, options.method)
        if method not in self._drafters:
            self._drafters[method] = MAKERS[method](self)
        return self._drafters[method]


def _mtp_drafter(lane: Lane) -> Drafter:
    from specrun.drafters.mtp import MtpDrafter

    resources = lane.resources
    manifest = resources.manifest
    return MtpDrafter(
        resources.session(MTP_DRAFTER_ENGINE),
        manifest.engines[MTP_DRAFTER_ENGINE],
        lane.target.kv,
        max_num_draft=manifest.drafters["mtp-drafter"].max_num_draft,
    )


def _mtp_layers(lane: Lane) -> Drafter:

    resources = lane.resources
    spec = resources.manifest.drafters["mtp"]
    return MtpLayersDrafter(
        [resources.session(name) for name in spec.engines],
        [resources.manifest.engines[name] for name in spec.engines],
        max_context=resources.max_context,
        max_drafts=spec.max_num_draft,
    )


def _draft_model(lane: Lane) -> Drafter:
    from specrun.drafters.model import ModelDrafter

    manifest = lane.resources.manifest
    table_size = manifest.target_engine.vocab_size
    return ModelDrafter(
        _own_model(lane, "draft"),
        vocab_size=min(table_size, manifest.tokenizer.vocab_size),
        table_size=table_size,
    )


def _universal(lane: Lane) -> Drafter:
    from specrun.drafters.universal import UniversalDrafter

    return UniversalDrafter(_own_model(lane, "universal"), lane.resources.vocabulary_pair())


def _vocabulary_pair(resources: Resources) -> VocabularyPair:
    from specrun.drafters.vocabulary import VocabularyPair

    manifest = resources.manifest
    drafter = manifest.drafters["universal"]
    (name,) = drafter.engines
    own = drafter.tokenizer
    assert own is not None, "the manifest refuses a universal drafter without its tokenizer"
    return VocabularyPair(
        resources.tokenizer,
        Tokenizer(resources.folder / own.file),
        table_size=manifest.target_engine.vocab_size,
        drafter_table_size=manifest.engines[name].vocab_size,
        target_names=manifest.tokenizer.special_tokens,
        drafter_names=own.special_tokens,
        target_adds_bos=manifest.tokenizer.add_bos,
        drafter_adds_bos=own.add_bos,
    )


def _early_exit(lane: Lane) -> Drafter:
    from specrun.drafters.early_exit import EarlyExitDrafter
    from specrun.exact import ExactTarget
    from specrun.split import SplitTarget

    # In exact mode what the front computes for drafts, row by row, is not used to verify them.
    target = lane.target.target if isinstance(lane.target, ExactTarget) else lane.target
    assert isinstance(target, SplitTarget), "the manifest refuses early exit without parts"
    return EarlyExitDrafter(target)


def _own_model(lane: Lane, method: DraftMethod) -> Target:
    """The draft model of ``method``, with KV buffers of its own."""
    resources = lane.resources
    spec = resources.manifest.drafters[method]
    (name,) = spec.engines
    return Target(
        resources.session(name),
        resources.manifest.engines[name],
        max_context=spec.max_context or resources.max_context,
        prefill_chunk=resources.options.prefill_chunk,
    )


MAKERS: dict[DraftMethod, Callable[[Lane], Drafter]] = {
    "mtp-drafter": _mtp_drafter,
    "mtp": _mtp_layers,
    "draft": _draft_model,
    "universal": _universal,
    "early-exit": _early_exit,
}
