"""A request at work in the pool, as the server's event loop sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.types import Receive

from specrun.errors import UsageError
from specrun.pool import Ask, Ended, Event, Pool, Ticket
from specrun.serve.asks import Asks, Wish
from specrun.serve.bodies import Common
from specrun.serve.metrics import Metrics
from specrun.serve.problems import of


class Run:
    """The rows of one request. Events come in the order in which the pool gives them."""

    def __init__(self, wishes: Sequence[Wish]) -> None:
        self.wishes = wishes
        self.prompts: list[list[int]] = []  # of every row
        self._tickets: list[Ticket] = []
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._left = 0
        self._first: tuple[int, Event] | None = None

    async def first(self) -> Event:
        """The first event, which ``events`` gives again."""
        if self._first is None:
            self._first = await self._events.get()
        return self._first[1]

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Events with the index of their row, until all rows have ended."""
        while self._left:
            if self._first is not None:
                (index, event), self._first = self._first, None
            else:
                index, event = await self._events.get()
            self._left -= isinstance(event, Ended)
            yield index, event

    def cancel(self) -> None:
        """End all rows; nothing where they have ended."""
        for ticket in self._tickets:
            ticket.cancel()

    def begin(self, pool: Pool, metrics: Metrics, count: int) -> None:
        """Give it to the pool, ``count`` answers to each wish. Raises QueueFull or UsageError."""
        loop = asyncio.get_running_loop()

        def listener(index: int) -> Callable[[Ticket, Event], None]:
            def heard(ticket: Ticket, event: Event) -> None:
                if isinstance(event, Ended):
                    metrics.end(ticket, event)
                else:
                    metrics.step(event)
                loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

            return heard

        wished = [(wish, request) for wish in self.wishes for request in wish.rows(count)]
        self.prompts = [wish.tokens for wish, _ in wished]
        asks = [
            Ask(wish.tokens, request, listener(index))
            for index, (wish, request) in enumerate(wished)
        ]
        self._tickets = pool.submit(asks)
        self._left = len(asks)


class Desk:
    """Takes requests in: makes prompts of them in a thread of its own, and rows in the pool."""

    def __init__(self, pool: Pool, asks: Asks, metrics: Metrics) -> None:
        self._pool = pool
        self._asks = asks
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, "specrun-encode")

    async def begin(self, body: Common) -> Run:
        """Raises Problem, UsageError, ContextFull or QueueFull."""
        try:
            self._pool.check_room(body.count)  # before any work
        except UsageError as error:
            raise of(error, prompt="n") from error
        loop = asyncio.get_running_loop()
        wishes = await loop.run_in_executor(self._thread, self._asks.wishes, body)
        run = Run(wishes)
        run.begin(self._pool, self._metrics, body.count)
        return run

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


@contextlib.asynccontextmanager
async def while_connected(receive: Receive, leave: Callable[[], None]) -> AsyncIterator[None]:
    """Call ``leave`` when the client goes away meanwhile."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    task: asyncio.Task[None] = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
