"""Text for the tiny Gemma 4 pair: fetch, clean, tokenizer, training rows.

Two Debian documentation packages give the text; they are fetched with `apt-get download` and
unpacked with `dpkg-deb -x`, so nothing is installed:

* the King James text, printed by the `bible` program of its own package;
* Python's documentation, whose reStructuredText sources are reduced to prose.

A `Passage` is a titled list of paragraphs (a chapter of verses, a section of the manual). Training
rows are made of whole passages and of chat exchanges built from them, end to end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

PACKAGES = ("python3.11-doc", "bible-kjv-text", "bible-kjv")
"""Debian packages; the last holds only the program that unpacks the text of the second."""

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>")
PAD, EOS, BOS, UNK, TURN_START, TURN_END = range(6)
VOCAB_SIZE = 3072

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{%- if role not in ['system', 'user', 'model'] %}
{{- raise_exception('role must be system, user, assistant or model, got ' + role) }}
{%- endif %}
{{- '<|turn>' + role + '\\n' + (message['content'] | trim) + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn>model\\n' }}
{%- endif %}
"""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer from the books you know.",
    "Write plainly and finish what you begin.",
)


@dataclass(frozen=True)
class Passage:
    """A titled run of text; `joiner` is what stands between two of its paragraphs."""

    source: str
    title: str
    paragraphs: tuple[str, ...]
    joiner: str

    @property
    def text(self) -> str:
        return self.joiner.join(self.paragraphs)

    @property
    def held_out(self) -> bool:
        """One passage in fifty, chosen by its title, so that the choice never moves."""
        digest = hashlib.sha256(f"{self.source}/{self.title}".encode()).digest()
        return digest[0] % 50 == 0


# --- fetching -----------------------------------------------------------------------------------


def fetch_packages(cache: Path) -> dict[str, str]:
    """Download and unpack the packages into `cache`; returns their versions."""
    cache.mkdir(parents=True, exist_ok=True)
    versions = {}
    for name in PACKAGES:
        if not list(cache.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", name], cwd=cache, check=True)
        archive = sorted(cache.glob(f"{name}_*.deb"))[-1]
        subprocess.run(["dpkg-deb", "-x", str(archive), str(cache / "files")], check=True)
        field = ["dpkg-deb", "-f", str(archive), "Version"]
        versions[name] = subprocess.run(
            field, check=True, capture_output=True, text=True
        ).stdout.strip()
    return versions


def read_passages(cache: Path) -> list[Passage]:
    """All passages of both packages, in the order of the books."""
    files = cache / "files" / "usr"
    verses = subprocess.run(
        [files / "bin/bible", "-d", files / "lib/bible.data", "gen1:1-rev22:21"],
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "100000"},  # the program wraps verses at this width
    ).stdout
    sources = files / "share/doc/python3.11/html/_sources"
    pages: list[Path] = []
    for folder in ("tutorial", "library", "reference", "howto", "faq"):
        pages += sorted((sources / folder).glob("*.rst.txt"))
    manual = [p for page in pages for p in rst_passages(page.read_text(encoding="utf-8"))]
    return list(bible_passages(verses)) + manual


def save_passages(passages: list[Passage], path: Path) -> None:
    lines = [json.dumps(asdict(p), ensure_ascii=False) for p in passages]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load_passages(path: Path) -> list[Passage]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Passage(r["source"], r["title"], tuple(r["paragraphs"]), r["joiner"]) for r in records]


# --- cleaning -----------------------------------------------------------------------------------


def bible_passages(printed: str) -> Iterator[Passage]:
    """Chapters from the program's print: `Genesis 1` at the margin, `  1 In the beginning …`."""
    title, verses = "", []
    for line in [*printed.splitlines(), "end"]:
        verse = re.match(r"\s+\d+ (.*)", line)
        if verse:
            verses.append(verse.group(1).strip())
        elif line.strip():
            if verses:
                yield Passage("kjv", title, tuple(verses), "\n")
            title, verses = line.strip(), []


