"""A web service with a loop of its own: FastAPI, one engine, one thread that generates.

    pip install ".[serve]"
    python scripts/examples/fastapi_app.py engines/ --port 8000
    curl -N http://127.0.0.1:8000/story -H "Content-Type: application/json" \\
        -d '{"prompt": "Read Psalms 103.", "max_new_tokens": 64}'

A story comes as JSON lines, a piece of text each and the end last; with ``"stream": false`` it
comes as one object. Requests wait for their turn. When a client leaves, its generation ends within
a round. For OpenAI's interface, many at a time and metrics there is ``specrun serve``; this is what
to start from when the interface is your own.
"""

import argparse
import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

import specrun

T = TypeVar("T")
MOST_WAITING = 32


class Writer:
    """An engine and the thread that it generates in; ``ended`` counts how generations ended."""

    def __init__(self, folder: str, **options: Any) -> None:
        self._engine = specrun.load(folder, **options)
        self._thread = ThreadPoolExecutor(1)
        self.waiting = 0
        self.ended: Counter[str] = Counter()

    def close(self) -> None:
        """Wait for what is at work and free the engine."""
        self._thread.shutdown(cancel_futures=True)
        self._engine.close()

    async def events(self, prompt: str, **options: Any) -> AsyncGenerator[dict[str, Any]]:
        """Pieces of text, then the end. Closing it ends the generation. Raises SpecrunError."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        token = specrun.CancelToken()

        def put(item: dict[str, Any] | Exception) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        def generate() -> None:
            try:
                with self._engine.stream(prompt, cancel=token, **options) as stream:
                    for piece in stream:
                        put({"piece": piece})
                result = stream.result
                self.ended[result.finish_reason] += 1
                put({"end": result.finish_reason, "acceptance": result.stats.acceptance})
            except Exception as error:  # goes to whoever asked
                self.ended["error"] += 1
                put(error)

        self.waiting += 1
        try:
            self._thread.submit(generate)
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if "end" in item:
                    return
        finally:
            self.waiting -= 1
            token.cancel()


class Story(BaseModel):
    """What a client sends."""

    prompt: str
    max_new_tokens: int = 128
    stream: bool = True


def make_app(folder: str, **options: Any) -> FastAPI:
    """The service; the engine is open while it runs. ``options``: of :func:`specrun.load`."""
    writers: list[Writer] = []

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        writers.append(Writer(folder, **options))
        yield
        writers.pop().close()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"waiting": writers[0].waiting, "ended": writers[0].ended}

    @app.post("/story")
    async def story(asked: Story, request: Request) -> Any:
        writer = writers[0]
        if writer.waiting >= MOST_WAITING:
            raise HTTPException(429, "too many requests wait already")
        events = writer.events(asked.prompt, max_new_tokens=asked.max_new_tokens)
        try:
            # The first one before the answer begins: what is wrong still has a status of its own.
            first = await unless_left(request, anext(events))
            if asked.stream:
                return StreamingResponse(lines(first, events), media_type="application/x-ndjson")
            rest = await unless_left(request, collect(events))
        except (specrun.UsageError, specrun.ContextFull) as error:
            raise HTTPException(400, str(error)) from error
        end = [first, *rest]
        return {"text": "".join(event.get("piece", "") for event in end), **end[-1]}

    return app


async def lines(first: dict[str, Any], events: AsyncGenerator[dict[str, Any]]) -> Any:
    """Events as lines of JSON. The server ends this one when the client leaves."""
    async with contextlib.aclosing(events):
        yield json.dumps(first) + "\n"
        async for event in events:
            yield json.dumps(event) + "\n"


async def collect(events: AsyncGenerator[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that are left."""
    async with contextlib.aclosing(events):
        return [event async for event in events]


async def unless_left(request: Request, work: Awaitable[T]) -> T:
    """``work``, ended when the client leaves: nobody but a stream is told of that otherwise."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=0.1))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the client left")
        return task.result()
    finally:
        task.cancel()


def main() -> None:
    """Serve a folder on this machine."""
    import uvicorn

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    uvicorn.run(make_app(asked.folder), host="127.0.0.1", port=asked.port)


if __name__ == "__main__":
    main()
