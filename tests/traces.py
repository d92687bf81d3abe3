"""Traces of tiny models, each made once per run of the tests.

Most of an export of a tiny model is its trace, which holds no weights: it depends on the module and
on its inputs alone. So a trace of equal modules on equal inputs is read from a file, where there is
one. What cannot be compared is traced anew, and so is everything while code of specgraphs is
patched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import logging
import os
import pkgutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

import specgraphs

PLAIN = (type(None), bool, int, float, str, bytes, type, enum.Enum, torch.dtype, torch.device)
CONTAINERS = (dict, list, tuple, set, frozenset)
OURS = ("specgraphs.", "specrun.", "transformers.", "torch.export.")  # objects told by their fields

COUNTERS = ("_value_counter", "_node_counter")  # of names, in a graph
PATHS = ("name_or_path", "_name_or_path")


class Unknown(Exception):
    """Something of which it is not known what a trace would read."""


@dataclasses.dataclass
class Program:
    """What is read of the result of ``torch.onnx.export``."""

    model: ir.Model


class Traces:
    """Stands in for ``torch.onnx.export``, which is ``trace``; its files are in ``folder``."""

    def __init__(self, trace: Callable[..., Any], folder: Path) -> None:
        self.trace = trace
        self.folder = folder
        self.shared = True
        self.made = 0
        self.code = code()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """A trace of the same, or a new one."""
        key = self.key(args, options) if self.shared else None
        if key is None:
            return self._anew(*args, **options)
        file = self.folder / f"{key}.onnx"
        if not file.exists():
            program = self._anew(*args, **options)
            with unset_fake_temporarily():
                write(program.model, file)
        return Program(read(file))

    def _anew(self, *args: Any, **options: Any) -> Any:
        self.made += 1
        return self.trace(*args, **options)

    def key(self, *inputs: Any) -> str | None:
        """What the trace depends on; None where that is not known."""
        if self.code != code():
            return None
        try:
            with unset_fake_temporarily():
                return hashlib.sha256(repr(Fields().of(inputs)).encode()).hexdigest()
        except Unknown:
            return None


def install(folder: Path) -> None:
    """Share the traces of this process with all that have the same folder."""
    # pytest's log handler would get every shape that is traced, thousands of lines per export.
    logging.getLogger("torch.__trace").disabled = True
    if not isinstance(torch.onnx.export, Traces):
        folder.mkdir(exist_ok=True)
        torch.onnx.export = Traces(torch.onnx.export, folder)


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """No trace in here was made before."""
    traces = torch.onnx.export
    assert isinstance(traces, Traces)
    traces.shared = False
    try:
        yield
    finally:
        traces.shared = True


def write(model: ir.Model, file: Path) -> None:
    """Whole or not at all; of a parameter, which has no values, only what it is."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and isinstance(tensor.raw, FakeTensor):
            shape = ir.Shape(list(tensor.raw.shape))
            value.const_value = ir.ExternalTensor(
                "none", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name
            )
    for counter in COUNTERS:
        model.metadata_props[counter] = str(getattr(model.graph._name_authority, counter))
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_bytes(ir.to_proto(model).SerializeToString())
    partial.replace(file)


def read(file: Path) -> ir.Model:
    """A model that gives further nodes the names that the one in ``file`` would have given."""
    model: ir.Model = ir.from_proto(onnx.load(file, load_external_data=False))
    for counter in COUNTERS:
        setattr(model.graph._name_authority, counter, int(model.metadata_props.pop(counter)))
    return model


def code() -> dict[str, Any]:
    """Every function, class, method and constant of specgraphs as it is now, by its name."""
    found: dict[str, Any] = {}
    for module in modules():
        for name, value in vars(module).items():
            found[f"{module.__name__}.{name}"] = Same(value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                path = f"{module.__name__}.{name}"
                found |= {f"{path}.{key}": Same(part) for key, part in vars(value).items()}
    return found


@functools.cache
def modules() -> tuple[types.ModuleType, ...]:
    """All of specgraphs."""
    names = [info.name for info in pkgutil.iter_modules(specgraphs.__path__)]
    return tuple(importlib.import_module(f"specgraphs.{name}") for name in sorted(names))


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """Equal where the object is the same one."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Fields:
    """Modules and inputs as texts; an object that comes again is given by its number."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> Any:
        """``value`` in plain types. Raises Unknown."""
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, CONTAINERS) or _is_frozen(value):
            return self._container(value)
        if id(value) in self.seen:
            return ("again", self.seen[id(value)][0])
        self.seen[id(value)] = (len(self.seen), value)  # which lives on, so no other has its id
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        return self._object(value)

    def _container(self, value: Any) -> Any:
        """By what it holds, however often the same one comes."""
        if isinstance(value, (set, frozenset)):
            return [type(value), *sorted(map(repr, map(self.of, value)))]
        if isinstance(value, (list, tuple)):
            return [type(value), *map(self.of, value)]
        items = value.items() if isinstance(value, dict) else vars(value).items()
        return [type(value), *((self.of(key), self.of(item)) for key, item in items)]

    def _object(self, value: Any) -> Any:
        if isinstance(value, types.BuiltinFunctionType) and isinstance(
            value.__self__, types.ModuleType | None
        ):
            return [value.__module__, value.__qualname__]
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            defaults = (value.__defaults__, value.__kwdefaults__)
            return [*_source(value.__code__), self.of(cells), self.of(defaults)]
        if isinstance(value, functools.partial):
            return [self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if not _told_by_fields(value):
            raise Unknown(type(value))
        forward = _forward(value) if isinstance(value, torch.nn.Module) else ()
        return [type(value), *forward, self.of(fields_of(value))]


def _forward(module: torch.nn.Module) -> tuple[Any, ...]:
    """The code of the class, which a test may have replaced."""
    return _source(inspect.unwrap(type(module).forward).__code__)


def _source(code: types.CodeType) -> tuple[Any, ...]:
    return code.co_filename, code.co_firstlineno, code.co_qualname, code.co_code


def fields_of(value: Any) -> dict[str, Any]:
    """All but the path that a configuration was read from, which no model looks at."""
    return {name: field for name, field in vars(value).items() if name not in PATHS}


def _is_frozen(value: Any) -> bool:
    parameters = getattr(value, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def _told_by_fields(value: Any) -> bool:
    kinds = (torch.nn.Module, transformers.PreTrainedConfig)
    return isinstance(value, kinds) or type(value).__module__.startswith(OURS)


def _tensor(value: torch.Tensor) -> Any:
    """Shape and dtype of what has no values; else the values too."""
    form = (tuple(map(str, value.shape)), str(value.dtype), value.requires_grad)
    if isinstance(value, FakeTensor):
        return form
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        raise Unknown(type(value))
    values = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return (*form, values.numpy().tobytes())
