"""The FOLDER of a command, which may be an address on the model hub."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from specrun.hub import check_path, download, is_address, parse


def located(folder: Path, *, quiet: bool = False) -> Path:
    """The engine folder; of an address the snapshot, fetched with progress on stderr.

    Which commit that is stands on stderr too, unless ``quiet``. Raises UsageError, FolderError.
    """
    check_path(folder)
    if not is_address(folder):
        return folder
    if quiet or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    snapshot = download(parse(folder))
    if not quiet:
        click.echo(f"{snapshot.address}: {snapshot.folder}", err=True)
    return snapshot.folder
