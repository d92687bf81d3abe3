"""Opens the target of a folder, whichever engines it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specrun.contract import BACK_ENGINE, FRONT_ENGINE, HEAD_ENGINE, TARGET_ENGINE, TARGET_ENGINES
from specrun.errors import UsageError
from specrun.kv import INITIAL_CAPACITY
from specrun.manifest import Manifest
from specrun.options import PREFILL_CHUNK
from specrun.target import Target, Verifier


def open_target(
    manifest: Manifest,
    session: Callable[[str], Any],
    *,
    max_context: int,
    prefill_chunk: int = PREFILL_CHUNK,
    initial_capacity: int = INITIAL_CAPACITY,
    exact_width: int | None = None,
) -> Verifier:
    """The target with KV buffers of its own. ``session``: gives the session of an engine by name.

    ``exact_width``: rows of every run, see :mod:`specrun.exact`; None: as many as there are.
    Lengths in tokens. Raises EngineError.
    """
    if exact_width is not None:
        from specrun.exact import ExactTarget

        _check_width(manifest, exact_width)
        target = open_target(
            manifest,
            session,
            max_context=-(-max_context // exact_width) * exact_width,  # whole blocks
            prefill_chunk=exact_width,
            initial_capacity=initial_capacity,
        )
        return ExactTarget(target, exact_width, max_context=max_context)
    lengths = {
        "max_context": max_context,
        "prefill_chunk": prefill_chunk,
        "initial_capacity": initial_capacity,
    }
    if TARGET_ENGINE in manifest.engines:
        return Target(session(TARGET_ENGINE), manifest.engines[TARGET_ENGINE], **lengths)
    from specrun.split import SplitTarget

    parts = [n for n in (FRONT_ENGINE, BACK_ENGINE, HEAD_ENGINE) if n in manifest.engines]
    return SplitTarget(
        {name: session(name) for name in parts},
        {name: manifest.engines[name] for name in parts},
        **lengths,
    )


def _check_width(manifest: Manifest, width: int) -> None:
    """Raise UsageError where runs of ``width`` rows do not give the same bits each time."""
    specs = [manifest.engines[name] for name in TARGET_ENGINES if name in manifest.engines]
    most = min((spec.exact_rows for spec in specs if spec.exact_rows is not None), default=width)
    if width > most:
        raise UsageError(
            f"exact_width: must be at most {most} for this folder, whose experts are in floats,"
            f" got {width}",
            hint=f"give {most} or less, or export with --precision int8",
        )
