"""Chats: messages on one side, tokens with their KV rows on the other.

What the model reads is what the checkpoint's chat template writes of all messages, as for anyone
who renders them with transformers. Of that, what the session has already is not read again:

* Where the template writes an answer as the model gave it, the ids that the model gave stay, even
  if the tokenizer would part the same text otherwise (:mod:`specrun.common_text`).
* Where it writes something else (many leave out the thoughts of earlier turns, or blanks), the
  session goes back to that place and reads on from there.

So an answer equals that of :meth:`specrun.Engine.generate` on the ids that :attr:`Chat.tokens` has
before it, with the same options: what a cold run would say. Those ids spell the template's text,
special tokens as such.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specrun.cancel import CancelToken
from specrun.chat import check_known
from specrun.drafters.base import Drafter
from specrun.errors import UsageError
from specrun.loop import OnRound
from specrun.options import GenerateOptions, build
from specrun.process import Closing
from specrun.reading import shown
from specrun.request import LogitsProcessors, OnWarning
from specrun.response import Piece, ResponseReader
from specrun.result import Result
from specrun.stream import TextStream
from specrun.tool_calls import parsed

if TYPE_CHECKING:
    from specrun.engine import Engine

Message = Mapping[str, Any]
# What templates call a thought that is given back to them; the first that one mentions.
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True)
class Reply:
    """An answer in parts: ``content`` is for the user; ``thinking`` what came before it, where the
    checkpoint marks it; ``tool_calls`` the text of calls, with their marks, as the model wrote it.

    ``message``: the same as the message that stands in the chat from now on. ``result``: the
    generation.
    """

    content: str
    thinking: str
    tool_calls: str
    message: Message
    result: Result


class Chat(Closing):
    """A conversation with KV buffers of its own. Made by :meth:`specrun.Engine.chat`.

    ``options``: of every answer, unless one has its own; may be set at any time.
    """

    def __init__(self, engine: Engine, options: GenerateOptions) -> None:
        if engine.chat_template is None:
            raise UsageError(
                "a chat needs a chat template, this folder has none",
                hint="continue texts with engine.session(), or export an instruct checkpoint",
            )
        self._engine = engine
        self._messages: list[dict[str, Any]] = []
        self._stream: ChatStream | None = None
        self._system: str | None = None
        self.options = options
        self._session = engine.session()

    @property
    def options(self) -> GenerateOptions:
        """How answers are generated; ``system`` is taken out of it."""
        return self._options

    @options.setter
    def options(self, options: GenerateOptions) -> None:
        if options.raw:
            raise UsageError(
                "raw: got True for a chat, which goes through the chat template",
                hint="leave raw out",
            )
        self._engine.resolve(options)
        check_known(
            self._engine.chat_template or "",
            tools=options.tools,
            enable_thinking=options.enable_thinking,
        )
        if options.system is not None:
            self.system = options.system
        self._options = dataclasses.replace(options, system=None)

    @property
    def method(self) -> str:
        """What drafts, by ``options``: where that says auto, what auto is in this folder."""
        return self._engine.resolve(self._options).method

    @property
    def system(self) -> str | None:
        """The system message, which may change between turns; None: there is none."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = GenerateOptions(system=text).system

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All turns so far, without the system message; a copy. May be set to others."""
        return [dict(message) for message in self._messages]

    @messages.setter
    def messages(self, messages: Sequence[Message]) -> None:
        self._check_free()
        self._messages = [dict(message) for message in _messages(messages)]

    @property
    def tokens(self) -> list[int]:
        """Ids of the text as it was read and generated, up to the last answer."""
        return self._session.tokens

    def ask(self, message: str | Message | Sequence[Message], **arguments: Any) -> Reply:
        """Say something and take the answer; both are in ``messages`` then.

        ``message``: a text of the user's, a message, or several (results of tools).
        ``arguments``: those of :meth:`specrun.Engine.generate`. When something is raised, the chat
        is as it was before. Raises UsageError, ContextFull or EngineError.
        """
        with self.stream(message, **arguments) as stream:
            for _ in stream:
                pass
        return stream.reply

    def stream(
        self,
        message: str | Message | Sequence[Message],
        *,
        options: GenerateOptions | None = None,
        drafter: Drafter | None = None,
        logits_processor: LogitsProcessors = (),
        on_round: OnRound | None = None,
        on_warning: OnWarning | None = None,
        cancel: CancelToken | None = None,
        **changes: Any,
    ) -> ChatStream:
        """The same as pieces of the parts of the answer, while they are committed."""
        self._check_free()
        wanted = build(GenerateOptions, changes, options or self._options)
        if wanted.system is not None or wanted.raw:
            name = "raw" if wanted.raw else "system"
            raise UsageError(
                f"{name}: is not for one answer of a chat",
                hint="set the chat's attribute system" if name == "system" else "leave raw out",
            )
        said = {"role": "user", "content": message} if isinstance(message, str) else message
        new = _messages(said)
        if not new:
            raise UsageError("message: there is none", hint="give a text or a message")
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._session.replace([*system, *self._messages, *new], wanted)
        prompt = self._session.tokens
        text = self._session.stream(
            options=wanted,
            drafter=drafter,
            logits_processor=logits_processor,
            on_round=on_round,
            on_warning=on_warning,
            cancel=cancel,
        )
        reader = self._engine.response_reader(prompt, stop=wanted.stop)
        self._stream = ChatStream(self, new, text, reader)
        return self._stream

    def undo(self) -> list[dict[str, Any]]:
        """Take back the last turn: the user's last message and all behind it, which are returned.

        Raises UsageError where there is none.
        """
        self._check_free()
        users = [i for i, message in enumerate(self._messages) if message.get("role") == "user"]
        if not users:
            raise UsageError("undo: the chat has no turn to take back", hint="say something first")
        gone = self._messages[users[-1] :]
        del self._messages[users[-1] :]
        return gone

    def close(self) -> None:
        """Free the KV buffers, and end an answer that is not through; ``messages`` stay."""
        if self._stream is not None:
            self._stream.close()
        self._session.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless tokens and KV belong together."""
        self._session.check_integrity()

    def _check_free(self) -> None:
        if self._stream is not None and self._stream.going_on:
            raise UsageError(
                "the chat is busy with an answer", hint="finish or close its stream first"
            )

    def _reply(self, reader: ResponseReader, result: Result) -> Reply:
        """What the reader found, and the message that it makes."""
        content, thinking, calls = (
            reader.text_of("content"),
            reader.text_of("thinking"),
            reader.text_of("tool_calls"),
        )
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message[self._reasoning] = thinking
        if calls:
            format = self._engine.manifest.tokenizer.response
            region = format.tool_calls if format is not None else None
            found = parsed(calls, region) if region is not None else None
            if found is None:  # in a spelling that only the checkpoint knows: nothing is lost
                message["content"] = content + calls
            else:
                message["tool_calls"] = found
        return Reply(content, thinking, calls, message, result)

    @property
    def _reasoning(self) -> str:
        template = self._engine.chat_template or ""
        return next((name for name in REASONING if name in template), REASONING[0])


