"""Where each token of a text came from, for whoever shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from specrun.loop import Round

Origin = Literal["plain", "accepted", "correction", "bonus"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)


def of_round(done: Round) -> tuple[Origin, ...]:
    """One for each token that the round emitted.

    ``accepted``: a draft that the target agreed with; ``correction``: the target's own token in
    place of the draft it rejected; ``bonus``: its own behind a proposal that stood as a whole;
    ``plain``: its own where nothing was proposed.
    """
    kept = len(done.emitted)
    found: list[Origin] = ["accepted"] * min(done.accepted, kept)
    if kept > done.accepted:  # not cut before the target's own token
        if not done.proposal:
            found.append("plain")
        else:
            found.append("bonus" if done.accepted == len(done.proposal) else "correction")
    return tuple(found)


def origins(rounds: Iterable[Round]) -> list[Origin]:
    """Of all tokens of a generation, from its rounds in their order.

    The first token, which reading the prompt gave, is in no round; it is ``plain``.
    """
    return ["plain", *(origin for done in rounds for origin in of_round(done))]
