"""Plans of TensorRT on a GPU that is a fake: the real loop on them, what is copied when, errors.

That the fake has the interface of the real packages is in test_trt_interface.py. What a GPU
computes, no test here can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from drafting import Noisy, Oracle, Wrong
from fake_gpu import Gpu, Opened
from fake_trt import CudaGraphStrategy
from test_loop import watched
from toy_plans import CAPACITY, KEY, write_plan
from toys import Toy

from specrun import Engine, contract
from specrun.contract import DType
from specrun.errors import ContextFull, EngineError
from specrun.fixed import as_contract
from specrun.memory import HostMemory
from specrun.options import GenerateOptions
from specrun.resources import Resources
from specrun.runner import Session
from specrun.trt_arrays import DeviceArray
from specrun.trt_run import TrtRun
from specrun.trt_session import TrtSession

TOY = Toy(history_weight=3, modulus=7, max_context=CAPACITY)
DRAFTED = Toy(drafter=True, max_context=CAPACITY)


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
        by_name: dict[str, Session] = {}

        def session(resources: Resources, name: str) -> Session:
            if name not in by_name:
                role = "target" if name == contract.TARGET_ENGINE else "drafter"
                made = write_plan(resources.folder, toy, role)
                sessions.append(made.open(**options))
                by_name[name] = as_contract(sessions[-1])
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
    assert isinstance(cast(Any, logits), DeviceArray)
    assert (logits.shape, logits.ndim, len(logits)) == ((1, 4, 10), 3, 1)
    assert logits.dtype == np.float32
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
    hidden: Any = run.outputs[contract.HIDDEN]
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
    before = len(gpu.cuda.memory)
    machine.shared.output(contract.HIDDEN, 1 << 16)
    machine.shared.block("inputs", 1 << 16)
    assert len(gpu.cuda.memory) == before + 2  # the smaller ones are still used
    assert np.asarray(hidden).tolist() == [[[0, 4]]]
    small.run()
    assert np.asarray(small.outputs[contract.HIDDEN]).tolist() == [[[0, 4]]]
    del hidden, small
    assert len(gpu.cuda.memory) == before


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
        config = one._slot.open_context._config
        assert config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    made.session.close()
    del made, one, two, run
    gpu.cuda.check_clean()


# KV buffers.


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_buffers_of_the_device(opened: Opened, gpu: Gpu, dtype: DType) -> None:
    def waits() -> None:
        """Sessions on other streams find what was written."""
        assert not any(stream.work for stream in gpu.cuda.streams.values())

    memory = opened.session.memory
    assert memory.device == "cuda"
    small = memory.zeros("small", (2, 3, 4, 5), dtype)
    waits()
    large = memory.zeros("large", (2, 3, 9, 5), dtype)
    assert small.host is None and not small.read().any()
    values = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype(dtype.numpy)
    small.write(values)
    waits()
    large.copy_rows(small, [3, 1])
    waits()
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
    opened.run(2, 1).run()  # and it goes on


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
