"""PyTorch in place of the target's engine: the same tokens, from the start or from any run on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import exported
import small_vocabulary
import tiny_models
import torch
import toys
from click.testing import CliRunner
from exported import Exported
from small_vocabulary import FOLDERS, METHODS, PROMPT

import specrun
from specexport import exporter, hub, verification
from specexport.errors import ExportError, SourceError
from specexport.options import ExportOptions
from specexport.sources import resolve
from specexport.torch_target import TorchTarget
from specrun import manifest as manifests
from specrun import torch_verifier
from specrun.cli import main
from specrun.contract import MTP_DRAFTER_ENGINE, TARGET_ENGINES
from specrun.errors import DeviceError, EngineError, UsageError
from specrun.guarded_target import GuardedTarget
from specrun.ort import PreparedRun
from specrun.tune import measure, tune
from specrun.tuning import write

NEW = 20
LONG_PROMPT = PROMPT * 3
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": (), "do_sample": False}
SAMPLED: dict[str, Any] = {
    "max_new_tokens": NEW,
    "eos_token_ids": (),
    "temperature": 0.9,
    "top_k": 7,
    "seed": 5,
}

OpenEngine = Callable[..., specrun.Engine]


@pytest.fixture
def folder(small_folder: Callable[[str], Path]) -> Callable[[str], Path]:
    """``folder(name)``: the engines of one of FOLDERS, beside their checkpoints."""
    return lambda name: small_folder(name) / small_vocabulary.ENGINES


class Fault:
    """The target's engines fail from their run number ``first`` on, counted from 0."""

    def __init__(self, patch: pytest.MonkeyPatch, first: int, kind: str = "raise") -> None:
        self.runs = 0
        files = {f"{name}.onnx" for name in TARGET_ENGINES}
        real = PreparedRun.run

        def run(prepared: PreparedRun) -> None:
            if prepared.name in files:
                self.runs += 1
                if self.runs > first:
                    if kind == "raise":
                        raise EngineError(f"{prepared.name}: a run failed: planted")
                    real(prepared)
                    for array in prepared.outputs.values():
                        if array.dtype.kind == "f":
                            array[...] = np.nan if kind == "nan" else np.inf
                    return
            real(prepared)

        patch.setattr(PreparedRun, "run", run)


# Tokens.


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_tokens(open_small: OpenEngine, method: Any, sampled: bool) -> None:
    options = SAMPLED if sampled else GREEDY
    name = METHODS[method]
    by_engine = open_small(name).generate(LONG_PROMPT, method=method, strict=True, **options)
    by_torch = open_small(name, verify="torch", prefill_chunk=7).generate(
        LONG_PROMPT, method=method, strict=True, **options
    )
    assert by_torch.tokens == by_engine.tokens
    stats, want = by_torch.stats, by_engine.stats
    assert (stats.verifier, want.verifier) == ("torch", "engine")
    assert (stats.torch_steps, want.torch_steps) == (stats.target_steps, 0)
    assert (stats.drafted, stats.accepted) == (want.drafted, want.accepted)
    assert stats.provider == "PyTorch (cpu)" and stats.verifier_failure is None


@pytest.mark.parametrize("pair", exported.pair_params())
def test_every_family(exported_pair: Callable[..., Exported], pair: exported.Pair) -> None:
    made = exported_pair(pair)
    prompt = exported.prompt_of(3 * tiny_models.WINDOW)
    options: dict[str, Any] = {"max_new_tokens": 16, "eos_token_ids": (), "strict": True}
    with made.open() as engine, made.open(verify="torch", prefill_chunk=5) as other:
        for method in ("plain", *made.drafting_methods):
            want = engine.generate(prompt, method=method, **options)
            got = other.generate(prompt, method=method, **options)
            assert got.tokens == want.tokens, method
            assert got.stats.accepted == want.stats.accepted, method


