"""What a worker and the driver say to each other: one JSON object per line. Standard library only.

A worker loads its model once, writes ``{"ready": true, "versions": {...}}``, then answers every
request with a reply until its standard input ends. Reply times are taken around the peer's own
call, token ids in, token ids out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Request:
    """A text to continue: greedy, end ids ignored. Lengths in tokens.

    ``drafts``: drafted per round by prompt lookup, 0 for plain decoding. ``ngram``: the longest
    n-gram it searches for. ``schedule``: of the draft length, for engines of ours.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    drafts: int = 0
    ngram: int = 2
    schedule: str = "constant"


@dataclass(frozen=True)
class Reply:
    """New tokens, seconds until the first of them (None: cannot be told) and for all of them."""

    tokens: list[int]
    first: float | None
    total: float


Generate = Callable[[Request], Reply]
Load = Callable[[dict[str, Any]], Generate]


class Clock:
    """Seconds since it was made, and when the first token came."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.first: float | None = None

    def mark_first(self) -> None:
        if self.first is None:
            self.first = self.elapsed()

    def elapsed(self) -> float:
        return time.perf_counter() - self._start


def serve(load: Load, packages: tuple[str, ...]) -> None:
    """Load what ``argv[1]`` describes and answer until the driver closes the pipe.

    A request that fails is answered with its error; one that fails to load ends the process with
    a traceback on stderr. ``packages``: whose versions are reported.
    """
    # Libraries print to file descriptor 1; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    generate = load(json.loads(sys.argv[1]))
    versions = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    _say(answers, {"ready": True, "versions": versions})
    for line in sys.stdin:
        try:
            reply = generate(Request(**json.loads(line)))
            tokens = [int(token) for token in reply.tokens]
            _say(answers, {"tokens": tokens, "first": reply.first, "total": reply.total})
        except Exception as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


def _say(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
