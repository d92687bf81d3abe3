"""The routes: OpenAI's, health, metrics and the chat page."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from specrun import __version__
from specrun.pool import Pool
from specrun.serve.bodies import Body, Chat, Completion, parse
from specrun.serve.gate import Gate, read_body
from specrun.serve.metrics import Metrics
from specrun.serve.page import Page
from specrun.serve.problems import NO_RETRY, Problem, of
from specrun.serve.replies import ChatReply, CompletionReply, Reply, Served
from specrun.serve.runs import Desk, Run, while_connected
from specrun.serve.settings import ServeOptions

log = logging.getLogger("specrun.serve")

KNOWN = ("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")


class Streamed(Response):
    """Server-sent events of a reply that has begun. An error in the middle is an event, too."""

    def __init__(self, reply: Reply, run: Run) -> None:
        super().__init__(media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-store"
        self.headers["X-Accel-Buffering"] = "no"  # a proxy passes it on as it comes
        del self.headers["content-length"]
        self._reply = reply
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            async with while_connected(receive, self._run.cancel):
                await send(start)
                async for data in self._events():
                    body = f"data: {data}\n\n".encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._run.cancel()

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for chunk in self._reply.chunks():
                yield dump(chunk)
        except Problem as problem:
            yield dump(problem.body())
        yield "[DONE]"


def dump(value: Any) -> str:
    """As JSON in one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def make(
    served: Served, settings: ServeOptions, pool: Pool, desk: Desk, metrics: Metrics
) -> ASGIApp:
    """The app over a pool and what makes requests for it."""
    # Nothing of FastAPI's own pages, which load scripts from elsewhere.
    app = FastAPI(title="specrun", version=__version__, docs_url=None, redoc_url=None)
    model = {
        "id": served.model,
        "object": "model",
        "created": 0,
        "owned_by": "specrun",
        "max_context": served.engine.max_context,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name)
        return model

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, Completion, CompletionReply)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, Chat, ChatReply)

    @app.get("/health")
    async def health() -> JSONResponse:
        state = {"status": "ok" if pool.alive else "closing", "model": served.model}
        counts = {"running": pool.running, "waiting": pool.waiting}
        return JSONResponse({**state, **counts}, 200 if pool.alive else 503)

    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type=metrics.content_type)

    if settings.page:
        page = Page(served, settings)

        @app.get("/")
        async def index() -> Response:
            return page.response()

    async def answer(request: Request, kind: type[Body], reply_kind: type[Reply]) -> Response:
        body = parse(kind, await read_body(request, settings.max_body_bytes))
        check_model(body.model)
        try:
            run = await desk.begin(body)
        except Exception as error:
            raise told(error, reply_kind) from error
        reply = reply_kind(served, body, run)
        try:
            async with while_connected(request.receive, run.cancel):
                reply.check_first(await run.first())
                if not body.stream:
                    return JSONResponse(await reply.whole())
        except BaseException as error:
            run.cancel()
            if isinstance(error, Problem) and error.status == 500:
                log.error("a request failed", exc_info=error.__cause__)
            raise
        return Streamed(reply, run)

    def told(error: Exception, kind: type[Reply]) -> Problem:
        if not pool.alive:
            return Problem(503, "the server is shutting down", code="shutting_down")
        problem = of(error, prompt=kind.prompt_field)
        if problem.status == 500:
            log.error("a request failed", exc_info=error)
        return problem

    def check_model(name: str | None) -> None:
        if name is not None and name != served.model:
            raise Problem(
                404,
                f"there is no model {name[:200]!r} here, only {served.model!r}",
                code="model_not_found",
                param="model",
            )

    @app.exception_handler(Problem)
    async def on_problem(_: Request, problem: Problem) -> Response:
        return problem.response()

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path}"
        message = {404: f"there is no {what} here", 405: f"{what}: not with this method"}
        text = message.get(error.status_code, str(error.detail))
        return Problem(
            error.status_code, text, code="unknown_url", headers=error.headers
        ).response()

    @app.exception_handler(Exception)
    async def on_fault(_: Request, error: Exception) -> Response:
        return Problem(
            500,
            "internal error; the server's log says more",
            code="internal_error",
            headers=NO_RETRY,
        ).response()

    def count(path: str, status: int) -> None:
        known = path if path in KNOWN else "other"
        metrics.responses.labels(known, str(status)).inc()

    gate: ASGIApp = Gate(app, settings, count)
    if settings.cors_origins:
        gate = CORSMiddleware(
            gate,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return gate
