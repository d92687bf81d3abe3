"""scripts/examples, each run as its user would, on the bundled model."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import check_tiny

import specrun

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "scripts" / "examples"
PSALM = "Read Psalms 103."


@pytest.fixture(scope="module")
def folder(once: Callable[..., Path]) -> Path:
    return once("gemma4-tiny", lambda folder: check_tiny.export(folder / "engines")) / "engines"


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[specrun.Engine]:
    with specrun.load(folder) as engine:
        yield engine


def run(name: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True)


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_embedded_app_has_ten_lines_and_runs(folder: Path, engine: specrun.Engine) -> None:
    code = (EXAMPLES / "embedded.py").read_text().partition("import specrun\n")[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    result = engine.generate(PSALM, max_new_tokens=64)
    runs = result.stats.target_steps + 1
    said = run("embedded.py", str(folder), PSALM).stdout
    assert said == f"{result.text}\n[{len(result.tokens)} tokens in {runs} runs of the target]\n"


def test_the_embedded_app_says_how_it_is_called() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run("embedded.py")
    assert caught.value.stderr.startswith("usage: embedded.py FOLDER PROMPT\n\nTen lines")


def test_the_assistant_remembers_and_takes_back(folder: Path, engine: specrun.Engine) -> None:
    asked = [PSALM, "Explain Dictionaries.", "/undo", "Read Genesis 6.", "/undo", "/undo", "/undo"]
    said = run(
        "assistant.py", str(folder), "--max-new-tokens", "16", stdin="\n".join([*asked, "/quit"])
    )
    messages: list[Any] = []
    answers = []
    for question in (PSALM, "Explain Dictionaries.", "Read Genesis 6."):
        messages.append({"role": "user", "content": question})
        answers.append(engine.generate(messages, max_new_tokens=16).text)
        messages.append({"role": "assistant", "content": answers[-1]})
        if len(answers) == 2:
            del messages[-2:]
    assert said.stdout == "".join(answer + "\n" for answer in answers)
    assert said.stderr.count("taken back") == 3 and said.stderr.count("there is nothing") == 1


def test_ctrl_c_ends_an_answer_and_not_the_assistant(folder: Path) -> None:
    with start("assistant.py", str(folder), "--max-new-tokens", "2000") as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(PSALM + "\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        ended = process.stderr.readline()
        assert ended.startswith("> [cancelled, ")
        said, _ = process.communicate("/undo\n/quit\n", timeout=60)
        assert process.returncode == 0 and said.endswith("\n")


def test_an_own_processor_holds_in_drafts(folder: Path) -> None:
    text, _, told = run("own_processor.py", str(folder), PSALM, "--without", "e").stdout.rpartition(
        "\n["
    )
    assert len(text) > 40 and "e" not in text.lower()
    assert re.fullmatch(r"[1-9]\d* drafts accepted; plain decoding gives the same text\]\n", told)


def test_an_own_drafter_saves_runs(folder: Path, engine: specrun.Engine, tmp_path: Path) -> None:
    known = tmp_path / "phrases.txt"
    known.write_text(engine.generate(PSALM, max_new_tokens=48).text.replace("\n", " ") + "\n")
    said = run("own_drafter.py", str(folder), PSALM, "--known", str(known)).stdout
    found = re.search(r"\n\[(\d+) runs of the target, plain (\d+); (.*)\]\n$", said)
    assert found and found[3] == "plain decoding gives the same text"
    assert int(found[2]) == 47 and int(found[1]) < 30


class Service:
    """The FastAPI example as a process of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        self.process = start("fastapi_app.py", str(folder), "--port", str(self.port))
        until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()[1]
        try:
            self.health()
        except ConnectionRefusedError:
            return False
        return True

    def ask(self, **asked: Any) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(
            "POST", "/story", json.dumps(asked), {"Content-Type": "application/json"}
        )
        return connection.getresponse()

    def health(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/health")
        found: dict[str, Any] = json.load(connection.getresponse())
        return found


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    service = Service(folder)
    yield service
    service.process.send_signal(signal.SIGINT)
    service.process.communicate(timeout=60)


def test_the_service_streams_and_answers_as_a_whole(
    service: Service, engine: specrun.Engine
) -> None:
    result = engine.generate(PSALM, max_new_tokens=40)
    end = {"end": "length", "acceptance": result.stats.acceptance}
    answer = service.ask(prompt=PSALM, max_new_tokens=40)
    events = [json.loads(line) for line in answer]
    assert "".join(event["piece"] for event in events[:-1]) == result.text
    assert len(events) > 5 and events[-1] == end
    whole = json.load(service.ask(prompt=PSALM, max_new_tokens=40, stream=False))
    assert whole == {"text": result.text, **end}


def test_the_service_refuses_what_is_wrong(service: Service) -> None:
    for asked, status in (({"prompt": "word " * 3000}, 400), ({}, 422)):
        assert service.ask(**asked).status == status
    assert service.ask(prompt="a", max_new_tokens=-1, stream=True).status == 400


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(service: Service, stream: bool) -> None:
    before = service.health()["ended"].get("cancelled", 0)
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    body = json.dumps({"prompt": PSALM, "max_new_tokens": 1900, "stream": stream})
    connection.request("POST", "/story", body, {"Content-Type": "application/json"})
    if stream:
        connection.getresponse().readline()
    else:
        until(lambda: service.health()["waiting"] == 1)
    connection.close()
    until(lambda: service.health()["ended"].get("cancelled", 0) == before + 1)
    assert service.health()["waiting"] == 0
    assert service.ask(prompt="a", max_new_tokens=1, stream=False).status == 200
