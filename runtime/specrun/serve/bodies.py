"""What requests hold: OpenAI's fields, and ours beside them.

A field that would change the answer and is not supported is refused by name, as is an unknown one.
What changes nothing here (``user``, ``metadata``) is taken and not looked at.
"""

from __future__ import annotations

import abc
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specrun.options import METHODS, SCHEDULES
from specrun.reading import ReadingError, parse_json, shown
from specrun.serve.problems import invalid

MAX_STOP = 16  # stop strings
MAX_BIAS = 4096  # entries of logit_bias

# Fields that change no text.
IGNORED = {
    "user", "metadata", "service_tier", "parallel_tool_calls", "prompt_cache_key",
    "prompt_cache_retention", "safety_identifier", "prediction",
}  # fmt: skip
# Fields that would, and the values with which they do not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "audio": (),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
}

# Fields in fields, which errors name whole.
NESTED = {
    "stream_options.include_usage", "stream_options.include_obfuscation",
    "chat_template_kwargs.enable_thinking",
}  # fmt: skip

Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Strict(BaseModel):
    """Only these fields, of these types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """``include_obfuscation`` is taken and not done."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Common(Strict):
    """What both kinds of request have. None: the server's default, or the checkpoint's."""

    model: str | None = None
    max_tokens: Whole | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIAS)] | None = None
    response_format: dict[str, Any] | None = None

    # Ours, named as in GenerateOptions.
    method: Literal[METHODS] | None = None  # type: ignore[valid-type]
    num_assistant_tokens: Whole | None = None
    num_assistant_tokens_schedule: Literal[SCHEDULES] | None = None  # type: ignore[valid-type]
    assistant_confidence_threshold: Share | None = None
    max_matching_ngram_size: Annotated[int, Field(ge=1)] | None = None
    ensemble_weight: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Whole | None = None
    min_p: Share | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    no_repeat_ngram_size: Whole | None = None
    min_new_tokens: Whole | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BIAS)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    regex: str | None = None
    grammar: str | None = None

    ignore_eos: bool = False
    return_token_origins: bool = False
    return_stats: bool = False

    @property
    def most_tokens(self) -> int | None:
        """New tokens that the request allows."""
        return self.max_tokens

    @property
    def count(self) -> int:
        """Answers to every prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Raise Problem where fields, each of which is right, do not go together."""

    @property
    @abc.abstractmethod
    def alternatives(self) -> int | None:
        """Log-probabilities that are reported beside each token's own; None: none at all."""


class Completion(Common):
    """Of ``/v1/completions``: the prompts are taken as they are, without the chat template."""

    prompt: str | list[str] | list[Whole] | list[list[Whole]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def alternatives(self) -> int | None:
        """See the base."""
        return self.logprobs


class TemplateKwargs(Strict):
    """Variables of the chat template."""

    enable_thinking: bool | None = None


class Chat(Common):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: TemplateKwargs | None = None

    def check(self) -> None:
        """See the base."""
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid(
                f"top_logprobs: wants logprobs to be true, got {shown(self.logprobs)}",
                "top_logprobs",
            )
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise invalid(
                f"max_completion_tokens: is another name of max_tokens, got {new} and {old}",
                "max_completion_tokens",
            )

    @property
    def most_tokens(self) -> int | None:
        """See the base."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def alternatives(self) -> int | None:
        """See the base."""
        return (self.top_logprobs or 0) if self.logprobs else None


Body = TypeVar("Body", bound=Common)


def parse(kind: type[Body], data: bytes) -> Body:
    """The body of a request. Raises Problem, with the field that is wrong."""
    try:
        given = parse_json(data)
    except ReadingError as error:
        raise invalid(
            f"the body is {error}" if "not JSON" in str(error) else str(error), None
        ) from error
    if not isinstance(given, dict):
        raise invalid("the body must be a JSON object", None)
    kept = {name: value for name, value in given.items() if name not in IGNORED}
    for name, neutral in UNSUPPORTED.items():
        value = kept.pop(name, None)
        if value is not None and not any(
            value == item and type(value) is type(item) for item in neutral
        ):
            raise invalid(
                f"{name}: not supported, got {shown(value)}", name, "unsupported_parameter"
            )
    try:
        body = kind.model_validate(kept)
    except ValidationError as error:
        raise _invalid(error) from error
    body.check()
    return body


def _invalid(error: ValidationError) -> Exception:
    """The first fault, as one line."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        name = ".".join(place)
        return invalid(f"{name}: there is no such field", name, "unknown_parameter")
    inner = ".".join(place[:2])
    name = inner if inner in NESTED else place[0] if place else "body"
    given = "" if first["type"] == "missing" else f", got {shown(first['input'])}"
    return invalid(f"{name}: {first['msg']}{given}", name)
