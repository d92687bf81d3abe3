"""Charts as SVG. Sizes are CSS pixels of a narrow page, so that letters stay readable there.

Colours are classes of ``page.css``; series differ in dashes and markers too. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrun.pages.html import escape

WIDTH, HEIGHT = 340, 200
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 14, 34
MARKERS = 6  # that differ


@dataclass(frozen=True)
class Bar:
    """``shown``: its value as a text; ``note``: what is said when the mouse rests on it."""

    label: str
    value: float
    shown: str
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A line through ``points``, by x."""

    name: str
    points: Sequence[tuple[float, float]]


def bars(items: Sequence[Bar], *, says: str, x_title: str, highest: float | None = None) -> str:
    """Upright bars. ``highest``: where the axis ends; ``says``: the chart in words."""
    top = highest or nice(max((item.value for item in items), default=0.0))
    width = (WIDTH - LEFT - RIGHT) / max(1, len(items))
    every = max(1, math.ceil(24 / width))  # labels that have room
    parts = [_y_axis(0, top)]
    for index, item in enumerate(items):
        x = LEFT + index * width
        y = _y(item.value, 0, top)
        note = escape(item.note or f"{item.label}: {item.shown}")
        parts.append(
            f'<rect class="bar" x="{x + width * 0.12:.1f}" y="{y:.1f}" width="{width * 0.76:.1f}"'
            f' height="{HEIGHT - BOTTOM - y:.1f}"><title>{note}</title></rect>'
        )
        if index % every == 0:
            middle = x + width / 2
            parts.append(_text(middle, HEIGHT - BOTTOM + 13, item.label))
            if width >= 24:
                parts.append(_text(middle, y - 4, item.shown))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_title, "axis"))
    return _svg("".join(parts), HEIGHT, says)


def rows(items: Sequence[Bar], *, says: str) -> str:
    """Bars from the left, each under its label."""
    top = max((item.value for item in items), default=0.0) or 1.0
    parts = []
    for index, item in enumerate(items):
        y = 4 + index * 36
        length = max(0.0, (WIDTH - 2) * item.value / top)
        note = escape(item.note or f"{item.label}: {item.shown}")
        parts.append(_text(0, y + 10, item.label, "", "start"))
        parts.append(_text(WIDTH - 2, y + 10, item.shown, "", "end"))
        parts.append(
            f'<rect class="track" x="0" y="{y + 15}" width="{WIDTH - 2}" height="12"/>'
            f'<rect class="bar" x="0" y="{y + 15}" width="{length:.1f}" height="12">'
            f"<title>{note}</title></rect>"
        )
    return _svg("".join(parts), 4 + 36 * max(1, len(items)), says)


def pairs(items: Sequence[tuple[str, float, float]], *, says: str) -> str:
    """Two bars for each label, before (an outline) and now (filled)."""
    top = max((max(old, new) for _, old, new in items), default=0.0) or 1.0
    scale = (WIDTH - 80) / top
    parts = []
    for index, (label, *values) in enumerate(items):
        y = 4 + index * 48
        parts.append(_text(0, y + 10, label, "", "start"))
        for place, (value, kind) in enumerate(zip(values, ("before", "bar"), strict=True)):
            at = y + 15 + 14 * place
            name = ("before", "now")[place]
            parts.append(
                f'<rect class="{kind}" x="1" y="{at}" width="{max(0.0, value * scale):.1f}"'
                f' height="11"><title>{escape(label)}, {name}: {number(value)}</title></rect>'
                f"{_text(value * scale + 6, at + 10, f'{number(value)} {name}', '', 'start')}"
            )
    return _svg("".join(parts), 4 + 48 * max(1, len(items)), says)


def lines(
    series: Sequence[Series],
    *,
    says: str,
    x_title: str,
    highest: float | None = None,
    level: float | None = None,
    ticks: Sequence[float] | None = None,
    markers: bool = True,
) -> str:
    """Lines over numbers. ``level``: a line across at this value; ``ticks``: marked values of x."""
    xs = [x for item in series for x, _ in item.points]
    ys = [y for item in series for _, y in item.points]
    top = highest or nice(max([*ys, level or 0.0], default=0.0))
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    if low == high:
        low, high = low - 1, high + 1
    inner = WIDTH - LEFT - RIGHT - 16

    def place(x: float) -> float:
        return LEFT + 8 + inner * (x - low) / (high - low)

    parts = [_y_axis(0, top)]
    between = (low, float(round((low + high) / 2)), high)
    for x in _apart(ticks or between, place):
        parts.append(_text(place(x), HEIGHT - BOTTOM + 13, number(x)))
    if level is not None:
        y = _y(level, 0, top)
        parts.append(f'<path class="level" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
    height = HEIGHT + 16 * len(series)
    for index, item in enumerate(series):
        parts.append(
            _line(item, index, [(place(x), _y(y, 0, top)) for x, y in item.points], markers)
        )
        y = HEIGHT + 16 * index + 8
        parts.append(f'<g class="s{index % MARKERS}"><path class="line" d="M4 {y}H32"/>')
        parts.append(_marker(index, 18, y) if markers else "")
        parts.append(f"</g>{_text(40, y + 4, item.name, '', 'start')}")
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_title, "axis"))
    return _svg("".join(parts), height, says)


def number(value: float) -> str:
    """A number as short as it can be read."""
    if value == round(value):
        return str(round(value))
    return f"{value:.3g}"


def nice(value: float) -> float:
    """The end of an axis that holds ``value``, whose half is short as well."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        step * power
        for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
        if step * power >= value * (1 - 1e-9)
    )


def _line(series: Series, index: int, points: Sequence[tuple[float, float]], markers: bool) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    parts = [f'<path class="line" d="M{path}"/>'] if points else []
    if markers:
        for (x, y), (at, value) in zip(points, series.points, strict=True):
            note = escape(f"{series.name}, {number(at)}: {number(value)}")
            parts.append(f"<g>{_marker(index, x, y)}<title>{note}</title></g>")
    return f'<g class="s{index % MARKERS}">{"".join(parts)}</g>'


def _marker(index: int, x: float, y: float) -> str:
    """Circle, square, triangle, diamond, triangle upside down, ring."""
    kind = index % MARKERS
    if kind in (0, 5):
        return f'<circle class="mark{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    shapes = {
        1: ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        2: ((0, -5), (5, 4), (-5, 4)),
        3: ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
        4: ((0, 5), (5, -4), (-5, -4)),
    }
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shapes[kind])
    return f'<polygon class="mark{kind}" points="{points}"/>'


def _apart(ticks: Sequence[float], place: Callable[[float], float]) -> list[float]:
    """Those of ``ticks`` whose labels do not touch."""
    found: list[float] = []
    for tick in ticks:
        if not found or place(tick) - place(found[-1]) >= 22:
            found.append(tick)
    return found


def _y_axis(low: float, high: float) -> str:
    parts = []
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        y = _y(value, low, high)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 5, y + 4, number(value), "", "end"))
    return "".join(parts)


def _y(value: float, low: float, high: float) -> float:
    share = min(1.0, max(0.0, (value - low) / (high - low)))
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _text(x: float, y: float, text: str, class_: str = "", anchor: str = "middle") -> str:
    kind = f' class="{class_}"' if class_ else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(content: str, height: int, says: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"'
        f' aria-label="{escape(says)}">{content}</svg>'
    )
