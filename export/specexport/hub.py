"""Fetches a checkpoint from the model hub, or says in one sentence why that failed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from specexport.errors import SourceError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NEEDED = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
CONFIGURATION = ("config.json", "generation_config.json")
NOT_NEEDED = ("*/*", "consolidated*")  # sub-folders hold other formats of the same weights


HEADROOM = 64 << 20  # bytes left free beside what is downloaded


def download(
    repo: str,
    revision: str | None,
    *,
    token: str | None = None,
    config_only: bool = False,
    local_only: bool = False,
) -> tuple[Path, str | None]:
    """The folder with the checkpoint's needed files and the commit it is at.

    What is in the cache already is not downloaded again; with ``HF_HUB_OFFLINE=1`` only the cache
    is looked at. ``token``: None takes HF_TOKEN or the stored login, as the client does.
    ``config_only``: no weights and no tokenizer. ``local_only``: only the cache is looked at.
    Raises SourceError.
    """
    from huggingface_hub import snapshot_download

    request: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": list(CONFIGURATION if config_only else NEEDED),
        "ignore_patterns": list(NOT_NEEDED),
        "token": token,
        "local_files_only": local_only,
    }
    try:
        if not config_only and not local_only:
            _check_space(repo, request)
        folder = Path(snapshot_download(repo, **request))
    except SourceError:
        raise
    except Exception as error:  # the client lets its HTTP library's errors through as well
        if local_only:
            where = repo if revision is None else f"{repo} at {revision}"
            raise SourceError(
                f"{where}: not in the cache of the model hub on this machine",
                hint="download it first, for example with `hf download`",
            ) from error
        raise _explained(repo, revision, error) from error
    commit = folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else revision
    return folder, commit


def _check_space(repo: str, request: dict[str, Any]) -> None:
    """Raise SourceError where the hub names more bytes than the disk of the cache has free."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return
    try:
        files: Any = snapshot_download(repo, dry_run=True, **request)
        needed = sum(file.file_size or 0 for file in files if file.will_download)
    except Exception:  # the download itself will say what is wrong, or find it all in the cache
        return
    cache = Path(constants.HF_HUB_CACHE)
    there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed and free < needed + HEADROOM:
        raise SourceError(
            f"{repo}: {needed / 1e9:.2f} GB are to be downloaded, {free / 1e9:.2f} GB are free"
            f" under {cache}",
            hint="free some space, or set HF_HUB_CACHE to a folder on another disk",
        )


def _explained(repo: str, revision: str | None, error: Exception) -> SourceError:
    from huggingface_hub import constants, errors

    where = repo if revision is None else f"{repo} at {revision}"
    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            f"{where}: the model hub asks for its licence to be accepted first",
            hint="accept it on the model's page, then give a token of that account: log in with"
            " `hf auth login`, set HF_TOKEN, or give --token",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(
            f"{where}: the model hub has no such revision",
            hint="its page lists branches, tags and commits; without one the newest is taken",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            f"{where}: no folder of that name here, and no such model on the hub",
            hint="check the name; a private model needs `hf auth login`, HF_TOKEN or --token",
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return SourceError(
            f"{where}: no folder of that name here, not in the cache, and HF_HUB_OFFLINE is set,"
            " so that the model hub could not be reached",
            hint="unset HF_HUB_OFFLINE, or give a local folder with the checkpoint",
        )
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return SourceError(
        f"{where}: no folder of that name here, not in the cache, and the model hub could not be"
        f" reached ({first_line.strip()})",
        hint="check the connection and HF_HUB_OFFLINE, or give a local folder with the checkpoint",
    )
