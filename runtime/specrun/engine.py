"""An engine folder, opened: the Python API."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Any

from specrun import manifest, ort
from specrun.contract import Role
from specrun.drafters.base import Drafter
from specrun.drafters.guard import GuardedDrafter
from specrun.drafters.mtp import MtpDrafter
from specrun.drafters.ngram import NgramDrafter
from specrun.drafters.none import NoDrafter
from specrun.errors import ContextFull, EngineError, SpecrunError, UsageError
from specrun.loop import DraftPlan, OnRound, Progress, speculate
from specrun.options import EngineOptions, GenerateOptions, build
from specrun.prompt import Prompt, encode_prompt
from specrun.resolve import resolve_engine, resolve_generate
from specrun.result import Result, TextStream
from specrun.stats import Meter
from specrun.stopping import FinishReason, Stopping
from specrun.target import Target
from specrun.text import Tokenizer

OnWarning = Callable[[str], None]


def load(folder: str | Path, *, options: EngineOptions | None = None, **changes: Any) -> Engine:
    """Open an engine folder. ``changes`` are fields of :class:`EngineOptions` by name.

    Raises UsageError, FolderError before any engine is opened, or EngineError.
    """
    return Engine(Path(folder), build(EngineOptions, changes, options))


class Engine:
    """A target, its tokenizer and whatever drafts for it.

    One generation at a time: a second one, from any thread, is refused while the first runs.
    The KV buffers are allocated once and used again by every generation.
    """

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        self.folder = folder.resolve()  # stays right when the working directory changes
        self.manifest = manifest.read(
            self.folder, verify=options.verify, may_miss=(Role.MTP_DRAFTER,)
        )
        self.options = resolve_engine(options, self.manifest)
        spec = self.manifest.tokenizer
        self.tokenizer = Tokenizer(self.folder / spec.file)
        self.chat_template = (
            (self.folder / spec.chat_template).read_text(encoding="utf-8")
            if spec.chat_template is not None
            else None
        )
        self._busy = threading.Lock()
        self._sessions: dict[Role, Any] = {}
        self._mtp_drafter: MtpDrafter | None = None
        self._progress: Progress | None = None
        assert self.options.max_context is not None
        self._target: Target | None = Target(
            self._session(Role.TARGET),
            self.manifest.engines[Role.TARGET],
            max_context=self.options.max_context,
            prefill_chunk=self.options.prefill_chunk,
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        options: GenerateOptions | None = None,
        drafter: Drafter | None = None,
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        **changes: Any,
    ) -> Result:
        """Continue ``prompt``: a text, token ids, or chat messages.

        ``changes`` are fields of :class:`GenerateOptions` by name; ``drafter``: one of your own
        in place of the method's; ``on_round``: called after every round; ``on_warning``: gets
        what would else go to :mod:`warnings`. Raises UsageError, ContextFull or EngineError.
        """
        return self.stream(
            prompt,
            options=options,
            drafter=drafter,
            on_round=on_round,
            on_warning=on_warning,
            **changes,
        ).drain()

    def stream(
        self,
        prompt: Prompt,
        *,
        options: GenerateOptions | None = None,
        drafter: Drafter | None = None,
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        **changes: Any,
    ) -> TextStream:
        """The same, as text pieces while they are committed; none is taken back.

        The request is checked here, the engine runs as the stream is iterated.
        """
        resolved = self.resolve(build(GenerateOptions, changes, options))
        tokens = self.encode(prompt, resolved)
        pieces = self._pieces(tokens, resolved, drafter, on_round, on_warning or _warn)
        return TextStream(pieces)

    def resolve(self, options: GenerateOptions) -> GenerateOptions:
        """``options`` as they take effect on this folder. Raises UsageError."""
        return resolve_generate(options, self.manifest)

    def encode(self, prompt: Prompt, options: GenerateOptions | None = None) -> list[int]:
        """Token ids of a prompt, as the target is fed with them.

        Raises UsageError, or ContextFull when they leave no room for a new token.
        """
        tokens = encode_prompt(
            prompt,
            options or GenerateOptions(),
            tokenizer=self.tokenizer,
            template=self.chat_template,
            manifest=self.manifest,
            vocab_size=self.manifest.engines[Role.TARGET].vocab_size,
        )
        if len(tokens) >= self.max_context:
            raise ContextFull(
                f"prompt: {len(tokens)} tokens do not fit into the context of {self.max_context}"
                " with a new one",
                hint="shorten the prompt, or open the folder with a larger max_context",
            )
        return tokens

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and text together."""
        assert self.options.max_context is not None
        return self.options.max_context

    @property
    def target(self) -> Target:
        """The target with its KV buffers. Raises UsageError after ``close``."""
        if self._target is None:
            raise UsageError("the engine is closed", hint="load the folder again")
        return self._target

    def check_integrity(self) -> None:
        """Raise RuntimeError unless committed tokens and KV lengths belong together."""
        if self._progress is not None:
            self._progress.check_integrity()

    def close(self) -> None:
        """Free sessions and buffers."""
        self._sessions.clear()
        self._mtp_drafter = self._progress = self._target = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _pieces(
        self,
        prompt: list[int],
        options: GenerateOptions,
        drafter: Drafter | None,
        on_round: OnRound | None,
        on_warning: OnWarning,
    ) -> Generator[str, None, Result]:
        if not self._busy.acquire(blocking=False):
            raise UsageError(
                "the engine is busy with another generation",
                hint="finish or close its stream first, or load the folder once per thread",
            )
        try:
            return (yield from self._run(prompt, options, drafter, on_round, on_warning))
        finally:
            self._busy.release()

    def _run(
        self,
        prompt: list[int],
        options: GenerateOptions,
        drafter: Drafter | None,
        on_round: OnRound | None,
        on_warning: OnWarning,
    ) -> Generator[str, None, Result]:
        meter = Meter(prompt_tokens=len(prompt))
        target = self.target
        provider = self._sessions[Role.TARGET].get_providers()[0]
        method = "custom" if drafter is not None else options.method
        text: list[str] = []
        tokens: list[int] = []
        reason: FinishReason = "length"
        if options.max_new_tokens > 0:
            target.truncate(0)
            progress = self._progress = Progress(target, list(prompt))
            eos = options.eos_token_ids or ()
            stopping = Stopping(
                self.tokenizer,
                eos_token_ids=eos,
                stop=options.stop,
                max_tokens=min(options.max_new_tokens, self.max_context - len(prompt)),
            )
            plan = DraftPlan(
                options.num_assistant_tokens or 0,
                options.num_assistant_tokens_schedule or "constant",
                self.manifest.tokenizer.vocab_size,
                frozenset(eos),
            )
            guarded = self._guarded(drafter, options, meter, on_warning)
            for commit in speculate(progress, guarded, stopping, plan, meter, on_round):
                tokens += commit.tokens
                if commit.text:
                    text.append(commit.text)
                    yield commit.text
                reason = commit.reason or reason
        stats = meter.freeze(method, provider)
        return Result("".join(text), tokens, reason, stats, options)

    def _guarded(
        self,
        drafter: Drafter | None,
        options: GenerateOptions,
        meter: Meter,
        on_warning: OnWarning,
    ) -> Drafter:
        """The drafter of this generation. Its failure is a warning, or an error when strict."""

        def on_failure(error: Exception) -> None:
            name = "" if isinstance(error, SpecrunError) else f"{type(error).__name__}: "
            cause = f"the drafter failed: {name}{error}"
            if options.strict:
                hint = "without strict, decoding goes on without it"
                raise EngineError(cause, hint=hint) from error
            meter.mode = "fallback"
            on_warning(f"{cause}; going on with plain decoding")

        if options.num_assistant_tokens == 0:
            return NoDrafter()
        meter.mode = "speculative"
        try:
            found = drafter if drafter is not None else self._drafter(options)
        except Exception as error:  # whatever it is, the target can go on without a drafter
            on_failure(error)
            return NoDrafter()
        return GuardedDrafter(found, on_failure)

    def _drafter(self, options: GenerateOptions) -> Drafter:
        if options.method == "prompt-lookup":
            return NgramDrafter(options.max_matching_ngram_size)
        if self._mtp_drafter is None:
            self._mtp_drafter = MtpDrafter(
                self._session(Role.MTP_DRAFTER),
                self.manifest.engines[Role.MTP_DRAFTER],
                self.target.kv,
            )
        return self._mtp_drafter

    def _session(self, role: Role) -> Any:
        if role not in self._sessions:
            spec = self.manifest.engines[role]
            assert self.options.threads is not None
            self._sessions[role] = ort.open_session(
                self.folder / spec.file,
                spec,
                threads=self.options.threads,
                device=self.options.device,
            )
        return self._sessions[role]


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
