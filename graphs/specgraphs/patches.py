"""Makes a transformers model emit the operators of :mod:`specgraphs.ops` while it is traced.

Attention goes through transformers' own registry; norms are patched on the instances of the one
model; the rotary function of the modeling module is swapped inside a context manager and put back,
and so is the order in which it goes through sets. Nothing else of transformers is touched, so its
code computes everything else.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specgraphs import latent, ops

ATTENTION = "specgraphs_kv"  # the name under which our attention is registered
ROTARY, INTERLEAVED = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"

Attend = Callable[..., torch.Tensor]
_active: list[Attend] = []


def register_attention() -> None:
    """Register the attention function with transformers (idempotent).

    No mask function is registered under the name, so transformers builds no masks at all.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    attend = _active[-1]
    if latent.is_latent(module):
        attend = functools.partial(latent.attention, attend)
    return attend(module, query, key, value, scale=scale, window=sliding_window or None), None


@contextlib.contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Route the model's attention calls to ``attend(module, q, k, v, scale=, window=)``."""
    _active.append(attend)
    try:
        yield
    finally:
        _active.pop()


def patch_norms(model: torch.nn.Module) -> None:
    """Let every RMSNorm instance of ``model`` whose formula we know emit one operator.

    A class that is not known keeps its own code, which traces to more nodes and is as right.
    """
    for module in model.modules():
        forward = _NORMS.get(type(module).__name__)
        if forward is not None:
            module.forward = types.MethodType(forward, module)


def _plain_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    epsilon = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    return ops.rms_norm(x, self.weight, epsilon)


def _offset_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(x, 1.0 + self.weight, self.eps)


def _optional_scale_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight = self.weight if self.with_scale else x.new_ones(x.shape[-1])
    return ops.rms_norm(x, weight, self.eps)


_NORMS: dict[str, Callable[..., torch.Tensor]] = {
    "DeepseekV3RMSNorm": _plain_norm,
    "Glm4MoeRMSNorm": _plain_norm,
    "LlamaRMSNorm": _plain_norm,
    "MellumRMSNorm": _plain_norm,
    "Qwen3RMSNorm": _plain_norm,
    "Gemma3RMSNorm": _offset_norm,
    "Gemma4RMSNorm": _optional_scale_norm,
    "Gemma4UnifiedRMSNorm": _optional_scale_norm,
}


@contextlib.contextmanager
def rotary_as_operator(model: torch.nn.Module) -> Iterator[None]:
    """Swap the rotary functions in the modeling modules of ``model``; put back on exit."""
    modules = {type(module).__module__ for module in model.modules()}
    swapped: list[tuple[types.ModuleType, str, Any]] = []
    try:
        for modeling in (sys.modules[name] for name in sorted(modules)):
            for name in (ROTARY, INTERLEAVED):
                original = getattr(modeling, name, None)
                replacement = None if original is None else _rotary_like(original)
                if replacement is not None:
                    swapped.append((modeling, name, original))
                    setattr(modeling, name, replacement)
        yield
    finally:
        for modeling, name, original in swapped:
            setattr(modeling, name, original)


class _Sorted(set[Any]):
    """A set that is gone through in order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))


@contextlib.contextmanager
def sets_in_order(model: torch.nn.Module) -> Iterator[None]:
    """Let the modeling code of ``model`` go through sets in order; put back on exit.

    Cosines and sines of each kind of layer are computed by going through a set of their names,
    whose hashes are others in every process: the graph file would be another one each time.
    """
    names = {type(module).__module__ for module in model.modules()}
    modelings = [sys.modules[name] for name in names if name.startswith("transformers.")]
    kept = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, set) and not name.startswith("_")  # those are torch's own
    ]
    try:
        for modeling in modelings:
            vars(modeling)["set"] = _Sorted
        for module, name, value in kept:
            setattr(module, name, _Sorted(value))
        yield
    finally:
        for modeling in modelings:
            vars(modeling).pop("set", None)
        for module, name, value in kept:
            setattr(module, name, value)


def _rotary_like(original: Callable[..., Any]) -> Callable[..., Any] | None:
    """A replacement with the parameters of ``original``; None for a form that is not known."""
    names = list(inspect.signature(original).parameters)
    unsqueeze_dim = inspect.signature(original).parameters.get("unsqueeze_dim")
    if unsqueeze_dim is None:
        return None
    default = unsqueeze_dim.default
    interleaved = original.__name__ == INTERLEAVED
    if names[:3] == ["x", "cos", "sin"]:

        def rotate_one(
            x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = default
        ) -> torch.Tensor:
            return _rotate(x, cos, sin, unsqueeze_dim)

        return rotate_one
    if names[:4] == ["q", "k", "cos", "sin"]:

        def rotate_two(
            q: torch.Tensor,
            k: torch.Tensor,
            cos: torch.Tensor,
            sin: torch.Tensor,
            unsqueeze_dim: int = default,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            rotated = (_rotate(x, cos, sin, unsqueeze_dim, interleaved) for x in (q, k))
            return next(rotated), next(rotated)

        return rotate_two
    return None


def _rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    interleaved: bool = False,
) -> torch.Tensor:
    """unsqueeze_dim 2: x is [batch, rows, heads, head]; 1: [batch, heads, rows, head].

    transformers' interleaved form takes pairs and returns halves, the operator returns pairs.
    Queries and keys are permuted alike, so their products are the same.
    """
    if unsqueeze_dim == 2:
        return ops.rotary(x, cos, sin, interleaved=interleaved)
    return ops.rotary(x.transpose(1, 2), cos, sin, interleaved=interleaved).transpose(1, 2)
