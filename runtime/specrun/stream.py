"""A generation as pieces of text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator

from specrun.errors import UsageError
from specrun.generation import Generation
from specrun.process import Closing, Turn
from specrun.result import Result


class TextStream(Closing, Iterator[str]):
    """Pieces of text as they are committed; ``result`` when they are through.

    The engine is busy from the first piece until the stream ends or is closed. ``partial`` is what
    was committed so far, at any time and from any thread: also when an error has ended the stream.
    """

    def __init__(
        self,
        pieces: Generator[str, None, Result],
        generation: Generation,
        check_process: Callable[[], None],
    ) -> None:
        self._pieces = pieces
        self._generation = generation
        self._check_process = check_process
        self._turn = Turn()

    def __next__(self) -> str:
        with self._alone():
            return self._next()

    @property
    def result(self) -> Result:
        """The whole generation. Raises UsageError unless the stream has ended by itself."""
        if self._generation.finished:
            return self.partial
        if self.partial.finish_reason == "unfinished":
            raise UsageError("result: the stream has not ended", hint="iterate over it first")
        raise UsageError(
            "result: the stream was closed, or an error ended it",
            hint="its attribute partial has what was generated until then",
        )

    @property
    def partial(self) -> Result:
        """What was committed so far.

        ``finish_reason`` is "unfinished" while it goes on, "cancelled" when the stream was closed
        or interrupted, "error" when something was raised, else that of ``result``.
        """
        return self._generation.partial

    @property
    def tokens(self) -> list[int]:
        """The ids that were committed so far, those of ``partial``."""
        return self._generation.tokens

    def drain(self) -> Result:
        """Take all pieces that are left and return the result."""
        with self._alone():
            try:
                while True:
                    self._next()
            except StopIteration:
                pass
            except BaseException as error:  # were it between two pieces
                self._end(error)
                raise
        return self.result

    def close(self) -> None:
        """End the generation here and free the engine. What was committed stays in ``partial``.

        Raises UsageError while another thread is at work on it.
        """
        with self._alone():
            self._end(GeneratorExit())

    def _next(self) -> str:
        self._check_process()
        try:
            return next(self._pieces)
        except StopIteration:
            raise StopIteration from None
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException) -> None:
        self._generation.abandon(error)
        self._pieces.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._turn.held(
            "the stream is at work, in another thread or in what called this callback",
            "iterate in one thread; a CancelToken ends the generation from any other",
        ):
            yield
