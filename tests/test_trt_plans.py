"""Profiles, keys, caches and what is to be built: what needs no TensorRT."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specexport.trt import build_manifest, flavours
from specexport.trt.build_manifest import BUILD_MANIFEST, BuildManifest, EngineBuild, to_build
from specexport.trt.caches import PlanCache, check_current, why_damaged
from specexport.trt.messages import Messages, cleaned
from specexport.trt.plans import BuildSettings, Built, MadeFrom, made_from, plan_file, sha256_of
from specexport.trt.profiles import Sizes, profiles
from specrun import contract
from specrun.contract import DType, KvLayer, TensorSpec
from specrun.decode import decode, encode
from specrun.errors import DeviceError, EngineError, FolderError, UsageError
from specrun.plans import Flavour, PlanSpec, ShapeRange, of_backend

KV = (KvLayer(0, 2, 16, None), KvLayer(1, 2, 16, 8))
CAPACITY = 512


def static_kv(specs: tuple[TensorSpec, ...], capacity: int = CAPACITY) -> tuple[TensorSpec, ...]:
    """The contract's inputs with the capacity that the dialect fixes."""

    def fixed(spec: TensorSpec) -> TensorSpec:
        shape = tuple(capacity if size == contract.CAPACITY else size for size in spec.shape)
        return dataclasses.replace(spec, shape=shape)

    return tuple(map(fixed, specs))


TARGET = (
    TensorSpec(contract.TOKENS, DType.INT64, ("batch", "rows")),
    TensorSpec(contract.PAST_LENGTH, DType.INT32, ("batch",)),
    TensorSpec(contract.WANTED_ROWS, DType.INT64, ("wanted",)),
    *static_kv(contract.target_inputs(KV, DType.FLOAT16)[3:]),
)
DRAFTER = (
    TensorSpec(contract.TOKEN, DType.INT64, ("batch", 1)),
    TensorSpec(contract.HIDDEN, DType.FLOAT16, ("batch", 1, 64)),
    TensorSpec(contract.PAST_LENGTH, DType.INT32, ("batch",)),
    TensorSpec(contract.NOISE, DType.FLOAT32, ("batch", 4, 8)),
    *TARGET[3:],
)
BACK = (
    TensorSpec(contract.EXIT_ROWS, DType.FLOAT16, ("batch", "rows", 64)),
    TensorSpec(contract.PAST_LENGTH, DType.INT32, ("batch",)),
    *TARGET[3:],
)
LIMITS = [
    Sizes(),
    Sizes(prefill_rows=1, max_draft=0),
    Sizes(prefill_rows=64, max_draft=7, draft=3, max_batch=4),
    Sizes(prefill_rows=8, max_draft=15, max_batch=16),
    Sizes(prefill_rows=CAPACITY, max_draft=CAPACITY - 1),
    Sizes(prefill_rows=100_000, max_draft=31, draft=0, max_batch=2),
]


def sizes_of(spec: TensorSpec, shape: tuple[int, ...]) -> dict[str, int]:
    """The dynamic sizes that a shape of an input gives."""
    return {s: n for s, n in zip(spec.shape, shape, strict=True) if isinstance(s, str)}


@pytest.mark.parametrize("inputs", [TARGET, DRAFTER, BACK], ids=["target", "drafter", "back"])
@pytest.mark.parametrize("limits", LIMITS)
def test_profiles(inputs: tuple[TensorSpec, ...], limits: Sizes) -> None:
    """Every dynamic input has min <= opt <= max, and the largest verification fits ``decode``."""
    made = profiles(inputs, limits)
    assert made[-1].name == "decode" and len({profile.name for profile in made}) == len(made)
    dynamic = [spec for spec in inputs if any(isinstance(size, str) for size in spec.shape)]
    for profile in made:
        assert set(profile.inputs) == {spec.name for spec in dynamic}
        for spec in dynamic:
            held = profile.inputs[spec.name]
            ends = [sizes_of(spec, shape) for shape in (held.min, held.opt, held.max)]
            for size, least in ends[0].items():
                assert least == 1 <= ends[1][size] <= ends[2][size]
            assert ends[2].get("batch", limits.max_batch) == limits.max_batch
            assert ends[2].get("rows", 0) <= CAPACITY
            fixed = [n for s, n in zip(spec.shape, held.max, strict=True) if s == n]
            assert len(fixed) == sum(isinstance(size, int) for size in spec.shape)


