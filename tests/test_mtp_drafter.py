"""The MTP drafter's draws, on a toy engine whose distribution is known in closed form.

A toy's candidates stand behind the last token, with logits that are the same in every step. That
the real engine picks what these tests take for granted is in test_architectures.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from numpy.typing import NDArray
from toys import Toy

from specrun import manifest as manifests
from specrun.contract import MTP_DRAFTER_ENGINE, TARGET_ENGINE
from specrun.drafters.base import Proposal
from specrun.drafters.mtp import Draws, MtpDrafter
from specrun.errors import EngineError
from specrun.ort import open_session
from specrun.processors import Temperature
from specrun.runner import Session
from specrun.sampling import Sampler
from specrun.target import Target

LOGITS = (2.0, 1.5, 1.5, -0.5)
TOY = Toy(drafter=True, drafter_logits=LOGITS)
PROMPT = [3, 4, 5]  # the drafter starts behind 6
RUNS = 4000


class Pair:
    """Both engines of a toy; the target has read the prompt and said its token."""

    def __init__(self, folder: Path, toy: Toy = TOY, draws: Draws = "sampled") -> None:
        toys.write_folder(folder, toy)
        engines = manifests.read(folder).engines

        def session(name: str) -> Session:
            return open_session(folder / engines[name].file, engines[name], threads=1)

        self.target = Target(session(TARGET_ENGINE), engines[TARGET_ENGINE], max_context=64)
        spec = engines[MTP_DRAFTER_ENGINE]
        self.drafter = MtpDrafter(
            session(MTP_DRAFTER_ENGINE), spec, self.target.kv, max_num_draft=8, draws=draws
        )
        self.drafter.begin(PROMPT)
        rows = self.target.prefill(np.array([PROMPT]))
        self.drafter.observe([int(rows.argmax[0, 0])], rows.hidden[0])


def softmax(temperature: float = 1.0, logits: tuple[float, ...] = LOGITS) -> NDArray[np.float64]:
    """The toy's distribution, candidate by candidate."""
    weights = np.exp(np.array(logits) / temperature)
    made: NDArray[np.float64] = weights / weights.sum()
    return made


def sampler(temperature: float = 1.0, **options: Any) -> Sampler:
    """One that samples at ``temperature``."""
    return Sampler(do_sample=True, warpers=[Temperature(temperature)], **{"seed": 0, **options})


def places(proposal: Proposal) -> tuple[int, ...]:
    """Which candidate each draft was."""
    before = [6, *proposal.tokens]
    return tuple((new - old - 1) % 10 for old, new in itertools.pairwise(before))


def test_greedy(tmp_path: Path) -> None:
    """The first of the largest logits, without q: it is certain."""
    pair = Pair(tmp_path)
    assert pair.drafter.propose(4, Sampler()) == Proposal([7, 8, 9, 0])
    tied = Pair(tmp_path / "tied", Toy(drafter=True, drafter_logits=(1.0, 1.0)))
    assert places(tied.drafter.propose(3, Sampler())) == (0, 0, 0)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_samples_follow_q(tmp_path: Path, temperature: float) -> None:
    """Chi-square of all pairs of drafts against the exact law; q is that law, in both slots."""
    pair = Pair(tmp_path)
    draws = sampler(temperature)
    seen: Counter[tuple[int, ...]] = Counter()
    q = softmax(temperature)
    for _ in range(RUNS):
        proposal = pair.drafter.propose(2, draws)
        first, second = places(proposal)
        seen[first, second] += 1
        assert proposal.q is not None
        for before, given in zip((6, proposal.tokens[0]), proposal.q, strict=True):
            tokens = [(before + 1 + place) % 10 for place in range(len(LOGITS))]
            np.testing.assert_allclose([given.of(token) for token in tokens], q, rtol=1e-12)
            assert given.dense(10).sum() == pytest.approx(1)
    expected = {(i, j): RUNS * q[i] * q[j] for i in range(4) for j in range(4)}
    cells = [(seen[place], want) for place, want in expected.items() if want >= 5]
    rest = [(seen[place], want) for place, want in expected.items() if want < 5]
    cells.append((sum(s for s, _ in rest), sum(w for _, w in rest)))
    chi_square = sum((s - w) ** 2 / w for s, w in cells if w > 0)
    assert chi_square < 40  # 99.9 % quantile for the 15 degrees that there are at most: 37.7
    assert len(seen) > 3


def test_greedy_after_sampling(tmp_path: Path) -> None:
    """Noise of a run does not stay in the buffer."""
    pair = Pair(tmp_path)
    hot = sampler(50.0)
    assert len({tuple(pair.drafter.propose(4, hot).tokens) for _ in range(20)}) > 10
    assert pair.drafter.propose(4, Sampler()).tokens == [7, 8, 9, 0]


