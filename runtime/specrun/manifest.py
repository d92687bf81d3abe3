"""The manifest of an engine folder: what is in it, how its engines are called, what was checked.

Written once by the exporter, read strictly here, before any engine is opened: an unknown field,
a newer format, a missing or changed file or a drafter of another target is refused with file,
field and hint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from specrun import contract
from specrun.contract import DType, KvLayer, Role, TensorSpec
from specrun.decode import DecodeError, decode, encode
from specrun.errors import FolderError

FORMAT = 1
MANIFEST = "manifest.json"
HASH_ALWAYS_BELOW = 64 << 20  # bytes; larger files are hashed by verify="full" only
REEXPORT = "export the folder again with specexport"


@dataclass(frozen=True)
class Source:
    """Where a model came from: hub id or folder name, its revision, and what it is."""

    id: str
    revision: str | None
    model_type: str
    architecture: str


@dataclass(frozen=True)
class TokenizerSpec:
    """The tokenizer file and what must agree between a target and its drafter."""

    file: str
    sha256: str
    vocab_size: int
    add_bos: bool
    chat_template: str | None
    special_tokens: dict[str, str]

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {self.vocab_size}")


@dataclass(frozen=True)
class Generation:
    """Ids and defaults of generation, as the checkpoint gives them. Lengths in tokens."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    max_context: int
    defaults: dict[str, Any]

    def __post_init__(self) -> None:
        if self.max_context < 2:
            raise ValueError(f"max_context must be at least 2, got {self.max_context}")


@dataclass(frozen=True)
class Requires:
    """The least that must be installed to run an engine."""

    onnxruntime: str
    opset: int
    ir_version: int


@dataclass(frozen=True)
class MtpContract:
    """How a Gemma 4 assistant is fed, taken from the reference code of its family.

    ``kv_map``: attention type -> target layer whose KV buffers it reads. ``windows``: rows that a
    sliding layer sees before the token itself (the assistant adds none to the KV).
    """

    concat_order: tuple[Literal["embedding", "hidden"], ...]
    position: Literal["past_length"]
    hidden_row: Literal["last_committed_kv_row"]
    kv_map: dict[str, int]
    windows: dict[str, int | None]
    head: Literal["plain", "centroid"]
    candidates: int
    max_num_draft: int
    num_assistant_tokens: int
    schedule: Literal["constant", "heuristic"]
    target_sha256: str

    def __post_init__(self) -> None:
        if not 1 <= self.num_assistant_tokens <= self.max_num_draft:
            raise ValueError(
                f"num_assistant_tokens must be in 1..{self.max_num_draft},"
                f" got {self.num_assistant_tokens}"
            )


