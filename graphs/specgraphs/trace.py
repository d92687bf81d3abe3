"""Tracing without weights: the model is built on fake tensors, so any size traces in little memory.

Parameters never have values here; the initializers of the traced graph keep their module names and
get their bytes from the checkpoint when the engine is written. Buffers that a model computes for
itself (rotary frequencies, embedding scales) are small and real, and are returned beside the graph.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraphs import experts, latent, ops, patches
from specgraphs.engine_graph import Module, Origin
from specrun import contract
from specrun.contract import KvLayer, Part

# Sizes of example inputs; not special to torch.export, as 0 and 1 would be.
EXAMPLE_BATCH, EXAMPLE_ROWS, EXAMPLE_WANTED, EXAMPLE_CAPACITY = 2, 5, 3, 40
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class FakeModel:
    """A transformers model on fake parameters, and the real values of its computed buffers."""

    model: Any
    mode: FakeTensorMode
    buffers: dict[str, torch.Tensor] = field(repr=False)

    def traced_as(self, prefix: str, origin: Origin, path: str = "") -> Module:
        """This model (its submodule ``path``) as it stands in a traced module under ``prefix``."""
        persistent = frozenset(self.model.state_dict(keep_vars=True))
        return Module(prefix, origin, path, self.buffers, persistent)


def build_fake(
    model_class: Any, config: Any, precision: str, mode: FakeTensorMode | None = None
) -> FakeModel:
    """Build ``model_class(config)`` without weights, patched to emit our operators.

    ``precision``: "fp32", "fp16" or "bf16", the dtype of parameters and activations. ``mode``:
    share the fake mode of another model, to trace both in one graph.
    """
    from accelerate import init_empty_weights

    patches.register_attention()
    experts.register()
    dtype = TORCH_DTYPES[precision]
    config = _private_copy(config)
    with init_empty_weights(include_buffers=False):
        model = model_class._from_config(
            config, dtype=dtype, attn_implementation=patches.ATTENTION
        ).eval()
    model.tie_weights()
    return as_fake(model, mode or FakeTensorMode(allow_non_fake_inputs=True))


def as_fake(model: Any, mode: FakeTensorMode) -> FakeModel:
    """``model``, built without memory, with fake parameters and patched to emit our operators.

    Parameters that are fake already, as they belong to another model too, stay as they are.
    """
    if hasattr(model, "set_experts_implementation") and _has_experts(model):
        model.set_experts_implementation(experts.IMPLEMENTATION)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    _fake_parameters(model, mode)
    patches.patch_norms(model)
    latent.patch(model)
    return FakeModel(model, mode, buffers)


@dataclass(frozen=True)
class Sizes:
    """Dynamic sizes that the inputs of one engine share."""

    batch: Any
    rows: Any
    wanted: Any
    max_context: int

    @classmethod
    def up_to(cls, max_context: int) -> Sizes:
        """For texts of at most ``max_context`` tokens."""
        dim, most = torch.export.Dim, max(2, max_context)
        return cls(
            dim(contract.BATCH, min=1, max=4096),
            dim(contract.ROWS, min=1, max=most),
            dim(contract.WANTED, min=1, max=most),
            max_context,
        )


@dataclass(frozen=True)
class KvInputs:
    """The KV buffers as inputs of a traced module: examples, dynamic sizes and names."""

    examples: list[torch.Tensor]
    shapes: list[dict[int, Any]]
    names: list[str]


def kv_inputs(
    layers: Sequence[KvLayer], mode: FakeTensorMode, precision: str, *, batch: Any, max_context: int
) -> KvInputs:
    """Key and value of every layer, ``[batch, heads, capacity, head]``, a tensor of its own each.

    ``batch``: the dynamic size that all inputs of the module share.
    """
    capacity = torch.export.Dim(contract.CAPACITY, min=2, max=max(4, 2 * max_context))
    halves = [(kv, part) for kv in layers for part in Part]
    with mode:
        examples = [
            torch.zeros(
                EXAMPLE_BATCH,
                kv.heads,
                EXAMPLE_CAPACITY,
                kv.head_size,
                dtype=TORCH_DTYPES[precision],
            )
            for kv, _ in halves
        ]
    return KvInputs(
        examples,
        [{0: batch, 2: capacity}] * len(halves),
        [contract.past(kv.layer, part) for kv, part in halves],
    )


def export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    dynamic_shapes: Any,
    *,
    mode: FakeTensorMode,
    input_names: Sequence[str],
    output_names: Sequence[str],
) -> ir.Model:
    """Trace ``module(*args)`` on fake tensors to an ONNX IR model; initializers have no values.

    Runs under the rotary patch, so norms, rotary and attention are single nodes; the same module
    gives the same graph in every process.
    """
    module.eval()
    rotary, in_order = patches.rotary_as_operator(module), patches.sets_in_order(module)
    with mode, torch.no_grad(), rotary, in_order, _quiet():
        program = torch.onnx.export(
            module,
            args,
            dynamo=True,
            opset_version=ops.OPSET,
            input_names=list(input_names),
            output_names=list(output_names),
            dynamic_shapes=dynamic_shapes,
            verbose=False,
            optimize=False,
        )
    assert program is not None
    return _without_values(program.model, module)


def _without_values(model: ir.Model, module: torch.nn.Module) -> ir.Model:
    """Forget the fake values of parameters and buffers, so that no pass reads or folds them."""
    named = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    named |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for name, value in model.graph.initializers.items():
        if name in named:
            value.const_value = None
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter talks about optional packages and axis names; errors still raise."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _private_copy(config: Any) -> Any:
    """The caller's config stays as it is: the attention implementation is set on a copy."""
    return copy.deepcopy(config)


def _has_experts(model: Any) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in model.modules())


def _fake_parameters(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace meta parameters by fake CPU ones; a tensor used twice stays one tensor."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.device.type != "meta":
                continue
            if id(parameter) not in made:
                with mode:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                made[id(parameter)] = torch.nn.Parameter(empty, requires_grad=False)
            module._parameters[name] = made[id(parameter)]
