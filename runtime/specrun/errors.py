"""Every error that specrun raises on purpose.

    SpecrunError
    ├── UsageError            a request that cannot be meant: bad option, empty prompt (CLI exit 2)
    ├── FolderError           the engine folder: missing, changed or unknown file, field or version
    ├── EngineError           an engine does not load or a run of it fails
    │   └── DeviceError       the device that was asked for is not there
    ├── ContextFull           the request does not fit into the context of the engine
    └── QueueFull             more requests wait already than a pool lets wait

Each error carries the thing and the value in its message, and the way out in ``hint``.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class SpecrunError(Exception):
    """Base of all errors raised on purpose; ``hint`` says what to do about it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(SpecrunError, ValueError):
    """A request that cannot be meant."""


class FolderError(SpecrunError):
    """The engine folder cannot be used as it is."""


class EngineError(SpecrunError):
    """An engine does not load, or a run of it fails."""


class DeviceError(EngineError):
    """The device that was asked for is not there; nothing runs on another one instead."""


class ContextFull(SpecrunError):
    """The tokens do not fit into the context of the engine."""


class QueueFull(SpecrunError):
    """More requests wait already than the pool lets wait. ``retry_after``: seconds, a guess."""

    def __init__(self, message: str, *, hint: str | None = None, retry_after: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


def install(extra: str) -> str:
    """The hint where a package of an ``extra`` is missing."""
    return f"pip install 'specrun[{extra}]', or '.[{extra}]' in a checkout"


def without_frames(error: E) -> E:
    """``error`` to be kept: its frames, and those of what it came from, would keep engines."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
