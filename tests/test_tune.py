"""``specrun tune``: what it measures, the file it leaves, and when that file counts."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toys
from click.testing import CliRunner
from toys import Toy

from specexport import folder as folders
from specexport.errors import ExportError
from specrun import costs, learned_costs, manifest, tune, tuning
from specrun.cli_tune import tune as command
from specrun.errors import EngineError, FolderError, UsageError
from specrun.options import EngineOptions, GenerateOptions
from specrun.outcome import Outcome
from specrun.resolve import resolve_engine, resolve_generate
from specrun.schedule import Schedule
from specrun.schedules import Schedules
from specrun.tuning import TUNING, Entry, Machine, MethodCosts, Tuning

MACHINE = Machine(cpu="a cpu", threads=2, device="cpu", onnxruntime="1.32.0")
METHOD = MethodCosts(64, ((0, 0.0), (1, 0.1), (4, 0.4)), ((1, 1.0), (5, 2.0)), 0.01, 0.02)
ENTRY = Entry(MACHINE, {"target.onnx": "ab"}, {"prompt-lookup": (METHOD,)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return toys.write_folder(tmp_path / "engines", Toy(drafter=True, max_num_draft=6))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least number of rounds."""
    monkeypatch.setattr(tune, "CYCLES", tune.LEAST_CYCLES)


def run(folder: Path, max_context: int | None = None) -> Entry:
    options = EngineOptions(threads=1, max_context=max_context)
    entry, path = tune.tune(folder, options=options)
    assert tuning.read(path).entries == (entry,)
    return entry


# Measuring.


def test_every_method_every_length(folder: Path) -> None:
    entry = run(folder)
    assert entry.machine.threads == 1 and entry.machine.cpu
    assert entry.engines == {
        name: manifest.sha256_of(folder / name) for name in ("mtp_drafter.onnx", "target.onnx")
    }
    assert set(entry.methods) == {"mtp-drafter", "prompt-lookup"}
    drafted = {"mtp-drafter": (0, 1, 2, 3, 4, 5, 6), "prompt-lookup": tune.NUM_DRAFTS}
    for method, measured in entry.methods.items():
        assert [item.context_length for item in measured] == [64, 512]
        for item in measured:
            assert [rows - 1 for rows, _ in item.verify_seconds] == list(drafted[method])
            assert {count for count, _ in item.draft_seconds} <= set(drafted[method])
            assert {0, 1} <= {count for count, _ in item.draft_seconds}
            seconds = [value for _, value in item.verify_seconds]
            assert seconds == sorted(seconds) and seconds[0] > 0


def test_a_small_context(folder: Path) -> None:
    entry = run(folder, max_context=24)
    for measured in entry.methods.values():
        (item,) = measured
        assert item.context_length == 12
        assert 2 < max(rows for rows, _ in item.verify_seconds) <= 11


def test_a_context_in_which_nothing_can_be_drafted(folder: Path) -> None:
    with pytest.raises(UsageError, match="max_context: 3 tokens are too few") as caught:
        run(folder, max_context=3)
    assert caught.value.hint
    assert not (folder / TUNING).exists()


def test_a_drafter_that_cannot_run(folder: Path) -> None:
    (folder / "mtp_drafter.onnx").unlink()
    with pytest.raises(FolderError, match=r"mtp_drafter.onnx"):
        run(folder)


def test_a_failing_drafter_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, count: int, sampler: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("specrun.drafters.mtp.MtpDrafter.propose", broken)
    with pytest.raises(EngineError, match="the drafter failed: RuntimeError: broken"):
        run(folder)


