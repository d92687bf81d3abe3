"""Folders in the dialect of TensorRT, the whole way through the public API, with real numbers.

The GPU and TensorRT are fakes whose plans compute the folder's own graphs (``onnx_plans``). So the
tokens must be those of ONNX Runtime on the same folder, and on a folder in its own dialect.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner
from fake_cuda import Error
from fake_gpu import Gpu
from onnx_plans import PROVIDER, RTX, Workshop
from small_vocabulary import CONTEXT, ENGINES, FOLDERS, METHODS, PAIRS, PROMPT

import specrun
from specrun import resources
from specrun.cli import main
from specrun.contract import TARGET_ENGINES
from specrun.errors import ContextFull, EngineError, UsageError
from specrun.options import GenerateOptions
from specrun.trt_run import TrtRun

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "eos_token_ids": (), "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 20, "eos_token_ids": (), "temperature": 0.9, "seed": 5}
LONG_PROMPT = [*PROMPT, 4, 1, 7, 3, 3, 0, 6, 5, 2, 1, 0, 4, 7, 2, 6, 1, 5, 3, 0, 2]
ROWS, DRAFTS = 16, 5  # of plans that are smaller than what is asked of them
OpenEngine = Callable[..., specrun.Engine]
OTHER_PAIRS = sorted(PAIRS.keys() - FOLDERS.keys())


def same_tokens(engine: specrun.Engine, other: specrun.Engine, method: str, **options: Any) -> None:
    """The first engine is on the GPU, and does what the other one does."""
    given: dict[str, Any] = {"method": method, "strict": True, "num_assistant_tokens": 3} | options
    if method == "plain":
        del given["num_assistant_tokens"]
    got, want = (one.generate(LONG_PROMPT, **given) for one in (engine, other))
    assert got.tokens == want.tokens
    assert got.stats.accepted_by_round == want.stats.accepted_by_round
    assert got.stats.mode == want.stats.mode == ("plain" if method == "plain" else "speculative")
    assert got.stats.provider == PROVIDER
    assert set(got.stats.providers.values()) == {PROVIDER}
    assert set(want.stats.providers.values()) == {"CPUExecutionProvider"}


@pytest.mark.parametrize("method", METHODS)
def test_the_same_tokens(
    planned: Callable[..., Path], on_gpu: OpenEngine, open_small: OpenEngine, method: str
) -> None:
    folder = planned(METHODS[method])
    engine, other = on_gpu(folder), specrun.load(folder, threads=1)
    for options in (GREEDY, SAMPLED):
        same_tokens(engine, other, method, **options)
        same_tokens(engine, open_small(METHODS[method]), method, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_PAIRS)
def test_the_same_tokens_of_every_pair(
    planned: Callable[..., Path], on_gpu: OpenEngine, name: str
) -> None:
    folder = planned(name)
    engine, other = on_gpu(folder), specrun.load(folder, threads=1)
    for method in ("plain", "prompt-lookup", *engine.manifest.drafters):
        for options in (GREEDY, SAMPLED):
            same_tokens(engine, other, method, **options)


@pytest.mark.parametrize("method", METHODS)
def test_small_plans_and_many_drafts(
    planned: Callable[..., Path], on_gpu: OpenEngine, method: Any
) -> None:
    """A prompt is read in chunks and a proposal cut to what the profiles take."""
    folder = planned(METHODS[method], rows=ROWS, drafts=DRAFTS)
    engine, other = on_gpu(folder), specrun.load(folder, threads=1)
    for options in (GREEDY, SAMPLED):
        asked: dict[str, Any] = {} if method == "plain" else {"num_assistant_tokens": 8}
        got, want = (
            one.generate(LONG_PROMPT, method=method, strict=True, **asked, **options)
            for one in (engine, other)
        )
        assert got.stats.mode == ("plain" if method == "plain" else "speculative")
        assert len(got.stats.drafted_by_position) <= DRAFTS
        if options is GREEDY:
            assert got.tokens == want.tokens


def test_more_drafts_than_the_drafter_makes(
    planned: Callable[..., Path], on_gpu: OpenEngine
) -> None:
    """That is refused as it is for any other folder; without a limit it is cut."""
    engine = on_gpu(planned("gemma4"))
    message = "num_assistant_tokens: the drafter was exported for at most 8, got 9"
    with pytest.raises(UsageError, match=message):
        engine.generate(PROMPT, method="mtp-drafter", num_assistant_tokens=9, **GREEDY)
    got = engine.generate(PROMPT, method="prompt-lookup", num_assistant_tokens=60, **GREEDY)
    assert got.tokens == engine.generate(PROMPT, method="plain", **GREEDY).tokens


@pytest.mark.parametrize("method", ["draft", "early-exit", "mtp", "mtp-drafter"])
def test_sessions(planned: Callable[..., Path], on_gpu: OpenEngine, method: Any) -> None:
    """Turns go on behind the KV of those before, also after a rewind into the middle of one."""
    engine = on_gpu(planned(METHODS[method], rows=ROWS, drafts=DRAFTS))
    options = {**GREEDY, "max_new_tokens": 8, "strict": True}
    session = engine.session()
    session.append(PROMPT)
    session.generate(method=method, **options)
    for length in (len(PROMPT) + 5, len(PROMPT), 1):
        session.rewind(length)
        session.append([3, 1])
        before = session.tokens
        got = session.generate(method=method, **options)
        session.check_integrity()
        assert got.tokens == engine.generate(before, method="plain", **options).tokens
        assert got.stats.drafted > 0


@pytest.mark.parametrize("method", METHODS)
def test_batches(planned: Callable[..., Path], on_gpu: OpenEngine, method: Any) -> None:
    """Rows take turns on the same plans, each with KV buffers of its own."""
    engine = on_gpu(planned(METHODS[method]))
    prompts = [PROMPT, LONG_PROMPT, [1]]
    got = engine.generate(prompts, method=method, strict=True, **GREEDY)
    want = [engine.generate(prompt, method="plain", **GREEDY).tokens for prompt in prompts]
    assert [result.tokens for result in got] == want


@pytest.mark.parametrize("graphs", [False, True], ids=["runs", "graphs"])
@pytest.mark.parametrize("method", METHODS)
def test_exact_mode(
    planned: Callable[..., Path], on_gpu: OpenEngine, method: Any, graphs: bool
) -> None:
    engine = on_gpu(
        planned(METHODS[method], rows=ROWS, drafts=15),
        exact=True,
        exact_width=8,
        cuda_graph=graphs,
    )
    plain = engine.generate(LONG_PROMPT, method="plain", logprobs=3, **GREEDY)
    got = engine.generate(LONG_PROMPT, method=method, strict=True, logprobs=3, **GREEDY)
    assert got.tokens == plain.tokens and got.logprobs == plain.logprobs
    assert got.stats.exact_width == 8


@pytest.mark.parametrize("method", METHODS)
def test_runs_that_tensorrt_replays(
    trt_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: Any,
) -> None:
    """Full TensorRT has no CUDA graphs of its own; ours read what is there when they start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, source = tmp_path / "engines", trt_folder(METHODS[method]) / ENGINES
    Workshop(monkeypatch, "tensorrt").with_plans(source, folder)
    gpu = Gpu.installed(monkeypatch, "tensorrt")
    given: dict[str, Any] = {"exact": True, "exact_width": 8}
    with specrun.load(folder, device="cpu", **given) as engine:
        want = engine.generate(LONG_PROMPT, method="plain", **GREEDY)
    with specrun.load(folder, device="tensorrt", cuda_graph=True, **given) as engine:
        got = engine.generate(LONG_PROMPT, method=method, strict=True, **GREEDY)
        assert got.tokens == want.tokens
        assert got.stats.provider == "TensorRT 10.15.1.29 (SM 86)"
    assert gpu.cuda.calls.count("cudaGraphLaunch") > 3
    gpu.cuda.check_clean()


