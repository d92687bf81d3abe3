"""The operators of the TensorRT dialect in PyTorch, each as the ONNX specification says.

A function per operator: tensors and attributes in, a tensor or a list of tensors out. Results have
the dtype of the inputs, sums inside of half precision are PyTorch's. TensorScatter writes in place,
as an engine does whose output is the buffer of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

Tensor = torch.Tensor
# Numbers of ONNX. Two 4-bit integers share a byte, see ``unpack``.
TYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    16: torch.bfloat16,
}
INT4 = 22


def unpack(packed: Tensor, count: int) -> Tensor:
    """Signed 4-bit integers, the low half of a byte first, as int8."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1).flatten()[:count].to(torch.int8)
    return torch.where(pairs > 7, pairs - 16, pairs)


def ints(tensor: Tensor) -> list[int]:
    """Sizes, axes and the like as Python's integers."""
    found: list[int] = tensor.flatten().tolist()
    return found


def reshape(x: Tensor, shape: Tensor, allowzero: int = 0) -> Tensor:
    sizes = ints(shape)
    if not allowzero:
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def slice_(
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    count = len(ints(starts))
    where = list(range(count)) if axes is None else ints(axes)
    by = [1] * count if steps is None else ints(steps)
    index: list[slice] = [slice(None)] * x.dim()
    for axis, start, end, step in zip(where, ints(starts), ints(ends), by, strict=True):
        if step < 1:
            raise ValueError(f"Slice: step must be at least 1, got {step}")
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def split(
    x: Tensor, sizes: Tensor | None = None, axis: int = 0, num_outputs: int | None = None
) -> list[Tensor]:
    if sizes is not None:
        return list(torch.split(x, ints(sizes), dim=axis))
    assert num_outputs is not None
    return list(torch.split(x, -(-x.shape[axis] // num_outputs), dim=axis))


def gather(table: Tensor, ids: Tensor, axis: int = 0) -> Tensor:
    axis = axis % table.dim()
    found = table.index_select(axis, ids.flatten())
    return found.reshape(*table.shape[:axis], *ids.shape, *table.shape[axis + 1 :])


def gather_nd(x: Tensor, ids: Tensor, batch_dims: int = 0) -> Tensor:
    """``x[b, ids[b, n, 0], ids[b, n, 1], ...]``, with ``batch_dims`` axes in place of b."""
    lead, count = x.shape[:batch_dims], ids.shape[-1]
    flat = x.reshape(-1, *x.shape[batch_dims:])
    wanted = ids.reshape(flat.shape[0], -1, count)
    rows = torch.arange(flat.shape[0], device=x.device)[:, None]
    found = flat[(rows, *wanted.unbind(-1))]
    return found.reshape(*lead, *ids.shape[batch_dims:-1], *found.shape[2:])


def expand(x: Tensor, shape: Tensor) -> Tensor:
    sizes: tuple[int, ...] = np.broadcast_shapes(tuple(x.shape), tuple(ints(shape)))
    return x.expand(sizes)


def squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(ints(axes)))


def unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.dim() + axes.numel()
    for axis in sorted(axis % rank for axis in ints(axes)):
        x = x.unsqueeze(axis)
    return x


def shape(x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


def range_(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(int(start), int(limit), int(delta), dtype=start.dtype)


def constant_of_shape(sizes: Tensor, value: Tensor | None = None) -> Tensor:
    if value is None:
        return torch.zeros(ints(sizes))
    return value.reshape(()).expand(ints(sizes)).clone()


def reduce_sum(
    x: Tensor, axes: Tensor | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    if axes is None or axes.numel() == 0:
        return x if noop_with_empty_axes else x.sum(tuple(range(x.dim())), keepdim=bool(keepdims))
    return x.sum(tuple(ints(axes)), keepdim=bool(keepdims))


def top_k(x: Tensor, k: Tensor, axis: int = -1, largest: int = 1, sorted: int = 1) -> list[Tensor]:
    """Of equal values the first comes first."""
    values, places = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return [part.narrow(axis, 0, int(k)) for part in (values, places)]


def argmax(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    if select_last_index:
        raise ValueError("ArgMax: select_last_index is not 0")
    return x.argmax(dim=axis, keepdim=bool(keepdims))


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    y = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return y if c is None else y + beta * c


def rms_normalization(
    x: Tensor, weight: Tensor, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon)`` in float32, times the weight in x's dtype."""
    wide = x.float()
    dims = tuple(range(axis % x.dim(), x.dim()))
    scale = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * weight


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """``x`` ``[batch, rows, heads * head]`` or ``[batch, heads, rows, head]``; ``cos`` and ``sin``
    ``[batch, rows, half]`` of the rows."""
    whole = x
    if x.dim() == 3:
        x = x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2)
    size = rotary_embedding_dim or x.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        one, two = turned[..., 0::2], turned[..., 1::2]
    else:
        one, two = turned.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    parts = (cos * one - sin * two, sin * one + cos * two)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    y = torch.cat([turned, rest], dim=-1)
    return y if whole.dim() == 4 else y.transpose(1, 2).flatten(2)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float = 1.0
) -> Tensor:
    """``softmax(scale * query . key where mask) . value``; heads in groups share keys."""
    if mask.dtype is not torch.bool:
        raise ValueError(f"Attention: the mask must be bool, is {mask.dtype}")
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = scale * (query @ key.transpose(-1, -2)).float()
    scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    return scores.softmax(-1).to(query.dtype) @ value


def tensor_scatter(
    past: Tensor, new: Tensor, start: Tensor, axis: int = -2, mode: str = "linear"
) -> Tensor:
    """Rows of ``new`` behind ``start[b]`` rows of sequence b, in place."""
    if mode != "linear":
        raise ValueError(f"TensorScatter: mode must be linear, is {mode}")
    rows = new.shape[axis]
    for row, first in enumerate(ints(start)):
        if first < 0 or first + rows > past.shape[axis]:
            raise ValueError(f"TensorScatter: rows {first}..{first + rows} of {past.shape[axis]}")
        past[row].narrow(axis % past.dim() - 1, first, rows).copy_(new[row])
    return past


def dequantize_linear(
    x: Tensor, scale: Tensor, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    """``x * scale``, a scale per row of the axis, or per block along it."""
    if block_size:
        scale = scale.repeat_interleave(block_size, dim=axis)
    elif scale.dim() == 1:
        scale = scale.reshape([-1 if a == axis % x.dim() else 1 for a in range(x.dim())])
    return x.to(scale.dtype) * scale


def scatter_elements(
    x: Tensor, ids: Tensor, new: Tensor, axis: int = 0, reduction: str = "none"
) -> Tensor:
    if reduction != "none":
        raise ValueError(f"ScatterElements: reduction must be none, is {reduction}")
    return x.scatter(axis, ids, new)


def divide(a: Tensor, b: Tensor) -> Tensor:
    whole = not (a.is_floating_point() or b.is_floating_point())
    return torch.div(a, b, rounding_mode="trunc" if whole else None)


def largest(*parts: Tensor) -> Tensor:
    result = parts[0]
    for part in parts[1:]:
        result = torch.maximum(result, part)
    return result


def total(*parts: Tensor) -> Tensor:
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


# Inputs that are sizes, axes and the like, by number: the host reads them.
ON_HOST: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Range": (0, 1, 2),
    "ReduceMax": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}
OPERATORS: dict[str, Callable[..., Tensor | Sequence[Tensor]]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "ArgMax": argmax,
    "Attention": attention,
    "Cast": lambda x, to, saturate=1: x.to(TYPES[to]),
    "Concat": lambda *parts, axis: torch.cat(parts, dim=axis),
    "ConstantOfShape": constant_of_shape,
    "Cos": torch.cos,
    "DequantizeLinear": dequantize_linear,
    "Div": divide,
    "Equal": torch.eq,
    "Expand": expand,
    "Gather": gather,
    "GatherElements": lambda x, ids, axis=0: x.gather(axis, ids),
    "GatherND": gather_nd,
    "Gelu": lambda x, approximate="none": torch.nn.functional.gelu(x, approximate=approximate),
    "Gemm": gemm,
    "Greater": torch.gt,
    "Identity": lambda x: x,
    "LessOrEqual": torch.le,
    "MatMul": torch.matmul,
    "Max": largest,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "RMSNormalization": rms_normalization,
    "Range": range_,
    "ReduceMax": lambda x, axes, keepdims=1: x.amax(tuple(ints(axes)), keepdim=bool(keepdims)),
    "ReduceSum": reduce_sum,
    "Reshape": reshape,
    "RotaryEmbedding": rotary_embedding,
    "ScatterElements": scatter_elements,
    "Shape": shape,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Slice": slice_,
    "Softmax": lambda x, axis=-1: x.softmax(axis),
    "Split": split,
    "Squeeze": squeeze,
    "Sub": torch.sub,
    "Sum": total,
    "Tanh": torch.tanh,
    "TensorScatter": tensor_scatter,
    "TopK": top_k,
    "Transpose": lambda x, perm: x.permute(perm),
    "Unsqueeze": unsqueeze,
    "Where": torch.where,
}
