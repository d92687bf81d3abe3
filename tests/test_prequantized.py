"""Checkpoints that are quantized already: what they stand for, and that engines get their
integers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import exported
import numpy as np
import onnx_ir as ir
import pytest
import tiny_models
import torch
from numpy.typing import NDArray
from packers import (
    EVERY,
    FLOAT_WAY,
    HIDDEN,
    INNER,
    LAYERS,
    STRAIGHT,
    TABLE,
    Checkpoint,
    Kind,
    Layer,
    make,
    write,
    write_gguf,
)
from safetensors.torch import load_file, save_file

from specexport import exporter, models, quantization, safetensors_files
from specexport.errors import SourceError, WeightsError
from specexport.integers import BlockParts
from specexport.options import ExportOptions
from specexport.sources import resolve
from specexport.weights import MergedExperts, Weights
from specrun import manifest as manifests
from specrun.manifest import Manifest, Precision


@pytest.mark.parametrize("name", [*EVERY, "Q8_0", "Q4_0"])
def test_rows_are_the_formula(name: str, tmp_path: Path) -> None:
    """Whole, in any range, and whatever is mapped at a time."""
    made = make(tmp_path, name)
    weights = made.source.weights
    weights.check_complete(made.source.expected_shapes())
    assert len(made.layers) >= 7 * LAYERS
    for layer, known in made.layers.items():
        want = known.floats()
        assert weights.dtype(layer) == np.float32
        np.testing.assert_array_equal(weights.read(layer), want, err_msg=layer)
        count = len(want)
        for start, stop in ((0, 1), (3, 4), (1, 10), (count - 9, count), (7, count - 5), (5, 5)):
            got = weights.read_rows(layer, start, stop)
            np.testing.assert_array_equal(got, want[start:stop], err_msg=f"{layer} {start}:{stop}")
    for layer, tensor in made.model.state_dict().items():
        np.testing.assert_array_equal(weights.read(layer), tensor.numpy(), err_msg=layer)


def test_columns_of_a_large_matrix_are_read_in_bands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(7 * 5, dtype=np.int32).reshape(7, 5)
    halves = torch.from_numpy(values).to(torch.bfloat16)
    save_file({"i": torch.from_numpy(values), "b": halves}, tmp_path / "x")
    stored = safetensors_files.read_header(tmp_path / "x")
    sizes: list[int] = []
    memmap = np.memmap

    def watched(*args: Any) -> Any:
        mapped = memmap(*args)
        sizes.append(mapped.nbytes)
        return mapped

    monkeypatch.setattr(np, "memmap", watched)
    for band, most in ((1, 20), (45, 40), (1 << 20, 140)):
        monkeypatch.setattr(safetensors_files, "BAND_BYTES", band)
        sizes.clear()
        np.testing.assert_array_equal(stored["i"].columns(1, 4), values[:, 1:4])
        assert max(sizes) == most and sum(sizes) == 140
        got = stored["b"].columns(2, 5)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, values[:, 2:5])


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0"])
def test_moved_rows_of_a_gguf_are_read_alone(
    type_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query and key rows stand in another order in the file; nothing else of them is unpacked."""
    from gguf import quants

    made = write_gguf(tmp_path / "tiny.gguf", type_name)
    weights, dequantize = made.source.weights, quants.dequantize
    seen: list[int] = []

    def watched(raw: Any, kind: Any) -> Any:
        seen.append(len(raw))
        return dequantize(raw, kind)

    monkeypatch.setattr(quants, "dequantize", watched)
    for projection in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{projection}.weight"
        weights.read_rows(name, 5, 8)
        assert seen == [3]
        seen.clear()


# What engines get.


def initializers(folder: Path, manifest: Manifest) -> dict[str, NDArray[Any]]:
    """By name, of all engines."""
    found = {}
    for engine in manifest.engines.values():
        for name, value in ir.load(folder / engine.file).graph.initializers.items():
            if value.const_value is not None:
                found[name] = value.const_value.numpy()
    return found


