"""PyTorch stands in for the target's engine: finds the checkpoint behind a folder and loads it.

:mod:`specrun` loads this module by name, when it is to verify with PyTorch; see
:mod:`specrun.torch_verifier`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport import hub, presets
from specexport.errors import ExportError, SourceError
from specexport.fingerprint import fingerprint
from specexport.sources import Source, resolve
from specrun.contract import FRONT_ENGINE, MTP_DRAFTER_ENGINE, KvLayer
from specrun.errors import DeviceError, EngineError, SpecrunError
from specrun.kv import INITIAL_CAPACITY, KvBuffers
from specrun.manifest import Manifest
from specrun.memory import HOST
from specrun.runner import Memory
from specrun.target import Verifier

PRESET_TARGET = "/target"  # ends the id of a preset's target
OTHER = "give the checkpoint that the folder was exported from with --target (target=)"


@dataclass(frozen=True)
class TorchModel:
    """transformers' model of a folder's target, which any number of targets run.

    ``name``: as stands in messages and statistics.
    """

    manifest: Manifest
    model: Any
    name: str

    def target(
        self,
        kv: KvBuffers | None,
        *,
        max_context: int,
        prefill_chunk: int,
        initial_capacity: int = INITIAL_CAPACITY,
        memory: Memory = HOST,
    ) -> Verifier:
        """A target with KV buffers of its own, in ``memory``, or on those of an engine that it
        stands in for."""
        from specexport.torch_target import TorchTarget

        spec = self.manifest.target_engine
        read = _read_by_drafters(self.manifest)
        if kv is None:
            kv = KvBuffers(
                read,
                spec.kv_dtype,
                max_context=max_context,
                initial_capacity=initial_capacity,
                memory=memory,
                fixed=spec.fixed,
            )
        front = self.manifest.engines.get(FRONT_ENGINE)
        split = None if front is None else front.split
        return TorchTarget(
            self.model,
            kv,
            prefill_chunk=prefill_chunk,
            read_by_drafters=frozenset(layer.layer for layer in read),
            early_exit=None if split is None else split.early_exit,
        )


def load(manifest: Manifest, folder: Path, source: str | None, *, device: str) -> TorchModel:
    """transformers' model of the target of the engine ``folder``, with activations of its dtype.

    ``source``: the checkpoint, None to find it again from the manifest; nothing is downloaded.
    Raises EngineError.
    """
    check_device(device)
    try:
        found = find(manifest, folder, source)
        _check(manifest, found)
        return torch_model(manifest, found, device=device)
    except SpecrunError as error:
        raise EngineError(str(error), hint=error.hint) from error
    except Exception as error:  # torch and transformers raise what they like
        raise EngineError(
            f"{source or manifest.target.id}: does not load with PyTorch:"
            f" {type(error).__name__}: {error}",
            hint=OTHER,
        ) from error


def torch_model(manifest: Manifest, source: Source, *, device: str = "cpu") -> TorchModel:
    """transformers' model of ``source``, as the target of a folder. Raises WeightsError."""
    import torch

    dtype = getattr(torch, manifest.target_engine.kv_dtype.value)
    model: Any = source.load_reference(dtype)
    return TorchModel(manifest, model.to(torch.device(device)), f"PyTorch ({device})")


def check_device(device: str) -> None:
    """Raise DeviceError unless PyTorch has the device."""
    if device == "cpu":
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]
    if device not in devices:
        has = ", ".join(devices)
        raise DeviceError(
            f"device: {device!r} is not available, this PyTorch has {has}", hint="use --device cpu"
        )


def find(manifest: Manifest, folder: Path, given: str | None) -> Source:
    """The checkpoint: the one given, or that of the manifest: a preset, a model in the hub's cache,
    or a folder or file of its name beside the engine folder or in the working directory.

    Raises SourceError.
    """
    if given is not None:
        return resolve(given, local_only=True)
    target = manifest.target
    preset, slash, part = target.id.partition("/")
    if (slash + part) == PRESET_TARGET and presets.find(preset) is not None:
        return resolve(preset, local_only=True)
    if hub.HUB_ID.fullmatch(target.id):
        return resolve(target.id, revision=target.revision, local_only=True)
    # A name, no way to somewhere else.
    if Path(target.id).name == target.id and target.id not in ("", ".."):
        for place in (folder.parent, Path()):
            if (place / target.id).exists():
                return resolve(place / target.id)
    raise SourceError(
        f"{target.id}: the checkpoint of the target is not beside the engine folder, nor in the"
        " working directory",
        hint=OTHER,
    )


def _check(manifest: Manifest, source: Source) -> None:
    """Raise SourceError unless ``source`` is what the target was exported from."""
    recorded = manifest.target.fingerprint
    if recorded is None:
        return
    try:
        same = fingerprint(source.weights) == recorded
    except ExportError as error:
        raise SourceError(f"{source.id}: {error}", hint=OTHER) from error
    if not same:
        raise SourceError(
            f"{source.id}: has other weights than the checkpoint that the folder was exported from"
            f" ({manifest.target.id})",
            hint=OTHER,
        )


def _read_by_drafters(manifest: Manifest) -> tuple[KvLayer, ...]:
    """The KV buffers that a drafter reads; the others need not be there for it."""
    if MTP_DRAFTER_ENGINE not in manifest.engines:
        return ()
    return manifest.engines[MTP_DRAFTER_ENGINE].kv