class ChatStream(Closing, Iterator[Piece]):
    """Pieces ``(channel, text)`` of an answer; ``reply`` when they are through.

    Closed or interrupted (Ctrl-C) before its end, what was committed of the answer is the answer;
    where that is nothing, and after any other error, the chat is as it was before.
    """

    def __init__(
        self, chat: Chat, new: list[Message], text: TextStream, reader: ResponseReader
    ) -> None:
        self._chat = chat
        self._new = new
        self._text = text
        self._reader = reader
        self._read = 0  # tokens that the reader was fed with
        self._pieces: deque[Piece] = deque()
        self._reply: Reply | None = None
        self.going_on = True

    def __next__(self) -> Piece:
        while not self._pieces:
            if not self.going_on:
                raise StopIteration
            try:
                next(self._text)
            except StopIteration:
                self._end(keep=True)
            except BaseException as error:
                self._end(keep=isinstance(error, KeyboardInterrupt))
                raise
            else:
                self._feed()
        return self._pieces.popleft()

    @property
    def reply(self) -> Reply:
        """The answer, whole or what there is of it. Raises UsageError before the end."""
        if self._reply is None:
            raise UsageError("reply: the answer has not ended", hint="iterate over it first")
        return self._reply

    @property
    def partial(self) -> Result:
        """What was generated so far; see :attr:`specrun.TextStream.partial`."""
        return self._text.partial

    def close(self) -> None:
        """End the answer here."""
        self._text.close()
        if self.going_on:
            self._end(keep=True)

    def _feed(self) -> None:
        tokens = self._text.tokens
        self._pieces.extend(self._reader.feed(tokens[self._read :]))
        self._read = len(tokens)

    def _end(self, *, keep: bool) -> None:
        """The answer is through; it stays in the chat if ``keep``, and there is any of it."""
        self.going_on = False
        self._feed()
        self._pieces.extend(self._reader.finish())
        self._reply = self._chat._reply(self._reader, self._text.partial)
        ended = self._reply.result.finish_reason not in ("cancelled", "timeout")
        if keep and (ended or self._read):
            self._chat._messages += [*map(dict, self._new), dict(self._reply.message)]


def _messages(given: Message | Sequence[Message]) -> list[Message]:
    single = isinstance(given, (Mapping, bytes)) or not isinstance(given, Iterable)
    found: list[Any] = [given] if single else list(given)
    for message in found:
        if not _is_message(message):
            raise UsageError(
                f"message: must be a text or have a role and content, got {shown(message)}",
                hint='give for example {"role": "user", "content": "Hi"}',
            )
    return found


def _is_message(message: object) -> bool:
    """With a role, and content: a text, or parts and objects as some templates read them. A
    message that calls tools, or brings what they gave, may have none."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if content is None:
        return bool(message.get("tool_calls") or message.get("tool_responses"))
    return isinstance(content, (str, list, tuple, Mapping))
