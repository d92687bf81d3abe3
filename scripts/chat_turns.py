"""What each turn of a chat costs, beside a cold run over the same tokens.

    python scripts/chat_turns.py engines/ [--method METHOD] [--turns 10] [--words 40]

Every turn asks for about as many words. Prints, per turn, the tokens of the conversation, those
that the target read, the seconds to the first token, and those of a cold run with its ratio; the
exit status is 1 if an answer is another one than the cold run's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import specrun


class Turn(NamedTuple):
    """Tokens, and seconds to the first one."""

    prompt_tokens: int
    prefilled: int
    warm: float
    cold: float
    same: bool


def turns(engine: specrun.Engine, count: int, words: int, **options: Any) -> Iterator[Turn]:
    """A conversation of ``count`` turns of ``words`` words, measured."""
    with engine.chat(**options) as chat:
        for turn in range(count):
            question = " ".join([f"Tell me more about number {turn}."] + ["please"] * words)
            begin = time.perf_counter()
            with chat.stream(question) as stream:
                next(stream, None)
                warm = time.perf_counter() - begin
                for _ in stream:
                    pass
            result = stream.reply.result
            ids = chat.tokens[: len(chat.tokens) - len(result.tokens)]
            begin = time.perf_counter()
            with engine.stream(ids, options=result.options) as again:
                next(again, None)
                cold = time.perf_counter() - begin
                same = again.drain().tokens == result.tokens
            stats = result.stats
            yield Turn(stats.prompt_tokens, stats.prefilled, warm, cold, same)


def main(arguments: list[str] | None = None) -> int:
    """Print a row per turn; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--new", type=int, default=16, help="most tokens of an answer")
    parser.add_argument("--exact", action="store_true")
    given = parser.parse_args(arguments)
    right = True
    with specrun.load(given.folder, exact=given.exact) as engine:
        list(turns(engine, 1, given.words, method=given.method, max_new_tokens=2))  # warms up
        print("turn  tokens    read  first token ms  cold ms  warm/cold")
        options = {"method": given.method, "max_new_tokens": given.new}
        for index, turn in enumerate(turns(engine, given.turns, given.words, **options), start=1):
            print(
                f"{index:4}  {turn.prompt_tokens:6}  {turn.prefilled:6}  {turn.warm * 1e3:14.1f}"
                f"  {turn.cold * 1e3:7.1f}  {turn.warm / turn.cold:9.2f}"
                + ("" if turn.same else "  another answer than the cold run's")
            )
            right = right and turn.same
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
