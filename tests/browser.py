"""A Chromium without a window, for tests of pages; see the fixtures ``browser`` and ``page``.

Nothing is fetched: the browser is the machine's own, and does not call home.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import needs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
PHONE = (390, 844)  # pixels of CSS, as most phones have about
DESKTOP = (1280, 800)


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    """A browser, with a profile of its own that is gone afterwards."""
    executable = needs.chromium()
    sync_api = needs.playwright()
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(executable), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Browser, size: tuple[int, int] = DESKTOP, **context: object) -> Iterator[Page]:
    """A new page of ``size`` (width, height) that shares nothing with others.

    Afterwards no script of it has failed, and nothing was asked of another host than its own
    (``file:`` counts as one). ``context``: of playwright's ``new_context``.
    """
    width, height = size
    made = browser.new_context(viewport={"width": width, "height": height}, **context)  # type: ignore[arg-type]
    page = made.new_page()
    page.set_default_timeout(15_000)
    failures: list[str] = []
    asked: set[str] = set()
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("console", lambda line: failures.append(line.text) if refused(line.text) else None)
    page.on("request", lambda request: asked.add(origin(request.url)))
    try:
        yield page
        assert not failures, failures
        assert len(asked) <= 1, asked
    finally:
        made.close()


def refused(line: str) -> bool:
    """Whether the console says that the page's own policy forbade something."""
    return "Content Security Policy" in line


def origin(url: str) -> str:
    """Scheme and host of an address."""
    scheme, _, rest = url.partition(":")
    return scheme if not rest.startswith("//") else f"{scheme}://{rest[2:].partition('/')[0]}"


def screenshot(page: Page, path: Path) -> Path:
    """The whole page, as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(path), full_page=True)
    return path
