"""Who takes part: peers in their precisions, and engine folders of ours, each with its settings."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from peers.environments import python_of, variables
from peers.workloads import Model

from specrun.errors import UsageError

PrecisionClass = Literal["fp32", "16-bit", "8-bit", "4-bit"]
MAX_GENAI_DRAFTS = 16
LLAMA_CONTEXT = 4096  # tokens


@dataclass(frozen=True)
class Setting:
    """How a text is generated; ``drafts`` 0 is plain decoding."""

    drafts: int = 0
    ngram: int = 2
    schedule: str = "constant"

    @property
    def label(self) -> str:
        if not self.drafts:
            return "plain"
        more = "" if self.schedule == "constant" else f" {self.schedule}"
        return f"k={self.drafts} n={self.ngram}{more}"

    def as_request(self) -> dict[str, Any]:
        return {"drafts": self.drafts, "ngram": self.ngram, "schedule": self.schedule}


PLAIN = Setting()


@dataclass(frozen=True)
class Contestant:
    """A worker to start: ``python -m module config``."""

    name: str
    precision: PrecisionClass
    module: str
    python: Path
    config: dict[str, Any]
    settings: tuple[Setting, ...]
    ours: bool = False


@dataclass
class Field:
    """All who take part with one model, and who cannot: name -> why."""

    contestants: list[Contestant] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choices:
    """What the command line decides. ``wide``: settings of peers that seldom pay, too."""

    environments: Path
    cache: Path
    threads: int
    drafts: tuple[int, ...]
    ngrams: tuple[int, ...]
    schedules: tuple[str, ...]
    peers: tuple[str, ...]
    wide: bool = False


def lookups(choices: Choices, most: int | None = None) -> tuple[Setting, ...]:
    """Plain decoding, and prompt lookup at every draft length and n-gram size."""
    drafts = dict.fromkeys(min(k, most) if most else k for k in choices.drafts)
    return (PLAIN, *(Setting(k, n) for k in drafts for n in choices.ngrams))


def peers(model: Model, gguf: Path, choices: Choices, say: Callable[[str], None]) -> Field:
    """Every peer for ``model``; folders that they read are made first where they are missing."""
    found = Field()
    makers = {
        "transformers": _transformers,
        "genai": _genai,
        "openvino": _openvino,
        "llama-cpp": _llama_cpp,
    }
    for name in choices.peers:
        python = python_of(choices.environments, name)
        if python is None:
            found.skipped[name] = f"no environment; make it with: setup --only {name}"
            continue
        try:
            found.contestants += makers[name](model, gguf, python, choices, say)
        except ConversionError as error:
            found.skipped[name] = str(error)
    return found


def folder_of_ours(name: str, folder: Path, gguf: Path, choices: Choices) -> Contestant | None:
    """An engine folder as a contestant; None where it was made from another model."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        source = str(manifest["target"]["id"])
        precision = str(manifest["engines"]["target"]["precision"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--ours {name}: {folder} is no engine folder: {type(error).__name__}: {error}",
            hint="give a folder that specexport wrote",
        ) from error
    if Path(source).name != gguf.name:
        return None
    settings = [PLAIN]
    settings += [
        Setting(k, n, schedule)
        for k in choices.drafts
        for n in choices.ngrams
        for schedule in choices.schedules
    ]
    return Contestant(
        name,
        precision_class(precision),
        "peers.on_specrun",
        Path(sys.executable),
        {"folder": str(folder.resolve()), "threads": choices.threads},
        tuple(settings),
        ours=True,
    )


def precision_class(precision: str) -> PrecisionClass:
    """Of an engine by the name of its precision: the bits of its weights."""
    if "16" in precision:
        return "16-bit"
    if "8" in precision:
        return "8-bit"
    return "4-bit" if "4" in precision else "fp32"


class ConversionError(RuntimeError):
    """A model cannot be put into the form that a peer reads; the message says why."""


def hf_folder(model: Model, gguf: Path, choices: Choices, say: Callable[[str], None]) -> Path:
    """The Hugging Face folder of ``model``, made once."""
    out = choices.cache / model.file / "hf"
    if not out.exists():
        python = python_of(choices.environments, "transformers")
        if python is None:
            raise ConversionError(
                f"no Hugging Face folder of {model.name}, and no transformers environment to make"
                " it; make that with: setup --only transformers"
            )
        say(f"{model.name}: writing the Hugging Face folder")
        _run([str(python), "-m", "peers.to_folder", str(gguf), str(out)])
    return out


def _transformers(
    model: Model, gguf: Path, python: Path, choices: Choices, say: Callable[[str], None]
) -> Iterable[Contestant]:
    folder = str(hf_folder(model, gguf, choices, say))
    types: list[tuple[str, str, PrecisionClass, bool]] = [
        ("fp32", "float32", "fp32", False),
        ("bf16", "bfloat16", "16-bit", False),
    ]
    if choices.wide:
        types.append(("fp32 compiled", "float32", "fp32", True))
    for short, dtype, precision, compiled in types:
        config = {
            "folder": folder,
            "dtype": dtype,
            "threads": choices.threads,
            "compile": compiled,
        }
        yield Contestant(
            f"transformers {short}",
            precision,
            "peers.on_transformers",
            python,
            config,
            lookups(choices),
        )


def _genai(
    model: Model, gguf: Path, python: Path, choices: Choices, say: Callable[[str], None]
) -> Iterable[Contestant]:
    source = hf_folder(model, gguf, choices, say)
    classes: tuple[tuple[str, PrecisionClass], ...] = (
        ("fp32", "fp32"),
        ("int8", "8-bit"),
        ("int4", "4-bit"),
    )
    for short, precision in classes:
        folders = {}
        for kind, extra in (("folder", ()), ("pruned", ("prune_lm_head=true",))):
            out = choices.cache / model.file / f"genai-{short}-{kind}"
            if not out.exists():
                say(f"{model.name}: building for ONNX Runtime GenAI, {short}, {kind}")
                _build(python, source, out, short, extra)
            folders[kind] = str(out)
        config = {**folders, "threads": choices.threads, "unused_id": model.unused_id}
        yield Contestant(
            f"genai {short}",
            precision,
            "peers.on_genai",
            python,
            config,
            lookups(choices, MAX_GENAI_DRAFTS),
        )


def _build(python: Path, source: Path, out: Path, precision: str, extra: tuple[str, ...]) -> None:
    """Run the peer's own builder; ``out`` appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        partial = Path(scratch) / "out"
        command = [str(python), "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
        command += ["-i", str(source), "-o", str(partial), "-p", precision]
        command += ["-c", str(Path(scratch) / "cache")]
        _run([*command, *(("--extra_options", *extra) if extra else ())])
        shutil.move(partial, out)


def _openvino(
    model: Model, gguf: Path, python: Path, choices: Choices, say: Callable[[str], None]
) -> Iterable[Contestant]:
    variants: dict[str, dict[str, Any]] = {"gguf": {}}
    if choices.wide:
        variants["gguf f32"] = {"INFERENCE_PRECISION_HINT": "f32"}
        variants["gguf kv bf16"] = {"KV_CACHE_PRECISION": "bf16"}
        variants["gguf unpinned"] = {"ENABLE_CPU_PINNING": False}
    for short, properties in variants.items():
        yield Contestant(
            f"openvino {short}",
            "4-bit",
            "peers.on_openvino",
            python,
            {"model": str(gguf), "threads": choices.threads, "properties": properties},
            lookups(choices),
        )


def _llama_cpp(
    model: Model, gguf: Path, python: Path, choices: Choices, say: Callable[[str], None]
) -> Iterable[Contestant]:
    for short, flash in (("gguf", False), ("gguf flash", True))[: 2 if choices.wide else 1]:
        yield Contestant(
            f"llama.cpp {short}",
            "4-bit",
            "peers.on_llama_cpp",
            python,
            {
                "model": str(gguf),
                "threads": choices.threads,
                "context": LLAMA_CONTEXT,
                "flash_attention": flash,
            },
            lookups(choices),
        )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables())
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ConversionError(lines[-1] if lines else f"exit status {done.returncode}")
