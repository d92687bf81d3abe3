"""Where engines run: memory of a device, driven on the CPU, and what is said of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import toys
from small_vocabulary import METHODS, PROMPT
from toys import LAYER, Toy

import specrun
from specrun import ort, ort_devices, ort_memory
from specrun.bits import all_finite
from specrun.contract import LOGITS, MTP_DRAFTER_ENGINE, TARGET_ENGINE, DType, Part, past
from specrun.devices import DEVICES, Place
from specrun.drafters.mtp import MtpDrafter
from specrun.errors import ContextFull, DeviceError, EngineError, UsageError
from specrun.guarded_target import not_finite
from specrun.kv import KvBuffers
from specrun.manifest import read
from specrun.memory import HOST
from specrun.options import EngineOptions
from specrun.ort import OrtSession, PreparedRun, open_session
from specrun.ort_binding import HostBinder
from specrun.ort_memory import DeviceOutput, OrtDeviceMemory
from specrun.resources import Resources
from specrun.runner import Memory
from specrun.target import Target

KEY = past(0, Part.KEY)
DRIVEN = OrtDeviceMemory("cpu")  # the code of devices, on memory that is here
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "eos_token_ids": (), "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 20, "eos_token_ids": (), "temperature": 0.9, "seed": 5}
OpenEngine = Callable[..., specrun.Engine]


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines keep what they have in the memory of a device."""
    with monkeypatch.context() as patch:
        patch.setattr(ort, "memory_of", lambda place: DRIVEN)
        yield


def session(tmp_path: Path, toy: Toy, name: str = TARGET_ENGINE) -> OrtSession:
    folder = toys.write_folder(tmp_path / "toy", toy)
    spec = read(folder).engines[name]
    opened = open_session(folder / spec.file, spec, threads=1)
    assert isinstance(opened, OrtSession)
    return opened


def target(tmp_path: Path, toy: Toy, **options: Any) -> Target:
    opened = session(tmp_path, toy)
    return Target(opened, opened.spec, **{"max_context": 64} | options)


# Memory.


def test_kv_on_a_device() -> None:
    kv = KvBuffers(
        (LAYER,), DType.FLOAT32, max_context=20, batch=2, initial_capacity=4, memory=DRIVEN
    )
    assert kv.arrays == {} and kv.nbytes == 2 * 2 * 4 * 2 * 4
    assert not kv.buffers[KEY].read().any()
    kv.advance(4)
    kv.write_rows(KEY, 0, np.full((2, 1, 4, 2), 7, np.float32))
    kv.truncate([3, 1])
    kv.reserve(3)
    assert kv.capacity == 8 and kv.buffers[KEY].shape == (2, 1, 8, 2)
    rows = kv.read_rows(KEY, 0, 8)
    assert rows[0, 0, :, 0].tolist() == [7, 7, 7, 0, 0, 0, 0, 0]
    assert rows[1, 0, :, 0].tolist() == [7, 0, 0, 0, 0, 0, 0, 0]
    rows[:] = 9  # a copy
    assert kv.read_rows(KEY, 0, 1)[0, 0, 0, 0] == 7
    kv.write_rows(KEY, 5, np.full((2, 1, 1, 2), 3, np.float32))
    assert kv.read_rows(KEY, 4, 7)[1, 0, :, 1].tolist() == [0, 3, 0]
    kv.check_integrity()


def test_rows_through_the_host_are_those_of_the_arrays() -> None:
    kv = KvBuffers((LAYER,), DType.FLOAT32, max_context=20)
    kv.write_rows(KEY, 2, np.full((1, 1, 2, 2), 5, np.float32))
    assert kv.arrays[KEY][0, 0, :5, 0].tolist() == [0, 0, 5, 5, 0]
    assert np.shares_memory(kv.read_rows(KEY, 0, 4), kv.arrays[KEY])


