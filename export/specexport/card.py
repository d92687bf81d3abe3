"""The model card of an engine folder: README.md, with what the model hub reads at its top.

Written at the export from the manifest and the licences of the checkpoints, the same text for the
same export. It belongs to whoever publishes the folder: the manifest does not list it, and a card
that was changed is not overwritten (see `is_own`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from specexport import presets
from specexport.licences import Licence
from specrun.hub import HUB_ID
from specrun.manifest import Manifest
from specrun.manifest_lines import lines
from specrun.reading import printable

CARD = "README.md"
MAX_CARD_BYTES = 1 << 20
_MARK = "<!-- specexport wrote this text, sha256 {} -->\n"
_MARKED = re.compile(r"<!-- specexport wrote this text, sha256 ([0-9a-f]{64}) -->\n\Z")
_NOT_TOLD = ("file ", "plan ", "note ", "end ids", "generation")  # of what inspect shows

RUN = """\
## Run it

```sh
specrun hf://ORG/NAME --prompt "Write a joke about RAM." --stats
```

```python
import specrun

engine = specrun.load("hf://ORG/NAME")
print(engine.generate("Write a joke about RAM.", max_new_tokens=64).text)
```

`ORG/NAME` is where this folder lies on the Hub; the path of a local copy does as well. To fetch
folders `specrun` needs `huggingface_hub` (its extra `hub`), """
NO_TORCH = "to run this one no PyTorch."
TORCH = """to run this one PyTorch (its extra
`torch`) and the target's checkpoint, as it has engines of drafters only."""
LIMITS = """\
## What to expect

* Drafting changes the speed, not the text: greedy decoding gives the tokens of decoding without
  drafts, but where two tokens are as good as equal (`--exact` rules that out); sampled text follows
  the target's distribution.
* How many drafts are accepted depends on the text, and is not measured at the export:
  `specrun bench hf://ORG/NAME` measures it, and whether it pays, on your machine.
* Text in, text out; of a multimodal checkpoint this is the text model."""


def text(made: Manifest, licences: Mapping[str, Licence | None]) -> str:
    """The card. ``licences``: by id of the checkpoint, None where it says nothing of one."""
    name = _name(made.target.id)
    body = [
        f"# {name} for speculative decoding",
        f"Engines of {_told(made.target.id, made.target.revision)} that `specrun` runs by"
        " speculative decoding, exported by `specexport`.",
        RUN + (NO_TORCH if made.has_target_engine else TORCH),
        "## What is in it",
        _table(made),
        *(["## Notes of the export", _listed(made.notes)] if made.notes else []),
        LIMITS,
        "## Licence",
        _licences(licences),
    ]
    return _marked(f"---\n{_metadata(made, licences)}\n---\n\n" + "\n\n".join(body) + "\n\n")


def is_own(path: Path) -> bool:
    """Whether the card is as an export wrote it, byte by byte."""
    try:
        with path.open("rb") as file:
            found = file.read(MAX_CARD_BYTES + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    mark = _MARKED.search(found)
    return mark is not None and _sha256(found[: mark.start()]) == mark[1]


def hub_id(source: str) -> str | None:
    """The id on the hub of a checkpoint as the manifest names it; None of one that is not there."""
    name, _, part = source.partition("/")
    preset = presets.find(name)
    if preset is not None and part in ("target", "assistant"):
        found = preset.target if part == "target" else preset.drafter
        return found if isinstance(found, str) else None
    return source if HUB_ID.fullmatch(source) else None


def _metadata(made: Manifest, licences: Mapping[str, Licence | None]) -> str:
    """What the hub reads, as YAML."""
    from huggingface_hub import ModelCardData

    base = hub_id(made.target.id)
    tags = ["speculative-decoding", "onnx"]
    if any(engine.fixed is not None for engine in made.engines.values()):
        tags.append("tensorrt")
    common = _common(licences)
    data = ModelCardData(
        base_model=base,
        # The hub files conversions of a model under its quantizations, of whatever precision.
        base_model_relation=None if base is None else "quantized",
        library_name="specrun",
        license=None if common is None else common.id,
        license_name=None if common is None else common.name,
        license_link=None if common is None else common.link,
        pipeline_tag="text-generation",
        tags=tags,
    )
    return data.to_yaml(line_break="\n")


def _common(licences: Mapping[str, Licence | None]) -> Licence | None:
    """The one licence of all checkpoints; None where one is not known, or they differ."""
    found = set(licences.values())
    return found.pop() if len(found) == 1 else None


def _licences(licences: Mapping[str, Licence | None]) -> str:
    """What each checkpoint says of its licence."""
    rows = []
    for source, licence in licences.items():
        told = "not said by the checkpoint" if licence is None else _plain(str(licence))
        rows.append(f"* {_told(source)}: {told}")
    note = (
        ""
        if _common(licences) is not None
        else "\n\nWhoever publishes this folder adds `license:` at the top of this card."
    )
    return "The engines hold the weights of the checkpoints, whose licences hold:\n\n" + (
        "\n".join(rows) + note
    )


def _table(made: Manifest) -> str:
    """What inspect tells, without hashes and defaults; and sizes."""
    told = {title: value for title, value in lines(made).items() if not title.startswith(_NOT_TOLD)}
    total = sum(entry.size for entry in made.files)
    told["size"] = f"{total / 1e6:.1f} MB: " + ", ".join(
        f"{entry.path} {entry.size / 1e6:.1f}" for entry in made.files
    )
    least = max((e.requires.onnxruntime for e in made.engines.values() if e.file), default=None)
    if least is not None:
        told["runs on"] = f"onnxruntime {least} or newer"
    rows = [f"| {_plain(title)} | {_plain(value)} |" for title, value in told.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _listed(items: Sequence[str]) -> str:
    return "\n".join(f"* {_plain(item)}" for item in items)


def _name(source: str) -> str:
    return _plain((hub_id(source) or source.removesuffix("/target")).rpartition("/")[2])


def _told(source: str, revision: str | None = None) -> str:
    """A checkpoint, by its name on the hub if it has one there."""
    found = hub_id(source)
    if found is None:
        return _plain(source)
    at = "" if revision is None else f" at `{_plain(revision)}`"
    return f"`{found}`{at}"


def _plain(value: str) -> str:
    """Text of one line that Markdown leaves as it is: names come from anywhere."""
    return re.sub(r"([\\`*\[\]<>|#])", r"\\\1", " ".join(printable(value).split()))


def _marked(card: str) -> str:
    return card + _MARK.format(_sha256(card))


def _sha256(card: str) -> str:
    return hashlib.sha256(card.encode("utf-8")).hexdigest()
