"""What an engine folder's files hold, over all engines of it: every byte once, sizes left open."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exported
import onnx_ir as ir
import pytest
import tiny_models
import transformers
from exported import NUM_DRAFT, Exported, Pair

from specexport import exporter
from specexport.datafile import DATA_FILE, alignment
from specexport.options import ExportOptions
from specexport.sources import resolve
from specgraphs.packed_attention import SPARE_ROWS
from specrun.contract import BATCH, CAPACITY, ROWS, TOKENS
from specrun.manifest import Precision

pytestmark = pytest.mark.slow

Once = Callable[..., Path]
LLAMA: Pair = ("llama", None)
CENTROID: Pair = ("gemma4-e2b", "assistant-centroid")
GLM: Pair = ("glm4-moe-mtp1", None)
KIBIBYTE = 1024

# Pair, precision, early exit: those that test_precisions does not have.
FOLDERS: tuple[tuple[Pair, Precision, int | None], ...] = (
    (LLAMA, "fp32", None),
    (CENTROID, "fp32", None),
    (GLM, "fp32", None),
    (LLAMA, "fp32", 1),
    (LLAMA, "int8", 1),
    (LLAMA, "w8a8", 1),
)


def made_once(once: Once, pair: Pair, precision: Precision, early_exit: int | None) -> Exported:
    """The folder of one case, made at first use."""
    if early_exit is None:
        name, options = f"{exported.name_of(pair)}-{precision}", None  # that of ``exported_pair``
    else:
        name = f"{exported.name_of(pair)}-{precision}-exit{early_exit}-files"
        options = ExportOptions(
            precision=precision, num_draft=NUM_DRAFT, early_exit=early_exit, check=False
        )
    folder = once(name, lambda folder: exported.make(pair, folder, precision, options))
    return exported.read(pair, folder)


def ranges_of(made: Exported) -> list[tuple[int, int]]:
    """(offset, length) of every place of the data file that an engine refers to, once, in order."""
    found: set[tuple[int, int]] = set()
    for engine in made.manifest.engines.values():
        for value in ir.load(made.folder / engine.file).graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                assert tensor.location == DATA_FILE
                assert tensor.offset is not None and tensor.length is not None
                found.add((tensor.offset, tensor.length))
    return sorted(found)


# C57, C59: no exceptions; only places under 1 KiB may hold the same by chance, as zeros do.
@pytest.mark.parametrize(
    ("pair", "precision", "early_exit"),
    [pytest.param(*c, id=f"{exported.name_of(c[0])}-{c[1]}-{c[2]}") for c in FOLDERS],
)
def test_every_byte_once(
    once: Once, pair: Pair, precision: Precision, early_exit: int | None
) -> None:
    """What engines refer to is the file, but for alignment, and no two places hold the same."""
    made = made_once(once, pair, precision, early_exit)
    assert early_exit is None or len(made.manifest.engines) > 1
    data = (made.folder / DATA_FILE).read_bytes()
    end = 0
    seen: dict[str, tuple[int, int]] = {}
    for offset, length in ranges_of(made):
        align = alignment(length)
        assert offset == -(-end // align) * align, "a gap, or two places overlap"
        end = offset + length
        if length > KIBIBYTE:
            digest = hashlib.sha256(data[offset:end]).hexdigest()
            assert digest not in seen, (seen[digest], (offset, length))
            seen[digest] = (offset, length)
    assert end == len(data)
    assert len(seen) > 3


# C57.
@pytest.mark.parametrize(("precision", "per_value"), [("fp32", 4.0), ("int8", 1 + 4 / 32)])
def test_a_folder_is_its_weights(tmp_path: Path, precision: Precision, per_value: float) -> None:
    """With tables so large that the graph files do not matter: 2% more than the weights, once."""
    sizes: dict[str, Any] = tiny_models.BASE | {"vocab_size": 1 << 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "ck")
    tiny_models.tokenizer().save_pretrained(tmp_path / "ck")
    out = tmp_path / "out"
    exporter.export(
        resolve(tmp_path / "ck"), None, out, ExportOptions(precision=precision, check=False)
    )
    cosines = 2 * (tiny_models.CONTEXT + SPARE_ROWS) * 8 * 4  # and sines, of half a head
    unique = sum(parameter.numel() for parameter in model.parameters()) * per_value + cosines
    tokenizer = (out / "tokenizer.json").stat().st_size
    size = sum(path.stat().st_size for path in out.iterdir())
    assert unique <= size <= 1.02 * (unique + tokenizer)


# C66: that other sizes run is in test_architectures.
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_sizes_are_left_open(once: Once, precision: Precision) -> None:
    """Of the batch, the rows and the KV."""
    made = made_once(once, LLAMA, precision, None)
    inputs = {v.name: v for v in ir.load(made.folder / made.spec.file).graph.inputs}
    shape = inputs[TOKENS].shape
    assert shape is not None and [str(d) for d in shape] == [BATCH, ROWS]
    caches = [value.shape for name, value in inputs.items() if (name or "").startswith("past.")]
    assert caches
    for cache in caches:
        assert cache is not None and (str(cache[0]), str(cache[2])) == (BATCH, CAPACITY)


# C58.
def test_graph_files_are_small(once: Once) -> None:
    """Weights stand outside: a graph file holds nodes and what is under 1 KiB."""
    made = made_once(once, CENTROID, "fp32", None)
    for engine in made.manifest.engines.values():
        assert (made.folder / engine.file).stat().st_size < 1 << 20
        for value in ir.load(made.folder / engine.file).graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            assert isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < KIBIBYTE, value.name
