"""Linear layers read their weight as the checkpoint stores it."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from specgraphs.passes.reshapes import permutation


class FuseTransposedWeights(InPlacePass):
    """``MatMul(x, Transpose(weight))`` becomes ``FusedMatMul(x, weight, transB=1)``.

    Case 1: weight is a 2-D initializer ``[out, in]`` and the transpose swaps its axes.
    Ensures: no transposed copy of a weight is made at load, and a tied head and embedding are one
    initializer, stored and mapped once.
    """

    def call(self, model: ir.Model) -> PassResult:
        modified = False
        for node in list(model.graph):
            if node.op_type != "MatMul" or node.domain != "":
                continue
            transpose = node.inputs[1].producer() if node.inputs[1] is not None else None
            if transpose is None or transpose.op_type != "Transpose":
                continue
            weight = transpose.inputs[0]
            if weight is None or weight.shape is None or not weight.is_initializer():
                continue
            if permutation(transpose, len(weight.shape)) != [1, 0]:
                continue
            node.replace_input_with(1, weight)
            node.domain, node.op_type = "com.microsoft", "FusedMatMul"
            node.attributes["transB"] = ir.AttrInt64("transB", 1)
            modified = True
        if modified:
            model.opset_imports["com.microsoft"] = 1
        return PassResult(model, modified)
