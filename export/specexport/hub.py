"""Fetches a checkpoint from the model hub, or says in one sentence why that failed."""

from __future__ import annotations

import re
from pathlib import Path

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
NOT_NEEDED = ("*/*", "consolidated*")  # sub-folders hold other formats of the same weights


def download(repo: str, revision: str | None) -> tuple[Path, str | None]:
    """The folder with the checkpoint's needed files and the commit it is at.

    What is in the cache already is not downloaded again; with ``HF_HUB_OFFLINE=1`` only the cache
    is looked at. Raises SourceError.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(NEEDED),
                ignore_patterns=list(NOT_NEEDED),
            )
        )
    except Exception as error:  # the client lets its HTTP library's errors through as well
        raise _explained(repo, revision, error) from error
    commit = folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else revision
    return folder, commit


def _explained(repo: str, revision: str | None, error: Exception) -> SourceError:
    from huggingface_hub import errors

    where = repo if revision is None else f"{repo} at {revision}"
    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            f"{where}: the model hub asks for its licence to be accepted first",
            hint="accept it on the model's page, log in with `hf auth login`, and try again",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(f"{where}: the model hub has no such revision")
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            f"{where}: no folder of that name here, and no such model on the hub",
            hint="check the name; a private model needs `hf auth login`",
        )
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return SourceError(
        f"{where}: no folder of that name here, not in the cache, and the model hub could not be"
        f" reached ({first_line.strip()})",
        hint="check the connection and HF_HUB_OFFLINE, or give a local folder with the checkpoint",
    )
