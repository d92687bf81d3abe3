"""Attention: what the parser drops, and what has no kernel."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto

from specgraphs.trt_rules.view import HALVES, View, Violation, attributes, called, dtype_name, given

MASK, PAST_KEY, PAST_VALUE, NONPAD = 3, 4, 5, 6
KNOWN_ATTRIBUTES = {"scale", "is_causal", "softcap", "qk_matmul_output_mode"}
SMALLEST_HEAD, LARGEST_HEAD, HEAD_STEP = 16, 256, 8
DECOMPOSE = "write this attention as MatMul, Softmax and MatMul"
IN_MASK = "put causality, window and padding into the boolean mask"


def attention(view: View) -> Iterator[Violation]:
    """Every Attention node: inputs, attributes, mask, type and head size."""
    for node in view.nodes:
        if node.op_type == "Attention" and not node.domain:
            yield from _ports(node)
            yield from _attributes(node)
            yield from _mask(view, node)
            yield from _kernel(view, node)
            yield from _shared_keys(view, node)


def _ports(node: onnx.NodeProto) -> Iterator[Violation]:
    name = called(node)
    if given(node, NONPAD):
        # The parser takes the input and does nothing with it.
        yield Violation(name, "attention-nonpad", "nonpad_kv_seqlen is ignored", IN_MASK)
    if given(node, PAST_KEY) or given(node, PAST_VALUE):
        hint = "append with TensorScatter and attend to its result"
        yield Violation(name, "attention-past", "past inputs of Attention are not supported", hint)
    if any(node.output[1:]):
        hint = "ask for the first output only"
        yield Violation(name, "attention-outputs", "only one output is supported", hint)


def _attributes(node: onnx.NodeProto) -> Iterator[Violation]:
    name, values = called(node), attributes(node)
    if values.get("is_causal"):
        # Without a mask it is taken, and aligned to the upper left: rows see the wrong columns.
        yield Violation(name, "attention-causal", "is_causal hides the wrong columns", IN_MASK)
    if values.get("softcap"):
        yield Violation(name, "attention-softcap", "softcap is not supported", DECOMPOSE)
    for attribute in sorted(values.keys() - KNOWN_ATTRIBUTES):
        message = f"attribute {attribute!r} is ignored or refused"
        rule = "attention-window" if "window" in attribute else "attention-attribute"
        yield Violation(name, rule, message, IN_MASK)


def _mask(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    name, mask = called(node), given(node, MASK)
    if not mask:
        message = "has no mask, so it reads rows that hold nothing"
        yield Violation(name, "attention-no-mask", message, IN_MASK)
        return
    if view.dtype(mask) != TensorProto.BOOL:
        message = f"mask {mask!r} is {dtype_name(view.dtype(mask))}, it must be BOOL"
        yield Violation(name, "attention-mask-dtype", message, IN_MASK)
    shape = view.shape(mask)
    if shape is None or len(shape) != 4:
        message = f"mask {mask!r} has shape {shape}, it must be [batch, 1, rows, capacity]"
        yield Violation(name, "attention-mask-rank", message, "unsqueeze it to four axes")


def _kernel(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    name = called(node)
    for port in node.input[:3]:
        if view.dtype(port) not in HALVES:
            message = f"{port!r} is {dtype_name(view.dtype(port))}: no kernel but for halves"
            yield Violation(name, "attention-dtype", message, DECOMPOSE)
        shape = view.shape(port)
        if shape is None or len(shape) != 4:
            message = f"{port!r} has shape {shape}, it must be [batch, heads, rows, head size]"
            yield Violation(name, "attention-rank", message, "reshape and transpose it before")
        elif not has_kernel(shape[3]):
            message = f"there is no kernel for a head size of {shape[3]} ({port!r})"
            yield Violation(name, "attention-head-size", message, DECOMPOSE)


def _shared_keys(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    """TensorRT splits a scale over queries and keys. Equal scaled keys are merged, and the builder
    dies of two attentions that read the one value: measured, with fused kernels of any size."""
    key = given(node, 1)
    sharing = [n for n in view.readers.get(key, []) if n.op_type == "Attention"]
    sharing = [n for n in sharing if given(n, 1) == key]
    if len(sharing) > 1 and attributes(node).get("scale") != 1.0:
        message = f"scales keys {key!r} that {len(sharing)} attentions read: the builder crashes"
        hint = "scale the queries before, and write scale=1"
        yield Violation(called(node), "attention-shared-scale", message, hint)


def has_kernel(head_size: int | str | None) -> bool:
    """Whether TensorRT has a fused attention for heads of this size, in fp16 and bf16."""
    return (
        isinstance(head_size, int)
        and SMALLEST_HEAD <= head_size <= LARGEST_HEAD
        and head_size % HEAD_STEP == 0
    )
