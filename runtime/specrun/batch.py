"""Several texts at once: every one in rounds of its own, all of them in step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from specrun.loop import Block
from specrun.result import Result
from specrun.target import Rows, Verifier

Verify = Callable[[Mapping[int, Block]], dict[int, Rows]]


@dataclass
class Row:
    """One text of a batch: its generation and the target that holds its KV."""

    steps: Generator[str | Block, Rows | None, Result]
    target: Verifier


def together(rows: Sequence[Row], verify: Verify | None = None) -> list[Result]:
    """Run all to their ends, round by round; rows that have ended are left out.

    ``verify``: answers the blocks of the rows that go on, by index (None: each by its own target).
    """
    verify = verify or _one_by_one(rows)
    results: dict[int, Result] = {}
    answers: dict[int, Rows] = {}
    try:
        while len(results) < len(rows):
            blocks: dict[int, Block] = {}
            for index, row in enumerate(rows):
                if index in results:
                    continue
                step = _advance(row.steps, answers.get(index))
                if isinstance(step, Result):
                    results[index] = step
                else:
                    blocks[index] = step
            answers = verify(blocks)
    finally:
        for row in rows:
            row.steps.close()
    return [results[index] for index in range(len(rows))]


def _advance(
    steps: Generator[str | Block, Rows | None, Result], answer: Rows | None
) -> Block | Result:
    """The next block, or the result. Pieces of text are in the result."""
    try:
        step = steps.send(answer)
        while not isinstance(step, Block):
            step = next(steps)
        return step
    except StopIteration as stop:
        result: Result = stop.value
        return result


def _one_by_one(rows: Sequence[Row]) -> Verify:
    def verify(blocks: Mapping[int, Block]) -> dict[int, Rows]:
        return {index: block.verify(rows[index].target) for index, block in blocks.items()}

    return verify
