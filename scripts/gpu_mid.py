"""A model of middle size for the times of gpu_check.py: 8 layers of 1024, a vocabulary of 32,000.

Its weights are random and made from a seed where they are needed, so that a kit carries none of
them: an exported folder loses its large matrices, and gets the same ones again on the other
machine, byte for byte (``fill``).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_kit
import numpy as np
from numpy.typing import NDArray

from specrun import manifest as manifests

RECIPE = "mid"
MID_VARIANTS = ("ort-fp16", "trt-fp16")
FILLED = "filled.json"  # beside the folder: what was taken out of its data file
KEPT = "kept.bin"
PIECE = 1 << 22  # values made at a time
LEAST = 1 << 15  # bytes of a matrix that is made anew
FLOAT16 = 10  # as ONNX numbers it
Region = tuple[int, int]  # offset and length in bytes


@dataclass(frozen=True)
class Mid:
    """Sizes. ``draft_layers``: of the model that drafts; ``long``: tokens before the timed steps;
    ``every``: columns of the logits, one in so many, that the reference keeps."""

    layers: int = 8
    draft_layers: int = 2
    hidden: int = 1024
    heads: int = 8
    inner: int = 2816
    vocabulary: int = 32000
    context: int = 1024
    long: int = 512
    every: int = 32


def save(mid: Mid, folder: Path) -> tuple[Path, Path]:
    """Checkpoints of the target and of its draft model, in fp16."""
    import torch
    import transformers
    from gpu_models import byte_tokenizer

    paths = []
    for name, layers in (("target", mid.layers), ("draft", mid.draft_layers)):
        config = transformers.LlamaConfig(
            vocab_size=mid.vocabulary,
            hidden_size=mid.hidden,
            intermediate_size=mid.inner,
            num_attention_heads=mid.heads,
            num_key_value_heads=mid.heads,
            max_position_embeddings=mid.context,
            num_hidden_layers=layers,
            bos_token_id=None,
            eos_token_id=None,
        )
        path = folder / name
        model: Any = transformers.LlamaForCausalLM(config)
        model.to(torch.float16).save_pretrained(path)
        byte_tokenizer(mid.vocabulary).save_pretrained(path)
        paths.append(path)
    return paths[0], paths[1]


def prepare(mid: Mid, folder: Path) -> None:
    """Export it in both dialects, without its weights, and with what ONNX Runtime says of it."""
    import gpu_programs

    from specexport import exporter
    from specexport.options import ExportOptions
    from specexport.sources import resolve

    home = folder / RECIPE
    with tempfile.TemporaryDirectory() as checkpoints:
        target, draft = (resolve(path) for path in save(mid, Path(checkpoints)))
        for variant in MID_VARIANTS:
            made, how = home / variant, gpu_kit.VARIANTS[variant]
            options = ExportOptions(precision="fp16", backend=how.dialect, check=False)
            exporter.export(target, [draft], made, options)
            empty(made)
    gpu_programs.write(home / "trt-fp16", gpu_kit.programs_path(folder, RECIPE, "trt-fp16"))
    for variant in MID_VARIANTS:
        _refer(mid, folder, variant)
    (home / "mid.json").write_text(json.dumps(vars(mid)), encoding="utf-8")


def _refer(mid: Mid, folder: Path, variant: str) -> None:
    """Some columns of what ONNX Runtime says on the CPU. The places in the data file, and so the
    weights, are others in each dialect."""
    import gpu_observe

    import specrun

    with tempfile.TemporaryDirectory() as place:
        restored = restore(folder / RECIPE / variant, Path(place, "engines"))
        with specrun.load(restored, verify="engine") as engine:
            said = gpu_observe.logits(engine.target, mid.vocabulary, mid.long)
    columns = {name: values[:, :: mid.every].astype(np.float16) for name, values in said.items()}
    gpu_observe.write(gpu_kit.reference_path(folder, RECIPE, variant), columns, {})


def empty(folder: Path) -> None:
    """Take the matrices out of the data file of an exported folder; the manifest is then that of
    the folder with the matrices that ``fill`` makes."""
    from specexport.datafile import DATA_FILE

    data, regions = folder / DATA_FILE, _matrices(folder)
    with data.open("r+b") as file:
        for region in regions:
            _fill(file, region)
    size = data.stat().st_size
    seal(folder, DATA_FILE)
    kept = _between(regions, size)
    raw = np.memmap(data, np.uint8, "r")
    (folder.parent / f"{folder.name}.{KEPT}").write_bytes(
        b"".join(raw[start : start + length].tobytes() for start, length in kept)
    )
    said = {"file": DATA_FILE, "size": size, "matrices": regions, "kept": kept}
    (folder.parent / f"{folder.name}.{FILLED}").write_text(json.dumps(said), encoding="utf-8")
    data.unlink()


def restore(folder: Path, out: Path) -> Path:
    """A copy of an emptied folder with all its weights."""
    said = json.loads((folder.parent / f"{folder.name}.{FILLED}").read_text(encoding="utf-8"))
    kept = (folder.parent / f"{folder.name}.{KEPT}").read_bytes()
    shutil.copytree(folder, out)
    with (out / said["file"]).open("wb") as file:
        file.truncate(said["size"])
        at = 0
        for start, length in said["kept"]:
            file.seek(start)
            file.write(kept[at : at + length])
            at += length
        for region in said["matrices"]:
            _fill(file, region)
    return out


def _matrices(folder: Path) -> list[Region]:
    """Where the data file has matrices of fp16, in the order of the file."""
    import gpu_programs

    found: set[Region] = set()
    for path in folder.glob("*.onnx"):
        for tensor in gpu_programs.weights(path).values():
            matrix = len(tensor["shape"]) == 2 and tensor["type"] == FLOAT16
            if matrix and "file" in tensor and tensor["length"] >= LEAST:
                found.add((tensor["offset"], tensor["length"]))
    return sorted(found)


def _between(regions: list[Region], size: int) -> list[Region]:
    """The bytes of the file that no region has."""
    ends = [0, *(start + length for start, length in regions)]
    starts = [*(start for start, _ in regions), size]
    return [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]


def _fill(file: Any, region: Region) -> None:
    """Values of fp16, +-[1, 2) / 64, that depend on the place in the file only."""
    offset, length = region
    random = np.random.default_rng(offset)
    file.seek(offset)
    for start in range(0, length // 2, PIECE):
        count = min(PIECE, length // 2 - start)
        drawn: NDArray[np.uint16] = random.integers(0, 1 << 16, count, dtype=np.uint16)
        file.write(((drawn & 0x83FF) | 0x2400).astype("<u2").tobytes())


def seal(folder: Path, name: str) -> None:
    """Let the manifest say what a file now holds."""
    path = folder / manifests.MANIFEST
    said = json.loads(path.read_text(encoding="utf-8"))
    for entry in said["files"]:
        if entry["path"] == name:
            entry["sha256"] = manifests.sha256_of(folder / name)
    path.write_text(json.dumps(said), encoding="utf-8")


def read(folder: Path) -> Mid:
    """The sizes of the model in the kit."""
    said = json.loads((folder / RECIPE / "mid.json").read_text(encoding="utf-8"))
    return replace(Mid(), **said)
