"""Real GGUF checkpoints: every tensor, the configuration and the tokenizer equal transformers'."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import fetch_models  # pyright: ignore[reportMissingImports]
import numpy as np
import pytest
from tokenizers import Tokenizer

from specexport import tokenizer_files
from specexport.sources import Source, resolve
from specexport.tokenizer_files import TokenizerInfo
from specrun import chat

pytestmark = [pytest.mark.real, pytest.mark.slow]

STRINGS = (
    "",
    "Hello, world!",
    "  leading and  double spaces\n\ttabs and\r\nlines ",
    "naïve café, 中文字, русский, 🙂👩‍🚀",
    "def f(x: int) -> int:\n    return x ** 2  # 12345678",
    "<bos>special<eos> <|im_start|>user\nhi<|im_end|>",
)
MESSAGES = [
    {"role": "user", "content": "Write three sentences about the moon."},
    {"role": "assistant", "content": "It is round."},
    {"role": "user", "content": "Go on."},
]


@dataclass(frozen=True)
class Real:
    """A source with what transformers makes of the same file."""

    source: Source
    tokenizer: Any
    written: Path
    info: TokenizerInfo


@pytest.fixture(scope="module", params=list(fetch_models.MODELS))
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Real:
    try:
        path = fetch_models.fetch(request.param)
    except fetch_models.FetchError as error:
        pytest.skip(str(error))
    tokenizer = tokenizer_files.load(path)  # AutoTokenizer's, which takes a while
    written = tmp_path_factory.mktemp(request.param)
    info = tokenizer_files.save(tokenizer, path, written)
    return Real(resolve(path), tokenizer, written, info)


def test_every_tensor_equals_the_loaded_model(real: Real) -> None:
    weights = real.source.weights
    weights.check_complete(real.source.expected_shapes())
    reference = real.source.load_reference().state_dict()
    assert weights.names() == sorted(reference)
    for name, tensor in reference.items():
        row = 0
        for chunk in weights.chunks(name, 8 << 20):
            np.testing.assert_array_equal(chunk, tensor[row : row + len(chunk)].numpy(), name)
            row += len(chunk)
        assert row == len(tensor)
    assert weights.canonical("lm_head.weight") == "model.embed_tokens.weight"


def test_configuration_equals_transformers(real: Real) -> None:
    from transformers import AutoConfig

    path = real.source.path
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    ours = real.source.config.to_dict()
    assert {name for name, value in theirs.items() if ours.get(name) != value} == {"_name_or_path"}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert real.source.generation[name] == theirs[name]


def test_written_tokenizer_gives_the_same_ids(real: Real) -> None:
    written = Tokenizer.from_file(str(real.written / real.info.file))
    for text in STRINGS:
        assert written.encode(text).ids == real.tokenizer(text)["input_ids"]
        plain = real.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert written.encode(text, add_special_tokens=False).ids == plain
        assert written.decode(plain) == real.tokenizer.decode(plain, skip_special_tokens=True)
    assert written.get_vocab_size() == real.info.vocab_size == real.source.config.vocab_size
    assert real.info.add_bos is (real.source.id == "gemma3-270m.gguf")


def test_written_chat_template_renders_the_same(real: Real) -> None:
    if real.tokenizer.chat_template is None:
        assert real.info.chat_template is None
        return
    assert real.info.chat_template is not None
    template = (real.written / real.info.chat_template).read_text(encoding="utf-8")
    text = chat.render(template, MESSAGES, real.info.special_tokens)
    theirs = real.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False
    )
    assert text == theirs
