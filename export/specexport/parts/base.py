"""What the exporter asks of a target and of everything that drafts for it: one file each.

A part knows its checkpoint, its graphs, its entry in the manifest and how its engines are compared
with transformers. The exporter calls the methods in the order in which they stand here; it never
asks which part it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specexport.weights import Weights
from specgraphs import formats
from specgraphs.formats import Activations
from specrun.contract import (
    TARGET_ENGINES,
    DType,
    FixedSizes,
    KvLayer,
    Role,
)
from specrun.manifest import (
    DrafterSpec,
    DraftMethod,
    EngineSpec,
    Manifest,
    ParityCase,
    Precision,
    Requires,
    expected_io,
)
from specrun.options import PREFILL_CHUNK

if TYPE_CHECKING:
    from specexport.sources import Source
    from specgraphs.engine_graph import EngineGraph
    from specgraphs.trace import FakeModel
    from specrun.runner import Session
    from specrun.target import Verifier

CAPACITY_STEP = 64  # of KV buffers of a fixed size, so that whole blocks fit into them
MIN_ONNXRUNTIME = "1.31"  # 1.30 refuses an attention node without present outputs
KV_DTYPE: dict[Activations, DType] = {
    "fp32": DType.FLOAT32,
    "fp16": DType.FLOAT16,
    "bf16": DType.BFLOAT16,
}
ACTIVATIONS = {dtype: name for name, dtype in KV_DTYPE.items()}


@dataclass(frozen=True)
class Settings:
    """What holds for every part of one export. ``max_context`` and ``num_draft`` in tokens.

    ``activations``: None for what goes with ``precision``. ``tensorrt``: in its dialect.
    """

    precision: Precision
    drafter_precision: Precision
    max_context: int
    num_draft: int
    activations: Activations | None = None
    tensorrt: bool = False

    @property
    def dtype(self) -> Activations:
        """Of activations and KV, for all engines of the folder."""
        return self.activations or formats.activations(self.precision)

    def fixed(self, role: Role, max_context: int | None = None) -> FixedSizes | None:
        """What is fixed in an engine of these settings; ``max_context``: if it has its own."""
        if not self.tensorrt:
            return None
        drafts = self.num_draft if role is Role.MTP_DRAFTER else None
        rows = max_context or self.max_context
        return FixedSizes(-(-rows // CAPACITY_STEP) * CAPACITY_STEP, drafts)

    def of_engine(self, name: str) -> Precision:
        """The precision of the engine called ``name``."""
        return self.precision if name in TARGET_ENGINES else self.drafter_precision


@dataclass(frozen=True)
class TargetRun:
    """transformers' target after one forward pass over ``tokens`` int64 ``[n]``.

    ``out``: what the model returned, with the hidden states; ``past_lengths``: after how many
    tokens drafts are compared; ``dtype``: of the run; ``memory``: bytes that a model may take;
    ``note(method, scope)``: to be told how a drafter's own model was run.
    """

    model: Any
    out: Any
    tokens: NDArray[np.int64]
    past_lengths: Sequence[int]
    dtype: Any
    memory: int
    note: Callable[[DraftMethod, str], None] = lambda method, scope: None

    @property
    def hidden(self) -> Any:
        """Hidden states after the final norm, torch ``[n, hidden size]``."""
        return self.out.hidden_states[-1][0]


@dataclass(frozen=True)
class Opened:
    """A written folder, opened for comparing. ``source``: the checkpoint of a target without an
    engine, None to find it again."""

    folder: Path
    manifest: Manifest
    threads: int
    mapped: bool
    source: Source | None = None

    @functools.cached_property
    def target(self) -> Verifier:
        """The target, opened once; its KV empty or not."""
        from specrun.opening import open_target

        most = self.manifest.generation.max_context
        if not self.manifest.has_target_engine:
            from specexport import verification

            source = self.source or verification.find(self.manifest, self.folder, None)
            model = verification.torch_model(self.manifest, source)
            return model.target(None, max_context=most, prefill_chunk=PREFILL_CHUNK)
        return open_target(self.manifest, self.session, max_context=most)

    def session(self, name: str) -> Session:
        """A session of the engine called ``name``, checked against the manifest."""
        from specexport.bounded import engine_in_pieces
        from specrun.ort import open_session

        spec = self.manifest.engines[name]
        path = self.folder / spec.file
        if not self.mapped:
            return open_session(path, spec, threads=self.threads)
        with engine_in_pieces(path) as in_pieces:
            return open_session(in_pieces, spec, threads=self.threads, mapped=True)


def read_up_to(target: Verifier, tokens: NDArray[np.int64], length: int) -> None:
    """Let the KV hold the first ``length`` of ``tokens`` ``[n]``. Of these it may hold any number
    already, so that what one comparison has read need not be read for the next."""
    target.truncate(min(length, target.length))
    if target.length < length:
        target.prefill(tokens[None, target.length : length])


class TargetPart(Protocol):
    """The target: one engine, or several that together are one."""

    def check(self) -> None:
        """Raise SourceError or WeightsError where the checkpoint cannot be exported this way."""
        ...

    def trace(self, fake: FakeModel, settings: Settings) -> dict[str, EngineGraph]:
        """Engine name -> graph without weights."""
        ...

    def specs(self, settings: Settings) -> dict[str, EngineSpec]:
        """Engine name -> its entry in the manifest, for the same names as ``trace``."""
        ...


class DrafterPart(Protocol):
    """One way to draft for the target."""

    @property
    def method(self) -> DraftMethod:
        """The method it is for."""
        ...

    @property
    def weights(self) -> Mapping[str, Weights]:
        """Origin, as its graphs name it -> weights of its own (none where it has the target's)."""
        ...

    @property
    def forward_options(self) -> dict[str, Any]:
        """What the target's reference forward pass has to be asked for besides."""
        ...

    def check(self) -> None:
        """Raise SourceError or WeightsError unless it can draft for the target."""
        ...

    def reference(self, run: TargetRun) -> Any:
        """What transformers computes, for ``compare``. Called before anything is traced."""
        ...

    def noise(self, exact: Any, rounded: Any) -> dict[str, float]:
        """Tensor -> how far a ``reference`` in fp16 is from that in fp32 (relative)."""
        ...

    def trace(self, target: FakeModel, settings: Settings) -> dict[str, EngineGraph]:
        """Engine name -> graph without weights; none where the target's engines are enough."""
        ...

    def specs(self, settings: Settings) -> dict[str, EngineSpec]:
        """Engine name -> its entry in the manifest, for the same names as ``trace``."""
        ...

    def write_files(self, folder: Path) -> None:
        """Write whatever else it needs (a tokenizer)."""
        ...

    def drafter(
        self, settings: Settings, target_sha256: str, sha256: Mapping[str, str]
    ) -> DrafterSpec:
        """Its entry among the drafters; ``sha256``: file -> hash of what was written."""
        ...

    def compare(self, opened: Opened, tokens: NDArray[np.int64], seen: Any) -> list[ParityCase]:
        """Run its engines on ``tokens`` against ``seen``, the result of ``reference``."""
        ...


def engine_spec(
    role: Role,
    name: str,
    settings: Settings,
    *,
    hidden_size: int,
    vocab_size: int,
    kv: tuple[KvLayer, ...],
    all_hidden: bool = False,
    max_context: int | None = None,
    **contract: Any,
) -> EngineSpec:
    """The manifest's entry of the engine ``name``, with the inputs and outputs of the contract.

    ``max_context``: if it has its own. ``contract``: the fields of EngineSpec that belong to one
    role only.
    """
    from specgraphs import dialect, ops

    versions = (ops.OPSET, ops.IR_VERSION)
    if settings.tensorrt:
        versions = (dialect.OPSET, dialect.IR_VERSION)

    spec = EngineSpec(
        role=role,
        file=file_name(name),
        backend="onnxruntime",
        precision=settings.of_engine(name),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        kv_dtype=KV_DTYPE[settings.dtype],
        kv=kv,
        all_hidden=all_hidden,
        inputs=(),
        outputs=(),
        requires=Requires(MIN_ONNXRUNTIME, *versions),
        step_bytes=0,
        weights=None,
        fixed=settings.fixed(role, max_context),
        **contract,
    )
    inputs, outputs = expected_io(spec)
    return replace(spec, inputs=inputs, outputs=outputs)


def file_name(engine: str) -> str:
    """The file of an engine, by its name."""
    return f"{engine}.onnx"
