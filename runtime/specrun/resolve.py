"""Options as they take effect: what was left open is filled in from the folder, then frozen."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any, cast

from specrun.defaults import DEFAULTS
from specrun.errors import UsageError
from specrun.manifest import DraftMethod, Manifest
from specrun.options import (
    DEFAULT_NUM_ASSISTANT_TOKENS,
    SAMPLING_ONLY,
    EngineOptions,
    GenerateOptions,
    available_threads,
)

# What "auto" takes, the first that the folder has.
PREFERRED: tuple[DraftMethod, ...] = ("mtp-drafter", "mtp", "draft", "universal", "early-exit")
HOW: dict[str, str] = {
    "mtp-drafter": "export with its assistant (specexport --drafter ASSISTANT)",
    "mtp": "export a checkpoint that has MTP layers (specexport --mtp)",
    "draft": "export with a smaller model (specexport --drafter SMALL)",
    "universal": "export with a model of another tokenizer (specexport --drafter OTHER)",
    "early-exit": "export with specexport --early-exit LAYERS",
}
NEEDS_Q = "needs the drafter's own distribution over the target's vocabulary"
NO_Q = {"plain": "there is none", "prompt-lookup": "it has none", "universal": "it has another"}

# Those that change no text, or only say what is so anyway.
HARMLESS = {
    "do_sample", "use_cache", "cache_implementation", "return_dict_in_generate", "max_length",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "is_assistant", "output_scores", "output_logits", "output_attentions",
    "output_hidden_states", "prompt_lookup_num_tokens", "max_matching_ngram_size", "chat_format",
    "assistant_lookbehind", "target_lookbehind", "disable_compile", "trust_remote_code",
}  # fmt: skip
# Values with which an option does nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "min_length": (0,),
    "guidance_scale": (1.0,),
    "assistant_ensemble_weight": (1.0,),
}


def resolve_engine(options: EngineOptions, manifest: Manifest) -> EngineOptions:
    """``options`` with threads and context decided. Raises UsageError."""
    if options.verify == "engine" and not manifest.has_target_engine:
        raise UsageError(
            "verify: the folder has no engine of the target, only drafters, got 'engine'",
            hint="leave verify out (PyTorch verifies), or export without --skip target",
        )
    most = manifest.generation.max_context
    if options.max_context is not None and options.max_context > most:
        raise UsageError(
            f"max_context: the engine was exported for {most}, got {options.max_context}",
            hint=f"give {most} or less",
        )
    return dataclasses.replace(
        options,
        threads=options.threads or available_threads(),
        max_context=options.max_context or most,
    )


def engines_only(options: EngineOptions, manifest: Manifest) -> EngineOptions:
    """``options`` for measuring: what fails is an error, and PyTorch does not stand in for it."""
    measured = options.verify == "auto" and manifest.has_target_engine
    return dataclasses.replace(options, verify="engine", target=None) if measured else options


def resolve_generate(
    options: GenerateOptions, manifest: Manifest, *, fixed_width: int | None = None
) -> GenerateOptions:
    """``options`` with everything decided that was left open. Raises UsageError.

    ``fixed_width``: rows of every run of a target in exact mode.
    """
    method = _method(options, manifest)
    eos = options.eos_token_ids
    resolved = dataclasses.replace(
        options,
        method=method,
        eos_token_ids=manifest.generation.eos_token_ids if eos is None else eos,
        **_drafting(options, method, manifest, fixed_width),
        **_sampling(options, manifest.generation.defaults),
    )
    _check_ensemble(resolved, fixed_width)
    _check_no_effect(options, resolved)
    _check_ids(resolved, manifest.target_engine.vocab_size, manifest.tokenizer.vocab_size)
    return resolved


def unsupported_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json asks for and is not done here."""
    return {
        name: value
        for name, value in defaults.items()
        if name not in DEFAULTS and name not in HARMLESS and name != "bad_words_ids"
        if value is not None and value is not False and value not in NEUTRAL.get(name, ())
    }


def _method(options: GenerateOptions, manifest: Manifest) -> Any:
    method = options.method
    if method == "auto":
        return next((m for m in PREFERRED if m in manifest.drafters), "prompt-lookup")
    if method in PREFERRED and method not in manifest.drafters:
        have = ", ".join((*manifest.drafters, "prompt-lookup", "plain"))
        raise UsageError(
            f"method: {method!r} needs a drafter engine, this folder has none",
            hint=f"{HOW[method]}, or use one of {have}",
        )
    return method


