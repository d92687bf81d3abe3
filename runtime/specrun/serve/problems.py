"""Errors as OpenAI's clients know them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from specrun.errors import ContextFull, QueueFull, SpecrunError, UsageError
from specrun.reading import printable

MAX_MESSAGE = 2000  # characters: a message may show what the request held

# Fields of requests under the names of OpenAI, by those that our own messages begin with.
FIELDS = {
    "max_new_tokens": "max_tokens",
    "json_schema": "response_format",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
}


class Problem(Exception):
    """An answer that is an error. ``param``: the field of the request that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = printable(message)[:MAX_MESSAGE]
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """As an answer of its own."""
        return JSONResponse(self.body(), self.status, self.headers)


TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}

# What a client must not try again by itself: it would take as long once more.
NO_RETRY = {"x-should-retry": "false"}


def invalid(message: str, param: str | None, code: str | None = None) -> Problem:
    """A request that cannot be meant."""
    return Problem(400, message, param=param, code=code)


def timed_out(seconds: float) -> Problem:
    """The time was over before there was a token."""
    return Problem(408, f"not begun within {seconds:g} seconds", code="timeout", headers=NO_RETRY)


def shutting_down() -> Problem:
    """The server ends."""
    return Problem(503, "the server is shutting down", code="shutting_down")


def _hint(error: SpecrunError) -> str:
    """The ways out that a client has: those of a command line are none of a request."""
    clauses = (error.hint or "").split(", or ")
    if isinstance(error, UsageError):
        clauses = list(itertools.takewhile(lambda clause: "--" not in clause, clauses))
    return ", or ".join(clauses)


def of(error: BaseException, *, prompt: str) -> Problem:
    """What a client is told of ``error``. ``prompt``: the field that holds the prompt."""
    if isinstance(error, Problem):
        return error
    message = str(error)
    if isinstance(error, SpecrunError) and (hint := _hint(error)):
        message = f"{message} (hint: {hint})"
    if isinstance(error, QueueFull):
        seconds = {"Retry-After": str(error.retry_after)}
        return Problem(429, message, code="queue_full", headers=seconds)
    if isinstance(error, ContextFull):
        return invalid(message, prompt, "context_length_exceeded")
    if isinstance(error, UsageError):
        name, colon, _ = str(error).partition(":")
        named = name if colon and name.isidentifier() else None
        param = prompt if named in (None, "prompt", "system") else FIELDS.get(named, named)
        return invalid(message, param)
    if isinstance(error, SpecrunError):
        return Problem(500, message, code="engine_error")
    return Problem(500, "internal error; the server's log says more", code="internal_error")
