"""From sources to an engine folder: reference, trace, stream the weights, check, appear."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specexport import engines, folder, parity, reference
from specexport.datafile import DATA_FILE, DataFile
from specexport.errors import SourceError
from specexport.sources import Source
from specexport.tokenizer_files import TokenizerInfo
from specexport.weights import Weights
from specrun import manifest as manifests
from specrun.contract import DType, KvLayer, Role
from specrun.errors import UsageError
from specrun.manifest import (
    EngineSpec,
    Generation,
    Manifest,
    MtpContract,
    Requires,
    TokenizerSpec,
    expected_io,
)

Precision = Literal["fp32", "fp16"]
Progress = Callable[[str, int, int], None]  # stage, done, total

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
MIN_ONNXRUNTIME = "1.31"  # 1.30 refuses an attention node without present outputs
TARGET_FILE, DRAFTER_FILE = "target.onnx", "mtp_drafter.onnx"
MIN_CONTEXT = 24  # the graphs are traced with an example of this order
MODEL_MEMORY_SHARE = 0.25  # of the free memory, for the transformers model or the engines
KV_DTYPE = {"fp32": DType.FLOAT32, "fp16": DType.FLOAT16}


@dataclass(frozen=True)
class ExportOptions:
    """How to export. ``max_context`` and lengths in tokens; None: as the checkpoint says.

    ``num_draft``: most tokens that the MTP drafter can draft in a round. ``check``: compare the
    written engines with transformers before the folder appears.
    """

    precision: Precision = "fp32"
    max_context: int | None = None
    num_draft: int = 16
    check: bool = True

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"precision: must be one of {', '.join(PRECISIONS)}, got {self.precision!r}"
            )
        if self.num_draft < 1:
            raise UsageError(f"num_draft: must be at least 1, got {self.num_draft}")
        if self.max_context is not None and self.max_context < 2:
            raise UsageError(f"max_context: must be at least 2, got {self.max_context}")


def export(
    target: Source,
    drafter: Source | None,
    out: Path,
    options: ExportOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Manifest:
    """Write the engine folder ``out``; it appears whole, or an error is raised and it does not.

    Raises UsageError, or ExportError (SourceError, WeightsError, ParityError below it).
    """
    options = options or ExportOptions()
    report = progress or _silent
    max_context = _max_context(target, options)
    _check_sources(target, drafter)
    folder.check_target(out)
    seen = None
    if options.check:
        report("reference", 0, 1)
        block = options.num_draft + 1 if drafter is not None else 5
        seen = reference.compute(
            target,
            drafter,
            max_context=max_context,
            block=block,
            memory=_memory_for_models(),
            precision=options.precision,
        )
        report("reference", 1, 1)
    with folder.atomic(out) as partial:
        made = _write(target, drafter, partial, options, max_context, report)
        if seen is not None:
            made = replace(made, parity=_compare(partial, made, seen, report))
        else:
            parity.check_declared_io(partial, made)
        (partial / manifests.MANIFEST).write_text(manifests.dumps(made), encoding="utf-8")
        manifests.read(partial)
    return made


def _silent(stage: str, done: int, total: int) -> None:
    pass


def recheck(
    out: Path, target: Source, drafter: Source | None, *, progress: Progress | None = None
) -> manifests.ParityReport:
    """Compare the engine folder ``out`` with ``target`` and ``drafter`` again.

    Raises FolderError, SourceError where they cannot be what it was exported from, or ParityError.
    """
    report = progress or _silent
    made = manifests.read(out, verify="full")
    mtp = made.engines.get(Role.MTP_DRAFTER)
    contract = mtp.mtp if mtp is not None else None
    _check_same(made, target)
    if contract is not None and drafter is None:
        raise SourceError(
            f"{out}: has a drafter, and none is given to compare it with",
            hint="give the assistant with --drafter",
        )
    seen = reference.compute(
        target,
        drafter if contract is not None else None,
        max_context=made.generation.max_context,
        block=1 + contract.max_num_draft if contract is not None else 5,
        memory=_memory_for_models(),
        precision=made.engines[Role.TARGET].precision,
    )
    return _compare(out, made, seen, report)


def _compare(
    folder: Path, made: Manifest, seen: reference.Reference, report: Progress
) -> manifests.ParityReport:
    weights = next(entry.size for entry in made.files if entry.path == DATA_FILE)
    return parity.check(
        folder,
        made,
        seen,
        threads=len(os.sched_getaffinity(0)),
        mapped=weights > _memory_for_models(),
        progress=lambda done, total: report("check", done, total),
    )


def _check_same(made: Manifest, target: Source) -> None:
    """The target has the shape of the folder's; whether it has its weights, parity will show."""
    spec = made.engines[Role.TARGET]
    for what, folder_has, source_has in (
        ("architecture", made.target.architecture, target.architecture),
        ("vocabulary", spec.vocab_size, int(target.config.vocab_size)),
        ("hidden size", spec.hidden_size, int(target.config.hidden_size)),
    ):
        if folder_has != source_has:
            raise SourceError(
                f"{target.id}: has {what} {source_has}, the folder was exported from"
                f" {made.target.id} with {folder_has}",
                hint="give the checkpoint that the folder was exported from",
            )


