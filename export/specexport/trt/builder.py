"""Builds one plan, in a process of its own (:mod:`specexport.trt.child`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from specexport.trt import addresses, flavours
from specexport.trt.child import Answer, Request
from specexport.trt.plans import BuildSettings, Built, made_from
from specrun.contract import TensorSpec
from specrun.decode import decode, encode
from specrun.errors import DeviceError, EngineError
from specrun.plans import PlanSpec

TAIL = 400  # characters of a dead builder's last words that are shown


def build_engine(
    onnx_path: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    settings: BuildSettings,
    out_path: Path,
    *,
    weights_sha256: str | None = None,
    timing_cache: Path | None = None,
) -> Built:
    """Build the plan of an ONNX file and write it to ``out_path``, whole or not at all.

    ``inputs``, ``outputs``: as the manifest declares them; the graph must have exactly these.
    ``weights_sha256``: of the graph's external data, which lies beside it; None if it has none.
    ``timing_cache``: file of measured tactics, of use to full TensorRT only.
    Raises DeviceError if TensorRT is not there or does not build for that GPU, EngineError with the
    node and TensorRT's reason for everything it does not take.
    """
    installed = flavours.find(settings.flavour)
    flavours.check_capability(installed, settings.compute_capability)
    source = made_from(onnx_path, weights_sha256, installed.version, settings)
    partial = out_path.with_name(f".{out_path.name}.{os.getpid()}")
    request = Request(
        str(onnx_path.absolute()),
        tuple(inputs),
        tuple(outputs),
        settings,
        str(partial.absolute()),
        None if timing_cache is None else str(timing_cache.absolute()),
    )
    try:
        answer = _run(request)
        partial.replace(out_path)
    finally:
        partial.unlink(missing_ok=True)
    spec = PlanSpec(
        flavour=settings.flavour,
        version=installed.version,
        compute_capability=settings.compute_capability,
        file=out_path.name,
        size=answer.size,
        sha256=answer.sha256,
        key=source.key,
        profiles=settings.profiles,
    )
    return Built(spec, source, answer.activation_bytes, answer.reproducible)


def _run(request: Request) -> Answer:
    with tempfile.TemporaryDirectory(prefix="specexport-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(encode(request)), encoding="utf-8")
        command = [sys.executable, "-m", "specexport.trt.child", str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, env=_environment(), check=False)
        if not answered.exists():
            raise _died(Path(request.onnx).name, done)
        answer = decode(Answer, json.loads(answered.read_text(encoding="utf-8")))
    if answer.error is not None:
        kind = DeviceError if answer.device else EngineError
        raise kind(answer.error, hint=answer.hint)
    return answer


def _environment() -> dict[str, str]:
    """Ours, with the packages where they are found here."""
    path = os.pathsep.join(filter(None, sys.path))
    return os.environ | addresses.ENVIRONMENT | {"PYTHONPATH": path}


def _died(name: str, done: subprocess.CompletedProcess[bytes]) -> EngineError:
    """What is known of a builder that ended without an answer."""
    code = done.returncode
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    words = done.stderr.decode("utf-8", "replace").strip()[-TAIL:]
    return EngineError(
        f"the builder of {name} ended {how}: {words or 'it said nothing'}",
        hint="a builder that is killed mostly lacks memory; lower prefill_rows or max_batch",
    )
