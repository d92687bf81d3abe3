"""How to export: what a user may choose, and what goes with it."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from specgraphs.formats import BLOCK_SIZES, DEFAULT_BLOCK_SIZE, Activations
from specrun.errors import UsageError
from specrun.manifest import Precision

Backend = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
AUTO: Literal["auto"] = "auto"
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
HALVES = ("fp16", "bf16")
MOST_DRAFTS = 16  # that an MTP drafter can draft in a round, unless said otherwise
UNROLLED_DRAFTS = 4  # the same where it always drafts so many
DEFAULT_MEMORY_GB = 2.5
PROCESS_BYTES = 1 << 30  # of Python, torch, a trace and chunks of weights
MODEL_MEMORY_SHARE = 0.5  # at most this much of the free memory for a model or the engines


@dataclass(frozen=True)
class ExportOptions:
    """How to export. ``max_context`` and lengths in tokens; None: as the checkpoint says.

    ``precision``: of the weights of linear layers (auto: what is fastest here);
    ``drafter_precision``: those of drafters (the same, and int8 with w8a8, as they step row by
    row); ``head_precision``, ``embedding_precision``: of the output head and of tables (int8 with
    int4, else the same). ``block_size``: columns that share a scale in int8 and int4.
    ``num_draft``: most tokens that the MTP drafter can draft in a round (16; 4 with TensorRT, which
    always drafts as many). ``early_exit``: export
    the target in parts, so that its first so many layers can draft. ``mtp_layers``: export the MTP
    layers of the target's checkpoint (None: where it has any). ``skip_target``: export the drafters
    only; PyTorch verifies, from the checkpoint. ``check``: compare the written
    engines with transformers before the folder appears. ``memory_gb``: that the export may take,
    10^9 bytes; models that do not fit are read layer by layer, engines run on mapped weights.
    ``backend``: which dialect the graphs are written in. ``activations``: beside weights in
    integers in the dialect of TensorRT (None: in the half precision of the checkpoint).
    ``compute_capabilities``: GPUs to build plans for, 10 * major + minor (none: that of this
    machine, if it has one).
    """

    precision: Precision | Literal["auto"] = "fp32"
    drafter_precision: Precision | None = None
    head_precision: Precision | None = None
    embedding_precision: Precision | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    max_context: int | None = None
    num_draft: int | None = None
    early_exit: int | None = None
    mtp_layers: bool | None = None
    skip_target: bool = False
    check: bool = True
    memory_gb: float = DEFAULT_MEMORY_GB
    backend: Backend = "onnxruntime"
    activations: Activations | None = None
    compute_capabilities: tuple[int, ...] = ()

    @property
    def is_tensorrt(self) -> bool:
        """Whether graphs are written in the dialect of TensorRT."""
        return self.backend != "onnxruntime"

    @property
    def drafts(self) -> int:
        """``num_draft``, or what goes with the backend: TensorRT always takes all steps."""
        return self.num_draft or (UNROLLED_DRAFTS if self.is_tensorrt else MOST_DRAFTS)

    @property
    def model_memory(self) -> int:
        """Bytes that transformers' model or the engines may take."""
        return memory_for_models(self.memory_gb)

    def __post_init__(self) -> None:
        self._check_precisions()
        self._check_backend()
        if self.num_draft is not None and self.num_draft < 1:
            raise UsageError(f"num_draft: must be at least 1, got {self.num_draft}")
        if self.max_context is not None and self.max_context < 2:
            raise UsageError(f"max_context: must be at least 2, got {self.max_context}")
        if not PROCESS_BYTES < self.memory_gb * 1e9 < math.inf:
            raise UsageError(
                f"memory_gb: must be more than {PROCESS_BYTES / 1e9:.2f} and finite,"
                f" got {self.memory_gb:g}",
                hint=f"{DEFAULT_MEMORY_GB:g} is the default",
            )
        if self.early_exit is not None and self.early_exit < 1:
            raise UsageError(
                f"early_exit: must be at least 1, got {self.early_exit}",
                hint="give the number of first layers that draft",
            )
        if self.skip_target and self.early_exit is not None:
            raise UsageError(
                f"early_exit: drafts with the target's own layers, which are skipped,"
                f" got {self.early_exit}",
                hint="leave --early-exit or --skip out",
            )
        if self.skip_target and self.precision == AUTO:
            raise UsageError(
                "precision: auto measures the target, which is skipped",
                hint="give the precision of the drafters",
            )

    def _check_precisions(self) -> None:
        for name in ("precision", "drafter_precision", "head_precision", "embedding_precision"):
            value = getattr(self, name)
            allowed = (*PRECISIONS, AUTO) if name == "precision" else (*PRECISIONS, None)
            if value not in allowed:
                listed = ", ".join(choice for choice in allowed if choice is not None)
                raise UsageError(
                    f"{name}: must be one of {listed}, got {value!r}",
                    hint=f"choose one of {listed}",
                )
            halves = [half for half in (self.precision, value) if half in HALVES]
            if value is not None and halves and value != self.precision:
                raise UsageError(
                    f"{name}: {value} does not go with precision {self.precision}: activations are"
                    " in the precision of all weights in fp16 and bf16, and fp32 with others",
                    hint=f"leave {name} out, or give {halves[0]} for both",
                )
        if self.block_size not in BLOCK_SIZES:
            raise UsageError(
                f"block_size: must be one of {', '.join(map(str, BLOCK_SIZES))},"
                f" got {self.block_size}",
                hint=f"{DEFAULT_BLOCK_SIZE} is the default",
            )

    def _check_backend(self) -> None:
        own = {self.drafter_precision, self.head_precision, self.embedding_precision}
        used = {self.precision, *own}
        if self.backend not in get_args(Backend):
            raise UsageError(
                f"backend: must be one of {', '.join(get_args(Backend))}, got {self.backend!r}",
                hint="onnxruntime is the default",
            )
        if not self.is_tensorrt and "bf16" in used:
            raise UsageError(
                "precision: bf16 is for TensorRT, as ONNX Runtime has hardly any operator for it",
                hint="give fp16 or fp32, or --backend tensorrt or tensorrt-rtx",
            )
        if self.is_tensorrt and ("w8a8" in used or self.precision == AUTO):
            raise UsageError(
                f"precision: {self.precision} is for ONNX Runtime on a CPU, not for {self.backend}",
                hint="give fp16, bf16, int8, int4 or fp32",
            )
        if self.activations is not None and not (
            self.is_tensorrt and self.precision in ("int8", "int4")
        ):
            raise UsageError(
                f"activations: can be chosen beside precision int8 and int4 for TensorRT only, got"
                f" {self.activations} with precision {self.precision} for {self.backend}",
                hint="leave it out: activations are in the precision of the weights, or in fp32",
            )
        if self.compute_capabilities and not self.is_tensorrt:
            raise UsageError(
                f"compute_capabilities: only TensorRT builds for them, got"
                f" {', '.join(map(str, self.compute_capabilities))}",
                hint="leave them out, or give --backend tensorrt or tensorrt-rtx",
            )
        if self.is_tensorrt and self.skip_target:
            raise UsageError(
                "skip_target: PyTorch keeps its KV in other memory than TensorRT's drafters read",
                hint="leave --skip or --backend out",
            )


def memory_for_models(memory_gb: float = DEFAULT_MEMORY_GB) -> int:
    """Bytes that a comparison may take, and no more than can be had without swapping."""
    free = int(_available_memory() * MODEL_MEMORY_SHARE)
    return min(int(memory_gb * 1e9) - PROCESS_BYTES, free)


def _available_memory() -> int:
    """Bytes that can be allocated; file caches give way, so what they hold counts too."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        found = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(encoding="ascii"), re.M)
        if found is not None:
            return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
