"""Several texts at once: a piece of each in turn."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specrun.result import Result


def in_turn(rows: Sequence[Generator[str, None, Result]]) -> list[Result]:
    """Run all generations to their ends; the results in the order of ``rows``.

    Pieces of text are in the results. When one raises, the others are closed.
    """
    results: dict[int, Result] = {}
    try:
        while len(results) < len(rows):
            for index, row in enumerate(rows):
                if index in results:
                    continue
                try:
                    next(row)
                except StopIteration as stop:
                    results[index] = stop.value
    finally:
        for row in rows:
            row.close()
    return [results[index] for index in range(len(rows))]
