"""Sources and weights: what transformers saves is read back, in pieces, under the right names.

Every reading test compares with a model that transformers itself loaded from the same files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file

from specexport import hub, naming, presets, safetensors_files, sources
from specexport.errors import ExportError, SourceError, WeightsError
from specexport.sources import Source, resolve, resolve_pair
from specexport.weights import MergedExperts, Weights
from specrun.errors import SpecrunError
from specrun.response_format import Region, ResponseFormat

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GEMMA4: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 4,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}
DENSE4: dict[str, Any] = {**GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
ASSISTANT_TEXT: dict[str, Any] = {
    **DENSE4,
    "num_kv_shared_layers": 4,
    "vocab_size_per_layer_input": 0,
}


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **changes))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL))


def gemma3() -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL))


def gemma4() -> Any:
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**GEMMA4))


def gemma4_experts() -> Any:
    config = transformers.Gemma4TextConfig(
        **DENSE4, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24
    )
    return transformers.Gemma4ForCausalLM(config)


def gemma4_multimodal() -> Any:
    config = transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(**GEMMA4).to_dict(),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        audio_config=None,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def gemma4_assistant() -> Any:
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**ASSISTANT_TEXT).to_dict(),
        backbone_hidden_size=32,
        use_ordered_embeddings=True,
        num_centroids=8,
        centroid_intermediate_top_k=2,
    )
    model: Any = transformers.Gemma4AssistantForCausalLM(config)
    model.masked_embedding.token_ordering.copy_(torch.randperm(SMALL["vocab_size"]))
    return model


def gemma4_unified() -> Any:
    text = {k: v for k, v in DENSE4.items() if not k.endswith("per_layer_input")}
    config = transformers.Gemma4UnifiedTextConfig(**text)
    return transformers.Gemma4UnifiedForCausalLM(config)


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Randomise what starts out constant (norms), so that a mix-up shows; then save."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **options)
    return folder


def check_equals_reference(source: Source) -> None:
    """Names, shapes, dtypes and values, whole and in chunks, equal transformers' own loading."""
    weights = source.weights
    weights.check_complete(source.expected_shapes())
    reference = source.load_reference().state_dict()
    assert weights.names() == sorted(reference)
    for name, tensor in reference.items():
        value = weights.read(name)
        assert value.dtype == weights.dtype(name)
        assert weights.shape(name) == tuple(tensor.shape) == value.shape
        assert weights.nbytes(name) == value.nbytes
        np.testing.assert_array_equal(value, tensor.numpy(), err_msg=name)
        if value.ndim:
            chunks = list(weights.chunks(name, 200))
            assert all(len(chunk) == 1 or chunk.nbytes <= 200 for chunk in chunks)
            rows = value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value
            np.testing.assert_array_equal(np.concatenate(chunks), rows)
        if value.ndim == 3:
            one = np.concatenate(list(weights.chunks(name, 200, 1)))
            np.testing.assert_array_equal(one, value[1])


@pytest.mark.parametrize(
    ("make", "architecture"),
    [
        (llama, "LlamaForCausalLM"),
        (qwen3, "Qwen3ForCausalLM"),
        (gemma3, "Gemma3ForCausalLM"),
        (gemma4, "Gemma4ForCausalLM"),
        (gemma4_experts, "Gemma4ForCausalLM"),
        (gemma4_multimodal, "Gemma4ForCausalLM"),
        (gemma4_assistant, "Gemma4AssistantForCausalLM"),
        (gemma4_unified, "Gemma4UnifiedForCausalLM"),
    ],
)
def test_every_architecture_reads_as_transformers_loads_it(
    make: Callable[[], Any], architecture: str, tmp_path: Path
) -> None:
    source = resolve(save(make(), tmp_path / "checkpoint"))
    assert source.architecture == architecture
    assert source.id == "checkpoint"
    assert source.revision is None
    check_equals_reference(source)


