"""How many drafts of the MTP drafter stand when sampling, by each way to draft, by computation.

    python scripts/drafter_sampling.py
    python scripts/drafter_sampling.py --engines engines/ --tokens 32 --drafts 4

Exports gemma4-tiny (unless ``--engines`` is given) and lets the target sample a text behind every
prompt of ``tests/data/prompts.json``. After each of its tokens every way drafts and the target
verifies. With p its processed distribution, d what draft x was drawn from and q what it is said to
have been drawn from::

    sampled        d = q = softmax(logits / temperature)
    argmax         d = q = one-hot
    transformers   d = one-hot, q = softmax(logits), which is wrong (its Gemma 4 path, 5.24)

    stands[i]  = sum over x of d_i(x) min(1, p_i(x) / q_i(x))    the chance of draft i, once reached
    reach[i]   = prod over j < i of min(1, p_j(x_j) / q_j(x_j))  the chance that it is reached
    bias       = TV(p_0, sum over x of d_0(x) (a(x) onehot(x) + (1 - a(x)) residual(p_0, q_0)))

By position stands the mean of ``reach * stands`` over that of ``reach``; then the tokens per round
that follow, 1 + sum of ``reach * stands``, the mean bias of the first slot, 0 where it follows the
target, and the median milliseconds of a drafter call. Nothing is accepted or rejected by chance, so
some hundred contexts give two digits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import check_tiny
import numpy as np

import specrun
from specrun import manifest as manifests
from specrun import processors
from specrun.accept import acceptance, residual
from specrun.contract import MTP_DRAFTER_ENGINE, TARGET_ENGINE
from specrun.drafters.base import Proposal
from specrun.drafters.mtp import Draws, MtpDrafter
from specrun.ort import open_session
from specrun.runner import Session
from specrun.sampling import Distribution, Sampler
from specrun.target import Target


class Way(NamedTuple):
    """How to draft. ``says_softmax``: the argmax is said to be a sample of the softmax."""

    name: str
    draws: Draws
    says_softmax: bool = False


WAYS = (Way("sampled", "sampled"), Way("argmax", "argmax"), Way("transformers", "argmax", True))


class Setting(NamedTuple):
    """What the target samples with."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    def sampler(self, vocab_size: int, prompt_length: int, seed: int) -> Sampler:
        """A sampler of its own."""
        made = processors.build(
            vocab_size=vocab_size, prompt_length=prompt_length, do_sample=True, **self._asdict()
        )
        return Sampler(do_sample=True, seed=seed, processors=made.processors, warpers=made.warpers)

    def __str__(self) -> str:
        rest = "" if self.top_k == 0 else f" top_k {self.top_k} top_p {self.top_p}"
        return f"temperature {self.temperature}{rest}"


SETTINGS = (
    *(Setting(temperature) for temperature in (0.1, 0.3, 0.7, 1.0, 1.3)),
    *(Setting(temperature, 64, 0.95) for temperature in (0.3, 0.7, 1.0)),
    Setting(1.0, 5, 0.8),
)


@dataclass
class Sums:
    """Over all contexts, by position of the draft."""

    reach: list[float]
    stood: list[float]
    contexts: int = 0
    bias: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def add(self, way: Way, proposal: Proposal, p: Sequence[Distribution]) -> None:
        """One context: what was drafted, and the target's distribution at every slot."""
        reach = 1.0
        self.contexts += 1
        for slot, token in enumerate(proposal.tokens):
            fixed = Distribution.one_hot(token)
            q = fixed if proposal.q is None else proposal.q[slot]
            drawn = fixed if way.says_softmax else q
            self.reach[slot] += reach
            self.stood[slot] += reach * stands(p[slot], q, drawn)
            if slot == 0:
                self.bias += bias(p[slot], q, drawn)
            reach *= acceptance(token, p[slot], q)

    def line(self) -> str:
        """Acceptance by position, tokens per round, bias, milliseconds per call."""
        by_position = zip(self.stood, self.reach, strict=True)
        rates = "".join(f"{stood / reach:8.3f}" for stood, reach in by_position)
        per_round = 1 + sum(self.stood) / self.contexts
        milliseconds = 1e3 * float(np.median(self.seconds))
        return f"{rates}{per_round:9.3f}{self.bias / self.contexts:8.4f}{milliseconds:7.2f}"


def stands(p: Distribution, q: Distribution, drawn: Distribution) -> float:
    """The chance that a draft of ``drawn``, said to be of ``q``, is accepted."""
    ids = drawn.ids
    assert ids is not None
    taken = [acceptance(int(token), p, q) if q.of(int(token)) > 0 else 0.0 for token in ids]
    return float(np.dot(drawn.probs, taken))


