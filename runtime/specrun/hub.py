"""Engine folders on the model hub: ``hf://ORG/NAME[@REVISION][/SUBFOLDER]``.

The manifest is fetched and read first, then the files that it lists and no others, into the hub's
own cache. Needs the package huggingface_hub, which is imported when an address is opened.
"""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from specrun import limits
from specrun.errors import FolderError, UsageError, install
from specrun.hub_errors import Words, check_space, explained

MANIFEST = "manifest.json"  # as in specrun.manifest, which takes longer to import
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SCHEME = re.compile(r"hf:/{1,2}(?!/)")  # a Path of an address has one slash less
_MEANT = re.compile(r"(?P<scheme>hf|https?):/{0,2}", re.IGNORECASE)
_ADDRESS = re.compile(
    r"(?:models/)?(?P<repo>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr/\d+|convert/[\w.-]+)|[^/@]+))?"  # some have a slash in them
    r"(?:/(?P<subfolder>.+))?"
)
_NO_MODELS = ("datasets", "spaces", "kernels", "buckets")
FORM = "an address is hf://ORG/NAME, hf://ORG/NAME@REVISION or hf://ORG/NAME/SUBFOLDER"
WORDS = Words(
    missing="no such model on the hub",
    token="set HF_TOKEN",
    instead="give the path of a local engine folder",
)


@dataclass(frozen=True)
class Address:
    """An engine folder on the hub. ``revision``: branch, tag or commit, None for the newest.

    ``subfolder``: path of the engine folder in the model, empty where it is the whole of it.
    """

    repo: str
    revision: str | None = None
    subfolder: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"hf://{self.repo}{revision}" + (f"/{self.subfolder}" if self.subfolder else "")

    def file(self, name: str) -> str:
        """The path in the model of a file of the engine folder."""
        return f"{self.subfolder}/{name}" if self.subfolder else name


@dataclass(frozen=True)
class Snapshot:
    """An engine folder in the hub's cache. ``address``: with the commit that it is at."""

    folder: Path
    address: Address


def is_address(folder: str | Path) -> bool:
    """Whether this is an address on the hub (``hf://``), not a path."""
    return _SCHEME.match(_posix(folder)) is not None


def parse(folder: str | Path) -> Address:
    """The parts of an address, also of one that went through a ``Path``. Raises UsageError."""
    rest = _SCHEME.sub("", _posix(folder), count=1)
    text = f"hf://{rest}"
    found = _ADDRESS.fullmatch(rest.rstrip("/"))
    if found is None or not HUB_ID.fullmatch(found["repo"]):
        raise UsageError(f"{text}: no address of a model on the hub", hint=FORM)
    if (kind := found["repo"].partition("/")[0]) in _NO_MODELS:
        raise UsageError(f"{text}: {kind} hold no engine folders", hint=FORM)
    revision = None if found["revision"] is None else unquote(found["revision"])
    subfolder = found["subfolder"] or ""
    if subfolder:
        try:
            limits.check_path(subfolder)
        except ValueError as error:
            raise UsageError(f"{text}: {error}", hint=FORM) from error
    return Address(found["repo"], revision, subfolder)


def located(folder: str | Path) -> Path:
    """The engine folder itself: a path as it is, of an address the snapshot, see `download`."""
    check_path(folder)
    return download(parse(folder)).folder if is_address(folder) else Path(folder)


def check_path(folder: str | Path) -> None:
    """Raise UsageError for what was meant as an address, and is neither one nor a folder here."""
    text = str(folder).replace("\\", "/")
    if is_address(folder) or (found := _MEANT.match(text)) is None or Path(folder).exists():
        return
    if not (rest := text[found.end() :]) or text[found.end("scheme") + 1] == "/":
        text = f"{found['scheme']}://{rest}"  # a Path of it has fewer slashes
    raise UsageError(f"{text}: no address of a model on the hub, and no folder", hint=FORM)


