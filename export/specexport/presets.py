"""Named pairs of a target and the assistant that was trained to draft for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BUNDLED = Path(__file__).parent / "bundled"


@dataclass(frozen=True)
class Preset:
    """A target with its drafter: hub ids, or folders that come with this package."""

    name: str
    target: str | Path
    drafter: str | Path
    about: str

    @property
    def bundled(self) -> bool:
        """True if the weights come with this package, so that nothing is downloaded."""
        return isinstance(self.target, Path)


def _published(name: str, size: str, about: str) -> Preset:
    target = f"google/gemma-4-{size}-it"
    return Preset(name, target, f"{target}-assistant", about)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _published("gemma4", "E2B", "Gemma 4 E2B, the smallest: laptops, boards, phones"),
        _published("gemma4-e2b", "E2B", "the same as gemma4"),
        _published("gemma4-e4b", "E4B", "Gemma 4 E4B"),
        _published("gemma4-12b", "12B", "Gemma 4 12B (unified)"),
        _published("gemma4-26b-a4b", "26B-A4B", "Gemma 4 26B A4B (experts)"),
        _published("gemma4-31b", "31B", "Gemma 4 31B"),
        Preset(
            "gemma4-tiny",
            BUNDLED / "gemma4-tiny" / "target",
            BUNDLED / "gemma4-tiny" / "assistant",
            "a few MB, comes with the package: to try the tools without a download",
        ),
    )
}


def find(name: str) -> Preset | None:
    """The preset of that name, or None."""
    return PRESETS.get(name)
