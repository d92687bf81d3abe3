"""The chat page: one file, nothing from elsewhere, and a policy that lets nothing else in."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse

from specrun.pages.html import policy
from specrun.serve.replies import Served
from specrun.serve.settings import ServeOptions

LONGEST = 512  # tokens of an answer, where neither the server nor the checkpoint wants fewer
FILE = Path(__file__).parent / "page.html"


class Page:
    """``page.html`` with what it has to know of the server."""

    def __init__(self, served: Served, settings: ServeOptions) -> None:
        given = html.escape(json.dumps(_config(served, settings)), quote=True)
        self._text = FILE.read_text(encoding="utf-8").replace("{{config}}", given)
        self._headers = {
            "Content-Security-Policy": _policy(self._text),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    def response(self) -> HTMLResponse:
        """The page."""
        return HTMLResponse(self._text, headers=self._headers)


def _config(served: Served, settings: ServeOptions) -> dict[str, Any]:
    engine = served.engine
    response = engine.manifest.tokenizer.response
    return {
        "model": served.model,
        "methods": ["auto", *engine.manifest.drafters, "prompt-lookup", "plain"],
        "chat": engine.chat_template is not None,
        "thinking": response is not None and response.thinking is not None,
        "key": settings.api_key is not None,
        "longest": _longest(served, settings),
    }


def _longest(served: Served, settings: ServeOptions) -> int:
    """What the page asks for by itself: one answer must not fill the context, as each question
    goes with the whole conversation."""
    if settings.max_new_tokens is not None:
        return settings.max_new_tokens
    own: int = served.engine.manifest.generation.defaults.get("max_new_tokens", LONGEST)
    return min(LONGEST, own)


def _policy(text: str) -> str:
    """Only the page's own script and style, by their hashes, and requests to its own server."""
    styles, scripts = (
        re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S) for tag in ("style", "script")
    )
    return policy(styles, scripts, "connect-src 'self'", "img-src data:", "frame-ancestors 'none'")
