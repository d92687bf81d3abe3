"""A batch job without Ray: what rows may be, results that do not depend on each other, going on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toys import Toy

import specrun

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import batch_rows
import ray_batch
from batch_rows import Row, Settings, Worker

TOY = Toy(history_weight=3, drafter=True, max_context=64)
TEMPERED = {"temperature": 0.8}
ToyFolder = Callable[[Toy], Path]


@pytest.fixture
def folder(toy_folder: ToyFolder) -> Path:
    return toy_folder(TOY)


@pytest.fixture
def worker(folder: Path) -> Iterator[Worker]:
    made = Worker(Settings(str(folder), {"max_new_tokens": 6, "seed": 5}))
    with made.engine:
        yield made


def ask(worker: Worker, row: object, index: int = 0) -> dict[str, Any]:
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    answer = worker.answer(Row(index, line))
    assert answer.endswith(b"\n") and answer.count(b"\n") == 1
    found: dict[str, Any] = json.loads(answer)
    assert found.pop("index") == index
    return found


def test_a_row_gives_what_generate_gives(worker: Worker) -> None:
    answer = ask(worker, {"prompt": [1, 2, 3], "id": {"any": "thing"}}, index=4)
    alone = worker.engine.generate([1, 2, 3], max_new_tokens=6)
    stats = alone.stats
    assert answer == {
        "id": {"any": "thing"},
        "text": alone.text,
        "tokens": TOY.plain([1, 2, 3], 6),
        "finish_reason": "length",
        "method": "mtp-drafter",
        "acceptance": stats.acceptance,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "target_steps": stats.target_steps,
    }


def test_options_of_a_row_stand_over_those_of_the_job(worker: Worker) -> None:
    answer = ask(worker, {"prompt": [1], "options": {"max_new_tokens": 2, "method": "plain"}})
    assert len(answer["tokens"]) == 2 and answer["method"] == "plain"


def test_the_seed_is_the_jobs_plus_the_index_or_the_rows_own(worker: Worker) -> None:
    seeds = [ask(worker, {"prompt": [1], "options": TEMPERED}, index)["seed"] for index in (0, 3)]
    assert seeds == [5, 8]
    own = ask(worker, {"prompt": [1], "options": TEMPERED | {"seed": 40}}, 3)
    assert own["seed"] == 40
    alone = worker.engine.generate([1], max_new_tokens=6, seed=40, temperature=0.8)
    assert own["tokens"] == alone.tokens


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b"not json", "row: not JSON"),
        (b"\xff", "row: is no UTF-8"),
        ([1], "row: must be an object, got [1]"),
        ({}, "row: needs prompt or messages, and not both"),
        ({"prompt": "1", "messages": []}, "row: needs prompt or messages, and not both"),
        ({"prompt": "1", "seed": 3}, "row: must have prompt, messages, id, options, got 'seed'"),
        ({"prompt": "1", "options": 3}, "options: must be an object, got 3"),
        ({"prompt": "1", "options": {"bogus": 3}}, "bogus: no such option, got 3"),
        ({"prompt": "1", "options": {"top_p": 3}}, "top_p: must be a number above 0"),
        ({"prompt": "1", "options": {"method": "mtp"}}, "method: 'mtp' needs a drafter engine"),
        (
            {"prompt": "1", "options": {"num_assistant_tokens_schedule": "heuristic"}},
            "num_assistant_tokens_schedule: 'heuristic' goes on from earlier generations",
        ),
        ({"prompt": 3}, "prompt: must be a text, token ids or messages, got 3"),
        ({"prompt": [[1], [2]]}, "prompt: a row has one, got a list"),
        ({"prompt": [99]}, "prompt: "),
        ({"prompt": [1] * 64}, "prompt: 64 tokens do not fit into the context of 64"),
    ],
)
def test_a_row_that_is_wrong_says_why(worker: Worker, row: object, says: str) -> None:
    answer = ask(worker, row)
    assert answer.keys() == {"error", "hint"} and answer["hint"]
    assert answer["error"].startswith(says)


def test_rows_do_not_depend_on_those_before(folder: Path) -> None:
    settings = Settings(str(folder), {"max_new_tokens": 8, "seed": 1, "temperature": 1.5})
    rows = [Row(i, json.dumps({"prompt": [i % 7, 3]}).encode()) for i in range(12)]
    forward = list(batch_rows.in_this_process(settings, rows))
    assert list(batch_rows.in_this_process(settings, rows[::-1]))[::-1] == forward
    assert len({line.split(b"tokens")[1] for line in forward}) > 6


def job(folder: Path, *more: str) -> list[str]:
    """Arguments of a job over ``in.jsonl`` beside the engines, in this process."""
    files = [str(folder), str(folder.parent / "in.jsonl"), str(folder.parent / "out.jsonl")]
    return [*files, "--workers", "0", "-n", "4", *more]


def write_rows(folder: Path, count: int) -> None:
    lines = [json.dumps({"prompt": [i % 10], "options": TEMPERED}) for i in range(count)]
    (folder.parent / "in.jsonl").write_text("\ufeff" + "\r\n\n".join(lines) + "\n")


def test_a_job_goes_on_where_it_was_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder, 6)
    out = folder.parent / "out.jsonl"
    answer = Worker.answer

    def interrupted(self: Worker, row: Row) -> bytes:
        if row.index == 3:
            raise KeyboardInterrupt
        return answer(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "answer", interrupted)
        with pytest.raises(SystemExit) as left:
            ray_batch.main(job(folder))
    assert left.value.code == 130 and not out.exists()
    partial = out.with_name("out.jsonl.partial")
    first = partial.read_bytes()
    assert first.count(b"\n") == 3
    partial.write_bytes(first + b'{"index": 3, "te')  # cut in the middle of a line
    for other in (["--seed", "1"], ["-k", "2"]):  # a drawn seed is none of these but by accident
        with pytest.raises(SystemExit) as left:
            ray_batch.main(job(folder, *other))
        assert left.value.code == 2
        assert "was left by another job" in capsys.readouterr().err
    assert ray_batch.main(job(folder)) == 0
    assert "goes on behind 3 of 6 rows" in capsys.readouterr().err
    lines = out.read_bytes().splitlines(keepends=True)
    assert b"".join(lines[:3]) == first
    seeds = [json.loads(line)["seed"] for line in lines]
    assert seeds == list(range(seeds[0], seeds[0] + 6))
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        "engines", "in.jsonl", "out.jsonl",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as left:
        ray_batch.main(job(folder))
    assert left.value.code == 2 and "is there already" in capsys.readouterr().err
    assert ray_batch.main(job(folder, "--overwrite", "--seed", str(seeds[0]))) == 0
    assert out.read_bytes() == b"".join(lines)


def test_rows_with_errors_show_in_the_exit_status(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.parent / "in.jsonl").write_text('{"prompt": "1"}\n{}\n')
    assert ray_batch.main(job(folder)) == 1
    assert capsys.readouterr().err.startswith("2 rows, 1 with an error: ")


def test_options_of_zero_and_off_are_options(folder: Path) -> None:
    asked = ["--greedy", "-k", "0", "--temperature", "0", "--top-k", "0", "--stop", "a", "--raw"]
    settings = ray_batch.settings_of(ray_batch.parser().parse_args(job(folder, *asked)))
    assert settings.generate == {
        "max_new_tokens": 4,
        "do_sample": False,
        "num_assistant_tokens": 0,
        "temperature": 0,
        "top_k": 0,
        "stop": ["a"],
        "raw": True,
    }


def test_a_text_file_has_a_prompt_per_line(folder: Path) -> None:
    prompts = folder.parent / "prompts.txt"
    prompts.write_text("1\n{}2\n\n3\n")
    arguments = job(folder)
    assert ray_batch.main([arguments[0], str(prompts), *arguments[2:], "--raw"]) == 0
    lines = (folder.parent / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"][0] for line in lines][::2] == [
        TOY.plain([number], 1)[0] for number in (1, 3)
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--schedule", "auto"], "--schedule: 'auto' goes on from earlier generations"),
        (["--method", "mtp"], "--method: 'mtp' needs a drafter engine"),
        (["--temperature", "-1"], "--temperature: must be"),
    ],
)
def test_wrong_options_of_the_job_end_it_before_it_begins(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    write_rows(folder, 1)
    with pytest.raises(SystemExit) as left:
        ray_batch.main(job(folder, *arguments))
    assert left.value.code == 2
    assert f"Error: {says}" in capsys.readouterr().err
    assert not (folder.parent / "out.jsonl.partial").exists()


def test_a_folder_that_is_none_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(specrun.FolderError, match="no manifest"):
        Settings(str(tmp_path), {}).check()


def test_a_schedule_of_the_folder_that_goes_on_begins_anew(folder: Path, tmp_path: Path) -> None:
    made = json.loads((folder / "manifest.json").read_text())
    made["drafters"]["mtp-drafter"]["schedule"] = "heuristic"
    (folder / "manifest.json").write_text(json.dumps(made))
    test_rows_do_not_depend_on_those_before(folder)