@pytest.mark.parametrize("limits", LIMITS)
def test_the_largest_verification_fits(limits: Sizes) -> None:
    made = {profile.name: profile for profile in profiles(TARGET, limits)}
    rows = limits.max_draft + 1
    decode = made["decode"].inputs
    assert decode["tokens"].max == (limits.max_batch, rows)
    assert decode["tokens"].opt == (1, limits.tuned_rows)
    assert decode["wanted_rows"].max == (rows,)
    if "prefill" not in made:
        assert min(limits.prefill_rows, CAPACITY) <= rows
        return
    prefill = made["prefill"].inputs
    assert prefill["tokens"].max == (limits.max_batch, min(limits.prefill_rows, CAPACITY))
    assert prefill["tokens"].opt == (1, min(limits.prefill_rows, CAPACITY))
    assert prefill["wanted_rows"].min == prefill["wanted_rows"].opt == (1,)
    assert prefill["wanted_rows"].max[0] >= min(limits.max_batch, prefill["tokens"].max[1])


def test_engines_with_one_row_have_one_profile() -> None:
    assert [profile.name for profile in profiles(DRAFTER, Sizes(max_batch=3))] == ["decode"]
    fixed = tuple(
        dataclasses.replace(s, shape=tuple(1 if n == "batch" else n for n in s.shape))
        for s in DRAFTER
    )
    (profile,) = profiles(fixed, Sizes())
    assert profile.inputs["token"] == ShapeRange((1, 1), (1, 1), (1, 1))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"prefill_rows": 0}, "prefill_rows must be at least 1, got 0"),
        ({"max_draft": -1}, "max_draft must be at least 0, got -1"),
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
        ({"max_draft": 4, "draft": 5}, "draft must be in 0..4, got 5"),
    ],
)
def test_limits_that_cannot_be_meant(limits: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sizes(**limits)


def test_profiles_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="dynamic size 'capacity'"):
        profiles(contract.target_inputs(KV, DType.FLOAT16), Sizes())
    with pytest.raises(
        UsageError, match="max_draft is 512, the KV buffers hold 512 rows"
    ) as caught:
        profiles(TARGET, Sizes(max_draft=CAPACITY))
    assert caught.value.hint and "511" in caught.value.hint


PROFILES = profiles(TARGET, Sizes())
SETTINGS = BuildSettings("tensorrt_rtx", 86, PROFILES, "fp16")
SOURCE = MadeFrom("a" * 64, "b" * 64, "1.7.1", SETTINGS)


def other(**settings: Any) -> MadeFrom:
    """The same with other settings."""
    return dataclasses.replace(SOURCE, settings=dataclasses.replace(SETTINGS, **settings))


