"""Plans of TensorRT on a GPU that is a fake: the real loop on them, what is copied when, errors.

That the fake has the interface of the real packages is in test_trt_interface.py. What a GPU
computes, no test here can tell.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting import Noisy, Oracle, Wrong
from fake_cuda import Error
from fake_trt import CudaGraphStrategy, ICudaEngine
from numpy.typing import NDArray
from test_loop import watched
from toy_plans import CAPACITY, KEY, VALUE, WANTED_ROWS, AsContract, Gpu, ToyPlan, write_plan
from toys import Toy

from specrun import Engine, contract
from specrun.contract import DType, Part, past, present
from specrun.errors import ContextFull, DeviceError, EngineError, UsageError
from specrun.manifest import EngineSpec
from specrun.memory import HostMemory
from specrun.options import GenerateOptions
from specrun.resources import Resources
from specrun.runner import Buffer
from specrun.trt_arrays import DeviceArray
from specrun.trt_run import TrtRun
from specrun.trt_session import TrtSession

TOY = Toy(history_weight=3, modulus=7, max_context=CAPACITY)
DRAFTED = Toy(drafter=True, max_context=CAPACITY)
Arrays = dict[str, NDArray[Any]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpu]:
    """A GPU on which nothing was done wrong at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    installed = Gpu.installed(monkeypatch)
    yield installed
    if not installed.cuda.broken:
        assert not installed.cuda.mistakes


class Opened:
    """A session with its KV buffers, and runs of any width on them."""

    def __init__(self, made: ToyPlan, **options: Any) -> None:
        self.session: TrtSession = made.open(**options)
        self.spec: EngineSpec = made.spec
        shape = (1, 1, CAPACITY, 2)
        zeros = self.session.memory.zeros
        self.kv = {name: zeros(name, shape, made.spec.kv_dtype) for name in (KEY, VALUE)}
        self.present: dict[str, Buffer] = {
            present(0, part): self.kv[past(0, part)] for part in Part
        }

    def arrays(self, rows: int, wanted: int) -> tuple[Arrays, Arrays]:
        inputs: Arrays = {
            contract.TOKENS: np.ones((1, rows), np.int64),
            contract.PAST_LENGTH: np.zeros(1, np.int32),
            WANTED_ROWS: np.arange(rows - wanted, rows),
        }
        outputs: Arrays = {
            contract.ARGMAX: np.zeros((1, wanted), np.int64),
            contract.LOGITS: np.zeros((1, wanted, 10), np.float32),
            contract.HIDDEN: np.zeros((1, wanted, 2), np.float32),
        }
        return inputs, outputs

    def run(self, rows: int, wanted: int, only: tuple[str, ...] = ()) -> TrtRun:
        inputs, outputs = self.arrays(rows, wanted)
        kept = {name: array for name, array in outputs.items() if not only or name in only}
        return self.session.prepare(inputs, kept, self.kv, self.present)


@pytest.fixture
def opened(gpu: Gpu, tmp_path: Path) -> Iterator[Opened]:
    made = Opened(write_plan(tmp_path, TOY))
    yield made
    made.session.close()


# The loop.


