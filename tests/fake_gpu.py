"""A machine with a GPU and TensorRT, both of them fakes, and toy plans opened on it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from fake_trt import Library
from numpy.typing import NDArray
from toy_plans import CAPACITY, KEY, VALUE, VERSIONS, ToyPlan

from specrun import contract
from specrun.contract import WANTED_ROWS, Part, past, present
from specrun.manifest import EngineSpec
from specrun.plans import Flavour
from specrun.runner import Buffer
from specrun.trt_run import TrtRun
from specrun.trt_session import TrtSession

Arrays = dict[str, NDArray[Any]]


@dataclass
class Gpu:
    """A machine with a GPU and TensorRT, both of them fakes."""

    cuda: FakeCuda
    library: Library

    @classmethod
    def installed(
        cls, monkeypatch: pytest.MonkeyPatch, flavour: Flavour = "tensorrt_rtx", **device: Any
    ) -> Gpu:
        """Put the fakes where the runtime imports the real ones from."""
        cuda = FakeCuda(**device)
        gpu = cls(cuda, Library(cuda, VERSIONS[flavour], flavour))
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
        monkeypatch.setitem(sys.modules, flavour, gpu.library)
        return gpu


class Opened:
    """A session with its KV buffers, and runs of any width on them."""

    def __init__(self, made: ToyPlan, **options: Any) -> None:
        self.session: TrtSession = made.open(**options)
        self.spec: EngineSpec = made.spec
        shape = (1, 1, CAPACITY, 2)
        zeros = self.session.memory.zeros
        self.kv = {name: zeros(name, shape, made.spec.kv_dtype) for name in (KEY, VALUE)}
        self.present: dict[str, Buffer] = {
            present(0, part): self.kv[past(0, part)] for part in Part
        }

    def arrays(self, rows: int, wanted: int) -> tuple[Arrays, Arrays]:
        inputs: Arrays = {
            contract.TOKENS: np.ones((1, rows), np.int64),
            contract.PAST_LENGTH: np.zeros(1, np.int32),
            WANTED_ROWS: np.arange(rows - wanted, rows),
        }
        outputs: Arrays = {
            contract.ARGMAX: np.zeros((1, wanted), np.int64),
            contract.LOGITS: np.zeros((1, wanted, 10), np.float32),
            contract.HIDDEN: np.zeros((1, wanted, 2), np.float32),
        }
        return inputs, outputs

    def run(self, rows: int, wanted: int, only: tuple[str, ...] = ()) -> TrtRun:
        inputs, outputs = self.arrays(rows, wanted)
        kept = {name: array for name, array in outputs.items() if not only or name in only}
        return self.session.prepare(inputs, kept, self.kv, self.present)
