"""From the body of a request to prompts and options of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specrun.options import GenerateOptions, build
from specrun.reading import shown
from specrun.request import LogitsProcessor, Request
from specrun.serve.bodies import Chat, Common, Completion
from specrun.serve.problems import invalid

if TYPE_CHECKING:
    from specrun.engine import Engine
    from specrun.request import OnWarning
    from specrun.serve.settings import ServeOptions

# Options that are taken as they are named.
SAME = (
    "method", "num_assistant_tokens", "num_assistant_tokens_schedule", "temperature", "top_p",
    "assistant_confidence_threshold", "max_matching_ngram_size", "ensemble_weight", "top_k",
    "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens",
    "regex", "grammar",
)  # fmt: skip


@dataclass(frozen=True)
class Wish:
    """One prompt as ids, and what to do with it ``count`` times."""

    tokens: list[int]
    request: Request

    def rows(self, count: int) -> list[Request]:
        """A request per answer: the seeds count up."""
        return [replace(self.request.in_batch(index), sequence=0) for index in range(count)]


class Asks:
    """Makes wishes of bodies, for one engine. Not thread-safe: rendering and encoding take time, so
    one thread beside the server's own does it."""

    def __init__(self, engine: Engine, settings: ServeOptions, on_warning: OnWarning) -> None:
        self._engine = engine
        self._settings = settings
        self._on_warning = on_warning

    def wishes(self, body: Common) -> list[Wish]:
        """One per prompt. Raises Problem, UsageError or ContextFull."""
        options = self._options(body)
        if isinstance(body, Chat):
            return [self._wish(self._engine.encode(messages(body), options), body, options)]
        assert isinstance(body, Completion)
        return [
            self._wish(self._engine.encode(prompt, options), body, options)
            for prompt in prompts(body)
        ]

    def _wish(self, tokens: list[int], body: Common, options: GenerateOptions) -> Wish:
        most = self._settings.max_prompt_tokens
        if most is not None and len(tokens) > most:
            field = "messages" if isinstance(body, Chat) else "prompt"
            raise invalid(
                f"{field}: {len(tokens)} tokens, the server takes at most {most}",
                field,
                "context_length_exceeded",
            )
        room = self._engine.max_context - len(tokens)
        if options.max_new_tokens is None and "max_new_tokens" not in self._defaults:
            options = replace(options, max_new_tokens=room)
        request = self._engine.request(
            options, logits_processor=_penalties(body, len(tokens)), on_warning=self._on_warning
        )
        return Wish(tokens, request)

    @property
    def _defaults(self) -> Mapping[str, Any]:
        return self._engine.manifest.generation.defaults

    def _options(self, body: Common) -> GenerateOptions:
        given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
        if body.seed is not None:
            given["seed"] = body.seed % (1 << 63)  # theirs may be negative
        if body.stop:
            given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
        if body.bad_words:
            given["bad_words"] = body.bad_words
        if body.logit_bias:
            given["logit_bias"] = _bias(body.logit_bias)
        if body.ignore_eos:
            given["eos_token_ids"] = []
        if body.response_format is not None:
            given |= _structure(body.response_format)
        given |= _template(body) if isinstance(body, Chat) else {"raw": True}
        given["logprobs"] = body.alternatives
        most = body.most_tokens
        given["max_new_tokens"] = self._settings.max_new_tokens if most is None else most
        limit = self._settings.timeout
        given["timeout"] = limit if body.timeout is None else min(limit, body.timeout)
        self._drop_neutral(given)
        options = build(GenerateOptions, given)
        if "num_assistant_tokens_schedule" not in given:
            resolved = self._engine.resolve(options)
            if resolved.num_assistant_tokens_schedule == "heuristic":
                # What a seed gives must not depend on the requests before.
                options = replace(options, num_assistant_tokens_schedule="heuristic_transient")
        return options

    def _drop_neutral(self, given: dict[str, Any]) -> None:
        """Clients send what is off by default; that alone does not ask for sampling."""
        if "temperature" in given or bool(self._defaults.get("do_sample")):
            return
        for name, neutral in (("top_p", 1), ("typical_p", 1)):
            if given.get(name) == neutral:
                del given[name]


