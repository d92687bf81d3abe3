"""Plans of the fake TensorRT that compute the engines of an exported folder, with real numbers.

A plan names the ONNX file it was built from, and runs it with ONNX Runtime on the bytes at the
addresses that are bound, when the device gets there. :func:`build_folder` is ``specexport build``
with such plans.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from fake_trt import FUNCTIONS, Arrays
from toy_plans import TRT_TYPES, VERSIONS

from specexport.trt import building, flavours
from specexport.trt.flavours import Installed
from specexport.trt.plans import BuildSettings, Built, made_from
from specrun import manifest as manifests
from specrun.contract import Part, TensorSpec, past, present
from specrun.manifest import Manifest
from specrun.plans import Flavour, PlanSpec, ProfileSpec

FUNCTION = "onnx"
RTX = "tensorrt-rtx"
PROVIDER = "TensorRT-RTX 1.7.1.116 (SM 86)"
KNOWN = (75, 80, 86, 89)  # compute capabilities


def run_onnx(arrays: Arrays, parameters: Mapping[str, Any]) -> Arrays:
    """What the graph computes. KV inputs are written in place, as their outputs are theirs."""
    session = _session(parameters["graph"])
    names = [node.name for node in session.get_outputs()]
    # A copy, as it must not matter when ONNX Runtime reads what it writes.
    inputs = {node.name: np.array(arrays[node.name]) for node in session.get_inputs()}
    return dict(zip(names, session.run(names, inputs), strict=True))


FUNCTIONS[FUNCTION] = run_onnx


@functools.lru_cache(maxsize=16)
def _session(graph: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@dataclass
class Builder:
    """Stands in for TensorRT at building, and for :func:`specexport.trt.builder.build_engine`.

    ``home``: where the graphs will be. ``built``: files, in order. ``fails_at``: raise this when
    so many were built.
    """

    home: Path
    built: list[str] = field(default_factory=list)
    fails_at: dict[int, BaseException] = field(default_factory=dict)

    def __call__(
        self,
        onnx_path: Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        settings: BuildSettings,
        out_path: Path,
        *,
        weights_sha256: str | None = None,
        timing_cache: Path | None = None,
    ) -> Built:
        if len(self.built) in self.fails_at:
            raise self.fails_at[len(self.built)]
        self.built.append(out_path.name)
        graph = self.home / onnx_path.name
        blob = json.dumps(plan_of(graph, inputs, outputs, settings)).encode()
        partial = out_path.with_name(f".{out_path.name}.new")
        partial.write_bytes(blob)
        partial.replace(out_path)
        source = made_from(onnx_path, weights_sha256, VERSIONS[settings.flavour], settings)
        spec = PlanSpec(
            flavour=settings.flavour,
            version=VERSIONS[settings.flavour],
            compute_capability=settings.compute_capability,
            file=out_path.name,
            size=len(blob),
            sha256=hashlib.sha256(blob).hexdigest(),
            key=source.key,
            profiles=settings.profiles,
        )
        return Built(spec, source, activation_bytes=4096, reproducible=True)


def plan_of(
    graph: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    settings: BuildSettings,
) -> dict[str, Any]:
    """What is in the file of a plan of ``graph``."""
    tensors = [_tensor(spec, "INPUT") for spec in inputs]
    tensors += [_tensor(spec, "OUTPUT") for spec in outputs]
    _alias(tensors)
    return {
        "version": VERSIONS[settings.flavour],
        "capability": list(divmod(settings.compute_capability, 10)),
        "function": FUNCTION,
        "parameters": {"graph": str(graph)},
        "tensors": tensors,
        "profiles": [_ranges(profile) for profile in settings.profiles],
        "device_memory": 4096,
    }


def _tensor(spec: TensorSpec, mode: str) -> dict[str, Any]:
    shape = list(spec.shape)
    return {"name": spec.name, "mode": mode, "shape": shape, "dtype": TRT_TYPES[spec.dtype]}


def _alias(tensors: list[dict[str, Any]]) -> None:
    """KV outputs are written over the inputs of the same layer."""
    names = {tensor["name"] for tensor in tensors}
    pairs = {present(n, part): past(n, part) for n in range(len(names)) for part in Part}
    for tensor in tensors:
        if pairs.get(tensor["name"]) in names:
            tensor["alias"] = pairs[tensor["name"]]


def _ranges(profile: ProfileSpec) -> dict[str, list[list[int]]]:
    return {name: [list(r.min), list(r.opt), list(r.max)] for name, r in profile.inputs.items()}


@dataclass
class Workshop:
    """Builds plans of the fake into folders. ``rows``: of a prompt's chunk, ``drafts``: that a run
    can verify; None: as the exporter has them."""

    patch: pytest.MonkeyPatch
    flavour: Flavour = "tensorrt_rtx"

    def build(
        self,
        folder: Path,
        *capabilities: int,
        rows: int | None = None,
        drafts: int | None = None,
        fails_at: Mapping[int, BaseException] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> tuple[Manifest, list[str]]:
        """``specexport build`` on ``folder``; its manifest, and the plans that were built."""
        builder = Builder(folder, fails_at=dict(fails_at or {}))
        installed = Installed(self.flavour, VERSIONS[self.flavour])
        with self.patch.context() as patch:
            patch.setattr(building, "build_engine", builder)
            patch.setattr(flavours, "find", lambda asked=None: installed)
            patch.setattr(flavours, "capabilities", lambda installed: KNOWN)
            if rows is not None:
                patch.setattr(building, "PREFILL_CHUNK", rows)
            if drafts is not None:
                patch.setattr(building, "MAX_DRAFT", drafts)
            asked = building.Asked(self.flavour, capabilities or (86,))
            return building.build_folder(folder, asked, progress), builder.built

    def with_plans(self, source: Path, out: Path, *capabilities: int, **sizes: int) -> Path:
        """A copy of an engine folder with plans for SM 86."""
        shutil.copytree(source, out)
        self.build(out, *capabilities, **sizes)  # type: ignore[arg-type]
        return out


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest's JSON in place."""
    path = folder / manifests.MANIFEST
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