def _max_context(target: Source, options: ExportOptions) -> int:
    limit = int(target.config.max_position_embeddings)
    wanted = options.max_context or limit
    if wanted > limit:
        raise UsageError(
            f"max_context: {target.id} has {limit} positions, got {wanted}",
            hint=f"give at most {limit}",
        )
    if wanted < MIN_CONTEXT:
        raise UsageError(
            f"max_context: must be at least {MIN_CONTEXT}, got {wanted}",
            hint="smaller contexts cannot be compared with transformers",
        )
    if options.num_draft + 2 > wanted:
        raise UsageError(
            f"num_draft: {options.num_draft} drafts do not fit into a context of {wanted}",
            hint=f"give at most {wanted - 2}, or a larger --max-context",
        )
    return wanted


def _check_sources(target: Source, drafter: Source | None) -> None:
    """The two are what they are used as, and all their weights are there."""
    from specgraphs.assistant import plan_assistant

    if target.is_assistant:
        raise SourceError(
            f"{target.id}: is an assistant ({target.model_type}) and works only with its target",
            hint="give the target as SOURCE and this one with --drafter",
        )
    target.weights.check_complete(target.expected_shapes())
    if drafter is None:
        return
    if not drafter.is_assistant:
        raise SourceError(
            f"{drafter.id}: a {drafter.model_type} cannot draft on the target's KV",
            hint="give a Gemma 4 assistant, or --drafter none",
        )
    drafter.weights.check_complete(drafter.expected_shapes())
    try:
        plan_assistant(drafter.full_config, target.config)
    except ValueError as error:
        raise SourceError(f"{drafter.id} is no drafter of {target.id}: {error}") from error


def _write(
    target: Source,
    drafter: Source | None,
    partial: Path,
    options: ExportOptions,
    max_context: int,
    report: Progress,
) -> Manifest:
    graphs = _trace(target, drafter, options, max_context, report)
    weights: dict[str, Weights] = {"target": target.weights}
    if drafter is not None:
        weights["drafter"] = drafter.weights
    total = engines.bytes_to_write(graphs.values(), weights)
    folder.check_space(partial, total)
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        report("write", min(done, total), total)

    with DataFile(partial / DATA_FILE, count) as data:
        for name, graph in graphs.items():
            engines.write_engine(graph, partial / name, data, weights)
    tokenizer = target.write_tokenizer(partial)
    files = folder.listing(partial)
    sha256 = {entry.path: entry.sha256 for entry in files}
    return Manifest(
        format=manifests.FORMAT,
        target=_source(target),
        drafter=None if drafter is None else _source(drafter),
        tokenizer=_tokenizer(tokenizer, sha256[tokenizer.file]),
        generation=_generation(target, max_context),
        engines=_engines(target, drafter, options, sha256[TARGET_FILE]),
        files=files,
        versions=_versions(),
        parity=None,
    )


def _trace(
    target: Source,
    drafter: Source | None,
    options: ExportOptions,
    max_context: int,
    report: Progress,
) -> dict[str, Any]:
    from specgraphs.assistant import trace_assistant
    from specgraphs.target import trace_target
    from specgraphs.trace import build_fake

    count = 1 if drafter is None else 2
    report("trace", 0, count)
    fake_target = build_fake(*target.class_and_config(), options.precision)
    graphs = {TARGET_FILE: trace_target(fake_target, options.precision, max_context=max_context)}
    report("trace", 1, count)
    if drafter is not None:
        fake = build_fake(*drafter.class_and_config(), options.precision, mode=fake_target.mode)
        graphs[DRAFTER_FILE] = trace_assistant(
            fake, fake_target, options.precision, max_context=max_context
        )
        report("trace", 2, count)
    return graphs


