"""Toy engines as plans of the fake TensorRT: the formulas of ``toys`` in NumPy.

The plans have the inputs of plans: ``wanted_rows`` int64 [wanted] in place of ``first_row``, KV
buffers of fixed capacity, and a drafter of a fixed number of steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import toys
from fake_trt import FUNCTIONS, Arrays
from toys import HIDDEN_SIZE, LAYER, Toy

from specrun import contract
from specrun.contract import WANTED_ROWS, DType, FixedSizes, Part, TensorSpec, past, present
from specrun.manifest import EngineSpec, read
from specrun.plans import Flavour, PlanSpec, ProfileSpec, ShapeRange
from specrun.trt_session import TrtSession, open_plan

CAPACITY = 256
PREFILL, DECODE = 64, 12  # most rows
DRAFTS = 16  # steps of a drafter's run
VERSIONS: dict[Flavour, str] = {"tensorrt_rtx": "1.7.1.116", "tensorrt": "10.15.1.29"}
KEY, VALUE = past(0, Part.KEY), past(0, Part.VALUE)
TRT_TYPES = {
    DType.FLOAT32: "FLOAT",
    DType.FLOAT16: "HALF",
    DType.BFLOAT16: "BF16",
    DType.INT64: "INT64",
    DType.INT32: "INT32",
}
Ranges = dict[str, list[list[int]]]


def target(arrays: Arrays, toy: Mapping[str, Any]) -> Arrays:
    """The formula of :func:`toys.write_target`."""
    tokens, wanted = arrays[contract.TOKENS], arrays[WANTED_ROWS]
    batch, rows = tokens.shape
    position = arrays[contract.PAST_LENGTH][:, None].astype(np.int64) + np.arange(rows)
    for b in range(batch):
        row = np.stack([tokens[b], position[b]], axis=-1)
        for name in (KEY, VALUE):
            arrays[name][b, 0, position[b]] = row
    stored = arrays[KEY][:, 0, :, 0]
    history = np.array([[int(stored[b, : p + 1].sum()) for p in position[b]] for b in range(batch)])
    if toy["script"] is None:
        answer = (tokens + toy["history_weight"] * history + 1) % toy["modulus"]
        answer = np.where(position >= toy["fixed_from"], toys.FIXED, answer)
    else:
        answer = np.array(toy["script"])[np.minimum(position, len(toy["script"]) - 1)]
    argmax = answer[:, wanted]
    logits = (argmax[..., None] == np.arange(toy["vocab_size"])) * np.float32(10)
    return {
        contract.ARGMAX: argmax,
        contract.LOGITS: logits,
        contract.MARGIN: np.full(argmax.shape, 10, np.float32),
        contract.HIDDEN: np.stack([position, tokens], axis=-1)[:, wanted],
    }


def drafter(arrays: Arrays, toy: Mapping[str, Any]) -> Arrays:
    """The formula of :func:`toys.write_drafter`, all steps of it."""
    token, noise = arrays[contract.TOKEN], arrays[contract.NOISE]
    batch, steps, _ = noise.shape
    last = arrays[contract.PAST_LENGTH].astype(np.int64) - 1
    row = arrays[KEY][np.arange(batch), 0, last].astype(np.int64)
    hidden = arrays[contract.HIDDEN][:, 0].astype(np.int64)
    modulus = toy["modulus"]
    right = (hidden[:, 0] == last) & (row[:, 1] == last) & (row[:, 0] == hidden[:, 1])
    right &= (hidden[:, 1] + 1) % modulus == token[:, 0]
    logits = np.array(toy["drafter_logits"], np.float32)
    choice = np.argmax(noise + (logits - logits[0]), axis=2)
    first = token + np.where(right, 1, 3)[:, None] + np.arange(steps)
    chosen = np.cumsum(choice, axis=1)
    before = first + chosen - choice
    return {
        contract.DRAFT_TOKENS: (first + chosen) % modulus,
        contract.DRAFT_CANDIDATES: (before[..., None] + np.arange(len(logits))) % modulus,
        contract.DRAFT_LOGITS: np.broadcast_to(logits, noise.shape),
    }


FUNCTIONS |= {"target": target, "drafter": drafter}


@dataclass(frozen=True)
class ToyPlan:
    """A plan file and its entries in a manifest."""

    path: Path
    plan: PlanSpec
    spec: EngineSpec

    def open(self, **options: Any) -> TrtSession:
        """Open it."""
        return open_plan(self.path, self.spec, self.plan, **options)


def write_plan(
    folder: Path,
    toy: Toy,
    role: str = "target",
    flavour: Flavour = "tensorrt_rtx",
    edit: Any = lambda data: None,
) -> ToyPlan:
    """Write a toy's plan for SM 86; ``edit`` may change what is in the file."""
    if not (folder / "manifest.json").exists():
        toys.write_folder(folder, toy)
    known = read(folder).engines[contract.TARGET_ENGINE if role == "target" else "mtp_drafter"]
    file = f"{role}.sm86.engine"
    fixed = FixedSizes(CAPACITY, DRAFTS if role == "drafter" else None)
    spec = dataclasses.replace(known, file=file, fixed=fixed)
    inputs, outputs = spec.file_io
    profiles = _target_profiles() if role == "target" else [_drafter_profile(spec)]
    version = VERSIONS[flavour]
    data: dict[str, Any] = {
        "version": version,
        "capability": [8, 6],
        "function": role,
        "parameters": dataclasses.asdict(
            dataclasses.replace(toy, tokenizer=None, draft=None, table=None)
        )
        | {"vocab_size": toy.vocab_size},
        "tensors": [_tensor(t, "INPUT") for t in inputs] + [_tensor(t, "OUTPUT") for t in outputs],
        "profiles": profiles,
        "device_memory": 4096,
    }
    edit(data)
    path = folder / file
    path.write_bytes(json.dumps(data).encode())
    return ToyPlan(path, _plan_spec(path, role, flavour, version, profiles), spec)