def test_a_sweep_asks_for_all_in_turn() -> None:
    sweep = tune.Sweep((0, 1, 4))
    asked = []
    for _ in range(9):
        asked.append(sweep.num_draft)
        sweep.update(
            Outcome(
                asked=asked[-1],
                drafted=asked[-1],
                accepted=0,
                most=None,
                draft_seconds=1.0,
                verify_seconds=2.0,
            )
        )
    assert [sorted(asked[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 4]] * 3
    assert sweep.cycles == 3
    assert sweep.draft == {count: [1.0] * 2 for count in (0, 1, 4)}  # not the first ones


# The file.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / TUNING


def test_written_and_read_is_the_same(path: Path) -> None:
    tuning.write(path, ENTRY)
    assert tuning.read(path) == Tuning(1, (ENTRY,))
    assert [child.name for child in path.parent.iterdir()] == [TUNING]


def test_machines_are_kept_side_by_side(path: Path) -> None:
    other = replace(ENTRY, machine=replace(MACHINE, threads=4))
    newer = replace(ENTRY, engines={"target.onnx": "cd"})
    for entry in (ENTRY, other, newer):
        tuning.write(path, entry)
    assert tuning.read(path).entries == (other, newer)


@pytest.mark.parametrize(
    ("machine", "engines", "says"),
    [
        (replace(MACHINE, threads=4), {"target.onnx": "ab"}, "tuned with threads 2, here 4"),
        (replace(MACHINE, cpu="b"), {"target.onnx": "ab"}, "tuned with cpu 'a cpu', here 'b'"),
        (
            replace(MACHINE, onnxruntime="1.40", device="cuda"),
            {"target.onnx": "ab"},
            "tuned with device 'cpu', here 'cuda' and onnxruntime '1.32.0', here '1.40'",
        ),
        (MACHINE, {"target.onnx": "cd"}, "the engines are others than those that were tuned"),
        (MACHINE, {}, "the engines are others than those that were tuned"),
    ],
)
def test_what_was_measured_elsewhere_does_not_count(
    machine: Machine, engines: dict[str, str], says: str
) -> None:
    assert Tuning(1, (ENTRY,)).find(machine, engines) == says
    assert Tuning(1, (ENTRY,)).find(MACHINE, ENTRY.engines) is ENTRY
    assert Tuning(1, ()).find(machine, engines) == "nothing was tuned"


def test_costs_between_two_lengths() -> None:
    longer = replace(METHOD, context_length=128, verify_seconds=((1, 2.0), (5, 4.0)))
    entry = replace(ENTRY, methods={"prompt-lookup": (METHOD, longer)})

    def steps(length: int) -> tuple[float, float]:
        found = entry.costs("prompt-lookup", length)
        assert found is not None
        return found.verify(1), found.verify(5)

    assert steps(1) == steps(64) == (1.0, 2.0)
    assert steps(96) == (1.5, 3.0)
    assert steps(128) == steps(9999) == (2.0, 4.0)
    assert entry.costs("mtp", 64) is None


Edit = Callable[[dict[str, object]], object]


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("{", "not JSON", "again"),
        ("[]", "format: must be 1, got None", "delete"),
        ('{"format": 2, "entries": []}', "format: must be 1, got 2", "upgrade specrun"),
        ('{"format": 1, "entries": [{}]}', r"entries\[0\]: field 'machine' is missing", "delete"),
        ('{"format": 1, "entries": [], "x": 1}', "got 'x'", "delete"),
    ],
)
def test_a_file_that_is_not_right(path: Path, text: str, says: str, hint: str) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FolderError, match=says) as caught:
        tuning.read(path)
    assert hint in str(caught.value.hint)
    with pytest.raises(FolderError, match=says):
        tuning.write(path, ENTRY)
    assert path.read_text(encoding="utf-8") == text


def test_times_that_no_clock_measured(path: Path) -> None:
    tuning.write(path, ENTRY)
    data = json.loads(path.read_text(encoding="utf-8"))
    data["entries"][0]["methods"]["prompt-lookup"][0]["verify_seconds"][0][1] = -1.0
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FolderError, match=r"seconds must be 0 or more, got -1.0"):
        tuning.read(path)


def test_no_file(path: Path) -> None:
    with pytest.raises(FolderError, match=r"tuning.json: No such file") as caught:
        tuning.read(path)
    assert caught.value.hint == "run specrun tune first"


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests may run as root, whom permissions do not stop."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkstemp", refuse)
        yield


def test_a_folder_that_is_read_only(path: Path, read_only: None) -> None:
    with pytest.raises(FolderError, match="cannot be written: Read-only file system") as caught:
        tuning.write(path, ENTRY)
    assert "--out FILE" in str(caught.value.hint)


def test_a_write_that_fails_leaves_what_was_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning.write(path, ENTRY)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FolderError, match="No space left"):
        tuning.write(path, replace(ENTRY, machine=replace(MACHINE, threads=9)))
    assert tuning.read(path).entries == (ENTRY,)
    assert [child.name for child in path.parent.iterdir()] == [TUNING]


# The folder around it.


def test_the_folder_stays_an_engine_folder(folder: Path, tmp_path: Path) -> None:
    tuning.write(folder / TUNING, ENTRY)
    manifest.read(folder, integrity="full")
    folders.check_target(folder)  # may be replaced by another export
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ExportError, match=r"holds notes.txt"):
        folders.check_target(folder)


def test_a_new_export_is_not_tuned(folder: Path) -> None:
    tuning.write(folder / TUNING, ENTRY)
    with folders.atomic(folder) as new:
        toys.write_folder(new, Toy())
    assert not (folder / TUNING).exists()


# The command.