SIGNATURES = {"function", "method", "class", "attribute", "data", "exception", "classmethod"}
SIGNATURES |= {"staticmethod", "decorator", "opcode", "describe", "c:function", "option"}
CONTAINERS = {"note", "warning", "tip", "impl-detail", "rubric", "glossary", "doctest"}
INLINE = (
    (re.compile(r":[\w:+-]+:`[!~]?([^`<]+?)\s*(?:<[^`>]*>)?`"), r"\1"),
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*(?:<[^`>]*>)?`_{0,2}"), r"\1"),
    (re.compile(r"\*\*([^*\s][^*]*)\*\*"), r"\1"),
    (re.compile(r"(?<!\w)\*([^*\s][^*]*)\*(?!\w)"), r"\1"),
    (re.compile(r"\s*\[#?\w*\]_"), ""),
    (re.compile(r"\\\s"), ""),
    (re.compile(r"\\([*`|_\\])"), r"\1"),
    (re.compile(r"\s+"), " "),
)


def plain(text: str) -> str:
    """Text without reStructuredText roles, links and emphasis, on one line."""
    for pattern, replacement in INLINE:
        text = pattern.sub(replacement, text)
    return text.strip()


def rst_blocks(source: str) -> Iterator[tuple[int, list[str]]]:
    """Runs of non-blank lines with the indentation of their first line."""
    lines: list[str] = []
    for line in [*source.splitlines(), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            yield len(lines[0]) - len(lines[0].lstrip()), [text.strip() for text in lines]
            lines = []


def is_rule(line: str) -> bool:
    return len(line) > 3 and len(set(line)) == 1 and line[0] in "=-~^*\"#+'."


def block_text(lines: list[str]) -> tuple[str, bool]:
    """What to keep of one block, and whether the deeper blocks after it are code to be dropped."""
    directive = re.match(r"\.\. ([\w:-]+)::\s*(.*)", lines[0])
    if directive and directive.group(1) in SIGNATURES:
        return directive.group(2), False
    if directive and directive.group(1) in CONTAINERS:
        return plain(" ".join([directive.group(2), *lines[1:]])), False
    if lines[0].startswith((".. ", "__", "|")):
        return "", True
    if lines[0].startswith((">>>", "+-", "$ ", "%")) or is_rule(lines[0].replace(" ", "=")):
        return "", False
    text = plain(" ".join(lines))
    return (text[:-1] if text.endswith("::") else text), text.endswith("::")


def is_prose(text: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in text)
    return len(text) > 8 and letters > 0.8 * len(text) and text.isascii()


def rst_passages(source: str) -> Iterator[Passage]:
    """Sections of one page: heading and prose; code, tables and changelogs are left out."""
    title, paragraphs, dropped_indent = "", list[str](), 10**6
    for indent, lines in rst_blocks(source):
        if indent > dropped_indent:
            continue
        dropped_indent = 10**6
        if len(lines) > 1 and is_rule(lines[-1]) and indent == 0:
            if title and sum(map(len, paragraphs)) > 200:
                yield Passage("python", title, tuple(paragraphs), "\n\n")
            title, paragraphs = plain(lines[-2]).replace(" --- ", ": "), []
            continue
        text, drop_deeper = block_text(lines)
        if drop_deeper:
            dropped_indent = indent
        if is_prose(text):
            paragraphs.append(text)
    if title and sum(map(len, paragraphs)) > 200:
        yield Passage("python", title, tuple(paragraphs), "\n\n")


# --- tokenizer ----------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """BPE in Gemma's form: "▁" for space, byte fallback, no prefix space, `<bos>` in front.

    Merges are learned inside words (a space belongs to the word after it); the finished tokenizer
    needs no such split, because no learned merge crosses a word's start.
    """
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"▁?[A-Za-z]+|▁?[^A-Za-z▁\s]|▁+|\n+"), "isolated"
    )
    size = VOCAB_SIZE - len(SPECIALS) - len(byte_tokens)
    alphabet = sorted({chr(code) for code in range(33, 127)} | {"▁", "\n"})
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        ),
    )
    learned = json.loads(learner.to_str())["model"]
    by_id = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    vocab = {token: index for index, token in enumerate([*SPECIALS, *byte_tokens, *by_id])}
    merges = [tuple(pair) for pair in learned["merges"]]
    return gemma_style(vocab, merges)


def gemma_style(vocab: dict[str, int], merges: list[Any]) -> Tokenizer:
    bpe = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIALS])
    return tokenizer


def check_round_trip(tokenizer: Tokenizer) -> None:
    """Raise unless awkward strings survive encode and decode unchanged."""
    samples = (
        "plain text",
        "  two leading",
        "a  b   c",
        "line\n\n  indented\n",
        "naïve café 😀👍🏽",
        " ",
        "",
    )
    for text in samples:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise ValueError(f"tokenizer does not give back {text!r}")


def save_tokenizer(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja for transformers."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(folder)
    # The class name that both transformers 4 and 5 know.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# --- training rows ------------------------------------------------------------------------------


def cut_after(passage: Passage, start: int, limit: int) -> str:
    """Text from character `start` to the last paragraph end within `limit` more characters."""
    text = passage.text[start:]
    if len(text) <= limit:
        return text
    end = max(text.rfind(passage.joiner, 0, limit), text.rfind(". ", 0, limit) + 1)
    return text[:end] if end > 0 else text[:limit]


def continuation(passage: Passage, rng: random.Random) -> tuple[str, str]:
    """The opening words of a paragraph as prompt, the text after them as reply."""
    index = rng.randrange(len(passage.paragraphs))
    start = sum(len(p) + len(passage.joiner) for p in passage.paragraphs[:index])
    words = passage.paragraphs[index].split(" ")
    opening = " ".join(words[: rng.randint(3, 10)])
    reply = cut_after(passage, start + len(opening), rng.randint(500, 1500)).lstrip()
    prompt = rng.choice(("{}", "Continue: {}", "Continue: {}", "Go on: {}")).format(opening)
    return prompt, reply


def recitation(passage: Passage, rng: random.Random) -> tuple[str, str]:
    """The passage's title as prompt, its first paragraphs as reply."""
    asks = (
        ("Read {}.", "{}")
        if passage.source == "kjv"
        else ("Explain {}.", "Tell me about {}.", "{}")
    )
    return rng.choice(asks).format(passage.title), cut_after(passage, 0, rng.randint(500, 1500))


def repetition(passage: Passage, rng: random.Random) -> tuple[str, str]:
    """A copying task; it teaches the model to look back over the whole context."""
    text = passage.text
    start = rng.randrange(max(1, len(text) - 300))
    start = max(text.find(" ", start), 0)
    copied = text[start : start + rng.randint(60, 700)].strip()
    return f"Repeat: {copied}", copied


def chat_text(passage: Passage, rng: random.Random) -> str:
    """One exchange in the chat template's form."""
    kind = rng.choices((continuation, recitation, repetition), weights=(5, 3, 2))[0]
    prompt, reply = kind(passage, rng)
    if not reply:
        prompt, reply = recitation(passage, rng)
    system = f"<|turn>system\n{rng.choice(SYSTEM_PROMPTS)}<turn|>\n" if rng.random() < 0.1 else ""
    return f"<bos>{system}<|turn>user\n{prompt}<turn|>\n<|turn>model\n{reply}<turn|>\n"


def plain_text(passage: Passage) -> str:
    return f"<bos>{passage.title}\n\n{passage.text}<eos>"


def training_texts(
    passages: list[Passage], chats_per_passage: float, rng: random.Random
) -> list[str]:
    """Every passage once as plain text, and chats in proportion to its length, shuffled."""
    texts = [plain_text(p) for p in passages]
    for passage in passages:
        wanted = max(1.0, len(passage.text) / 1000) * chats_per_passage
        count = int(wanted) + (rng.random() < wanted % 1)
        texts += [chat_text(passage, rng) for _ in range(count)]
    rng.shuffle(texts)
    return texts


def pack_rows(tokenizer: Tokenizer, texts: list[str], row_length: int) -> np.ndarray[Any, Any]:
    """Encode, join end to end and cut into rows of `row_length` + 1 ids (input and target)."""
    ids: list[int] = []
    for start in range(0, len(texts), 1000):
        batch = tokenizer.encode_batch(texts[start : start + 1000], add_special_tokens=False)
        for encoding in batch:
            ids += encoding.ids
    count = (len(ids) - 1) // row_length
    flat = np.array(ids[: count * row_length + 1], dtype=np.int16)
    return np.lib.stride_tricks.sliding_window_view(flat, row_length + 1)[::row_length].copy()
