"""Engines of the TensorRT dialect run by PyTorch, operator by operator, on any device it has.

Nothing but PyTorch and the runtime is needed, so that a machine with a GPU and little else can show
that what the dialect says (KV buffers written in place, masks made from lengths, unrolled drafts)
gives the right tokens there. It is no way to run anything fast.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_torch_ops import INT4, ON_HOST, OPERATORS, TYPES, unpack
from numpy.typing import NDArray

from specrun import resources
from specrun.contract import DType
from specrun.errors import EngineError
from specrun.fixed import as_contract
from specrun.manifest import EngineSpec, Manifest
from specrun.memory import copy_rows
from specrun.options import EngineOptions
from specrun.runner import Buffer, Session

Tensor = torch.Tensor
OPENS = "open_engine"  # what specrun.resources opens the engines of a folder with
FEW = 16  # whole numbers that may be sizes or axes, which the host reads


class TorchBuffer:
    """See :class:`specrun.runner.Buffer`."""

    host: NDArray[Any] | None = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        return tuple(self.tensor.shape)

    def read(self) -> NDArray[Any]:
        """A copy of its values."""
        return to_array(self.tensor).copy()

    def write(self, values: NDArray[Any]) -> None:
        """Replace all values."""
        self.tensor.copy_(to_tensor(values, self.tensor.dtype))

    def copy_rows(self, source: Buffer, lengths: Sequence[int]) -> None:
        """Take the first ``lengths[b]`` rows of every sequence b from a smaller buffer."""
        values = self.read()
        copy_rows(source.read(), values, lengths)
        self.write(values)


@dataclass(frozen=True)
class TorchMemory:
    """Memory of a device of PyTorch."""

    device: str

    def zeros(self, name: str, shape: tuple[int, ...], dtype: DType) -> TorchBuffer:
        """A buffer of zeros."""
        kind: torch.dtype = getattr(torch, dtype.value)
        return TorchBuffer(torch.zeros(shape, dtype=kind, device=self.device))


class Program:
    """One graph on a device. What depends on weights alone is computed once."""

    def __init__(self, said: Mapping[str, Any], folder: Path, device: str) -> None:
        self.device = device
        self.outputs: list[str] = said["outputs"]
        self._folder = folder
        # Of the numbers that the host has and a node on the device reads.
        self._moved: dict[str, Tensor] = {}
        self.known: dict[str, Tensor] = {
            name: self._load(tensor) for name, tensor in said["weights"].items()
        }
        self._nodes = [node for node in said["nodes"] if not self._folded(node)]

    def run(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs. Raises EngineError for an operator that is not in the table or fails."""
        values: dict[str, Tensor] = dict(given)
        for node in self._nodes:
            self._apply(node, values)
        return {name: values[name] for name in self.outputs}

    def _folded(self, node: Mapping[str, Any]) -> bool:
        """Whether a node reads weights only; then its result is known from now on."""
        if node["op"] == "Constant":
            (value,) = node["attributes"].values()
            self.known[node["outputs"][0]] = self._load(value)
            return True
        inputs = [name for name in node["inputs"] if name]
        if not inputs or not all(name in self.known for name in inputs):
            return False
        self._apply(node, self.known)
        return True

    def _apply(self, node: Mapping[str, Any], values: dict[str, Tensor]) -> None:
        operator = OPERATORS.get(node["op"])
        if operator is None:
            raise EngineError(f"{node['op']}: no operator that gpu_torch_ops.py has")
        attributes = {
            name: self._load(value) if isinstance(value, dict) else value
            for name, value in node["attributes"].items()
        }
        arguments = self._arguments(node, values)
        try:
            result = operator(*arguments, **attributes)
        except Exception as error:
            shapes = [None if x is None else (list(x.shape), str(x.dtype)) for x in arguments]
            raise EngineError(f"{node['op']} on {shapes} {attributes}: {error}") from error
        results = [result] if isinstance(result, Tensor) else result
        values.update(zip(node["outputs"], results, strict=False))

    def _arguments(
        self, node: Mapping[str, Any], values: Mapping[str, Tensor]
    ) -> list[Tensor | None]:
        """Inputs, all on the device where one is; sizes and the like on the host."""
        names, host = node["inputs"], ON_HOST.get(node["op"], ())
        found = [(values[n] if n in values else self.known[n]) if n else None for n in names]
        read = [x for i, x in enumerate(found) if x is not None and i not in host]
        away = any(x.device.type != "cpu" for x in read)
        for index, tensor in enumerate(found):
            if tensor is not None and index in host:
                found[index] = tensor.cpu()
            elif tensor is not None and away:
                found[index] = self._on_device(names[index], tensor)
        return found

    def _on_device(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or name not in self.known:
            return tensor.to(self.device)
        if name not in self._moved:
            self._moved[name] = tensor.to(self.device)
        return self._moved[name]

    def _load(self, said: Mapping[str, Any]) -> Tensor:
        """A tensor from its bytes; few whole numbers stay with the host, as sizes mostly."""
        count = math.prod(said["shape"])
        raw = torch.from_numpy(np.frombuffer(self._bytes(said), np.uint8).copy())
        if said["type"] == INT4:
            tensor = unpack(raw, count)
        else:
            kind = TYPES[said["type"]]
            tensor = raw.view(kind)[:count] if count else torch.zeros(0, dtype=kind)
        tensor = tensor.reshape(said["shape"])
        stays = not tensor.is_floating_point() and count <= FEW
        return tensor if stays else tensor.to(self.device)

    def _bytes(self, said: Mapping[str, Any]) -> bytes:
        if "bytes" in said:
            return base64.b64decode(str(said["bytes"]))
        with (self._folder / said["file"]).open("rb") as file:
            file.seek(said["offset"])
            raw: bytes = file.read(int(said["length"]))
            return raw


class TorchRun:
    """See :class:`specrun.runner.Run`."""

    def __init__(
        self,
        program: Program,
        spec: EngineSpec,
        arrays: tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]],
        buffers: Mapping[str, TorchBuffer],
    ) -> None:
        self.name = spec.file
        self.inputs, self.outputs = arrays
        self._program, self._buffers = program, buffers
        self._dtypes = {
            tensor.name: tensor.dtype for tensor in (*spec.file_io[0], *spec.file_io[1])
        }

    def run(self) -> None:
        """Run the graph. Raises EngineError."""
        given = {name: buffer.tensor for name, buffer in self._buffers.items()}
        for name, array in self.inputs.items():
            kind: torch.dtype = getattr(torch, self._dtypes[name].value)
            given[name] = to_tensor(array, kind).to(self._program.device)
        with torch.inference_mode():
            results = self._program.run(given)
        for name, array in self.outputs.items():
            array[...] = to_array(results[name])