def test_sessions_rewind(open_small: OpenEngine) -> None:
    """KV in PyTorch is kept and cut like that of engines."""
    with open_small("gemma4", verify="torch") as engine:
        session = engine.session()
        session.append(PROMPT)
        first = session.generate(**GREEDY).tokens
        for length in (len(PROMPT) + 5, len(PROMPT), 1):
            session.rewind(length)
            session.append([3, 1])
            got = session.generate(**GREEDY).tokens
            cold = engine.generate(
                [*[*PROMPT, *first][:length], 3, 1], method="plain", **GREEDY
            ).tokens
            assert got == cold
            session.check_integrity()


def test_exact(open_small: OpenEngine) -> None:
    """Blocks of a fixed width over PyTorch: drafting changes no bit of the logits."""
    with open_small("gemma4", verify="torch", exact=True, exact_width=4) as engine:
        plain = engine.generate(LONG_PROMPT, method="plain", logprobs=3, **GREEDY)
        drafted = engine.generate(LONG_PROMPT, method="mtp-drafter", logprobs=3, **GREEDY)
        assert drafted.tokens == plain.tokens
        assert drafted.logprobs == plain.logprobs
        assert drafted.stats.accepted > 0


def test_logits_and_kv(open_small: OpenEngine) -> None:
    """Both targets say the same and leave the same rows in the KV that a drafter reads."""
    tokens = np.array([LONG_PROMPT])
    by_engine, by_torch = (open_small("gemma4", verify=name) for name in ("engine", "torch"))
    answers = []
    for engine in (by_engine, by_torch):
        engine.target.prefill(tokens[:, :10])
        answers.append(engine.target.verify(tokens[:, 10:], want_logits=True))
    for got, want in zip(*reversed(answers), strict=True):
        assert np.asarray(got).shape == np.asarray(want).shape
        np.testing.assert_allclose(got, want, atol=1e-5)
    shared = by_torch.target.kv.arrays
    assert shared.keys() == {
        name
        for name in by_engine.target.kv.arrays
        if name in {spec.name for spec in by_torch.manifest.engines[MTP_DRAFTER_ENGINE].inputs}
    }
    for name, array in shared.items():
        length = tokens.shape[1]
        want_rows = by_engine.target.kv.arrays[name][:, :, :length]
        np.testing.assert_allclose(array[:, :, :length], want_rows, atol=1e-5)


def test_the_kv_is_shared_without_a_copy(open_small: OpenEngine) -> None:
    engine = open_small("gemma4", verify="torch")
    engine.generate(LONG_PROMPT, **GREEDY)
    target: Any = engine.target
    assert isinstance(target, TorchTarget)
    for name, array in target.kv.arrays.items():
        assert target._rows._tensors[name].data_ptr() == array.ctypes.data


# Standing in.


FAULTS = [(method, first, "raise") for method in METHODS for first in (0, 1, 5)] + [
    ("mtp", 0, "nan"),
    ("mtp", 2, "nan"),
    ("mtp-drafter", 5, "nan"),
    ("early-exit", 1, "nan"),
    ("early-exit", 12, "nan"),
    *(("early-exit", first, "raise") for first in range(9, 17)),  # in a proposal, at each draft
    ("draft", 0, "inf"),
]


@pytest.mark.parametrize(("method", "first", "kind"), FAULTS)
def test_it_stands_in_from_any_run_on(
    open_small: OpenEngine, monkeypatch: pytest.MonkeyPatch, method: Any, first: int, kind: str
) -> None:
    """The prompt takes four runs, of early exit more: the first faults are in the middle of it."""
    name = METHODS[method]
    want = open_small(name).generate(LONG_PROMPT, method=method, **GREEDY)
    engine = open_small(name, prefill_chunk=7)
    warnings: list[str] = []
    pieces: list[str] = []
    with monkeypatch.context() as patch:
        Fault(patch, first, kind)
        stream = engine.stream(LONG_PROMPT, method=method, on_warning=warnings.append, **GREEDY)
        pieces += stream
        again = engine.generate(LONG_PROMPT, method=method, on_warning=warnings.append, **GREEDY)
    got = stream.result
    assert got.tokens == want.tokens == again.tokens
    assert "".join(pieces) == want.text
    assert len(warnings) == 1 and "the target's engine failed" in warnings[0]
    assert got.stats.verifier == again.stats.verifier == "torch"
    assert again.stats.torch_steps == again.stats.target_steps
    assert 0 < got.stats.torch_steps <= got.stats.target_steps
    assert (got.stats.mode, got.stats.accepted) == (want.stats.mode, want.stats.accepted)
    assert got.stats.verifier_failure is not None
    engine.check_integrity()


