"""The target as one engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specexport.errors import SourceError
from specexport.parts.base import Settings, engine_spec
from specexport.sources import Source
from specrun.contract import TARGET_ENGINE, Role
from specrun.manifest import EngineSpec

if TYPE_CHECKING:
    from specgraphs.engine_graph import EngineGraph
    from specgraphs.trace import FakeModel


class WholeTarget:
    """A causal model whose whole forward pass is one engine."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def check(self) -> None:
        """See :class:`TargetPart`."""
        check_target(self.source)

    def trace(self, fake: FakeModel, settings: Settings) -> dict[str, EngineGraph]:
        """See :class:`TargetPart`."""
        from specgraphs.target import trace_target

        graph = trace_target(fake, settings.dtype, max_context=settings.max_context)
        return {TARGET_ENGINE: graph}

    def specs(self, settings: Settings) -> dict[str, EngineSpec]:
        """See :class:`TargetPart`."""
        return {TARGET_ENGINE: causal_spec(TARGET_ENGINE, self.source, settings)}


class TorchOnly(WholeTarget):
    """A target without an engine: PyTorch verifies, from the checkpoint."""

    def trace(self, fake: FakeModel, settings: Settings) -> dict[str, EngineGraph]:
        """Nothing."""
        return {}

    def specs(self, settings: Settings) -> dict[str, EngineSpec]:
        """See :class:`TargetPart`."""
        spec = causal_spec(TARGET_ENGINE, self.source, settings)
        weights = self.source.weights.total_nbytes
        return {
            TARGET_ENGINE: replace(
                spec,
                backend="torch",
                file="",
                precision=settings.dtype,
                step_bytes=weights // (2 if settings.dtype == "fp16" else 1),
            )
        }


def check_target(source: Source) -> None:
    """Raise SourceError for an assistant, WeightsError where weights are missing."""
    if source.is_assistant:
        raise SourceError(
            f"{source.id}: is an assistant ({source.model_type}) and works only with its target",
            hint="give the target as SOURCE and this one with --drafter",
        )
    source.weights.check_complete(source.expected_shapes())


def causal_spec(
    name: str, source: Source, settings: Settings, max_context: int | None = None
) -> EngineSpec:
    """The entry of a whole causal model, a target or a draft model with its own ``max_context``."""
    from specgraphs import families

    plan = families.kv_plan(source.config)
    return engine_spec(
        Role.TARGET,
        name,
        settings,
        hidden_size=int(source.config.hidden_size),
        vocab_size=int(source.config.vocab_size),
        kv=plan.owners,
        all_hidden=not plan.shares,
        max_context=max_context,
    )