OTHER: dict[str, MadeFrom] = {
    "graph": dataclasses.replace(SOURCE, graph="c" * 64),
    "weights": dataclasses.replace(SOURCE, weights=""),
    "version": dataclasses.replace(SOURCE, version="1.7.2"),
    "flavour": other(flavour="tensorrt"),
    "compute_capability": other(compute_capability=89),
    "precision": other(precision="bf16"),
    "level": other(level=5),
    "profiles": other(profiles=profiles(TARGET, Sizes(max_batch=2))),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_key_is_of_everything_that_decides(name: str) -> None:
    assert OTHER[name].key != SOURCE.key
    assert OTHER[name].changed_since(SOURCE) == (name,)
    assert SOURCE.changed_since(SOURCE) == ()
    assert decode(MadeFrom, json.loads(json.dumps(encode(SOURCE)))).key == SOURCE.key


def test_nothing_decides_that_has_no_test() -> None:
    decides = {field.name for cls in (MadeFrom, BuildSettings) for field in dataclasses.fields(cls)}
    assert decides - {"settings"} == set(OTHER)


def test_settings_that_cannot_be_meant() -> None:
    with pytest.raises(UsageError, match=r"level must be in 0\.\.5, got 6"):
        dataclasses.replace(SETTINGS, level=6)
    with pytest.raises(ValueError, match=r"compute_capability must be in 10\.\.999"):
        dataclasses.replace(SETTINGS, compute_capability=8)


def a_plan(folder: Path, source: MadeFrom = SOURCE, data: bytes = b"plan" * 99) -> Built:
    """A file that stands for a plan, and what is known of it."""
    path = folder / plan_file("target", source.settings)
    path.write_bytes(data)
    spec = PlanSpec(
        source.settings.flavour,
        source.version,
        source.settings.compute_capability,
        path.name,
        len(data),
        sha256_of(path),
        source.key,
        source.settings.profiles,
    )
    return Built(spec, source, 1024, True)


def test_what_is_known_of_a_plan_is_of_that_plan(tmp_path: Path) -> None:
    built = a_plan(tmp_path)
    assert built.spec.file == "target.sm86.engine"
    assert decode(Built, json.loads(json.dumps(encode(built)))) == built
    with pytest.raises(ValueError, match="not that of made_from"):
        dataclasses.replace(built, made_from=OTHER["graph"])


def test_a_cached_plan_is_found_by_what_it_is_made_from(tmp_path: Path) -> None:
    cache, built = PlanCache(tmp_path / "cache"), a_plan(tmp_path)
    out = tmp_path / "again.sm86.engine"
    assert cache.find(SOURCE, out) is None
    cache.store(built, tmp_path / built.spec.file)
    found = cache.find(SOURCE, out)
    assert found is not None and found.spec.file == out.name
    assert found.spec.sha256 == sha256_of(out) == built.spec.sha256
    for source in OTHER.values():
        assert cache.find(source, tmp_path / "other") is None
    assert not (tmp_path / "other").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(Path.unlink, "is not there"), (cut, "395 bytes, built were 396"), (flip, "was changed")],
)
def test_a_damaged_plan_is_not_used(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    cache, built = PlanCache(tmp_path / "cache"), a_plan(tmp_path)
    path = tmp_path / built.spec.file
    cache.store(built, path)
    check_current(built, SOURCE, path, "build it again")
    damage(cache.folder / f"{SOURCE.key}.engine")
    assert cache.find(SOURCE, tmp_path / "again") is None
    damage(path)
    assert reason in str(why_damaged(built, path))
    with pytest.raises(EngineError, match=reason) as caught:
        check_current(built, SOURCE, path, "build it again")
    assert caught.value.hint == "build it again"


def test_notes_of_another_plan_are_not_believed(tmp_path: Path) -> None:
    cache, built = PlanCache(tmp_path / "cache"), a_plan(tmp_path)
    cache.store(built, tmp_path / built.spec.file)
    notes = cache.folder / f"{SOURCE.key}.json"
    notes.rename(cache.folder / f"{OTHER['graph'].key}.json")
    assert cache.find(OTHER["graph"], tmp_path / "again") is None
    (cache.folder / f"{SOURCE.key}.json").write_text("[" * 9)
    assert cache.find(SOURCE, tmp_path / "again") is None


@pytest.mark.parametrize("name", OTHER)
def test_a_stale_plan_is_refused_with_what_changed(tmp_path: Path, name: str) -> None:
    built = a_plan(tmp_path)
    with pytest.raises(EngineError, match=f"{name} changed since it was built"):
        check_current(built, OTHER[name], tmp_path / built.spec.file, "build it again")


def folder_to_build(folder: Path, flavour: Flavour = "tensorrt_rtx") -> BuildManifest:
    """A folder with a graph, its weights and ``build.json``."""
    (folder / "target.onnx").write_bytes(b"graph")
    (folder / "weights.bin").write_bytes(b"weights")
    engine = EngineBuild("target.onnx", "weights.bin", "fp16", TARGET, TARGET, PROFILES)
    manifest = to_build({"target": engine}, flavour, (86, 89))
    build_manifest.write(folder, manifest)
    return manifest


class FakeBuilder:
    """Writes files instead of plans and counts them."""

    def __init__(self, version: str = "1.7.1") -> None:
        self.version = version
        self.built: list[str] = []

    def __call__(
        self,
        graph: Path,
        inputs: object,
        outputs: object,
        settings: BuildSettings,
        out: Path,
        *,
        weights_sha256: str | None,
        timing_cache: Path | None,
    ) -> Built:
        assert (timing_cache is not None) == (settings.flavour == "tensorrt")
        self.built.append(out.name)
        return a_plan(out.parent, made_from(graph, weights_sha256, self.version, settings))


def finish(folder: Path, builder: FakeBuilder, cache: PlanCache) -> list[str | None]:
    """Build what is to be built, and return the reasons."""
    manifest = build_manifest.read(folder)
    found = list(
        build_manifest.tasks(
            folder, manifest, builder.version, manifest.compute_capabilities or (90,)
        )
    )
    built = tuple(build_manifest.run(task, folder, folder, builder, cache) for task in found)
    build_manifest.write(folder, build_manifest.with_built(manifest, built))
    return [task.reason for task in found]


def test_only_what_changed_is_built_again(tmp_path: Path) -> None:
    folder_to_build(tmp_path)
    cache, builder = PlanCache(tmp_path / "cache"), FakeBuilder()
    assert finish(tmp_path, builder, cache) == ["is new", "is new"]
    assert builder.built == ["target.sm86.engine", "target.sm89.engine"]
    assert finish(tmp_path, builder, cache) == [None, None]
    assert len(builder.built) == 2
    (tmp_path / "weights.bin").write_bytes(b"other weights")
    assert finish(tmp_path, builder, cache) == ["weights changed since it was built"] * 2
    assert len(builder.built) == 4
    newer = FakeBuilder("1.8.0")
    assert finish(tmp_path, newer, cache) == ["version changed since it was built"] * 2
    (tmp_path / "target.sm86.engine").unlink()
    assert finish(tmp_path, newer, cache) == ["is not there", None]
    assert len(newer.built) == 2  # the third came from the cache
    assert (tmp_path / "target.sm86.engine").exists()


def test_full_tensorrt_keeps_its_tactics(tmp_path: Path) -> None:
    manifest = folder_to_build(tmp_path, "tensorrt")
    build_manifest.write(tmp_path, dataclasses.replace(manifest, compute_capabilities=()))
    builder = FakeBuilder("10.15.1")
    assert finish(tmp_path, builder, PlanCache(tmp_path / "cache")) == ["is new"]
    assert builder.built == ["target.sm90.plan"]


def test_build_json_comes_back_as_it_was(tmp_path: Path) -> None:
    manifest = folder_to_build(tmp_path)
    assert build_manifest.read(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format must be 1, got 2"),
        ({"engines": {}}, "engines: must not be empty"),
        ({"flavour": "tensorrt-rtx"}, "flavour: must be one of"),
        ({"more": 1}, "field must be one of"),
    ],
)
def test_a_build_json_that_is_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data = encode(folder_to_build(tmp_path)) | change
    (tmp_path / BUILD_MANIFEST).write_text(json.dumps(data))
    with pytest.raises(FolderError, match=message):
        build_manifest.read(tmp_path)