@pytest.fixture
def open_on_gpu(
    gpu: Gpu, open_toy: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """``open_on_gpu(toy)``: an engine folder whose sessions are those of plans."""
    sessions: list[TrtSession] = []

    def make(toy: Toy, **options: Any) -> Engine:
        by_name: dict[str, AsContract] = {}

        def session(resources: Resources, name: str) -> AsContract:
            if name not in by_name:
                role = "target" if name == contract.TARGET_ENGINE else "drafter"
                made = write_plan(resources.folder, toy, role)
                sessions.append(made.open(**options))
                by_name[name] = AsContract(sessions[-1], made.contract)
                resources._providers[name] = sessions[-1].provider
            return by_name[name]

        monkeypatch.setattr(Resources, "session", session)
        return open_toy(toy, prefill_chunk=16)

    yield make
    for opened in sessions:
        opened.close()


@pytest.mark.parametrize("kind", [Oracle, Wrong, Noisy])
def test_the_loop_is_lossless(open_on_gpu: Callable[..., Engine], kind: Any) -> None:
    engine = open_on_gpu(TOY)
    for prompt in ([1], [3, 1, 4], list(range(7)) * 3):
        plain = TOY.plain(prompt, 30)
        for k in (0, 1, 2, 5):
            result, _ = watched(
                engine, prompt, drafter=kind(TOY), num_assistant_tokens=k, max_new_tokens=30
            )
            assert result.tokens == plain
            if kind is not Noisy and k:
                assert result.stats.acceptance == float(kind is Oracle)
    assert result.stats.provider == "TensorRT-RTX 1.7.1.116 (SM 86)"


def test_the_mtp_drafter_reads_the_kv_of_the_target(open_on_gpu: Callable[..., Engine]) -> None:
    """Right drafts only where token, hidden row, length and KV of the device belong together."""
    engine = open_on_gpu(DRAFTED)
    plain = DRAFTED.plain([3, 4], 24)
    for k in (1, 3, 7):
        result, _ = watched(
            engine, [3, 4], method="mtp-drafter", num_assistant_tokens=k, max_new_tokens=24
        )
        assert result.tokens == plain
        assert result.stats.acceptance == 1.0


def test_sampling_reads_logits_of_the_device(open_on_gpu: Callable[..., Engine]) -> None:
    engine = open_on_gpu(DRAFTED)
    options = GenerateOptions(
        do_sample=True, temperature=0.2, seed=1, max_new_tokens=20, method="mtp-drafter"
    )
    result = engine.generate([3, 4], options=options, strict=True, logprobs=2)
    assert result.tokens == DRAFTED.plain([3, 4], 20)  # a lead of 10 at temperature 0.2
    assert result.logprobs is not None and len(result.logprobs) == 20


def test_sessions_of_one_engine_take_turns(open_on_gpu: Callable[..., Engine]) -> None:
    engine = open_on_gpu(TOY)
    prompts = [[1], [2, 5], [3, 1, 4]]
    results = engine.generate(prompts, method="plain", max_new_tokens=12)
    assert [result.tokens for result in results] == [TOY.plain(p, 12) for p in prompts]


# Runs.


def test_a_run_waits_once_and_leaves_the_large_outputs(opened: Opened, gpu: Gpu) -> None:
    run = opened.run(rows=4, wanted=4)
    run.run()
    gpu.cuda.calls.clear()
    run.inputs[contract.TOKENS][:] = [[1, 2, 3, 4]]
    run.run()
    assert gpu.cuda.calls == ["cudaMemcpyAsync", "cudaMemcpyAsync", "cudaStreamSynchronize"]
    expected = [TOY.next([1, 2, 3, 4][: n + 1]) for n in range(4)]
    assert run.outputs[contract.ARGMAX].tolist() == [expected]
    logits = run.outputs[contract.LOGITS]
    assert isinstance(logits, DeviceArray)
    assert (logits.shape, logits.ndim, len(logits), logits.dtype) == ((1, 4, 10), 3, 1, "float32")
    row = logits[0, 3]
    assert isinstance(row, np.ndarray) and row.argmax() == expected[3]
    assert gpu.cuda.calls.count("cudaMemcpyAsync") == 3  # that row alone
    assert np.isfinite(logits).all()
    assert np.asarray(logits).argmax(axis=2).tolist() == [expected]


def test_views_of_what_is_on_the_device(opened: Opened) -> None:
    run = opened.run(rows=5, wanted=5)
    run.inputs[contract.TOKENS][:] = [[1, 2, 3, 4, 5]]
    run.run()
    hidden = run.outputs[contract.HIDDEN]
    whole = np.stack([np.arange(5), np.arange(1, 6)], axis=1)[None].astype("f4")
    for index in (np.s_[0], np.s_[:, 2:], np.s_[0, 1:3], np.s_[0, -1], np.s_[:, 1:], np.s_[0, 4:2]):
        np.testing.assert_array_equal(np.asarray(hidden[index]), whole[index])
        assert hidden[index].shape == whole[index].shape
    assert hidden[0, 1, 0] == 1 and np.ndim(hidden[0, 1, 0]) == 0
    np.testing.assert_array_equal(hidden[..., 1], whole[..., 1])
    np.testing.assert_array_equal(hidden[:, ::2], whole[:, ::2])
    np.testing.assert_array_equal(list(hidden[0]), list(whole[0]))
    assert np.asarray(hidden, dtype="f8").dtype == np.float64
    with pytest.raises(IndexError, match="index 5 is out of bounds"):
        hidden[0, 5]
    with pytest.raises(ValueError, match="only a copy"):
        np.asarray(hidden, copy=False)


def test_a_view_of_several_sequences_is_copied_row_by_row(opened: Opened) -> None:
    run = opened.run(rows=4, wanted=4)
    run.inputs[contract.TOKENS][:] = [[1, 2, 3, 4]]
    run.run()
    hidden = run.outputs[contract.HIDDEN]
    apart = DeviceArray(hidden._output, 8, 0, (2, 2, 2), (4, 2, 1))  # as two sequences
    whole = np.asarray(apart)
    np.testing.assert_array_equal(np.asarray(apart[:, 1:]), whole[:, 1:])


def test_outputs_are_those_of_the_last_run(opened: Opened) -> None:
    """Small ones stay with their run, as does what was copied; the rest is gone, and says so."""
    first, second = opened.run(rows=2, wanted=2), opened.run(rows=3, wanted=1)
    first.inputs[contract.TOKENS][:] = 2
    first.run()
    argmax = first.outputs[contract.ARGMAX].tolist()
    hidden, logits = first.outputs[contract.HIDDEN], first.outputs[contract.LOGITS]
    kept = np.asarray(hidden).tolist()
    second.run()
    assert first.outputs[contract.ARGMAX].tolist() == argmax
    assert np.asarray(hidden[0, 1]).tolist() == kept[0][1]
    with pytest.raises(RuntimeError, match="logits: its values were overwritten"):
        np.asarray(logits)


def test_runs_of_one_context_bind_again_only_behind_each_other(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    binds: list[TrtRun] = []
    bind = TrtRun._bind

    def counted(run: TrtRun) -> None:
        binds.append(run)
        bind(run)

    monkeypatch.setattr(TrtRun, "_bind", counted)
    one, two, prefill = (opened.run(rows, 1) for rows in (2, 3, 40))
    binds.clear()
    for run in (one, one, prefill, one, two, two, one):
        run.inputs[contract.TOKENS][:] = 5
        run.run()
        rows = run.inputs[contract.TOKENS].shape[1]
        assert run.outputs[contract.ARGMAX].tolist() == [[TOY.next([5] * rows)]]
    assert [run.name for run in binds] and binds == [one, two, one]


def test_larger_runs_move_what_is_shared(opened: Opened, gpu: Gpu) -> None:
    """Growth under a run that was bound before, and under a view that is still looked at."""
    small = opened.run(rows=1, wanted=1)
    small.inputs[contract.TOKENS][:] = 4
    small.run()
    hidden = small.outputs[contract.HIDDEN]
    machine = opened.session._opened.machine
    before = machine.shared.version
    machine.shared.output(contract.HIDDEN, 1 << 16)
    machine.shared.block("inputs", 1 << 16)
    assert machine.shared.version == before + 2
    assert np.asarray(hidden).tolist() == [[[0, 4]]]
    small.run()
    assert np.asarray(small.outputs[contract.HIDDEN]).tolist() == [[[0, 4]]]
    assert not gpu.cuda.mistakes


def test_the_profile_follows_from_the_sizes(opened: Opened) -> None:
    def profile(rows: int, wanted: int) -> str:
        return opened.run(rows, wanted)._slot.profile

    assert [profile(*sizes) for sizes in ((1, 1), (12, 12), (13, 1), (64, 12))] == [
        "decode",
        "decode",
        "prefill",
        "prefill",
    ]
    message = r"tokens has shape \[1, 65\], the plan takes prefill \[1, 1\]..\[1, 64\], decode"
    with pytest.raises(EngineError, match=message) as caught:
        opened.run(65, 1)
    assert "prefill_chunk" in str(caught.value.hint)
    with pytest.raises(EngineError, match=r"wanted_rows has shape \[13\]"):
        opened.run(13, 13)


def test_ctrl_c_in_a_run_leaves_the_next_one_right(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened.run(rows=2, wanted=1)
    stream = opened.session._opened.machine.stream

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stream, "synchronize", interrupted)
        run.inputs[contract.TOKENS][:] = 6
        with pytest.raises(KeyboardInterrupt):
            run.run()
    # What is on its way must be done before its inputs are overwritten.
    run.inputs[contract.PAST_LENGTH][:] = 2
    run.inputs[contract.TOKENS][:] = 3
    run.run()
    assert opened.kv[KEY].read()[0, 0, :4].tolist() == [[6, 0], [6, 1], [3, 2], [3, 3]]


@pytest.mark.parametrize("flavour", ["tensorrt", "tensorrt_rtx"])
def test_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flavour: Any) -> None:
    """Captured at the second run, gone when another run of the context comes between."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gpu = Gpu.installed(monkeypatch, flavour)
    made = Opened(write_plan(tmp_path, TOY, flavour=flavour), graphs=True)
    one, two = made.run(2, 1), made.run(3, 1)
    for run, launches in ((one, 0), (one, 1), (one, 2), (two, 2), (one, 2), (one, 3)):
        run.inputs[contract.TOKENS][:] = launches
        run.run()
        rows = run.inputs[contract.TOKENS].shape[1]
        assert run.outputs[contract.ARGMAX].tolist() == [[TOY.next([launches] * rows)]]
        own = flavour == "tensorrt"
        assert gpu.cuda.calls.count("cudaGraphLaunch") == (launches if own else 0)
    if flavour == "tensorrt_rtx":  # which does it itself
        config = one._slot.open_context._config  # type: ignore[attr-defined]
        assert config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    made.session.close()
    del made, one, two, run
    gpu.cuda.check_clean()


# KV buffers.


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_buffers_of_the_device(opened: Opened, dtype: DType) -> None:
    memory = opened.session.memory
    assert memory.device == "cuda"
    small = memory.zeros("small", (2, 3, 4, 5), dtype)
    large = memory.zeros("large", (2, 3, 9, 5), dtype)
    assert small.host is None and not small.read().any()
    values = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype(dtype.numpy)
    small.write(values)
    large.copy_rows(small, [3, 1])
    expected = np.zeros((2, 3, 9, 5), dtype.numpy)
    expected[0, :, :3], expected[1, :, :1] = values[0, :, :3], values[1, :, :1]
    np.testing.assert_array_equal(large.read(), expected)
    for wrong in (values[:1], values.astype("f8")):
        with pytest.raises(ValueError, match="small: must be"):
            small.write(wrong)
    with pytest.raises(ValueError, match="no room for"):
        small.copy_rows(large, [5, 0])
    with pytest.raises(TypeError, match="buffers of its device"):
        small.copy_rows(HostMemory().zeros("host", (2, 3, 4, 5), dtype), [1, 1])


def test_no_memory_for_a_buffer(opened: Opened) -> None:
    with pytest.raises(ContextFull, match=r"past: there is no memory .*\[1, 1, 1048576, 64\]"):
        opened.session.memory.zeros("past", (1, 1, 1 << 20, 64), DType.FLOAT32)
    opened.session.memory.zeros("past", (1, 1, 64, 64), DType.FLOAT32)  # and it goes on


def test_a_buffer_is_freed_with_its_last_reference(opened: Opened, gpu: Gpu) -> None:
    before = len(gpu.cuda.memory)
    buffer = opened.session.memory.zeros("past", (1, 1, 4, 4), DType.FLOAT32)
    assert len(gpu.cuda.memory) == before + 1
    del buffer
    assert len(gpu.cuda.memory) == before


# Errors of runs.


def test_what_is_missing_or_wrong_is_named(opened: Opened) -> None:
    inputs, outputs = opened.arrays(2, 1)
    kv, written, prepare = opened.kv, opened.present, opened.session.prepare
    host = HostMemory().zeros(KEY, (1, 1, CAPACITY, 2), DType.FLOAT32)
    other = opened.session.memory.zeros(KEY, (1, 1, CAPACITY, 2), DType.FLOAT32)
    small = opened.session.memory.zeros(KEY, (1, 1, 8, 2), DType.FLOAT32)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("'past_length' is not given", (_without(inputs, "past_length"), outputs, kv, written)),
        ("'odd' is no input", ({**inputs, "odd": inputs["tokens"]}, outputs, kv, written)),
        ("'odd' is no output", (inputs, {"odd": outputs["argmax"]}, kv, written)),
        ("'past.0.key' is not given", (inputs, outputs, _without(kv, KEY), written)),
        ("'present.0.key' is not given", (inputs, outputs, kv, _without(written, "present.0.key"))),
        (
            "'tokens' must be int64, is int32",
            ({**inputs, "tokens": np.ones((1, 2), np.int32)}, outputs, kv, written),
        ),
        ("'past.0.key' is not on the GPU", (inputs, outputs, {**kv, KEY: host}, written)),
        (
            "'present.0.key' must be the buffer of 'past.0.key'",
            (inputs, outputs, kv, {**written, "present.0.key": other}),
        ),
        (
            r"past.0.key has shape \[1, 1, 8, 2\], the plan takes prefill \[1, 1, 256, 2\]",
            (inputs, outputs, {**kv, KEY: small}, {**written, "present.0.key": small}),
        ),
        (
            r"output 'argmax' has shape \[1, 1\] for these inputs, not \[1, 2\]",
            (inputs, {"argmax": np.zeros((1, 2), np.int64)}, kv, written),
        ),
    ]
    for message, arguments in cases:
        with pytest.raises(EngineError, match=message):
            prepare(*arguments)


def _without(mapping: Any, name: str) -> Any:
    return {key: value for key, value in mapping.items() if key != name}


def test_what_tensorrt_refuses_comes_with_its_words(opened: Opened, gpu: Gpu) -> None:
    run = opened.run(2, 1)
    gpu.library.fails["execute_async_v3"] = "no kernel for this shape"
    message = "target.sm86.engine: a run failed: execute_async_v3: no kernel for this shape"
    with pytest.raises(EngineError, match=message):
        run.run()
    gpu.library.fails.clear()
    run.run()
    gpu.library.fails["set_tensor_address"] = "misaligned"
    with pytest.raises(EngineError, match=r"cannot be bound: misaligned"):
        opened.run(3, 1)


def test_an_error_of_the_device_is_named(opened: Opened, gpu: Gpu) -> None:
    run = opened.run(2, 1)
    run.inputs[contract.PAST_LENGTH][:] = CAPACITY  # beyond the buffer
    message = r"a run failed: cudaStreamSynchronize: cudaErrorIllegalAddress \(illegaladdress\)"
    with pytest.raises(EngineError, match=message):
        run.run()
    with pytest.raises(EngineError, match="cudaErrorIllegalAddress"):
        run.run()
    opened.session.close()  # all the same


def test_memory_that_runs_out_at_a_run(gpu: Gpu, tmp_path: Path) -> None:
    opened = Opened(write_plan(tmp_path, TOY))
    gpu.cuda.total = sum(map(len, gpu.cuda.memory.values())) + 100
    with pytest.raises(EngineError, match=r"inputs: there is no memory for 4096 bytes, 100 of"):
        opened.run(2, 1)
    opened.session.close()


# Opening and closing.


def test_closing_frees_in_order_and_twice_is_once(gpu: Gpu, tmp_path: Path) -> None:
    opened = Opened(write_plan(tmp_path, TOY))
    run = opened.run(2, 1)
    assert gpu.library.made == ["runtime", "engine", "context", "context"]
    opened.session.close()
    assert gpu.library.freed == ["context", "context", "engine", "runtime"]
    opened.session.close()
    with pytest.raises(UsageError, match="the engine is closed"):
        run.run()
    with pytest.raises(UsageError, match="the engine is closed"):
        opened.run(2, 1)


def test_without_close_it_goes_with_the_last_reference(gpu: Gpu, tmp_path: Path) -> None:
    session = write_plan(tmp_path, TOY).open()
    del session
    assert gpu.library.freed == ["context", "context", "engine", "runtime"]
    gpu.cuda.check_clean()


def test_a_fork_frees_nothing(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(write_plan(tmp_path, TOY))
    run = opened.run(2, 1)
    calls = list(gpu.cuda.calls)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        with pytest.raises(UsageError, match="a fork of it"):
            run.run()
        with pytest.raises(UsageError, match="a fork of it"):
            opened.kv[KEY].read()
        opened.session.close()
        del run, opened
        gc.collect()
        assert gpu.cuda.calls == calls
        assert not gpu.library.freed
    gpu.cuda.broken = Error.cudaErrorIllegalAddress  # what is left is left on purpose


def test_kernels_are_compiled_once(gpu: Gpu, tmp_path: Path) -> None:
    """The next process has them from the user's cache; one that is refused is written anew."""
    made = write_plan(tmp_path, TOY)

    def runs() -> list[str]:
        gpu.library.compiled.clear()
        opened = Opened(made)
        opened.run(2, 1).run()
        opened.session.close()
        return list(gpu.library.compiled)

    assert runs() == ["target.1"]
    (file,) = (tmp_path / "cache" / "specrun" / "tensorrt_rtx").iterdir()
    assert file.stem == made.plan.sha256
    assert runs() == []
    file.write_bytes(b"other")
    assert runs() == ["target.1"]
    assert runs() == []
    file.unlink()
    file.parent.rmdir()
    file.parent.write_bytes(b"no folder")  # nothing can be written: it compiles again
    assert runs() == ["target.1"]


def test_nothing_is_printed(gpu: Gpu, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = write_plan(tmp_path, TOY)
    gpu.library.fails["deserialize_cuda_engine"] = "corrupt"
    with pytest.raises(EngineError, match=r"target.sm86.engine: does not load: corrupt") as caught:
        made.open()
    assert f"specexport build {tmp_path} --backend tensorrt-rtx" in str(caught.value.hint)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("create_execution_context", "profile prefill: no memory for a context"),
        ("set_runtime_cache", "the cache of compiled kernels cannot be used"),
    ],
)
def test_contexts_that_cannot_be_made(gpu: Gpu, tmp_path: Path, fails: str, message: str) -> None:
    gpu.library.fails[fails] = "no memory for a context"
    with pytest.raises(EngineError, match=message):
        write_plan(tmp_path, TOY).open()
    assert gpu.library.freed[-1] == "runtime"


