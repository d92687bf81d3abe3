"""How a checkpoint marks the parts of its answers, for the manifest. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

MAX_MARKS = 16  # spellings of a start or an end
MAX_MARK = 200  # characters of one

Channel = Literal["thinking", "content", "tool_calls"]
CHANNELS: tuple[Channel, ...] = get_args(Channel)


@dataclass(frozen=True)
class Region:
    """A part of an answer: from one of ``starts`` to the first of ``ends`` behind it, or to the end
    of the text. Special tokens stand in both as they are spelled ("<|channel>thought\\n")."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.starts:
            raise ValueError("starts must hold a text, got none")
        for name, marks in (("starts", self.starts), ("ends", self.ends)):
            if len(marks) > MAX_MARKS:
                raise ValueError(f"{name} must be at most {MAX_MARKS} texts, got {len(marks)}")
            for mark in marks:
                if not mark.strip() or len(mark) > MAX_MARK:
                    raise ValueError(
                        f"{name} must be texts of 1 to {MAX_MARK} characters that are not all"
                        f" blank, got {mark[:60]!r}"
                    )


@dataclass(frozen=True)
class ResponseFormat:
    """The parts of an answer that are marked.

    ``content``: None where everything outside of the others is the answer, as most have it; else
    what stands outside of all three belongs to none.
    """

    thinking: Region | None = None
    tool_calls: Region | None = None
    content: Region | None = None

    def regions(self) -> dict[Channel, Region]:
        """Those that are marked."""
        found: dict[Channel, Region | None] = {
            "thinking": self.thinking,
            "tool_calls": self.tool_calls,
            "content": self.content,
        }
        return {channel: region for channel, region in found.items() if region is not None}
