"""Every error that specexport raises on purpose; all of them are ``specrun.errors.SpecrunError``.

    SpecrunError
    └── ExportError           the export cannot be done
        ├── ParityError       an engine computes something else than transformers
        ├── SourceError       the checkpoint: not found, not reachable, or of an unsupported kind
        └── WeightsError      its weights: missing, of another shape, damaged, or not readable

Each error names the thing and the value in its message, and the way out in ``hint``.
"""

from __future__ import annotations

from specrun.errors import SpecrunError


class ExportError(SpecrunError):
    """The export cannot be done."""


class ParityError(ExportError):
    """An engine computes something else than transformers."""


class SourceError(ExportError):
    """The checkpoint cannot be found, reached or used."""


class WeightsError(ExportError):
    """A tensor of the checkpoint is missing, has another shape, or cannot be read."""