class TorchSession:
    """See :class:`specrun.runner.Session`: an engine of the dialect as a program of PyTorch."""

    most_rows: int | None = None
    most_wanted: int | None = None

    def __init__(self, program: Program, spec: EngineSpec) -> None:
        self.spec = spec
        self.program = program
        self.memory = TorchMemory(program.device)
        self.provider = f"PyTorch {torch.__version__} ({program.device}), operator by operator"

    def prepare(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        past: Mapping[str, Buffer],
        present: Mapping[str, Buffer],
    ) -> TorchRun:
        """A run on these arrays and buffers. Raises EngineError for buffers of another memory."""
        buffers: dict[str, TorchBuffer] = {}
        for name, buffer in past.items():
            if not isinstance(buffer, TorchBuffer):
                raise EngineError(f"{self.spec.file}: {name!r} is not in PyTorch's memory")
            buffers[name] = buffer
        return TorchRun(self.program, self.spec, (inputs, outputs), buffers)


@contextlib.contextmanager
def engines_by_torch(programs: Path, device: str) -> Iterator[None]:
    """Within, folders are opened with PyTorch in place of ONNX Runtime.

    ``programs``: what gpu_programs.py wrote of the folder.
    """
    said = json.loads(programs.read_text(encoding="utf-8"))

    def open_engine(folder: Path, manifest: Manifest, name: str, options: EngineOptions) -> Session:
        spec = manifest.engines[name]
        return as_contract(TorchSession(Program(said[spec.file], folder, device), spec))

    before = getattr(resources, OPENS)
    setattr(resources, OPENS, open_engine)
    try:
        yield
    finally:
        setattr(resources, OPENS, before)


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Its values on the host; bfloat16 as its bits."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: NDArray[Any] = tensor.numpy()
    return array


def to_tensor(array: NDArray[Any], kind: torch.dtype) -> Tensor:
    """The array as a tensor; what is bfloat16 comes as its bits."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(kind) if kind is torch.bfloat16 else tensor
