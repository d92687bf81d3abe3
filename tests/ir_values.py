"""Values of graphs made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

Dims = Sequence[int | str | None]


def value(name: str, dims: Dims, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    """A value of known type and shape."""
    return ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype))


def initializer(name: str, array: NDArray[Any]) -> ir.Value:
    """A value with a constant."""
    tensor = ir.Tensor(array, name=name)
    made = value(name, array.shape, tensor.dtype)
    made.const_value = tensor
    return made
