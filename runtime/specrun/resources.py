"""What all lanes of an engine folder share: sessions with their weights, and PyTorch's model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.contract import MTP_DRAFTER_ENGINE, TARGET_ENGINE
from specrun.devices import torch_device
from specrun.errors import EngineError
from specrun.kv import KvBuffers
from specrun.manifest import Manifest
from specrun.memory import HOST
from specrun.options import EngineOptions
from specrun.runner import Memory, Session
from specrun.sessions import open_engine
from specrun.target import Verifier
from specrun.text import Tokenizer

if TYPE_CHECKING:
    from specrun.drafters.vocabulary import VocabularyPair
    from specrun.grammar import Vocabulary
    from specrun.torch_verifier import TargetModel


@dataclass
class Resources:
    """What all lanes of an engine folder share. Sessions are opened at their first use."""

    folder: Path
    manifest: Manifest
    options: EngineOptions
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._providers: dict[str, str] = {}
        self._pair: VocabularyPair | None = None
        self._vocabulary: Vocabulary | None = None
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

    def session(self, name: str) -> Session:
        """The session of the engine called ``name``. Raises EngineError."""
        if name not in self._sessions:
            self._sessions[name] = open_engine(self.folder, self.manifest, name, self.options)
            self._providers[name] = self._sessions[name].provider
        return self._sessions[name]

    @property
    def drafter_memory(self) -> Memory:
        """Where drafters read the KV of a target that is no engine. Raises EngineError."""
        if self.options.device == "cpu" or MTP_DRAFTER_ENGINE not in self.manifest.engines:
            return HOST
        return self.session(MTP_DRAFTER_ENGINE).memory

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
                self.manifest, self.folder, options.target, device=torch_device(options)
            )
            self.torch_name = self._model.name
        return self._model

    def vocabulary_pair(self) -> VocabularyPair:
        """The target's tokenizer and that of the universal drafter; made once."""
        if self._pair is None:
            self._pair = _vocabulary_pair(self)
        return self._pair

    def vocabulary(self) -> Vocabulary:
        """The target's tokens for grammars; made once. Raises UsageError: no library for them."""
        if self._vocabulary is None:
            from specrun.grammar import Vocabulary

            self._vocabulary = Vocabulary(self.tokenizer)
        return self._vocabulary

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
