"""The model card of an engine folder: what the hub reads of it, whose it is, and licences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toys
from huggingface_hub import ModelCard

import specrun
from specexport import card, folder, licences
from specexport.card import CARD
from specexport.errors import ExportError
from specexport.licences import Licence
from specrun import manifest as manifests
from specrun.manifest import Manifest

APACHE = Licence("apache-2.0")
GEMMA = Licence("gemma", None, "https://ai.google.dev/gemma/terms")
COMMIT = "a" * 40


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    return toys.write_folder(tmp_path / "engines", toys.Toy(drafter=True))


@pytest.fixture
def made(engines: Path) -> Manifest:
    return manifests.read(engines)


def of(made: Manifest, target: str, revision: str | None = None) -> Manifest:
    """The same of another checkpoint."""
    return replace(made, target=replace(made.target, id=target, revision=revision))


def metadata(text: str) -> dict[str, Any]:
    """As the hub's client reads it, which is strict."""
    data: Any = ModelCard(text).data
    return dict(data.to_dict())


# What it says.


def test_what_the_hub_reads(made: Manifest) -> None:
    text = card.text(of(made, "org/model", COMMIT), {"org/model": APACHE, "org/draft": APACHE})
    assert metadata(text) == {
        "base_model": "org/model",
        "base_model_relation": "quantized",
        "library_name": "specrun",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "onnx"],
    }
    assert f"`org/model` at `{COMMIT}`" in text
    assert "* `org/draft`: apache-2.0\n" in text


def test_a_local_checkpoint_is_no_base_model(made: Manifest) -> None:
    """Nor is one that comes with the exporter; a preset's is the published one."""
    for local in ("my-model", "model.gguf", "gemma4-tiny/target"):
        found = metadata(card.text(of(made, local), {local: None}))
        assert not {"base_model", "base_model_relation", "license"} & found.keys()
    preset = card.text(of(made, "gemma4/target", COMMIT), {"gemma4/target": GEMMA})
    assert metadata(preset)["base_model"] == "google/gemma-4-E2B-it"
    assert card.hub_id("gemma4-e4b/assistant") == "google/gemma-4-E4B-it-assistant"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([APACHE, APACHE], {"license": "apache-2.0"}),
        ([APACHE, GEMMA], {}),
        ([APACHE, None], {}),
        ([Licence("other", "mine", "LICENSE")], {"license": "other", "license_name": "mine",
                                                 "license_link": "LICENSE"}),
    ],
)  # fmt: skip
def test_licences_of_all_checkpoints(
    made: Manifest, found: list[Licence | None], expected: dict[str, str]
) -> None:
    """One that is not common to all is left to whoever publishes the folder."""
    text = card.text(made, {f"m{index}": licence for index, licence in enumerate(found)})
    told = metadata(text)
    assert {key: told[key] for key in told if key.startswith("license")} == expected
    assert ("Whoever publishes this folder adds `license:`" in text) == (not expected)
    assert ("* m1: not said by the checkpoint" in text) == (None in found)


def test_what_was_measured(made: Manifest) -> None:
    """The lines of inspect, without hashes; sizes, notes and what runs it."""
    text = card.text(replace(made, notes=("kept | as it was",)), {})
    assert "| method mtp-drafter |" in text and "| parity | never compared with" in text
    assert "sha256 " not in text.partition("<!--")[0]
    assert "## Notes of the export\n\n* kept \\| as it was\n" in text
    assert f"| size | {sum(made.sizes.values()) / 1e6:.1f} MB: " in text
    assert "| runs on | onnxruntime " in text
    assert "to run this one no PyTorch." in text


def test_drafters_alone_need_pytorch(made: Manifest) -> None:
    spec = replace(made.engines["target"], backend="torch", file="")
    drafters = {
        name: replace(drafter, target_sha256="b" * 64) for name, drafter in made.drafters.items()
    }
    alone = replace(
        made,
        target=replace(made.target, fingerprint="b" * 64),
        engines=made.engines | {"target": spec},
        drafters=drafters,
    )
    assert "PyTorch (its extra\n`torch`)" in card.text(alone, {})


