"""What a graph for TensorRT must not have, found by reading the graph; TensorRT is not needed.

Some of it the parser takes and then computes something else (``nonpad_kv_seqlen``, windows, crossed
caches, float64), some is refused only after a long build. Measured with TensorRT for RTX 1.7, see
``tests/test_static_rules.py``, which shows for each silent one that the parser takes it.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from specgraphs.trt_rules.attention import attention
from specgraphs.trt_rules.borders import borders
from specgraphs.trt_rules.caches import caches
from specgraphs.trt_rules.numbers import numbers
from specgraphs.trt_rules.quantized import quantized
from specgraphs.trt_rules.structure import structure
from specgraphs.trt_rules.view import View, Violation
from specrun.errors import EngineError

RULES = (structure, borders, attention, caches, quantized, numbers)
SHOWN = 5  # violations in the message of an error; the first ones mostly cause the others

__all__ = ["Violation", "check", "static_rules"]


def static_rules(model: onnx.ModelProto | Path | str) -> list[Violation]:
    """Everything that is wrong with a graph for TensorRT, an empty list if nothing is.

    ``model``: a model, or the path of its file; with a path its external data is looked at too.
    The model is not changed, and weights outside the file are not loaded.
    """
    if isinstance(model, onnx.ModelProto):
        view = View(model, None)
    else:
        view = View(onnx.load(model, load_external_data=False), Path(model).parent)
    return [violation for rule in RULES for violation in rule(view)]


def check(model: onnx.ModelProto | Path | str, name: str | None = None) -> None:
    """Raise EngineError if :func:`static_rules` finds anything; ``name``: of the engine."""
    found = static_rules(model)
    if not found:
        return
    what = name or ("the graph" if isinstance(model, onnx.ModelProto) else Path(model).name)
    lines = [f"  {violation}" for violation in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN} more")
    raise EngineError(
        "\n".join([f"TensorRT cannot run {what} as it is:", *lines]), hint=found[0].hint
    )