def _plan_spec(
    path: Path, role: str, flavour: Flavour, version: str, profiles: list[Ranges]
) -> PlanSpec:
    blob = path.read_bytes()
    names = ("prefill", "decode") if role == "target" else ("decode",)
    return PlanSpec(
        flavour=flavour,
        version=version,
        compute_capability=86,
        file=path.name,
        size=len(blob),
        sha256=hashlib.sha256(blob).hexdigest(),
        key=hashlib.sha256(role.encode()).hexdigest(),
        profiles=tuple(
            ProfileSpec(
                name,  # type: ignore[arg-type]
                {key: ShapeRange(*map(tuple, value)) for key, value in ranges.items()},
            )
            for name, ranges in zip(names, profiles, strict=True)
        ),
    )


def _tensor(tensor: TensorSpec, mode: str) -> dict[str, Any]:
    made: dict[str, Any] = {"name": tensor.name, "mode": mode, "shape": list(tensor.shape)}
    made["dtype"] = TRT_TYPES[tensor.dtype]
    aliases = {present(0, part): past(0, part) for part in Part}
    if tensor.name in aliases and mode == "OUTPUT":
        made["alias"] = aliases[tensor.name]
    return made


def _kv_range() -> Ranges:
    shape = [1, LAYER.heads, CAPACITY, LAYER.head_size]
    return {past(0, part): [shape] * 3 for part in Part}


def _target_profiles() -> list[Ranges]:
    def profile(low: int, high: int) -> Ranges:
        return {
            contract.TOKENS: [[1, low], [1, high], [1, high]],
            contract.PAST_LENGTH: [[1]] * 3,
            WANTED_ROWS: [[1], [1], [min(high, DECODE)]],
            **_kv_range(),
        }

    return [profile(1, PREFILL), profile(1, DECODE)]


def _drafter_profile(spec: EngineSpec) -> Ranges:
    noise = next(tensor for tensor in spec.inputs if tensor.name == contract.NOISE)
    return {
        contract.TOKEN: [[1, 1]] * 3,
        contract.HIDDEN: [[1, 1, HIDDEN_SIZE]] * 3,
        contract.PAST_LENGTH: [[1]] * 3,
        contract.NOISE: [[1, DRAFTS, int(noise.shape[2])]] * 3,
        **_kv_range(),
    }
