"""Plans built by TensorRT for RTX, without a GPU: what is built, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import needs
import onnx
import pytest
import trt_graphs
from onnx import ModelProto, TensorProto

from specexport.trt import addresses, build_manifest, builder, flavours
from specexport.trt.build_manifest import EngineBuild, to_build
from specexport.trt.builder import build_engine
from specexport.trt.caches import PlanCache
from specexport.trt.plans import BuildSettings, Built, plan_file, sha256_of
from specexport.trt.profiles import Sizes, profiles
from specrun.contract import DType, TensorSpec
from specrun.errors import DeviceError, EngineError

needs.tensorrt_rtx()

SIZES = Sizes(prefill_rows=32, max_draft=7, max_batch=2)
Specs = tuple[TensorSpec, ...]


def write(folder: Path, model: ModelProto, name: str = "target") -> Path:
    """The graph in a file, its weights beside it."""
    path = folder / f"{name}.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return path


def borders(model: ModelProto) -> tuple[Specs, Specs]:
    return trt_graphs.specs(model.graph.input), trt_graphs.specs(model.graph.output)


def settings(inputs: Specs, capability: int = 86, precision: str = "fp16") -> BuildSettings:
    return BuildSettings("tensorrt_rtx", capability, profiles(inputs, SIZES), precision)


def build(
    folder: Path,
    model: ModelProto,
    capability: int = 86,
    changed: Mapping[str, Specs] = MappingProxyType({}),
) -> Built:
    """The plan of a graph; ``changed``: borders other than its own."""
    inputs, outputs = borders(model)
    path = write(folder, model)
    weights = sha256_of(folder / "weights.bin")
    given = settings(inputs, capability)
    return build_engine(
        path,
        changed.get("inputs", inputs),
        changed.get("outputs", outputs),
        given,
        folder / plan_file("target", given),
        weights_sha256=weights,
    )


MODELS: dict[str, Callable[[], ModelProto]] = {
    "fp16": lambda: trt_graphs.target(),
    "bf16": lambda: trt_graphs.target(TensorProto.BFLOAT16),
    "int8": lambda: trt_graphs.target(weights="int8"),
    "int4 bf16": lambda: trt_graphs.target(TensorProto.BFLOAT16, weights="int4"),
    "fp32, spelled out": lambda: trt_graphs.target(TensorProto.FLOAT, fused=False),
    "head 8, spelled out": lambda: trt_graphs.target(head=8, fused=False),
    "one sequence": lambda: trt_graphs.target(batch=2),
    "drafter": lambda: trt_graphs.drafter(),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_built(tmp_path: Path, name: str) -> None:
    built = build(tmp_path, MODELS[name]())
    path = tmp_path / built.spec.file
    assert path.stat().st_size == built.spec.size > 100_000
    assert sha256_of(path) == built.spec.sha256
    assert built.spec.key == built.made_from.key
    assert built.spec.version == flavours.find("tensorrt_rtx").version
    assert built.activation_bytes is not None and built.activation_bytes > 0
    assert {p.name for p in tmp_path.iterdir()} == {"target.onnx", "weights.bin", path.name}


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 120, 121])
def test_every_compute_capability(tmp_path: Path, capability: int) -> None:
    built = build(tmp_path, trt_graphs.target(), capability)
    assert built.spec.compute_capability == capability
    assert built.spec.file == f"target.sm{capability}.engine"


def test_flavours_know_what_they_build_for() -> None:
    installed = flavours.find("tensorrt_rtx")
    assert flavours.capabilities(installed) == (75, 80, 86, 89, 120, 121)
    assert str(installed).startswith("TensorRT-RTX 1.")


def test_plans_are_of_their_graph_and_weights(tmp_path: Path) -> None:
    """Integers stay integers: the plan is smaller by what the weights are."""
    sizes = {}
    for weights in ("float", "int8", "int4"):
        folder = tmp_path / weights
        folder.mkdir()
        sizes[weights] = build(folder, trt_graphs.target(head=256, weights=weights)).spec.size
    stored = {name: (tmp_path / name / "weights.bin").stat().st_size for name in sizes}
    for weights in ("int8", "int4"):
        saved = stored["float"] - stored[weights]
        assert abs(sizes["float"] - sizes[weights] - saved) < 0.3 * saved


def test_the_same_input_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the folder, and whatever stands in the environment.

    TensorRT compiles kernels in a thread beside, and on busy cores two of them may change places.
    Without fixed addresses no two plans are the same, so one pair of four is proof.
    """
    found: list[Built] = []
    for name in ("a", "somewhere else" * 9, "b", "c"):
        if len({plan.spec.sha256 for plan in found}) < len(found):
            break
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv("SOME_SETTING", name * 20)
        found.append(build(folder, trt_graphs.target()))
    if not all(plan.reproducible for plan in found):
        pytest.skip("this system does not allow fixed addresses")
    assert len({plan.spec.sha256 for plan in found}) < len(found)
    assert all(plan.made_from == found[0].made_from for plan in found)
    other = tmp_path / "other"
    other.mkdir()
    assert build(other, trt_graphs.target(seed=1)).spec.sha256 != found[0].spec.sha256


