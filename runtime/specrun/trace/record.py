"""A generation as data: every token with its origin, every round, and what ran it."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun import __version__
from specrun.decode import encode
from specrun.identity import Identity
from specrun.judge import TokenLogprob
from specrun.loop import Round
from specrun.origin import ORIGINS, Origin, of_round
from specrun.pages import files
from specrun.result import Result
from specrun.spelling import names
from specrun.stats import Counts, Stats
from specrun.trace.spans import spans
from specrun.tuning import Machine, this_machine

if TYPE_CHECKING:
    from specrun.engine import Engine

FORMAT = 1


@dataclass(frozen=True)
class TracedToken:
    """A new token. ``text``: what it added to the text; ``group``: index of the first of the tokens
    that became text together. ``round``: index of its round, None for the first token, which the
    prompt gave, and where the generation broke off before its last round was told.
    ``logprob``, ``top``: as in :class:`specrun.judge.TokenLogprob`, None where not asked for.
    """

    id: int
    text: str
    group: int
    origin: Origin
    round: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TracedRound:
    """A round. ``first``: index of its first token, of ``emitted``. ``proposal[accepted:]`` are the
    drafts that were rejected; ``token`` is the target's own. See :class:`specrun.Round`."""

    num_draft: int
    proposal: tuple[int, ...]
    accepted: int
    token: int
    first: int
    emitted: int
    draft_seconds: float
    verify_seconds: float

    @property
    def rejected(self) -> tuple[int, ...]:
        """Drafts that the target refused, those behind the end of the text not among them."""
        whole = self.emitted > self.accepted
        return self.proposal[self.accepted :] if whole else ()


@dataclass(frozen=True)
class Trace:
    """``created``: ISO 8601, UTC. ``names``: every id in it as it is written alone.
    ``engine``, ``options``: as they took effect. ``error``: what ended it, if an error did."""

    format: int
    specrun: str
    created: str
    folder: Identity
    machine: Machine
    engine: dict[str, Any]
    options: dict[str, Any]
    prompt: str | None
    text: str
    finish_reason: str
    error: str | None
    stats: Stats
    tokens: tuple[TracedToken, ...]
    rounds: tuple[TracedRound, ...]
    names: dict[int, str]

    @property
    def origins(self) -> dict[Origin, int]:
        """How many tokens came from where.

        A draft that the end of the text cut counts here as ``accepted``; in the statistics the last
        token of such a round is the round's own.
        """
        found = Counter(token.origin for token in self.tokens)
        return {origin: found[origin] for origin in ORIGINS}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**encode(self), "stats": self.stats.as_dict(), "origins": encode(self.origins)}


def make(
    engine: Engine,
    result: Result,
    rounds: Sequence[Round],
    *,
    prompt: str | None = None,
    error: str | None = None,
) -> Trace:
    """The trace of ``result``, of whose rounds the last one may be missing."""
    import onnxruntime

    found = _tokens(engine, result, rounds)
    traced, first = [], 1
    for done in rounds:
        traced.append(_round(done, first))
        first += len(done.emitted)
    options = engine.options
    assert options.threads is not None, "resolved when the folder was opened"
    now = datetime.datetime.now(datetime.UTC)
    return Trace(
        format=FORMAT,
        specrun=__version__,
        created=now.isoformat(timespec="seconds"),
        folder=Identity.of(engine.folder, engine.manifest, result.stats.method),
        machine=this_machine(
            threads=options.threads, device=options.device, onnxruntime=onnxruntime.__version__
        ),
        engine=encode(options),
        options=encode(result.options),
        prompt=prompt,
        text=result.text,
        finish_reason=result.finish_reason,
        error=error,
        stats=result.stats,
        tokens=found,
        rounds=tuple(traced),
        names=names(engine.tokenizer, _ids(found, traced)),
    )


def write_json(path: str | Path, trace: Trace) -> None:
    """Write a trace as JSON, complete or not at all. Raises UsageError where that cannot be."""
    text = json.dumps(trace.as_dict(), ensure_ascii=False, allow_nan=False, indent=1)
    files.write(Path(path), text + "\n")


def _tokens(engine: Engine, result: Result, rounds: Sequence[Round]) -> tuple[TracedToken, ...]:
    origins: list[Origin] = []
    places: list[int | None] = []
    if result.tokens:
        origins, places = ["plain"], [None]
    for index, done in enumerate(rounds):
        origins += of_round(done)
        places += [index] * len(done.emitted)
    untold = _untold(result.stats, rounds)
    origins += untold
    places += [None] * len(untold)
    texts = spans(engine.tokenizer, result.tokens, result.text)
    logprobs: Sequence[TokenLogprob | None] = result.logprobs or [None] * len(result.tokens)
    return tuple(
        TracedToken(
            id=id_,
            text=span.text,
            group=span.group,
            origin=origin,
            round=place,
            logprob=None if given is None else given.logprob,
            top=() if given is None else given.top,
        )
        for id_, span, origin, place, given in zip(
            result.tokens, texts, origins, places, logprobs, strict=True
        )
    )


def _untold(stats: Stats, rounds: Sequence[Round]) -> list[Origin]:
    """Origins of the tokens of a last round that was counted and not told, from the counts."""
    if stats.rounds == len(rounds):
        return []
    told = [
        Counts.of(done.num_draft, len(done.proposal), done.accepted, len(done.emitted))
        for done in rounds
    ]
    accepted = stats.accepted_by_round[-1]
    drafted = stats.drafted - sum(counts.drafted for counts in told)
    discarded = stats.discarded - sum(counts.discarded for counts in told)
    own: Origin = "plain"
    if discarded:  # the text ended inside the drafts
        own = "accepted"
    elif drafted:
        own = "bonus" if drafted == accepted else "correction"
    drafts: list[Origin] = ["accepted"] * accepted
    return [*drafts, own]


def _round(done: Round, first: int) -> TracedRound:
    return TracedRound(
        num_draft=done.num_draft,
        proposal=done.proposal,
        accepted=done.accepted,
        token=done.token,
        first=first,
        emitted=len(done.emitted),
        draft_seconds=done.draft_seconds,
        verify_seconds=done.verify_seconds,
    )


def _ids(tokens: Iterable[TracedToken], rounds: Iterable[TracedRound]) -> set[int]:
    found = {done.token for done in rounds}
    for token in tokens:
        found.add(token.id)
        found.update(id_ for id_, _ in token.top)
    for done in rounds:
        found.update(done.proposal)
    return found