def _tensor(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(tensor for tensor in data["tensors"] if tensor["name"] == name)


EDITS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("has no input 'wanted_rows'", lambda d: d["tensors"].remove(_tensor(d, "wanted_rows"))),
    ("input 'wanted' is not in", lambda d: _tensor(d, "wanted_rows").update(name="wanted")),
    ("has no output 'margin'", lambda d: d["tensors"].remove(_tensor(d, "margin"))),
    (
        "input 'odd' is not in the manifest",
        lambda d: d["tensors"].append(
            {"name": "odd", "mode": "INPUT", "shape": [1], "dtype": "FLOAT"}
        ),
    ),
    (
        "input 'tokens': must be INT64, is INT32",
        lambda d: _tensor(d, "tokens").update(dtype="INT32"),
    ),
    ("has no input 'tokens'", lambda d: _tensor(d, "tokens").update(mode="OUTPUT")),
    (
        r"output 'logits': must have shape \['batch', 'wanted', 10\], has \[-1, -1, 11\]",
        lambda d: _tensor(d, "logits").update(shape=["batch", "wanted", 11]),
    ),
    (
        "input 'past_length': must be on the device",
        lambda d: _tensor(d, "past_length").update(location="HOST"),
    ),
    (
        "output 'present.0.key' must be written over 'past.0.key', the plan writes it over nothing",
        lambda d: _tensor(d, "present.0.key").pop("alias"),
    ),
    ("must have 2 profiles, has 1", lambda d: d["profiles"].pop()),
    (
        r"profile decode of 'tokens' must be \[1, 1\]..\[1, 12\], is \[1, 1\]..\[1, 8\]",
        lambda d: d["profiles"][1].update(tokens=[[1, 1], [1, 8], [1, 8]]),
    ),
]


