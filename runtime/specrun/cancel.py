"""Ending a generation before its text ends: on request, or when its time is up."""

from __future__ import annotations

import time
from typing import Literal

from specrun.process import NotCopied

EarlyReason = Literal["cancelled", "timeout"]


class CancelToken(NotCopied):
    """Given to a generation as ``cancel=token``; ``token.cancel()`` ends it within a round.

    From any thread, also from a signal handler or a callback of the generation itself. A token
    stays cancelled, and one token may be given to several generations.
    """

    # A plain attribute: setting it is atomic, and takes no lock that a signal handler could find
    # held by the thread that it interrupted.
    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        """End what runs with this token, and what will be started with it."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._cancelled


class EndedEarly(BaseException):
    """Raised by ``EarlyEnd.check`` and caught by the generation; nobody else sees it.

    No Exception, so that nothing that goes on after errors takes it for one.
    """

    def __init__(self, reason: EarlyReason) -> None:
        super().__init__(reason)
        self.reason: EarlyReason = reason


class EarlyEnd:
    """Says when to end: ``cancel``, or ``timeout`` seconds after the first ``start``."""

    def __init__(self, cancel: CancelToken | None, timeout: float | None) -> None:
        self._cancel = cancel
        self._timeout = timeout
        self._deadline: float | None = None

    def start(self) -> None:
        """The time runs from now on, unless it does already (another row of a batch began)."""
        if self._timeout is not None and self._deadline is None:
            self._deadline = time.monotonic() + self._timeout

    def check(self) -> None:
        """Raise EndedEarly when it is time to end."""
        if self._cancel is not None and self._cancel.cancelled:
            raise EndedEarly("cancelled")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise EndedEarly("timeout")