@dataclass(frozen=True)
class EngineSpec:
    """One engine: its file, how it is run and every tensor that crosses its border."""

    file: str
    backend: Literal["onnxruntime"]
    precision: Literal["fp32", "fp16"]
    hidden_size: int
    vocab_size: int
    kv_dtype: DType
    kv: tuple[KvLayer, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    requires: Requires
    mtp: MtpContract | None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token of one sequence that this engine's buffers take."""
        return contract.kv_bytes_per_token(self.kv, self.kv_dtype)


@dataclass(frozen=True)
class FileEntry:
    """One file of the folder, by its path inside it. Size in bytes."""

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or "\\" in self.path or not path.parts:
            raise ValueError(f"path must stay inside the folder, got {self.path!r}")


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
    """What the exporter compared, how, and the worst it saw; ``scope`` says what was covered."""

    scope: str
    tolerance: float
    worst_error: float
    worst_tensor: str
    argmax_agreement: float
    cases: tuple[ParityCase, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about an engine folder."""

    format: int
    target: Source
    drafter: Source | None
    tokenizer: TokenizerSpec
    generation: Generation
    engines: dict[Role, EngineSpec]
    files: tuple[FileEntry, ...]
    versions: dict[str, str]
    parity: ParityReport | None

    def __post_init__(self) -> None:
        if Role.TARGET not in self.engines:
            raise DecodeError("engines: field 'target' is missing")
        listed = {entry.path for entry in self.files}
        wanted = {engine.file for engine in self.engines.values()} | {self.tokenizer.file}
        if self.tokenizer.chat_template is not None:
            wanted.add(self.tokenizer.chat_template)
        if missing := sorted(wanted - listed):
            raise DecodeError(f"files: {missing[0]!r} is used and not listed")
        for role, engine in self.engines.items():
            _check_engine(role, engine)
        self._check_ids()
        self._check_pair()

    def _check_ids(self) -> None:
        """Special ids are tokens of the target or its tokenizer, which may be padded apart."""
        vocab = max(self.engines[Role.TARGET].vocab_size, self.tokenizer.vocab_size)
        given = self.generation
        ids: list[tuple[str, int | None]] = [("eos_token_ids", i) for i in given.eos_token_ids]
        ids += [("bos_token_id", given.bos_token_id), ("pad_token_id", given.pad_token_id)]
        for name, value in ids:
            if value is not None and not 0 <= value < vocab:
                raise DecodeError(f"generation.{name}: must be in 0..{vocab - 1}, got {value}")
        if self._sha256(self.tokenizer.file) != self.tokenizer.sha256:
            raise DecodeError("tokenizer.sha256: is not that of the file")

    def _check_pair(self) -> None:
        """The drafter's declared KV, hidden width and target must be those of this target."""
        drafter = self.engines.get(Role.MTP_DRAFTER)
        if drafter is None:
            return
        target = self.engines[Role.TARGET]
        where = "engines.mtp_drafter"
        if drafter.mtp is None:
            raise DecodeError(f"{where}: field 'mtp' is missing")
        if drafter.mtp.target_sha256 != self._sha256(target.file):
            raise DecodeError(
                f"{where}.mtp.target_sha256: this drafter was exported for target"
                f" {drafter.mtp.target_sha256[:12]}, the folder holds"
                f" {self._sha256(target.file)[:12]}"
            )
        if drafter.hidden_size != target.hidden_size:
            raise DecodeError(
                f"{where}.hidden_size: must be the target's {target.hidden_size},"
                f" got {drafter.hidden_size}"
            )
        owned = {kv.layer: kv for kv in target.kv}
        for kv in drafter.kv:
            if kv != owned.get(kv.layer) or drafter.kv_dtype != target.kv_dtype:
                raise DecodeError(f"{where}.kv: layer {kv.layer} is not the target's buffer")
        if {kv.layer for kv in drafter.kv} != set(drafter.mtp.kv_map.values()):
            raise DecodeError(f"{where}.mtp.kv_map: must name the layers in kv")

    def _sha256(self, path: str) -> str:
        return next(entry.sha256 for entry in self.files if entry.path == path)


def expected_io(
    role: Role, engine: EngineSpec
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs that the contract asks of an engine with these properties."""
    if role is Role.TARGET:
        return (
            contract.target_inputs(engine.kv, engine.kv_dtype),
            contract.target_outputs(
                engine.kv, engine.kv_dtype, engine.vocab_size, engine.hidden_size
            ),
        )
    if engine.mtp is None:
        raise DecodeError(f"engines.{role.value}: field 'mtp' is missing")
    sparse = engine.mtp.head == "centroid"
    return (
        contract.mtp_drafter_inputs(engine.kv, engine.kv_dtype, engine.hidden_size),
        contract.mtp_drafter_outputs(engine.mtp.candidates, sparse),
    )


def _check_engine(role: Role, engine: EngineSpec) -> None:
    inputs, outputs = expected_io(role, engine)
    for name, wanted, got in (
        ("inputs", inputs, engine.inputs),
        ("outputs", outputs, engine.outputs),
    ):
        for want in wanted:
            if want not in got:
                raise DecodeError(f"engines.{role.value}.{name}: must hold {want}")
        if len(got) != len(wanted):
            extra = sorted({spec.name for spec in got} - {spec.name for spec in wanted})
            raise DecodeError(f"engines.{role.value}.{name}: not in the contract: {extra}")


def dumps(manifest: Manifest) -> str:
    """The manifest as JSON text, the same bytes for the same manifest."""
    return json.dumps(encode(manifest), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def loads(text: str, name: str = MANIFEST) -> Manifest:
    """Parse and check a manifest. Raises FolderError naming ``name`` and the field."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{name}: not JSON: {error}", hint=REEXPORT) from error
    version = data.get("format") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise FolderError(
            f"{name}: format: this specrun reads up to {FORMAT}, got {version}",
            hint="upgrade specrun",
        )
    if version != FORMAT:
        raise FolderError(f"{name}: format: must be {FORMAT}, got {version!r}", hint=REEXPORT)
    try:
        return decode(Manifest, data)
    except DecodeError as error:
        raise FolderError(f"{name}: {error}", hint=REEXPORT) from error


def read(
    folder: Path,
    *,
    verify: Literal["quick", "full"] = "quick",
    may_miss: Collection[Role] = (),
) -> Manifest:
    """Read and verify the manifest of an engine folder.

    ``verify="quick"`` checks the size of every file and the sha256 of those under 64 MiB;
    ``"full"`` hashes every file. The engine file of a role in ``may_miss`` may be absent (its
    use is an error then), but not another one than listed. Raises FolderError.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise FolderError(f"{folder}: no such folder", hint="give the folder specexport wrote")
    if not path.is_file():
        raise FolderError(
            f"{folder}: no {MANIFEST} in it", hint="give the folder that specexport --out wrote"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FolderError(f"{path}: not UTF-8 text: {error}", hint=REEXPORT) from error
    manifest = loads(text, str(path))
    optional = {engine.file for role, engine in manifest.engines.items() if role in may_miss}
    for entry in manifest.files:
        if entry.path in optional and not (folder / entry.path).exists():
            continue
        _check_file(folder, entry, verify)
    return manifest


def _check_file(folder: Path, entry: FileEntry, verify: str) -> None:
    path = folder / entry.path
    if not path.is_file():
        raise FolderError(f"{path}: the manifest lists it, it is missing", hint=REEXPORT)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise FolderError(f"{path}: leads out of the engine folder", hint=REEXPORT)
    size = path.stat().st_size
    if size != entry.size:
        raise FolderError(f"{path}: must have {entry.size} bytes, has {size}", hint=REEXPORT)
    if verify == "quick" and size >= HASH_ALWAYS_BELOW:
        return
    if (digest := sha256_of(path)) != entry.sha256:
        raise FolderError(
            f"{path}: changed since the export: sha256 must be {entry.sha256[:12]}…,"
            f" is {digest[:12]}…",
            hint=REEXPORT,
        )


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