def download(address: Address) -> Snapshot:
    """Fetch what is not in the hub's cache yet. Tokens: HF_TOKEN, or the stored login.

    With ``HF_HUB_OFFLINE=1``, or where the hub cannot be reached, the cache is all there is.
    Raises FolderError: no such model, revision or manifest; not reachable; no room; a manifest that
    is none, or that speaks of other sizes than the hub.
    """
    _check_installed(address)
    try:
        return _fetched(address)
    except FolderError:
        raise
    except Exception as error:  # the client lets its HTTP library's errors through as well
        raise _explained(address, error) from error


def _posix(folder: str | Path) -> str:
    text = str(folder)
    return text.replace("\\", "/") if text.startswith("hf:") else text


def _check_installed(address: Address) -> None:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise FolderError(
            f"{address}: fetching it needs the package huggingface_hub, which is not installed",
            hint=f"{install('hub')}; or fetch the folder otherwise and give its path",
        )


def _fetched(address: Address) -> Snapshot:
    from specrun import manifest as manifests

    path, pinned = _manifest(address)
    text = manifests.read_listed(path, limits.MAX_MANIFEST_BYTES, path.parent)
    sizes = manifests.loads(text, f"{pinned}: {MANIFEST}").sizes
    if not all((path.parent / name).exists() for name in sizes):
        _fetch(pinned, sizes)
    return Snapshot(path.parent, pinned)


def _manifest(address: Address) -> tuple[Path, Address]:
    """The manifest in the cache, and the address with the commit that it is at."""
    import huggingface_hub as client

    file = address.file(MANIFEST)
    about: Any = client.hf_hub_download(address.repo, file, revision=address.revision, dry_run=True)
    if about.file_size > limits.MAX_MANIFEST_BYTES:
        raise FolderError(
            f"{address}: {file} has {about.file_size} bytes, at most {limits.MAX_MANIFEST_BYTES}"
            " are read",
            hint="give a folder that specexport wrote",
        )
    pinned = replace(address, revision=about.commit_hash)
    known = client.try_to_load_from_cache(address.repo, file, revision=address.revision)
    if isinstance(known, str) and _commit(known, file) == about.commit_hash:
        return Path(known), pinned
    # By the branch, not the commit: that is what the cache remembers when the hub is away.
    path = client.hf_hub_download(address.repo, file, revision=address.revision)
    return Path(path), replace(address, revision=_commit(path, file))


def _commit(path: str, file: str) -> str:
    """The commit of a file in the cache: the name of the snapshot it is in."""
    return Path(path).parents[file.count("/")].name


def _fetch(pinned: Address, sizes: Mapping[str, int]) -> None:
    """Fetch the files of these bytes, by path in the engine folder, or refuse to."""
    import huggingface_hub as client

    request: dict[str, Any] = {
        "revision": pinned.revision,
        "allow_patterns": [glob.escape(pinned.file(name)) for name in sizes],
    }
    try:
        there: Any = client.snapshot_download(
            pinned.repo, dry_run=True, tqdm_class=_silent_bar(), **request
        )
    except client.errors.DryRunError:  # the hub is away, which the download will say better
        there = []
    listed = {pinned.file(name): size for name, size in sizes.items()}
    for file in there:
        if file.file_size not in (None, listed[file.filename]):
            raise FolderError(
                f"{pinned}: {file.filename} must have {listed[file.filename]} bytes by the"
                f" manifest, on the hub it has {file.file_size}",
                hint="the folder was not uploaded as a whole: upload it again",
            )
    if problem := check_space(str(pinned), there):
        raise FolderError(problem[0], hint=problem[1])
    client.snapshot_download(pinned.repo, **request)


def _silent_bar() -> type[Any]:
    """A progress bar that shows nothing, for what takes a moment."""
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]

    return Silent


def _explained(address: Address, error: Exception) -> FolderError:
    from huggingface_hub import errors

    absent = errors.EntryNotFoundError
    if isinstance(error, absent) and not isinstance(error, errors.LocalEntryNotFoundError):
        return FolderError(
            f"{address}: has no {MANIFEST}, so it is no engine folder",
            hint="name the folder in it (hf://ORG/NAME/SUBFOLDER), or export the checkpoint with"
            " specexport",
        )
    message, hint = explained(str(address), error, WORDS)
    return FolderError(message, hint=hint)