def test_the_command(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(folder), "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "mtp-drafter, 512 tokens of context" in result.stdout
    assert "drafts  draft ms  verify ms  pays from tokens per round" in result.stdout
    assert f"wrote {folder / TUNING}" in result.stderr

    other = tmp_path / "elsewhere.json"
    given = [str(folder), "--threads", "1", "--out", str(other), "--json", "-q"]
    result = CliRunner().invoke(command, given)
    assert result.exit_code == 0 and result.stderr == ""
    assert json.loads(result.stdout)["machine"]["threads"] == 1
    assert tuning.read(other).entries[0].machine.threads == 1


def test_the_command_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(folder), "--threads", "0"])
    assert result.exit_code == 2 and "Error: --threads: must be" in result.stderr
    result = CliRunner().invoke(command, [str(tmp_path / "nowhere")])
    assert result.exit_code == 1 and "no such folder" in result.stderr
    out = tmp_path / "missing" / "tuning.json"
    result = CliRunner().invoke(command, [str(folder), "--threads", "1", "--out", str(out)])
    assert result.exit_code == 1 and "cannot be written: No such file" in result.stderr
    assert "hint: give --out FILE" in result.stderr


def test_what_is_read_without_engines_needs_the_standard_library_only() -> None:
    for module in (costs, learned_costs, tuning):
        assert module.__file__ is not None
        source = Path(module.__file__).read_text(encoding="utf-8")
        assert not any(f"import {name}" in source for name in ("numpy", "onnxruntime"))


# What an engine makes of it.


def schedules(folder: Path, file: Path | None = None) -> Schedules:
    read = manifest.read(folder)
    return Schedules(folder, read, resolve_engine(EngineOptions(threads=1), read), file)


def asked(made: Schedule, rounds: int) -> list[int]:
    """What a schedule asks for on a text where every other proposal is right."""
    numbers = []
    for index in range(rounds):
        numbers.append(made.num_draft)
        right = made.num_draft * (index % 2)
        made.update(
            Outcome(
                asked=made.num_draft,
                drafted=made.num_draft,
                accepted=right,
                most=6,
                draft_seconds=0.001 * random.random(),
                verify_seconds=0.01,
            )
        )
    return numbers


def auto(folder: Path, **given: Any) -> GenerateOptions:
    options = GenerateOptions(num_assistant_tokens_schedule="auto", **given)
    return resolve_generate(options, manifest.read(folder))


def test_tuned_costs_make_auto_repeatable(folder: Path) -> None:
    run(folder)
    made = schedules(folder)
    assert made.not_tuned is None
    first, second = (asked(made.make(auto(folder), context_length=100), 40) for _ in range(2))
    assert first == second
    assert asked(schedules(folder).make(auto(folder), context_length=100), 40) == first


def test_a_tuning_file_elsewhere(folder: Path, tmp_path: Path) -> None:
    entry = run(folder)
    (folder / TUNING).rename(tmp_path / "other.json")
    assert "is not there: run specrun tune" in str(schedules(folder).not_tuned)
    assert schedules(folder, tmp_path / "other.json").not_tuned is None
    missing = schedules(folder, tmp_path / "missing.json")
    with pytest.raises(FolderError, match=r"missing.json: No such file"):
        missing.make(auto(folder), context_length=1)
    tuning.write(folder / TUNING, replace(entry, engines={}))
    assert "the engines are others than" in str(schedules(folder).not_tuned)


def test_without_a_tuning_file_costs_are_learned_once(folder: Path) -> None:
    made = schedules(folder)
    first = made.make(auto(folder, num_assistant_tokens=4), context_length=1)
    assert asked(first, 9)[:2] == [4, 0]
    second = made.make(auto(folder, num_assistant_tokens=4), context_length=1)
    assert asked(second, 2)[1] != 0  # the plain step is known
    own = made.make(auto(folder, num_assistant_tokens=4), context_length=1, custom=True)
    assert asked(own, 2) == [4, 0]


def test_the_heuristic_goes_on_by_method_and_start(folder: Path) -> None:
    def options(name: str, start: int, method: str = "mtp-drafter") -> GenerateOptions:
        given: Any = {"num_assistant_tokens_schedule": name, "method": method}
        read = manifest.read(folder)
        return resolve_generate(GenerateOptions(num_assistant_tokens=start, **given), read)

    made = schedules(folder)

    def next_of(name: str, start: int, **given: Any) -> int:
        custom = given.pop("custom", False)
        schedule = made.make(options(name, start, **given), context_length=1, custom=custom)
        number = schedule.num_draft
        schedule.update(
            Outcome(
                asked=number,
                drafted=number,
                accepted=number,
                most=None,
                draft_seconds=0.0,
                verify_seconds=1.0,
            )
        )
        return number

    assert [next_of("heuristic", 3) for _ in range(3)] == [3, 5, 6]  # 6: the drafter's most
    assert next_of("heuristic", 4) == 4
    assert next_of("heuristic", 3, method="prompt-lookup") == 3
    assert next_of("heuristic", 3, custom=True) == 3
    assert next_of("heuristic", 3) == 6
    assert [next_of("heuristic_transient", 3) for _ in range(2)] == [3, 3]
    assert [next_of("constant", 3) for _ in range(2)] == [3, 3]
