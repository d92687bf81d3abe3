"""What TensorRT says while it parses and builds, and which of it is a failure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from specexport.trt.bindings import trt

# Without a GPU every failed check has a line about the driver behind it, which explains nothing.
NO_GPU = re.compile(r"\[checkMacros\.cpp::catchCudaError.*|.*\bcudaError \d+.*|.*CUDA error 35.*")
SOURCE = re.compile(r"\s*In \S+ at /_?src/[^\s)]+\)?")
# Warnings of a graph that is taken and then computed otherwise than it says.
FATAL_WARNINGS = ("Unused Input", "was clamped", "out of range", "was ignored", "not supported")
ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")
SHOWN = 3


@dataclass
class Messages:
    """All that was said, in order. ``errors``: what makes the build fail."""

    errors: list[str] = field(default_factory=list)
    infos: list[str] = field(default_factory=list)

    def add(self, text: str, *, error: bool, warning: bool) -> None:
        """Sort a message in; those about the missing driver are dropped."""
        text = cleaned(text)
        if not text:
            return
        fatal = error or (warning and any(part in text for part in FATAL_WARNINGS))
        (self.errors if fatal else self.infos).append(text)

    @property
    def activation_bytes(self) -> int | None:
        """Device memory of a run's intermediate values; the largest that was told."""
        found = [ACTIVATIONS.search(text) for text in self.infos]
        return max((int(match[1]) for match in found if match), default=None)

    def told(self) -> str:
        """The first errors, for a message."""
        first = dict.fromkeys(self.errors)
        return "; ".join(list(first)[:SHOWN]) or "it did not say why"


def cleaned(text: str) -> str:
    """A message without the driver's lines and without places in TensorRT's own source."""
    lines = [SOURCE.sub("", NO_GPU.sub("", line)).strip() for line in text.splitlines()]
    return ": ".join(filter(None, lines))


def logger(messages: Messages) -> trt.ILogger:
    """A logger that puts everything into ``messages`` and writes nowhere."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # untyped where TensorRT is not installed
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # its C++ half is made here, and super() is not enough

        def log(self, severity: trt.ILogger.Severity, text: str) -> None:
            if severity != trt.ILogger.Severity.VERBOSE:
                worst = trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR
                warning = severity == trt.ILogger.Severity.WARNING
                messages.add(text, error=severity in worst, warning=warning)

    return Logger()