@pytest.mark.usefixtures("stands_in")
def test_pytorch_verifies_for_a_drafter_on_the_gpu(
    planned: Callable[..., Path], trt_folder: Callable[[str], Path], on_gpu: OpenEngine
) -> None:
    """The rows that the drafter reads are copied to the GPU."""
    folder, checkpoint = planned("gemma4"), str(trt_folder("gemma4") / "gemma4")
    want = on_gpu(folder).generate(LONG_PROMPT, method="mtp-drafter", strict=True, **GREEDY)
    engine = on_gpu(folder, verify="torch", target=checkpoint)
    got = engine.generate(LONG_PROMPT, method="mtp-drafter", strict=True, **GREEDY)
    assert got.tokens == want.tokens and got.stats.verifier == "torch"
    assert got.stats.accepted_by_round == want.stats.accepted_by_round
    assert got.stats.providers["mtp_drafter"] == PROVIDER


def test_commands(planned: Callable[..., Path], gpu: Gpu, tmp_path: Path) -> None:
    """Running, measuring and tuning take the device."""
    folder = planned("gemma4")
    run = ["run", str(folder), "--device", RTX, "--prompt", "abcabcab", "--max-new-tokens", "8"]
    text = tmp_path / "text.txt"
    text.write_text("abcabcab", encoding="utf-8")
    bench = ["bench", str(folder), "--device", RTX, "--prompt-file", str(text)]
    for arguments in (
        [*run, "--json"],
        [*bench, "--method", "mtp-drafter", "-n", "6", "--rounds", "1", "--json"],
        ["tune", str(folder), "--device", RTX, "--json"],
    ):
        gpu.cuda.calls.clear()
        said = CliRunner().invoke(main, arguments)
        assert said.exit_code == 0, said.output
        assert RTX in said.stdout or PROVIDER in said.stdout
        assert gpu.cuda.calls.count("cudaStreamSynchronize") > 8
        gpu.cuda.check_clean()


