"""What transformers drafts with the MTP layers of a tiny checkpoint.

``Loop`` is transformers' own candidate generator; ``naive_drafts`` is the obviously correct twin
that starts from an empty cache for every proposal, and also applies the last layer again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

Drafts = tuple[list[int], NDArray[np.float32]]  # tokens, logits [count, vocabulary]


def load(path: Path, layers: int | None = None) -> Any:
    """The target in fp32, told where its MTP layers stand; ``layers``: use only so many."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    config = model.config
    if layers is not None:
        config.num_mtp_layers = layers
    if config.model_type != "mellum":  # whose layers have a prefix of their own
        first = config.num_hidden_layers
        numbers = range(first, first + config.num_mtp_layers)
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{n}\." for n in numbers]
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def hidden_rows(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Hidden states after the final norm, ``[1, len(tokens), hidden size]``."""
    out = model(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
    rows: torch.Tensor = out.hidden_states[-1]
    return rows


class Loop:
    """MTPCandidateGenerator, fed with whatever was accepted."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = transformers.GenerationConfig(do_sample=False)
        self.generator = MTPCandidateGenerator(model, config, {})
        self.seen = 0

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], accepted: int) -> Drafts:
        """After ``tokens``, of which the last round's proposal gave ``accepted`` and one more."""
        rows = hidden_rows(self.model, tokens[:-1])
        outputs = SimpleNamespace(hidden_states=(rows[:, self.seen :],))
        self.seen = len(tokens) - 1
        ids, logits = self.generator.get_candidates(
            torch.tensor([list(tokens)]),
            model_kwargs={"position_ids": torch.arange(len(tokens))[None]},
            model_outputs=outputs,
            is_first_iteration=False,
            n_last_matches=accepted,
        )
        assert logits is not None
        return ids[0, len(tokens) :].tolist(), logits[0].numpy()


@torch.no_grad()
def naive_drafts(model: Any, mtp: Any, tokens: Sequence[int], count: int) -> Drafts:
    """``count`` drafts after ``tokens``, from nothing but ``tokens``."""
    hidden = hidden_rows(model, tokens[:-1])
    ids = torch.tensor([list(tokens[1:])])
    positions = torch.arange(1, len(tokens))[None]
    cache = MtpCache(config=mtp.config)
    drafted: list[int] = []
    scores = []
    for step in range(count):
        layer = min(step, len(mtp.layers) - 1)
        hidden = mtp.forward_layer(layer, hidden, positions, cache, input_ids=ids)
        logits = mtp.shared_head(hidden[:, -1])
        drafted.append(int(logits.argmax()))
        scores.append(logits[0].numpy())
        ids = torch.cat([ids[:, 1:], logits.argmax(-1, keepdim=True)], dim=1)
        positions = positions + 1
        if step + 1 >= len(mtp.layers):  # the next row of the last layer is behind the others
            hidden, ids, positions = hidden[:, -1:], ids[:, -1:], positions[:, -1:]
    return drafted, np.stack(scores)


def load_mtp(model: Any) -> Any:
    """The MTP layers around ``model``, loaded by transformers."""
    return MtpModel.from_pretrained(model).eval()


@torch.no_grad()
def generate(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[list[int]]]:
    """Greedy ``generate(use_mtp=True)``: the new tokens, and the proposal of every round."""
    proposals: list[list[int]] = []
    original = MTPCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ids, logits = original(self, input_ids, *args, **kwargs)
        if ids.shape[1] > input_ids.shape[1]:
            proposals.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    MTPCandidateGenerator.get_candidates = spy
    try:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            use_mtp=True,
        )
    finally:
        MTPCandidateGenerator.get_candidates = original
    return out[0, len(prompt) :].tolist(), proposals
