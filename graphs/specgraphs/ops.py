"""ONNX operators emitted from inside a traced torch model.

Each function runs under torch.export on fake tensors and stands for exactly one ONNX node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.onnx import ops as onnx_ops

OPSET = 23  # RMSNormalization and RotaryEmbedding are standard operators from here on
IR_VERSION = 10  # what the least ONNX Runtime we allow reads

GROUP_QUERY_ATTENTION = "com.microsoft::GroupQueryAttention"
# Emitted while tracing only: passes.ExpandLatentAttention and experts.expand replace them.
OWN_DOMAIN, LATENT_ATTENTION, ROUTED_EXPERTS = "specgraphs", "LatentAttention", "RoutedExperts"


def attention_append(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: tuple[torch.Tensor, torch.Tensor],
    lengths: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append new keys and values to the KV buffers and attend to everything up to each row.

    Equation, for row r at position p = total - rows + r::

        present[p] = key[r], value[r]
        out[r]     = softmax(scale * query[r] . present_key[j]) @ present_value,
                     j in max(0, p - window + 1) .. p

    query ``[batch, heads, rows, head]``, key and value ``[batch, kv_heads, rows, head]``, past
    ``[batch, kv_heads, capacity, head]`` each; lengths: (last position int32 [batch], total int32
    [1]). Returns out ``[batch, rows, heads, head]`` and the two present buffers, which the caller
    binds to the same memory as past.
    """
    batch, heads, rows, head = query.shape
    out, present_key, present_value = onnx_ops.symbolic_multi_out(
        GROUP_QUERY_ATTENTION,
        [_flat(query), _flat(key), _flat(value), *past, *lengths],
        attrs=_attention_attrs(heads, past[0].shape[1], scale, window),
        dtypes=(query.dtype,) * 3,
        shapes=((batch, rows, heads * head), past[0].shape, past[1].shape),
        version=1,
    )
    return out.view(batch, rows, heads, head), present_key, present_value


def latent_append(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: tuple[torch.Tensor, torch.Tensor],
    lengths: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`attention_append` where key and value are two halves of one row, for all heads.

    Equation, for row r at position p, with row ``j = [present_key[j], present_value[j]]``::

        out[r] = softmax(scale * query[r] . row[j]) @ row,   j in 0 .. p

    query ``[batch, heads, rows, 2 * half]``, key and value ``[batch, 1, rows, half]``, past
    ``[batch, 1, capacity, half]`` each. Returns out ``[batch, rows, heads, 2 * half]`` and the two
    present buffers.
    """
    batch, heads, rows, size = query.shape
    out, present_key, present_value = onnx_ops.symbolic_multi_out(
        f"{OWN_DOMAIN}::{LATENT_ATTENTION}",
        [query.transpose(1, 2), _flat(key), _flat(value), *past, *lengths],
        attrs={"scale": float(scale)},
        dtypes=(query.dtype,) * 3,
        shapes=((batch, rows, heads, size), past[0].shape, past[1].shape),
        version=1,
    )
    return out, present_key, present_value


def attention_read(
    query: torch.Tensor,
    past: tuple[torch.Tensor, torch.Tensor],
    lengths: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend to KV buffers that another layer has filled, without adding to them.

    As :func:`attention_append` with no new keys: the last query row stands at the last position.
    One output only: a present output would make ONNX Runtime copy the whole buffer.
    """
    batch, heads, rows, head = query.shape
    kv_heads = past[0].shape[1]
    nothing = query.new_zeros(batch, 0, kv_heads * head)
    out: torch.Tensor = onnx_ops.symbolic(
        GROUP_QUERY_ATTENTION,
        [_flat(query), nothing, nothing, *past, *lengths],
        attrs=_attention_attrs(heads, kv_heads, scale, window),
        dtype=query.dtype,
        shape=(batch, rows, heads * head),
        version=1,
    )
    return out.view(batch, rows, heads, head)


def routed_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: str,
) -> torch.Tensor:
    """Every row through the experts that it was routed to, as a weighted sum.

    Equation, for row r and the k experts ``e_j = experts[r, j]``::

        gate, up = halves of gate_up[e_j] @ x[r]
        out[r]   = sum_j shares[r, j] * down[e_j] @ (activation(gate) * up)

    x ``[n, hidden]``, experts int64 and shares ``[n, k]``, gate_up ``[count, 2 * width, hidden]``,
    down ``[count, hidden, width]``. Shape and dtype of x.
    """
    out: torch.Tensor = onnx_ops.symbolic(
        f"{OWN_DOMAIN}::{ROUTED_EXPERTS}",
        [x, experts, shares, gate_up, down],
        attrs={"activation": activation},
        dtype=x.dtype,
        shape=x.shape,
        version=1,
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2, last axis) + epsilon) * weight``, the mean in fp32. Shape of x."""
    out: torch.Tensor = onnx_ops.symbolic(
        "RMSNormalization",
        [x, weight],
        attrs={"axis": -1, "epsilon": float(epsilon), "stash_type": 1},
        dtype=x.dtype,
        shape=x.shape,
        version=OPSET,
    )
    return out


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotate the first ``size`` values of each head: ``x * cos + [-x2, x1] * sin``.

    x ``[batch, rows, heads, head]``; cos and sin ``[batch, rows, size]`` whose halves are equal,
    as transformers computes them: the operator takes one half. x1 and x2 are the halves of what
    is rotated, or with ``interleaved`` its even and odd values; the result is laid out as x is.
    """
    batch, rows, heads, head = x.shape
    size = cos.shape[-1]
    attrs: dict[str, Any] = {"num_heads": heads, "interleaved": int(interleaved)}
    if size != head:
        attrs["rotary_embedding_dim"] = int(size)
    out: torch.Tensor = onnx_ops.symbolic(
        "RotaryEmbedding",
        [x.reshape(batch, rows, heads * head), cos[..., : size // 2], sin[..., : size // 2]],
        attrs=attrs,
        dtype=x.dtype,
        shape=(batch, rows, heads * head),
        version=OPSET,
    )
    return out.view(batch, rows, heads, head)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, rows, head]`` to ``[batch, rows, heads * head]``."""
    batch, heads, rows, head = x.shape
    return x.transpose(1, 2).reshape(batch, rows, heads * head)


def _attention_attrs(heads: int, kv_heads: int, scale: float, window: int | None) -> dict[str, Any]:
    return {
        "num_heads": heads,
        "kv_num_heads": int(kv_heads),
        "scale": float(scale),
        "local_window_size": -1 if window is None else int(window),
    }
