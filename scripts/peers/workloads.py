"""Models of the comparison, and what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOON = (
    "The Moon is Earth's only natural satellite. It orbits at an average distance of 384,400"
    " kilometres, about thirty times the diameter of Earth. Tidal forces between Earth and the Moon"
    " have synchronized the Moon's orbital period with its rotation period at 29.5 Earth days,"
    " causing the same side of the Moon to always face Earth. The Moon's gravitational pull, and to"
    " a lesser extent the Sun's, are the main drivers of Earth's tides."
)
HARBOUR = (
    "The harbour of the town was built in 1871 by the fishermen themselves, who carried every stone"
    " from the quarry behind the church. A storm in 1903 took the lighthouse and half of the outer"
    " wall. The lighthouse was built again of iron, painted red and white, and still stands. Today"
    " eleven boats go out, most of them for crab, and the old ice house is a museum that opens on"
    " Sundays. The mayor would like a ferry to the island, and the fishermen would not."
)
CODE = (
    "def area(width, height):\n"
    "    # multiply the sides\n"
    "    result = width * height\n"
    "    return result\n\n"
    "def volume(width, height, depth):\n"
    "    # multiply the base by the depth\n"
    "    result = area(width, height) * depth\n"
    "    return result\n"
)


@dataclass(frozen=True)
class Model:
    """``file``: its name in ``fetch_models``. ``chat``: prompts go through its template.

    ``bos``: put before a raw prompt. ``unused_id``: a token that it never writes.
    """

    name: str
    file: str
    chat: bool
    bos: tuple[int, ...]
    unused_id: int


MODELS = {
    model.name: model
    for model in (
        Model("smollm2", "smollm2-135m-instruct", chat=True, bos=(), unused_id=3),
        Model("gemma3", "gemma3-270m", chat=False, bos=(2,), unused_id=4),
    )
}


@dataclass(frozen=True)
class Workload:
    """What a chat model is asked, and the beginning of the same for a base model to go on with."""

    chat: str
    raw: str


WORKLOADS = {
    "copy": Workload(
        f"Repeat the following paragraph word for word.\n\n{MOON}",
        f"The paragraph, and below it the same paragraph once more.\n\n{MOON}\n\nThe Moon is",
    ),
    "copy-town": Workload(
        f"Repeat the following paragraph word for word.\n\n{HARBOUR}",
        f"The paragraph, and below it the same paragraph once more.\n\n{HARBOUR}\n\nThe harbour",
    ),
    "edit": Workload(
        "Repeat the following paragraph, but write Luna in place of the Moon and leave all else as"
        f" it is.\n\n{MOON}",
        f"Before:\n\n```python\n{CODE}```\n\nAfter renaming `result` to `value`:\n\n```python\ndef",
    ),
    "summarise": Workload(
        f"Summarise this text in two sentences, in its own words.\n\n{HARBOUR}",
        f"{HARBOUR}\n\nIn short: The harbour",
    ),
    "chat": Workload(
        "Why is the sky blue? Answer in one paragraph.",
        "Question: Why is the sky blue?\nAnswer: The sky is blue because",
    ),
    "code": Workload(
        "Write a Python class for a stack with push, pop and peek, each with a docstring.",
        "class Stack:\n"
        '    """A stack with push, pop and peek."""\n\n'
        "    def __init__(self):\n"
        "        self.items = []\n\n"
        "    def push(self, item):",
    ),
    "prose": Workload(
        "Write the beginning of a story about a lighthouse keeper who finds a letter.",
        "The lighthouse keeper found the letter on a morning in October, when",
    ),
}
PREFILL = (512, 2048)  # tokens


def prompt_ids(
    model: Model, workload: str, encode: Callable[[str], list[int]], template: Callable[[str], str]
) -> list[int]:
    """The prompt as the ids that every contestant gets."""
    asked = WORKLOADS[workload]
    if model.chat:
        return encode(template(asked.chat))
    return [*model.bos, *encode(asked.raw)]


def prefill_ids(
    model: Model, length: int, turn: int, encode: Callable[[str], list[int]]
) -> list[int]:
    """``length`` ids that begin elsewhere each ``turn``, so that no cached prefix can serve."""
    text = encode("\n\n".join((HARBOUR, MOON, CODE)))
    start = 37 * (turn + 1)
    many: Sequence[int] = text * (2 + (start + length) // len(text))
    return [*model.bos, *many[start : start + length - len(model.bos)]]
