"""Writes the tokenizer of a checkpoint in the form the runtime reads: tokenizer.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport.errors import SourceError
from specexport.response_formats import response_format
from specrun.response_format import ResponseFormat

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class TokenizerInfo:
    """What was written, by file name inside the folder, and what the runtime must know of it.

    ``vocab_size`` counts added tokens too. ``add_bos``: encoding puts the bos token in front.
    ``special_tokens``: the names chat templates use (``bos_token``, ``eos_token``, ``eot_token``,
    …) -> the token's text. ``response``: how answers are marked, None where that is not known.
    """

    file: str
    chat_template: str | None
    vocab_size: int
    add_bos: bool
    special_tokens: dict[str, str]
    response: ResponseFormat | None = None


def write(path: Path, folder: Path) -> TokenizerInfo:
    """Write the tokenizer of the checkpoint at ``path`` (folder or GGUF file) into ``folder``.

    Raises SourceError if the checkpoint has no tokenizer, or one without a tokenizer.json form.
    """
    return save(load(path), path, folder)


def save(tokenizer: Any, path: Path, folder: Path) -> TokenizerInfo:
    """Write a transformers ``tokenizer`` that came from ``path`` into ``folder``, as ``write``."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SourceError(
            f"{path}: its tokenizer ({type(tokenizer).__name__}) has no tokenizer.json form",
            hint="only tokenizers of the tokenizers library run without transformers",
        )
    backend.no_truncation()
    backend.no_padding()
    # As its own save() does, whose errors say nothing of their kind.
    (folder / TOKENIZER).write_text(backend.to_str(pretty=True), encoding="utf-8")
    template = _chat_template(tokenizer)
    if template is not None:
        (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    first = backend.encode("a").ids[:1]
    return TokenizerInfo(
        file=TOKENIZER,
        chat_template=None if template is None else CHAT_TEMPLATE,
        vocab_size=len(tokenizer),
        add_bos=tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id],
        special_tokens={
            name: str(token)
            for name, token in tokenizer.special_tokens_map.items()
            if isinstance(token, str) or type(token).__name__ == "AddedToken"
        },
        response=response_format(tokenizer, template),
    )


def load(path: Path) -> Any:
    """The transformers tokenizer of a checkpoint folder or GGUF file. Raises SourceError."""
    from transformers import AutoTokenizer

    try:
        if path.is_file():
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever the tokenizer's own loader raises
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise SourceError(
            f"{path}: its tokenizer cannot be loaded: {first_line}",
            hint="the folder must hold tokenizer.json or tokenizer.model beside config.json",
        ) from error


def _chat_template(tokenizer: Any) -> str | None:
    """The template, or the one called default where there are several."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", next(iter(template.values()), None))
    return None if template is None else str(template)