def in_blocks(layer: Layer) -> Iterator[tuple[str, NDArray[Any]]]:
    """The parts of a layer as engines have them, in rows."""
    rows, count = layer.scales.shape
    size = int((layer.groups == 0).sum())
    fill = count * size - layer.values.shape[1]
    values = np.concatenate([layer.values, np.repeat(layer.zeros[:, -1:], fill, 1)], axis=1)
    yield "scales", layer.scales
    if layer.bits == 8:
        yield "values", values.astype(np.uint8).reshape(rows, -1)
        return
    yield "values", (values[:, 0::2] + 16 * values[:, 1::2]).astype(np.uint8)
    zeros = np.concatenate([layer.zeros, np.zeros((rows, count % 2), np.int64)], axis=1)
    yield "zeros", (zeros[:, 0::2] + 16 * zeros[:, 1::2]).astype(np.uint8)


def check_same_integers(
    made: Checkpoint, folder: Path, manifest: Manifest, names: list[str]
) -> None:
    """Each of ``names`` is in the data file as the checkpoint has it, also in joined products."""
    stored = initializers(folder, manifest)
    for name in names:
        own = name.removesuffix(".weight")
        for part, want in in_blocks(made.layers[name]):
            holders = [key for key in stored if own in holding(key) and f".blocks.{part}." in key]
            assert holders, (name, part)
            for key in holders:
                before = holding(key)[: holding(key).index(own)]
                first = sum(len(made.layers[f"{one}.weight"].values) for one in before)
                got = stored[key].reshape(-1, want.shape[1])[first : first + len(want)]
                np.testing.assert_array_equal(got, want, err_msg=f"{key}: {name}")


def holding(key: str) -> list[str]:
    """Names of the layers in an initializer that is made of blocks; a head is tied to the table."""
    names = key.partition(".blocks.")[0].split("+")
    return [TABLE.removesuffix(".weight") if name == "lm_head" else name for name in names]


def exported_to(made: Checkpoint, folder: Path, **options: Any) -> Manifest:
    exporter.export(made.source, None, folder, ExportOptions(**options))
    return manifests.read(folder)


def of_bits(bits: int) -> Precision:
    return "int4" if bits == 4 else "int8"