def test_sampling_goes_on_with_the_same_numbers(
    open_small: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = open_small("llama").generate(PROMPT, method="draft", **SAMPLED)
    Fault(monkeypatch, 4)
    got = open_small("llama").generate(
        PROMPT, method="draft", on_warning=lambda message: None, **SAMPLED
    )
    assert got.tokens == want.tokens
    assert got.stats.verifier == "torch"


def test_a_batch_goes_on(open_small: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [PROMPT, PROMPT[:3], LONG_PROMPT]
    want = [open_small("gemma4").generate(p, **GREEDY).tokens for p in prompts]
    Fault(monkeypatch, 7)
    warnings: list[str] = []
    got = open_small("gemma4").generate(prompts, on_warning=warnings.append, **GREEDY)
    assert [result.tokens for result in got] == want
    assert len(warnings) == 1
    assert all(result.stats.verifier == "torch" for result in got)


def test_a_session_goes_on(open_small: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn fails behind KV of the first, which PyTorch reads again."""
    want = open_small("mtp").session()
    session = open_small("mtp").session()
    for one in (want, session):
        one.append(PROMPT)
        one.generate(**GREEDY)
        one.append([1, 2])
    wanted = want.generate(**GREEDY)
    Fault(monkeypatch, 2)
    got = session.generate(on_warning=lambda message: None, **GREEDY)
    assert got.tokens == wanted.tokens
    assert got.stats.verifier == "torch"
    session.check_integrity()


def test_an_engine_that_does_not_load(folder: Callable[[str], Path], tmp_path: Path) -> None:
    copy = broken_copy(folder("gemma4"), tmp_path)
    want = specrun.load(folder("gemma4")).generate(PROMPT, **GREEDY)
    warnings: list[str] = []
    with specrun.load(copy, target=str(folder("gemma4").parent / "gemma4")) as engine:
        got = engine.generate(PROMPT, on_warning=warnings.append, **GREEDY)
        assert got.tokens == want.tokens
        assert (got.stats.method, got.stats.mode) == ("mtp-drafter", "speculative")
        assert len(warnings) == 1 and "does not load" in warnings[0]
        with pytest.raises(EngineError, match="does not load") as caught:
            engine.generate(PROMPT, strict=True, **GREEDY)
        assert caught.value.hint == "without strict, PyTorch verifies in its place"
    with pytest.raises(EngineError, match="does not load"):
        specrun.load(copy, verify="engine")


def broken_copy(source: Path, tmp_path: Path) -> Path:
    """The folder with a target that is no ONNX, as a device would get it from a bad writer: the
    manifest agrees with the file."""
    copy = tmp_path / "engines"
    shutil.copytree(source, copy)
    target = copy / "target.onnx"
    target.write_bytes(bytes(target.stat().st_size))
    toys.agree(copy)
    return copy


# Refused.


def test_strict_refuses_it(open_small: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_small("gemma4")
    want = engine.generate(PROMPT, **GREEDY)
    with monkeypatch.context() as patch:
        Fault(patch, 3)
        with pytest.raises(EngineError, match=r"the target's engine failed: .*planted") as caught:
            engine.generate(PROMPT, strict=True, **GREEDY)
    assert caught.value.hint == "without strict, PyTorch verifies in its place"
    engine.check_integrity()
    again = engine.generate(PROMPT, strict=True, **GREEDY)
    assert (again.tokens, again.stats.verifier) == (want.tokens, "engine")


@pytest.mark.parametrize("options", [{"verify": "engine"}, {"exact": True}])
def test_nobody_stands_in(
    open_small: OpenEngine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """In exact mode the rest of the text would have other bits."""
    engine = open_small("gemma4", **options)
    Fault(monkeypatch, 3)
    with pytest.raises(EngineError, match="planted"):
        engine.generate(PROMPT, **GREEDY)


def test_drafters_of_the_caller_raise_their_own(open_small: OpenEngine) -> None:
    """An error of a drafter, passed on while the prompt is read, is none of the target's."""

    class Refusing:
        max_drafts = 4
        needs_prompt_rows = True

        def __getattr__(self, name: str) -> Any:
            def verb(*arguments: Any) -> Any:
                if name == "observe":
                    raise RuntimeError("not today")
                return []

            return verb

    engine = open_small("mtp")
    with pytest.raises(EngineError, match="the drafter failed: RuntimeError: not today"):
        engine.generate(PROMPT, drafter=Refusing(), strict=True, **GREEDY)
    target: Any = engine.target
    assert isinstance(target, GuardedTarget) and target.failure is None


def test_both_fail(
    open_small: OpenEngine, monkeypatch: pytest.MonkeyPatch, folder: Callable[[str], Path]
) -> None:
    """One error names both; the engine that works again is used again."""
    engine = open_small("gemma4")
    want = engine.generate(PROMPT, **GREEDY).tokens
    with monkeypatch.context() as patch:
        Fault(patch, 2)
        patch.setattr(verification, "find", unreachable)
        with pytest.raises(EngineError, match=r"planted; and PyTorch cannot .*: no such luck"):
            engine.generate(PROMPT, **GREEDY)
    engine.check_integrity()
    assert engine.generate(PROMPT, **GREEDY).tokens == want


@pytest.mark.parametrize("name", ["gemma4", "mtp"])
def test_both_fail_later(
    open_small: OpenEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """PyTorch loads and cannot read: the engine is asked again the next time."""
    session = open_small(name).session()
    session.append(PROMPT)
    want = open_small(name).generate(PROMPT, **GREEDY).tokens
    with monkeypatch.context() as patch:
        Fault(patch, 2)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
        stream = session.stream(**GREEDY)
        with pytest.raises(EngineError, match=r"planted; and then PyTorch: a run failed: .*full"):
            stream.drain()
        got = stream.partial.tokens
        assert got == want[: len(got)] != []
    session.check_integrity()
    again = session.generate(**GREEDY | {"max_new_tokens": NEW - len(got)})
    assert (got + again.tokens, again.stats.verifier) == (want, "engine")


@pytest.mark.parametrize("name", ["gemma4", "mtp"])
def test_cancelled_while_pytorch_reads(
    open_small: OpenEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rows that PyTorch has written are never taken for the engine's."""
    want = open_small(name).generate(LONG_PROMPT, **GREEDY).tokens
    session = open_small(name, prefill_chunk=7).session()
    session.append(LONG_PROMPT)
    token = specrun.CancelToken()
    step = TorchTarget._step

    def cancelling(*arguments: Any) -> Any:
        token.cancel()
        return step(*arguments)

    with monkeypatch.context() as patch:
        Fault(patch, 0)
        patch.setattr(TorchTarget, "_step", cancelling)
        ended = session.generate(cancel=token, **GREEDY)
    assert (ended.finish_reason, ended.tokens) == ("cancelled", [])
    session.check_integrity()
    assert session.generate(on_warning=lambda message: None, **GREEDY).tokens == want


def unreachable(*arguments: Any) -> Any:
    raise SourceError("no such luck")


def test_pytorch_fails_too(open_small: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_small("llama", verify="torch")
    want = engine.generate(PROMPT, **GREEDY).tokens
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
        with pytest.raises(EngineError, match="PyTorch: a run failed: RuntimeError: full"):
            engine.generate(PROMPT, **GREEDY)
    assert engine.generate(PROMPT, **GREEDY).tokens == want


def fails(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("full")


def test_packages_that_are_missing(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_verifier, "NEEDED", ("torch", "no_such_package"))
    with pytest.raises(EngineError, match="PyTorch needs no_such_package, not installed") as caught:
        specrun.load(folder("llama"), verify="torch")
    assert caught.value.hint is not None and "pip install" in caught.value.hint


def test_options_that_exclude_each_other(folder: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="target: PyTorch does not verify with verify engine"):
        specrun.load(folder("llama"), verify="engine", target="x")


# Folders with drafters only.


@pytest.fixture
def skipped(once: Callable[..., Path]) -> Callable[[str], Path]:
    """``skipped(name)``: the drafters of one of FOLDERS without its target, compared."""

    def make(name: str) -> Path:
        def export(path: Path) -> None:
            pair = FOLDERS[name]
            names = (pair.target, *pair.drafters)
            target, *drafters = (resolve(small_vocabulary.save(n, path)) for n in names)
            options = ExportOptions(num_draft=small_vocabulary.NUM_DRAFT, skip_target=True)
            exporter.export(target, drafters, path / small_vocabulary.ENGINES, options)

        return once(f"drafters-only-{name}", export) / small_vocabulary.ENGINES

    return make


@pytest.mark.parametrize("method", ["plain", "draft", "universal", "mtp", "mtp-drafter"])
def test_drafters_only(open_small: OpenEngine, skipped: Callable[[str], Path], method: Any) -> None:
    name = METHODS[method]
    want = open_small(name).generate(LONG_PROMPT, method=method, **GREEDY)
    with specrun.load(skipped(name)) as engine:
        got = engine.generate(LONG_PROMPT, method=method, strict=True, **GREEDY)
    assert got.tokens == want.tokens
    assert got.stats.accepted == want.stats.accepted
    assert (got.stats.verifier, got.stats.verifier_failure) == ("torch", None)


def test_what_such_a_folder_holds(skipped: Callable[[str], Path]) -> None:
    made = manifests.read(skipped("gemma4"), integrity="full")
    spec = made.engines["target"]
    assert (spec.backend, spec.file, spec.precision) == ("torch", "", "fp32")
    assert made.target_sha256 == made.target.fingerprint
    assert {path.suffix for path in skipped("gemma4").iterdir()} == {
        ".onnx",
        ".data",
        ".json",
        ".md",
    }
    assert [path.name for path in skipped("gemma4").glob("*.onnx")] == ["mtp_drafter.onnx"]
    assert made.parity is not None and made.parity.worst_error < 1e-5
    worst = exporter.check_itself(skipped("gemma4"))
    assert worst is not None and worst < 1e-5
    with pytest.raises(UsageError, match="verify: the folder has no engine of the target"):
        specrun.load(skipped("gemma4"), verify="engine")


def test_such_a_folder_is_tuned_too(skipped: Callable[[str], Path], tmp_path: Path) -> None:
    """What PyTorch's steps cost, bound to the checkpoint instead of an engine."""
    file = tmp_path / "tuning.json"
    with specrun.load(skipped("gemma4"), threads=1) as engine:
        entry = measure(engine._resources, seconds=0.05)
        write(file, entry)
    assert entry.engines["PyTorch"] == manifests.read(skipped("gemma4")).target.fingerprint
    with specrun.load(skipped("gemma4"), threads=1, tuning=str(file)) as engine:
        assert engine.not_tuned is None
        assert engine.generate(PROMPT, num_assistant_tokens_schedule="auto", **GREEDY).tokens
        assert engine.generate(PROMPT, **GREEDY).stats.providers["target"] == "PyTorch (cpu)"


def test_costs_of_engines_are_not_those_of_pytorch(open_small: OpenEngine) -> None:
    assert open_small("gemma4", verify="torch").not_tuned == (
        "PyTorch verifies, and specrun tune measures the engines"
    )


@pytest.mark.parametrize("device", ["cuda", "cpu:1", "gpu3"])
def test_a_device_that_pytorch_has_not(folder: Callable[[str], Path], device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(DeviceError, match=f"device: '{device}' is not available, this PyTorch"):
        specrun.load(folder("gemma4"), verify="torch", device=device)


def test_measuring_asks_for_the_engines(folder: Callable[[str], Path], tmp_path: Path) -> None:
    copy = broken_copy(folder("gemma4"), tmp_path)
    with pytest.raises(EngineError, match=r"target\.onnx: does not load"):
        tune(copy, out=tmp_path / "tuning.json")
    result = CliRunner().invoke(main, ["bench", str(copy), "--rounds", "1"])
    assert result.exit_code == 1
    assert "target.onnx: does not load" in result.stderr and "strict" not in result.stderr


def test_checking_what_is_no_engine(folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"target\.onnx: no ONNX graph"):
        exporter.check_itself(broken_copy(folder("gemma4"), tmp_path))


@pytest.mark.parametrize("name", ["/etc/passwd", "../llama", "..", "", "a/../../llama"])
def test_the_manifest_leads_nowhere_else(folder: Callable[[str], Path], name: str) -> None:
    made = manifests.read(folder("llama"))
    elsewhere = replace(made, target=replace(made.target, id=name))
    with pytest.raises(SourceError, match="is not beside the engine folder"):
        verification.find(elsewhere, folder("llama") / "x" / "y", None)


def test_skipping_what_cannot_be_skipped(folder: Callable[[str], Path], tmp_path: Path) -> None:
    source = resolve(folder("llama").parent / "llama")
    with pytest.raises(UsageError, match="skip: without the target there is nothing to export"):
        exporter.export(source, None, tmp_path / "e", ExportOptions(skip_target=True))
    with pytest.raises(UsageError, match="early_exit: drafts with the target's own layers"):
        ExportOptions(skip_target=True, early_exit=1)
    with pytest.raises(UsageError, match="precision: auto measures the target, which is skipped"):
        ExportOptions(skip_target=True, precision="auto")
    assert not (tmp_path / "e").exists()


# Finding the checkpoint.


def test_beside_the_folder_and_in_the_working_directory(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = folder("llama").parent / "llama"
    copy = tmp_path / "a" / "engines"
    shutil.copytree(folder("llama"), copy)
    with pytest.raises(EngineError, match="llama: the checkpoint of the target is not") as caught:
        specrun.load(copy, verify="torch")
    assert caught.value.hint is not None and "--target" in caught.value.hint
    (tmp_path / "llama").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    assert specrun.load(copy, verify="torch").generate(PROMPT, **GREEDY).tokens


def test_another_checkpoint_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The same shapes with other weights, as a fine-tuned sibling has."""
    model = resolve(folder("llama").parent / "llama").load_reference()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    other = tmp_path / "other"
    shutil.copytree(folder("llama").parent / "llama", other)
    model.save_pretrained(other)
    with pytest.raises(EngineError, match="other: has other weights than the checkpoint"):
        specrun.load(folder("llama"), verify="torch", target=str(other))


def test_the_bundled_pair_is_found(folder: Callable[[str], Path]) -> None:
    made = manifests.read(folder("gemma4"))
    bundled = replace(made, target=replace(made.target, id="gemma4-tiny/target"))
    assert verification.find(bundled, folder("gemma4"), None).id == "gemma4-tiny/target"


def test_hub_models_come_from_the_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **request: Any) -> str:
        asked.update(request, repo=repo)
        raise FileNotFoundError("nothing there")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(SourceError, match="a/b at main: not in the cache") as caught:
        hub.download("a/b", "main", local_only=True)
    assert asked["local_files_only"] and asked["repo"] == "a/b"
    assert caught.value.hint == "download it first, for example with `hf download`"
