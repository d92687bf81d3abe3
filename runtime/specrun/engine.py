"""An engine folder, opened: the Python API."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast, overload

from specrun import hub, manifest
from specrun.batch import Rows, in_turn
from specrun.cancel import CancelToken
from specrun.conversation import Chat
from specrun.drafters.base import Drafter
from specrun.errors import ContextFull, UsageError
from specrun.generation import Generation
from specrun.grammar import Grammar, compile_grammar
from specrun.lane import Lane
from specrun.limits import MAX_TEMPLATE_BYTES
from specrun.loop import OnRound, Progress
from specrun.options import EngineOptions, GenerateOptions, build
from specrun.process import Closing, Turn, check_process
from specrun.prompt import Prompt, Prompts, check_ids, encode_prompt, is_batch
from specrun.request import LogitsProcessors, OnWarning, Request
from specrun.resolve import resolve_engine, resolve_generate, unsupported_defaults
from specrun.resources import Resources
from specrun.response import ResponseReader
from specrun.result import Result
from specrun.schedules import Schedules
from specrun.session import Session
from specrun.stream import TextStream
from specrun.target import Verifier
from specrun.text import Tokenizer


def load(folder: str | Path, *, options: EngineOptions | None = None, **changes: Any) -> Engine:
    """Open an engine folder. ``changes`` are fields of :class:`EngineOptions` by name.

    ``folder``: a path, or ``hf://ORG/NAME[@REVISION][/SUBFOLDER]`` on the model hub, from where it
    is fetched into the hub's cache; see :mod:`specrun.hub`. Raises UsageError, FolderError before
    any engine is opened, or EngineError.
    """
    if not isinstance(folder, (str, Path)):
        raise UsageError(f"folder: must be a path, got {folder!r}", hint="give a string or a Path")
    return Engine(hub.located(folder), build(EngineOptions, changes, options))


class Engine(Closing):
    """A target, its tokenizer and whatever drafts for it.

    One generation at a time: a second one, from any thread, is refused while the first runs.
    The KV buffers are allocated once and used again by every generation. It belongs to the process
    that loaded it; a fork loads the folder for itself.
    """

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        self.folder = folder.resolve()  # stays right when the working directory changes
        self.manifest = manifest.read(
            self.folder, integrity=options.integrity, drafters_may_miss=True
        )
        self.options = resolve_engine(options, self.manifest)
        spec = self.manifest.tokenizer
        self.tokenizer = Tokenizer(self.folder / spec.file, vocab_size=spec.vocab_size)
        self.chat_template = (
            manifest.read_listed(self.folder / spec.chat_template, MAX_TEMPLATE_BYTES, self.folder)
            if spec.chat_template is not None
            else None
        )
        self._process = os.getpid()
        self._turn = Turn()
        self._streams: weakref.WeakSet[TextStream] = weakref.WeakSet()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._resources = Resources(self.folder, self.manifest, self.options, self.tokenizer)
        self._lane: Lane | None = Lane(self._resources)
        self._progress: Progress | None = None
        self._warned = False
        tuning_file = None if self.options.tuning is None else Path(self.options.tuning)
        if tuning_file is not None and not tuning_file.is_file():
            raise UsageError(
                f"tuning: {str(tuning_file)!r} is no file", hint="give one that specrun tune wrote"
            )
        self._schedules = Schedules(self.folder, self.manifest, self.options, tuning_file)

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        options: GenerateOptions | None = None,
        drafter: Drafter | None = None,
        logits_processor: LogitsProcessors = (),
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        cancel: CancelToken | None = None,
        **changes: Any,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        *,
        options: GenerateOptions | None = None,
        drafter: None = None,
        logits_processor: LogitsProcessors = (),
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        cancel: CancelToken | None = None,
        **changes: Any,
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Prompt | Prompts,
        *,
        options: GenerateOptions | None = None,
        drafter: Drafter | None = None,
        logits_processor: LogitsProcessors = (),
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        cancel: CancelToken | None = None,
        **changes: Any,
    ) -> Result | list[Result]:
        """Continue ``prompt``: a text, token ids, or chat messages; or a list of such prompts.

        ``changes`` are fields of :class:`GenerateOptions` by name; ``drafter``: one of your own
        in place of the method's; ``logits_processor``: functions of your own, called with the
        tokens before a slot (int64 ``[n]``, read only) and its logits (float32
        ``[vocabulary]``), that return logits; ``on_round``: called after every round;
        ``on_warning``: gets what would else go to :mod:`warnings`; ``cancel``: a token whose
        ``cancel()`` ends it early, from any thread. Callbacks run in the middle of a generation:
        what they raise ends it and comes out here, and they cannot use the same engine.

        Every prompt of a list is generated as it would be alone (with a seed, row i has
        ``seed + i``), in rounds that take turns; the results come in the order of the prompts.
        Raises UsageError, ContextFull or EngineError.
        """
        request = self.request(
            build(GenerateOptions, changes, options),
            drafter=drafter,
            logits_processor=logits_processor,
            on_round=on_round,
            on_warning=on_warning,
            cancel=cancel,
        )
        if is_batch(prompt):
            return self._batch(prompt, request)
        return self._stream(cast(Prompt, prompt), request).drain()

    def stream(
        self,
        prompt: Prompt,
        *,
        options: GenerateOptions | None = None,
        drafter: Drafter | None = None,
        logits_processor: LogitsProcessors = (),
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        cancel: CancelToken | None = None,
        **changes: Any,
    ) -> TextStream:
        """The same for one prompt, as text pieces while they are committed; none is taken back.

        The request is checked here, the engine runs as the stream is iterated.
        """
        request = self.request(
            build(GenerateOptions, changes, options),
            drafter=drafter,
            logits_processor=logits_processor,
            on_round=on_round,
            on_warning=on_warning,
            cancel=cancel,
        )
        return self._stream(prompt, request)

    def session(self) -> Session:
        """A text that grows, with KV buffers of its own."""
        self._open_lane()
        session = Session(self, Lane(self._resources))
        self._sessions.add(session)
        return session

    def rows(self) -> Rows:
        """Texts side by side that come and go; see :class:`specrun.pool.Pool` for a server's.

        The engine is busy until it is closed. Raises UsageError when it is so already.
        """
        self._open_lane()
        return Rows(self._resources, self.held())

    def chat(self, *, options: GenerateOptions | None = None, **changes: Any) -> Chat:
        """A conversation, with KV buffers of its own, that reads only what is new of each turn.

        ``options`` and ``changes`` (fields of :class:`GenerateOptions` by name, ``system`` and
        ``enable_thinking`` among them) hold for every answer. Raises UsageError where the folder
        has no chat template.
        """
        return Chat(self, build(GenerateOptions, changes, options))

    def resolve(self, options: GenerateOptions) -> GenerateOptions:
        """``options`` as they take effect on this folder. Raises UsageError."""
        return resolve_generate(options, self.manifest, fixed_width=self.options.fixed_width)

    def request(
        self,
        options: GenerateOptions,
        *,
        drafter: Drafter | None = None,
        logits_processor: LogitsProcessors = (),
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        cancel: CancelToken | None = None,
    ) -> Request:
        """A generation that is ready to run. Raises UsageError."""
        if drafter is not None and options.method == "plain":
            raise UsageError(
                "drafter: method 'plain' drafts nothing, so it has no use for one",
                hint="leave one of the two out",
            )
        resolved = self.resolve(options)
        warn = on_warning or _warn
        self._warn_of_defaults(warn)
        if callable(logits_processor):
            logits_processor = (logits_processor,)
        if not isinstance(logits_processor, Sequence) or not all(map(callable, logits_processor)):
            raise UsageError(
                f"logits_processor: must be functions, got {logits_processor!r}",
                hint="give a function of tokens and logits, or a list of such",
            )
        if cancel is not None and not isinstance(cancel, CancelToken):
            raise UsageError(
                f"cancel: must be a CancelToken, got {cancel!r}", hint="give specrun.CancelToken()"
            )
        return Request(
            options=resolved,
            bad_words_ids=self._bad_words(resolved),
            drafter=drafter,
            logits_processors=tuple(logits_processor),
            make_schedule=functools.partial(self._schedules.make, custom=drafter is not None),
            on_round=on_round,
            on_warning=warn,
            cancel=cancel,
            grammar=self._grammar(resolved),
        )

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
            vocab_size=self.manifest.target_engine.vocab_size,
        )
        self.check_room(len(tokens))
        return tokens

    def encode_more(
        self, prompt: str | Sequence[int], options: GenerateOptions | None = None
    ) -> list[int]:
        """Token ids of what follows a text: no bos, no template. Raises UsageError."""
        if isinstance(prompt, str):
            parse = options is not None and options.parse_special
            return self.tokenizer.encode(prompt, add_special_tokens=False, parse_special=parse)
        return check_ids(prompt, self.manifest.target_engine.vocab_size)

    def response_reader(
        self, prompt: Sequence[int] = (), *, stop: Sequence[str] = ()
    ) -> ResponseReader:
        """What parts one answer into thought, content and tool calls, fed with its tokens.

        ``prompt``: ids that the answer continues, see :meth:`encode`; ``stop``: stop strings of the
        generation. Where the folder does not say how its checkpoint marks them, all is content.
        """
        spec = self.manifest
        return ResponseReader(
            self.tokenizer,
            spec.tokenizer.response,
            check_ids(prompt, max(spec.target_engine.vocab_size, spec.tokenizer.vocab_size)),
            stop=(stop,) if isinstance(stop, str) else stop,
            end_ids=spec.generation.eos_token_ids,
        )

    def check_room(self, length: int) -> None:
        """Raise ContextFull unless a token fits behind ``length`` tokens."""
        if length >= self.max_context:
            raise ContextFull(
                f"prompt: {length} tokens do not fit into the context of {self.max_context}"
                " with a new one",
                hint="shorten the prompt, or open the folder with a larger max_context",
            )

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and text together."""
        return self._resources.max_context

    @property
    def not_tuned(self) -> str | None:
        """Why the schedule ``auto`` learns what steps cost; None where it reads what was measured.

        Raises FolderError where the tuning file is none.
        """
        return self._schedules.not_tuned

    @property
    def target(self) -> Verifier:
        """The target with its KV buffers. Raises UsageError after ``close``."""
        return self._open_lane().target

    def check_free(self) -> None:
        """Raise UsageError while a generation runs, or after ``close``."""
        with self.held():
            pass

    def check_integrity(self) -> None:
        """Raise RuntimeError unless committed tokens and KV lengths belong together."""
        if self._progress is not None:
            self._progress.check_integrity()

    def close(self) -> None:
        """Free everything, and end a stream that is not through.

        Raises UsageError while a run is in progress, in another thread or above a callback.
        """
        if self._lane is None:
            return
        if self._process != os.getpid():
            # The threads of these did not come along, and to free them would wait for those.
            _LEFT_BEHIND.append(self._resources.leave())
            self._lane = self._progress = None
            return
        for stream in list(self._streams):
            stream.close()
        with self.held():
            for session in list(self._sessions):
                session.close()
            self._resources.close()
            self._lane = self._progress = None

    def start(self, request: Request, begin: Callable[[], tuple[Lane, Progress]]) -> TextStream:
        """A stream of ``request``. With its first piece the engine is busy and ``begin`` called."""
        self._open_lane()
        generation = Generation(request, self._resources)

        def pieces() -> Generator[str, None, Result]:
            with self.held():
                return (yield from generation.run(*begin()))

        stream = TextStream(pieces(), generation, self._check_process)
        self._streams.add(stream)
        return stream

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No generation of another caller meanwhile. Raises UsageError when one runs already."""
        self._open_lane()
        with self._turn.held(
            "the engine is busy with another generation",
            "finish or close its stream first, use it in no callback of its own, or load the folder"
            " once per thread",
        ):
            yield

    def _open_lane(self) -> Lane:
        if self._lane is None:
            raise UsageError("the engine is closed", hint="load the folder again")
        self._check_process()
        return self._lane

    def _check_process(self) -> None:
        check_process(self._process)

    def _stream(self, prompt: Prompt, request: Request) -> TextStream:
        tokens = self.encode(prompt, request.options)

        def begin() -> tuple[Lane, Progress]:
            lane = self._open_lane()
            self._progress = None  # its rows go with the next line
            lane.reset()
            self._progress = Progress(lane.target, list(tokens), behind=True)
            return lane, self._progress

        return self.start(request, begin)

    def _batch(self, prompts: Prompts, request: Request) -> list[Result]:
        if request.drafter is not None:
            raise UsageError(
                f"drafter: follows one text and cannot draft for {len(prompts)} prompts",
                hint="call generate once per prompt, or use a method of the folder",
            )
        encoded = [self.encode(prompt, request.options) for prompt in prompts]
        early_end = request.early_end()

        with self.held(), Rows(self._resources, contextlib.nullcontext()) as rows:
            return in_turn(
                [
                    rows.add(tokens, request.in_batch(index), early_end)
                    for index, tokens in enumerate(encoded)
                ]
            )

    def _grammar(self, options: GenerateOptions) -> Grammar | None:
        """What the text must be. Raises UsageError; also without the library for it."""
        if not options.structured:
            return None
        return compile_grammar(options, self._resources.vocabulary())

    def _bad_words(self, options: GenerateOptions) -> tuple[tuple[int, ...], ...]:
        """``bad_words`` as ids, alone and behind a space, and ``bad_words_ids``."""
        found = list(options.bad_words_ids or ())
        for word in options.bad_words:
            for text in (word, f" {word}"):
                found.append(tuple(self.tokenizer.encode(text, add_special_tokens=False)))
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def _warn_of_defaults(self, warn: OnWarning) -> None:
        """Say once what the checkpoint asks for and is not done."""
        asked = unsupported_defaults(self.manifest.generation.defaults)
        if asked and not self._warned:
            listed = ", ".join(f"{name} {value}" for name, value in sorted(asked.items()))
            warn(f"the checkpoint's generation defaults are not all supported; ignored: {listed}")
        self._warned = True


# What a fork has of engines that its parent had loaded.
_LEFT_BEHIND: list[object] = []


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