def _template(body: Chat) -> dict[str, Any]:
    """What the chat template is told beside the messages."""
    found: dict[str, Any] = {}
    if body.chat_template_kwargs is not None:
        found["enable_thinking"] = body.chat_template_kwargs.enable_thinking
    if body.tool_choice not in (None, "none", "auto"):
        raise invalid(
            f"tool_choice: must be none or auto, got {shown(body.tool_choice)}", "tool_choice"
        )
    if body.tools and body.tool_choice != "none":
        found["tools"] = body.tools
    return found


def _structure(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the text must be: any text, any JSON object, or one that a schema describes."""
    kind = given.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise invalid(
            f"response_format: must be of type text, json_object, or json_schema with a schema, got"
            f" {shown(given)}",
            "response_format",
        )
    return {"json_schema": schema}


def prompts(body: Completion) -> list[str] | list[list[int]]:
    """The prompts of a completion, each a text or ids."""
    prompt: Any = body.prompt
    if not isinstance(prompt, str) and not prompt:
        raise invalid("prompt: must not be an empty list", "prompt")
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if one else list(prompt)


def messages(body: Chat) -> list[dict[str, Any]]:
    """The messages as chat templates expect them. Raises Problem."""
    return [_message(message, place) for place, message in enumerate(body.messages)]


def _message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    role = message.get("role")
    where = f"messages[{place}]"
    if not isinstance(role, str):
        raise invalid(f"{where}.role: must be a text, got {shown(role)}", "messages")
    found = dict(message)
    # The newer name of the same role, which few templates know.
    found["role"] = "system" if role == "developer" else role
    content = message.get("content")
    if isinstance(content, list):
        found["content"] = "".join(_part(part, where) for part in content)
    elif content is None and message.get("tool_calls"):
        found["content"] = ""
    elif not isinstance(content, str):
        raise invalid(f"{where}.content: must be a text or parts, got {shown(content)}", "messages")
    if calls := message.get("tool_calls"):
        found["tool_calls"] = _calls(calls, where)
    return found


def _part(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "refusal"):
        text = part.get(part["type"])
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise invalid(f"{where}.content: only parts of text are read, got {shown(kind)}", "messages")


def _calls(calls: object, where: str) -> list[Any]:
    """With arguments as objects, which templates write in their own manner."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise invalid(f"{where}.tool_calls: must be a list of calls", "messages")
    return [{**call, "function": _function(call.get("function"), where)} for call in calls]


def _function(function: object, where: str) -> Any:
    if not isinstance(function, dict):
        raise invalid(f"{where}.tool_calls: every call needs a function", "messages")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        return {**function, "arguments": json.loads(arguments)}
    except ValueError:
        return function  # the model's own text, which need not be JSON


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, bias in given.items():
        if not token.isascii() or not token.isdigit() or not -100 <= bias <= 100:
            raise invalid(
                f"logit_bias: must give token ids numbers from -100 to 100, got"
                f" {shown(token)}: {shown(bias)}",
                "logit_bias",
            )
        found[int(token)] = bias
    return found


def _penalties(body: Common, prompt_length: int) -> Sequence[LogitsProcessor]:
    """OpenAI's two penalties, of tokens of the answer so far::

    logit[t] -= frequency_penalty * count(t) + presence_penalty * (count(t) > 0)
    """
    presence, frequency = body.presence_penalty or 0.0, body.frequency_penalty or 0.0
    if not presence and not frequency:
        return ()

    def penalize(tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        ids, counts = np.unique(tokens[prompt_length:], return_counts=True)
        changed = logits.copy()
        changed[ids] -= (presence + frequency * counts).astype(np.float32)
        return changed

    return (penalize,)
