"""What ``--trace`` adds to a command that generates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.errors import UsageError
from specrun.pages import files

if TYPE_CHECKING:
    from specrun.engine import Engine
    from specrun.stream import TextStream
    from specrun.trace import Recorder

ALTERNATIVES = 5  # log-probabilities that a trace asks for
ENDINGS = (*files.PAGE, ".json")

trace_option = click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write where each token came from: a page (.html) or data (.json). Asks for"
    f" --logprobs {ALTERNATIVES} unless given.",
)


class Tracing:
    """Writes what a recorder saw, however the generation ends.

    Raises UsageError at once where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        files.check("--trace", path, ENDINGS)
        from specrun.trace import Recorder

        self._path = path
        self.recorder: Recorder = Recorder()

    @contextlib.contextmanager
    def of(
        self, engine: Engine, stream: TextStream, prompt: str, warn: Callable[[str], None]
    ) -> Iterator[None]:
        """Write when ``stream`` is through, or when something ends it: then what there is.

        A file that cannot be written is a warning then, as the error itself counts for more.
        """
        try:
            yield
        except BaseException as error:
            said = None
            if isinstance(error, Exception):
                said = str(error) or type(error).__name__
            try:
                self._write(engine, stream, prompt, said)
            except UsageError as failure:
                warn(str(failure))
            raise
        self._write(engine, stream, prompt, None)

    def _write(self, engine: Engine, stream: TextStream, prompt: str, error: str | None) -> None:
        from specrun import trace

        result = stream.partial
        if result.finish_reason not in ("error", "cancelled"):
            error = None  # it came behind the text, as where nobody reads what is written
        found = self.recorder.trace(engine, result, prompt=prompt, error=error)
        write = trace.write_json if self._path.suffix.lower() == ".json" else trace.write_page
        write(self._path, found)
