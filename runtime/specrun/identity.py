"""Which model a figure or a trace is of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from specrun.manifest import Manifest


@dataclass(frozen=True)
class Identity:
    """An engine folder. ``drafter``: the checkpoint that drafted, None where none did.
    ``fingerprint``: of all its files; equal ones are the same folder, wherever it lies."""

    path: str
    target: str
    revision: str | None
    architecture: str
    precision: str
    drafter: str | None
    fingerprint: str

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, method: str) -> Identity:
        """Of a folder of which ``method`` is used."""
        drafters = {name: spec.source for name, spec in manifest.drafters.items()}
        source = {str(name): source for name, source in drafters.items()}.get(method)
        target = manifest.target
        return cls(
            path=str(folder),
            target=target.id,
            revision=target.revision,
            architecture=target.architecture,
            precision=manifest.target_engine.precision,
            drafter=None if source is None else source.id,
            fingerprint=fingerprint(manifest),
        )


def fingerprint(manifest: Manifest) -> str:
    """16 hexadecimal digits of the hashes of all files that a manifest lists."""
    lines = sorted(f"{entry.sha256} {entry.path}\n" for entry in manifest.files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