@pytest.mark.parametrize(("message", "edit"), EDITS)
def test_a_plan_must_be_what_the_manifest_says(
    gpu: Gpu, tmp_path: Path, message: str, edit: Any
) -> None:
    good = write_plan(tmp_path, TOY)
    data = json.loads(good.path.read_bytes())
    edit(data)
    path = tmp_path / "bad.engine"
    path.write_bytes(json.dumps(data).encode())
    with pytest.raises(EngineError, match=message):
        ToyPlan(path, good.plan, good.spec, good.contract).open()
    assert gpu.library.freed == ["engine", "runtime"]


@pytest.mark.parametrize(
    ("device", "version", "message"),
    [
        ({"capability": (8, 9)}, "1.7.1.116", "was built for SM 86, NVIDIA RTX A2000 is SM 89"),
        ({}, "1.8.0.5", "was built by TensorRT-RTX 1.7.1.116, 1.8.0.5 is installed"),
    ],
)
def test_plans_of_elsewhere_never_reach_tensorrt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: Any, version: str, message: str
) -> None:
    gpu = Gpu.installed(monkeypatch, **device)
    monkeypatch.setattr(gpu.library, "__version__", version)
    with pytest.raises(EngineError, match=message) as caught:
        write_plan(tmp_path, TOY).open()
    assert f"specexport build {tmp_path} --backend tensorrt-rtx" in str(caught.value.hint)
    assert not gpu.library.made
    gpu.cuda.check_clean()


