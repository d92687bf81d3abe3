"""Fetches a checkpoint from the model hub, or says in one sentence why that failed."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from specexport.errors import SourceError
from specexport.tasks import MARKS
from specrun.hub import HUB_ID as HUB_ID
from specrun.hub_errors import Words, check_space, explained

WORDS = Words(
    missing="no folder of that name here, and no such model on the hub",
    token="set HF_TOKEN, or give --token",
    instead="give a local folder with the checkpoint",
    elsewhere="no folder of that name here, ",
)
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
EXTRAS = ("README.md", *MARKS)  # the licence, and whose model it is
NOT_NEEDED = ("*/*", "consolidated*")  # sub-folders hold other formats of the same weights


def download(
    repo: str,
    revision: str | None,
    *,
    token: str | None = None,
    config_only: bool = False,
    local_only: bool = False,
    cache_dir: str | None = None,
) -> tuple[Path, str | None]:
    """The folder with the checkpoint's needed files and the commit it is at.

    What is in the cache already is not downloaded again; with ``HF_HUB_OFFLINE=1`` only the cache
    is looked at. ``token``: None takes HF_TOKEN or the stored login, as the client does.
    ``config_only``: no weights and no tokenizer. ``local_only``: only the cache is looked at.
    ``cache_dir``: None is the client's own.
    Raises SourceError.
    """
    from huggingface_hub import snapshot_download

    request: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": list(CONFIGURATION if config_only else NEEDED),
        "ignore_patterns": list(NOT_NEEDED),
        "token": token,
        "local_files_only": local_only,
        "cache_dir": cache_dir,
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


def fetch_extras(
    repo: str, commit: str | None, *, token: str | None = None, cache_dir: str | None = None
) -> None:
    """Fetch what an export is better for and can do without, where that can be had."""
    from huggingface_hub import snapshot_download

    # Offline the cache may be whole but for these, and any other error was told of what is needed.
    with contextlib.suppress(Exception):
        snapshot_download(
            repo,
            revision=commit,
            allow_patterns=list(EXTRAS),
            ignore_patterns=list(NOT_NEEDED),
            token=token,
            cache_dir=cache_dir,
        )


def _check_space(repo: str, request: dict[str, Any]) -> None:
    """Raise SourceError where the hub names more bytes than the disk of the cache has free."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return
    try:
        files: Any = snapshot_download(repo, dry_run=True, **request)
        problem = check_space(repo, files, cache_dir=request["cache_dir"])
    except Exception:  # the download itself will say what is wrong, or find it all in the cache
        return
    if problem is not None:
        raise SourceError(problem[0], hint=problem[1])


def _explained(repo: str, revision: str | None, error: Exception) -> SourceError:
    where = repo if revision is None else f"{repo} at {revision}"
    message, hint = explained(where, error, WORDS)
    return SourceError(message, hint=hint)
