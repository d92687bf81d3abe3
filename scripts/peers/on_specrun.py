"""Worker: an engine folder of ours."""

from __future__ import annotations

from typing import Any

from peers.protocol import Clock, Generate, Reply, Request, serve


def load(config: dict[str, Any]) -> Generate:
    """``folder`` and ``threads``."""
    import specrun

    engine = specrun.load(config["folder"], threads=config["threads"])

    def generate(request: Request) -> Reply:
        options: dict[str, Any] = {"method": "plain"}
        if request.drafts:
            options = {
                "method": "prompt-lookup",
                "num_assistant_tokens": request.drafts,
                "num_assistant_tokens_schedule": request.schedule,
                "max_matching_ngram_size": request.ngram,
            }
        clock = Clock()
        result = engine.generate(
            request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            eos_token_ids=(),
            do_sample=False,
            strict=True,
            **options,
        )
        total = clock.elapsed()
        return Reply(result.tokens, result.stats.seconds["prefill"], total)

    return generate


if __name__ == "__main__":
    serve(load, ("specrun", "onnxruntime"))
