"""What goes wrong with the model hub, in one sentence and a way out; room for a download."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADROOM = 64 << 20  # bytes left free beside what is downloaded

Problem = tuple[str, str]  # message and hint


@dataclass(frozen=True)
class Words:
    """What is said of a kind of model. ``missing``: of a name that the hub does not know.

    ``elsewhere``: where else it was looked for, with ", " behind it. ``token``: how a token can be
    given. ``instead``: what helps where the hub is away.
    """

    missing: str
    token: str
    instead: str
    elsewhere: str = ""


def check_space(
    where: str, files: Iterable[Any], *, cache_dir: str | None = None
) -> Problem | None:
    """What is wrong if the disk of the hub's cache has less free than is to be downloaded.

    ``files``: as a dry run of the client lists them. ``cache_dir``: None is the client's own.
    """
    from huggingface_hub import constants

    needed = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(cache_dir or constants.HF_HUB_CACHE)
    there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not needed or free >= needed + HEADROOM:
        return None
    return (
        f"{where}: {needed / 1e9:.2f} GB are to be downloaded, {free / 1e9:.2f} GB are free"
        f" under {cache}",
        "free some space, or set HF_HUB_CACHE to a folder on another disk",
    )


def explained(where: str, error: Exception, words: Words) -> Problem:
    """What an error of the client means for ``where``, a name on the hub."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{where}: the model hub asks for its licence to be accepted first",
            "accept it on the model's page, then give a token of that account: log in with"
            f" `hf auth login`, or {words.token}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{where}: the model hub has no such revision",
            "its page lists branches, tags and commits; without one the newest is taken",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{where}: {words.missing}",
            f"check the name; of a private model log in with `hf auth login`, or {words.token}",
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return (
            f"{where}: {words.elsewhere}not in the cache, and HF_HUB_OFFLINE is set, so that the"
            " model hub could not be reached",
            f"unset HF_HUB_OFFLINE, or {words.instead}",
        )
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return (
        f"{where}: {words.elsewhere}not in the cache, and the model hub could not be reached"
        f" ({first_line.strip()})",
        f"check the connection and HF_HUB_OFFLINE, or {words.instead}",
    )