def test_a_build_json_that_leads_out(tmp_path: Path) -> None:
    data = encode(folder_to_build(tmp_path))
    data["engines"]["target"]["weights"] = "../weights.bin"
    (tmp_path / BUILD_MANIFEST).write_text(json.dumps(data))
    with pytest.raises(FolderError, match="must stay inside the folder"):
        build_manifest.read(tmp_path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"build\.json is not there"):
        build_manifest.read(tmp_path)
    manifest = folder_to_build(tmp_path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(FolderError, match=r"weights\.bin is not there"):
        list(build_manifest.tasks(tmp_path, manifest, "1", (86,)))


def test_how_to_finish_on_the_device() -> None:
    told = build_manifest.later("tensorrt", "there is no GPU here")
    assert "specexport build FOLDER --backend tensorrt" in told
    assert "there is no GPU here" in told


def fake_tensorrt(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Only these modules are installed."""
    for flavour in flavours.FLAVOURS:
        monkeypatch.setitem(sys.modules, flavour, None)
    for name in names:
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__version__ = "9.9"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("there", "asked", "found"),
    [
        (("tensorrt", "tensorrt_rtx"), None, "tensorrt"),
        (("tensorrt_rtx",), None, "tensorrt_rtx"),
        (("tensorrt", "tensorrt_rtx"), "tensorrt_rtx", "tensorrt_rtx"),
    ],
)
def test_which_tensorrt(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], asked: Flavour | None, found: str
) -> None:
    fake_tensorrt(monkeypatch, *there)
    installed = flavours.find(asked)
    assert (installed.flavour, installed.version) == (found, "9.9")


@pytest.mark.parametrize(
    ("there", "asked", "hint"),
    [
        ((), None, "pip install 'specrun[tensorrt]' or pip install 'specrun[tensorrt-rtx]'"),
        (("tensorrt_rtx",), "tensorrt", "pip install 'specrun[tensorrt]'"),
        (("tensorrt",), "tensorrt_rtx", "pip install 'specrun[tensorrt-rtx]'"),
    ],
)
def test_no_tensorrt(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], asked: Flavour | None, hint: str
) -> None:
    fake_tensorrt(monkeypatch, *there)
    with pytest.raises(DeviceError, match="is not installed") as caught:
        flavours.find(asked)
    assert caught.value.hint == hint


def test_backends_have_flavours() -> None:
    assert of_backend("tensorrt") == "tensorrt"
    assert of_backend("tensorrt-rtx") == "tensorrt_rtx"


def test_messages() -> None:
    messages = Messages()
    driver = "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime"
    messages.add(driver, error=True, warning=False)
    messages.add("Make sure input tokens has Int64 binding.", error=False, warning=True)
    messages.add("Total Activation Memory: 4096 bytes", error=False, warning=False)
    assert messages.errors == [] and messages.activation_bytes == 4096
    assert messages.told() == "it did not say why"
    messages.add("Unused Input: noise", error=False, warning=True)
    messages.add("no such kernel", error=True, warning=False)
    assert messages.told() == "Unused Input: noise; no such kernel"


def test_messages_are_short() -> None:
    text = "mm: types differ. In validateTypes at /_src/optimizer/x.cpp:38)\n(cudaError 35: old)"
    assert cleaned(text) == "mm: types differ."
