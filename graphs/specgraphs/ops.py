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


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head: ``x * cos + [-x2, x1] * sin``.

    x ``[batch, rows, heads, head]``; cos and sin ``[batch, rows, head]`` whose halves are equal,
    as transformers computes them: the operator takes one half.
    """
    batch, rows, heads, head = x.shape
    out: torch.Tensor = onnx_ops.symbolic(
        "RotaryEmbedding",
        [x.reshape(batch, rows, heads * head), cos[..., : head // 2], sin[..., : head // 2]],
        attrs={"num_heads": heads},
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
