"""Which sizes an engine is built for. Pure Python.

A run that fits both profiles is made with ``decode``, which is tuned for few rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specexport.errors import ExportError
from specexport.trt.plans import Profile, Range, SizeName, ranges
from specrun.contract import BATCH, ROWS, WANTED, TensorSpec

PREFILL, DECODE = "prefill", "decode"
Shape = tuple[int, ...]


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
        least = {"prefill_rows": 1, "max_draft": 0, "max_batch": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                value = getattr(self, name)
                raise ExportError(f"{name} must be at least {smallest}, got {value}")
        if self.draft is not None and not 0 <= self.draft <= self.max_draft:
            raise ExportError(
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


def profiles(inputs: Iterable[TensorSpec], sizes: Sizes) -> tuple[Profile, ...]:
    """The profiles of an engine with these inputs: ``prefill`` and ``decode``.

    Only ``decode`` where the number of rows is fixed, or where a chunk of the prompt is no larger
    than a verification. A profile has a range for each dynamic size that the inputs have.
    """
    used = {size for spec in inputs for size in spec.shape if isinstance(size, str)}
    if unknown := sorted(used - {BATCH, ROWS, WANTED}):
        raise ExportError(
            f"the inputs have the dynamic size {unknown[0]!r}",
            hint="only batch, rows and wanted may change from run to run",
        )
    decode = _profile(DECODE, used, sizes, sizes.tuned_rows, sizes.verify_rows)
    if ROWS not in used or sizes.prefill_rows <= sizes.verify_rows:
        return (decode,)
    rows = sizes.prefill_rows
    return (_profile(PREFILL, used, sizes, rows, rows), decode)


def _profile(name: str, used: set[str], sizes: Sizes, opt: int, most: int) -> Profile:
    # Logits of a whole chunk are never asked for: a large vocabulary would take 1 MB a row.
    wanted_opt = 1 if name == PREFILL else opt
    wanted_most = min(most, max(sizes.verify_rows, sizes.max_batch))
    every: dict[SizeName, Range] = {
        "batch": Range(1, 1, sizes.max_batch),
        "rows": Range(1, opt, most),
        "wanted": Range(1, wanted_opt, max(wanted_most, wanted_opt)),
    }
    return Profile(name, {size: spread for size, spread in every.items() if size in used})


def shapes(profile: Profile, spec: TensorSpec) -> tuple[Shape, Shape, Shape]:
    """The smallest, usual and largest shape of an input."""
    found = ranges(profile)
    ends = [(found[s].min, found[s].opt, found[s].max) if isinstance(s, str) else (s, s, s)
            for s in spec.shape]
    low, usual, high = (tuple(end[index] for end in ends) for index in range(3))
    return low, usual, high


def is_dynamic(spec: TensorSpec) -> bool:
    """Whether any size of it changes from run to run."""
    return any(isinstance(size, str) for size in spec.shape)