@pytest.mark.parametrize("name", STRAIGHT)
def test_integers_reach_the_engine_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ``block_size`` says, and nothing is looked at to choose or encode these layers."""
    kind = STRAIGHT[name]
    made = make(tmp_path, name)
    encoded = watch_encoding(monkeypatch)
    out = tmp_path / "out"
    manifest = exported_to(made, out, precision=of_bits(kind.bits), block_size=16)
    check_same_integers(made, out, manifest, list(made.layers))
    assert encoded == [(tiny_models.VOCAB, HIDDEN)]  # the table, which is the head
    said = manifest.engines["target"].weights
    assert said is not None
    assert said.errors == {} and said.kept_int8 == ()
    assert manifest.notes == (
        f"target: {kind.bits} bits in blocks of {kind.size}, {quantization.KEPT}: 14 weights",
    )
    assert manifest.parity is not None
    assert models.DEQUANTIZED in manifest.parity.scope
    assert manifest.quality is not None
    # Nothing but activations is rounded.
    assert manifest.quality.argmax_agreement > 0.85
    assert abs(manifest.quality.loss) < 0.05


def watch_encoding(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the floats that are encoded in blocks from now on."""
    from specexport import encoders

    shapes: list[tuple[int, ...]] = []
    encode = encoders.blocks

    def watched(weight: Any, *args: Any) -> Any:
        shapes.append(weight.shape)
        return encode(weight, *args)

    monkeypatch.setattr(encoders, "blocks", watched)
    return shapes


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0"])
def test_gguf_blocks_reach_the_engine_as_they_are(
    type_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers, moved rows included, and the table, which the head shares."""
    made = write_gguf(tmp_path / "tiny.gguf", type_name)
    precision = of_bits(made.layers[TABLE].bits)
    encoded = watch_encoding(monkeypatch)
    out = tmp_path / "out"
    options = {"head_precision": precision, "embedding_precision": precision, "block_size": 64}
    manifest = exported_to(made, out, precision=precision, **options)
    names = list(made.layers)
    check_same_integers(made, out, manifest, names)
    assert encoded == []
    assert manifest.notes == (
        f"target: {made.layers[TABLE].bits} bits in blocks of 32, {quantization.KEPT}:"
        f" {len(names)} weights",
    )
    table = next(part for part in in_blocks(made.layers[TABLE]) if part[0] == "values")[1]
    assert (out / "weights.data").read_bytes().count(table.tobytes()) == 1
    assert manifest.quality is not None
    assert manifest.quality.argmax_agreement > 0.85


def test_a_table_of_other_bits_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """int4 has its table and head in 8 bits, so of a Q4_0 file only the layers go straight."""
    made = write_gguf(tmp_path / "tiny.gguf", "Q4_0")
    encoded = watch_encoding(monkeypatch)
    manifest = exported_to(made, tmp_path / "out", precision="int4", check=False)
    layers = [name for name in made.layers if name != TABLE]
    check_same_integers(made, tmp_path / "out", manifest, layers)
    assert encoded == [(tiny_models.VOCAB, HIDDEN)]
    again = f"target: stored with 4 bits in blocks of 32, {quantization.REQUANTIZED}: {TABLE}"
    assert again in manifest.notes


@pytest.mark.parametrize("reason", FLOAT_WAY)
def test_the_float_way_is_noted(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = FLOAT_WAY[reason]
    made = make(tmp_path, reason)
    encoded = watch_encoding(monkeypatch)
    manifest = exported_to(made, tmp_path / "out", precision=of_bits(kind.bits), check=False)
    stored = [layer.values.shape for layer in made.layers.values()]
    assert all(shape in encoded for shape in stored)
    (note,) = manifest.notes
    assert note.startswith(f"target: {reason}, {quantization.REQUANTIZED}: model.layers.0.")
    assert note.endswith(" and 9 more")


def test_other_precisions_take_the_float_way(tmp_path: Path) -> None:
    """8 bits from 4 are rounded from the floats that 4 bits stand for; fp32 rounds nothing."""
    made = make(tmp_path, "awq")
    manifest = exported_to(made, tmp_path / "int8", precision="int8", check=False)
    (note,) = manifest.notes
    assert f"stored with 4 bits in blocks of 64, {quantization.REQUANTIZED}" in note
    assert exported_to(made, tmp_path / "fp32", check=False).notes == ()


def test_calibration_is_left_out_where_nothing_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a check no model is loaded at all."""

    def load(*_: Any) -> Any:
        raise AssertionError("loaded")

    monkeypatch.setattr(models, "load", load)
    made = make(tmp_path, "gptq4")
    exported_to(made, tmp_path / "out", precision="int4", check=False)
    with pytest.raises(AssertionError, match="loaded"):
        head: Any = {"head_precision": "int4"}  # of floats, so it is calibrated
        exported_to(made, tmp_path / "out", precision="int4", check=False, **head)


# What engines compute.


@pytest.mark.parametrize("name", ["gptq4", "awq", "compressed4-asym", "Q4_0"])
def test_fp32_generates_what_transformers_does(name: str, tmp_path: Path) -> None:
    """On the weights that the test unpacked, not those that the export did."""
    import specrun

    made = make(tmp_path, name)
    exported_to(made, tmp_path / "out")
    made.model.generation_config.eos_token_id = None
    with specrun.load(tmp_path / "out", threads=1) as engine:
        for length in (3, 20):
            prompt = exported.prompt_of(length)
            got = engine.generate(prompt, method="plain", max_new_tokens=24, eos_token_ids=[])
            exported.same_tokens(got.tokens, exported.greedy(made.model, prompt, 24))


def test_the_reference_has_the_weights_of_the_formula(tmp_path: Path) -> None:
    made = make(tmp_path, "gptq4")
    source = made.source
    assert getattr(source.config, "quantization_config", None) is None
    model: Any = source.load_reference()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in made.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0, msg=name)
    tokens = exported.prompt_of(9)
    np.testing.assert_array_equal(
        exported.forward(model, tokens)[0], exported.forward(made.model, tokens)[0]
    )
    half = source.load_reference(torch.float16)
    assert {p.dtype for p in half.parameters()} == {torch.float16}


