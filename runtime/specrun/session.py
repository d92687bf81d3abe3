"""A text that grows: prompt and generation in turn, with what was read before kept in the KV."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specrun.cancel import CancelToken
from specrun.common_text import common_ids, common_text
from specrun.drafters.base import Drafter
from specrun.errors import UsageError
from specrun.lane import Lane
from specrun.loop import OnRound, Progress
from specrun.options import GenerateOptions, build
from specrun.process import Closing
from specrun.prompt import Prompt
from specrun.request import LogitsProcessors, OnWarning
from specrun.result import Result
from specrun.stream import TextStream

if TYPE_CHECKING:
    from specrun.engine import Engine


class Session(Closing):
    """Tokens with their KV rows. Made by :meth:`specrun.Engine.session`.

    Append, generate, rewind and go on: the result is that of one cold run over the same tokens, and
    only what is new is read. However a generation ended, by an error or a stream that was closed,
    the session has its finished rounds and goes on from there.
    """

    def __init__(self, engine: Engine, lane: Lane) -> None:
        self._engine = engine
        self._committed: list[int] = []
        self._lane: Lane | None = lane
        self._progress: Progress | None = Progress(lane.target, self._committed)
        self._streams: weakref.WeakSet[TextStream] = weakref.WeakSet()

    @property
    def tokens(self) -> list[int]:
        """Everything so far: prompts and generated tokens, end ids too."""
        return list(self._committed)

    def append(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> None:
        """Add text or token ids. It is read by the target with the next generation.

        The first prompt of a session is encoded as by :meth:`specrun.Engine.generate`, text after
        it as it stands, without bos or template. Special tokens that it spells are text, unless
        ``options.parse_special`` is set. Raises UsageError; ContextFull where it leaves no room for
        a new token.
        """
        with self._engine.held():
            _, progress = self._open()
            committed = progress.committed
            encode = self._engine.encode_more if committed else self._engine.encode
            new = encode(prompt, options)
            self._engine.check_room(len(committed) + len(new))
            committed += new

    def replace(self, prompt: Prompt, options: GenerateOptions | None = None) -> None:
        """Let the whole text be ``prompt``; what it has in common with the text so far is kept.

        For chats: give all messages, and only those that are new are read. Where text or messages
        spell what the session has in other tokens, as a model's own answer may be, its tokens
        stay; token ids are taken as they are. Raises as ``append``.
        """
        with self._engine.held():
            _, progress = self._open()
            wanted = self._engine.encode(prompt, options)
            committed = progress.committed
            if isinstance(prompt, str) or any(isinstance(item, Mapping) for item in prompt):
                same = common_text(committed, wanted, self._engine.tokenizer)
            else:
                same = common_ids(committed, wanted)
            self._engine.check_room(same.have + len(wanted) - same.want)
            progress.rewind(same.have)
            committed += wanted[same.want :]

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens. Raises UsageError where there are fewer."""
        with self._engine.held():
            _, progress = self._open()
            count = len(progress.committed)
            whole = isinstance(length, int) and not isinstance(length, bool)
            if not whole or not 0 <= length <= count:
                raise UsageError(
                    f"length: must be from 0 to the session's {count} tokens, got {length!r}",
                    hint="rewind to a length it has had",
                )
            progress.rewind(length)

    def generate(
        self,
        *,
        options: GenerateOptions | None = None,
        drafter: Drafter | None = None,
        logits_processor: LogitsProcessors = (),
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        cancel: CancelToken | None = None,
        **changes: Any,
    ) -> Result:
        """Continue the text; see :meth:`specrun.Engine.generate`."""
        return self.stream(
            options=options,
            drafter=drafter,
            logits_processor=logits_processor,
            on_round=on_round,
            on_warning=on_warning,
            cancel=cancel,
            **changes,
        ).drain()

    def stream(
        self,
        *,
        options: GenerateOptions | None = None,
        drafter: Drafter | None = None,
        logits_processor: LogitsProcessors = (),
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        cancel: CancelToken | None = None,
        **changes: Any,
    ) -> TextStream:
        """The same, as text pieces while they are committed; none is taken back."""
        _, progress = self._open()
        if not progress.committed:
            raise UsageError("the session is empty", hint="append a prompt first")
        request = self._engine.request(
            build(GenerateOptions, changes, options),
            drafter=drafter,
            logits_processor=logits_processor,
            on_round=on_round,
            on_warning=on_warning,
            cancel=cancel,
        )
        self._engine.check_room(len(progress.committed))
        stream = self._engine.start(request, self._open)
        self._streams.add(stream)
        return stream

    def close(self) -> None:
        """Free the KV buffers, and end a stream that is not through; ``tokens`` stay.

        Raises UsageError while a run is in progress, in another thread or above a callback.
        """
        for stream in list(self._streams):
            stream.close()
        self._lane = self._progress = None

    def check_integrity(self) -> None:
        """Raise RuntimeError unless tokens and KV belong together."""
        _, progress = self._open()
        target, count = progress.target, len(progress.committed)
        target.check_integrity()
        if target.length > max(0, count - 1):
            raise RuntimeError(f"the KV holds {target.length} rows for {count} tokens")

    def _open(self) -> tuple[Lane, Progress]:
        if self._lane is None or self._progress is None:
            raise UsageError("the session is closed", hint="open another one: engine.session()")
        return self._lane, self._progress
