"""The parts of gpu_check.py: what each needs, how long it may take, and what it checks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_engines
import gpu_kit
import gpu_mid
import gpu_observe
import gpu_timing
from gpu_engines import Case
from gpu_kit import CHECKPOINTS, VARIANTS, Kit
from gpu_open import (
    Machine,
    by_engine,
    by_torch,
    check_onnxruntime,
    check_torch,
    tensorrt_missing,
    with_plans,
)
from gpu_verdict import Found, NotHere

import specrun
from specrun.errors import EngineError
from specrun.plans import BACKENDS, Flavour
from specrun.torch_verifier import NEEDED

TRT_VARIANTS = ("trt-fp16", "trt-bf16", "trt-int8", "trt-int4")
TINY_LEVEL = 1  # of TensorRT's builder for models whose speed does not matter
DRAFTS_ALONE = ("plain", "prompt-lookup", "early-exit")  # methods without an engine that drafts


@dataclass(frozen=True)
class Place:
    """What a part works on. ``work``: a folder for what it makes."""

    machine: Machine
    folder: Path
    work: Path

    @property
    def kit(self) -> Kit:
        """What the folder holds."""
        return gpu_kit.read(self.folder)

    @property
    def device(self) -> str:
        """``cuda``, or ``cpu``."""
        return self.machine.device


@dataclass(frozen=True)
class Part:
    """``missing``: of the machine, seen without loading anything. ``seconds``: that it may take.
    ``needs_kit``: whether it reads one."""

    name: str
    seconds: float
    missing: Callable[[Machine], str | None]
    run: Callable[[Place, Found], None]
    needs_kit: bool = True


def case_of(place: Place, recipe: str, variant: str, methods: tuple[str, ...] = ()) -> Case:
    """What is expected of a variant of a recipe. ``methods``: only these."""
    kit, activations = place.kit, VARIANTS[variant].activations
    return Case(
        f"{recipe} {variant}",
        tuple(m for m in kit.recipes[recipe] if not methods or m in methods),
        gpu_observe.read(gpu_kit.reference_path(place.folder, recipe, variant)),
        kit.tolerances[activations],
        kit.num_draft,
        kit.size,
        gpu_kit.LIKENESS[activations],
    )


def _each(place: Place, variants: tuple[str, ...]) -> list[tuple[str, str]]:
    """Recipes with those of these variants that the kit has. Raises NotHere where it has none."""
    kit = place.kit
    found = [(recipe, v) for v in variants if v in kit.variants for recipe in kit.recipes]
    if not found:
        raise NotHere(f"the kit was made without {', '.join(variants)}")
    return found


def environment(place: Place, found: Found) -> None:
    """Versions, devices and what is wrong with the installation."""
    from specrun import doctor

    report = doctor.examine()
    found.notes += [f"{name}: {line}" for name, line in doctor.lines(report).items()]
    found.failures += report.problems


def torch_graphs(place: Place, found: Found) -> None:
    """Every engine of the TensorRT dialect on PyTorch's device, in every precision."""
    check_torch(place.device)
    for recipe, variant in _each(place, TRT_VARIANTS):
        programs = gpu_kit.programs_path(place.folder, recipe, variant)
        open_ = partial(by_torch, place.folder / recipe / variant, programs, place.device)
        gpu_engines.check(case_of(place, recipe, variant), open_, found)


def torch_verification(place: Place, found: Found) -> None:
    """The checkpoint's transformers model verifies, on PyTorch's device."""
    check_torch(place.device)
    try:
        check_onnxruntime(place.device)
        methods: tuple[str, ...] = ()
    except (NotHere, ImportError) as reason:
        found.notes.append(f"without drafters that are engines: {reason}")
        methods = DRAFTS_ALONE
    for recipe, variant in _each(place, ("ort-fp32", "ort-fp16")):
        if methods and "mtp-drafter" in place.kit.recipes[recipe]:
            continue  # its KV must be where the drafter's engine reads it
        home = place.folder / recipe
        open_ = partial(
            by_engine,
            home / variant,
            place.device,
            verify="torch",
            target=str(home / CHECKPOINTS / gpu_kit.target_of(home / variant)),
        )
        gpu_engines.check(case_of(place, recipe, variant, methods), open_, found)


def onnxruntime(place: Place, found: Found, variants: tuple[str, ...]) -> None:
    """Folders on ONNX Runtime's CUDA."""
    check_onnxruntime(place.device)
    for recipe, variant in _each(place, variants):
        open_ = partial(by_engine, place.folder / recipe / variant, place.device)
        gpu_engines.check(case_of(place, recipe, variant), open_, found)


def exact(place: Place, found: Found) -> None:
    """In exact mode, runs of the target recorded as CUDA graphs: every method to the token."""
    check_onnxruntime(place.device)
    kit, recorded = place.kit, place.device == "cuda"
    for recipe, variant in _each(place, ("ort-fp32", "ort-fp16")):
        folder, methods = place.folder / recipe / variant, kit.recipes[recipe]
        with by_engine(folder, place.device, exact=True, cuda_graph=recorded) as engine:
            said = gpu_observe.texts(engine, methods, kit.num_draft, kit.size)
        for method in methods:
            for prompt, (one, plain) in enumerate(zip(said[method], said["plain"], strict=True)):
                found.expect(
                    one.tokens == plain.tokens,
                    f"{recipe} {variant}: {method}, prompt {prompt}: {one.tokens} instead of"
                    f" {plain.tokens}",
                )


