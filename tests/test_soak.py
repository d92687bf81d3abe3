"""scripts/soak.py on toys: short runs are right, and what is wrong is seen."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import Toy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import soak  # pyright: ignore[reportMissingImports]

ToyFolder = Callable[[Toy], Path]
TOY = Toy(history_weight=3, drafter=True, draft=Toy(history_weight=3))


def run(folder: Path, generations: int = 60, **options: Any) -> soak.Report:
    return soak.soak(folder, generations=generations, most=8, show=lambda _: None, **options)


@pytest.mark.parametrize("exact", [False, True])
def test_a_short_soak(toy_folder: ToyFolder, exact: bool) -> None:
    report = run(toy_folder(TOY), exact=exact)
    assert report.wrong == [] and report.right
    assert report.generations == 60 and report.probes == 1
    assert len(report.kinds) >= 9 and report.near_ties == 0
    assert {"length", "cancelled", "timeout", "error"} <= set(report.reasons)
    assert set(report.methods) == {"plain", "prompt-lookup", "mtp-drafter", "draft"}
    assert [memory.generation for memory in report.memory][-1] == 60
    again = run(toy_folder(TOY), exact=exact)
    assert (again.kinds, again.methods) == (report.kinds, report.methods)


def test_wrong_tokens_are_seen(toy_folder: ToyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a session whose KV is not cut when it is rewound, and of a probe."""
    folder = toy_folder(TOY)
    with monkeypatch.context() as patch:
        patch.setattr("specrun.loop.Progress.rewind", forgetful)
        report = run(folder)
    assert any("rewound: ValueError: other tokens" in what for what in report.wrong)
    assert not report.right
    probes = iter([{"plain": [1]}, {"plain": [2]}])
    monkeypatch.setattr(soak.Soak, "_probe", lambda self: next(probes))
    report = run(folder, generations=soak.PROBE_EVERY)
    at = soak.PROBE_EVERY
    says = f"generation {at}: probe: ValueError: plain gave other tokens than at first"
    assert report.wrong == [says]


def forgetful(self: Any, length: int) -> None:
    """As rewind, but that the KV keeps a row of the text before."""
    del self.committed[length:]
    self.target.truncate(min(self.target.length, max(0, len(self.committed) - 1)))
    if self.target.length > 1:
        key = next(iter(self.target.kv.arrays.values()))
        key[0, 0, 0, 0] = 7


def test_an_engine_that_stays_busy_is_seen(
    toy_folder: ToyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    def keep(self: Any) -> None:
        stream = self.engine.stream([1, 2], method="plain", eos_token_ids=())
        next(stream)
        kept.append(stream)

    monkeypatch.setattr(soak.Soak, "_closed", keep)
    report = run(toy_folder(TOY))
    assert any("busy with another generation" in what for what in report.wrong)
    for stream in kept:
        stream.close()


def test_memory_that_grows_is_seen() -> None:
    def report(*sizes: tuple[int, int, int]) -> soak.Report:
        return soak.Report(memory=[soak.Memory(*size) for size in sizes])

    warm = soak.WARM
    assert report((50, 100, 10), (warm, 1000, 100), (300, 1029, 109)).right
    assert not report((warm, 1000, 100), (300, 1031, 100)).right
    assert not report((warm, 1000, 100), (300, 1000, 111)).right
    assert report((50, 500, 50), (60, 1000, 100)).growth == 0
    assert report((warm, 1000, 0), (300, 1000, 0)).right
    now = soak.memory(1)
    held = b"x" * 50_000_000
    assert soak.memory(2).anonymous - now.anonymous > 40_000_000
    assert held


def test_the_command(
    toy_folder: ToyFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert soak.main([str(toy_folder(TOY)), "--generations", "12", "--tokens", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["generations", "tokens", "wrong", "RssAnon", "MB", "heap", "MB"]
    assert json.loads(lines[-1])["generations"] == 12
    monkeypatch.setattr(soak.Report, "right", False)
    assert soak.main([str(toy_folder(TOY)), "--generations", "1", "--tokens", "4"]) == 1
