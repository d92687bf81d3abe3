"""What a manifest may say of plans, which is taken on a device, and which profile for a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from specrun.decode import DecodeError, decode, encode
from specrun.errors import EngineError
from specrun.plans import (
    Flavour,
    PlanSpec,
    ProfileSpec,
    ShapeRange,
    TrtDevice,
    fitting_profile,
    pick,
    why_not,
)

SHA = "0" * 64
ROWS = {
    "prefill": ShapeRange((1, 1), (1, 64), (1, 64)),
    "decode": ShapeRange((1, 2), (1, 5), (1, 8)),
}
PLAN = PlanSpec(
    flavour="tensorrt_rtx",
    version="1.7.1.116",
    compute_capability=86,
    file="target.sm86.engine",
    size=1000,
    sha256=SHA,
    key=SHA,
    profiles=(
        ProfileSpec("prefill", {"tokens": ROWS["prefill"]}),
        ProfileSpec("decode", {"tokens": ROWS["decode"]}),
    ),
)


def device(**changes: Any) -> TrtDevice:
    """The device that PLAN is for, with changes."""
    here = TrtDevice("tensorrt_rtx", "1.7.1.116", 86, "NVIDIA RTX A2000")
    return dataclasses.replace(here, **changes)


def test_a_plan_goes_through_a_manifest() -> None:
    assert decode(PlanSpec, encode(PLAN)) == PLAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "newest"}, "version must be numbers and dots, got 'newest'"),
        ({"compute_capability": 8}, "compute_capability must be in 10..999, got 8"),
        ({"file": "../plan"}, "path must stay inside the folder"),
        ({"size": 0}, "size must be in 1"),
        ({"sha256": "x"}, "sha256 must be 64 hexadecimal digits"),
        ({"key": "x"}, "key must be 64 hexadecimal digits"),
        ({"flavour": "cuda"}, "flavour: must be one of"),
        ({"profiles": []}, r"profiles must be \['prefill', 'decode'\] or \['decode'\], got \[\]"),
        ({"profiles": encode(PLAN.profiles)[::-1]}, r"got \['decode', 'prefill'\]"),
        ({"profiles": [{"name": "decode", "inputs": {}}]}, "inputs must be in 1"),
    ],
)
def test_what_a_plan_must_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode(PlanSpec, encode(PLAN) | change)


@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 1), (1, 1), (1,)),
        ((2,), (1,), (3,)),
        ((1,), (4,), (3,)),
        ((-1,), (1,), (1,)),
        ((1,), (1,), (1 << 31,)),
        ((1,) * 9,) * 3,
    ],
)
def test_what_a_range_must_be(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="min"):
        ShapeRange(*shapes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"name": "another"}, None),
        ({"flavour": "tensorrt"}, "is a plan of TensorRT-RTX, asked for is TensorRT"),
        ({"version": "1.7.1.117"}, "was built by TensorRT-RTX 1.7.1.116, 1.7.1.117 is installed"),
        ({"compute_capability": 89}, "was built for SM 86, NVIDIA RTX A2000 is SM 89"),
    ],
)
def test_where_a_plan_runs(changes: dict[str, Any], reason: str | None) -> None:
    found = why_not(PLAN, device(**changes))
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_the_plan_of_this_device_is_taken() -> None:
    other = dataclasses.replace(PLAN, compute_capability=89, file="target.sm89.engine")
    folder = Path("engines")
    assert pick([other, PLAN], device(), folder, "target") is PLAN
    with pytest.raises(EngineError) as caught:
        pick([other, PLAN], device(compute_capability=75), folder, "target")
    assert str(caught.value) == (
        "target: target.sm89.engine was built for SM 89, NVIDIA RTX A2000 is SM 75;"
        " target.sm86.engine was built for SM 86, NVIDIA RTX A2000 is SM 75"
    )
    assert caught.value.hint == "build it here: specexport build engines --backend tensorrt-rtx"


@pytest.mark.parametrize(
    ("flavour", "backend"), [("tensorrt", "tensorrt"), ("tensorrt_rtx", "tensorrt-rtx")]
)
def test_no_plan_at_all(flavour: Flavour, backend: str) -> None:
    with pytest.raises(EngineError, match="drafter: the folder has no plan of it") as caught:
        pick([], device(flavour=flavour), Path("engines"), "drafter")
    assert str(caught.value.hint).endswith(f"--backend {backend}")


@pytest.mark.parametrize(("rows", "number"), [(1, 0), (2, 1), (8, 1), (9, 0), (64, 0)])
def test_decode_where_it_fits(rows: int, number: int) -> None:
    assert fitting_profile(PLAN, {"tokens": (1, rows), "static": (7,)}) == number


def test_no_profile_fits() -> None:
    message = (
        r"target.sm86.engine: tokens has shape \[1, 65\],"
        r" the plan takes prefill \[1, 1\]..\[1, 64\], decode \[1, 2\]..\[1, 8\]"
    )
    with pytest.raises(EngineError, match=message):
        fitting_profile(PLAN, {"tokens": (1, 65)})
    with pytest.raises(EngineError, match=r"tokens has shape \[65\]"):
        fitting_profile(PLAN, {"tokens": (65,)})