def test_sharded_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    folder = save(gemma4().to(torch.bfloat16), tmp_path / "m", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    source = resolve(folder)
    assert source.weights.stored("model.norm.weight") == "BF16"
    assert source.weights.dtype("model.norm.weight") == np.float32
    check_equals_reference(source)


def test_float16_and_integers_keep_their_dtype(tmp_path: Path) -> None:
    half = resolve(save(llama().to(torch.float16), tmp_path / "half"))
    assert half.weights.dtype("model.norm.weight") == np.float16
    assistant = resolve(save(gemma4_assistant(), tmp_path / "assistant"))
    name = "masked_embedding.token_ordering"
    assert assistant.weights.dtype(name) == np.int64
    assert sorted(assistant.weights.read(name)) == list(range(SMALL["vocab_size"]))


def test_tied_head_is_an_alias_and_untied_is_not(tmp_path: Path) -> None:
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    tied = resolve(save(llama(tie_word_embeddings=True), tmp_path / "tied")).weights
    assert (tied.alias(head), tied.canonical(head), tied.canonical(table)) == (table, table, table)
    untied = resolve(save(llama(tie_word_embeddings=False), tmp_path / "untied"))
    assert (untied.weights.alias(head), untied.weights.canonical(head)) == (None, head)
    check_equals_reference(untied)


@pytest.mark.parametrize("same", [True, False])
def test_tied_and_stored_twice_is_one_only_if_equal(tmp_path: Path, same: bool) -> None:
    folder = save(llama(tie_word_embeddings=True), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if same else 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    source = resolve(folder)
    assert (source.weights.alias("lm_head.weight") is not None) == same
    check_equals_reference(source)


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "model.language_model.model."]
)
def test_text_part_of_a_multimodal_checkpoint(tmp_path: Path, prefix: str) -> None:
    """Older checkpoints put the language model under other prefixes; towers are left out."""
    folder = save(gemma3(), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
    renamed["vision_tower.vision_model.embeddings.weight"] = torch.zeros(3)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": text, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    source = resolve(folder)
    assert (source.model_type, source.config.model_type) == ("gemma3", "gemma3_text")
    check_equals_reference(source)


def test_experts_stored_one_by_one_are_read_merged(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        **SMALL, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=16
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    stored = safetensors_files.read_folder(save(model, tmp_path / "m"))
    assert "model.layers.0.mlp.experts.11.up_proj.weight" in stored
    meta = naming.meta_model(transformers.Qwen3MoeForCausalLM, config)
    weights = naming.map_weights(stored, meta)
    weights.check_complete(naming.expected_shapes(meta))
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(weights.read(name), tensor.numpy(), err_msg=name)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    np.testing.assert_array_equal(
        weights.read_rows(name, 10, 12), model.state_dict()[name][10:].numpy()
    )
    one = dict(stored)
    del one["model.layers.0.mlp.experts.3.up_proj.weight"]
    with pytest.raises(WeightsError, match=r"experts are missing, found \[12, 11\]"):
        naming.map_weights(one, meta)


def test_merged_experts_refuse_unlike_shapes(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, tmp_path / "x.safetensors")
    stored = safetensors_files.read_header(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="same shapes"):
        MergedExperts(((stored["a"],), (stored["b"],)))


def test_rows_out_of_range_and_scalars(tmp_path: Path) -> None:
    save_file({"t": torch.arange(6.0).view(3, 2), "s": torch.tensor(2.5)}, tmp_path / "x")
    weights = Weights(safetensors_files.read_header(tmp_path / "x"))
    assert weights.read("s").shape == ()
    assert [chunk.tolist() for chunk in weights.chunks("s", 1)] == [2.5]
    assert weights.read_rows("t", 3, 3).shape == (0, 2)
    with pytest.raises(WeightsError, match=r"t: rows 2:4 are not within 0:3"):
        weights.read_rows("t", 2, 4)
    with pytest.raises(WeightsError, match="none: no such tensor"):
        weights.shape("none")


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(32, 31)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    source = resolve(folder)
    with pytest.raises(WeightsError, match=r"lacks model\.norm\.weight$"):
        source.weights.check_complete(source.expected_shapes())
    expected = source.expected_shapes()
    del expected["model.norm.weight"]
    with pytest.raises(WeightsError, match=r"o_proj\.weight is \[32, 31\], must be \[32, 32\]"):
        source.weights.check_complete(expected)


def test_generation_keeps_lists_of_end_ids(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 106], "top_k": 64}')
    assert resolve(folder).generation == {"eos_token_id": [1, 106], "top_k": 64}
    (folder / "generation_config.json").unlink()
    assert resolve(folder).generation == {"bos_token_id": 1, "eos_token_id": 2}


def pickled_only(folder: Path) -> Path:
    save(llama(), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


def cut_off(folder: Path) -> Path:
    path = save(llama(), folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    return folder


def missing_shard(folder: Path) -> Path:
    save(llama(), folder, max_shard_size="20KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()
    return folder


def escaping_shard(folder: Path) -> Path:
    save(llama(), folder, max_shard_size="20KB")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}')
    return folder


def with_config(**config: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def gguf_inside(folder: Path) -> Path:
    (empty(folder) / "m.gguf").write_bytes(b"")
    return folder


def plain_file(path: Path) -> Path:
    path.write_text("x")
    return path


def garbage_gguf(path: Path) -> Path:
    path = path.with_suffix(".gguf")
    path.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    return path


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (pickled_only, "weights are pickled (pytorch_model.bin)", "convert it to safetensors"),
        (cut_off, "not a whole safetensors file", "download the file again"),
        (missing_shard, "the index lists model-00002-of-", "all shards must be there"),
        (escaping_shard, "'../x' is not a file name of this folder", None),
        (empty, "no config.json in it", "save_pretrained"),
        (gguf_inside, "no config.json in it", "m.gguf"),
        (plain_file, "not a checkpoint", "give the folder it lies in"),
        (garbage_gguf, "not a whole GGUF file", "download the file again"),
        (with_config(model_type="bert"), "model type 'bert' is not supported", "gemma4_assistant"),
        (with_config(), "model type None is not supported", "llama"),
        (with_config(model_type="llama"), "no .safetensors file in it", "model.safetensors"),
        (
            with_config(model_type="llama", quantization_config={"quant_method": "fp8"}),
            "quantized already (fp8)",
            "give the unquantized checkpoint",
        ),
    ],
)
def test_bad_sources_say_what_and_how(
    make: Callable[[Path], Path], message: str, hint: str | None, tmp_path: Path
) -> None:
    path = make(tmp_path / "m")
    with pytest.raises(ExportError) as caught:
        resolve(path)
    assert isinstance(caught.value, SpecrunError)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert hint is None or hint in (caught.value.hint or "")


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    source = resolve(folder)
    source.load_reference()
    assert source.architecture == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


def test_hub_id_that_cannot_be_reached() -> None:
    with pytest.raises(SourceError) as caught:
        resolve("someone/no-such-model-here")
    assert str(caught.value).startswith("someone/no-such-model-here: no folder of that name here")
    assert "could not be reached" in str(caught.value)
    assert "local folder" in str(caught.value.hint)


def test_preset_that_cannot_be_reached_says_how_to_give_folders() -> None:
    with pytest.raises(SourceError) as caught:
        resolve_pair("gemma4-31b")
    assert "preset gemma4-31b: google/gemma-4-31B-it: " in str(caught.value)
    assert sources.LOCAL_PAIR in str(caught.value.hint)
    assert sources.LOCAL_PAIR == "specexport PATH/TO/target --drafter PATH/TO/assistant --out DIR"


def test_hub_errors_become_one_sentence_each() -> None:
    from huggingface_hub import errors

    def said(kind: type[Exception]) -> str:
        error = kind.__new__(kind)
        return str(hub._explained("a/b", "main", error))

    assert said(errors.GatedRepoError) == (
        "a/b at main: the model hub asks for its licence to be accepted first"
    )
    assert said(errors.RevisionNotFoundError) == "a/b at main: the model hub has no such revision"
    assert said(errors.RepositoryNotFoundError) == (
        "a/b at main: no folder of that name here, and no such model on the hub"
    )


def test_hub_download_takes_needed_files_and_gives_the_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import fnmatch

    import huggingface_hub

    commit = "0123456789abcdef0123456789abcdef01234567"
    seen: dict[str, Any] = {}
    revisions: list[str | None] = []

    def snapshot_download(repo: str, **options: Any) -> str:
        seen.update(options, repo=repo)
        revisions.append(options["revision"])
        return str(save(llama(), tmp_path / commit))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    source = resolve("someone/model", revision="main")
    assert (source.id, source.revision) == ("someone/model", commit)
    assert revisions[0] == "main"
    assert set(revisions[1:]) == {commit}  # a branch may move between two requests

    def wanted(name: str) -> bool:
        allowed = any(fnmatch.fnmatch(name, pattern) for pattern in seen["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(name, p) for p in seen["ignore_patterns"])

    names = ("model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja")
    assert all(wanted(name) for name in names)
    others = ("pytorch_model.bin", "onnx/model.safetensors", "modeling_evil.py", "README.md")
    assert not any(wanted(name) for name in others)


def test_revision_and_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="a revision is for hub models"):
        resolve(save(llama(), tmp_path / "m"), revision="main")
    with pytest.raises(SourceError, match="no such folder or file") as caught:
        resolve("./gemma4")
    assert "presets: gemma4, " in str(caught.value.hint)


def test_presets() -> None:
    assert {name: preset.target for name, preset in presets.PRESETS.items()} == {
        "gemma4": "google/gemma-4-E2B-it",
        "gemma4-e2b": "google/gemma-4-E2B-it",
        "gemma4-e4b": "google/gemma-4-E4B-it",
        "gemma4-12b": "google/gemma-4-12B-it",
        "gemma4-26b-a4b": "google/gemma-4-26B-A4B-it",
        "gemma4-31b": "google/gemma-4-31B-it",
        "gemma4-tiny": presets.BUNDLED / "gemma4-tiny" / "target",
    }
    for preset in presets.PRESETS.values():
        if not preset.bundled:
            assert preset.drafter == f"{preset.target}-assistant"
            assert hub.HUB_ID.fullmatch(str(preset.drafter))


def test_preset_pair_and_its_replaced_drafter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = save(gemma4(), tmp_path / "t")
    drafter = save(gemma4_assistant(), tmp_path / "a")
    preset = presets.Preset("toy", target, drafter, "")
    monkeypatch.setitem(presets.PRESETS, "toy", preset)
    one, two = resolve_pair("toy")
    assert two is not None
    assert (one.id, two.id, two.is_assistant) == ("toy/target", "toy/assistant", True)
    assert resolve("toy").id == "toy/target"
    _, other = resolve_pair("toy", save(llama(), tmp_path / "draft"))
    assert other is not None
    assert other.id == "draft"
    assert resolve_pair(target)[1] is None


def tokenizer_folder(folder: Path, *, bos: bool, template: str | None) -> Path:
    """A byte-level tokenizer with a bos rule, saved as a tokenizer of the tokenizers library is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<bos>", "<eos>", "<turn|>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens={"eot_token": "<turn|>"},
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bos", [True, False])
def test_tokenizer_is_written_for_the_runtime(tmp_path: Path, bos: bool) -> None:
    from tokenizers import Tokenizer

    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    folder = tokenizer_folder(save(llama(), tmp_path / "m"), bos=bos, template=template)
    (tmp_path / "out").mkdir()
    info = resolve(folder).write_tokenizer(tmp_path / "out")
    written = Tokenizer.from_file(str(tmp_path / "out" / info.file))
    ours = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("Hello <turn|> wörld", "", "  two  spaces\n"):
        assert written.encode(text).ids == ours(text)["input_ids"]
    assert info.add_bos is bos
    assert info.vocab_size == len(ours) == written.get_vocab_size()
    assert info.chat_template == "chat_template.jinja"
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template
    assert info.special_tokens == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "eot_token": "<turn|>",
    }


def test_how_answers_are_marked_is_taken_along(tmp_path: Path) -> None:
    """From the tokenizer's response template, else from the marks in its chat template."""
    (tmp_path / "out").mkdir()
    template = "{{ messages[0]['content'].split('</think>')[-1] }}"
    folder = tokenizer_folder(save(llama(), tmp_path / "m"), bos=False, template=template)
    by_chat = resolve(folder).write_tokenizer(tmp_path / "out").response
    assert by_chat == ResponseFormat(thinking=Region(("<think>",), ("</think>",)))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    fields: dict[str, Any] = {
        "content": {},
        "tool_calls": {"open_pattern": r"\s*<call>\s*(?P<n>\w+)"},
    }
    fields["tool_calls"]["transform"] = {"name": "{n}"}
    file.write_text(
        json.dumps(config | {"response_template": {"start_anchor": ">", "fields": fields}})
    )
    declared = resolve(folder).write_tokenizer(tmp_path / "out").response
    assert declared == ResponseFormat(tool_calls=Region(("<call>",), ()))


def test_tokenizer_without_template_and_none_at_all(tmp_path: Path) -> None:
    folder = tokenizer_folder(save(llama(), tmp_path / "m"), bos=False, template=None)
    (tmp_path / "out").mkdir()
    assert resolve(folder).write_tokenizer(tmp_path / "out").chat_template is None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.json"]
    with pytest.raises(SourceError, match="its tokenizer cannot be loaded"):
        resolve(save(llama(), tmp_path / "bare")).write_tokenizer(tmp_path / "out")


def write_gguf(path: Path, *extra: tuple[str, tuple[int, ...]], **metadata: str) -> Path:
    """A small random Llama as llama.cpp would store it, its matrices in Q8_0."""
    import gguf
    from gguf.quants import quantize

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, metadata.pop("arch", "llama"))
    writer.add_name("small")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_token_list([f"t{i}" for i in range(96)])
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (96, 64), "output_norm": (64,)}
    for layer in range(2):
        for name, shape in {
            "attn_q": (64, 64),
            "attn_k": (32, 64),
            "attn_v": (32, 64),
            "attn_output": (64, 64),
            "ffn_gate": (96, 64),
            "ffn_up": (96, 64),
            "ffn_down": (64, 96),
            "attn_norm": (64,),
            "ffn_norm": (64,),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    shapes.update(extra)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_reads_as_transformers_loads_it(tmp_path: Path) -> None:
    source = resolve(write_gguf(tmp_path / "small.gguf"))
    assert (source.id, source.model_type) == ("small.gguf", "llama")
    assert source.weights.stored("model.layers.0.self_attn.q_proj.weight") == "Q8_0"
    assert source.weights.alias("lm_head.weight") == "model.embed_tokens.weight"
    check_equals_reference(source)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="small.gguf")
    ours = source.config.to_dict()
    assert {k: v for k, v in theirs.to_dict().items() if ours.get(k) != v} == {
        "_name_or_path": str(tmp_path)
    }


def test_gguf_that_would_become_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no place for the tensor rope_freqs\.weight"):
        resolve(write_gguf(tmp_path / "rope.gguf", ("rope_freqs", (8,))))
    with pytest.raises(SourceError, match=r"rope\.scaling\.type is 'yarn'"):
        resolve(write_gguf(tmp_path / "yarn.gguf", llama__rope__scaling__type="yarn"))
    with pytest.raises(SourceError, match="architecture 'gemma4' is not supported") as caught:
        resolve(write_gguf(tmp_path / "gemma4.gguf", arch="gemma4"))
    assert "safetensors" in str(caught.value.hint)
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_up\.weight is \[64, 64\], must be"):
        resolve(write_gguf(tmp_path / "shape.gguf", ("blk.0.ffn_up", (64, 64))))
    whole = tmp_path / "rope.gguf"
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(SourceError, match="not a whole GGUF file"):
        resolve(cut)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "xyz"}, "makes no model: KeyError: 'xyz'"),
        ({"hidden_size": -64}, "hidden_size must be in 0..16777216, got -64"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers must be in 0..512, got 10000000"),
        ({"vocab_size": 10**12}, "vocab_size must be in 0..16777216, got 1000000000000"),
        ({"num_attention_heads": 10**18}, "num_attention_heads must be in 0.."),
        ({"num_hidden_layers": 1e300}, "num_hidden_layers must be in 0..512"),
        ({"rope_theta": float("nan")}, "holds NaN, which is no number of JSON"),
        ({"hidden_size": 10**30}, "does not fit into 64 bits"),
        ({"num_hidden_layers": "many"}, "config.json: "),
        ({"num_hidden_layers": [1]}, "config.json: "),
        ({"hidden_size": None}, "config.json: "),
        ({"layer_types": "x" * 100}, "config.json: "),
        ({"model_type": ["llama"]}, "model type ['llama'] is not supported"),
        ({"quantization_config": {"quant_method": ["gptq"]}}, "quantization_config in config.json"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": {}}},
            "quantized already (bits is {})",
        ),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "foo"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"quantization_config": "x"}, "quantization_config in config.json must be an object"),
    ],
)
def test_configurations_that_make_no_model(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = tiny_models.save("llama", tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(SourceError) as caught:
        resolve(folder)
    assert says in str(caught.value)
    assert str(folder) in str(caught.value) and caught.value.hint