def test_blocks_that_the_plans_do_not_take(
    planned: Callable[..., Path], on_gpu: OpenEngine
) -> None:
    for name in ("gemma4", "llama"):
        folder = planned(name, rows=ROWS, drafts=DRAFTS)
        with pytest.raises(UsageError, match=r"exact_width: .* at most 6 rows, got 8") as caught:
            on_gpu(folder, exact=True, exact_width=8)
        assert "give 6 or less" in str(caught.value.hint)
        on_gpu(folder, exact=True, exact_width=6, max_context=60)


@pytest.mark.parametrize("device", ["cpu", RTX])
@pytest.mark.parametrize("name", ["gemma4", "llama"])
def test_blocks_beyond_the_buffers(
    planned: Callable[..., Path], on_gpu: OpenEngine, name: str, device: str
) -> None:
    """The last block would end behind the last row of buffers that cannot grow."""
    folder = planned(name)
    message = f"exact_width: 10 blocks of 7 rows .* must be at most {CONTEXT}"
    with pytest.raises(UsageError, match=message) as caught:
        on_gpu(folder, device=device, exact=True, exact_width=7)
    assert "max_context 63 or less" in str(caught.value.hint)
    engine = on_gpu(folder, device=device, exact=True, exact_width=7, max_context=63)
    got = engine.generate(PROMPT, method="prompt-lookup", **GREEDY | {"max_new_tokens": 99})
    assert len(got.tokens) == 63 - len(PROMPT) and got.finish_reason == "length"


@pytest.mark.parametrize("method", METHODS)
def test_to_the_end_of_the_context(
    planned: Callable[..., Path], on_gpu: OpenEngine, method: Any
) -> None:
    engine = on_gpu(planned(METHODS[method], rows=ROWS, drafts=DRAFTS))
    options = GREEDY | {"max_new_tokens": 2 * CONTEXT, "strict": True}
    got = engine.generate(PROMPT, method=method, **options)
    assert got.finish_reason == "length"
    assert len(PROMPT) + len(got.tokens) == CONTEXT
    assert got.tokens == engine.generate(PROMPT, method="plain", **options).tokens
    with pytest.raises(ContextFull):
        engine.generate([1] * (CONTEXT + 1), method=method, **options)
    assert engine.generate(PROMPT, method=method, **GREEDY).tokens == got.tokens[:20]


