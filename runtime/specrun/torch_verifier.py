"""Verification with PyTorch: the transformers model of the target in place of its engine.

What does it is part of the exporter and loaded by name when it is needed, as nothing in this
package may import PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol, cast

from specrun.errors import EngineError, install
from specrun.kv import KvBuffers
from specrun.manifest import Manifest
from specrun.memory import HOST
from specrun.runner import Memory
from specrun.target import Verifier

MODULE = "specexport.verification"
NEEDED = ("torch", "transformers", "accelerate", "safetensors", "gguf", "huggingface_hub")


class TargetModel(Protocol):
    """A model of the target that any number of sequences run."""

    @property
    def name(self) -> str:
        """What it is and where it runs, for messages and statistics."""
        ...

    def target(
        self,
        kv: KvBuffers | None,
        *,
        max_context: int,
        prefill_chunk: int,
        memory: Memory = HOST,
    ) -> Verifier:
        """A target with KV buffers of its own, in ``memory``, or on those of the engine it stands
        in for."""
        ...


def load_model(
    manifest: Manifest, folder: Path, source: str | None, *, device: str = "cpu"
) -> TargetModel:
    """The PyTorch model of the target of the engine ``folder``.

    ``source``: the checkpoint; None: found again from what the manifest says. Raises EngineError:
    a package is not installed, the checkpoint is not there or another one, or it does not load.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing or importlib.util.find_spec(MODULE.partition(".")[0]) is None:
        lacking = ", ".join(missing) or "specexport"
        raise EngineError(
            f"verifying with PyTorch needs {lacking}, not installed here",
            hint=install("torch"),
        )
    module: Any = importlib.import_module(MODULE)
    return cast(TargetModel, module.load(manifest, folder, source, device=device))
