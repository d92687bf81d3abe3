"""One sequence's engines at work: a target with KV buffers of its own, and drafters over them.

Sessions, and with them the weights, are shared by all lanes of a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specrun import graph_file, ort
from specrun.contract import MTP_DRAFTER_ENGINE, TARGET_ENGINE, TARGET_ENGINES
from specrun.drafters.base import Drafter
from specrun.drafters.mtp_layers import MtpLayersDrafter
from specrun.drafters.ngram import NgramDrafter
from specrun.errors import DeviceError, EngineError
from specrun.guarded_target import GuardedTarget, Watch
from specrun.kv import KvBuffers
from specrun.manifest import DraftMethod, Manifest
from specrun.opening import open_exact, open_target
from specrun.options import EngineOptions, GenerateOptions
from specrun.stats import VerifierName
from specrun.target import Target, Verifier
from specrun.text import Tokenizer

if TYPE_CHECKING:
    from specrun.drafters.vocabulary import VocabularyPair
    from specrun.torch_verifier import TargetModel


@dataclass
class Resources:
    """What all lanes of an engine folder share. Sessions are opened at their first use."""

    folder: Path
    manifest: Manifest
    options: EngineOptions
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self._sessions: dict[str, Any] = {}
        self._providers: dict[str, str] = {}
        self._pair: VocabularyPair | None = None
        self._model: TargetModel | None = None
        self.torch_name = ""  # of that model, also when it is closed
        # Why the target's engine is given up, for the rest of these resources' life.
        self.failure: EngineError | None = None
        self.failure_said = False

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
            self._providers[name] = str(self._sessions[name].get_providers()[0])
        return self._sessions[name]

    def torch_model(self, failure: EngineError | None) -> TargetModel:
        """The target's PyTorch model, loaded at its first use.

        Raises EngineError, which names the ``failure`` of the engine that it stands in for too.
        """
        try:
            return self._loaded()
        except EngineError as error:
            if failure is None:
                raise
            raise EngineError(
                f"{failure}; and PyTorch cannot verify instead: {error}",
                hint="; or ".join(hint for hint in (failure.hint, error.hint) if hint),
            ) from error

    def stand_in(self, kv: KvBuffers, failure: EngineError) -> Verifier:
        """PyTorch on the KV buffers of the engine that failed. Raises EngineError."""
        return self.torch_model(failure).target(
            kv, max_context=kv.max_context, prefill_chunk=self.options.prefill_chunk
        )

    def _loaded(self) -> TargetModel:
        if self._model is None:
            from specrun.torch_verifier import load_model

            options = self.options
            self._model = load_model(
                self.manifest, self.folder, options.target, device=options.device
            )
            self.torch_name = self._model.name
        return self._model

    def vocabulary_pair(self) -> VocabularyPair:
        """The target's tokenizer and that of the universal drafter; made once."""
        if self._pair is None:
            self._pair = _vocabulary_pair(self)
        return self._pair

    def close(self) -> None:
        """Free the sessions and the model."""
        self._sessions.clear()
        self._model = None

    def leave(self) -> object:
        """Forget the sessions without freeing them: what is returned has them."""
        left = self._sessions, self._model
        self._sessions, self._model = {}, None
        return left

    def providers(self) -> dict[str, str]:
        """Where every engine runs that was opened, by its name."""
        found = dict(self._providers)
        if self.torch_name and TARGET_ENGINE not in found:
            found[TARGET_ENGINE] = self.torch_name
        return found


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
        by_engine = options.verify != "torch" and manifest.has_target_engine
        if by_engine and resources.failure is None:
            try:
                engine = open_target(manifest, resources.session, **lengths)
            except EngineError as error:
                if options.verify == "engine" or isinstance(error, DeviceError):
                    raise
                resources.failure = error
            else:
                stands_in = options.verify == "auto" and not options.exact
                self.guarded = GuardedTarget(engine, resources.stand_in if stands_in else None)
                return self.guarded
        return resources.torch_model(resources.failure).target(None, **lengths)

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


class Verification:
    """What verifies in one generation, and what is said when that changes.

    Entered, PyTorch may stand in for the target's engine: not with ``strict``, and once per engine
    folder that is open ``on_warning`` is told why.
    """

    def __init__(self, lane: Lane, *, strict: bool, on_warning: Callable[[str], None]) -> None:
        self._lane = lane
        self._strict = strict
        self._on_warning = on_warning
        self._before = 0 if lane.guarded is None else lane.guarded.steps

    def __enter__(self) -> Verification:
        """Raises EngineError where the engine failed before and ``strict`` refuses PyTorch."""
        resources, guarded = self._lane.resources, self._lane.guarded
        if self._lane.verifier == "torch" and resources.failure is not None:
            self._refuse(resources.failure)
            self._tell(resources.failure)
        if guarded is not None:
            guarded.watch = Watch(self._refuse, self._tell)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lane.guarded is not None:
            self._lane.guarded.watch = None

    def statistics(self, steps: int) -> dict[str, Any]:
        """Fields of Stats about a generation of so many runs of ``verify``."""
        lane, failure = self._lane, self._lane.resources.failure
        by_torch = lane.verifier == "torch"
        guarded = lane.guarded
        return {
            "provider": lane.provider(),
            "verifier": lane.verifier,
            "torch_steps": steps if guarded is None else guarded.steps - self._before,
            "verifier_failure": str(failure) if by_torch and failure is not None else None,
        }

    def _refuse(self, error: EngineError) -> None:
        if self._strict:
            hint = "without strict, PyTorch verifies in its place"
            raise EngineError(f"the target's engine failed: {error}", hint=hint) from error

    def _tell(self, error: EngineError) -> None:
        resources = self._lane.resources
        said, resources.failure_said = resources.failure_said, True
        resources.failure = error
        if not said:
            self._on_warning(
                f"the target's engine failed: {error}; going on with"
                f" {resources.torch_name} and the checkpoint's own weights"
            )


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
