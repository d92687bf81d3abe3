"""The manifest of an engine folder: what is in it, how its engines are called, what was checked.

Written once by the exporter, read strictly here, before any engine is opened: an unknown field,
a newer format, a missing or changed file or a drafter of another target is refused with file,
field and hint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specrun import contract, defaults, limits, reading
from specrun.contract import (
    BACK_ENGINE,
    FRONT_ENGINE,
    HEAD_ENGINE,
    TARGET_ENGINE,
    DType,
    FixedSizes,
    KvLayer,
    Role,
    SplitContract,
    TensorSpec,
)
from specrun.decode import DecodeError, decode, encode
from specrun.errors import FolderError, UsageError
from specrun.options import ScheduleName
from specrun.plans import PlanSpec, build_hint
from specrun.reading import ReadingError, leads_inside, parse_json, shown
from specrun.response_format import ResponseFormat

FORMAT = 5
MANIFEST = "manifest.json"
HASH_ALWAYS_BELOW = 64 << 20  # bytes; larger files are hashed by integrity="full" only
REEXPORT = "export the folder again with specexport"

# Methods that need something in the folder; plain decoding and prompt lookup need the target only.
DraftMethod = Literal["mtp-drafter", "mtp", "draft", "early-exit", "universal"]


@dataclass(frozen=True)
class Source:
    """Where a model came from: hub id or folder name, its revision, and what it is.

    ``fingerprint``: what tells its weights from others, None where that was not taken.
    """

    id: str
    revision: str | None
    model_type: str
    architecture: str
    fingerprint: str | None = None


@dataclass(frozen=True)
class TokenizerSpec:
    """The tokenizer file and what must agree between a target and its drafter.

    ``response``: how the checkpoint marks the parts of an answer, None where that is not known.
    """

    file: str
    sha256: str
    vocab_size: int
    add_bos: bool
    chat_template: str | None
    special_tokens: dict[str, str]
    response: ResponseFormat | None = None

    def __post_init__(self) -> None:
        limits.check_within("vocab_size", self.vocab_size, 1, limits.MAX_VOCABULARY)
        limits.check_sha256("sha256", self.sha256)


@dataclass(frozen=True)
class Generation:
    """Ids and defaults of generation, as the checkpoint gives them. Lengths in tokens."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    max_context: int
    defaults: dict[str, Any]

    def __post_init__(self) -> None:
        limits.check_within("max_context", self.max_context, 2, limits.MAX_CONTEXT)


@dataclass(frozen=True)
class Requires:
    """The least that must be installed to run an engine."""

    onnxruntime: str
    opset: int
    ir_version: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d{1,4}(\.\d{1,4}){0,3}", self.onnxruntime):
            raise ValueError(f"onnxruntime must be a version, got {shown(self.onnxruntime)}")


@dataclass(frozen=True)
class MtpContract:
    """How a Gemma 4 assistant is fed, taken from the reference code of its family.

    ``kv_map``: attention type -> target layer whose KV buffers it reads. ``windows``: rows that a
    sliding layer sees before the token itself (the assistant adds none to the KV).
    ``candidates``: the most likely tokens of a step, of which one is drawn.
    """

    concat_order: tuple[Literal["embedding", "hidden"], ...]
    position: Literal["past_length"]
    hidden_row: Literal["last_committed_kv_row"]
    kv_map: dict[str, int]
    windows: dict[str, int | None]
    head: Literal["plain", "centroid"]
    candidates: int

    def __post_init__(self) -> None:
        limits.check_within("candidates", self.candidates, 1, limits.MAX_CANDIDATES)


@dataclass(frozen=True)
class MtpLayerContract:
    """How one MTP layer of the target's checkpoint is fed, taken from the reference code.

    ``layer``: counted from 0. ``hidden``: whose hidden rows it gets. ``position``: of the token of
    a row. ``reapply``: its own state may be fed back to it, for more drafts than layers.
    """

    layer: int
    num_layers: int
    concat_order: tuple[Literal["embedding", "hidden"], ...]
    hidden: Literal["target_after_norm", "previous_layer"]
    position: Literal["row + 1 + layer"]
    reapply: bool

    def __post_init__(self) -> None:
        limits.check_within("num_layers", self.num_layers, 1, limits.MAX_LAYERS)
        if not 0 <= self.layer < self.num_layers:
            raise ValueError(f"layer must be in 0..{self.num_layers - 1}, got {self.layer}")
        if (self.layer == 0) != (self.hidden == "target_after_norm"):
            raise ValueError(f"layer {self.layer} cannot be fed the hidden rows of {self.hidden}")


