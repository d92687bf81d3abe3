"""Who may use a server and how much: queue, time, clients that leave, keys, sizes, faults, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import toys
from click.testing import CliRunner
from serving import LONG, MODEL, TOY, Serving, serving, until

import specrun
from specrun import UsageError
from specrun.cli import main
from specrun.errors import EngineError
from specrun.serve import ServeOptions, start
from specrun.serve.settings import is_loopback
from specrun.target import Target

PROMPT = [1, 2, 3, 1, 2]
ALL: dict[str, Any] = {"extra_body": {"method": "plain"}}


def long_stream(served: Serving, **fields: Any) -> Any:
    """A stream at work, which has not long to go only if nobody waits for it."""
    stream = served.chat(max_tokens=LONG, stream=True, **ALL, **fields)
    next(stream), next(stream)
    return stream


def idle(served: Serving) -> None:
    """Wait until nothing runs."""
    until(lambda: served.pool.running == served.pool.waiting == 0)


# The queue.


def test_a_full_queue_is_429(tmp_path: Path) -> None:
    with serving(tmp_path, max_batch=1, max_waiting=1) as served:
        first = long_stream(served)
        waits: list[Any] = []
        thread = threading.Thread(target=lambda: waits.append(served.chat(max_tokens=3)))
        thread.start()
        until(lambda: served.pool.waiting == 1)
        with pytest.raises(openai.RateLimitError, match="1 requests run and 1 wait") as error:
            served.chat(max_tokens=3)
        assert error.value.code == "queue_full"
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 60
        assert served.post(stream=True).status_code == 429
        assert served.post(n=2).status_code == 429
        first.close()
        thread.join(30)
        assert (
            waits[0].choices[0].message.content
            == served.alone.generate(PROMPT, max_new_tokens=3).text
        )
        assert served.chat(max_tokens=1).usage.completion_tokens == 1


def test_requests_that_arrive_together_take_turns(tmp_path: Path) -> None:
    """A short one is not behind a long one."""
    with serving(tmp_path, max_batch=2) as served:
        stream = long_stream(served)
        assert served.chat(max_tokens=20).usage.completion_tokens == 20
        assert served.pool.running == 1
        stream.close()


# Clients that leave.


def cancelled(served: Serving) -> float:
    """Texts that somebody left."""
    return served.metric("specrun_generations_total", outcome="cancelled")


def test_a_client_that_leaves_a_stream(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        streams = [long_stream(served, n=1) for _ in range(3)]
        assert served.pool.running == 3
        for stream in streams:
            stream.close()
        idle(served)
        assert served.metric("specrun_generations_total", method="plain", outcome="cancelled") == 3
        assert served.chat(max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_does_not_wait(tmp_path: Path, waits: bool) -> None:
    """At work, and still in the queue; streamed or not."""
    with serving(tmp_path, max_batch=1) as served:
        first = long_stream(served) if waits else None
        for stream in (False, True):
            impatient = served.client.with_options(timeout=0.3)
            messages: Any = [{"role": "user", "content": "123"}]
            with pytest.raises(openai.APITimeoutError):
                impatient.chat.completions.create(
                    model=MODEL, messages=messages, max_tokens=LONG, stream=waits and stream
                )
        until(lambda: served.pool.waiting == 0 and served.pool.running == int(waits))
        # It does not count as a fault of the server.
        until(lambda: served.metric("specrun_responses_total", status="499") == 2)
        assert served.metric("specrun_responses_total", status="503") == 0
        if first is not None:
            first.close()
            idle(served)


def test_a_client_that_leaves_while_the_prompt_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between two chunks of the prompt."""
    steps: list[int] = []
    step = Target._step

    def slow(self: Target, *arguments: Any) -> Any:
        steps.append(1)
        time.sleep(0.05)
        return step(self, *arguments)

    with serving(tmp_path, opening={"prefill_chunk": 16}) as served:
        monkeypatch.setattr(Target, "_step", slow)
        with pytest.raises(httpx.ReadTimeout):
            served.http.post("/v1/completions", json={"prompt": "1" * 16_000}, timeout=0.5)
        idle(served)
        assert 1 <= len(steps) < 500
    # Of 1000 chunks; that its text is empty is in test_cancel.


# Time.


