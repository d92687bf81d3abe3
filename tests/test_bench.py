"""``specrun bench``: who takes part, what is compared, what is shown and kept. Never a time."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from toys import Toy

import specrun
from specrun import bandwidth, bench, bench_report, bench_table, bench_workloads, cli_bench
from specrun.bench import Benchmark, BenchOptions, BenchReport
from specrun.bench_report import PLAIN, Contestant, Steps
from specrun.bench_workloads import WORKLOADS
from specrun.cli import main
from specrun.errors import ContextFull, EngineError, UsageError
from specrun.options import GenerateOptions

OpenToy = Callable[..., specrun.Engine]
OWN = (("own", "12"),)
PAIR = Toy(drafter=True, max_num_draft=5, eos=(9,))
LABELS = ["plain", "mtp-drafter 3", "mtp-drafter 5"]
LABELS += ["prompt-lookup 4", "prompt-lookup 8", "prompt-lookup 16"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine as little as possible."""
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(bandwidth, "LEAST", 1 << 16)
    monkeypatch.setattr(bandwidth, "CPUS", Path("/nowhere"))


def measure(engine: specrun.Engine, **given: Any) -> BenchReport:
    options: dict[str, Any] = {"prompts": OWN, "max_new_tokens": 12, "rounds": 2} | given
    return bench.run(engine, BenchOptions(**options))


def call(folder: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", str(folder), *map(str, arguments)])


@pytest.fixture
def folder(toy_folder: Callable[[Toy], Path]) -> Path:
    return toy_folder(PAIR)


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, ...]:
    """Arguments for a short run on a prompt of one's own."""
    (tmp_path / "own.txt").write_text("12", encoding="utf-8")
    return ("--prompt-file", str(tmp_path / "own.txt"), "-n", "12", "--rounds", "2")


