"""What an export and a run of its engines cost: memory, disk and time, estimated.

Sizes come from :mod:`specexport.plan`; constants were measured on the full shape of Gemma 4 E2B on
two cores (docs/performance.md), speeds are measured where the plan is made.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from specexport import encoders, folder, naming
from specexport.datafile import CHUNK_BYTES
from specexport.options import memory_for_models
from specexport.plan import ExportPlan
from specexport.streamed import LINEAR_BYTES
from specrun.kv import INITIAL_CAPACITY

CONTEXT = 4096  # tokens that the memory of a run is given for
BASE_BYTES = 600_000_000  # anonymous memory of an export without a model: libraries, one chunk
GRAPH_BYTES_PER_LAYER = 30_000
TRACE_SECONDS_PER_LAYER = 0.8
SPEED_SEED = 5


@dataclass(frozen=True)
class Costs:
    """``run_bytes``: weights and KV of a run over ``context`` tokens. ``export_bytes``: most memory
    of an export with ``--no-check``; ``checked_bytes``: with the comparison, or where a precision
    is calibrated. ``disk_bytes``: of the engine folder while it is written. ``checkpoint_bytes``:
    of the weights in bf16, where they have to be downloaded. ``seconds``: of the export without
    comparison, calibration and download.
    """

    context: int
    kv_bytes: int
    run_bytes: int
    export_bytes: int
    checked_bytes: int
    disk_bytes: int
    checkpoint_bytes: int
    seconds: float


def costs(plan: ExportPlan) -> Costs:
    """Everything that can be told of ``plan`` on this machine; takes about a second."""
    context = min(CONTEXT, plan.settings.max_context)
    kv = kv_bytes(plan, context)
    most = plan.nbytes + plan.calibration_bytes
    layers = sum(engine.layers for engine in plan.engines)
    return Costs(
        context=context,
        kv_bytes=kv,
        run_bytes=resident_bytes(plan) + kv,
        export_bytes=BASE_BYTES,
        checked_bytes=BASE_BYTES + _model_bytes(plan),
        disk_bytes=most + layers * GRAPH_BYTES_PER_LAYER + folder.HEADROOM,
        checkpoint_bytes=2 * parameters(plan),
        seconds=_seconds(plan) + layers * TRACE_SECONDS_PER_LAYER,
    )


def kv_bytes(plan: ExportPlan, tokens: int) -> int:
    """Of the KV buffers that hold ``tokens`` tokens: they double from INITIAL_CAPACITY on."""
    total = 0
    for use in plan.kv:
        capacity = INITIAL_CAPACITY
        while capacity < min(tokens, use.max_context):
            capacity *= 2
        total += use.token_bytes * min(capacity, use.max_context)
    return total


def resident_bytes(plan: ExportPlan) -> int:
    """Of weights in a run: each engine has a reordered copy of its own, tables are mapped once."""
    tables = {one.key: one.nbytes for one in plan.stored if one.table}
    own = sum(one.nbytes for engine in plan.engines for one in engine.stored if not one.table)
    return own + sum(tables.values())


def parameters(plan: ExportPlan) -> int:
    """Elements of everything that is stored, each once."""
    return sum({one.key[:2]: one.elements for one in plan.stored}.values())


def _model_bytes(plan: ExportPlan) -> int:
    """Of the transformers model: all of it where there is room, else one module's weights at a
    time, of experts one."""
    import torch

    model: Any = naming.meta_model(*plan.target.class_and_config())
    whole = sum(4 * int(parameter.numel()) for parameter in model.parameters())
    if whole <= memory_for_models():
        return whole
    largest = 0
    for module in model.modules():
        own = sum(4 * int(p.numel()) for p in module.parameters(recurse=False))
        own //= getattr(module, "num_experts", 1) if hasattr(module, "gate_up_proj") else 1
        if isinstance(module, torch.nn.Linear):
            own = min(own, LINEAR_BYTES)
        if not isinstance(module, torch.nn.Embedding):
            largest = max(largest, own)
    return largest


def _seconds(plan: ExportPlan) -> float:
    """Encoding each format at the speed of one chunk, and writing and hashing what comes of it."""
    elements: Counter[str] = Counter()
    for one in plan.stored:
        elements[one.key[2]] += one.elements
    count = CHUNK_BYTES // 4
    rows = np.random.default_rng(SPEED_SEED).standard_normal((count // 2048, 2048), np.float32)
    encoding = sum(
        number / count * _time(_encoder(how, rows, plan.precisions.block_size))
        for how, number in elements.items()
    )
    return encoding + plan.nbytes / CHUNK_BYTES * _time(lambda: _store(rows))


def _encoder(how: str, rows: Any, block_size: int) -> Callable[[], Any]:
    if how == "rows":
        return lambda: encoders.columns(rows, None).values.T.copy()
    if "blocks" in how:
        bits = 4 if how.startswith("int4") else 8
        return lambda: encoders.blocks(rows, bits, block_size)
    return lambda: rows.astype(np.float16)  # reading bf16 is a conversion of the same kind


def _store(rows: Any) -> None:
    """Write a chunk to a file and hash it."""
    with tempfile.TemporaryFile() as file:
        file.write(rows.data)
        file.flush()
    hashlib.sha256(rows.data).digest()


def _time(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
