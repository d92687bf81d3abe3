"""Speculative decoding over exported engines: draft, verify, roll back, without PyTorch.

    import specrun

    engine = specrun.load("engines/")
    print(engine.generate("Write a joke about RAM").text)

Names are loaded when they are first used, so ``import specrun`` loads no numpy and no runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrun.cancel import CancelToken
    from specrun.conversation import Chat, ChatStream, Reply
    from specrun.drafters.base import Drafter
    from specrun.engine import Engine, load
    from specrun.errors import (
        ContextFull,
        DeviceError,
        EngineError,
        FolderError,
        SpecrunError,
        UsageError,
    )
    from specrun.loop import Round
    from specrun.options import EngineOptions, GenerateOptions
    from specrun.response import Piece, ResponseReader
    from specrun.result import Result
    from specrun.session import Session
    from specrun.stats import Stats
    from specrun.stream import TextStream

__version__ = "0.1.0"

__all__ = [
    "CancelToken",
    "Chat",
    "ChatStream",
    "ContextFull",
    "DeviceError",
    "Drafter",
    "Engine",
    "EngineError",
    "EngineOptions",
    "FolderError",
    "GenerateOptions",
    "Piece",
    "Reply",
    "ResponseReader",
    "Result",
    "Round",
    "Session",
    "SpecrunError",
    "Stats",
    "TextStream",
    "UsageError",
    "__version__",
    "load",
]

_MODULES = {
    "CancelToken": "cancel",
    "Chat": "conversation",
    "ChatStream": "conversation",
    "ContextFull": "errors",
    "DeviceError": "errors",
    "Drafter": "drafters.base",
    "Engine": "engine",
    "EngineError": "errors",
    "EngineOptions": "options",
    "FolderError": "errors",
    "GenerateOptions": "options",
    "Piece": "response",
    "Reply": "conversation",
    "ResponseReader": "response",
    "Result": "result",
    "Round": "loop",
    "Session": "session",
    "SpecrunError": "errors",
    "Stats": "stats",
    "TextStream": "stream",
    "UsageError": "errors",
    "load": "engine",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
