"""The results of a batch job as a file that appears when it is whole, and where a job goes on."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import specrun


class Job(NamedTuple):
    """``fingerprint``: of what the results follow from; ``seed``: of row 0."""

    fingerprint: str
    seed: int


class Results:
    """A job's results in the order of its rows, a line each.

    They stand in ``OUT.partial`` until all are there; ``OUT.job`` says which job that is. After an
    interruption the same job goes on behind the last whole line, with the seed it had; another one
    is refused. ``done``: lines so far; ``errors``: those of them with an error.
    """

    def __init__(
        self, out: Path, fingerprint: str, seed: int | None, *, overwrite: bool = False
    ) -> None:
        """``seed``: None for any. Raises UsageError where ``out`` or another job's rest is."""
        self.out = out
        self.partial = out.with_name(out.name + ".partial")
        self._note = out.with_name(out.name + ".job")
        self._file: BinaryIO | None = None
        if overwrite:
            self.partial.unlink(missing_ok=True)
        elif out.exists():
            raise specrun.UsageError(f"{out}: is there already", hint="give --overwrite")
        before = self._before()
        if before is not None and (
            before.fingerprint != fingerprint or seed not in (None, before.seed)
        ):
            raise specrun.UsageError(
                f"{self.partial}: was left by another job",
                hint="give --overwrite, or another file for the results",
            )
        self.job = before or Job(fingerprint, secrets.randbits(31) if seed is None else seed)
        self.done = self.errors = 0

    def __enter__(self) -> Self:
        self._note.write_text(json.dumps(self.job), encoding="utf-8")
        self._file = self.partial.open("a+b")
        self._file.seek(0)
        whole = 0
        for line in self._file:
            if line.endswith(b"\n"):
                whole += len(line)
                self._count(line)
        self._file.truncate(whole)  # a line that was cut when the job was killed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        assert self._file is not None
        with self._file:
            os.fsync(self._file.fileno())
        if kind is None:
            self.partial.replace(self.out)
            self._note.unlink()

    def add(self, line: bytes) -> None:
        """The result of the next row, with the end of its line."""
        assert self._file is not None, "in a with statement"
        self._file.write(line)
        self._file.flush()
        self._count(line)

    def _count(self, line: bytes) -> None:
        self.done += 1
        self.errors += "error" in json.loads(line)

    def _before(self) -> Job | None:
        """The job whose lines are there, None for no lines."""
        if not self.partial.exists():
            return None
        if not self._note.exists():
            raise specrun.UsageError(
                f"{self.partial}: is there without {self._note.name}, which says what it is",
                hint="give --overwrite, or remove it",
            )
        return Job(*json.loads(self._note.read_text(encoding="utf-8")))
