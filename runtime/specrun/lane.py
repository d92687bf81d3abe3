"""One sequence's engines at work: a target with KV buffers of its own, and drafters over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from specrun.contract import MTP_DRAFTER_ENGINE, TARGET_ENGINES
from specrun.drafters.base import Drafter
from specrun.drafters.mtp_layers import MtpLayersDrafter
from specrun.drafters.ngram import NgramDrafter
from specrun.errors import DeviceError, EngineError, without_frames
from specrun.guarded_target import GuardedTarget
from specrun.manifest import DraftMethod
from specrun.opening import open_exact, open_target
from specrun.options import GenerateOptions
from specrun.resources import Resources
from specrun.stats import VerifierName
from specrun.target import Target, Verifier
from specrun.verification import Verification

if TYPE_CHECKING:
    pass


class Lane:
    """The state that one generation at a time works on. Buffers are used again by the next."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self.guarded: GuardedTarget | None = None  # where an engine verifies
        self.target: Verifier = self._open()
        self._drafters: dict[DraftMethod, Drafter] = {}

    @property
    def verifier(self) -> VerifierName:
        """What verifies now."""
        guarded = self.guarded
        return "torch" if guarded is None or guarded.failure is not None else "engine"

    def provider(self) -> str:
        """Where the target runs."""
        if self.verifier == "torch":
            return self.resources.torch_name
        providers = self.resources.providers()
        return next(providers[name] for name in TARGET_ENGINES if name in providers)

    def _open(self) -> Verifier:
        """The target: engines, or PyTorch, in exact mode in blocks."""
        resources, options = self.resources, self.resources.options
        width = options.fixed_width
        if width is None:
            return self._open_plain(resources.max_context, options.prefill_chunk)
        return open_exact(resources.manifest, width, resources.max_context, self._open_plain)

    def _open_plain(self, max_context: int, prefill_chunk: int) -> Verifier:
        resources = self.resources
        options, manifest = resources.options, resources.manifest
        lengths = {"max_context": max_context, "prefill_chunk": prefill_chunk}
        # Recorded runs have the addresses of the KV buffers, which must not move.
        initial = {"initial_capacity": max_context} if options.cuda_graph else {}
        by_engine = options.verify != "torch" and manifest.has_target_engine
        if by_engine and resources.failure is None:
            try:
                engine = open_target(manifest, resources.session, **lengths, **initial)
            except EngineError as error:
                if options.verify == "engine" or isinstance(error, DeviceError):
                    raise
                resources.failure = without_frames(error)
            else:
                stands_in = options.verify == "auto" and not options.exact
                self.guarded = GuardedTarget(engine, resources.stand_in if stands_in else None)
                return self.guarded
        model = resources.torch_model(resources.failure)
        return model.target(None, **lengths, memory=resources.drafter_memory)

    def watch(self, *, strict: bool, on_warning: Callable[[str], None]) -> Verification:
        """For one generation: PyTorch may stand in for an engine that fails."""
        return Verification(self, strict=strict, on_warning=on_warning)

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


def _early_exit(lane: Lane) -> Drafter:
    from specrun.drafters.early_exit import EarlyExitDrafter, EarlyExitTarget
    from specrun.exact import ExactTarget

    # In exact mode what the front computes for drafts, row by row, is not used to verify them.
    target = lane.target.target if isinstance(lane.target, ExactTarget) else lane.target
    return EarlyExitDrafter(cast(EarlyExitTarget, target))


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