class Fault:
    """Runs of the target's plans fail from number ``first`` on, counted from 0."""

    def __init__(self, patch: pytest.MonkeyPatch, gpu: Gpu, first: int) -> None:
        self.runs = 0
        files = {f"{name}.sm86.engine" for name in TARGET_ENGINES}
        real = TrtRun.run

        def run(self_: TrtRun) -> None:
            if self_.name not in files:
                return real(self_)
            self.runs += 1
            with patch.context() as failing:
                if self.runs > first:
                    failing.setitem(gpu.library.fails, "execute_async_v3", "planted")
                return real(self_)

        patch.setattr(TrtRun, "run", run)


@pytest.fixture
def stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has no GPU here; it computes on the CPU, with KV of its own."""
    monkeypatch.setattr(resources, "torch_device", lambda options: "cpu")


@pytest.mark.usefixtures("stands_in")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("first", [0, 2, 6])
def test_pytorch_stands_in(
    planned: Callable[..., Path],
    trt_folder: Callable[[str], Path],
    on_gpu: OpenEngine,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    method: Any,
    first: int,
) -> None:
    name = METHODS[method]
    folder = planned(name, rows=ROWS, drafts=DRAFTS)
    checkpoint = str(trt_folder(name) / FOLDERS[name].target)
    with on_gpu(folder) as other:
        want = other.generate(LONG_PROMPT, method=method, **GREEDY)
    engine = on_gpu(folder, target=checkpoint)
    warnings: list[str] = []
    Fault(monkeypatch, gpu, first)
    for _ in range(2):
        got = engine.generate(LONG_PROMPT, method=method, on_warning=warnings.append, **GREEDY)
        assert got.tokens == want.tokens
        assert got.stats.verifier == "torch" and got.stats.mode == want.stats.mode
        assert "planted" in str(got.stats.verifier_failure)
    assert len(warnings) == 1 and "a run failed: execute_async_v3: planted" in warnings[0]
    engine.check_integrity()
    engine.close()
    assert engine.options.device == RTX  # it is still there, and has nothing of the device
    gpu.cuda.check_clean()


def test_strict_refuses_pytorch(
    planned: Callable[..., Path],
    trt_folder: Callable[[str], Path],
    on_gpu: OpenEngine,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = on_gpu(planned("gemma4"), target=str(trt_folder("gemma4") / "gemma4"))
    with monkeypatch.context() as patch:
        Fault(patch, gpu, 2)
        stream = engine.stream(PROMPT, strict=True, **GREEDY)
        with pytest.raises(EngineError, match=r"the target's engine failed: .*planted"):
            list(stream)
    assert len(engine.generate(PROMPT, strict=True, **GREEDY).tokens) == 20  # the fault is gone


def test_without_pytorch_a_fault_is_an_error(
    planned: Callable[..., Path], on_gpu: OpenEngine, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_gpu(planned("gemma4"), verify="engine")
    with monkeypatch.context() as patch:
        Fault(patch, gpu, 2)
        with pytest.raises(EngineError, match=r"target\.sm86\.engine: a run failed: .*planted"):
            engine.generate(PROMPT, **GREEDY)
    engine.check_integrity()
    assert len(engine.generate(PROMPT, **GREEDY).tokens) == 20


def test_a_device_that_broke_is_an_error(
    planned: Callable[..., Path], on_gpu: OpenEngine, gpu: Gpu
) -> None:
    """Not a hang and not a wrong token; and it can be closed."""
    engine = on_gpu(planned("gemma4"), verify="engine")
    engine.generate(PROMPT, **GREEDY)
    gpu.cuda.broken = Error.cudaErrorIllegalAddress
    for _ in range(2):
        with pytest.raises(EngineError, match="cudaErrorIllegalAddress"):
            engine.generate(PROMPT, **GREEDY)
    engine.close()


def test_closing_frees_the_device(planned: Callable[..., Path], gpu: Gpu) -> None:
    engine = specrun.load(planned("llama"), device=RTX)
    for method in ("draft", "universal", "early-exit"):
        engine.generate(PROMPT, options=GenerateOptions(method=method, **GREEDY))
    session = engine.session()
    session.append(PROMPT)
    session.generate(**GREEDY)
    batch = engine.generate([PROMPT, LONG_PROMPT], **GREEDY)
    assert len(gpu.cuda.memory) > 20 and len(batch) == 2
    engine.close()
    gpu.cuda.check_clean()
    assert sorted(gpu.library.made) == sorted(gpu.library.freed)
