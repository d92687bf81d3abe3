"""Checkpoints, tokenizers and what they say of drafting, as the manifest records them."""

from __future__ import annotations

from specexport.fingerprint import fingerprint
from specexport.sources import Source
from specexport.tokenizer_files import TokenizerInfo
from specrun import manifest as manifests
from specrun.limits import MAX_DRAFTS
from specrun.manifest import TokenizerSpec
from specrun.options import ScheduleName

DEFAULT_NUM_ASSISTANT_TOKENS = 4  # where a checkpoint names none


def manifest_source(source: Source) -> manifests.Source:
    """Where a model came from, for the manifest."""
    return manifests.Source(
        id=source.id,
        revision=source.revision,
        model_type=source.model_type,
        architecture=source.architecture,
        fingerprint=fingerprint(source.weights),
    )


def manifest_tokenizer(info: TokenizerInfo, sha256: str) -> TokenizerSpec:
    """A tokenizer file that was written, for the manifest."""
    return TokenizerSpec(
        file=info.file,
        sha256=sha256,
        vocab_size=info.vocab_size,
        add_bos=info.add_bos,
        chat_template=info.chat_template,
        special_tokens=info.special_tokens,
        response=info.response,
    )


def num_assistant_tokens(source: Source, default: int = DEFAULT_NUM_ASSISTANT_TOKENS) -> int:
    """The drafter's own setting where it has one."""
    named = source.generation.get("num_assistant_tokens")
    if isinstance(named, bool) or not isinstance(named, int):
        return default
    return named if 0 < named <= MAX_DRAFTS else default


def schedule(source: Source) -> ScheduleName:
    """The drafter's own setting; one that would outlast a generation starts over with each."""
    named = source.generation.get("num_assistant_tokens_schedule")
    return "constant" if named == "constant" else "heuristic_transient"
