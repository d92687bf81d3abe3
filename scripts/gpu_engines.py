"""The checks of one open engine folder against its reference from the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import gpu_observe
import numpy as np
from gpu_observe import GREEDY, SHORT, Arrays, Text
from gpu_verdict import Found
from numpy.typing import NDArray

import specrun
from specrun.contract import Part, past
from specrun.kv import KvBuffers

Open = Callable[[], AbstractContextManager[specrun.Engine]]
NOISE = 4.0  # times what the width of a block changes is a tie
LIKE_REFERENCE = 0.9  # share of rounds that must draft what the reference drafts, before any tie
REWOUND = 12  # tokens behind the place that a session is rewound to
OPENED = 3  # times that a folder is opened again


@dataclass(frozen=True)
class Case:
    """A folder and what is expected of it. ``tolerance``: largest difference of a logit over the
    largest logit. ``likeness``: share of rounds that draft what the reference does. ``size``: of
    the vocabulary."""

    name: str
    methods: tuple[str, ...]
    reference: tuple[Arrays, dict[str, list[Text]]]
    tolerance: float
    num_draft: int
    size: int
    likeness: float = LIKE_REFERENCE


def check(case: Case, open_: Open, found: Found) -> None:
    """Logits, rollback, KV, every method, rewinding, and opening again."""
    with open_() as engine:
        tie = _check_logits(case, engine, found)
        _check_kv(case, engine, found)
        _check_texts(case, engine, tie, found)
        found.notes.append(f"{case.name}: {engine_name(engine)}")
    _check_opening(case, open_, found)


def engine_name(engine: specrun.Engine) -> str:
    """What ran the target, as statistics show it."""
    made = engine.generate([0, 1], method="plain", **GREEDY | {"max_new_tokens": 1})
    return made.stats.provider


def _check_logits(case: Case, engine: specrun.Engine, found: Found) -> float:
    """Against the reference; returns how close two logits must be for a tie."""
    got, want = gpu_observe.logits(engine.target, case.size), case.reference[0]
    for name, values in want.items():
        error = relative_error(got[name], values)
        found.at_most(error, case.tolerance, f"{case.name}: logits of {name}")
        found.keep_worst("worst logit (relative)", error)
    again = relative_error(got["after a rollback"], got["5 rows"])
    found.at_most(again, case.tolerance, f"{case.name}: 5 rows after a rollback")
    widths = np.abs(got["17 rows"] - got["one by one"]).max()
    largest = np.abs(want["17 rows"]).max()
    found.at_most(float(widths / largest), case.tolerance, f"{case.name}: 17 rows and single rows")
    return float(min(2 * case.tolerance * largest, NOISE * widths))


def _check_kv(case: Case, engine: specrun.Engine, found: Found) -> None:
    """A step writes its own rows into the buffers that are there, and no others."""
    target, length, rows = engine.target, 40, 5
    text = np.array([gpu_observe.tokens(length + rows, case.size)], dtype=np.int64)
    target.truncate(0)
    target.prefill(text[:, :length])
    before = _buffers(target.kv)
    target.verify(text[:, length:])
    for name, values in _buffers(target.kv).items():
        where = f"{case.name}: {name}"
        old, new = before[name][:, :, :length], values[:, :, :length]
        found.expect(np.array_equal(old, new), f"{where}: a step changed rows that stand")
        written = values[:, :, length : length + rows]
        found.expect(bool(written.any(-1).all()), f"{where}: a step left rows of its own empty")
        old, new = (x[:, :, length + rows :] for x in (before[name], values))
        found.expect(np.array_equal(old, new), f"{where}: a step wrote behind its rows")
    target.truncate(0)


def _buffers(kv: KvBuffers) -> Arrays:
    """Copies of all buffers."""
    names = [past(layer.layer, part) for layer in kv.layers for part in Part]
    return {n: np.array(kv.read_rows(n, 0, kv.capacity)) for n in names}


def _check_texts(case: Case, engine: specrun.Engine, tie: float, found: Found) -> None:
    got = gpu_observe.texts(engine, case.methods, case.num_draft, case.size)
    rows = gpu_observe.leads(engine, case.size, got["plain"])
    for prompt, (plain, values) in enumerate(zip(got["plain"], rows, strict=True)):
        where = f"{case.name}: plain, prompt {prompt}"
        looped = [int(token) for token in values.argmax(-1)]
        check_tokens(looped, plain.tokens, values, tie, f"{where}, token by token", found)
        slack = 2 * case.tolerance * float(np.abs(values).max())
        wanted = case.reference[1]["plain"][prompt].tokens
        check_tokens(plain.tokens, wanted, values, slack, f"{where}, reference", found)
    for method in case.methods:
        if method == "plain":
            continue
        for prompt, made in enumerate(got[method]):
            where, values = f"{case.name}: {method}, prompt {prompt}", rows[prompt]
            check_tokens(made.tokens, got["plain"][prompt].tokens, values, tie, where, found)
        _check_drafts(case, method, got[method], found)
    _check_session(case, engine, (got["plain"][1], rows[1]), tie, found)


def check_tokens(
    got: Sequence[int],
    want: Sequence[int],
    logits: NDArray[np.float32],
    tie: float,
    what: str,
    found: Found,
) -> None:
    """Equal, or other from a token on where the two are within ``tie``. ``logits``
    ``[count, vocabulary]``: of the text up to there."""
    if len(got) != len(want):
        found.failures.append(f"{what}: {len(got)} tokens instead of {len(want)}")
        return
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if ours == theirs:
            continue
        gap = abs(float(logits[index, ours] - logits[index, theirs]))
        if gap <= tie:
            found.keep_worst("ties", found.figures.get("ties", 0) + 1)
        else:
            found.failures.append(
                f"{what}: token {index} is {ours} instead of {theirs}, logits differ by {gap:.2e}"
            )
        return  # from here on the texts are different ones


def _check_drafts(case: Case, method: str, got: Sequence[Text], found: Found) -> None:
    """Verification hides a drafter that is wrong: its drafts must be those of the reference."""
    same = rounds = 0
    for ours, theirs in zip(got, case.reference[1][method], strict=True):
        for before, drafts in ours.drafts.items():
            if theirs.drafts.get(before) and ours.tokens[:before] == theirs.tokens[:before]:
                rounds += 1
                same += drafts == theirs.drafts[before]
    share = same / max(1, rounds)
    what = f"{case.name}: {method}: {same} of {rounds} rounds draft what the reference does"
    found.expect(share >= case.likeness, f"{what}, at least {case.likeness:.0%} must")
    found.figures[f"{method} acceptance"] = float(np.mean([one.acceptance for one in got]))


def _check_session(
    case: Case,
    engine: specrun.Engine,
    plain: tuple[Text, NDArray[np.float32]],
    tie: float,
    found: Found,
) -> None:
    """Rewound into its own text, a session says the same again. ``plain``: text and logits behind
    the second prompt."""
    prompt, method, kept = gpu_observe.tokens(SHORT[1], case.size), case.methods[-1], 5
    with engine.session() as session:
        session.append(prompt)
        session.generate(method=method, **GREEDY)
        session.rewind(len(prompt))
        session.append(plain[0].tokens[:kept])
        again = session.generate(method=method, **GREEDY | {"max_new_tokens": REWOUND}).tokens
        session.check_integrity()
    what, end = f"{case.name}: {method}, session rewound", kept + REWOUND
    check_tokens(again, plain[0].tokens[kept:end], plain[1][kept:end], tie, what, found)


def _check_opening(case: Case, open_: Open, found: Found) -> None:
    prompt = gpu_observe.tokens(SHORT[0], case.size)
    said = []
    for _ in range(OPENED):
        with open_() as engine:
            said.append(gpu_observe.text(engine, prompt, "plain", case.num_draft).tokens)
    found.expect(
        all(one == said[0] for one in said), f"{case.name}: opened {OPENED} times, texts differ"
    )


def relative_error(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    """Largest difference over the largest wanted value; infinite where anything is not finite."""
    if got.shape != want.shape:
        return float("inf")
    error = float(np.abs(got - want).max() / max(float(np.abs(want).max()), 1e-30))
    return error if np.isfinite(error) else float("inf")