def tensorrt(place: Place, found: Found, flavour: Flavour, variant: str) -> None:
    """Plans of every engine in one precision."""
    gpu = place.machine.gpu
    assert gpu is not None, "seen before the part was started"
    recipes = [recipe for recipe, _ in _each(place, (variant,))]
    build = partial(with_plans, work=place.work, flavour=flavour, sm=gpu.sm, level=TINY_LEVEL)
    with ThreadPoolExecutor(len(recipes)) as pool:  # every plan is built by a process of its own
        folders = list(pool.map(build, [place.folder / recipe / variant for recipe in recipes]))
    for recipe, folder in zip(recipes, folders, strict=True):
        open_ = partial(by_engine, folder, BACKENDS[flavour])
        gpu_engines.check(case_of(place, recipe, variant), open_, found)
        _check_limits(f"{recipe} {variant}", open_, found)


def _check_limits(
    name: str, open_: Callable[[], AbstractContextManager[specrun.Engine]], found: Found
) -> None:
    """More rows than a profile takes are refused, and the engine goes on."""
    import numpy as np

    with open_() as engine:
        target = engine.target
        rows = np.zeros((1, 200), dtype=np.int64)
        try:
            target.verify(rows, want_logits=True)
            found.failures.append(f"{name}: a step of 200 wanted rows was not refused")
        except EngineError as error:
            named = "the plan takes" in str(error)
            found.expect(named, f"{name}: 200 wanted rows: {error}")
        target.truncate(0)
        target.verify(rows[:, :3], want_logits=True)


def times_of_torch(place: Place, found: Found) -> None:
    """The model of middle size in the TensorRT dialect, operator by operator."""
    check_torch(place.device)
    folder = gpu_timing.folder_of(place.folder, "trt-fp16", place.work)
    programs = gpu_kit.programs_path(place.folder, gpu_mid.RECIPE, "trt-fp16")
    _time(place, "trt-fp16", partial(by_torch, folder, programs), place.device, found)


def times_of_onnxruntime(place: Place, found: Found) -> None:
    """The model of middle size in the dialect of ONNX Runtime."""
    check_onnxruntime(place.device)
    folder = gpu_timing.folder_of(place.folder, "ort-fp16", place.work)
    _time(place, "ort-fp16", partial(by_engine, folder), place.device, found)


def times_of_tensorrt(place: Place, found: Found, flavour: Flavour) -> None:
    """The model of middle size as plans; on the CPU, ONNX Runtime runs the graphs of the same."""
    gpu = place.machine.gpu
    assert gpu is not None, "seen before the part was started"
    folder = gpu_timing.folder_of(place.folder, "trt-fp16", place.work)
    folder = with_plans(folder, place.work, flavour, gpu.sm)
    _time(place, "trt-fp16", partial(by_engine, folder), BACKENDS[flavour], found)


def _time(place: Place, variant: str, open_: gpu_timing.Open, device: str, found: Found) -> None:
    reference = gpu_kit.reference_path(place.folder, gpu_mid.RECIPE, variant)
    gpu_timing.check(place.folder, reference, open_, device, place.kit.tolerances["fp16"], found)


def _parts() -> list[Part]:
    cuda = "onnxruntime cuda"
    made = [
        Part("environment", 90, lambda machine: machine.needs(), environment, needs_kit=False),
        Part("torch graphs", 150, lambda machine: machine.needs("torch"), torch_graphs),
        Part("torch verification", 90, lambda m: m.needs(*NEEDED), torch_verification),
    ]
    for name, variants in (
        (cuda, ("ort-fp32", "ort-fp16")),
        (f"{cuda}, TensorRT dialect", ("trt-fp16",)),
    ):
        run: Any = partial(onnxruntime, variants=variants)
        made.append(Part(name, 90, lambda machine: machine.needs("onnxruntime"), run))
    made.append(Part(f"{cuda}, exact", 60, lambda machine: machine.needs("onnxruntime"), exact))
    flavours: tuple[Flavour, ...] = ("tensorrt", "tensorrt_rtx")
    for flavour in flavours:
        missing = partial(tensorrt_missing, flavour=flavour)
        for variant in TRT_VARIANTS:
            name = f"{BACKENDS[flavour]} {variant.removeprefix('trt-')}"
            run = partial(tensorrt, flavour=flavour, variant=variant)
            made.append(Part(name, 90, missing, run))
        run = partial(times_of_tensorrt, flavour=flavour)
        made.append(Part(f"{BACKENDS[flavour]} times", 120, missing, run))
    made.append(Part("torch times", 90, lambda machine: machine.needs("torch"), times_of_torch))
    made.append(Part(f"{cuda}, times", 60, lambda m: m.needs("onnxruntime"), times_of_onnxruntime))
    return made


PARTS: dict[str, Part] = {part.name: part for part in _parts()}
