"""A finished graph and where the bytes of its initializers come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import torch

from specgraphs import ops
from specgraphs.recipes import Made, Origin, WeightRef


@dataclass(frozen=True)
class Module:
    """A transformers model inside a traced module, under the attribute path ``prefix``."""

    prefix: str
    origin: Origin
    checkpoint_prefix: str
    buffers: Mapping[str, torch.Tensor]
    parameters: frozenset[str]


@dataclass(frozen=True)
class EngineGraph:
    """A graph without weights; ``weights`` (checkpoint tensors as they are), ``made`` and
    ``constants`` together cover every initializer whose value is not in the graph already."""

    model: ir.Model
    weights: dict[str, WeightRef]
    constants: dict[str, np.ndarray]
    made: dict[str, Made] = field(default_factory=dict)


def bind(model: ir.Model, modules: tuple[Module, ...]) -> EngineGraph:
    """Name the initializers after the checkpoint and say where each one's bytes come from.

    Target tensors keep the checkpoint's names; others get their origin in front, ``drafter.``.
    Raises ValueError for an initializer that belongs to none of ``modules``.
    """
    weights: dict[str, WeightRef] = {}
    constants: dict[str, np.ndarray] = {}
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None:
            continue
        module = _owner(name, modules)
        tensor = module.checkpoint_prefix + name.removeprefix(module.prefix)
        final = tensor if module.origin == "target" else f"{module.origin}.{tensor}"
        _rename(graph, value, final)
        if tensor in module.parameters:
            weights[final] = WeightRef(module.origin, tensor)
        else:
            constants[final] = _array(module.buffers[tensor])
    model.ir_version = ops.IR_VERSION
    return EngineGraph(model, weights, constants)


def _array(buffer: torch.Tensor) -> np.ndarray:
    """As NumPy has it; bfloat16 as float32, which holds every value."""
    wide = buffer.float() if buffer.dtype == torch.bfloat16 else buffer
    return wide.detach().numpy()


def _owner(name: str, modules: tuple[Module, ...]) -> Module:
    for module in modules:
        tensor = module.checkpoint_prefix + name.removeprefix(module.prefix)
        known = tensor in module.parameters or tensor in module.buffers
        if name.startswith(module.prefix) and known:
            return module
    raise ValueError(f"initializer {name} belongs to no traced model")


def _rename(graph: ir.Graph, value: ir.Value, name: str) -> None:
    graph.initializers.pop(value.name or "")
    value.name = name
    graph.initializers[name] = value


__all__ = ["EngineGraph", "Module", "Origin", "WeightRef", "bind"]
