"""Worker: ONNX Runtime GenAI, from folders that its own builder made."""

from __future__ import annotations

import json
from typing import Any

from peers.protocol import Clock, Generate, Reply, Request, serve


def load(config: dict[str, Any]) -> Generate:
    """``folder``, ``threads``; ``pruned``: a folder whose head computes the last row only.

    Speculation needs every row, so it runs from ``folder`` and plain decoding from ``pruned``.
    ``unused_id``: a token that no text has. It replaces the end ids, because there must be one; a
    minimum length in their place would cost time in every step.
    """
    import onnxruntime_genai as genai  # type: ignore[import-not-found]

    def open_folder(folder: str) -> Any:
        settings = genai.Config(folder)
        session = {"intra_op_num_threads": config["threads"]}
        changes = {"eos_token_id": config["unused_id"], "decoder": {"session_options": session}}
        settings.overlay(json.dumps({"model": changes}))
        return genai.Model(settings)

    whole = open_folder(config["folder"])
    pruned = open_folder(config["pruned"]) if config.get("pruned") else whole

    def generate(request: Request) -> Reply:
        model = whole if request.drafts else pruned
        prompt = len(request.prompt_ids)
        clock = Clock()
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=prompt + request.max_new_tokens, do_sample=False)
        if request.drafts:
            params.set_speculative_options(
                ngram_size=request.ngram, max_draft_tokens=request.drafts
            )
        generator = genai.Generator(model, params)
        generator.append_tokens(request.prompt_ids)
        while not generator.is_done():
            generator.generate_next_token()
            clock.mark_first()
        tokens = generator.get_sequence(0)[prompt:]
        return Reply(list(tokens), clock.first, clock.elapsed())

    return generate


if __name__ == "__main__":
    serve(load, ("onnxruntime-genai", "onnxruntime"))
