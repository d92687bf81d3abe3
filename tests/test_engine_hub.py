"""Engine folders on the model hub: uploaded and opened by the real client, on a server of our own.

The server speaks the hub's API on loopback (`loopback_hub`); nothing leaves this machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import loopback_hub
import pytest
import toys
from click.testing import CliRunner, Result
from loopback_hub import Hub

import specrun
from specexport.cli import main as specexport
from specrun import hub as engine_hub
from specrun import manifest
from specrun.cli import main
from specrun.errors import FolderError, SpecrunError, UsageError
from specrun.hub import Address, parse

TOKEN = "hf_secretsecretsecret"
TOY = toys.Toy(drafter=True)
PLAIN = TOY.plain([1, 2, 3], 8)
NOT_LISTED = {"README.md": "a card", "tuning.json": "{}", "notes/todo.txt": "mine"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The client asks our server, has no token and an empty cache."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    with loopback_hub.serving() as served:
        template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        disable_progress_bars()
        yield served
        enable_progress_bars()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Engines, and files beside them that the manifest does not list."""
    made = toys.write_folder(tmp_path / "engines", TOY)
    for name, text in NOT_LISTED.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text)
    return made


def tokens(where: str | Path) -> list[int]:
    with specrun.load(where, threads=1) as engine:
        return engine.generate([1, 2, 3], max_new_tokens=8, num_assistant_tokens=2).tokens


def refused(address: str, message: str, hint: str) -> None:
    with pytest.raises(FolderError, match=message) as caught:
        specrun.load(address)
    assert hint in str(caught.value.hint)
    assert TOKEN not in f"{caught.value} {caught.value.hint}"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


# Addresses.


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("hf://org/name", Address("org/name")),
        ("hf://org/name/", Address("org/name")),
        ("hf://models/org/name", Address("org/name")),
        ("hf://org/name@v1.0", Address("org/name", "v1.0")),
        ("hf://org/name@refs/pr/3/int8", Address("org/name", "refs/pr/3", "int8")),
        ("hf://org/name@feature%2Fx", Address("org/name", "feature/x")),
        ("hf://org/name/a/b", Address("org/name", None, "a/b")),
        ("hf://org/name@main/a@b", Address("org/name", "main", "a@b")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    """Also as a path, which has one slash less."""
    assert engine_hub.is_address(text) and parse(text) == address
    assert engine_hub.is_address(Path(text)) and parse(Path(text)) == address


@pytest.mark.parametrize(
    "text",
    ["hf://name", "hf://org/", "hf://org/name@", "hf://org/name@@x", "hf://-org/name", "hf://o/n/..",
     "hf://org/name//x", "hf://datasets/org/name", "hf://org/name/a*"],
)  # fmt: skip
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"^hf://") as caught:
        specrun.load(text)
    assert caught.value.hint == engine_hub.FORM


@pytest.mark.parametrize("path", ["engines", "./hf:/org/name", "/hf://x/y", "ftp://x/y", "hf/x/y"])
def test_paths_stay_paths(path: str) -> None:
    assert not engine_hub.is_address(path)
    with pytest.raises(FolderError, match="no such folder"):
        specrun.load(path)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("hf://", "hf://"),
        ("HF://org/x", "HF://org/x"),
        ("hf:org/x", "hf:org/x"),
        ("https://host/org/x", "https://host/org/x"),
        ("http://host", "http://host"),
    ],
)
def test_what_is_meant_as_an_address(given: str, told: str) -> None:
    """As a path, which has fewer slashes."""
    says = f"{told}: no address of a model on the hub, and no folder"
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        specrun.load(Path(given))
    assert caught.value.hint == engine_hub.FORM
    result = call("inspect", given)
    assert (result.exit_code, result.stderr) == (2, f"Error: {says}\nhint: {engine_hub.FORM}\n")