def test_a_plan_that_lies_of_its_device_is_refused_by_its_head(gpu: Gpu, tmp_path: Path) -> None:
    made = write_plan(tmp_path, TOY, edit=lambda data: data.update(capability=[9, 0]))
    with pytest.raises(EngineError, match=r"does not run here: TensorRT says UNSUPPORTED_CC"):
        made.open()
    made.path.write_bytes(b"garbage")
    with pytest.raises(EngineError, match="MALFORMED_ENGINE"):
        made.open()
    made.path.write_bytes(b"")
    with pytest.raises(EngineError, match="cannot be read"):
        made.open()
    assert "engine" not in gpu.library.made


def test_a_tensorrt_that_cannot_update_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu.installed(monkeypatch, "tensorrt")
    monkeypatch.delattr(ICudaEngine, "get_aliased_input_tensor")
    with pytest.raises(EngineError, match="cannot update KV buffers in place") as caught:
        write_plan(tmp_path, TOY, flavour="tensorrt").open()
    assert "10.15" in str(caught.value.hint)
    assert not gpu.cuda.memory


def test_no_gpu_no_driver_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = write_plan(tmp_path, TOY)
    Gpu.installed(monkeypatch, missing=Error.cudaErrorInsufficientDriver)
    with pytest.raises(
        DeviceError, match=r"no NVIDIA GPU can be used: cudaErrorInsufficientDriver"
    ):
        made.open()
    Gpu.installed(monkeypatch)
    with pytest.raises(DeviceError, match="there is no GPU 1, this machine has 1"):
        made.open(device=1)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(DeviceError, match=r"cuda-python: does not load"):
        made.open()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(DeviceError, match=r"package tensorrt_rtx does not load") as caught:
        made.open()
    assert caught.value.hint == "pip install 'specrun[tensorrt-rtx]'"
