"""Worker: transformers, from a Hugging Face folder."""

from __future__ import annotations

from typing import Any

from peers.protocol import Clock, Generate, Reply, Request, serve


class FirstToken:
    """A streamer that only notes when the first new token comes; the prompt is put first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._puts = 0

    def put(self, value: object) -> None:
        self._puts += 1
        if self._puts == 2:
            self._clock.mark_first()

    def end(self) -> None:
        pass


def load(config: dict[str, Any]) -> Generate:
    """``folder``, ``dtype``, ``threads`` and whether to ``compile`` the model's forward."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(config["threads"])
    torch.set_num_interop_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(
        config["folder"], dtype=getattr(torch, config["dtype"])
    ).eval()
    model.generation_config.eos_token_id = None
    if config["compile"]:
        model.forward = torch.compile(model.forward, dynamic=True)

    def generate(request: Request) -> Reply:
        ids = torch.tensor([request.prompt_ids])
        lookup = {
            "prompt_lookup_num_tokens": request.drafts,
            "max_matching_ngram_size": request.ngram,
        }
        clock = Clock()
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=FirstToken(clock),
            **(lookup if request.drafts else {}),
        )
        total = clock.elapsed()
        return Reply(out[0, ids.shape[1] :].tolist(), clock.first, total)

    return generate


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