def test_all_buffers_grow_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KvBuffers((LAYER,), DType.FLOAT32, max_context=20, initial_capacity=4, memory=DRIVEN)
    before, allocate = dict(kv.buffers), OrtDeviceMemory.allocate
    calls = iter(range(99))

    def scarce(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return allocate(*arguments)

    monkeypatch.setattr(OrtDeviceMemory, "allocate", scarce)
    with pytest.raises(ContextFull, match=r"past\.0\.value: there is no memory for a KV buffer"):
        kv.reserve(5)
    assert (kv.capacity, kv.version) == (4, 0) and kv.buffers == before
    kv.check_integrity()


def test_a_drafter_that_reads_another_memory(tmp_path: Path) -> None:
    opened = session(tmp_path, Toy(drafter=True), MTP_DRAFTER_ENGINE)
    kv = KvBuffers((LAYER,), DType.FLOAT32, max_context=20, memory=DRIVEN)
    says = r"mtp_drafter\.onnx: runs with CPUExecutionProvider on KV buffers in its own memory"
    with pytest.raises(EngineError, match=says) as caught:
        MtpDrafter(opened, opened.spec, kv, max_num_draft=4)
    assert caught.value.hint == "run target and drafter on the same device with the same backend"


def test_memories_are_told_apart() -> None:
    assert OrtDeviceMemory("cuda") == OrtDeviceMemory("cuda") != OrtDeviceMemory("cuda", 1)
    memories: list[Memory] = [HOST, DRIVEN]
    assert memories[0] != memories[1]
    assert [OrtDeviceMemory("cuda", n).device for n in (0, 1)] == ["cuda", "cuda:1"]


# Tokens.


@pytest.mark.usefixtures("driven")
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_tokens(
    open_small: OpenEngine, method: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device = open_small(METHODS[method])
    got = on_device.generate(PROMPT * 3, method=method, strict=True, **options)
    assert on_device.target.kv.memory is DRIVEN
    with monkeypatch.context() as patch:
        patch.setattr(ort, "memory_of", lambda place: HOST)
        on_host = open_small(METHODS[method])
        want = on_host.generate(PROMPT * 3, method=method, strict=True, **options)
    assert on_host.target.kv.memory is HOST
    assert got.tokens == want.tokens
    assert (got.stats.drafted, got.stats.accepted) == (want.stats.drafted, want.stats.accepted)


@pytest.mark.usefixtures("driven")
@pytest.mark.parametrize("method", ["plain", "mtp-drafter", "draft"])
def test_growing_buffers(open_toy: OpenEngine, method: Any) -> None:
    """Past the initial 256 rows, in a formula that every row has a part in."""
    toy = Toy(modulus=7, history_weight=3, drafter=True, draft=Toy(modulus=7))
    engine = open_toy(toy)
    result = engine.generate([1, 2, 3], method=method, max_new_tokens=300, eos_token_ids=())
    assert result.tokens == toy.plain([1, 2, 3], 300)
    assert engine.target.kv.capacity == 512
    engine.check_integrity()


@pytest.mark.usefixtures("driven")
@pytest.mark.parametrize("method", ["mtp-drafter", "early-exit"])
def test_pytorch_stands_in(
    open_small: OpenEngine, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On buffers of a device: what drafters read is written back to them."""
    want = open_small(METHODS[method]).generate(PROMPT, method=method, **GREEDY)
    engine, run, runs = open_small(METHODS[method]), PreparedRun.run, iter(range(999))
    first = {"mtp-drafter": 4, "early-exit": 24}[method]  # which runs front, back and head

    def failing(prepared: PreparedRun) -> None:
        if prepared.name != "mtp_drafter.onnx" and next(runs) >= first:
            raise EngineError("planted")
        run(prepared)

    monkeypatch.setattr(PreparedRun, "run", failing)
    said: list[str] = []
    got = engine.generate(PROMPT, method=method, on_warning=said.append, **GREEDY)
    assert got.tokens == want.tokens and len(said) == 1 and "planted" in said[0]
    assert 0 < got.stats.torch_steps < got.stats.target_steps
    assert got.stats.accepted == want.stats.accepted
    assert engine.target.kv.memory is DRIVEN


@pytest.mark.usefixtures("driven")
def test_pytorch_verifies_for_a_drafter_on_a_device(open_small: OpenEngine) -> None:
    options: dict[str, Any] = {"method": "mtp-drafter", "strict": True, **GREEDY}
    # As on another device than the CPU, where the drafter's session is asked.
    memory = property(lambda resources: resources.session(MTP_DRAFTER_ENGINE).memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Resources, "drafter_memory", memory)
        engine = open_small("gemma4", verify="torch")
    got = engine.generate(PROMPT, **options)
    want = open_small("gemma4", verify="engine").generate(PROMPT, **options)
    assert engine.target.kv.memory is DRIVEN
    assert got.tokens == want.tokens and got.stats.accepted == want.stats.accepted > 0


@pytest.mark.usefixtures("driven")
def test_large_outputs_are_copied_when_looked_at(tmp_path: Path) -> None:
    one = target(tmp_path, Toy())
    logits: Any = one.prefill(np.array([[1, 2]]), want_logits=True).logits
    assert isinstance(logits, DeviceOutput)
    copied: list[bool] = [logits.copied]
    assert (logits.shape, logits.dtype, len(logits)) == ((1, 1, 10), np.float32, 1)
    first = logits[0, 0]
    copied.append(logits.copied)
    assert first.argmax() == 3
    one.truncate(0)
    again: Any = one.prefill(np.array([[1, 5]]), want_logits=True).logits
    copied.append(logits.copied)
    assert again is logits and copied == [False, True, False]
    assert np.asarray(logits, dtype=np.float64)[0, 0].argmax() == 6
    assert first.argmax() == 3  # a copy, which the next run does not change
    copy = np.array(logits, copy=True)
    copy[:] = -1
    assert logits[0, 0].argmax() == 6


@pytest.mark.usefixtures("driven")
def test_small_outputs_are_copied_by_each_run(tmp_path: Path) -> None:
    one = target(tmp_path, Toy())
    run = one._on_kv.prepare(
        one._on_kv.arrays(("tokens", "past_length"), rows=1) | one._on_kv.first_row(0),
        one._on_kv.arrays(("argmax", LOGITS), rows=1, wanted=1),
    )
    array = run.outputs["argmax"]
    assert isinstance(array, np.ndarray)
    for token in (4, 6):
        run.inputs["tokens"][:] = token
        run.run()
        assert array[0, 0] == token + 1


def test_inputs_that_a_device_reads_are_bound_again(tmp_path: Path) -> None:
    """ONNX Runtime copies such an input when it is bound, so it must be bound for every run."""
    toy = Toy(modulus=7, history_weight=3)
    opened = session(tmp_path, toy)
    names = {tensor.name for tensor in opened.spec.inputs}
    binder = opened._binder
    assert isinstance(binder, HostBinder)
    opened._binder = dataclasses.replace(binder, elsewhere=frozenset(names))
    one = Target(opened, opened.spec, max_context=64)
    text = [1, 2, 3]
    rows = one.prefill(np.array([text]))
    for _ in range(5):
        text.append(int(rows.argmax[0, 0]))
        rows = one.verify(np.array([text[-1:]]))
    assert text[3:] == toy.plain([1, 2, 3], 5)
    run = one._prepare(1, 0, 0)
    assert isinstance(run, PreparedRun)
    assert len(run._bound.before) == len(names)


def test_attention_that_stays_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose KV the graph would copy to the host and back is refused."""
    opened = session(tmp_path, Toy())
    with pytest.raises(EngineError, match=r"'past\.0\.key' is read on the host") as caught:
        OrtSession(opened.raw, opened.spec, OrtDeviceMemory("cuda"))
    assert "--precision fp16" in str(caught.value.hint)
    with pytest.raises(EngineError, match="cannot be recorded as a CUDA graph: input 'first_row'"):
        opened.record_runs()
    monkeypatch.setattr(opened, "_on_host", frozenset())
    opened.record_runs()
    keys = [opened._recorded().get_run_config_entry("gpu_graph_annotation_id") for _ in range(2)]
    assert keys == ["1", "2"]


@pytest.mark.parametrize("method", ["plain", "early-exit", "draft"])
def test_recorded_runs(
    open_small: OpenEngine, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, with the CPU in its place: each shape has a number, and no KV buffer moves."""
    exact: dict[str, Any] = {"exact": True, "exact_width": 4}
    options: dict[str, Any] = {"method": method, "strict": True, **GREEDY}
    want = open_small("llama", **exact).generate(PROMPT, **options)
    create = ort_devices.create
    places: list[Place] = []

    def on_cpu(model: Any, session_options: Any, place: Place) -> Any:
        places.append(place)
        return create(model, session_options, ort.CPU)

    monkeypatch.setattr(ort, "check_device", lambda place: None)
    monkeypatch.setattr(ort, "create", on_cpu)
    monkeypatch.setattr(ort, "memory_of", lambda place: DRIVEN)
    monkeypatch.setattr(ort, "read_on_host", lambda session: frozenset())
    engine = open_small("llama", device="cuda", device_id=1, cuda_graph=True, **exact)
    kv = engine.target.kv
    assert kv.capacity == kv.max_context == 64
    assert engine.generate(PROMPT, **options).tokens == want.tokens
    assert kv.version == 0 and engine.target.kv is kv
    # Those of the target are recorded; a draft model's have every shape.
    recorded = [place.cuda_graph for place in places]
    assert recorded == [True, True, True, *([False] if method == "draft" else [])]
    assert {(place.device, place.device_id) for place in places} == {("cuda", 1)}
    front = engine._resources.session("front")
    assert isinstance(front, OrtSession)
    assert next(front._numbers or iter(())) > 1


# bfloat16.


def test_bfloat16_is_bits() -> None:
    assert (DType.BFLOAT16.numpy, DType.BFLOAT16.itemsize) == ("uint16", 2)
    assert np.dtype(DType.BFLOAT16.numpy).itemsize == 2
    assert [dtype.numpy for dtype in (DType.FLOAT16, DType.INT64)] == ["float16", "int64"]


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_finite_bits(bits: int) -> None:
    """Infinities and NaNs of bfloat16 are seen, large numbers are none."""
    array = np.array([0x0000, 0x7F7F, 0xFF7F, 0x3F80], np.uint16)
    assert all_finite(array)
    assert not all_finite(np.append(array, np.uint16(bits)))
    assert all_finite(np.array([1.0])) and not all_finite(np.array([np.nan]))


@pytest.mark.parametrize("memory", [HOST, DRIVEN], ids=["host", "device"])
@pytest.mark.parametrize("method", ["plain", "mtp-drafter"])
def test_bfloat16_engines(
    open_toy: OpenEngine, method: Any, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "memory_of", lambda place: memory)
    toy = Toy(modulus=7, history_weight=3, drafter=True, kv_dtype=DType.BFLOAT16)
    engine = open_toy(toy)
    result = engine.generate([1, 2, 3], method=method, max_new_tokens=40, strict=True)
    assert result.tokens == toy.plain([1, 2, 3], 40)
    kv = engine.target.kv
    assert kv.dtype is DType.BFLOAT16
    stored = kv.read_rows(KEY, 0, 3).astype(np.uint32) << 16  # bfloat16 is half a float32
    assert stored.view(np.float32)[0, 0, :, 0].tolist() == [1, 2, 3]


def test_bfloat16_that_is_not_finite(open_toy: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, run = open_toy(Toy(kv_dtype=DType.BFLOAT16)), PreparedRun.run

    def spoiled(prepared: PreparedRun) -> None:
        run(prepared)
        prepared.outputs["hidden"][..., 0] = 0x7FC0

    monkeypatch.setattr(PreparedRun, "run", spoiled)
    with pytest.raises(EngineError) as caught:
        engine.generate([1])
    assert str(not_finite()) in str(caught.value)


# Devices.


@pytest.mark.parametrize(
    ("device", "package"),
    [
        ("cuda", "onnxruntime-gpu"),
        ("ort-tensorrt", "onnxruntime-gpu"),
        ("ort-tensorrt-rtx", "onnxruntime-ep-nv-tensorrt-rtx"),
        ("dml", "onnxruntime-directml"),
        ("openvino", "onnxruntime-openvino"),
        ("migraphx", "onnxruntime-migraphx"),
        ("qnn", "onnxruntime-qnn"),
    ],
)
def test_what_to_install(open_toy: OpenEngine, device: str, package: str) -> None:
    """C73: a provider that is not there is an error with the package that has it."""
    with pytest.raises(DeviceError, match=f"device: '{device}' is not available") as caught:
        open_toy(device=device)
    assert f"pip install {package}, " in str(caught.value.hint)
    assert "--device cpu" in str(caught.value.hint)


@pytest.mark.parametrize("device", ["gpu", "cuda:1", "CUDA", "", "plugins:x"])
def test_unknown_devices(open_toy: OpenEngine, device: str) -> None:
    with pytest.raises(DeviceError, match=f"device: '{device}' is not available") as caught:
        open_toy(device=device)
    assert "devices are cpu, cuda, " in str(caught.value.hint)


@pytest.mark.parametrize("device", ["tensorrt", "tensorrt-rtx"])
def test_engines_of_tensorrt(open_toy: OpenEngine, device: str) -> None:
    says = f"device: '{device}': the engines of this folder are written for ONNX Runtime"
    with pytest.raises(DeviceError, match=says) as caught:
        open_toy(device=device)
    assert caught.value.hint == f"export them with specexport SOURCE --backend {device}"


def test_a_provider_that_does_not_load(
    open_toy: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime says that it has it, and then runs on the CPU."""
    here = [*onnxruntime.get_available_providers(), "CUDAExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: here)
    says = "CUDAExecutionProvider does not load, and onnxruntime would run on CPUExecutionProvider"
    with pytest.raises(DeviceError, match=says) as caught:
        open_toy(device="cuda")
    assert "specrun doctor" in str(caught.value.hint)


def test_a_provider_that_raises(open_toy: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA failure 100: no CUDA-capable device is detected")

    here = ["CUDAExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: here)
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuses)
    with pytest.raises(DeviceError, match="does not load: CUDA failure 100"):
        open_toy(device="cuda")


def test_memory_that_onnxruntime_does_not_have() -> None:
    with pytest.raises(DeviceError, match="device: 'cuda:1': onnxruntime allocates no memory"):
        ort_devices.memory_of(Place("cuda", 1))
    assert ort_devices.memory_of(Place("dml")) is HOST
    assert ort_memory.OrtDeviceMemory("cpu").check() is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device_id": -1}, "device_id: must be a whole number of at least 0"),
        ({"device_id": 1}, "device_id: has no effect on device 'cpu', got 1"),
        ({"device_id": 1, "device": "openvino"}, "device_id: has no effect on device 'openvino'"),
        ({"provider_library": "a.so"}, "provider_library: has no effect on device 'cpu'"),
        ({"provider_library": 3, "device": "plugin:x"}, "provider_library: must be the path"),
        ({"user_compute_stream": 5}, "user_compute_stream: has no effect on device 'cpu'"),
        ({"cuda_graph": True, "exact": True}, "cuda_graph: has no effect on device 'cpu'"),
        ({"cuda_graph": True, "device": "cuda"}, "cuda_graph: records runs of one shape"),
        ({"cuda_graph": 1}, "cuda_graph: must be true or false"),
        ({"device": None}, "device: must be the name of a device"),
    ],
)
def test_options_without_effect(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        EngineOptions(**options)


def test_options_of_the_provider() -> None:
    options = EngineOptions(
        device="cuda", device_id=2, exact=True, cuda_graph=True, user_compute_stream=4096
    )
    place = Place.of(options, cuda_graph=True)
    cuda = {"device_id": "2", "user_compute_stream": "4096"}
    recorded = cuda | {"enable_cuda_graph": "1"}
    given = ort_devices._with_options
    assert given(DEVICES["cuda"], place) == [("CUDAExecutionProvider", recorded)]
    drafter = Place.of(options, cuda_graph=False)
    assert given(DEVICES["cuda"], drafter) == [("CUDAExecutionProvider", cuda)]
    assert given(DEVICES["ort-tensorrt"], Place("ort-tensorrt", 1)) == [
        ("TensorrtExecutionProvider", {"device_id": "1"}),
        ("CUDAExecutionProvider", {"device_id": "1"}),
    ]
    assert given(DEVICES["openvino"], Place("openvino")) == [("OpenVINOExecutionProvider", {})]


# Plug-ins.


def test_a_plugin_by_name(open_toy: OpenEngine) -> None:
    """The CPU's provider is there as a plug-in too."""
    engine = open_toy(Toy(drafter=True), device="plugin:CPUExecutionProvider")
    result = engine.generate([1], max_new_tokens=5)
    assert result.text == "23456"
    assert set(result.stats.providers.values()) == {"CPUExecutionProvider"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "plugin:Mine"}, "there are providers CPUExecutionProvider"),
        ({"device": "plugin:"}, "device: 'plugin:' is not available"),
        ({"device": "plugin:Mine", "provider_library": "no.so"}, "no.so: there is no such file"),
        (
            {"device": "plugin:CPUExecutionProvider", "device_id": 7},
            "device_id: CPUExecutionProvider has 1 devices, counted from 0, got 7",
        ),
    ],
)
def test_plugins_that_are_not_there(
    open_toy: OpenEngine, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(DeviceError, match=says):
        open_toy(**options)


def test_a_plugin_that_is_no_library(open_toy: OpenEngine, tmp_path: Path) -> None:
    for name, content in (("text.so", b"no library"), ("empty.so", b"")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DeviceError, match=f"{name}: does not load: ") as caught:
            open_toy(device="plugin:Mine", provider_library=str(path))
        assert "shared library" in str(caught.value.hint)
    with pytest.raises(DeviceError, match="there is no such file"):
        open_toy(device="plugin:Mine", provider_library=str(tmp_path))


def test_the_probe_is_a_model() -> None:
    model = onnx.load_from_string(ort_devices.PROBE)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["Identity"]