def test_without_fixed_addresses_a_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a container forbids them: nothing is started again, and the plan is marked."""
    monkeypatch.setattr(addresses, "_personality", lambda value: -1)
    monkeypatch.setattr(os, "execv", lambda *command: pytest.fail("was started again"))
    addresses.start_again_fixed()
    assert not addresses.are_fixed()


def test_relative_paths_and_missing_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trt_graphs.target()
    inputs, outputs = borders(model)
    write(tmp_path, model)
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    given = settings(inputs)
    build_engine(Path("target.onnx"), inputs, outputs, given, Path("plans/t.engine"))
    assert [path.name for path in Path("plans").iterdir()] == ["t.engine"]
    with pytest.raises(EngineError, match="No such file or directory") as caught:
        build_engine(Path("target.onnx"), inputs, outputs, given, Path("nowhere/t.engine"))
    assert caught.value.hint and "folder must be there" in caught.value.hint


def refused(
    tmp_path: Path,
    model: ModelProto,
    message: str,
    changed: Mapping[str, Specs] = MappingProxyType({}),
) -> EngineError:
    """The error of a build that must fail and leave nothing."""
    with pytest.raises(EngineError, match=message) as caught:
        build(tmp_path, model, changed=changed)
    assert {p.name for p in tmp_path.iterdir()} == {"target.onnx", "weights.bin"}
    assert "cudaError" not in str(caught.value) and "/_src/" not in str(caught.value)
    return caught.value


def without(specs: Specs, name: str) -> Specs:
    return tuple(spec for spec in specs if spec.name != name)


def changed(specs: Specs, name: str, **fields: Any) -> Specs:
    return tuple(
        dataclasses.replace(spec, **fields) if spec.name == name else spec for spec in specs
    )


def test_borders_must_be_those_of_the_manifest(tmp_path: Path) -> None:
    model = trt_graphs.target()
    inputs, outputs = borders(model)
    cases: list[tuple[str, dict[str, Specs]]] = [
        ("input 'wanted_rows': the manifest does not have it",
         {"inputs": without(inputs, "wanted_rows")}),
        ("output 'hidden': the graph does not have it",
         {"outputs": (*outputs, TensorSpec("hidden", DType.FLOAT16, ("batch", "rows", 64)))}),
        ("input 'past_length' is int32 in the graph and int64 in the manifest",
         {"inputs": changed(inputs, "past_length", dtype=DType.INT64)}),
        (r"output 'logits' has shape \[-1, -1, 64\] in the graph and",
         {"outputs": changed(outputs, "logits", shape=("batch", "wanted", 65))}),
        ("input 'tokens': axis 1 is 'rows' in the graph and 'wanted' in the manifest",
         {"inputs": changed(inputs, "tokens", shape=("batch", "wanted"))}),
    ]  # fmt: skip
    for message, borders_ in cases:
        refused(tmp_path, model, message, borders_)


def test_what_the_parser_refuses_names_the_node(tmp_path: Path) -> None:
    model = trt_graphs.target()
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    node.attribute.append(onnx.helper.make_attribute("softcap", 30.0))
    error = refused(tmp_path, model, "attended/Attention .*softcap")
    assert error.hint and "static_rules" in error.hint


def test_an_unused_input_is_an_error(tmp_path: Path) -> None:
    model = trt_graphs.target()
    model.graph.input.append(onnx.helper.make_tensor_value_info("noise", TensorProto.FLOAT, [1]))
    refused(tmp_path, model, "Unused Input: noise")


def test_a_value_that_is_clamped_is_an_error(tmp_path: Path) -> None:
    model = trt_graphs.target()
    nodes = model.graph.node
    made = next(node for node in nodes if node.output[0] == "lead")
    far = onnx.helper.make_tensor("far", TensorProto.DOUBLE, [], [1e300])
    model.graph.initializer.append(far)
    cast = onnx.helper.make_node("Cast", ["far"], ["near"], name="near", to=TensorProto.FLOAT)
    add = onnx.helper.make_node("Add", ["lead_before", "near"], ["lead"], name="add")
    made.output[0] = "lead_before"
    nodes.insert(0, cast)
    nodes.insert(list(nodes).index(made) + 1, add)
    refused(tmp_path, model, "out of range|clamped")


def test_what_fails_late_says_why(tmp_path: Path) -> None:
    model = trt_graphs.target(head=20)
    refused(tmp_path, model, "does not build the graph: IBuilder")


def test_a_profile_beyond_the_cache_says_why(tmp_path: Path) -> None:
    model = trt_graphs.target()
    inputs, outputs = borders(model)
    made = profiles(inputs, SIZES)
    large = dataclasses.replace(made[0].inputs["tokens"], opt=(1, 128), max=(2, 128))
    wide = dataclasses.replace(made[0], inputs={**made[0].inputs, "tokens": large})
    given = BuildSettings("tensorrt_rtx", 86, (wide, made[1]), "fp16")
    with pytest.raises(EngineError, match="KVCacheUpdate"):
        build_engine(write(tmp_path, model), inputs, outputs, given, tmp_path / "t.engine")


def test_an_input_without_a_range_says_why(tmp_path: Path) -> None:
    model = trt_graphs.target()
    inputs, outputs = borders(model)
    (decode,) = profiles(inputs, Sizes(prefill_rows=1, max_draft=3))
    kept = {name: held for name, held in decode.inputs.items() if name != "tokens"}
    given = BuildSettings("tensorrt_rtx", 86, (dataclasses.replace(decode, inputs=kept),), "fp16")
    with pytest.raises(EngineError, match="tokens"):
        build_engine(write(tmp_path, model), inputs, outputs, given, tmp_path / "t.engine")


def test_missing_weights_say_so(tmp_path: Path) -> None:
    model = trt_graphs.target()
    path = write(tmp_path, model)
    (tmp_path / "weights.bin").unlink()
    inputs, outputs = borders(model)
    with pytest.raises(EngineError, match="import initializer: embedding"):
        build_engine(path, inputs, outputs, settings(inputs), tmp_path / "t.engine")


def test_gpus_that_it_does_not_build_for(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="does not build for compute capability 90") as caught:
        build(tmp_path, trt_graphs.target(), 90)
    assert caught.value.hint == "it builds for 75, 80, 86, 89, 120, 121"


def test_a_builder_that_dies_is_an_error(tmp_path: Path) -> None:
    """Two attentions on one scaled key, of which TensorRT dies; ``static_rules`` refuses them."""
    model = trt_graphs.drafter()
    for node in model.graph.node:
        if node.op_type == "Attention":
            node.attribute[0].f = 0.25
    refused(tmp_path, model, f"ended by signal {int(signal.SIGSEGV)}")


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    model = trt_graphs.target()
    inputs, outputs = borders(model)
    out = tmp_path / "t.engine"
    # The builder writes beside the file; that place leads to a device without room.
    (tmp_path / f".{out.name}.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(EngineError, match=r"cannot be written: .*No space left"):
        build_engine(write(tmp_path, model), inputs, outputs, settings(inputs), out)


def test_without_a_stream_the_plan_is_the_same(tmp_path: Path) -> None:
    """Older releases hand over the plan in memory."""
    from specexport.trt import bindings, child, network
    from specexport.trt.messages import Messages, logger

    bindings.use(flavours.load("tensorrt_rtx"))
    model = trt_graphs.target()
    inputs, outputs = borders(model)
    messages = Messages()
    parsed = network.parse(write(tmp_path, model), logger(messages), messages)
    network.check_borders(parsed.network, inputs, outputs)
    config = child.configure(parsed, settings(inputs), messages)

    class Older:
        build_serialized_network = parsed.builder.build_serialized_network

    with (tmp_path / "plan").open("wb") as file:
        sink = child._File(file)
        assert child._build_into(sink, dataclasses.replace(parsed, builder=Older()), config)
    assert (tmp_path / "plan").stat().st_size == sink.size > 100_000
    assert messages.errors == []


def test_one_process_has_one_tensorrt() -> None:
    from specexport.trt import bindings

    bindings.use(flavours.load("tensorrt_rtx"))
    with pytest.raises(RuntimeError, match="builds with tensorrt_rtx already"):
        bindings.use(onnx)


def test_a_timing_cache_is_kept(tmp_path: Path) -> None:
    model = trt_graphs.target()
    inputs, outputs = borders(model)
    path, timing = write(tmp_path, model), tmp_path / "tactics"
    for _ in range(2):
        given = settings(inputs)
        build_engine(path, inputs, outputs, given, tmp_path / "t.engine", timing_cache=timing)
        assert timing.stat().st_size > 0
    timing.write_bytes(b"of something else")
    build_engine(
        path, inputs, outputs, settings(inputs), tmp_path / "t.engine", timing_cache=timing
    )
    assert timing.read_bytes() != b"of something else"


def test_a_folder_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trt_graphs.target()
    inputs, outputs = borders(model)
    write(tmp_path, model)
    engine = EngineBuild(
        "target.onnx", "weights.bin", "fp16", inputs, outputs, profiles(inputs, SIZES)
    )
    manifest = to_build({"target": engine}, "tensorrt_rtx", (86,))
    cache, version = PlanCache(tmp_path / "cache"), flavours.find("tensorrt_rtx").version
    (task,) = build_manifest.tasks(tmp_path, manifest, version, manifest.compute_capabilities)
    assert task.reason == "is new"
    built = build_manifest.run(task, tmp_path, tmp_path, build_engine, cache)
    manifest = build_manifest.with_built(manifest, (built,))
    build_manifest.write(tmp_path, manifest)
    monkeypatch.setattr(builder, "_run", lambda request: pytest.fail("was built again"))
    again = build_manifest.read(tmp_path)
    (task,) = build_manifest.tasks(tmp_path, again, version, again.compute_capabilities)
    assert task.reason is None
    assert build_manifest.run(task, tmp_path, tmp_path, build_engine, cache) == built
    (tmp_path / built.spec.file).unlink()
    (task,) = build_manifest.tasks(tmp_path, again, version, again.compute_capabilities)
    assert build_manifest.run(task, tmp_path, tmp_path, build_engine, cache) == built
    assert sha256_of(tmp_path / built.spec.file) == built.spec.sha256