# What is refused.

Change = Callable[[dict[str, torch.Tensor]], None]
LAYER = "model.layers.1.mlp.up_proj"


def without(part: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{LAYER}.{part}"]

    return change


def cut(part: str, axis: int) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        whole = tensors[f"{LAYER}.{part}"]
        tensors[f"{LAYER}.{part}"] = whole.narrow(axis, 0, whole.shape[axis] - 1).contiguous()

    return change


def cast(part: str, dtype: torch.dtype) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{part}"] = tensors[f"{LAYER}.{part}"].to(dtype)

    return change


def flat(part: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{part}"] = tensors[f"{LAYER}.{part}"].flatten()

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq4", without("scales"), f"{LAYER}.scales is missing beside qweight"),
        ("gptq4", without("qzeros"), f"{LAYER}.qzeros is missing beside qweight"),
        ("gptq4", cut("qzeros", 1), f"{LAYER}.qzeros is I32 [2, 23], must be I32 [2, 24]"),
        ("gptq4", cut("g_idx", 0), f"{LAYER}.g_idx is I32 [127], must be I32 or I64 [128]"),
        ("gptq4", flat("qweight"), f"{LAYER}.qweight is I32 [3072], must be an I32 matrix"),
        ("gptq4", cast("qweight", torch.int64), f"{LAYER}.qweight is I64 [16, 192], must be"),
        ("gptq4", cast("scales", torch.int8), f"{LAYER}.scales is I8 [2, 192], must be F16 or"),
        ("awq", cut("scales", 0), f"{LAYER}.scales is F16 [1, 192], must be"),
        ("awq", cut("qweight", 0), f"{LAYER}.weight is [192, 127], must be [192, 128]"),
        ("compressed4", without("weight_shape"), f"{LAYER}.weight_shape is missing beside"),
        ("compressed4", cut("weight_packed", 1), f"{LAYER}.weight_packed is I32 [192, 15], must"),
        ("compressed4", cut("weight_shape", 0), f"{LAYER}.weight_shape is I64 [1], must be"),
        (
            "compressed4-asym",
            cut("weight_zero_point", 0),
            f"{LAYER}.weight_zero_point is I32 [23, 4], must be I8 or I32 [24, 4]",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(
    name: str, change: Change, message: str, tmp_path: Path
) -> None:
    made = make(tmp_path, name)
    file = made.path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(WeightsError) as caught:
        made.source.weights.check_complete(tiny_shapes(made))
    assert message in str(caught.value)
    assert caught.value.hint


def tiny_shapes(made: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in made.model.state_dict().items()}


def test_groups_that_there_are_not_and_files_that_are_cut(tmp_path: Path) -> None:
    made = make(tmp_path, "gptq4")
    file = made.path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{LAYER}.g_idx"][5] = 2
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=rf"{LAYER}\.g_idx names group 2 of 2"):
        made.source.weights.read(f"{LAYER}.weight")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(WeightsError, match=r"not a whole safetensors file: 'model\.\S+' ends at"):
        resolve(made.path)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"bits": 4}, "of an unnamed kind"),
        (Kind("gptq", 3, 64).config, "gptq, 3 bits"),
        (Kind("gptq", 4, 64).config | {"checkpoint_format": "marlin"}, "gptq, checkpoint format"),
        (Kind("gptq", 4, 64).config | {"group_size": None}, "group_size is None"),
        (Kind("gptq", 4, 64).config | {"group_size": 0}, "gptq, groups of 0"),
        (Kind("awq", 4, 64).config | {"version": "gemv"}, "awq, version gemv"),
        (Kind("awq", 4, 64).config | {"zero_point": False}, "awq without zero points"),
        (Kind("awq", 8, 64).config, "awq, 8 bits"),
        (
            Kind("compressed-tensors", 4, 64).config | {"format": "int-quantized"},
            "compressed-tensors, format int-quantized",
        ),
        (
            Kind("compressed-tensors", 4, 64).config | {"transform_config": {"a": 1}},
            "compressed-tensors with transforms",
        ),
    ],
)
def test_other_quantizations_are_refused(config: Any, what: str, tmp_path: Path) -> None:
    made = make(tmp_path, "gptq4")
    file = made.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    with pytest.raises(SourceError) as caught:
        resolve(made.path)
    assert f"the checkpoint is quantized already ({what}" in str(caught.value)
    assert "gptq (4 and 8 bits), awq (gemm)" in str(caught.value.hint)