def bias(p: Distribution, q: Distribution, drawn: Distribution) -> float:
    """Total variation between ``p`` and the token that rejection sampling gives."""
    ids = drawn.ids
    assert ids is not None
    size = max(p.size, q.size)
    emitted = (1 - stands(p, q, drawn)) * residual(p, q).dense(size)
    for token, chance in zip(ids.tolist(), drawn.probs.tolist(), strict=True):
        emitted[token] += chance * (acceptance(token, p, q) if q.of(token) > 0 else 0.0)
    return float(np.abs(emitted - p.dense(size)).sum() / 2)


class Pair:
    """The engines of a folder."""

    def __init__(self, folder: Path) -> None:
        self.manifest = manifests.read(folder)
        engines = self.manifest.engines

        def session(name: str) -> Session:
            return open_session(folder / engines[name].file, engines[name], threads=1)

        self.target = Target(
            session(TARGET_ENGINE),
            engines[TARGET_ENGINE],
            max_context=self.manifest.generation.max_context,
        )
        drafting = session(MTP_DRAFTER_ENGINE)
        self.drafters = {
            way: MtpDrafter(
                drafting,
                engines[MTP_DRAFTER_ENGINE],
                self.target.kv,
                max_num_draft=self.manifest.drafters["mtp-drafter"].max_num_draft,
                draws=way.draws,
            )
            for way in WAYS
        }

    def walk(
        self, prompt: Sequence[int], sampler: Sampler, tokens: int, drafts: int
    ) -> Iterator[tuple[Way, float, Proposal, list[Distribution]]]:
        """Sample ``tokens`` tokens behind ``prompt``. After each: every way, the seconds that it
        took, what it drafted and the target's distribution at every slot."""
        target = self.target
        target.truncate(0)
        text = list(prompt)
        rows = target.prefill(np.array([text]), want_logits=True)
        for _ in range(tokens):
            assert rows.logits is not None
            p = sampler.distribution(np.array(text), rows.logits[0, 0])
            text.append(sampler.draw_from(p))
            hidden = rows.hidden[0, :1].copy()
            length = target.length
            for way, drafter in self.drafters.items():
                drafter.observe(text[-1:], hidden)
                start = time.perf_counter()
                greedy = Sampler(keep_q=True)
                proposal = drafter.propose(drafts, greedy if way.says_softmax else sampler)
                seconds = time.perf_counter() - start
                rows = target.verify(np.array([[text[-1], *proposal.tokens]]), want_logits=True)
                found = list(self._distributions(text, proposal, rows, sampler))
                yield way, seconds, proposal, found
                target.truncate(length)
            # The row of the new token is the same in every block.
            target.kv.advance(1)

    @staticmethod
    def _distributions(
        text: Sequence[int], proposal: Proposal, rows: Any, sampler: Sampler
    ) -> Iterator[Distribution]:
        for slot in range(len(proposal.tokens)):
            prefix = np.array([*text, *proposal.tokens[:slot]])
            yield sampler.distribution(prefix, rows.logits[0, slot])


def measure(
    pair: Pair, prompts: Sequence[Sequence[int]], setting: Setting, tokens: int, drafts: int
) -> dict[Way, Sums]:
    """The sums of every way over samples behind all prompts."""
    sums = {way: Sums([0.0] * drafts, [0.0] * drafts) for way in WAYS}
    vocab_size = pair.manifest.target_engine.vocab_size
    for seed, prompt in enumerate(prompts):
        sampler = setting.sampler(vocab_size, len(prompt), seed)
        for way, seconds, proposal, p in pair.walk(prompt, sampler, tokens, drafts):
            sums[way].seconds.append(seconds)
            sums[way].add(way, proposal, p)
    return sums


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=Path, help="an engine folder of gemma4-tiny")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per prompt")
    parser.add_argument("--drafts", type=int, default=4, help="drafts per round")
    options = parser.parse_args(arguments)
    texts = json.loads(check_tiny.PROMPTS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.engines or check_tiny.export(Path(scratch) / "engines")
        with specrun.load(folder) as engine:
            prompts = [engine.encode(text) for text in texts]
        pair = Pair(folder)
        positions = "".join(f"{f'draft {i + 1}':>8}" for i in range(options.drafts))
        print(f"{len(prompts)} prompts, {options.tokens} tokens sampled behind each")
        print(f"{'':36}{'drafts':13}{positions}{'a round':>9}{'bias':>8}{'time':>7}")
        for setting in SETTINGS:
            for way, sums in measure(
                pair, prompts, setting, options.tokens, options.drafts
            ).items():
                print(f"{setting!s:36}{way.name:13}{sums.line()}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
