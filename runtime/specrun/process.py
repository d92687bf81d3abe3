"""What belongs to the process that made it."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from specrun.errors import UsageError


class NotCopied:
    """Base of what is neither copied nor pickled: it holds threads, buffers or a text at work."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise UsageError(
            f"{name}: cannot be copied or pickled",
            hint="use the one there is; another process loads the folder for itself",
        )


def check_process(made_in: int) -> None:
    """Raise UsageError in another process than ``made_in``, which is a fork of it."""
    here = os.getpid()
    if here != made_in:
        raise UsageError(
            f"the engine was loaded in process {made_in} and this is {here}, a fork of it,"
            " where its threads are not",
            hint="call specrun.load() in the child, after the fork",
        )
