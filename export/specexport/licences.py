"""The licence of a checkpoint, as its own model card or GGUF header says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport import gguf_header
from specrun.reading import ReadingError, read_text

CARD = "README.md"
MAX_CARD_BYTES = 4 << 20
MAX_TEXT = 500  # characters of a name or link


@dataclass(frozen=True)
class Licence:
    """As the model hub has it. ``id``: apache-2.0, gemma other; ``name``, ``link``: of others."""

    id: str
    name: str | None = None
    link: str | None = None

    def __str__(self) -> str:
        told = [self.name or self.id, self.link]
        return ", ".join(part for part in told if part)


def find(path: Path) -> Licence | None:
    """The licence of the checkpoint at ``path`` (folder or GGUF file), None where it says nothing.

    A card that cannot be read says nothing: nobody needs one to export.
    """
    if path.is_file():
        header = gguf_header.read(path).metadata
        return _licence({key: header.get(f"general.{key}") for key in _GGUF}, _GGUF)
    try:
        card = read_text(path / CARD, MAX_CARD_BYTES, inside=path)
    except (ReadingError, OSError):
        return None
    return _licence(_metadata(card), _HUB)


_HUB = ("license", "license_name", "license_link")
_GGUF = ("license", "license.name", "license.link")


def _metadata(card: str) -> Mapping[str, Any]:
    """What stands at the top of a card for the hub; nothing where that is no YAML."""
    from huggingface_hub import ModelCard

    try:
        data: Any = ModelCard(card, ignore_metadata_errors=True).data
        return dict(data.to_dict())
    except Exception:  # of its YAML library, or of ours: whatever stands there may be anything
        return {}


def _licence(said: Mapping[str, Any], keys: tuple[str, str, str]) -> Licence | None:
    given, name, link = (_text(said.get(key)) for key in keys)
    return None if given is None else Licence(given, name, link)


def _text(value: object) -> str | None:
    """A word or line of it; None for anything else."""
    if not isinstance(value, str) or not 0 < len(value.strip()) <= MAX_TEXT:
        return None
    return value.strip() if value.strip().isprintable() else None