def test_time_is_up_in_the_middle(tmp_path: Path) -> None:
    """What there is by then is the answer."""
    with serving(tmp_path, timeout=0.4) as served:
        extra = {"return_stats": True, "method": "plain"}
        choice = served.chat(max_tokens=LONG, extra_body=extra).choices[0]
        assert (choice.finish_reason, choice.specrun["finish_reason"]) == ("length", "timeout")
        text = choice.message.content
        assert text and text == served.alone.generate(PROMPT, max_new_tokens=len(text)).text
        # A request may ask for less than the server allows, and not for more.
        before = time.monotonic()
        served.chat(max_tokens=LONG, extra_body={"timeout": 1000})
        assert time.monotonic() - before < 20
        assert served.metric("specrun_generations_total", outcome="timeout") >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_time_is_up_before_there_is_anything(tmp_path: Path, stream: bool) -> None:
    with serving(tmp_path, max_batch=1) as served:
        first = long_stream(served)
        answer = served.post(timeout=0.05, stream=stream)
        assert answer.status_code == 408 and answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["code"] == "timeout"
        assert "not begun within 0.05 seconds" in answer.json()["error"]["message"]
        first.close()


# Who may ask.

KEY = "a-secret-key"


def test_a_key(tmp_path: Path) -> None:
    with serving(tmp_path, api_key=KEY) as served:
        assert served.chat(max_tokens=1).usage.completion_tokens == 1
        assert served.http.get("/metrics").status_code == 200
        for given in (
            "Bearer wrong",
            f"Basic {KEY}",
            KEY,
            "",
            "Bearer",
            f"Bearer {KEY}x",
            "Bearer \xff",
        ):
            headers = {b"Authorization": given.encode("latin-1")}
            for path in ("/v1/models", "/metrics", "/nothing"):
                answer = httpx.get(served.server.url + path, headers=headers)
                assert answer.status_code == 401, given
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert KEY not in answer.text
        for path in ("/", "/health"):
            assert httpx.get(served.server.url + path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            served.client.with_options(api_key="wrong").models.list()
        assert served.metric("specrun_responses_total", path="other", status="401") == 7
    assert KEY not in repr(ServeOptions(api_key=KEY))


def test_names_of_other_machines(tmp_path: Path) -> None:
    """A page whose name was made to stand for 127.0.0.1 is not answered."""
    with serving(tmp_path) as served:
        port = served.server.url.rpartition(":")[2]
        for host, status in {
            "evil.example": 403, f"evil.example:{port}": 403, "": 403, "localhost.evil": 403,
            "localhost": 200, f"LOCALHOST:{port}": 200, f"127.0.0.1:{port}": 200, "[::1]:80": 200,
        }.items():  # fmt: skip
            answer = served.http.get("/health", headers={"host": host})
            assert answer.status_code == status, host


def test_only_json_is_read(tmp_path: Path) -> None:
    """What a form of another site can send is not."""
    with serving(tmp_path, max_body_bytes=2000) as served:
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
        ):
            headers = {"content-type": kind}
            answer = served.http.post("/v1/completions", content=b"{}", headers=headers)
            assert answer.status_code == 415 and "must be application/json" in answer.text
        for size, chunked, status in ((1900, False, 200), (2100, False, 413), (9000, True, 413)):
            body = b'{"prompt": "1", "max_tokens": 1, "user": "%s"}' % (b"x" * (size - 46))
            content: Any = (body[i : i + 100] for i in range(0, size, 100)) if chunked else body
            headers = {"content-type": "application/json; charset=utf-8"}
            answer = served.http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 413:
                assert answer.json()["error"]["code"] == "request_too_large"


def test_prompts_of_some_length(tmp_path: Path) -> None:
    with serving(tmp_path, max_prompt_tokens=6) as served:
        assert served.chat("123456", max_tokens=1).usage.prompt_tokens == 6
        with pytest.raises(
            openai.BadRequestError, match="7 tokens, the server takes at most 6"
        ) as e:
            served.chat("1234567")
        assert (e.value.param, e.value.code) == ("messages", "context_length_exceeded")


