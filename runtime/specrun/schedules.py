"""Makes the schedule of every generation of an engine, and keeps what outlasts a generation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import onnxruntime

from specrun import tuning
from specrun.costs import StepCosts
from specrun.learned_costs import LearnedCosts
from specrun.manifest import DraftMethod, Manifest
from specrun.options import EngineOptions, GenerateOptions
from specrun.schedule import Schedule, make_schedule
from specrun.tuning import TUNING, Entry


class Schedules:
    """What outlasts a generation: the number of ``heuristic``, by method and start; the costs that
    ``auto`` has learned, by method; the tuning file's costs, which are read once.

    ``options``: resolved. ``tuning_file``: in place of the one in ``folder``, and must be there.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        options: EngineOptions,
        tuning_file: Path | None = None,
    ) -> None:
        self._path = tuning_file or folder / TUNING
        self._required = tuning_file is not None
        self._manifest = manifest
        self._options = options
        self._kept: dict[tuple[str, int], Schedule] = {}
        self._learned: dict[str, LearnedCosts] = {}
        self._found: Entry | str | None = None

    def make(
        self, options: GenerateOptions, context_length: int, *, custom: bool = False
    ) -> Schedule:
        """The schedule of a generation. ``options``: resolved; ``context_length``: tokens, of the
        middle of the text; ``custom``: a drafter of the caller's, of which nothing is kept.

        Raises FolderError where ``auto`` finds a tuning file that is none.
        """
        name = options.num_assistant_tokens_schedule or "constant"
        start = options.num_assistant_tokens or 0
        most = self._most(None if custom else options.method)
        if name == "auto":
            costs = None if custom else self._costs(options.method, context_length)
            return make_schedule(name, start, costs=costs, most=most)
        made = make_schedule(name, start, most=most)
        if name != "heuristic" or custom:
            return made
        return self._kept.setdefault((options.method, start), made)

    @property
    def not_tuned(self) -> str | None:
        """Why ``auto`` learns its costs instead of reading them; None where it need not."""
        entry = self._entry()
        return entry if isinstance(entry, str) else None

    def _most(self, method: str | None) -> int | None:
        """Drafts that a round of ``method`` can have; None: any number."""
        drafter = self._manifest.drafters.get(cast(DraftMethod, method))
        width = self._options.fixed_width
        limits = (
            None if drafter is None else drafter.max_num_draft,
            None if width is None else width - 1,
        )
        return min((limit for limit in limits if limit is not None), default=None)

    def _costs(self, method: str, context_length: int) -> StepCosts | LearnedCosts:
        entry = self._entry()
        measured = entry.costs(method, context_length) if isinstance(entry, Entry) else None
        return measured or self._learned.setdefault(method, LearnedCosts())

    def _entry(self) -> Entry | str:
        if self._found is None:
            self._found = self._find()
        return self._found

    def _find(self) -> Entry | str:
        if self._options.exact:
            return "in exact mode they are learned: specrun tune measures without it"
        if self._options.verify == "torch" and self._manifest.has_target_engine:
            return "PyTorch verifies, and specrun tune measures the engines"
        if not self._required and not os.path.lexists(self._path):
            return f"{self._path} is not there: run specrun tune"
        assert self._options.threads is not None, "resolved when the folder was opened"
        machine = tuning.this_machine(
            threads=self._options.threads,
            device=self._options.device,
            onnxruntime=onnxruntime.__version__,
        )
        inside = None if self._required else self._path.parent
        read = tuning.read(self._path, inside=inside)
        found = read.find(machine, tuning.engine_hashes(self._manifest))
        return f"{self._path}: {found}" if isinstance(found, str) else found
