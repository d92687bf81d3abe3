"""Worker: llama.cpp through llama-cpp-python, from a GGUF file."""

from __future__ import annotations

from typing import Any

from peers.protocol import Clock, Generate, Reply, Request, serve


def load(config: dict[str, Any]) -> Generate:
    """``model``, ``threads``, ``context`` and whether to use ``flash_attention``.

    Two instances, because one that drafts computes the logits of every row.
    """
    from llama_cpp import Llama  # type: ignore[import-not-found]
    from llama_cpp.llama_speculative import (  # type: ignore[import-not-found]
        LlamaPromptLookupDecoding,
    )

    common: dict[str, Any] = {
        "model_path": config["model"],
        "n_ctx": config["context"],
        "n_threads": config["threads"],
        "n_threads_batch": config["threads"],
        "flash_attn": config["flash_attention"],
        "verbose": False,
    }
    plain = Llama(**common)
    lookup = Llama(**common, draft_model=LlamaPromptLookupDecoding())

    def generate(request: Request) -> Reply:
        llama = plain
        if request.drafts:
            llama = lookup
            llama.draft_model = LlamaPromptLookupDecoding(
                max_ngram_size=request.ngram, num_pred_tokens=request.drafts
            )
        llama.reset()  # else a prefix that two prompts share is not read again
        tokens: list[int] = []
        clock = Clock()
        for token in llama.generate(request.prompt_ids, temp=0.0, repeat_penalty=1.0):
            clock.mark_first()
            tokens.append(token)
            if len(tokens) == request.max_new_tokens:
                break
        return Reply(tokens, clock.first, clock.elapsed())

    return generate


if __name__ == "__main__":
    serve(load, ("llama-cpp-python",))
