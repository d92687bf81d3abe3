"""The driver's end of a worker process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.contestants import Contestant
from peers.environments import variables

START_TIMEOUT = 600.0  # seconds
REPLY_TIMEOUT = 600.0
TICKS = os.sysconf("SC_CLK_TCK")  # of processor time, per second


class WorkerError(RuntimeError):
    """A worker does not start, does not answer or has ended; the message says why."""


class Worker:
    """A contestant's process, loaded and idle until it is asked. Close it, or use ``with``."""

    def __init__(self, contestant: Contestant, threads: int) -> None:
        self.contestant = contestant
        self._buffer = b""
        self._talk = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [
                str(contestant.python),
                "-m",
                contestant.module,
                json.dumps(contestant.config),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._talk,
            env=variables(threads),
        )
        try:
            self.versions: dict[str, str] = self._read(START_TIMEOUT)["versions"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply; raises WorkerError where the request failed or the worker ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(self._how_it_ended()) from error
        reply = self._read(REPLY_TIMEOUT)
        if "error" in reply:
            raise WorkerError(str(reply["error"]))
        return reply

    def processor_seconds(self) -> float:
        """Processor time that the process has used, all threads together."""
        if not self.alive:
            return 0.0
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._talk.close()

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        until = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([self._process.stdout], [], [], left)
            if not ready:
                self._process.kill()
                raise WorkerError(f"no answer in {timeout:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise WorkerError(self._how_it_ended())
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        self._talk.seek(0)
        lines = [line for line in self._talk.read().decode(errors="replace").splitlines() if line]
        said = f": {lines[-1].strip()}" if lines else ""
        return f"ended with status {status}{said}"
