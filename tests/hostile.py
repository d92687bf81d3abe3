"""Engine folders that somebody made to do harm, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import toys
from toys import Toy

import specrun
from specrun import FolderError


def write_folder(place: Path) -> Path:
    """A folder with a drafter and a chat template, to be changed."""
    return toys.write_folder(place / "engines", Toy(drafter=True, chat_template="{{ 1 }}"))


def refused(folder: Path, says: str) -> None:
    with pytest.raises(FolderError, match=says) as caught:
        specrun.load(folder)
    assert str(folder) in str(caught.value) and caught.value.hint
    assert len(str(caught.value)) < 1000


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Another content, and a manifest that says that it is the right one."""
    (folder / name).write_bytes(content)
    toys.agree(folder)
