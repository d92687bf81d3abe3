"""A transformers model that never holds more weights than one module's: they come and go.

For models that do not fit into memory: the parity check runs transformers' own forward pass, and
each module's parameters are read from the checkpoint just before it runs and dropped just after.
Embeddings read only the rows they look up, the head goes over its rows in pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specexport import heap
from specexport.datafile import CHUNK_BYTES
from specexport.sources import Source
from specexport.weights import Weights

LINEAR_BYTES = 256 << 20  # a linear layer larger than this goes over its rows in pieces


def load(source: Source) -> Any:
    """The model of ``source`` in eval mode, its parameters on the meta device between uses."""
    from accelerate import init_empty_weights

    model_class, config = source.class_and_config()
    with init_empty_weights(include_buffers=False):
        model: Any = model_class(config)
    model.eval()
    for path, module in model.named_modules():
        _attach(module, path, source.weights)
    return model


def load_mtp(target: Any, weights: Weights) -> Any:
    """The MTP layers of ``target``, likewise; what they share with it stays the target's."""
    from accelerate import init_empty_weights
    from transformers.modeling_layers import MtpModel

    with init_empty_weights(include_buffers=False):
        model: Any = MtpModel(target, target.config.num_mtp_layers)
    model.eval()
    for path, module in model.layers.named_modules(prefix="layers"):
        _attach(module, path, weights)
    return model


def _attach(module: torch.nn.Module, path: str, weights: Weights) -> None:
    prefix = f"{path}." if path else ""
    for name, buffer in module.named_buffers(recurse=False):
        if prefix + name in weights:
            module._buffers[name] = torch.from_numpy(weights.read(prefix + name)).to(buffer.dtype)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if isinstance(module, torch.nn.Embedding):
        _replace_forward(module, torch.nn.Embedding, _lookup(weights, f"{prefix}weight"))
    elif isinstance(module, torch.nn.Linear) and _bytes(module) > LINEAR_BYTES:
        module.forward = _row_pieces(weights, f"{prefix}weight")  # type: ignore[method-assign]
    elif hasattr(module, "gate_up_proj"):
        module.forward = _experts(module, weights, path)
    elif names and "." not in path:
        # The model itself looks at its heads and projections, so these stay.
        _fill(names, prefix, weights)(module, None)
    elif names:
        module.register_forward_pre_hook(_fill(names, prefix, weights))
        module.register_forward_hook(_drop(names))


def _bytes(module: torch.nn.Linear) -> int:
    return module.in_features * module.out_features * 4


def _fill(names: list[str], prefix: str, weights: Weights) -> Any:
    def hook(module: torch.nn.Module, _: Any) -> None:
        for name in names:
            value = torch.from_numpy(weights.read(prefix + name)).float()
            module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)

    return hook


def _drop(names: list[str]) -> Any:
    def hook(module: torch.nn.Module, _: Any, __: Any) -> None:
        for name in names:
            parameter = module._parameters[name]
            assert parameter is not None
            empty = torch.empty_like(parameter, device="meta")
            module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
        heap.give_back()

    return hook


def _replace_forward(module: torch.nn.Module, base: type, lookup: Any) -> None:
    """Subclasses scale what the base class looks up, so the base's lookup is what is replaced."""
    if type(module) is base:
        module.forward = lookup
        return
    scale = getattr(module, "embed_scale", None)
    if scale is None:
        raise TypeError(f"{type(module).__name__} is an embedding that is not known")
    module.forward = lambda ids: lookup(ids) * scale.to(torch.float32)


def _lookup(weights: Weights, name: str) -> Any:
    def forward(ids: torch.Tensor) -> torch.Tensor:
        unique, inverse = np.unique(ids.numpy(), return_inverse=True)
        rows = np.concatenate([weights.read_rows(name, int(i), int(i) + 1) for i in unique])
        return torch.from_numpy(rows).float()[torch.from_numpy(inverse).view(ids.shape)]

    return forward


def _experts(module: Any, weights: Weights, path: str) -> Any:
    """Reads the matrices of one expert at a time, of those that are used.

    As transformers' own loop (models/gemma4/modeling_gemma4.py, Gemma4TextExperts).
    """
    if module.has_bias or module.is_transposed or not module.is_concatenated:
        raise TypeError(f"{type(module).__name__} are experts that are not known")

    def matrix(name: str, expert: int) -> torch.Tensor:
        pieces = list(weights.chunks(f"{path}.{name}", CHUNK_BYTES, expert))
        return torch.from_numpy(np.concatenate(pieces)).float()

    def forward(x: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in np.unique(experts.numpy()).tolist():
            rows, place = torch.where(experts == expert)
            gate, up = (x[rows] @ matrix("gate_up_proj", expert).T).chunk(2, dim=-1)
            y = (module.act_fn(gate) * up) @ matrix("down_proj", expert).T
            out.index_add_(0, rows, y * shares[rows, place, None])
        heap.give_back()
        return out

    return forward


def _row_pieces(weights: Weights, name: str) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        pieces = [
            x @ torch.from_numpy(rows).float().T for rows in weights.chunks(name, 4 * CHUNK_BYTES)
        ]
        return torch.cat(pieces, dim=-1)

    return forward
