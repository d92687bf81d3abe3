"""Worker: OpenVINO GenAI, from a GGUF file."""

from __future__ import annotations

from typing import Any

from peers.protocol import Clock, Generate, Reply, Request, serve

ONE_PIECE = 1 << 20  # more tokens than any prompt has


def load(config: dict[str, Any]) -> Generate:
    """``model``, ``threads`` and ``properties`` of the device.

    A scheduler of our own, because the default one caches prefixes from one text to the next: here
    every request reads its whole prompt. As by default, it does so in one piece.
    """
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = ONE_PIECE
    properties = {
        "INFERENCE_NUM_THREADS": config["threads"],
        "scheduler_config": scheduler,
        **config["properties"],
    }
    plain = genai.LLMPipeline(config["model"], "CPU", **properties)
    lookup = genai.LLMPipeline(config["model"], "CPU", **properties, prompt_lookup=True)

    def generate(request: Request) -> Reply:
        ids = openvino.Tensor(np.array([request.prompt_ids], np.int64))
        drafting = {"num_assistant_tokens": request.drafts, "max_ngram_size": request.ngram}
        clock = Clock()
        out = (lookup if request.drafts else plain).generate(
            ids,
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            ignore_eos=True,
            apply_chat_template=False,
            **(drafting if request.drafts else {}),
        )
        total = clock.elapsed()
        return Reply(list(out.tokens[0]), out.perf_metrics.get_ttft().mean / 1000, total)

    return generate


if __name__ == "__main__":
    serve(load, ("openvino-genai", "openvino"))
