"""Answers as OpenAI's clients read them: whole, or as the chunks of a stream."""

from __future__ import annotations

import abc
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specrun.batch import Step
from specrun.engine import Engine
from specrun.pool import Ended
from specrun.response_format import Channel
from specrun.result import Result
from specrun.serve.answers import Answer, Gain, Logprobs, Part, Spelling
from specrun.serve.bodies import Common
from specrun.serve.problems import Problem, of, shutting_down, timed_out
from specrun.serve.runs import Run
from specrun.tool_calls import parsed

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "timeout": "length"}


@dataclass(frozen=True)
class Served:
    """What is served, and under which name."""

    engine: Engine
    model: str
    fingerprint: str
    spelling: Spelling


@dataclass
class Choice:
    """One answer so far."""

    index: int
    answer: Answer
    logprobs: Logprobs
    parts: list[Part] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    result: Result | None = None
    begun: bool = False

    def take(self, step: Step) -> Gain:
        """Enter a step."""
        gain = self.answer.take(step)
        self.parts += gain.parts
        self.entries += gain.logprobs
        return gain

    def text_of(self, *channels: Channel) -> str:
        """All text of these channels so far."""
        return "".join(part.text for part in self.parts if part.channel in channels)


class Reply(abc.ABC):
    """The reply to one request. ``prompt_field``: where its body has the prompt."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]

    def __init__(self, served: Served, body: Common, run: Run) -> None:
        self._served = served
        self._body = body
        self._run = run
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.model,
            "system_fingerprint": served.fingerprint,
        }
        self._choices = [
            Choice(index, self._answer(prompt), Logprobs(served.spelling))
            for index, prompt in enumerate(run.prompts)
        ]

    async def whole(self) -> dict[str, Any]:
        """The reply when all rows have ended. Raises Problem."""
        async for index, event in self._run.events():
            choice = self._choices[index]
            if isinstance(event, Step):
                choice.take(event)
            else:
                self._end(choice, event)
        self._check_begun()
        choices = [
            {
                "index": choice.index,
                **self._content(choice),
                "logprobs": self._logprobs(choice, choice.entries),
                "finish_reason": self._finish(choice),
                **self._extension(choice.parts, choice.result),
            }
            for choice in self._choices
        ]
        return {
            **self._head,
            "object": self.whole_object,
            "choices": choices,
            "usage": self._usage(),
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The reply as it comes. Raises Problem, in the middle too."""
        async for index, event in self._run.events():
            choice = self._choices[index]
            if not choice.begun:
                choice.begun = True
                for delta in self._opening():
                    yield self._chunk(choice, delta)
            if isinstance(event, Step):
                gain = choice.take(event)
                if gain.parts or gain.logprobs:
                    yield self._chunk(choice, self._delta(gain), gain)
            else:
                self._end(choice, event)
                for delta in self._closing(choice):
                    yield self._chunk(choice, delta)
                last = self._delta(Gain([], []))
                yield self._chunk(choice, last, finish=self._finish(choice))
        if self._body.wants_usage:
            yield {
                **self._head,
                "object": self.chunk_object,
                "choices": [],
                "usage": self._usage(),
            }

    def problem(self, error: BaseException) -> Problem:
        """What the client is told of ``error``."""
        return of(error, prompt=self.prompt_field)

    def check_first(self, event: object) -> None:
        """Raise Problem where the first event says that there will be no answer."""
        if isinstance(event, Ended) and len(self._choices) == 1:
            self._end(self._choices[0], event)
            self._check_begun()

    def _end(self, choice: Choice, ended: Ended) -> None:
        choice.result = ended.result
        if ended.error is not None:
            raise self.problem(ended.error) from ended.error
        if ended.result.finish_reason == "cancelled":  # and the client is still there
            raise shutting_down()

    def _check_begun(self) -> None:
        """Out of time before there was anything is an error; else it is a short answer."""
        results = [choice.result for choice in self._choices if choice.result is not None]
        if results and all(r.finish_reason == "timeout" and not r.tokens for r in results):
            raise timed_out(results[0].options.timeout or 0)

    def _finish(self, choice: Choice) -> str:
        assert choice.result is not None, "it has ended"
        return FINISH[choice.result.finish_reason]

    def _chunk(
        self,
        choice: Choice,
        content: Mapping[str, Any],
        gain: Gain | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        parts = [] if gain is None else gain.parts
        entries = [] if gain is None else gain.logprobs
        shown = {
            "index": choice.index,
            **content,
            "logprobs": self._logprobs(choice, entries) if entries else None,
            "finish_reason": finish,
            **self._extension(parts, choice.result if finish else None),
        }
        usage = {"usage": None} if self._body.wants_usage else {}
        return {**self._head, "object": self.chunk_object, "choices": [shown], **usage}

    def _extension(self, parts: list[Part], result: Result | None) -> dict[str, Any]:
        """The field ``specrun`` of a choice, where the request asks for something of it."""
        found: dict[str, Any] = {}
        if self._body.return_token_origins and parts:
            found["tokens"] = [part._asdict() for part in parts]
        if self._body.return_stats and result is not None:
            found["finish_reason"] = result.finish_reason
            found["stats"] = result.stats.as_dict()
        return {"specrun": found} if found else {}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(wish.tokens) for wish in self._run.wishes)
        results = [choice.result for choice in self._choices if choice.result is not None]
        completion = sum(len(result.tokens) for result in results)
        reasoning = sum(choice.answer.reasoning_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def _answer(self, prompt: list[int]) -> Answer:
        engine = self._served.engine
        options = self._run.wishes[0].request.options
        reader = self._reader(prompt, options.stop)
        return Answer(reader, frozenset(engine.manifest.generation.eos_token_ids))

    def _opening(self) -> Iterator[Mapping[str, Any]]:
        """What chunks a choice begins with."""
        return iter(())

    def _closing(self, choice: Choice) -> Iterator[Mapping[str, Any]]:
        """What chunks come behind the text."""
        return iter(())

    @abc.abstractmethod
    def _reader(self, prompt: list[int], stop: tuple[str, ...]) -> Any:
        """What parts the answer to ``prompt``."""

    @abc.abstractmethod
    def _content(self, choice: Choice) -> Mapping[str, Any]:
        """The text of a whole choice."""

    @abc.abstractmethod
    def _delta(self, gain: Gain) -> Mapping[str, Any]:
        """The text of a chunk."""

    @abc.abstractmethod
    def _logprobs(self, choice: Choice, entries: list[Any]) -> Any:
        """Log-probabilities, None where none were asked for."""


class CompletionReply(Reply):
    """Of ``/v1/completions``: plain text."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"
    prompt_field = "prompt"

    def _reader(self, prompt: list[int], stop: tuple[str, ...]) -> Any:
        from specrun.response import ResponseReader

        return ResponseReader(self._served.engine.tokenizer, None, prompt, stop=stop)

    def _content(self, choice: Choice) -> Mapping[str, Any]:
        return {"text": choice.text_of("content")}

    def _delta(self, gain: Gain) -> Mapping[str, Any]:
        return {"text": gain.text_of("content")}

    def _logprobs(self, choice: Choice, entries: list[Any]) -> Any:
        return None if self._body.alternatives is None else choice.logprobs.of(entries)


def _call(id_: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as OpenAI's clients read it: the arguments as JSON text."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    named = {"name": function["name"], "arguments": arguments}
    return {"id": id_, "type": "function", "function": named}


class ChatReply(Reply):
    """Of ``/v1/chat/completions``: the thought apart from the answer."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"

    def _reader(self, prompt: list[int], stop: tuple[str, ...]) -> Any:
        return self._served.engine.response_reader(prompt, stop=stop)

    def _opening(self) -> Iterator[Mapping[str, Any]]:
        yield {"delta": {"role": "assistant", "content": ""}}

    def _content(self, choice: Choice) -> Mapping[str, Any]:
        calls, rest = self._calls(choice)
        content = choice.text_of("content") + rest
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if thought := choice.text_of("thinking"):
            message["reasoning_content"] = thought
        return {"message": message}

    def _delta(self, gain: Gain) -> Mapping[str, Any]:
        delta = {}
        if text := gain.text_of("content"):
            delta["content"] = text
        if thought := gain.text_of("thinking"):
            delta["reasoning_content"] = thought
        return {"delta": delta}

    def _closing(self, choice: Choice) -> Iterator[Mapping[str, Any]]:
        calls, rest = self._calls(choice)
        if rest:
            yield {"delta": {"content": rest}}
        if calls:
            numbered = [{"index": index, **call} for index, call in enumerate(calls)]
            yield {"delta": {"tool_calls": numbered}}

    def _finish(self, choice: Choice) -> str:
        finish = super()._finish(choice)
        return "tool_calls" if finish == "stop" and self._calls(choice)[0] else finish

    def _calls(self, choice: Choice) -> tuple[list[dict[str, Any]], str]:
        """The calls of a whole answer; or their text, where it is not in a spelling we read."""
        text = choice.text_of("tool_calls")
        format = self._served.engine.manifest.tokenizer.response
        if not text or format is None or format.tool_calls is None:
            return [], text
        found = parsed(text, format.tool_calls)
        if found is None:
            return [], text
        key = self._head["id"].partition("-")[2]
        calls = [
            _call(f"call_{key}_{choice.index}_{place}", call) for place, call in enumerate(found)
        ]
        return calls, ""

    def _logprobs(self, choice: Choice, entries: list[Any]) -> Any:
        if self._body.alternatives is None:
            return None
        content = [self._served.spelling.chat(entry) for entry in entries]
        return {"content": content, "refusal": None}
