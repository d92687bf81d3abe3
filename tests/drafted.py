"""Runs of a tiny assistant's engine, and what transformers' assistant drafts in the same state."""

from __future__ import annotations

from typing import Any

import numpy as np
from exported import Exported, Pair, reference
from numpy.typing import NDArray

from specexport.numbers import relative_error
from specgraphs import assistant
from specrun import contract
from specrun.contract import MTP_DRAFTER_ENGINE, Part, past
from specrun.target import Target


def draft(
    made: Exported,
    target: Target,
    token: int,
    hidden: NDArray[Any],
    count: int,
    noise: NDArray[np.float32] | None = None,
) -> dict[str, NDArray[Any]]:
    """One run of the drafter engine on the target's KV; all its outputs."""
    spec = made.manifest.engines[MTP_DRAFTER_ENGINE]
    assert spec.mtp is not None
    session = made.session(MTP_DRAFTER_ENGINE)
    names = [output.name for output in spec.outputs]
    kv = {past(kv.layer, part) for kv in spec.kv for part in Part}
    silence = np.zeros((1, count, spec.mtp.candidates), np.float32)
    outputs = session.raw.run(
        names,
        {
            contract.TOKEN: np.array([[token]]),
            contract.HIDDEN: hidden[None, None].astype("f4"),
            contract.PAST_LENGTH: target.kv.lengths,
            contract.NUM_DRAFT: np.array(count),
            contract.NOISE: silence if noise is None else noise,
            **{name: target.kv.arrays[name] for name in kv},
        },
    )
    return dict(zip(names, outputs, strict=True))


def reference_draft(
    pair: Pair, tokens: list[int], length: int, count: int, forced: list[int] | None = None
) -> tuple[list[int], NDArray[np.float32]]:
    """The reference's own loop on the committed rows: tokens and logits of every step.

    ``forced``: what to go on with instead of the argmax.
    """
    import torch

    model, drafting = reference(pair[0]), reference(str(pair[1]))
    with torch.no_grad():
        out = model(
            torch.tensor([tokens[:length]]),
            use_cache=False,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )
        token, hidden = torch.tensor([[tokens[length]]]), out.hidden_states[-1][:, -1:]
        drafted, logits = [], []
        for index in range(count):
            step = drafting(
                inputs_embeds=torch.cat([model.get_input_embeddings()(token), hidden], dim=-1),
                position_ids=torch.tensor([[length]]),
                shared_kv_states=out.shared_kv_states,
                attention_mask=None,
                use_cache=False,
            )
            token, hidden = step.logits.argmax(-1), step.last_hidden_state
            drafted.append(int(token))
            token = token if forced is None else torch.tensor([[forced[index]]])
            logits.append(step.logits[0, 0].numpy())
    return drafted, np.stack(logits)


def check_candidates(
    made: Exported, got: dict[str, NDArray[Any]], logits: NDArray[np.float32]
) -> None:
    """The most likely tokens of the reference's ``logits`` ``[steps, vocabulary]``, in order."""
    spec = made.manifest.engines[MTP_DRAFTER_ENGINE]
    assert spec.mtp is not None
    # 5 clusters of 16 tokens, or the whole vocabulary of 384.
    count = min(assistant.MAX_CANDIDATES, 80 if spec.mtp.head == "centroid" else 384)
    assert spec.mtp.candidates == count
    found, ids = got[contract.DRAFT_LOGITS][0], got[contract.DRAFT_CANDIDATES][0]
    assert found.shape == ids.shape == (len(logits), count)
    assert (np.diff(found, axis=1) <= 0).all()
    assert all(len(set(step)) == count for step in ids.tolist())
    own = np.take_along_axis(logits, ids, axis=1)
    best = -np.sort(-logits, axis=1)[:, :count]
    for wanted in (own, best):
        assert relative_error(found[:1], wanted[:1]) <= 1e-4
        assert relative_error(found, wanted) <= 1e-3