@pytest.fixture
def biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt lookup writes something else from its fourth token on."""
    make = Benchmark._generate_options

    def other(self: Benchmark, contestant: Contestant) -> GenerateOptions:
        options = make(self, contestant)
        if contestant.method != "prompt-lookup":
            return options
        return dataclasses.replace(options, logit_bias={6: -100.0})

    monkeypatch.setattr(Benchmark, "_generate_options", other)


# What is measured.


def test_every_method_on_every_workload(open_toy: OpenToy) -> None:
    report = measure(open_toy(PAIR), prompts=(("a", "12"), ("b", "456")))
    assert report.complete and report.notes == ()
    assert [contestant.label for contestant in report.contestants] == LABELS
    assert [(work.name, work.prompt_tokens) for work in report.workloads] == [("a", 2), ("b", 3)]
    for work in report.workloads:
        assert [item.contestant.label for item in work.results] == LABELS
        for item in work.results:
            assert len(item.runs) == 2 and not item.differs
            for run in (item.check, *item.runs):
                assert run.emitted == run.same_tokens == 12  # end ids do not end it
                assert run.accepted <= run.drafted
                assert set(run.seconds) == {"prefill", "draft", "verify", "other"}
                assert run.first_token_seconds > 0
            assert (item.medians is not None) and item.medians.tokens_per_second > 0
        assert work.ratio(work.results[0]) == 1
    assert set(report.overall) == set(LABELS[1:])
    assert list(report.overall.values()) == sorted(report.overall.values(), reverse=True)


def test_counts_are_those_of_a_generation(open_toy: OpenToy) -> None:
    engine = open_toy(PAIR)
    (work,) = measure(engine, methods=("mtp-drafter",), num_assistant_tokens=(4,)).workloads
    plain, drafted = work.results
    stats = engine.generate(
        "12", method="mtp-drafter", num_assistant_tokens=4, max_new_tokens=12, eos_token_ids=()
    ).stats
    for run in (drafted.check, *drafted.runs):
        assert (run.drafted, run.accepted, run.rounds) == (
            stats.drafted,
            stats.accepted,
            stats.rounds,
        )
        assert run.tokens_per_target_step == stats.tokens_per_target_step
        assert run.acceptance == stats.acceptance == 1
        assert run.draft_seconds is not None and run.verify_seconds is not None
    assert plain.check.drafted == 0 and plain.check.draft_seconds is None
    assert plain.medians is not None and plain.medians.tokens_per_target_step == 1


def test_only_engines_have_a_cost_of_drafting(open_toy: OpenToy) -> None:
    drafts = measure(open_toy(PAIR)).drafts
    assert [cost.contestant.label for cost in drafts] == LABELS[1:3]
    assert all(0 < cost.share_of_round < 1 for cost in drafts)


def test_who_takes_part(open_toy: OpenToy) -> None:
    engine = open_toy(PAIR)

    def labels(**given: Any) -> list[str]:
        return [c.label for c in Benchmark(engine, BenchOptions(prompts=OWN, **given)).contestants]

    assert labels() == LABELS
    assert labels(methods=("plain",)) == ["plain"]
    assert labels(methods=("mtp-drafter", "mtp-drafter"), num_assistant_tokens=(2, 2)) == [
        "plain",
        "mtp-drafter 2",
    ]
    both = labels(
        methods=("prompt-lookup",),
        num_assistant_tokens=(2,),
        schedules=("auto", "heuristic-transient"),
    )
    assert both == ["plain", "prompt-lookup 2 auto", "prompt-lookup 2 heuristic-transient"]


def test_more_drafts_than_a_drafter_can(open_toy: OpenToy) -> None:
    report = measure(open_toy(PAIR), num_assistant_tokens=(6,))
    assert [contestant.label for contestant in report.contestants] == ["plain", "prompt-lookup 6"]
    assert "mtp-drafter 6 is left out: num_assistant_tokens: the drafter" in report.notes[0]
    with pytest.raises(UsageError, match="exported for at most 5, got 6"):
        measure(open_toy(PAIR), methods=("mtp-drafter",), num_assistant_tokens=(6,))


def test_auto_says_that_it_learns(open_toy: OpenToy) -> None:
    report = measure(open_toy(PAIR), schedules=("auto",))
    assert any("auto learns what steps cost: " in note for note in report.notes)


def test_contestants_take_turns(open_toy: OpenToy) -> None:
    seen: list[tuple[str, int, int]] = []
    options = BenchOptions(prompts=OWN, max_new_tokens=4, rounds=3, num_assistant_tokens=(2,))
    bench.run(open_toy(PAIR), options, progress=lambda *step: seen.append(step))
    total = 3 + 3 * (1 + 3)
    assert [done for _, done, _ in seen] == list(range(total + 1))
    assert {all_ for _, _, all_ in seen} == {total}
    a, b, c = "plain", "mtp-drafter 2", "prompt-lookup 2"
    turns = [what.partition(": ")[2] for what, _, _ in seen[3:-1]]
    assert turns == [a, b, c, a, b, c, b, c, a, c, a, b]
    assert seen[3][0] == f"tokens of own: {a}" and seen[-2][0].startswith("round 3 of 3, own: ")


def test_tokens_that_differ_are_counted(open_toy: OpenToy, biased: None) -> None:
    report = measure(open_toy(PAIR))
    assert [item.contestant.label for _, item in report.differing] == LABELS[3:]
    for name, item in report.differing:
        assert name == "own" and item.same_tokens == 3  # 3 4 5, and 6 is what it must not say
        assert bench_table.same(item) == "3 of 12"


def test_tokens_of_every_round_are_compared(open_toy: OpenToy) -> None:
    (work,) = measure(open_toy(PAIR)).workloads
    item = work.results[1]
    late = dataclasses.replace(item.runs[1], same_tokens=7)
    changed = dataclasses.replace(item, runs=(item.runs[0], late))
    assert changed.differs and changed.same_tokens == 7


def test_steps_of_the_target(open_toy: OpenToy) -> None:
    report = measure(open_toy(PAIR))
    assert report.steps is not None and report.prefill is not None
    assert report.steps.context_length == 128 and list(report.steps.seconds) == [1, 5, 8, 16]
    assert all(len(seconds) >= bench.LEAST_STEPS for seconds in report.steps.seconds.values())
    assert report.prefill.tokens == 512 and report.prefill.seconds


def test_exact_mode(open_toy: OpenToy) -> None:
    for width, labels, rows in (
        (16, [*LABELS[:-1], "prompt-lookup 15"], [1, 5, 8, 16]),
        (3, ["plain", "mtp-drafter 2", "prompt-lookup 2"], [1]),
    ):
        report = measure(open_toy(PAIR, exact=True, exact_width=width))
        assert [contestant.label for contestant in report.contestants] == labels
        assert report.folder.exact_width == width and not report.differing
        assert report.steps is not None and list(report.steps.seconds) == rows
        assert report.steps.context_length == 128 - 128 % width
        assert f", exact in blocks of {width}\n" in bench_table.table(report)
    assert ", not exact\n" in bench_table.table(measure(open_toy(PAIR)))


@pytest.mark.parametrize(("context", "rows"), [(20, [1, 5, 8]), (2, [1]), (3, [1])])
def test_a_small_context(open_toy: OpenToy, context: int, rows: list[int]) -> None:
    engine = open_toy(PAIR, max_context=context)
    if context < 3:
        with pytest.raises(ContextFull):
            measure(engine)
        return
    report = measure(engine, prompts=(("own", "1"),), max_new_tokens=2)
    assert report.steps is not None and report.prefill is not None
    assert (list(report.steps.seconds), report.prefill.tokens) == (rows, context - 1)
    assert report.steps.context_length == max(1, context // 2)


def test_the_floor_of_a_step(open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cache_bytes", lambda: 2000)
    monkeypatch.setattr(bench, "read_bandwidth", lambda threads: 4000.0)
    report = measure(open_toy(PAIR))
    assert report.steps is not None
    assert report.steps.weight_bytes == 1000 and report.step_floor == 0.25
    assert report.share_of_ceiling == 0.25 / report.steps.median(1)
    assert "fit into the machine's caches" in report.notes[0]
    assert Steps(1, {1: (1.0,)}, 1).floor(None) is None


def test_a_target_in_parts_reads_all_of_them() -> None:
    read = {"front": 1, "back": 20, "head": 300, "draft": 4000}
    engines = {name: SimpleNamespace(step_bytes=count) for name, count in read.items()}
    manifest: Any = SimpleNamespace(engines=engines)
    assert bench._weight_bytes(manifest) == 321


def test_engines_of_a_model(exported_pair: Callable[..., Any]) -> None:
    pair = exported_pair(("gemma4-e2b", "assistant-plain"))
    with pair.open() as engine:
        report = measure(engine, prompts=(("own", "abcabcabc"),), num_assistant_tokens=(2,))
    (work,) = report.workloads
    assert [item.contestant.method for item in work.results] == [
        "plain",
        "mtp-drafter",
        "prompt-lookup",
    ]
    assert report.folder.target == pair.manifest.target.id
    assert not report.differing and len(report.drafts) == 1


def test_too_little_memory(open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_available", lambda: 1000)
    report = measure(open_toy(PAIR))
    assert report.read_bandwidth is report.step_floor is report.share_of_ceiling is None
    assert any("bandwidth is not measured: " in note for note in report.notes)


# Workloads.


def test_built_in_prompts() -> None:
    for name, text in WORKLOADS.items():
        assert text.isascii() and 800 < len(text) < 1600, name
        assert name == name.lower() and text == text.strip()
    assert list(BenchOptions().texts) == list(WORKLOADS)
    assert list(BenchOptions(prompts=OWN).texts) == ["own"]
    assert list(BenchOptions(workloads=("chat",), prompts=OWN).texts) == ["chat", "own"]


def test_a_workload_that_does_not_fit(open_toy: OpenToy) -> None:
    prompts = (("long", "1" * 40), ("longer", "1" * 60), ("short", "12"))
    engine = open_toy(dataclasses.replace(PAIR, max_context=48))
    report = measure(engine, prompts=prompts)
    assert [work.name for work in report.workloads] == ["short"]
    assert report.notes[:2] == (
        "workload long is left out: 40 tokens and 12 new ones do not fit into the context of 48",
        "workload longer is left out: prompt: 60 tokens do not fit into the context of 48 with a"
        " new one",
    )
    with pytest.raises(ContextFull, match="no workload fits: workload longer is left") as caught:
        measure(engine, prompts=prompts[:2])
    assert caught.value.hint


def test_prompts_go_through_the_chat_template(open_toy: OpenToy) -> None:
    chat = "77{{ messages[0].content }}"
    report = measure(open_toy(dataclasses.replace(PAIR, chat_template=chat)))
    assert report.workloads[0].prompt_tokens == 4


# What goes wrong.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"workloads": ("poem",)}, "workloads: must be among copy-edit, .*, got 'poem'"),
        ({"methods": ("auto",)}, "methods: must be among plain, .*, got 'auto'"),
        ({"schedules": ("never",)}, "schedules: must be among constant, .*, got 'never'"),
        ({"schedules": ()}, "schedules: is empty"),
        ({"rounds": 0}, "rounds: must be a whole number of at least 1, got 0"),
        ({"max_new_tokens": 1}, "max_new_tokens: must be a whole number of at least 2, got 1"),
        ({"num_assistant_tokens": (0,)}, "num_assistant_tokens: must be .* at least 1, got 0"),
        ({"workloads": ("chat",), "prompts": (("chat", "1"),)}, "name 'chat' is there twice"),
    ],
)
def test_options_that_cannot_be_meant(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        BenchOptions(**given)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--rounds", "0"], 2, "Error: --rounds: must be a whole number of at least 1, got 0"),
        (["-n", "1"], 2, "Error: --max-new-tokens: must be a whole number of at least 2, got 1"),
        (["-k", "0"], 2, "Error: --num-assistant-tokens: must be a whole number of at least 1"),
        (["-k", "6", "--method", "mtp-drafter"], 2, "--num-assistant-tokens: the drafter was"),
        (["--method", "draft"], 2, "Error: --method: 'draft' needs a drafter engine"),
        (["--exact-width", "4"], 2, "Error: --exact-width: has no effect without --exact"),
        (["--threads", "0"], 2, "Error: --threads: must be"),
        (["--prompt-file", "/nowhere"], 2, "Error: --prompt-file: /nowhere: No such file"),
        (["--workload", "poem"], 2, "'poem' is not one of 'copy-edit'"),
        (["--device", "cuda"], 1, "Error: --device: 'cuda' is not available"),
        (["--max-context", "64"], 1, "Error: no workload fits: workload prose is left out"),
    ],
)
def test_errors(folder: Path, arguments: list[str], code: int, says: str) -> None:
    result = call(folder, *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert says in result.stderr


def test_a_drafter_that_fails(folder: Path, own: tuple[str, ...]) -> None:
    (folder / "mtp_drafter.onnx").unlink()
    result = call(folder, *own, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert [item["method"] for item in data["workloads"][0]["results"]] == [
        "plain",
        *["prompt-lookup"] * 3,
    ]
    assert any("mtp-drafter 3 is left out of" in note for note in data["notes"])
    strict = call(folder, *own, "--strict")
    assert strict.exit_code == 1
    assert strict.stderr.startswith("Error: the drafter failed: ")
    assert "target step behind" in strict.stdout  # what was measured before
    assert "note: not complete: " in strict.stdout


def test_a_target_that_fails(open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Benchmark, workload: str, contestant: Contestant) -> None:
        raise EngineError("broken")

    monkeypatch.setattr(Benchmark, "_generate", broken)
    with pytest.raises(EngineError, match="broken"):
        measure(open_toy(PAIR))


def test_an_engine_that_is_busy(open_toy: OpenToy) -> None:
    engine = open_toy(PAIR)
    with engine.stream("12") as stream:
        next(stream)
        with pytest.raises(UsageError, match="the engine is busy"):
            measure(engine)


# The command.


def test_a_table_of_80_columns(folder: Path, own: tuple[str, ...]) -> None:
    given = (*own, "--workload", "chat", "--max-context", 1024)
    result = call(folder, *given)
    assert (result.exit_code, result.stderr) == (0, "")
    machine, *lines = result.stdout.splitlines()
    assert "onnxruntime" in machine
    as_long_as_given = ("note: ", own[1])
    assert all(len(line) <= 80 for line in lines if not line.startswith(as_long_as_given))
    heads = {line for line in lines if "tok/step" in line}
    assert [head.split() for head in heads] == [" ".join(bench_table.COLUMNS).split()]
    last = [line for line in lines if line.startswith("prompt-lookup 16")]
    assert last[0].endswith("all") and len(last[0]) == len(heads.pop())
    for start in ("target step behind 128 tokens", "rounds that drafted", "chat, prompt of "):
        assert any(line.startswith(start) for line in lines), start


def test_all_workloads_together(folder: Path, own: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("345", encoding="utf-8")
    shown = call(folder, *own, "--prompt-file", tmp_path / "other.txt").stdout
    block = shown.partition("all workloads, geometric mean\n")[2].splitlines()
    assert sorted(line.rsplit(maxsplit=1)[0].strip() for line in block[1:6]) == sorted(LABELS[1:])
    assert "all workloads" not in call(folder, *own).stdout


def test_one_line_of_json(folder: Path, own: tuple[str, ...]) -> None:
    result = call(folder, *own, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    data = json.loads(result.stdout)
    assert data["complete"] is True
    assert set(data["machine"]) == {
        "cpu", "threads", "device", "onnxruntime", "read_bandwidth", "cache_bytes",
    }  # fmt: skip
    assert data["folder"]["target"] == "toy" and data["folder"]["precision"] == "fp32"
    assert data["options"]["rounds"] == 2 and data["options"]["prompts"][0][1] == "12"
    (work,) = data["workloads"]
    plain, drafted = work["results"][:2]
    assert (plain["method"], plain["ratio"]) == ("plain", 1)
    assert len(drafted["runs"]) == 2 and drafted["same_tokens"] == 12
    assert {*drafted["medians"]} < {*drafted["runs"][0]} == {*drafted["check"]}
    assert set(data["steps"]["medians"]) == {"1", "5", "8", "16"}
    assert data["steps"]["ratios"]["1"] == 1
    assert [cost["contestant"]["num_assistant_tokens"] for cost in data["drafts"]] == [3, 5]


def test_tokens_that_differ(folder: Path, own: tuple[str, ...], biased: None) -> None:
    shown = call(folder, *own)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.count("3 of 12") == 3
    strict = call(folder, *own, "--strict", "--json")
    assert strict.exit_code == 1
    assert json.loads(strict.stdout)["complete"] is True
    assert "tokens are other than plain decoding's" in strict.stderr
    assert "prompt-lookup 16: 3 of 12" in strict.stderr and "hint: " in strict.stderr


@pytest.mark.parametrize(("turns", "rows"), [(0, 0), (4, 4), (6 + 6 + 2, 6)])
def test_an_interruption_keeps_what_is_there(
    folder: Path, own: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, turns: int, rows: int
) -> None:
    calls = 0
    generate = Benchmark._generate

    def interrupted(self: Benchmark, workload: str, contestant: Contestant) -> Any:
        nonlocal calls
        calls += 1
        if calls > turns:
            raise KeyboardInterrupt
        return generate(self, workload, contestant)

    monkeypatch.setattr(Benchmark, "_generate", interrupted)
    result = call(folder, *own)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert "target step behind" in result.stdout and "note: not complete: " in result.stdout
    assert sum(line.startswith(tuple(LABELS)) and line.endswith(("all", "-"))
               for line in result.stdout.splitlines()) == rows  # fmt: skip
    calls = 0
    data = json.loads(call(folder, *own, "--json").stdout)
    assert data["complete"] is False
    runs = [len(item["runs"]) for work in data["workloads"] for item in work["results"]]
    assert sum(runs) + len(runs) == turns


def test_an_interruption_before_anything(
    folder: Path, own: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Benchmark) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Benchmark, "_measure_prefill", interrupted)
    result = call(folder, *own)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_an_interruption_behind_the_first_measurement(
    folder: Path, own: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Benchmark) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Benchmark, "_measure_steps", interrupted)
    result = call(folder, *own)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert "prefill of 512 tokens" in result.stdout and "target step" not in result.stdout
    assert json.loads(call(folder, *own, "--json").stdout)["steps"] is None


def test_progress_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((20, 5)))
    progress = cli_bench._Progress(shown=True)
    progress("something that is long", 1, 9)
    progress("", 9, 9)
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == f"\r{' ' * 19}\r2/9 something that \r{' ' * 19}\r"
    cli_bench._Progress(shown=False)("something", 1, 9)
    assert capsys.readouterr().err == ""


def test_what_the_command_needs_at_import_is_light() -> None:
    for module in (bench_report, bench_table, bench_workloads, cli_bench):
        assert module.__file__ is not None
        source = Path(module.__file__).read_text(encoding="utf-8")
        assert not any(f"import {name}" in source for name in ("numpy", "onnxruntime"))


# The memory of the machine.


def test_the_size_of_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "LEAST", 1000)
    assert bandwidth.buffer_size(None, None) == bandwidth.buffer_size(400, 2000) == 1000
    assert bandwidth.buffer_size(700, None) == 1400
    with pytest.raises(MemoryError):
        bandwidth.buffer_size(700, 2799)


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "CPUS", tmp_path)

    def cache(cpu: int, index: int, level: str, size: str, shared: str) -> None:
        place = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        place.mkdir(parents=True)
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (place / name).write_text(text + "\n")

    assert bandwidth.cache_bytes() is None
    cache(0, 0, "1", "32K", "0")
    cache(1, 0, "1", "32K", "1")
    assert bandwidth.cache_bytes() == 64 << 10
    cache(0, 3, "3", "8M", "0-1")
    cache(1, 3, "3", "8M", "0-1")
    cache(2, 3, "3", "8M", "2")
    cache(3, 3, "3", "what", "3")
    assert bandwidth.cache_bytes() == 16 << 20


@pytest.mark.parametrize("threads", [1, 3])
def test_reading(threads: int) -> None:
    assert bandwidth.read_bandwidth(threads, size=1 << 16, passes=2) > 0
    assert bandwidth.read_bandwidth(threads, size=1, passes=1) > 0


def test_plain_is_no_draft() -> None:
    assert (PLAIN.label, PLAIN.num_assistant_tokens) == ("plain", 0)
