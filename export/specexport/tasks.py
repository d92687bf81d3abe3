"""What a checkpoint is for, as optimum's TasksManager infers it from its configuration.

So what generates no text is refused with its own name, before its weights are downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specexport.errors import SourceError

TEXT_GENERATION = "text-generation"
# Of some checkpoints with more than text the text model is exported.
WITH_TEXT = (TEXT_GENERATION, "image-text-to-text", "image-to-text")
# Files that tell other libraries than transformers, beside config.json.
MARKS = ("model_index.json", "config_sentence_transformers.json", "sentence_*")
HINT = "give a causal language model, or --task text-generation if it is one all the same"


def check(folder: Path, config: Mapping[str, Any], *, multimodal: bool) -> None:
    """Raise SourceError unless the checkpoint is for text generation, or does not say what for.

    ``config``: its config.json, empty where there is none. ``multimodal``: its text model is
    exported.
    """
    library = _library(folder)
    if library not in (None, "transformers"):
        raise SourceError(f"{folder}: is a model of {library}, not of transformers", hint=HINT)
    architecture = _architecture(config)
    task = None if architecture is None else _task(architecture)
    if (
        architecture is None
        or task in (None, TEXT_GENERATION)
        or (multimodal and task in WITH_TEXT)
    ):
        return
    raise SourceError(
        f"{folder}: is a model for {task} ({architecture.__name__}), not for {TEXT_GENERATION}",
        hint=HINT,
    )


def _library(folder: Path) -> str | None:
    from optimum.exporters.tasks import TasksManager

    if not any(any(folder.glob(mark)) for mark in ("config.json", *MARKS)):
        return None  # it would look through everything below
    try:
        return str(TasksManager.infer_library_from_model(str(folder)))
    except (ValueError, OSError, RecursionError):  # a configuration that is none is told elsewhere
        return None


def _architecture(config: Mapping[str, Any]) -> type | None:
    """The class of transformers that the configuration names; None for others'."""
    import transformers

    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    if not isinstance(first, str) or not first.isidentifier():
        return None
    found = getattr(transformers, first, None)
    known = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if known else None


def _task(architecture: type) -> str | None:
    from optimum.exporters.tasks import TasksManager

    try:
        return str(TasksManager.infer_task_from_model(architecture))
    except (ValueError, KeyError):  # one that belongs to no task
        return None
