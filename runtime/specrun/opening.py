"""Opens the target of a folder, whichever engines it is made of, or PyTorch in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specrun.contract import BACK_ENGINE, FRONT_ENGINE, HEAD_ENGINE, TARGET_ENGINE, TARGET_ENGINES
from specrun.errors import UsageError
from specrun.kv import INITIAL_CAPACITY
from specrun.manifest import Manifest
from specrun.options import PREFILL_CHUNK
from specrun.runner import Session
from specrun.target import Target, Verifier

if TYPE_CHECKING:
    from specrun.exact import ExactTarget


# Gives a target of so many tokens (max_context) that reads prompts in such pieces (prefill_chunk).
OpenPlain = Callable[[int, int], Verifier]
# Gives the session of an engine by its name.
OpenSession = Callable[[str], Session]


def open_target(
    manifest: Manifest,
    session: OpenSession,
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

    def plain(max_context: int, prefill_chunk: int) -> Verifier:
        return _open_engines(
            manifest,
            session,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            initial_capacity=initial_capacity,
        )

    if exact_width is None:
        return plain(max_context, prefill_chunk)
    return open_exact(manifest, exact_width, max_context, plain)


def open_exact(
    manifest: Manifest, width: int, max_context: int, open_plain: OpenPlain
) -> ExactTarget:
    """What ``open_plain`` gives, in blocks of ``width`` rows. Raises UsageError, EngineError."""
    from specrun.exact import ExactTarget

    _check_width(manifest, width)
    _check_blocks(manifest, width, max_context)
    target = open_plain(-(-max_context // width) * width, width)  # whole blocks
    if target.room < width:
        raise UsageError(
            f"exact_width: the plans of this folder give the logits of at most {target.room} rows,"
            f" got {width}",
            hint=f"give {target.room} or less",
        )
    return ExactTarget(target, width, max_context=max_context)


def _open_engines(manifest: Manifest, session: OpenSession, **lengths: int) -> Verifier:
    if TARGET_ENGINE in manifest.engines:
        return Target(session(TARGET_ENGINE), manifest.engines[TARGET_ENGINE], **lengths)
    from specrun.split import SplitTarget

    parts = [n for n in (FRONT_ENGINE, BACK_ENGINE, HEAD_ENGINE) if n in manifest.engines]
    return SplitTarget(
        {name: session(name) for name in parts},
        {name: manifest.engines[name] for name in parts},
        **lengths,
    )


def _check_blocks(manifest: Manifest, width: int, max_context: int) -> None:
    """Raise UsageError where the last block would end behind the last row of fixed buffers."""
    fixed = manifest.target_engine.fixed
    blocks = -(-max_context // width)
    if fixed is None or blocks * width <= fixed.capacity:
        return
    most = fixed.capacity // width * width
    raise UsageError(
        f"exact_width: {blocks} blocks of {width} rows are {blocks * width}, which must be at most"
        f" {fixed.capacity}, the rows of this folder's KV buffers",
        hint=f"give a width that divides {fixed.capacity}, or a max_context {most} or less",
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
