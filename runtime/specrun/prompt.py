"""What the caller gives to continue, as token ids."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from specrun import chat
from specrun.contents import special_spans
from specrun.errors import FolderError, UsageError
from specrun.manifest import REEXPORT, Manifest
from specrun.options import GenerateOptions
from specrun.text import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
Prompts = list[str] | tuple[str, ...] | Sequence[list[int]] | Sequence[list[Mapping[str, Any]]]


def is_batch(prompt: Prompt | Prompts) -> TypeGuard[Prompts]:
    """Whether this is a list of prompts: texts, lists of ids or lists of messages."""
    if isinstance(prompt, (str, bytes, Mapping)) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and all(isinstance(item, (str, list, tuple)) for item in prompt)


def encode_prompt(
    prompt: Prompt,
    options: GenerateOptions,
    *,
    tokenizer: Tokenizer,
    template: str | None,
    manifest: Manifest,
    vocab_size: int,
) -> list[int]:
    """The ids of a prompt: at least one, all below ``vocab_size``.

    Text goes through the chat template where the folder has one and ``options.raw`` is not set;
    messages always do; ids are taken as they are. An empty prompt is the beginning-of-text token.
    Special tokens that a prompt spells are text unless ``options.parse_special`` is set; those that
    the template writes always count. Raises UsageError.
    """
    if isinstance(prompt, str):
        ids = _encode_text(prompt, options, tokenizer, template, manifest)
    else:
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise UsageError(
                f"prompt: must be a text, token ids or messages, got {prompt!r}",
                hint="give a string, or a list of token ids or of messages",
            )
        items = list(prompt)
        if any(isinstance(item, (str, list, tuple)) for item in items):
            raise UsageError(
                f"prompt: is a list of {len(items)} prompts, one is wanted here",
                hint="give a list of prompts to generate(), and a stream or a session one each",
            )
        if options.system is not None:
            raise UsageError(
                "system: goes with a text prompt only", hint="give a message of role 'system'"
            )
        messages = [item for item in items if isinstance(item, Mapping)]
        if items and len(messages) == len(items):
            ids = _encode_messages(messages, options, tokenizer, template, manifest)
        else:
            ids = check_ids(items, vocab_size)
    if ids:
        _check_known(ids, vocab_size, manifest)
        return ids
    if manifest.generation.bos_token_id is None:
        raise UsageError(
            "prompt: is empty, and this model has no beginning-of-text token to start from",
            hint="give a prompt of at least one token",
        )
    return [manifest.generation.bos_token_id]


def _encode_text(
    text: str,
    options: GenerateOptions,
    tokenizer: Tokenizer,
    template: str | None,
    manifest: Manifest,
) -> list[int]:
    for name in ("system", "enable_thinking", "tools"):
        if getattr(options, name) is not None and template is None:
            raise UsageError(
                f"{name}: this folder has no chat template", hint="put it into the prompt"
            )
    # Nobody's message is empty text, so an empty prompt is the start of a text, as without a chat.
    if template is not None and not options.raw and (text or options.system is not None):
        messages = [{"role": "user", "content": text}]
        if options.system is not None:
            messages.insert(0, {"role": "system", "content": options.system})
        return _encode_messages(messages, options, tokenizer, template, manifest)
    if not text:
        return []
    ids = tokenizer.encode(text, add_special_tokens=True, parse_special=options.parse_special)
    bos = manifest.generation.bos_token_id
    if manifest.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


def _encode_messages(
    messages: Sequence[chat.Message],
    options: GenerateOptions,
    tokenizer: Tokenizer,
    template: str | None,
    manifest: Manifest,
) -> list[int]:
    if template is None:
        raise UsageError(
            "prompt: messages need a chat template, this folder has none", hint="give a text"
        )
    now = datetime.datetime.now()

    def render(given: Sequence[Any]) -> str:
        return chat.render(
            template,
            given[0],
            manifest.tokenizer.special_tokens,
            tools=given[1],
            enable_thinking=options.enable_thinking,
            now=now,
        )

    given = (messages, options.tools)
    text = render(given)
    # The template writes the special tokens itself, the first one included.
    if options.parse_special:
        return tokenizer.encode(text, add_special_tokens=False)
    spans = special_spans(text, given, render, tokenizer)
    if not spans:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_parts(text, spans)


def _check_known(ids: Sequence[int], vocab_size: int, manifest: Manifest) -> None:
    """Ids of the target, or of its tokenizer, which may be padded apart."""
    most = max(vocab_size, manifest.tokenizer.vocab_size)
    if max(ids) >= most:
        raise FolderError(
            f"{manifest.tokenizer.file}: gives the token id {max(ids)} of {most} tokens",
            hint=REEXPORT,
        )


def check_ids(items: Sequence[Any], vocab_size: int) -> list[int]:
    """``items`` as token ids below ``vocab_size``. Raises UsageError."""
    if isinstance(items, (bytes, Mapping)) or not isinstance(items, Iterable):
        raise UsageError(
            f"prompt: must be a text or token ids, got {items!r}", hint="give a string or a list"
        )
    ids = []
    for place, item in enumerate(items):
        try:
            id_ = operator.index(item)
        except TypeError:
            raise UsageError(
                f"prompt: must be a text, token ids or messages, got {item!r} at {place}",
                hint="token ids are whole numbers",
            ) from None
        if not 0 <= id_ < vocab_size:
            raise UsageError(
                f"prompt: token id {id_} at {place} is not in the vocabulary of {vocab_size}",
                hint="was the prompt encoded with another tokenizer?",
            )
        ids.append(id_)
    return ids
