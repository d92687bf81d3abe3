"""A local Ray: the batch job on two workers gives the bytes of one process; a deployment answers.

One cluster for all of them, as it takes ten seconds to start. What does not need Ray is in
``test_batch_rows.py`` and ``test_examples.py``.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toys
from toys import Toy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import batch_rows
import ray_batch
import ray_serve
from batch_rows import Row

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray by Ray
]

CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOY = Toy(history_weight=3, drafter=True, chat_template=CHAT, max_context=4096)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of two CPUs in a short path, as its sockets must have one."""
    ray = ray_batch.import_ray()
    with tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        with ray_batch.cluster(ray, None, num_cpus=3):
            yield ray


@pytest.fixture(scope="module")
def folder(once: Callable[..., Path]) -> Path:
    return once("ray-toy", lambda path: toys.write_folder(path / "engines", TOY)) / "engines"


def job(folder: Path, rows: Path, out: Path, workers: int) -> list[str]:
    files = [str(folder), str(rows), str(out)]
    return [*files, "--workers", str(workers), "-n", "12", "--seed", "3"]


def test_two_workers_give_the_bytes_of_one_process(
    ray: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": [i % 10, 7], "id": i}) for i in range(60)]
    lines[5::7] = [json.dumps({"prompt": str(i), "options": {"temperature": 2}}) for i in range(8)]
    lines[9] = "none"
    rows.write_text("\n".join(lines))
    outs = [tmp_path / f"out{workers}.jsonl" for workers in (0, 2)]
    assert ray_batch.main(job(folder, rows, outs[0], 0)) == 1
    expected = outs[0].read_bytes()

    # The rest of a job that was interrupted, with a worker that dies.
    settings = batch_rows.Settings(str(folder), {"max_new_tokens": 12}, json_lines=True, threads=1)
    fingerprint = settings.fingerprint(batch_rows.read_lines(rows))
    (tmp_path / "out2.jsonl.job").write_text(json.dumps([fingerprint, 3]))
    (tmp_path / "out2.jsonl.partial").write_bytes(b"".join(expected.splitlines(True)[:4]))
    mark = tmp_path / "died"
    answer = batch_rows.Worker.answer

    def dies_once(self: batch_rows.Worker, row: Row) -> bytes:
        if row.index == 30 and not mark.exists():
            mark.touch()
            os._exit(1)
        return answer(self, row)

    monkeypatch.setattr(batch_rows.Worker, "answer", dies_once)
    assert ray_batch.main(job(folder, rows, outs[1], 2)) == 1
    assert mark.exists()
    assert outs[1].read_bytes() == expected


def test_a_worker_that_cannot_work_ends_the_job(
    ray: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    rows = tmp_path / "rows.txt"
    rows.write_text("1\n2\n")

    def fails(self: batch_rows.Worker, row: Row) -> bytes:
        raise MemoryError("no more of it")

    monkeypatch.setattr(batch_rows.Worker, "answer", fails)
    with pytest.raises(SystemExit) as left:
        ray_batch.main(job(folder, rows, tmp_path / "out", 1))
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert "Error: a worker failed: MemoryError: no more of it\n" in said
    assert "hint: the same command goes on with what is left" in said
    assert not (tmp_path / "out").exists()


def ask(port: int, **asked: Any) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = json.dumps(asked)
    connection.request("POST", "/story", body, {"Content-Type": "application/json"})
    return connection.getresponse()


def test_a_deployment_of_two_replicas(ray: Any, folder: Path) -> None:
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    options = Namespace(folder=folder, replicas=2, most_replicas=None, threads=1)
    options.host, options.port, options.address = "127.0.0.1", port, None
    expected = "".join(map(str, TOY.plain([1, 2], 24)))
    try:
        ray_serve.start(options)
        whole = ask(port, prompt="12", max_new_tokens=24, stream=False)
        answer = json.load(whole)
        assert (whole.status, answer["text"], answer["end"]) == (200, expected, "length")
        events = [json.loads(line) for line in ask(port, prompt="12", max_new_tokens=24)]
        assert "".join(event.get("piece", "") for event in events) == expected
        assert len(events) > 2 and events[-1]["end"] == "length"
        refused = ask(port, prompt="", stream=False)
        assert refused.status == 400 and "prompt" in json.load(refused)["detail"]
        left = ask(port, prompt="12", max_new_tokens=4000)
        left.readline()
        left.close()
        until(lambda: {"cancelled": 1} in [pick(health(port), "cancelled") for _ in range(4)])
    finally:
        serve.shutdown()


def health(port: int) -> dict[str, int]:
    """How generations of the replica that happens to answer ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/health")
    ended: dict[str, int] = json.load(connection.getresponse())["ended"]
    return ended


def pick(counts: dict[str, int], name: str) -> dict[str, int]:
    return {name: counts[name]} if name in counts else {}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
