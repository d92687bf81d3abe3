"""The model hub's API on this machine's loopback, as far as its client uses it for one folder.

What the real client sends is answered as the hub does: models with commits, branches and files,
uploads, gated and private models, tokens. ``Hub.requests`` has what was asked for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Repo:
    """One model: branch or commit -> files. ``token``: who may read it, None for everybody."""

    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False

    def commit(self, files: Files, branch: str = "main") -> str:
        """Add the files to the branch; returns the new commit."""
        before = self.commits.get(self.refs.get(branch, ""), {})
        after = {**before, **files}
        digest = hashlib.sha1(repr(sorted(after.items())).encode()).hexdigest()
        self.commits[digest] = after
        self.refs[branch] = digest
        return digest

    def find(self, revision: str) -> str | None:
        """The commit of a branch or commit."""
        commit = self.refs.get(revision, revision)
        return commit if commit in self.commits else None


@dataclass
class Hub:
    """What the server holds and what it was asked."""

    endpoint: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def add(self, name: str, folder: Path, **options: Any) -> str:
        """A model with the files of a folder; returns its commit."""
        repo = self.repos.setdefault(name, Repo(**options))
        return repo.commit(files_of(folder))

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        gets = [line.split(" ", 1)[1] for line in self.requests if line.startswith("GET ")]
        return [
            path.split("/resolve/", 1)[1].split("/", 1)[1] for path in gets if "/resolve/" in path
        ]


def files_of(folder: Path) -> Files:
    """Every file of a folder by its path in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@contextmanager
def serving() -> Iterator[Hub]:
    """A server on a free port, in a thread."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.hub.requests.append(f"{self.command} {path}")
        authorization = self.headers.get("Authorization")
        token = None if authorization is None else authorization.removeprefix("Bearer ")
        self.hub.tokens.add(token)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.hub.repos.setdefault(name, Repo())
            self._json({"url": f"{self.hub.endpoint}/{name}", "name": name})
        elif path == "api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path.startswith("api/models/"):
            name, _, rest = _cut(path.removeprefix("api/models/"))
            if (repo := self._repo(name, token, reads_files=False)) is not None:
                self._api(name, repo, rest, body)
        else:
            name, _, rest = _cut(path)
            if (repo := self._repo(name, token, reads_files=True)) is not None:
                self._file(repo, *rest.removeprefix("resolve/").split("/", 1))

    def _repo(self, name: str, token: str | None, *, reads_files: bool) -> Repo | None:
        """The model, or None where an error was answered."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.token is not None and not repo.gated and token != repo.token):
            self._error(401 if token is None else 404, "RepoNotFound")
            return None
        if repo.gated and reads_files and token != repo.token:
            self._error(401 if token is None else 403, "GatedRepo")
            return None
        return repo

    def _api(self, name: str, repo: Repo, rest: str, body: bytes) -> None:
        what, _, behind = rest.partition("/")
        if what == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in files
            ]
            self._json({"files": modes})
            return
        if what == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            values = [line["value"] for line in lines if line["key"] == "file"]
            commit = repo.commit({v["path"]: base64.b64decode(v["content"]) for v in values})
            url = f"{self.hub.endpoint}/{name}/commit/{commit}"
            self._json({"success": True, "commitUrl": url, "commitOid": commit})
            return
        revision = behind.split("/")[0] if what in ("revision", "tree") else "main"
        found = repo.find(revision)
        if found is None:
            self._error(404, "RevisionNotFound")
        elif what == "tree":
            self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}
                    for path, data in repo.commits[found].items()
                ]
            )
        else:
            self._json({"id": name, "sha": found, "private": False, "tags": [], "siblings": []})

    def _file(self, repo: Repo, revision: str, path: str) -> None:
        commit = repo.find(revision)
        if commit is None:
            self._error(404, "RevisionNotFound")
            return
        data = repo.commits[commit].get(path)
        if data is None:
            self._error(404, "EntryNotFound", {"X-Repo-Commit": commit})
            return
        self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{_oid(data)}"'})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        told = {"X-Error-Code": code, "X-Error-Message": code}
        self._send(status, json.dumps({"error": code}).encode(), told | (headers or {}))

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _cut(path: str) -> tuple[str, str, str]:
    """ORG/NAME and what stands behind it."""
    organisation, _, behind = path.partition("/")
    name, slash, rest = behind.partition("/")
    return f"{organisation}/{name}", slash, rest


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
