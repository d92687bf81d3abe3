"""Which sizes an engine is built for. Pure Python.

A run that fits both profiles is made with ``decode``, which is tuned for few rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specrun.contract import BATCH, KV_AXIS, ROWS, WANTED, TensorSpec
from specrun.errors import UsageError
from specrun.plans import ProfileName, ProfileSpec, ShapeRange

DYNAMIC = {BATCH, ROWS, WANTED}
SMALLEST = {"prefill_rows": 1, "max_draft": 0, "max_batch": 1}


@dataclass(frozen=True)
class Sizes:
    """The largest runs that will be made.

    ``prefill_rows``: tokens per chunk of a prompt. ``max_draft``: most drafted tokens that one run
    verifies, so that it has ``max_draft + 1`` rows. ``draft``: how many it is tuned for (None: the
    most). ``max_batch``: sequences in a run; the engine is tuned for one.
    """

    prefill_rows: int = 256
    max_draft: int = 16
    draft: int | None = None
    max_batch: int = 1

    def __post_init__(self) -> None:
        for name, least in SMALLEST.items():
            if getattr(self, name) < least:
                raise UsageError(
                    f"{name} must be at least {least}, got {getattr(self, name)}",
                    hint="every dynamic size of an engine is at least 1",
                )
        if self.draft is not None and not 0 <= self.draft <= self.max_draft:
            raise UsageError(
                f"draft must be in 0..{self.max_draft}, got {self.draft}",
                hint="raise max_draft to verify more tokens in one run",
            )

    @property
    def verify_rows(self) -> int:
        """Rows of the largest verification."""
        return self.max_draft + 1

    @property
    def tuned_rows(self) -> int:
        """Rows of the verification that the engine is tuned for."""
        return (self.max_draft if self.draft is None else self.draft) + 1


@dataclass(frozen=True)
class _Range:
    """What one dynamic size may be."""

    opt: int
    max: int


def profiles(inputs: Iterable[TensorSpec], sizes: Sizes) -> tuple[ProfileSpec, ...]:
    """The profiles of an engine with these inputs: ``prefill`` and ``decode``, in this order.

    Only ``decode`` where the number of rows is fixed, or where a chunk of a prompt is no larger
    than a verification.
    Raises UsageError for a size that may not change from run to run.
    """
    every = list(inputs)
    dynamic = [spec for spec in every if is_dynamic(spec)]
    used = {size for spec in dynamic for size in spec.shape if isinstance(size, str)}
    if unknown := sorted(used - DYNAMIC):
        raise UsageError(
            f"the inputs have the dynamic size {unknown[0]!r}",
            hint=f"only {', '.join(sorted(DYNAMIC))} may change from run to run",
        )
    if not dynamic:  # a plan has a profile, so that it says what is fixed
        return (_profile("decode", every, {}),)
    decode = _profile("decode", dynamic, _decode_ranges(sizes))
    if ROWS not in used:
        return (decode,)
    rows = min(sizes.prefill_rows, _capacity(every, sizes))
    if rows <= sizes.verify_rows:
        return (decode,)
    return (_profile("prefill", dynamic, _prefill_ranges(sizes, rows)), decode)


def _capacity(inputs: list[TensorSpec], sizes: Sizes) -> int:
    """Rows that the smallest KV buffer holds, which is the most that TensorRT lets a run write."""
    buffers = [spec for spec in inputs if spec.name.startswith("past.")]
    held = [size for spec in buffers if isinstance(size := spec.shape[KV_AXIS], int)]
    capacity = min(held, default=sizes.prefill_rows)
    if held and sizes.verify_rows > capacity:
        raise UsageError(
            f"max_draft is {sizes.max_draft}, the KV buffers hold {capacity} rows",
            hint=f"lower max_draft to {capacity - 1}, or export a larger capacity",
        )
    return capacity


def is_dynamic(spec: TensorSpec) -> bool:
    """Whether any size of it changes from run to run."""
    return any(isinstance(size, str) for size in spec.shape)


def _decode_ranges(sizes: Sizes) -> dict[str, _Range]:
    rows = _Range(sizes.tuned_rows, sizes.verify_rows)
    return {BATCH: _Range(1, sizes.max_batch), ROWS: rows, WANTED: rows}


def _prefill_ranges(sizes: Sizes, rows: int) -> dict[str, _Range]:
    # Logits of a whole chunk are never asked for, and a row of a large vocabulary has 1 MB. Prompts
    # of a batch end in different rows.
    wanted = min(rows, max(sizes.verify_rows, sizes.max_batch))
    return {
        BATCH: _Range(1, sizes.max_batch),
        ROWS: _Range(rows, rows),
        WANTED: _Range(1, wanted),
    }


def _profile(name: ProfileName, inputs: list[TensorSpec], ranges: dict[str, _Range]) -> ProfileSpec:
    return ProfileSpec(name, {spec.name: _shapes(spec, ranges) for spec in inputs})


def _shapes(spec: TensorSpec, ranges: dict[str, _Range]) -> ShapeRange:
    found = [
        (1, ranges[size].opt, ranges[size].max) if isinstance(size, str) else (size,) * 3
        for size in spec.shape
    ]
    low, usual, high = (tuple(sizes[end] for sizes in found) for end in range(3))
    return ShapeRange(low, usual, high)