def test_argmax_when_sampling(tmp_path: Path) -> None:
    """Certain drafts; but with a q they must be drawn from it."""
    pair = Pair(tmp_path, draws="argmax")
    draws = sampler(50.0)
    assert pair.drafter.propose(4, draws) == Proposal([7, 8, 9, 0])
    asked = sampler(50.0, keep_q=True)
    found = [pair.drafter.propose(4, asked) for _ in range(20)]
    assert len({tuple(proposal.tokens) for proposal in found}) > 10
    assert all(proposal.q is not None for proposal in found)


def test_q_of_greedy_drafts(tmp_path: Path) -> None:
    """The ensemble mixes with the softmax that the draft is the argmax of."""
    proposal = Pair(tmp_path).drafter.propose(2, Sampler(keep_q=True))
    assert proposal.tokens == [7, 8]
    assert proposal.q is not None and len(proposal.q) == 2
    first = proposal.q[0]
    assert first.ids is not None and first.ids.tolist() == [0, 7, 8, 9]  # ascending
    assert [first.of(token) for token in (7, 8, 9, 0)] == pytest.approx(softmax().tolist())
    assert first.of(6) == 0
    assert first.argmax() == 7


def test_confidence(tmp_path: Path) -> None:
    """A proposal ends behind its first draft below the threshold, and keeps that draft."""
    pair = Pair(tmp_path)
    best = float(softmax()[0])
    for threshold, length in ((best - 1e-3, 4), (best + 1e-3, 1)):
        greedy = Sampler(confidence_threshold=threshold)
        assert pair.drafter.propose(4, greedy) == Proposal([7, 8, 9, 0][:length])
    draws = sampler(confidence_threshold=best - 1e-3)
    lengths = set()
    for _ in range(50):
        proposal = pair.drafter.propose(4, draws)
        assert proposal.q is not None and len(proposal.q) == len(proposal.tokens)
        doubtful = [place > 0 for place in places(proposal)]
        assert not any(doubtful[:-1])
        assert len(doubtful) == 4 or doubtful[-1]
        lengths.add(len(doubtful))
    assert lengths == {1, 2, 3, 4}


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1e35, float("inf")])
def test_extreme_temperatures(tmp_path: Path, temperature: float) -> None:
    """Near 0 the ties are still drawn fairly; far above everything is as likely."""
    toy = Toy(drafter=True, drafter_logits=(2.0, 2.0, -1.0))
    pair = Pair(tmp_path, toy)
    draws = sampler(min(temperature, 3e38))
    seen: Counter[int] = Counter()
    for _ in range(400):
        proposal = pair.drafter.propose(1, draws)
        assert proposal.q is not None and np.isfinite(proposal.q[0].probs).all()
        seen.update(places(proposal))
    if temperature > 1:
        assert min(seen[place] for place in range(3)) > 80
    else:
        assert seen[2] == 0
        assert temperature < 1e-40 or min(seen[0], seen[1]) > 120


def test_tokens_that_do_not_exist(tmp_path: Path) -> None:
    """-inf marks them: probability 0, also in q; a step without any token drafts nothing."""
    toy = Toy(drafter=True, drafter_logits=(1.0, 0.0, -np.inf))
    pair = Pair(tmp_path / "some", toy)
    for _ in range(50):
        proposal = pair.drafter.propose(3, sampler(5.0))
        assert set(places(proposal)) <= {0, 1}
        assert proposal.q is not None
        assert all(q.ids is not None and q.ids.size == 2 for q in proposal.q)
    nothing = Pair(tmp_path / "none", Toy(drafter=True, drafter_logits=(-np.inf, -np.inf)))
    assert nothing.drafter.propose(3, sampler()) == Proposal([], [])


def test_logits_that_are_no_numbers(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Toy(drafter=True, drafter_logits=(np.nan, 1.0)))
    with pytest.raises(EngineError, match=r"mtp_drafter\.onnx: logits are not finite"):
        pair.drafter.propose(2, sampler())


def test_seeds(tmp_path: Path) -> None:
    """The sampler's generator draws, and only when sampling; numpy's global one is untouched."""
    pair = Pair(tmp_path)
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    once, again, other = (
        [pair.drafter.propose(4, draws).tokens for _ in range(8)]
        for draws in (sampler(2.0), sampler(2.0), sampler(2.0, seed=1))
    )
    assert once == again != other
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # type: ignore[index]
    still = sampler()
    Pair(tmp_path / "argmax", draws="argmax").drafter.propose(4, still)
    assert still.rng.random() == sampler().rng.random()


def test_last_row_counts(tmp_path: Path) -> None:
    """Of several committed tokens the drafter goes on behind the last, with its row."""
    pair = Pair(tmp_path)
    rows = pair.target.verify(np.array([[6, 7]]))
    pair.drafter.observe([7, 8], rows.hidden[0])
    assert pair.drafter.propose(2, Sampler()).tokens == [9, 0]