def test_a_folder_named_like_an_address(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rename(tmp_path / "hf:x")
    monkeypatch.chdir(tmp_path)
    with specrun.load("hf:x") as engine:
        assert engine.generate([1], max_new_tokens=1).tokens


# Up and down.


def test_a_folder_goes_up_as_it_is_and_is_opened_from_there(hub: Hub, folder: Path) -> None:
    """By upload_folder; what comes back is what the manifest lists, the manifest first."""
    from huggingface_hub import HfApi

    client = HfApi()
    client.create_repo("org/toy")
    commit = client.upload_folder(repo_id="org/toy", folder_path=folder).oid
    assert hub.repos["org/toy"].commits[commit] == loopback_hub.files_of(folder)

    hub.requests.clear()
    with specrun.load("hf://org/toy", threads=1) as engine:
        assert engine.folder.name == commit
        assert engine.generate([1, 2, 3], max_new_tokens=8).tokens == PLAIN
        there = {path.name: path.is_symlink() for path in engine.folder.iterdir()}
    listed = {manifest.MANIFEST, *engine.manifest.sizes}
    assert there == dict.fromkeys(listed, True)
    assert hub.fetched()[0] == manifest.MANIFEST
    assert sorted(hub.fetched()) == sorted(listed)


def test_what_is_in_the_cache_is_not_fetched_again(hub: Hub, folder: Path) -> None:
    """Of a branch it is asked which commit it is, of a commit nothing."""
    commit = hub.add("org/toy", folder)
    assert tokens("hf://org/toy") == PLAIN
    hub.requests.clear()
    assert tokens("hf://org/toy") == PLAIN
    assert hub.requests == [f"HEAD org/toy/resolve/main/{manifest.MANIFEST}"]
    hub.requests.clear()
    assert tokens(f"hf://org/toy@{commit}") == PLAIN
    assert hub.requests == []


def test_revisions_and_folders_within_a_model(hub: Hub, folder: Path, tmp_path: Path) -> None:
    other = toys.Toy(history_weight=1)
    toys.write_folder(tmp_path / "both" / "fast[1]", other)
    first = hub.add("org/toy", folder)
    second = hub.add("org/toy", tmp_path / "both")
    hub.repos["org/toy"].refs |= {"v1": first, "main": second}
    assert tokens("hf://org/toy@v1") == PLAIN
    hub.requests.clear()
    assert tokens("hf://org/toy/fast[1]") == other.plain([1, 2, 3], 8) != PLAIN
    assert all(name.startswith("fast[1]/") for name in hub.fetched())
    opened = engine_hub.download(parse("hf://org/toy@main/fast[1]"))
    assert str(opened.address) == f"hf://org/toy@{second}/fast[1]"
    assert opened.folder.parent.name == second


def test_a_branch_that_moved_on_is_followed(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add("org/toy", folder)
    assert tokens("hf://org/toy") == PLAIN
    other = toys.Toy(history_weight=1)
    hub.add("org/toy", toys.write_folder(tmp_path / "newer", other))
    assert tokens("hf://org/toy") == other.plain([1, 2, 3], 8)


# Offline.


def test_offline_the_cache_is_enough(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.add("org/toy", folder)
    tokens("hf://org/toy")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert tokens("hf://org/toy") == PLAIN
    refused(
        "hf://org/other", "hf://org/other: not in the cache, and HF_HUB_OFFLINE is set", "unset"
    )
    assert hub.requests == []


def test_offline_with_a_part_of_the_folder(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.add("org/toy", folder)
    (engine_hub.located("hf://org/toy") / "target.onnx").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("hf://org/toy", "not in the cache, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")


def test_where_the_hub_is_away_the_cache_is_enough(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.add("org/toy", folder)
    tokens("hf://org/toy")
    away = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"  # nobody listens there
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", away)
    assert tokens("hf://org/toy") == PLAIN


# What is refused.


def test_names_that_the_hub_does_not_know(hub: Hub, folder: Path) -> None:
    refused("hf://org/toy", "^hf://org/toy: no such model on the hub$", "check the name")
    hub.add("org/toy", folder)
    refused("hf://org/toy@v9", "^hf://org/toy@v9: the model hub has no such revision", "branches")
    refused("hf://org/toy/sub", "has no manifest.json, so it is no engine folder", "hf://ORG/NAME/")


def test_private_and_gated_models(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/private", folder, token=TOKEN)
    hub.add("org/gated", folder, token=TOKEN, gated=True)
    refused("hf://org/private", "no such model on the hub", "or set HF_TOKEN")
    refused("hf://org/gated", "asks for its licence to be accepted first", "or set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.tokens.clear()
    assert tokens("hf://org/private") == tokens("hf://org/gated") == PLAIN
    assert hub.tokens == {TOKEN}


def test_a_manifest_that_is_none_ends_it(hub: Hub, folder: Path) -> None:
    """Before anything else is fetched."""
    data = json.loads((folder / manifest.MANIFEST).read_text())
    (folder / manifest.MANIFEST).write_text(json.dumps(data | {"extra": 1}))
    hub.add("org/toy", folder)
    refused("hf://org/toy", r"hf://org/toy@[0-9a-f]{40}: manifest.json: .*'extra'", "export")
    data["files"][0]["path"] = "../../../outside"
    (folder / manifest.MANIFEST).write_text(json.dumps(data))
    hub.add("org/toy", folder)
    refused("hf://org/toy", "path must stay inside the folder", "export")
    assert hub.fetched() == [manifest.MANIFEST] * 2


def test_a_manifest_without_end_is_not_fetched(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrun import limits

    monkeypatch.setattr(limits, "MAX_MANIFEST_BYTES", 100)
    hub.add("org/toy", folder)
    refused("hf://org/toy", r"manifest.json has \d+ bytes, at most 100 are read", "specexport")
    assert hub.fetched() == []


def test_files_of_another_size_than_listed_are_not_fetched(hub: Hub, folder: Path) -> None:
    with (folder / "target.onnx").open("ab") as file:
        file.write(b"more")
    hub.add("org/toy", folder)
    refused(
        "hf://org/toy", r"target.onnx must have \d+ bytes by the manifest, on", "upload it again"
    )
    assert hub.fetched() == [manifest.MANIFEST]


def test_a_file_that_is_not_there_is_told(hub: Hub, folder: Path) -> None:
    (folder / "target.onnx").unlink()
    hub.add("org/toy", folder)
    refused("hf://org/toy", "target.onnx: the manifest lists it, it is missing", "export")


def test_a_file_that_was_changed_is_told(hub: Hub, folder: Path) -> None:
    """Of the same size: what the hub serves is checked as any other folder."""
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    hub.add("org/toy", folder)
    refused("hf://org/toy", "tokenizer.json: changed since the export", "export")


@pytest.mark.filterwarnings("ignore:Not enough free disk space")  # the client's own, of a part
def test_no_room(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/toy", folder)
    room = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    refused("hf://org/toy", "are to be downloaded, 0.00 GB are free under", "HF_HUB_CACHE")
    assert hub.fetched() == [manifest.MANIFEST]


def test_without_the_client_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("hf://org/toy", "needs the package huggingface_hub", "pip install 'specrun[hub]', or")


# Links of the cache.


def cached(folder: Path, cache: Path, *, shared: bool) -> Path:
    """A snapshot as the client leaves it; ``shared``: contents in the store of all models."""
    model = cache / "models--org--toy"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for path in folder.iterdir():
        if path.is_file():
            blob = model / "blobs" / path.name[::-1]
            if shared:
                store = cache / "blobs" / "00" / path.name
                store.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, store)
                blob.symlink_to(f"../../blobs/00/{path.name}")
            else:
                shutil.copyfile(path, blob)
            (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


@pytest.mark.parametrize("shared", [False, True])
def test_a_snapshot_is_opened_by_its_path(folder: Path, tmp_path: Path, shared: bool) -> None:
    assert tokens(cached(folder, tmp_path / "cache", shared=shared)) == PLAIN


def test_links_of_a_snapshot_lead_to_contents_only(folder: Path, tmp_path: Path) -> None:
    snapshot = cached(folder, tmp_path / "cache", shared=False)
    file = snapshot / "target.onnx"
    for outside in (
        tmp_path / "outside",
        snapshot.parents[1] / "refs" / "x",
        tmp_path / "cache" / "x",
    ):
        outside.parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / file.name, outside)
        file.unlink()
        file.symlink_to(outside)
        with pytest.raises(FolderError, match=r"target\.onnx: leads out of the engine folder"):
            specrun.load(snapshot)


@pytest.mark.parametrize("change", ["snapshots", "models--org--toy", "0" * 40])
def test_only_a_snapshot_has_contents_elsewhere(folder: Path, tmp_path: Path, change: str) -> None:
    snapshot = cached(folder, tmp_path / "cache", shared=False)
    place = next(path for path in (snapshot, *snapshot.parents) if path.name == change)
    place.rename(place.with_name("other"))
    moved = Path(str(snapshot).replace(change, "other"))
    with pytest.raises(FolderError, match="leads out of the engine folder"):
        specrun.load(moved)


# Commands.


def test_run_says_which_commit_on_stderr(hub: Hub, folder: Path) -> None:
    commit = hub.add("org/toy", folder)
    given = ("hf://org/toy", "--prompt", "a", "--raw", "-n", 4)
    result = call(*given)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith(f"hf://org/toy@{commit}: ")
    local = call(folder, *given[1:])
    assert local.stdout == result.stdout != ""
    assert call(*given, "-q").stderr == ""


def test_in_a_process_of_its_own_there_is_one_line_on_stderr(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    """No bars where nobody looks at a terminal; the client is set up by its environment."""
    commit = hub.add("org/toy", folder)
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "specrun.cli", "hf://org/toy", "-p", "a", "--raw", "-n", "4"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(command, env=outside | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    snapshot = tmp_path / "home" / "hub" / "models--org--toy" / "snapshots" / commit
    assert done.stderr == f"hf://org/toy@{commit}: {snapshot}\n"
    assert done.stdout == call(folder, "-p", "a", "--raw", "-n", 4).stdout != ""


@pytest.mark.parametrize(
    "arguments",
    [("inspect",), ("bench", "--rounds", 1, "-n", 4, "--prompt-file", "p.txt"), ("tune",)],
)
def test_every_command_that_takes_a_folder(
    arguments: tuple[object, ...], hub: Hub, folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("abc")
    monkeypatch.setattr("specrun.tune.SECONDS", 0.01)
    commit = hub.add("org/toy", folder)
    name, *options = arguments
    result = call(name, "hf://org/toy", *options)
    assert result.exit_code == 0, result.output
    assert f"hf://org/toy@{commit}: " in result.stderr


def test_errors_of_the_hub_end_a_command_with_one_line(hub: Hub) -> None:
    result = call("hf://org/toy", "--prompt", "a")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "Error: hf://org/toy: no such model on the hub"
    result = call("inspect", "hf://toy")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == "Error: hf://toy: no address of a model on the hub"


def test_plans_are_not_built_into_the_cache(hub: Hub, folder: Path) -> None:
    hub.add("org/toy", folder)
    given = ["build", "hf://org/toy", "--backend", "tensorrt-rtx"]
    result = CliRunner().invoke(specexport, given)
    assert result.exit_code == 2
    assert "hf download ORG/NAME --local-dir DIR" in result.stderr
    assert hub.requests == []


def test_errors_are_specruns_own() -> None:
    assert issubclass(FolderError, SpecrunError)