Io = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
Backend = Literal["onnxruntime", "torch"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "w8a8", "int4"]


@dataclass(frozen=True)
class WeightFormats:
    """How the weights of an engine are stored, where its precision is one of integers.

    ``block_size``: columns that share a scale. ``accuracy_level``: of MatMulNBits. ``head``,
    ``embedding``: their own precision. ``kept_float``: names of linear layers that stay floats;
    ``kept_int8``: of those of int4 that have 8 bits.
    ``two_terms``: of those whose activations have 8 bits twice; ``smoothing``: name -> its strength
    (SmoothQuant's alpha); ``errors``: name -> relative error of the output on the calibration text;
    ``rotated``: of those whose activations are rotated, see ``specgraphs.rotation``.
    """

    block_size: int
    accuracy_level: int
    head: Precision
    embedding: Precision
    kept_float: tuple[str, ...]
    kept_int8: tuple[str, ...]
    two_terms: tuple[str, ...]
    smoothing: dict[str, float]
    errors: dict[str, float]
    rotated: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineSpec:
    """One engine: its file, how it is run and every tensor that crosses its border.

    ``all_hidden``: the hidden state of every row is returned, not of the wanted rows only.
    ``backend``: ``torch``: PyTorch runs it from the checkpoint, so that ``file`` is empty.
    ``step_bytes``: bytes of weights that a run of one row reads. ``exact_rows``: most rows of a run
    whose bits do not depend on the rows beside them, None for any number; see :mod:`specrun.exact`.
    ``fixed``: of an engine in the dialect of TensorRT, None in that of ONNX Runtime; its ``file``
    has the tensors of ``file_io``, what the loop sees is ``inputs`` and ``outputs`` all the same.
    ``plans``: what TensorRT built of it.
    """

    role: Role
    file: str
    backend: Backend
    precision: Precision
    hidden_size: int
    vocab_size: int
    kv_dtype: DType
    kv: tuple[KvLayer, ...]
    all_hidden: bool
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    requires: Requires
    step_bytes: int
    weights: WeightFormats | None
    mtp: MtpContract | None = None
    mtp_layer: MtpLayerContract | None = None
    split: SplitContract | None = None
    exact_rows: int | None = None
    fixed: FixedSizes | None = None
    plans: tuple[PlanSpec, ...] = ()

    def __post_init__(self) -> None:
        if (self.backend == "torch") != (not self.file):
            raise ValueError(f"file: is empty with backend torch only, got {self.file!r}")
        if self.plans and self.fixed is None:
            raise ValueError("plans: only an engine of fixed sizes has any")
        kinds = [(plan.flavour, plan.version, plan.compute_capability) for plan in self.plans]
        if len(set(kinds)) != len(kinds):
            raise ValueError("plans: there must be one for each TensorRT and compute capability")
        limits.check_all(
            vars(self) | {"kv_bytes_per_token": self.kv_bytes_per_token},
            {
                "hidden_size": (1, limits.MAX_HIDDEN_SIZE),
                "vocab_size": (1, limits.MAX_VOCABULARY),
                "kv_bytes_per_token": (0, limits.MAX_KV_BYTES),
                "step_bytes": (0, limits.MAX_BYTES),
                "exact_rows": (1, limits.MAX_CONTEXT),
            },
        )

    @property
    def file_io(self) -> Io:
        """Inputs and outputs as the file has them."""
        if self.fixed is None:
            return self.inputs, self.outputs
        inputs = (self.fixed.tensor(spec) for spec in self.inputs)
        outputs = (self.fixed.tensor(spec) for spec in self.outputs)
        return (
            tuple(spec for spec in inputs if spec is not None),
            tuple(spec for spec in outputs if spec is not None),
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token of one sequence that this engine's buffers take."""
        return contract.kv_bytes_per_token(self.kv, self.kv_dtype)


@dataclass(frozen=True)
class DrafterSpec:
    """What a drafting method needs and how it starts; the key in the manifest is the method.

    ``source``: None where the drafter is part of the target's own checkpoint. ``engines``: names
    of those it runs beside the target's. ``max_num_draft``: most tokens of one proposal, None for
    any number. ``max_context``: tokens that the drafter can follow, None for the target's.
    ``target_sha256``, ``tokenizer_sha256``: the target and the target's tokenizer that it was
    exported for. ``tokenizer``: the drafter's own, None if it is the target's up to padding.
    """

    source: Source | None
    engines: tuple[str, ...]
    max_num_draft: int | None
    num_assistant_tokens: int
    schedule: ScheduleName
    target_sha256: str
    tokenizer_sha256: str
    max_context: int | None = None
    tokenizer: TokenizerSpec | None = None

    def __post_init__(self) -> None:
        for name in ("target_sha256", "tokenizer_sha256"):
            limits.check_sha256(name, getattr(self, name))
        limits.check_within("max_num_draft", self.max_num_draft, 1, limits.MAX_DRAFTS)
        limits.check_within("max_context", self.max_context, 2, limits.MAX_CONTEXT)
        most = self.max_num_draft
        least = "at least 1" if most is None else f"in 1..{most}"
        if self.num_assistant_tokens < 1 or (most or self.num_assistant_tokens) < (
            self.num_assistant_tokens
        ):
            raise ValueError(
                f"num_assistant_tokens must be {least}, got {self.num_assistant_tokens}"
            )


@dataclass(frozen=True)
class FileEntry:
    """One file of the folder, by its path inside it. Size in bytes."""

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        limits.check_path(self.path)
        limits.check_within("size", self.size, 0, limits.MAX_BYTES)
        limits.check_sha256("sha256", self.sha256)


@dataclass(frozen=True)
class ParityCase:
    """One comparison with transformers. ``error``: largest difference over largest reference."""

    engine: str
    tensor: str
    past_length: int
    rows: int
    error: float
    argmax_agreement: float


@dataclass(frozen=True)
class ParityReport:
    """What the exporter compared, how, and the worst it saw; ``scope`` says what was covered.

    ``width_noise``: largest change of the lead of the best logit over the second when the same rows
    are computed in blocks of another width: where the lead is smaller, the two may change places.
    """

    scope: str
    tolerance: float
    worst_error: float
    worst_tensor: str
    argmax_agreement: float
    width_noise: float
    cases: tuple[ParityCase, ...]


@dataclass(frozen=True)
class QualityReport:
    """What the target lost against fp32, on a text that comes with the exporter.

    ``tokens``: predicted ones. ``reference_perplexity``: of transformers in fp32.
    ``argmax_agreement``: share of positions with the same most probable token. ``scope``: how the
    reference was run.
    """

    text: str
    scope: str
    tokens: int
    reference_perplexity: float
    perplexity: float
    argmax_agreement: float

    def __post_init__(self) -> None:
        if self.reference_perplexity <= 0:
            raise ValueError(
                f"reference_perplexity must be above 0, got {self.reference_perplexity}"
            )

    @property
    def loss(self) -> float:
        """How much larger the perplexity is, as a share."""
        return self.perplexity / self.reference_perplexity - 1


@dataclass(frozen=True)
class Manifest:
    """Everything about an engine folder. ``drafters``: method -> what drafts by it. ``notes``: why
    the exporter chose what it was left to choose."""

    format: int
    target: Source
    drafters: dict[DraftMethod, DrafterSpec]
    tokenizer: TokenizerSpec
    generation: Generation
    engines: dict[str, EngineSpec]
    files: tuple[FileEntry, ...]
    versions: dict[str, str]
    parity: ParityReport | None
    quality: QualityReport | None
    notes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not {TARGET_ENGINE, FRONT_ENGINE} & self.engines.keys():
            raise DecodeError("engines: field 'target' is missing")
        self._check_files()
        listed = {entry.path for entry in self.files}
        tokenizers = [self.tokenizer, *(d.tokenizer for d in self.drafters.values() if d.tokenizer)]
        wanted = {engine.file for engine in self.engines.values() if engine.backend != "torch"}
        wanted |= {spec.file for spec in tokenizers}
        wanted |= {plan.file for engine in self.engines.values() for plan in engine.plans}
        wanted |= {spec.chat_template for spec in tokenizers if spec.chat_template is not None}
        if missing := sorted(wanted - listed):
            raise DecodeError(f"files: {missing[0]!r} is used and not listed")
        for spec in tokenizers:
            if self._entry(spec.file).size > limits.MAX_TOKENIZER_BYTES:
                raise DecodeError(
                    f"files: {spec.file!r} must have at most {limits.MAX_TOKENIZER_BYTES} bytes"
                )
            if self._sha256(spec.file) != spec.sha256:
                raise DecodeError(f"tokenizer.sha256: is not that of {spec.file}")
        for name, engine in self.engines.items():
            _check_engine(name, engine)
            self._check_plans(name, engine)
        self._check_parts()
        self._check_ids()
        for method, drafter in self.drafters.items():
            self._check_drafter(method, drafter)

    @property
    def target_engine(self) -> EngineSpec:
        """The target; of a target in parts the last one, which has vocabulary and hidden size."""
        whole = self.engines.get(TARGET_ENGINE)
        return whole if whole is not None else self.engines[HEAD_ENGINE]

    @property
    def target_sha256(self) -> str:
        """What a drafter is bound to: the hash of the target's first graph, or where it has none,
        the fingerprint of its weights."""
        first = self.engines.get(TARGET_ENGINE) or self.engines[FRONT_ENGINE]
        if first.backend == "torch":
            return self.target.fingerprint or ""
        return self._sha256(first.file)

    @property
    def has_target_engine(self) -> bool:
        """Whether the folder has engines of the target; otherwise PyTorch verifies."""
        return self.target_engine.backend != "torch"

    @property
    def target_kv(self) -> tuple[KvLayer, ...]:
        """The KV buffers of all layers of the target, in layer order."""
        parts = (self.engines.get(name) for name in (TARGET_ENGINE, FRONT_ENGINE, BACK_ENGINE))
        return tuple(kv for part in parts if part is not None for kv in part.kv)

    @property
    def plans(self) -> dict[str, PlanSpec]:
        """Every plan by its file."""
        return {plan.file: plan for engine in self.engines.values() for plan in engine.plans}

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file of the folder by its path in it."""
        return {entry.path: entry.size for entry in self.files}

    def _check_parts(self) -> None:
        """A target in parts has all of them, cut at the same place."""
        front = self.engines.get(FRONT_ENGINE)
        if front is None:
            return
        names = [FRONT_ENGINE, HEAD_ENGINE]
        if front.split is not None and front.split.has_back:
            names.append(BACK_ENGINE)
        for name in names:
            if name not in self.engines:
                raise DecodeError(f"engines: field {name!r} is missing")
            part = self.engines[name]
            if part.split != front.split:
                raise DecodeError(f"engines.{name}.split: must be that of the front")
            for field in ("hidden_size", "vocab_size", "kv_dtype"):
                if getattr(part, field) != getattr(front, field):
                    raise DecodeError(f"engines.{name}.{field}: must be that of the front")
        if BACK_ENGINE in self.engines and BACK_ENGINE not in names:
            raise DecodeError("engines.back: the front has all layers, so there must be none")
        if front.split is not None and not set(front.split.reads) <= set(front.kv):
            raise DecodeError("engines.front.split.reads: must be buffers of the front")

    def _check_plans(self, name: str, engine: EngineSpec) -> None:
        """A plan's size and hash are those of its file, which are what is compared."""
        for index, plan in enumerate(engine.plans):
            entry = self._entry(plan.file)
            if (plan.size, plan.sha256) != (entry.size, entry.sha256):
                raise DecodeError(
                    f"engines.{name}.plans[{index}]: size and sha256 are not those of {plan.file}"
                )

    def _check_ids(self) -> None:
        """Special ids are tokens of the target or its tokenizer, which may be padded apart."""
        vocab = max(self.target_engine.vocab_size, self.tokenizer.vocab_size)
        given = self.generation
        ids: list[tuple[str, int | None]] = [("eos_token_ids", i) for i in given.eos_token_ids]
        ids += [("bos_token_id", given.bos_token_id), ("pad_token_id", given.pad_token_id)]
        for name, value in ids:
            if value is not None and not 0 <= value < vocab:
                raise DecodeError(f"generation.{name}: must be in 0..{vocab - 1}, got {value}")
        try:
            defaults.check(given.defaults, vocab)
        except UsageError as error:
            raise DecodeError(f"generation.defaults.{error}") from error

    def _check_drafter(self, method: str, drafter: DrafterSpec) -> None:
        """Its engines are there and made for this target."""
        where = f"drafters.{method}"
        if (drafter.tokenizer is not None) != (method == "universal"):
            raise DecodeError(f"{where}.tokenizer: only a universal drafter has one, and needs it")
        if method == "early-exit" and FRONT_ENGINE not in self.engines:
            raise DecodeError(f"{where}: needs a target in parts, the folder has a whole one")
        if method in ("mtp-drafter", "draft", "universal") and len(drafter.engines) != 1:
            raise DecodeError(f"{where}.engines: must be one engine, got {list(drafter.engines)}")
        if method == "mtp" and not drafter.engines:
            raise DecodeError(f"{where}.engines: must be the engine of every MTP layer, got []")
        if missing := sorted(set(drafter.engines) - self.engines.keys()):
            raise DecodeError(f"{where}.engines: {missing[0]!r} is not among the engines")
        if drafter.target_sha256 != self.target_sha256:
            raise DecodeError(
                f"{where}.target_sha256: this drafter was exported for target"
                f" {drafter.target_sha256[:12]}, the folder holds {self.target_sha256[:12]}"
            )
        if drafter.tokenizer_sha256 != self.tokenizer.sha256:
            raise DecodeError(
                f"{where}.tokenizer_sha256: this drafter was exported for tokenizer"
                f" {drafter.tokenizer_sha256[:12]}, the folder has {self.tokenizer.sha256[:12]}"
            )
        for name in drafter.engines:
            engine = self.engines[name]
            if (role := _ROLES.get(method)) is not None and engine.role is not role:
                raise DecodeError(f"{where}.engines: {name!r} is a {engine.role}, must be a {role}")
            if engine.role is Role.MTP_DRAFTER:
                self._check_mtp_drafter(name, engine)
            elif engine.role is Role.MTP_LAYER:
                self._check_mtp_layer(name, engine, drafter)

    def _check_hidden_size(self, name: str, engine: EngineSpec) -> None:
        """A drafter that reads the target's hidden states has its width."""
        target = self.target_engine
        if engine.hidden_size != target.hidden_size:
            raise DecodeError(
                f"engines.{name}.hidden_size: must be the target's {target.hidden_size},"
                f" got {engine.hidden_size}"
            )

    def _check_mtp_layer(self, name: str, engine: EngineSpec, drafter: DrafterSpec) -> None:
        """The layers stand in their order, all of them, and have the target's widths."""
        layer = engine.mtp_layer
        if layer is None:
            raise DecodeError(f"engines.{name}: field 'mtp_layer' is missing")
        self._check_hidden_size(name, engine)
        if engine.vocab_size != self.target_engine.vocab_size:
            raise DecodeError(f"engines.{name}.vocab_size: must be the target's")
        if engine.kv_dtype != self.target_engine.kv_dtype:
            raise DecodeError(f"engines.{name}.kv_dtype: must be the target's")
        if len(drafter.engines) != layer.num_layers or drafter.engines.index(name) != layer.layer:
            raise DecodeError(f"engines.{name}.mtp_layer: is not its place among the drafter's")

    def _check_mtp_drafter(self, name: str, drafter: EngineSpec) -> None:
        """The drafter's declared KV and hidden width must be those of this target."""
        where = f"engines.{name}"
        if drafter.mtp is None:
            raise DecodeError(f"{where}: field 'mtp' is missing")
        self._check_hidden_size(name, drafter)
        owned = {kv.layer: kv for kv in self.target_kv}
        for kv in drafter.kv:
            if kv != owned.get(kv.layer) or drafter.kv_dtype != self.target_engine.kv_dtype:
                raise DecodeError(f"{where}.kv: layer {kv.layer} is not the target's buffer")
        if {kv.layer for kv in drafter.kv} != set(drafter.mtp.kv_map.values()):
            raise DecodeError(f"{where}.mtp.kv_map: must name the layers in kv")

    def _check_files(self) -> None:
        """Every name once, also on disks that do not tell upper from lower case."""
        seen: dict[str, str] = {}
        for entry in self.files:
            other = seen.setdefault(entry.path.casefold(), entry.path)
            if other is not entry.path:
                raise DecodeError(f"files: {entry.path!r} and {other!r} are the same name")

    def _entry(self, path: str) -> FileEntry:
        return next(entry for entry in self.files if entry.path == path)

    def _sha256(self, path: str) -> str:
        return self._entry(path).sha256


_ROLES = {
    "mtp-drafter": Role.MTP_DRAFTER,
    "mtp": Role.MTP_LAYER,
    "draft": Role.TARGET,
    "universal": Role.TARGET,
}


def expected_io(engine: EngineSpec) -> Io:
    """Inputs and outputs that the contract asks of an engine with these properties."""
    return _IO[engine.role](engine)


def _target_io(engine: EngineSpec) -> Io:
    return (
        contract.target_inputs(engine.kv, engine.kv_dtype),
        contract.target_outputs(
            engine.kv,
            engine.kv_dtype,
            engine.vocab_size,
            engine.hidden_size,
            all_hidden=engine.all_hidden,
        ),
    )


def _mtp_drafter_io(engine: EngineSpec) -> Io:
    if engine.mtp is None:
        raise DecodeError(f"engine {engine.file}: field 'mtp' is missing")
    candidates = engine.mtp.candidates
    return (
        contract.mtp_drafter_inputs(engine.kv, engine.kv_dtype, engine.hidden_size, candidates),
        contract.mtp_drafter_outputs(candidates),
    )


def _mtp_layer_io(engine: EngineSpec) -> Io:
    return (
        contract.mtp_layer_inputs(engine.kv, engine.kv_dtype, engine.hidden_size),
        contract.mtp_layer_outputs(
            engine.kv, engine.kv_dtype, engine.vocab_size, engine.hidden_size
        ),
    )


def _split(engine: EngineSpec) -> SplitContract:
    if engine.split is None:
        raise DecodeError(f"engine {engine.file}: field 'split' is missing")
    return engine.split


def _front_io(engine: EngineSpec) -> Io:
    split = _split(engine)
    return (
        contract.front_inputs(engine.kv, engine.kv_dtype, split),
        contract.front_outputs(engine.kv, engine.kv_dtype, engine.hidden_size, split),
    )


def _back_io(engine: EngineSpec) -> Io:
    split = _split(engine)
    return (
        contract.back_inputs(engine.kv, engine.kv_dtype, engine.hidden_size, split),
        contract.back_outputs(engine.kv, engine.kv_dtype, engine.hidden_size, split),
    )


def _head_io(engine: EngineSpec) -> Io:
    return (
        contract.head_inputs(engine.kv_dtype, engine.hidden_size),
        contract.head_outputs(engine.kv_dtype, engine.vocab_size, engine.hidden_size),
    )


_IO: dict[Role, Callable[[EngineSpec], Io]] = {
    Role.TARGET: _target_io,
    Role.MTP_DRAFTER: _mtp_drafter_io,
    Role.MTP_LAYER: _mtp_layer_io,
    Role.FRONT: _front_io,
    Role.BACK: _back_io,
    Role.HEAD: _head_io,
}


def _check_engine(name: str, engine: EngineSpec) -> None:
    if engine.role not in _IO:
        raise DecodeError(f"engines.{name}.role: {engine.role.value!r} cannot be run")
    if engine.backend == "torch" and name != TARGET_ENGINE:
        raise DecodeError(f"engines.{name}.backend: PyTorch runs the whole target only")
    layers = [kv.layer for kv in engine.kv]
    if len(set(layers)) != len(layers):
        raise DecodeError(f"engines.{name}.kv: every layer must come once, got {shown(layers)}")
    if not layers and engine.role not in (Role.BACK, Role.HEAD):
        raise DecodeError(f"engines.{name}.kv: must hold a layer, got []")
    inputs, outputs = expected_io(engine)
    for what, wanted, got in (
        ("inputs", inputs, engine.inputs),
        ("outputs", outputs, engine.outputs),
    ):
        for want in wanted:
            if want not in got:
                raise DecodeError(f"engines.{name}.{what}: must hold {want}")
        if len(got) != len(wanted):
            extra = sorted({spec.name for spec in got} - {spec.name for spec in wanted})
            raise DecodeError(f"engines.{name}.{what}: not in the contract: {extra}")


def dumps(manifest: Manifest) -> str:
    """The manifest as JSON text, the same bytes for the same manifest."""
    return json.dumps(encode(manifest), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def loads(text: str, name: str = MANIFEST) -> Manifest:
    """Parse and check a manifest. Raises FolderError naming ``name`` and the field."""
    try:
        data = parse_json(text)
    except ReadingError as error:
        raise FolderError(f"{name}: {error}", hint=REEXPORT) from error
    version = data.get("format") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise FolderError(
            f"{name}: format: this specrun reads up to {FORMAT}, got {version}",
            hint="upgrade specrun",
        )
    if version != FORMAT:
        raise FolderError(f"{name}: format: must be {FORMAT}, got {shown(version)}", hint=REEXPORT)
    try:
        return decode(Manifest, data)
    except DecodeError as error:
        raise FolderError(f"{name}: {error}", hint=REEXPORT) from error


def read(
    folder: Path,
    *,
    integrity: Literal["quick", "full"] = "quick",
    drafters_may_miss: bool = False,
    check_plans: bool = True,
) -> Manifest:
    """Read and verify the manifest of an engine folder.

    ``integrity="quick"`` checks the size of every file and the sha256 of those under 64 MiB;
    ``"full"`` hashes every file. With ``drafters_may_miss`` files of drafting engines may be
    absent (their use is an error then), but not others than listed. Without ``check_plans`` plans
    are not looked at, as whoever builds them anew does. Raises FolderError.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise FolderError(f"{folder}: no such folder", hint="give the folder specexport wrote")
    if not path.exists():
        raise FolderError(
            f"{folder}: no {MANIFEST} in it", hint="give the folder that specexport --out wrote"
        )
    text = read_listed(path, limits.MAX_MANIFEST_BYTES, folder)
    manifest = loads(text, str(path))
    optional = _of_drafters(manifest) if drafters_may_miss else set()
    plans = manifest.plans
    for entry in manifest.files:
        plan = plans.get(entry.path)
        if entry.path in optional and not os.path.lexists(folder / entry.path):
            continue
        if plan is None:
            _check_file(folder, entry, integrity, REEXPORT)
        elif check_plans:
            _check_file(
                folder, entry, integrity, build_hint(folder, plan.flavour, plan.compute_capability)
            )
    return manifest


def _of_drafters(manifest: Manifest) -> set[str]:
    """Graphs and plans that only drafting needs."""
    names = {name for drafter in manifest.drafters.values() for name in drafter.engines}
    specs = [manifest.engines[name] for name in names]
    return {spec.file for spec in specs} | {plan.file for spec in specs for plan in spec.plans}


def read_listed(path: Path, limit: int, folder: Path) -> str:
    """The text of a small file of the engine ``folder``. Raises FolderError."""
    try:
        return reading.read_text(path, limit, inside=folder)
    except ReadingError as error:
        raise FolderError(f"{path}: {error}", hint=REEXPORT) from error
    except OSError as error:
        raise FolderError(f"{path}: cannot be read: {error.strerror}", hint=REEXPORT) from error


def _check_file(folder: Path, entry: FileEntry, integrity: str, hint: str) -> None:
    """Raise FolderError with the way out, ``hint``, unless the file is the one that is listed."""
    path = folder / entry.path
    if not os.path.lexists(path):
        raise FolderError(f"{path}: the manifest lists it, it is missing", hint=hint)
    if not leads_inside(path, folder):
        raise FolderError(f"{path}: leads out of the engine folder", hint=hint)
    if not path.is_file():
        raise FolderError(f"{path}: is no regular file", hint=hint)
    size = path.stat().st_size
    if size != entry.size:
        raise FolderError(f"{path}: must have {entry.size} bytes, has {size}", hint=hint)
    if integrity == "quick" and size >= HASH_ALWAYS_BELOW:
        return
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise FolderError(f"{path}: cannot be read: {error.strerror}", hint=hint) from error
    if digest != entry.sha256:
        raise FolderError(
            f"{path}: changed since the export: sha256 must be {entry.sha256[:12]}…,"
            f" is {digest[:12]}…",
            hint=hint,
        )


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
