"""Multi-head latent attention whose KV buffers hold the latent: one row for all query heads.

Paper: DeepSeek-V2 (arXiv:2405.04434), section 2.1; code: transformers 5.24,
models/deepseek_v3/modeling_deepseek_v3.py. A token is cached as its latent c ``[rank]`` and one
rotated key k ``[rope]``; the up-projections W_UK and W_UV of ``kv_b_proj`` are applied to the
query and to the result instead of to every cached row. For one head::

    q_nope . (W_UK c) + q_rope . k  =  [W_UK^T q_nope, q_rope] . [c, k]
    sum_j a_j (W_UV c_j)            =  W_UV (sum_j a_j c_j)

The key buffer holds the first half of ``[c, k]`` and the value buffer the second, so a row stands
in memory once. Weights stay the checkpoint's ``kv_b_proj``.

Measured against the plain form (keys and values of every head, values padded to the key's size,
GroupQueryAttention): 2 layers, hidden size 2048, 16 heads of 128 + 64, rank 512, fp32, one thread,
ONNX Runtime 1.32; sum over the nodes of a step, each the least of 40 runs. KV per token and layer:
2,304 bytes instead of 24,576. With the latent in GroupQueryAttention, which reads it once per head,
a step of 5 rows after 4096 took 159 ms::

    tokens in the KV, rows | 64, 1 | 64, 5 | 1024, 1 | 1024, 5 | 4096, 1 | 4096, 5
    plain, ms              |  24.4 |  25.4 |    26.3 |    31.7 |    42.0 |    69.7
    latent, ms             |  21.7 |  26.3 |    22.5 |    30.0 |    28.4 |    42.7

A block of 256 rows after 1024 costs more: 1.33 s instead of 1.07 s, the least of 6 runs.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

Attend = Callable[..., torch.Tensor]


def is_latent(module: Any) -> bool:
    """Whether an attention module was given latent keys by :func:`patch`."""
    return getattr(module, "expand_kv", None) is not None


def patch(model: torch.nn.Module) -> None:
    """Let the latent attention modules of ``model`` attend to ``[latent, rotated key]`` as it is.

    Of the weighted sum of such rows only the part of the latent is used.
    """
    module: Any
    for module in model.modules():
        if is_latent(module):
            module.expand_kv = types.MethodType(_keep_latent, module)


def _keep_latent(
    self: Any, latent: torch.Tensor, rotated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The halves of ``[latent, rotated]`` as key and value, ``[batch, 1, rows, half row]`` each.

    latent ``[batch, 1, rows, rank]``, rotated ``[batch, 1, rows, rope]``.
    """
    first, second = torch.cat([latent, rotated], dim=-1).chunk(2, dim=-1)
    return first, second


def attention(
    attend: Attend,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """``attend`` with the up-projections absorbed into query and result.

    query ``[batch, heads, rows, nope + rope]``, key and value ``[batch, 1, rows, half row]``;
    returns ``[batch, rows, heads, value size]``. ``scale`` is that of the uncompressed heads.
    Raises ValueError for an odd row or a window.
    """
    rank, nope, rope = module.kv_lora_rank, module.qk_nope_head_dim, module.qk_rope_head_dim
    if window is not None or (rank + rope) % 2:
        raise ValueError(f"latent rows of {rank} + {rope} with window {window} do not export")
    up = module.kv_b_proj.weight.view(module.num_heads, nope + module.v_head_dim, rank)
    up_key, up_value = up[:, :nope], up[:, nope:]
    absorbed = torch.cat([query[..., :nope] @ up_key, query[..., nope:]], dim=-1)
    mixed = attend(module, absorbed, key, value, scale=scale, window=window)[..., :rank]
    out: torch.Tensor = mixed.transpose(1, 2) @ up_value.transpose(1, 2)
    return out.transpose(1, 2)
