"""A text that grows: prompt and generation in turn, with what was read before kept in the KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specrun.drafters.base import Drafter
from specrun.errors import UsageError
from specrun.lane import Lane
from specrun.loop import OnRound, Progress
from specrun.options import GenerateOptions, build
from specrun.prompt import Prompt
from specrun.request import LogitsProcessors, OnWarning
from specrun.result import Result, TextStream

if TYPE_CHECKING:
    from specrun.engine import Engine


class Session:
    """Tokens with their KV rows. Made by :meth:`specrun.Engine.session`.

    Append, generate, rewind and go on: the result is that of one cold run over the same tokens, and
    only what is new is read.
    """

    def __init__(self, engine: Engine, lane: Lane) -> None:
        self._engine = engine
        self._lane = lane
        self._progress = Progress(lane.target, [])
        lane.target.truncate(0)

    @property
    def tokens(self) -> list[int]:
        """Everything so far: prompts and generated tokens, end ids too."""
        return list(self._progress.committed)

    def append(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> None:
        """Add text or token ids. It is read by the target with the next generation.

        The first prompt of a session is encoded as by :meth:`specrun.Engine.generate`, text after
        it as it stands, without bos or template. Special tokens that it spells are text, unless
        ``options.parse_special`` is set. Raises UsageError; ContextFull where it leaves no room for
        a new token.
        """
        self._engine.check_free()
        committed = self._progress.committed
        encode = self._engine.encode_more if committed else self._engine.encode
        new = encode(prompt, options)
        self._engine.check_room(len(committed) + len(new))
        committed += new

    def replace(self, prompt: Prompt, options: GenerateOptions | None = None) -> None:
        """Let the whole text be ``prompt``; what it has in common with the text so far is kept.

        For chats: give all messages, and only those that are new are read. Raises as ``append``.
        """
        tokens = self._engine.encode(prompt, options)
        committed = self._progress.committed
        pairs = zip(tokens, committed, strict=False)
        same = next((i for i, (new, old) in enumerate(pairs) if new != old), None)
        self.rewind(min(len(tokens), len(committed)) if same is None else same)
        committed += tokens[len(committed) :]

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens. Raises UsageError where there are fewer."""
        self._engine.check_free()
        committed = self._progress.committed
        whole = isinstance(length, int) and not isinstance(length, bool)
        if not whole or not 0 <= length <= len(committed):
            raise UsageError(
                f"length: must be from 0 to the session's {len(committed)} tokens, got {length!r}",
                hint="rewind to a length it has had",
            )
        del committed[length:]
        # The last token is fed again by the next generation, so that it has a row to start from.
        target = self._progress.target
        target.truncate(min(target.length, max(0, length - 1)))

    def generate(
        self,
        *,
        options: GenerateOptions | None = None,
        drafter: Drafter | None = None,
        logits_processor: LogitsProcessors = (),
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        **changes: Any,
    ) -> Result:
        """Continue the text; see :meth:`specrun.Engine.generate`."""
        return self.stream(
            options=options,
            drafter=drafter,
            logits_processor=logits_processor,
            on_round=on_round,
            on_warning=on_warning,
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
        **changes: Any,
    ) -> TextStream:
        """The same, as text pieces while they are committed; none is taken back."""
        if not self._progress.committed:
            raise UsageError("the session is empty", hint="append a prompt first")
        request = self._engine.request(
            build(GenerateOptions, changes, options),
            drafter=drafter,
            logits_processor=logits_processor,
            on_round=on_round,
            on_warning=on_warning,
        )
        self._engine.check_room(len(self._progress.committed))
        lane, progress = self._lane, self._progress
        return TextStream(self._engine.exclusively(lambda: request.run(lane, progress)))

    def check_integrity(self) -> None:
        """Raise RuntimeError unless tokens and KV belong together."""
        self._progress.target.check_integrity()
        if self._progress.target.length > max(0, len(self._progress.committed) - 1):
            raise RuntimeError(
                f"the KV holds {self._progress.target.length} rows for"
                f" {len(self._progress.committed)} tokens"
            )