def _drafting(
    options: GenerateOptions, method: str, manifest: Manifest, fixed_width: int | None
) -> dict[str, Any]:
    drafter = manifest.drafters.get(cast(DraftMethod, method))
    num_draft = options.num_assistant_tokens
    schedule = options.num_assistant_tokens_schedule
    if method == "plain":
        num_draft = 0
    elif num_draft is None:
        num_draft = drafter.num_assistant_tokens if drafter else DEFAULT_NUM_ASSISTANT_TOKENS
        if fixed_width is not None:
            num_draft = min(num_draft, fixed_width - 1)
    if fixed_width is not None and num_draft >= fixed_width:
        raise UsageError(
            f"num_assistant_tokens: in exact mode at most {fixed_width - 1} fit into a run of"
            f" {fixed_width} rows, got {num_draft}",
            hint=f"give {fixed_width - 1} or less, or open the folder with a larger exact_width",
        )
    if drafter is not None:
        most = drafter.max_num_draft
        if most is not None and num_draft > most:
            raise UsageError(
                f"num_assistant_tokens: the drafter was exported for at most {most},"
                f" got {num_draft}",
                hint=f"give {most} or less, or export with a larger --num-draft",
            )
        schedule = schedule or drafter.schedule
    return {
        "num_assistant_tokens": num_draft,
        "num_assistant_tokens_schedule": schedule or "constant",
        "assistant_confidence_threshold": options.assistant_confidence_threshold or 0.0,
    }


def _sampling(options: GenerateOptions, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every sampling option as it takes effect; where sampling is off those of it are None."""
    found: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        value = getattr(options, name)
        found[name] = defaults.get(name, default) if value is None else value
    found["do_sample"] = do_sample = _does_sample(options, defaults)
    if not do_sample:
        found |= dict.fromkeys(SAMPLING_ONLY)
    found["top_k"] = found["top_k"] or None
    found["seed"] = None
    if do_sample:
        found["seed"] = secrets.randbits(31) if options.seed is None else options.seed
    banned = options.bad_words_ids
    found["bad_words_ids"] = defaults.get("bad_words_ids") if banned is None else banned
    return found


def _does_sample(options: GenerateOptions, defaults: Mapping[str, Any]) -> bool:
    if options.do_sample is not None:
        return options.do_sample and options.temperature != 0
    if options.temperature is not None:
        return options.temperature > 0
    if any(getattr(options, name) for name in SAMPLING_ONLY):
        return True
    return bool(defaults.get("do_sample", False)) and defaults.get("temperature", 1.0) != 0


def _check_ensemble(options: GenerateOptions, fixed_width: int | None) -> None:
    if options.ensemble_weight == 1:
        return
    if fixed_width is not None:
        raise UsageError(
            "ensemble_weight: below 1 the text is not the target's own, which exact mode"
            f" guarantees (got {options.ensemble_weight:g})",
            hint="leave ensemble_weight out, or open the folder without exact",
        )
    if options.num_assistant_tokens == 0:
        raise UsageError(
            f"ensemble_weight: {NEEDS_Q}, and nothing is drafted (got {options.ensemble_weight:g})",
            hint="give num_assistant_tokens of 1 or more, or leave ensemble_weight out",
        )
    if reason := NO_Q.get(options.method):
        raise UsageError(
            f"ensemble_weight: {NEEDS_Q}; method {options.method}: {reason}"
            f" (got {options.ensemble_weight:g})",
            hint="use a drafter with the target's vocabulary, or leave ensemble_weight out",
        )


def _check_no_effect(asked: GenerateOptions, resolved: GenerateOptions) -> None:
    """What was asked for and can do nothing is a mistake, not something to ignore."""
    if asked.assistant_confidence_threshold and resolved.method in ("plain", "prompt-lookup"):
        raise UsageError(
            f"assistant_confidence_threshold: method {resolved.method} has no probabilities,"
            f" got {asked.assistant_confidence_threshold:g}",
            hint="use a drafter with a distribution, or leave it out",
        )
    least, most = asked.min_new_tokens, resolved.max_new_tokens
    if least is not None and most is not None and least > most:
        raise UsageError(
            f"min_new_tokens: must be at most max_new_tokens {most}, got {least}",
            hint="give a smaller minimum or a larger maximum",
        )


def _check_ids(options: GenerateOptions, vocab_size: int, tokenizer_size: int) -> None:
    """Ids that the target does not have are a mistake, not something to ignore."""
    most = max(vocab_size, tokenizer_size)
    for token in options.eos_token_ids or ():
        if token >= most:
            raise UsageError(
                f"eos_token_ids: must hold token ids below {most}, got {token}",
                hint="give ids of the target's vocabulary",
            )
    given = [("logit_bias", token) for token in options.logit_bias or ()]
    given += [("bad_words_ids", token) for word in options.bad_words_ids or () for token in word]
    for name, token in given:
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"{name}: must hold token ids below {vocab_size}, got {token}",
                hint="give ids of the target's vocabulary",
            )