def _engines(
    target: Source, drafter: Source | None, options: ExportOptions, target_sha256: str
) -> dict[Role, EngineSpec]:
    from specgraphs import assistant, families

    kv = families.kv_plan(target.config).owners
    made = {
        Role.TARGET: _engine(Role.TARGET, TARGET_FILE, target.config, kv, options.precision, None)
    }
    if drafter is not None:
        plan = assistant.plan_assistant(drafter.full_config, target.config)
        contract = MtpContract(
            concat_order=("embedding", "hidden"),
            position="past_length",
            hidden_row="last_committed_kv_row",
            kv_map=plan.kv_map,
            windows=plan.windows,
            head=plan.head,
            candidates=plan.candidates,
            max_num_draft=options.num_draft,
            num_assistant_tokens=_num_assistant_tokens(drafter, options),
            schedule=_schedule(drafter),
            target_sha256=target_sha256,
        )
        made[Role.MTP_DRAFTER] = _engine(
            Role.MTP_DRAFTER, DRAFTER_FILE, target.config, plan.kv, options.precision, contract
        )
    return made


def _engine(
    role: Role,
    file: str,
    config: Any,
    kv: tuple[KvLayer, ...],
    precision: Precision,
    mtp: MtpContract | None,
) -> EngineSpec:
    from specgraphs import ops

    spec = EngineSpec(
        file=file,
        backend="onnxruntime",
        precision=precision,
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        kv_dtype=KV_DTYPE[precision],
        kv=kv,
        inputs=(),
        outputs=(),
        requires=Requires(MIN_ONNXRUNTIME, ops.OPSET, ops.IR_VERSION),
        mtp=mtp,
    )
    inputs, outputs = expected_io(role, spec)
    return replace(spec, inputs=inputs, outputs=outputs)


def _num_assistant_tokens(drafter: Source, options: ExportOptions) -> int:
    """The assistant's own setting where it has one; 4 is a good start elsewhere."""
    return min(int(drafter.generation.get("num_assistant_tokens") or 4), options.num_draft)


def _schedule(drafter: Source) -> Literal["constant", "heuristic"]:
    named = drafter.generation.get("num_assistant_tokens_schedule")
    return "constant" if named == "constant" else "heuristic"


def _source(source: Source) -> manifests.Source:
    return manifests.Source(
        id=source.id,
        revision=source.revision,
        model_type=source.model_type,
        architecture=source.architecture,
    )


def _tokenizer(info: TokenizerInfo, sha256: str) -> TokenizerSpec:
    return TokenizerSpec(
        file=info.file,
        sha256=sha256,
        vocab_size=info.vocab_size,
        add_bos=info.add_bos,
        chat_template=info.chat_template,
        special_tokens=info.special_tokens,
    )


def _generation(target: Source, max_context: int) -> Generation:
    given = target.generation
    end = given.get("eos_token_id")
    ids = [] if end is None else [end] if isinstance(end, int) else list(end)
    # Some checkpoints write -1 for "none"; an id outside of the vocabulary can never come.
    vocab = int(target.config.vocab_size)
    ids = [i for i in ids if _token_id(i, vocab) is not None]
    plain = (bool, int, float, str)
    named = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version")
    defaults = {
        key: value
        for key, value in sorted(given.items())
        if key not in named and not key.startswith("_") and isinstance(value, plain)
        if not isinstance(value, float) or math.isfinite(value)
    }
    return Generation(
        eos_token_ids=tuple(int(i) for i in ids),
        bos_token_id=_token_id(given.get("bos_token_id"), vocab),
        pad_token_id=_token_id(given.get("pad_token_id"), vocab),
        max_context=max_context,
        defaults=defaults,
    )


def _token_id(value: object, vocab: int) -> int | None:
    return value if isinstance(value, int) and 0 <= value < vocab else None


def _versions() -> dict[str, str]:
    names = ("specrun", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")
    return {name: importlib.metadata.version(name) for name in names}


def _memory_for_models() -> int:
    """Bytes that a comparison may take: a share of what can be allocated without swapping."""
    return int(_available_memory() * MODEL_MEMORY_SHARE)


def _available_memory() -> int:
    """Bytes that can be allocated; file caches give way, so what they hold counts too."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        found = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(encoding="ascii"), re.M)
        if found is not None:
            return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
