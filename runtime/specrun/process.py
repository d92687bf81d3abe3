"""What belongs to the process that made it."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Iterator
from typing import Any, NoReturn, Self

from specrun.errors import UsageError


class NotCopied:
    """Base of what is neither copied nor pickled: it holds threads, buffers or a text at work."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise UsageError(
            f"{name}: cannot be copied or pickled",
            hint="use the one there is; another process loads the folder for itself",
        )


class Closing(NotCopied, abc.ABC):
    """Base of what is closed at the end of a ``with``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Turn:
    """Whoever comes while another one has it is refused; nobody waits, so nothing can deadlock."""

    def __init__(self) -> None:
        self._holder: dict[None, object] = {}

    @contextlib.contextmanager
    def held(self, message: str, hint: str) -> Iterator[None]:
        """Have it meanwhile. Raises UsageError when somebody has it already."""
        me = object()
        try:
            # One atomic step that says whose turn it is: with a lock, Ctrl-C between taking it and
            # knowing that would leave it taken.
            if self._holder.setdefault(None, me) is not me:
                raise UsageError(message, hint=hint)
            yield
        finally:
            if self._holder.get(None) is me:
                del self._holder[None]


def check_process(made_in: int) -> None:
    """Raise UsageError in another process than ``made_in``, which is a fork of it."""
    here = os.getpid()
    if here != made_in:
        raise UsageError(
            f"the engine was loaded in process {made_in} and this is {here}, a fork of it,"
            " where its threads are not",
            hint="call specrun.load() in the child, after the fork",
        )
