"""Plans that were built before: kept by what they were made from, and why one is out of date."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from specexport.folder import replace_text
from specexport.trt.plans import BuildSettings, Built, MadeFrom, sha256_of
from specrun.decode import decode, encode
from specrun.errors import EngineError
from specrun.plans import PRODUCTS


@dataclass(frozen=True)
class PlanCache:
    """A folder with plans by key, each beside what is known of it, and full TensorRT's tactics."""

    folder: Path

    def find(self, source: MadeFrom, out: Path) -> Built | None:
        """Put the plan made from this at ``out``; None if it is not there or not whole."""
        plan, notes = self._places(source)
        try:
            found = decode(Built, json.loads(notes.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None
        # A key is no proof of what stands in the notes, nor these of the file.
        if found.made_from != source or why_damaged(found, plan):
            return None
        _copy(plan, out)
        return replace(found, spec=replace(found.spec, file=out.name))

    def store(self, built: Built, path: Path) -> None:
        """Keep the plan at ``path``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plan, notes = self._places(built.made_from)
        _copy(path, plan)
        # Last, so that what has notes is whole.
        replace_text(notes, json.dumps(encode(built), indent=1))

    def timing(self, settings: BuildSettings, version: str) -> Path:
        """File of the tactics that full TensorRT measured on one kind of GPU."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kind = f"{settings.flavour}-{version}-sm{settings.compute_capability}"
        return self.folder / f"{kind}.timing"

    def _places(self, source: MadeFrom) -> tuple[Path, Path]:
        return self.folder / f"{source.key}.engine", self.folder / f"{source.key}.json"


def why_stale(built: Built, source: MadeFrom) -> str | None:
    """What has changed since a plan was built, in words; None if it is up to date."""
    changed = source.changed_since(built.made_from)
    return f"{', '.join(changed)} changed since it was built" if changed else None


def why_damaged(built: Built, path: Path) -> str | None:
    """What is wrong with the file of a plan; None if it is the one that was built."""
    if not path.is_file():
        return "is not there"
    if path.stat().st_size != built.spec.size:
        return f"has {path.stat().st_size} bytes, built were {built.spec.size}"
    if sha256_of(path) != built.spec.sha256:
        return "was changed after it was built"
    return None


def check_current(built: Built, source: MadeFrom, path: Path, folder_hint: str) -> None:
    """Raise EngineError unless the plan at ``path`` is up to date; ``folder_hint``: the way out."""
    reason = why_damaged(built, path) or why_stale(built, source)
    if reason is not None:
        product = PRODUCTS[source.settings.flavour]
        raise EngineError(f"{path.name}: the plan of {product} {reason}", hint=folder_hint)


def _copy(source: Path, out: Path) -> None:
    """A copy that is there whole or not at all."""
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        shutil.copyfile(source, partial)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