def test_names_are_text_whatever_they_hold(made: Manifest) -> None:
    """A name comes from anywhere; it starts no heading, no cell and no field."""
    name = "x\n---\nlicense: mit\n# <b>|`y`"
    text = card.text(of(made, name), {name: Licence("z: [", "\n- a")})
    assert metadata(text)["license"] == "z: ["
    body = text.split("---\n", 2)[2]
    assert body.count("\n# ") == 1 and "\nlicense:" not in body
    assert "x --- license: mit \\# \\<b\\>\\|\\`y\\`" in body


# Whose it is.


def test_a_card_can_be_changed_or_removed(engines: Path, made: Manifest) -> None:
    """The folder is the same with and without it, and as it came from earlier exports."""
    before = manifests.read(engines, integrity="full")
    for text in (card.text(made, {}), "my own words"):
        (engines / CARD).write_text(text)
        assert manifests.read(engines, integrity="full") == before
        specrun.load(engines).close()


@pytest.mark.parametrize("change", [lambda text: text.replace("mit", "gemma"), lambda text: "mine",
                                    lambda text: text + "\nmore\n", lambda text: ""])  # fmt: skip
def test_an_export_does_not_replace_a_card_that_was_changed(
    engines: Path, made: Manifest, change: Callable[[str], str]
) -> None:
    text = card.text(made, {"m": Licence("mit")})
    (engines / CARD).write_text(text)
    folder.check_target(engines)
    (engines / CARD).write_text(change(text))
    with pytest.raises(ExportError, match=r"its README\.md was changed since the export") as caught:
        folder.check_target(engines)
    assert "move it away" in str(caught.value.hint)
    folder.check_target(engines, card_goes_along=True)
    assert (engines / CARD).read_text() == change(text)


def test_a_card_that_is_none(engines: Path) -> None:
    """A folder, a file that is no text, or no end of it."""
    path = engines / CARD
    path.mkdir()
    assert not card.is_own(path)
    path.rmdir()
    path.write_bytes(b"\xff")
    assert not card.is_own(path)


# Licences of checkpoints.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n# A model\n", APACHE),
        ("---\nlicense: gemma\nlicense_link: https://ai.google.dev/gemma/terms\n---\n", GEMMA),
        ("---\nlicense: other\nlicense_name: mine\n---\n", Licence("other", "mine")),
        ("---\nlicense:\n- mit\n- gpl\n---\n", None),
        ("---\nlicense: 7\n---\n", None),
        ('---\nlicense: "a\\nb"\n---\n', None),
        (f"---\nlicense: {'a' * 600}\n---\n", None),
        ("---\ntags: [x]\n---\nlicense: mit\n", None),
        ("# license: mit\n", None),
        ("---\nlicense: [\n---\n", None),
        ("---\n- license\n---\n", None),
        ("", None),
    ],
)
def test_the_licence_in_a_card(tmp_path: Path, text: str, expected: Licence | None) -> None:
    (tmp_path / CARD).write_text(text)
    assert licences.find(tmp_path) == expected


def test_a_card_that_is_not_read(tmp_path: Path) -> None:
    """None there, a link to elsewhere, more than anybody writes: it says nothing."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    assert licences.find(checkpoint) is None
    (tmp_path / "other").write_text("---\nlicense: mit\n---\n")
    (checkpoint / CARD).symlink_to(tmp_path / "other")
    assert licences.find(checkpoint) is None
    (checkpoint / CARD).unlink()
    (checkpoint / CARD).write_text("---\nlicense: mit\n---\n" + "x" * licences.MAX_CARD_BYTES)
    assert licences.find(checkpoint) is None


def test_the_licence_of_a_gguf_file(tmp_path: Path) -> None:
    import gguf

    for name, given in {"with": "mit", "without": None}.items():
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        if given is not None:
            writer.add_license(given)
            writer.add_license_link("https://example.org")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    assert licences.find(tmp_path / "with.gguf") == Licence("mit", None, "https://example.org")
    assert licences.find(tmp_path / "without.gguf") is None