def test_experts_keep_their_integers_if_all_are_stored_alike(tmp_path: Path) -> None:
    made = write(tmp_path / "m", STRAIGHT["gptq4"])
    stored = made.source.stored_tensors()
    names = [[f"model.layers.{e}.mlp.{p}_proj.weight" for p in ("gate", "up")] for e in range(2)]
    experts = tuple(tuple(stored[name] for name in parts) for parts in names)
    merged = Weights({"e": MergedExperts(experts)})
    form = merged.form("e")
    assert form is not None and (form.bits, form.size, form.obstacle) == (4, 64, "")
    for expert, parts in enumerate(names):
        pieces = list(merged.block_chunks("e", 1000, expert))
        assert len(pieces) > 1 and sum(len(one.scales) for one in pieces) == 2 * INNER
        for part in BlockParts._fields:
            array = np.concatenate([getattr(one, part) for one in pieces])
            want = [dict(in_blocks(made.layers[name]))[part] for name in parts]
            np.testing.assert_array_equal(array.reshape(2 * INNER, -1), np.concatenate(want))
    other = write(tmp_path / "n", FLOAT_WAY["act-order"]).source.stored_tensors()
    mixed = Weights({"e": MergedExperts((experts[0], tuple(other[n] for n in names[1])))})
    form = mixed.form("e")
    assert form is not None and form.size is None and "in different ways" in form.obstacle
    with pytest.raises(WeightsError, match="e: is not stored in blocks"):
        next(mixed.block_chunks("e", 1))


def test_floats_have_no_blocks(tmp_path: Path) -> None:
    save_file({"t": torch.zeros(3, 2)}, tmp_path / "x")
    weights = Weights(dict(safetensors_files.read_header(tmp_path / "x")))
    assert weights.form("t") is None
    with pytest.raises(WeightsError, match="t: is not stored in blocks"):
        list(weights.block_chunks("t", 100))


@pytest.mark.parametrize(
    ("name", "part"), [("act-order", "g_idx"), ("compressed4-asym", "weight_zero_point")]
)
def test_a_part_that_the_configuration_promises_must_be_there(
    name: str, part: str, tmp_path: Path
) -> None:
    """Without it every value would be another one, and nothing else could tell."""
    made = make(tmp_path, name)
    tensors = load_file(made.path / "model.safetensors")
    lost = next(key for key in tensors if key.endswith(f".{part}"))
    del tensors[lost]
    save_file(tensors, made.path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{lost} is missing"):
        resolve(made.path)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_scales_that_are_not_finite(precision: Precision, tmp_path: Path) -> None:
    made = make(tmp_path, "gptq4")
    tensors = load_file(made.path / "model.safetensors")
    name = next(key for key in tensors if key.endswith(".scales"))
    tensors[name][0, 3] = float("nan")
    save_file(tensors, made.path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"_proj\.weight: holds values that are not finite"):
        exporter.export(
            resolve(made.path),
            None,
            tmp_path / "out",
            ExportOptions(precision=precision, check=False),
        )
    assert not (tmp_path / "out").exists()
