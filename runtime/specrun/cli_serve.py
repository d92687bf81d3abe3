"""The command ``specrun serve``."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click

from specrun.cli_errors import reports_errors
from specrun.cli_folder import located
from specrun.cli_options import engine_options, opening_options
from specrun.errors import UsageError
from specrun.reading import ReadingError, read_text
from specrun.serve.settings import MAX_KEY, ServeOptions

SERVE = ServeOptions()
KEY_VARIABLE = "SPECRUN_API_KEY"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--host", default=SERVE.host, show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=int, default=SERVE.port, show_default=True, help="Port there; 0: a free one."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help=f"File with the key that requests must bring.  [default: ${KEY_VARIABLE}, or none]",
)
@click.option(
    "--without-key", is_flag=True, help="Let everybody who reaches another host than loopback ask."
)
@click.option(
    "--model-name", default=SERVE.model_name, help="Name of the model.  [default: the manifest's]"
)
@click.option(
    "--max-batch",
    type=int,
    default=SERVE.max_batch,
    show_default=True,
    help="Requests that run at once, in turn, each with KV buffers of its own.",
)
@click.option(
    "--max-waiting",
    type=int,
    default=SERVE.max_waiting,
    show_default=True,
    help="Requests that wait for those; more get status 429.",
)
@click.option(
    "--timeout",
    type=float,
    default=SERVE.timeout,
    show_default=True,
    metavar="SECONDS",
    help="Most from the arrival of a request to the end of its text.",
)
@click.option(
    "-n",
    "--max-new-tokens",
    type=int,
    default=SERVE.max_new_tokens,
    help="Where a request does not say.  [default: the checkpoint's, or what fits]",
)
@click.option(
    "--max-prompt-tokens",
    type=int,
    default=SERVE.max_prompt_tokens,
    help="Longest prompt.  [default: the context]",
)
@click.option(
    "--max-body-bytes",
    type=int,
    default=SERVE.max_body_bytes,
    show_default=True,
    help="Largest request.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help="Whose pages a browser lets ask here, or *; repeatable.  [default: none]",
)
@click.option(
    "--grace",
    type=float,
    default=SERVE.grace,
    show_default=True,
    metavar="SECONDS",
    help="That requests at work have to end after SIGTERM or Ctrl-C.",
)
@click.option("--page/--no-page", default=SERVE.page, help="Serve a chat page at /.")
@click.option("--access-log", is_flag=True, help="Write a line per request to stderr.")
@engine_options
@reports_errors
def serve(folder: Path, api_key_file: Path | None, **given: Any) -> None:
    """Serve the engines in FOLDER to OpenAI's clients and, at /, to a browser.

    Needs the extra serve. Requests that arrive together take turns, round by round. SIGTERM and
    Ctrl-C let those at work end.

    \b
    Examples:
      specrun serve engines/
      specrun serve engines/ --port 9000 --max-batch 2 --max-waiting 8 --timeout 120
      specrun serve engines/ --host 0.0.0.0 --api-key-file key.txt
    """
    opening = opening_options(given)
    names = ServeOptions.__dataclass_fields__.keys() & given.keys()
    settings = ServeOptions(**{name: given[name] for name in names}, api_key=_key(api_key_file))
    import specrun
    from specrun.serve import server_class

    folder = located(folder)
    level = logging.INFO if settings.access_log else logging.WARNING
    logging.basicConfig(format="%(levelname)s: %(message)s", level=level)
    make = server_class()
    with specrun.load(folder, options=opening) as engine, make(engine, settings) as made:
        if not settings.loopback and settings.api_key is None:
            click.echo("warning: everybody who reaches it may use it, without a key", err=True)
        page = ", a chat page at /" if settings.page else ""
        click.echo(f"serving {made.model} at {made.url}: OpenAI's API under /v1{page}", err=True)
        made.run()
    click.echo("the server has ended", err=True)


def _key(file: Path | None) -> str | None:
    """The key, which stands on no command line, where others would see it."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        return read_text(file, MAX_KEY + 2).strip()
    except (ReadingError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--api-key-file: {file}: {why}", hint="give a file with one line: the key"
        ) from error
