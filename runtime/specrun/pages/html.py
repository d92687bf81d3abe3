"""A page as one file: style and script inside, no network, nothing in it that a text could inject.

Standard library only.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

Rows = Sequence[Sequence[str]]


def escape(text: object) -> str:
    """``text`` for HTML, also inside quotes; NUL, which HTML cannot hold, as U+FFFD."""
    return html.escape(str(text)).replace("\0", "\ufffd")


def tag(name: str, content: str, **attributes: object) -> str:
    """An element around ``content``, which is HTML. ``class_`` is class, ``a_b`` is a-b; None: no
    such attribute."""
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return f"<{name}{''.join(parts)}>{content}</{name}>"


def document(
    title: str, body: str, *, description: str, script: str | None = None, data: object = None
) -> str:
    """The whole page. ``script``: name of a file beside this one; ``data``: JSON for it.

    The browser is told to load nothing and to run no script and no style but these two, by their
    hashes.
    """
    style = _file("page.css")
    code = _file(script) if script else ""
    allowed = policy([style], [code] if code else [])
    head = "\n".join(
        (
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(allowed)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            f'<meta name="description" content="{escape(description)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
        )
    )
    end = ""
    if code:
        end = f'<script type="application/json" id="data">{json_text(data)}</script>\n'
        end += f"<script>{code}</script>\n"
    whole = f'<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n{end}</body>\n</html>'
    return f"<!DOCTYPE html>\n{whole}\n"


def policy(styles: Iterable[str], scripts: Iterable[str], *others: str) -> str:
    """A content security policy that lets in these styles and scripts, by their hashes, and
    nothing else but what ``others`` say."""
    rules = (
        "default-src 'none'",
        f"script-src {_hashes(scripts)}",
        f"style-src {_hashes(styles)}",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join((*rules, *others))


def json_text(data: object) -> str:
    """JSON that stands in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def table(heads: Sequence[str], rows: Rows, caption: str) -> str:
    """A table with a head for every column; the first cell of a row is its head."""
    top = "".join(tag("th", escape(head), scope="col") for head in heads)
    body = "".join(tag("tr", _cells(row)) for row in rows)
    inner = (
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    )
    # It scrolls by itself where it is too wide, with the keyboard too.
    scrolls = {"class_": "wide", "tabindex": 0, "role": "group", "aria_label": caption}
    return tag("div", tag("table", inner), **scrolls)


def _cells(row: Sequence[str]) -> str:
    first, *others = row
    cells = "".join(tag("td", escape(cell)) for cell in others)
    return tag("th", escape(first), scope="row") + cells


def definitions(items: Mapping[str, object]) -> str:
    """Names and values; what is None is left out."""
    pairs = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in items.items()
        if value is not None
    )
    return f'<dl class="facts">{"".join(pairs)}</dl>'


def tiles(items: Iterable[tuple[str, str]]) -> str:
    """A few figures, large."""
    inner = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in items
    )
    return f'<dl class="tiles">{inner}</dl>'


def figure(title: str, svg: str, text: str, heads: Sequence[str], rows: Rows) -> str:
    """A chart, what it says in words, and its numbers as a table."""
    numbers = tag("details", f"<summary>Numbers</summary>{table(heads, rows, title)}")
    caption = tag("figcaption", f"<h3>{escape(title)}</h3><p>{escape(text)}</p>")
    return tag("figure", caption + svg + numbers)


def section(title: str, *content: str, id_: str) -> str:
    """A part of the page with its heading."""
    head = tag("h2", escape(title), id=f"{id_}-head")
    return tag("section", head + "\n" + "\n".join(content), id=id_, aria_labelledby=f"{id_}-head")


def plain_values(values: Mapping[str, Any]) -> dict[str, object]:
    """Options as they are shown: those that are set."""
    found: dict[str, object] = {}
    for name, value in values.items():
        if value is None or value == [] or value == {}:
            continue
        if isinstance(value, bool):
            found[name] = "yes" if value else "no"
        elif isinstance(value, str):
            found[name] = value
        else:
            found[name] = json.dumps(value, ensure_ascii=False)
    return found


def _file(name: str) -> str:
    return resources.files("specrun.pages").joinpath(name).read_text(encoding="utf-8")


def _hashes(texts: Iterable[str]) -> str:
    digests = (hashlib.sha256(text.encode("utf-8")).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests) or "'none'"