def test_pages_of_other_sites(tmp_path: Path) -> None:
    origin = "https://chat.example.org"
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with serving(tmp_path / "a") as served:
        assert served.http.options("/v1/completions", headers=asked).status_code == 403
        own = served.server.url
        for given, status in {
            "http://evil.example": 403, f"{own}1": 403, f"{own}/": 403, "null": 403, "": 403,
            "http://localhost:1": 403, "http://": 403, "file://": 403,
            own: 200, own.replace("http", "https").upper().replace("HTTPS", "https"): 200,
        }.items():  # fmt: skip
            body = {"prompt": "1", "max_tokens": 1}
            answer = served.http.post("/v1/completions", json=body, headers={"origin": given})
            assert answer.status_code == status, given
            if status == 403:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["code"] == "wrong_origin" and repr(given) in error["message"]
            assert "access-control-allow-origin" not in answer.headers
    with serving(tmp_path / "b", cors_origins=(origin,), api_key=KEY) as served:
        answer = httpx.options(served.server.url + "/v1/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        assert served.http.get("/v1/models", headers={"origin": origin}).status_code == 200
        other = httpx.get(served.server.url + "/health", headers={"origin": "https://evil.example"})
        assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
    with serving(tmp_path / "c", cors_origins=("*",)) as served:
        assert served.http.get("/health", headers={"origin": "null"}).status_code == 200


# Faults.


@pytest.mark.parametrize("error", [EngineError("it broke", hint="mend it"), RuntimeError("secret")])
@pytest.mark.parametrize("at", [0, 3])
def test_an_engine_that_fails(
    tmp_path: Path, error: Exception, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first token with a status of its own, then as an event of the stream."""
    count = [0]
    verify, prefill = Target.verify, Target.prefill

    def failing(inner: Any) -> Any:
        def run(self: Target, *arguments: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] > at:
                raise error
            return inner(self, *arguments, **named)

        return run

    with serving(tmp_path, opening={"verify": "engine"}) as served:
        with monkeypatch.context() as patch:
            patch.setattr(Target, "verify", failing(verify))
            patch.setattr(Target, "prefill", failing(prefill))
            shown = (
                "it broke (hint: mend it)" if isinstance(error, EngineError) else "internal error"
            )
            with pytest.raises(openai.InternalServerError) as whole:
                served.chat(max_tokens=9, **ALL)
            assert shown in str(whole.value) and "secret" not in str(whole.value)
            count[0] = 0
            pieces: list[str] = []
            with pytest.raises(openai.APIError) as streamed:
                for chunk in served.chat(max_tokens=9, stream=True, **ALL):
                    pieces.append(chunk.choices[0].delta.content)
            assert shown in streamed.value.message and "secret" not in streamed.value.message
            assert isinstance(streamed.value, openai.InternalServerError) == (at == 0)
            wanted = "" if at == 0 else served.alone.tokenizer.decode(TOY.plain(PROMPT, at))
            count[0] = -9999
            assert "".join(pieces) == wanted
        assert served.chat(max_tokens=9).usage.completion_tokens == 9
        assert served.metric("specrun_generations_total", outcome="error") == 2


# The end.


def test_closing_waits_for_those_that_run_and_then_does_not(tmp_path: Path) -> None:
    with serving(tmp_path, grace=0.3) as served:
        stream = long_stream(served)
        closing = threading.Thread(target=served.server.close)
        closing.start()
        until(lambda: not served.pool.alive)
        with pytest.raises(openai.APIError, match="the server is shutting down") as error:
            for _ in stream:
                pass
        assert error.value.code == "shutting_down"
        closing.join(30)
        assert not closing.is_alive()
        assert served.engine.generate(PROMPT, max_new_tokens=3).tokens == TOY.plain(PROMPT, 3)


def test_sigterm(tmp_path: Path) -> None:
    """The text at work comes to its end, then so does the process."""
    folder = toys.write_folder(tmp_path / "engines", TOY)
    environment = {**os.environ, "SPECRUN_API_KEY": KEY}
    command = [sys.executable, "-m", "specrun.cli", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving toy at http://127.0.0.1:"), line
        url = line.split()[3].rstrip(":")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "12312"}],
            stream=True,
            max_tokens=1000,
        )
        pieces = [next(stream).choices[0].delta.content or "" for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == "".join(map(str, TOY.plain(PROMPT, 1000)))
        assert process.wait(30) == 0
        assert process.stderr.read() == "the server has ended\n"
    finally:
        process.kill()
        process.wait()


def test_one_engine_has_one_server(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        with pytest.raises(UsageError, match="the engine is busy"):
            start(served.engine, ServeOptions(port=0))
        with pytest.raises(UsageError, match="the engine is busy"):
            served.engine.generate(PROMPT)
        port = int(served.server.url.rpartition(":")[2])
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1, port {port}: "):
            start(served.alone, ServeOptions(port=port))
        served.alone.generate(PROMPT, max_new_tokens=1)  # it was left free


# Settings.


@pytest.mark.parametrize(("wrong", "message"), [
    ({"port": 70_000}, "port: must be at most 65535"), ({"port": -1}, "port: must be a whole"),
    ({"max_batch": 0}, "max_batch: must be a whole number of at least 1"),
    ({"max_waiting": -1}, "max_waiting"), ({"max_body_bytes": 5}, "max_body_bytes"),
    ({"max_prompt_tokens": 0}, "max_prompt_tokens"), ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"timeout": 0}, "timeout: must be seconds above 0"), ({"grace": -1}, "grace: must be seconds"),
    ({"timeout": float("inf")}, "timeout"), ({"model_name": ""}, "model_name"),
    ({"api_key": ""}, "api_key"), ({"api_key": "a b"}, "api_key"), ({"api_key": "ä"}, "api_key"),
    ({"cors_origins": ("https://a.b/c",)}, "cors_origins"), ({"cors_origins": ("a.b",)}, "cors"),
    ({"host": "0.0.0.0"}, "host: on '0.0.0.0' others could use the server, and no API key is set"),
    ({"host": "::"}, "no API key"), ({"host": "example.org"}, "no API key"),
])  # fmt: skip
def test_settings_that_cannot_be_meant(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ServeOptions(**wrong)


def test_elsewhere_than_on_the_loopback() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.1.2.3", "::1", "[::1]")] == [True] * 4
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "a.localhost.b", ""))
    ServeOptions(host="0.0.0.0", api_key=KEY), ServeOptions(host="0.0.0.0", without_key=True)


# The command.


def test_the_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = toys.write_folder(tmp_path / "engines", TOY)
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    for arguments, message in (
        (["--host", "0.0.0.0"], "Error: --host: on '0.0.0.0' others could use the server"),
        (["--max-batch", "0"], "Error: --max-batch: must be a whole number of at least 1"),
        (["--api-key-file", str(tmp_path / "none")], "none: No such file or directory"),
        (["--api-key-file", str(tmp_path / "empty")], "api_key: must be 1 to 1024"),
        (["--cors-origin", "x"], "Error: --cors-origin: must be origins of pages, got 'x'"),
    ):
        result = CliRunner().invoke(main, ["serve", str(folder), *arguments])
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    # None in place of a module: it is not installed.
    for name in [name for name in sys.modules if name.startswith("specrun.serve.")]:
        if name not in ("specrun.serve.settings",):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(main, ["serve", str(folder)])
    assert result.exit_code == 2
    assert "serve: needs the extra 'serve'; not installed of it: uvicorn\n" in result.stderr
    assert 'hint: pip install "specrun[serve]"' in result.stderr
    monkeypatch.setitem(sys.modules, "fastapi", None)  # all that is missing is named
    result = CliRunner().invoke(main, ["serve", str(folder)])
    assert "not installed of it: fastapi, uvicorn\n" in result.stderr


def test_the_command_takes_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = toys.write_folder(tmp_path / "engines", TOY)
    (tmp_path / "key").write_text(f"{KEY}\n", encoding="utf-8")
    seen: list[Any] = []

    class Seen:
        model, url = "m", "http://h"

        def __init__(self, engine: specrun.Engine, settings: ServeOptions) -> None:
            seen.append((engine.options, settings))

        def __enter__(self) -> Seen:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self) -> None: ...

    monkeypatch.setattr("specrun.serve.server_class", lambda: Seen)
    given: dict[str, Any] = {
        "host": "0.0.0.0", "port": 1, "model_name": "x", "max_batch": 2, "max_waiting": 3,
        "timeout": 4.0, "max_new_tokens": 5, "max_prompt_tokens": 6, "max_body_bytes": 7777,
        "grace": 8.0,
    }  # fmt: skip
    flags = [text for n, v in given.items() for text in (f"--{n.replace('_', '-')}", str(v))]
    flags += ["--cors-origin", "https://a.b", "--cors-origin", "https://c.d", "--no-page"]
    flags += ["--access-log", "--threads", "1"]
    result = CliRunner().invoke(
        main, ["serve", str(folder), *flags, "--api-key-file", str(tmp_path / "key")]
    )
    assert result.exit_code == 0, result.output
    assert "serving m at http://h: OpenAI's API under /v1\n" in result.stderr
    origins = ("https://a.b", "https://c.d")
    more: dict[str, Any] = {
        "cors_origins": origins,
        "page": False,
        "access_log": True,
        "api_key": KEY,
    }
    assert seen[0][1] == ServeOptions(**given, **more)
    assert seen[0][0].threads == 1
    monkeypatch.setenv("SPECRUN_API_KEY", "other")
    assert CliRunner().invoke(main, ["serve", str(folder)]).exit_code == 0
    assert seen[1][1] == ServeOptions(api_key="other")
    monkeypatch.delenv("SPECRUN_API_KEY")
    result = CliRunner().invoke(main, ["serve", str(folder), "--host", "0.0.0.0", "--without-key"])
    assert "warning: everybody who reaches it may use it, without a key" in result.stderr
