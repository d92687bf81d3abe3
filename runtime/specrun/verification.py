"""What verifies in a generation, engine or PyTorch, and what is said when that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specrun.errors import EngineError
from specrun.guarded_target import Watch

if TYPE_CHECKING:
    from specrun.lane import Lane


class Verification:
    """What verifies in one generation, and what is said when that changes.

    Entered, PyTorch may stand in for the target's engine: not with ``strict``, and once per engine
    folder that is open ``on_warning`` is told why.
    """

    def __init__(self, lane: Lane, *, strict: bool, on_warning: Callable[[str], None]) -> None:
        self._lane = lane
        self._strict = strict
        self._on_warning = on_warning
        self._before = 0 if lane.guarded is None else lane.guarded.steps

    def __enter__(self) -> Verification:
        """Raises EngineError where the engine failed before and ``strict`` refuses PyTorch."""
        resources, guarded = self._lane.resources, self._lane.guarded
        if self._lane.verifier == "torch" and resources.failure is not None:
            self._refuse(resources.failure)
            self._tell(resources.failure)
        if guarded is not None:
            guarded.watch = Watch(self._refuse, self._tell)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lane.guarded is not None:
            self._lane.guarded.watch = None

    def statistics(self, steps: int) -> dict[str, Any]:
        """Fields of Stats about a generation of so many runs of ``verify``."""
        lane, failure = self._lane, self._lane.resources.failure
        by_torch = lane.verifier == "torch"
        guarded = lane.guarded
        return {
            "provider": lane.provider(),
            "verifier": lane.verifier,
            "torch_steps": steps if guarded is None else guarded.steps - self._before,
            "verifier_failure": str(failure) if by_torch and failure is not None else None,
        }

    def _refuse(self, error: EngineError) -> None:
        if self._strict:
            hint = "without strict, PyTorch verifies in its place"
            raise EngineError(f"the target's engine failed: {error}", hint=hint) from error

    def _tell(self, error: EngineError) -> None:
        resources = self._lane.resources
        said, resources.failure_said = resources.failure_said, True
        resources.failure = error
        if not said:
            self._on_warning(
                f"the target's engine failed: {error}; going on with"
                f" {resources.torch_name} and the checkpoint's own weights"
            )
