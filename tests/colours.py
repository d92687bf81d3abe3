"""Colours as people see them: contrast, and how far apart two of them are."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip

JUST_SEEN = 2.3  # of ``distance``
Colour = tuple[float, ...]  # linear RGB, 0 to 1


def of_hex(code: str) -> Colour:
    """``00ff7f`` as linear RGB."""
    return _linear([int(code[at : at + 2], 16) for at in (0, 2, 4)])


def of_style(text: str) -> Colour:
    """``rgb(0, 255, 127)``, as a browser has it, as linear RGB."""
    return _linear([int(digits) for digits in re.findall(r"\d+", text)[:3]])


def _linear(values: Sequence[int]) -> Colour:
    shares = (value / 255 for value in values)
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in shares)


def as_style(colour: Colour) -> str:
    """The inverse of ``of_style``."""
    back = (v * 12.92 if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in colour)
    return f"rgb({', '.join(str(round(v * 255)) for v in back)})"


def seen(colour: Colour, kind: str) -> Colour:
    """As people see it with one of ``BLINDNESS``."""
    rows = BLINDNESS[kind]
    return tuple(
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, colour, strict=True)))) for row in rows
    )


def contrast(one: Colour, other: Colour) -> float:
    """WCAG 2: 1 to 21."""
    high, low = sorted(
        (
            sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), c, strict=True))
            for c in (one, other)
        ),
        reverse=True,
    )
    return (high + 0.05) / (low + 0.05)


def distance(one: Colour, other: Colour) -> float:
    """CIE 1976, see ``JUST_SEEN``."""
    return math.dist(_lab(one), _lab(other))


def _lab(colour: Colour) -> Colour:
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    f = [
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (
            sum(a * b for a, b in zip(row, colour, strict=True)) / w
            for row, w in zip(rows, white, strict=True)
        )
    ]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])
