"""Traces that tests share: equal ones only, and none while what makes them is patched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import traces
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraphs import trace as tracing
from specgraphs.trace import export

EXPORT = torch.onnx.export  # torch's own: modules of tests are read before any test runs
SIZE = 4


class Scaled(torch.nn.Module):
    """One layer, and whatever a test wants of it."""

    def __init__(self, *, factor: float = 2.0, values: float = 1.0, size: int = SIZE) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(size, SIZE)
        self.register_buffer("scale", torch.full((SIZE,), values))
        self.factor = factor
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.layer(x) * self.scale * self.factor
        return scaled


def nothing(*_: Any, **__: Any) -> traces.Program:
    """In place of torch's exporter, where only the number of traces counts."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20})
    return traces.Program(ir.Model(graph, ir_version=10))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> traces.Traces:
    """Traces of this test alone, of ``nothing``."""
    made = traces.Traces(nothing, tmp_path)
    monkeypatch.setattr(torch.onnx, "export", made)
    return made


@pytest.fixture
def real(shared: traces.Traces, monkeypatch: pytest.MonkeyPatch) -> traces.Traces:
    """Traces of this test alone."""
    monkeypatch.setattr(shared, "trace", EXPORT)
    return shared


def traced(module: torch.nn.Module, *, rows: int = 3, name: str = "out") -> ir.Model:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                with mode:
                    part._parameters[key] = torch.nn.Parameter(torch.empty_like(parameter))
    first = next(module.parameters())
    with mode:
        x = torch.zeros(rows, first.shape[1], dtype=first.dtype)
    return export(module, (x,), (None,), mode=mode, input_names=["x"], output_names=[name])


def text(model: ir.Model) -> list[str]:
    """Nodes, what they are called, and what one more would be called."""
    model.graph.append(ir.node("Add", list(model.graph.inputs) * 2))
    nodes = [str(ir.to_proto(node)) for node in model.graph.all_nodes()]
    return nodes + sorted(model.graph.initializers)


def test_equal_modules_are_traced_once(real: traces.Traces) -> None:
    first = text(traced(Scaled()))
    assert len(first) > 4
    with traces.anew():
        assert text(traced(Scaled())) == first
    assert text(traced(Scaled())) == first  # what a pass does with one model is its own
    assert real.made == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda: traced(Scaled(factor=3.0)),
        lambda: traced(Scaled(values=2.0)),
        lambda: traced(Scaled(size=SIZE + 1)),
        lambda: traced(Scaled().half()),
        lambda: traced(Scaled(), rows=4),
        lambda: traced(Scaled(), name="other"),
        lambda: traced(torch.nn.Sequential(Scaled())),
    ],
    ids=["attribute", "buffer", "shape", "dtype", "input", "name", "class"],
)
def test_what_differs_is_traced_anew(shared: traces.Traces, other: Callable[[], Any]) -> None:
    traced(Scaled())
    other()
    assert shared.made == 2


def test_a_hook_is_traced_anew(shared: traces.Traces) -> None:
    traced(Scaled())
    module = Scaled()
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    traced(module)
    assert shared.made == 2


def test_nothing_is_shared_while_our_code_is_patched(
    shared: traces.Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced(Scaled())
    monkeypatch.setattr(tracing.KvInputs, "__eq__", None)
    traced(Scaled())
    traced(Scaled())
    assert shared.made == 3


def test_another_forward_is_traced_anew(
    shared: traces.Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced(Scaled())
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: x)
    traced(Scaled())
    assert shared.made == 2


def test_of_the_unknown_nothing_is_shared(shared: traces.Traces) -> None:
    for _ in range(2):
        module = Scaled()
        vars(module)["unknown"] = object()
        traced(module)
    assert shared.made == 2
