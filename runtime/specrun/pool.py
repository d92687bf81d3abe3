"""Many requests on one engine: those that came together run as rows in turn, the others wait."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrun.batch import Step
from specrun.cancel import CancelToken
from specrun.errors import QueueFull, UsageError
from specrun.options import DEFAULT_MAX_BATCH, DEFAULT_MAX_WAITING, at_least
from specrun.process import Closing, check_process
from specrun.request import Request
from specrun.result import Result

if TYPE_CHECKING:
    from specrun.engine import Engine


@dataclass(frozen=True)
class Ended:
    """The last event of a ticket. ``error``: what ended it; then ``result`` is what there was."""

    result: Result
    error: BaseException | None = None


Event = Step | Ended


@dataclass(frozen=True)
class Ask:
    """``tokens`` to continue as ``request`` says (of :meth:`specrun.Engine.request`).

    ``listener``: gets the ticket with every :class:`~specrun.batch.Step` and then one
    :class:`Ended`, in the thread of the pool, where everybody waits for it. What it raises ends the
    text.
    """

    tokens: Sequence[int]
    request: Request
    listener: Callable[[Ticket, Event], None]


class Ticket:
    """A request in a pool. Times are of :func:`time.monotonic`; None: not yet."""

    def __init__(self, pool: Pool, ask: Ask) -> None:
        self._pool = pool
        self._cancel = ask.request.cancel or CancelToken()
        request = dataclasses.replace(ask.request, cancel=self._cancel)
        self.row = pool._rows.add(ask.tokens, request)
        self._listener = ask.listener
        self.arrived = time.monotonic()
        self.started: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None

    def cancel(self) -> None:
        """End it, from any thread: at once while it waits, else within a round.

        The listener still gets its last event. Again, or after the end, it does nothing.
        """
        self._cancel.cancel()
        if self._pool._gives_up(self):
            self._skip()

    def _skip(self) -> None:
        """It leaves the queue without having run."""
        self.row.ended_early()
        self._end(Ended(self.row.partial))

    def _step(self) -> Ended | None:
        """Run a round. Returns the end, which the listener is to be told of, where it came."""
        if self.started is None:
            self.started = time.monotonic()
        try:
            step = self.row.step()
            if step is not None:
                if step.tokens and self.first_token is None:
                    self.first_token = time.monotonic()
                self._listener(self, step)
                if step.reason is None:
                    return None
                self.row.close()
        except BaseException as error:  # it is the request's, whatever it is: others go on
            self.row.close()
            return Ended(self.row.partial, error)
        return Ended(self.row.partial)

    def _end(self, ended: Ended) -> None:
        self.ended = time.monotonic()
        try:
            self._listener(self, ended)
        except Exception as raised:
            self._pool.listener_failure = raised  # nobody is left to be told


class Pool(Closing):
    """Requests on one engine, which has no other user as long as the pool is open.

    One thread runs all of them: up to ``max_batch`` at once, a round of each in turn; a prompt is
    read in one turn. Up to ``max_waiting`` more wait in the order in which they came. Each gives
    the tokens that it would give alone. KV buffers are used again, so that memory is that of
    ``max_batch`` texts of the longest length there was.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_batch: int = DEFAULT_MAX_BATCH,
        max_waiting: int = DEFAULT_MAX_WAITING,
    ) -> None:
        at_least("max_batch", max_batch, 1)
        at_least("max_waiting", max_waiting, 0)
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.listener_failure: Exception | None = None
        self._process = os.getpid()
        self._rows = engine.rows()
        # Guards the three below; the thread waits on it.
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._closing = False
        self._seconds_each = 1.0  # that a request runs for, about
        self._thread = threading.Thread(target=self._work, name="specrun-pool", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests at work."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._closing

    def submit(self, asks: Sequence[Ask]) -> list[Ticket]:
        """Take all of them or none. From any thread.

        Raises QueueFull, and UsageError when the pool is closing or cannot ever hold so many.
        """
        check_process(self._process)
        self.check_room(len(asks))
        tickets = [Ticket(self, ask) for ask in asks]
        with self._changed:
            self._check_room(len(asks))
            self._waiting.extend(tickets)
            self._changed.notify_all()
        return tickets

    def check_room(self, count: int = 1) -> None:
        """Raise as ``submit`` would, for ``count`` requests."""
        with self._changed:
            self._check_room(count)

    def stop_taking(self) -> None:
        """Refuse requests from now on; those that are there go on. From any thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """End what runs and what waits. From any thread."""
        with self._changed:
            tickets = [*self._waiting, *self._running]
        for ticket in tickets:
            ticket.cancel()

    def close(self) -> None:
        """Cancel everything, and free the engine. Raises UsageError in a listener."""
        if threading.current_thread() is self._thread:
            raise UsageError(
                "the pool cannot be closed by a listener, which it waits for",
                hint="close it in another thread",
            )
        self.stop_taking()
        self.cancel_all()
        self._thread.join()
        self._rows.close()

    def _check_room(self, count: int) -> None:
        if self._closing:
            raise UsageError("the pool is closed", hint="open another one")
        if count > self.max_batch + self.max_waiting:
            raise UsageError(
                f"{count} texts at once are more than the {self.max_batch} that run and the"
                f" {self.max_waiting} that wait",
                hint="ask for fewer in one request",
            )
        free = self.max_batch - len(self._running) + self.max_waiting
        if len(self._waiting) + count > free:
            ahead = len(self._waiting) / self.max_batch + 1
            raise QueueFull(
                f"{len(self._running)} requests run and {len(self._waiting)} wait, more are not"
                " taken",
                hint="try again later",
                retry_after=min(60, math.ceil(ahead * self._seconds_each)),
            )

    def _gives_up(self, ticket: Ticket) -> bool:
        """Whether it was waiting, and is not any more."""
        with self._changed:
            if ticket not in self._waiting:
                return False
            self._waiting.remove(ticket)
            return True

    def _work(self) -> None:
        while self._admit():
            for ticket in list(self._running):
                ended = ticket._step()
                if ended is None:
                    continue
                with self._changed:  # before anybody is told, who may come back at once
                    self._running.remove(ticket)
                ticket._end(ended)
                assert ticket.started is not None and ticket.ended is not None
                self._seconds_each += (ticket.ended - ticket.started - self._seconds_each) / 8

    def _admit(self) -> bool:
        """Let those run for which there is room, and wait where there is none. False at the end."""
        with self._changed:
            while not self._waiting and not self._running:
                if self._closing:
                    return False
                self._changed.wait()
            expired = [ticket for ticket in self._waiting if ticket.row.ended_early()]
            for ticket in expired:
                self._waiting.remove(ticket)
            while self._waiting and len(self._running) < self.max_batch:
                self._running.append(self._waiting.popleft())
        for ticket in expired:
            ticket._end(Ended(ticket.row.partial))
        return True
