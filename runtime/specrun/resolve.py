"""Options as they take effect: what was left open is filled in from the folder, then frozen."""

from __future__ import annotations

import dataclasses

from specrun.contract import Role
from specrun.errors import UsageError
from specrun.manifest import Manifest
from specrun.options import (
    DEFAULT_NUM_ASSISTANT_TOKENS,
    EngineOptions,
    GenerateOptions,
    available_threads,
)


def resolve_engine(options: EngineOptions, manifest: Manifest) -> EngineOptions:
    """``options`` with threads and context decided. Raises UsageError."""
    most = manifest.generation.max_context
    if options.max_context is not None and options.max_context > most:
        raise UsageError(
            f"max_context: the engine was exported for {most}, got {options.max_context}",
            hint=f"give {most} or less",
        )
    return dataclasses.replace(
        options,
        threads=options.threads or available_threads(),
        max_context=options.max_context or most,
    )


def resolve_generate(options: GenerateOptions, manifest: Manifest) -> GenerateOptions:
    """``options`` with method, draft length, schedule and end ids decided. Raises UsageError."""
    drafter = manifest.engines.get(Role.MTP_DRAFTER)
    mtp = drafter.mtp if drafter is not None else None
    method = options.method
    if method == "auto":
        method = "mtp-drafter" if mtp is not None else "prompt-lookup"
    if method == "mtp-drafter" and mtp is None:
        raise UsageError(
            "method: 'mtp-drafter' needs a drafter engine, this folder has none",
            hint="export the folder with its drafter, or use prompt-lookup",
        )
    num_draft = options.num_assistant_tokens
    schedule = options.num_assistant_tokens_schedule
    if method == "plain":
        num_draft = 0
    elif method == "mtp-drafter" and mtp is not None:
        num_draft = mtp.num_assistant_tokens if num_draft is None else num_draft
        num_draft = min(num_draft, mtp.max_num_draft)
        schedule = schedule or mtp.schedule
    elif num_draft is None:
        num_draft = DEFAULT_NUM_ASSISTANT_TOKENS
    eos = options.eos_token_ids
    return dataclasses.replace(
        options,
        method=method,
        num_assistant_tokens=num_draft,
        num_assistant_tokens_schedule=schedule or "constant",
        eos_token_ids=manifest.generation.eos_token_ids if eos is None else eos,
    )
