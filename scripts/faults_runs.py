"""Faults of runs: of the target's engines, of drafters' engines, and of PyTorch in their place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import torch
from faults import (
    Counted,
    Fault,
    Outcome,
    Plant,
    generate,
    raising,
)
from small_vocabulary import METHODS

from specexport import verification
from specexport.errors import SourceError
from specrun.ort import PreparedRun

# Engines of the target of a folder, and that of a method's drafter.
TARGETS = {"llama": ("front", "back", "head"), "mtp": ("target",), "gemma4": ("target",)}
DRAFTERS = {
    "draft": "draft",
    "universal": "universal",
    "mtp": "mtp.0",
    "mtp-drafter": "mtp_drafter",
}
RUN_ERRORS: dict[str, Callable[[], BaseException]] = {
    "raises": lambda: RuntimeError("planted"),
    "runs out of memory": MemoryError,
}
ANSWERS = {"answers NaN": np.nan, "answers infinity": np.inf}


def runs_fail(engines: Sequence[str], first: int, kind: str) -> Plant:
    """Runs of ``engines`` fail from number ``first`` on."""
    files = {f"{name}.onnx" for name in engines}

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        counted = Counted(first, lambda: None)
        real = PreparedRun.run

        def run(prepared: PreparedRun) -> None:
            if prepared.name not in files or not counted.due():
                return real(prepared)
            if kind in RUN_ERRORS:
                broken = mock.Mock()
                broken.run_with_iobinding.side_effect = RUN_ERRORS[kind]()
                with mock.patch.object(prepared, "_session", broken):
                    return real(prepared)
            real(prepared)
            for array in prepared.outputs.values():
                if array.dtype.kind == "f":
                    array[...] = ANSWERS[kind]
            return None

        with mock.patch.object(PreparedRun, "run", run):
            yield

    return plant


def run_faults() -> Iterator[Fault]:
    """Every method's target and drafter, at the first run, in the prompt, and later."""
    for method, folder in METHODS.items():
        targets, drafter = TARGETS[folder], DRAFTERS.get(method)
        per_chunk = len(targets)
        places = {"first run": 0, "mid-prefill": 2 * per_chunk, "run n": 6 * per_chunk + 1}
        for seam, first in places.items():
            for kind in (*RUN_ERRORS, *ANSWERS):
                if kind in ANSWERS and method in ("plain", "universal"):
                    continue  # as prompt-lookup and draft
                # NaN on its way between parts shows in what the last of them says, which runs once
                # for the prompt.
                engines = targets[-1:] if kind in ANSWERS else targets
                at = min(first // per_chunk, 2) if kind in ANSWERS else first
                plant = runs_fail(engines, at, kind)
                yield Fault(
                    seam,
                    f"{method}, target {kind}",
                    ("torch",),
                    lambda b, _, m=method, p=plant: generate(b, m, p),  # type: ignore[misc]
                )
        if drafter is None:
            continue
        for first in (0, 3):
            for kind in (*RUN_ERRORS, *ANSWERS):
                plant = runs_fail([drafter], first, kind)
                expected: tuple[Outcome, ...] = ("plain",)
                if kind in ANSWERS:
                    expected = ("plain", "same")  # its tokens may be right or wrong all the same
                yield Fault(
                    "drafter only",
                    f"{method}, run {first} {kind}",
                    expected,
                    lambda b, _, m=method, p=plant: generate(b, m, p),  # type: ignore[misc]
                )
    for name, options, expected in (
        ("strict", {"options": {"strict": True}}, ("error",)),
        ("verify engine", {"engine_options": {"verify": "engine"}}, ("error",)),
        ("exact", {"engine_options": {"exact": True, "prefill_chunk": 256}}, ("error",)),
    ):
        for first in (0, 2):
            plant = runs_fail(["target"], first, "raises")
            yield Fault(
                "nobody stands in",
                f"{name}, run {first}",
                expected,
                lambda b, _, p=plant, o=options: generate(b, "mtp-drafter", p, **o),  # type: ignore[misc]
            )
    for first in (0, 5):
        yield Fault(
            "both fail",
            f"no checkpoint, run {first}",
            ("error",),
            lambda b, _, n=first: generate(b, "mtp-drafter", lost_checkpoint(n)),  # type: ignore[misc]
        )
        yield Fault(
            "both fail",
            f"PyTorch raises too, run {first}",
            ("error",),
            lambda b, _, n=first: generate(b, "mtp-drafter", broken_torch(n)),  # type: ignore[misc]
        )
    for first in (0, 4):
        yield Fault(
            "PyTorch alone",
            f"raises in attention {first}",
            ("error",),
            lambda b, _, n=first: generate(  # type: ignore[misc]
                b, "mtp-drafter", attention_fails(n), engine_options={"verify": "torch"}
            ),
        )


def lost_checkpoint(first: int) -> Plant:
    """The target fails and its checkpoint cannot be found."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        lost = mock.patch.object(verification, "find", Counted(0, raising(SourceError("lost"))))
        with runs_fail(["target"], first, "raises")(), lost:
            yield

    return plant


def broken_torch(first: int) -> Plant:
    """The target fails, and so does PyTorch when it reads what was committed, or goes on."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with runs_fail(["target"], first, "raises")(), attention_fails(1)():
            yield

    return plant


def attention_fails(first: int) -> Plant:
    """PyTorch's attention raises from call ``first`` on."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        real = torch.nn.functional.scaled_dot_product_attention
        counted = Counted(first, raising(RuntimeError("planted")))

        def attend(*arguments: Any, **named: Any) -> Any:
            counted()
            return real(*arguments, **named)

        with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend):
            yield

    return plant
