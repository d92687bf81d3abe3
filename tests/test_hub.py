"""The model hub: tokens, revisions, what is fetched, and errors that say what to do.

The client is replaced by functions that do as it does; nothing leaves this machine.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
from click.testing import CliRunner, Result

from specexport import hub, presets, sources
from specexport.cli import main
from specexport.errors import SourceError
from specexport.parts.record import manifest_source
from specexport.sources import resolve, resolve_pair

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
TOKEN = "hf_secretsecretsecret"
GIGABYTE = 10**9


class Hub:
    """The client's snapshot_download over one model; ``asked``: every request that came."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.asked: list[dict[str, Any]] = []
        self.sizes: dict[str, int] = {}

    def snapshot_download(self, repo: str, **options: Any) -> Any:
        """Copy the files that are asked for to a folder named after the commit."""
        self.asked.append({"repo": repo, **options})
        names = [
            path.name
            for path in self.model.iterdir()
            if any(fnmatch.fnmatch(path.name, wanted) for wanted in options["allow_patterns"])
        ]
        if options.get("dry_run"):
            return [
                SimpleNamespace(file_size=self.sizes.get(name, 1), will_download=True)
                for name in names
            ]
        revision = options["revision"] or "main"
        commit = COMMITS.get(revision, revision)
        there = self.folder / repo.replace("/", "--") / commit
        there.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(self.model / name, there / name)
        return str(there)

    @property
    def of_weights(self) -> list[dict[str, Any]]:
        """Requests that fetched a model's weights."""
        return [asked for asked in self.downloads if "*.safetensors" in asked["allow_patterns"]]

    @property
    def downloads(self) -> list[dict[str, Any]]:
        """Requests that fetched something."""
        return [asked for asked in self.asked if not asked.get("dry_run")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def fake(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    import huggingface_hub
    from huggingface_hub import constants

    made = Hub(model, tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "not there yet"))
    return made


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_commits_of_target_and_drafter_are_recorded(fake: Hub) -> None:
    """A branch becomes its commit; each of the two has a revision of its own."""
    target = resolve("org/large", revision="main")
    drafter = resolve("org/small@v2")
    assert [(source.id, source.revision) for source in (target, drafter)] == [
        ("org/large", COMMITS["main"]),
        ("org/small", COMMITS["v2"]),
    ]
    recorded = manifest_source(drafter)
    assert (recorded.id, recorded.revision) == ("org/small", COMMITS["v2"])
    one, two = resolve_pair("org/large", "org/small", revision="v2", drafter_revision="main")
    assert two is not None
    assert (one.revision, two.revision) == (COMMITS["v2"], COMMITS["main"])


def test_a_revision_is_given_once(fake: Hub) -> None:
    with pytest.raises(SourceError, match="names a revision, and main is given besides"):
        resolve("org/model@v2", revision="main")
    with pytest.raises(SourceError, match="no such folder or file"):
        resolve("org/model@")
    assert fake.asked == []


def test_a_folder_may_have_an_at_sign(fake: Hub, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "org" / "model@v2")
    assert resolve(folder).id == "model@v2"
    assert fake.asked == []


def test_a_configuration_is_fetched_without_weights(fake: Hub) -> None:
    source = resolve("org/model", config_only=True)
    assert sorted(path.name for path in source.path.iterdir()) == [
        "config.json",
        "generation_config.json",
    ]
    assert source.weights.names() == []
    assert len(fake.asked) == 1  # nothing that would need room is fetched


@pytest.mark.parametrize("given", [None, TOKEN])
def test_plan_fetches_configurations_with_the_token_and_never_shows_it(
    given: str | None, fake: Hub
) -> None:
    token = [] if given is None else ["--token", given]
    arguments = ("plan", "org/large", "--drafter", "org/small@v2", "--json", *token)
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert list(dict.fromkeys(asked["repo"] for asked in fake.asked)) == ["org/large", "org/small"]
    assert fake.of_weights == []
    assert {asked["token"] for asked in fake.asked} == {given}
    assert json.loads(result.stdout)["revision"] == COMMITS["main"]
    assert TOKEN not in result.output + result.stderr


@pytest.mark.parametrize("command", ["export", "check"])
def test_export_and_check_pass_the_token_on(command: str, fake: Hub, tmp_path: Path) -> None:
    """Both end at once: there is something else in the folder."""
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "mine.txt").write_text("x")
    out = ["org/model", "--out", tmp_path / "engines"]
    if command == "check":
        out = [tmp_path / "engines", "org/model"]
    result = call(command, *out, "--token", TOKEN)
    assert result.exit_code == 1
    assert {asked["token"] for asked in fake.asked} == {TOKEN}
    assert TOKEN not in result.output


def test_a_token_is_not_in_the_text_of_what_is_wanted() -> None:
    assert TOKEN not in repr(sources.Wanted(token=TOKEN))


def test_no_room_for_the_download(fake: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are the hub's; nothing is fetched."""
    fake.sizes["model.safetensors"] = 9 * GIGABYTE
    room = shutil.disk_usage("/")._replace(free=4 * GIGABYTE)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(SourceError) as caught:
        resolve("org/model")
    assert "9.00 GB are to be downloaded, 4.00 GB are free under" in str(caught.value)
    assert "HF_HUB_CACHE" in str(caught.value.hint)
    assert fake.of_weights == []
    fake.sizes["model.safetensors"] = 3 * GIGABYTE
    assert resolve("org/model").id == "org/model"


def test_a_hub_that_gives_no_sizes_is_asked_all_the_same(
    fake: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where everything is in the cache and the hub is away."""
    import huggingface_hub

    def no_sizes(repo: str, **options: Any) -> Any:
        if options.get("dry_run"):
            raise huggingface_hub.errors.DryRunError("away")
        return fake.snapshot_download(repo, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_sizes)
    assert resolve("org/model").revision == COMMITS["main"]


def kind(folder: Path, model_type: str, *architectures: str) -> None:
    """Make the checkpoint one that says it is another."""
    config = json.loads((folder / "config.json").read_text())
    changed = config | {"model_type": model_type, "architectures": list(architectures)}
    (folder / "config.json").write_text(json.dumps(changed))


@pytest.mark.parametrize(
    ("model_type", "architecture", "message"),
    [
        ("bert", "BertForMaskedLM", r"is a model for fill-mask \(BertForMaskedLM\), not for text-"),
        ("llama", "LlamaForSequenceClassification", "is a model for text-classification"),
        ("mistral", "MistralForCausalLM", "model type 'mistral' is not supported"),
    ],
)
def test_what_cannot_be_exported_is_told_before_its_weights_are_fetched(
    model_type: str, architecture: str, message: str, fake: Hub, model: Path, tmp_path: Path
) -> None:
    fake.model = shutil.copytree(model, tmp_path / "other")
    kind(fake.model, model_type, architecture)
    result = call("org/model", "--out", tmp_path / "engines")
    assert result.exit_code == 1
    assert re.search(message, result.stderr), result.stderr
    assert fake.downloads and fake.of_weights == []


def test_a_checkpoint_of_another_library_is_told_by_its_files(
    fake: Hub, model: Path, tmp_path: Path
) -> None:
    """Which are fetched for that; --task says that it is one for text all the same."""
    fake.model = shutil.copytree(model, tmp_path / "embedding")
    (fake.model / "config_sentence_transformers.json").write_text("{}")
    result = call("plan", "org/model")
    assert result.exit_code == 1
    assert "is a model of sentence_transformers, not of transformers" in result.stderr
    assert "--task text-generation" in result.stderr
    assert call("plan", "org/model", "--task", "text-generation").exit_code == 0


def test_a_cache_elsewhere(fake: Hub, tmp_path: Path) -> None:
    result = call("plan", "org/model", "--cache-dir", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    assert {asked["cache_dir"] for asked in fake.asked} == {str(tmp_path / "mine")}


def test_extras_can_be_done_without(fake: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may be whole but for them, and the hub away."""
    import huggingface_hub

    def no_extras(repo: str, **options: Any) -> Any:
        if options["allow_patterns"] == list(hub.EXTRAS):
            raise huggingface_hub.errors.LocalEntryNotFoundError("away")
        return fake.snapshot_download(repo, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_extras)
    assert resolve("org/model").revision == COMMITS["main"]
    assert len(fake.of_weights) == 1


def failing(name: str) -> Callable[..., Any]:
    """A client that raises the error of that name."""
    from huggingface_hub import errors

    kind = getattr(errors, name)

    def snapshot_download(repo: str, **options: Any) -> Any:
        raise kind.__new__(kind)

    return snapshot_download


@pytest.mark.parametrize(
    ("error", "offline", "message", "hint"),
    [
        ("GatedRepoError", False, "asks for its licence to be accepted first", "give --token"),
        ("RevisionNotFoundError", False, "has no such revision", "branches, tags and commits"),
        ("RepositoryNotFoundError", False, "no such model on the hub", "HF_TOKEN, or give --token"),
        ("LocalEntryNotFoundError", True, "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"),
        ("LocalEntryNotFoundError", False, "could not be reached", "check the connection"),
        ("HfHubHTTPError", False, "could not be reached", "check the connection"),
    ],
)
def test_errors_say_what_to_do(
    error: str,
    offline: bool,
    message: str,
    hint: str,
    fake: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(error))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    result = call("plan", "org/model", "--revision", "v9", "--token", TOKEN)
    assert result.exit_code == 1, result.output
    first, second = result.stderr.splitlines()
    assert first.startswith("Error: org/model at v9: ")
    assert message in first
    assert second.startswith("hint: ")
    assert hint in second
    assert TOKEN not in result.output


def test_every_preset_names_both_models() -> None:
    """Hub ids of a model and its assistant, or folders that are there."""
    for preset in presets.PRESETS.values():
        both = (preset.target, preset.drafter)
        if preset.bundled:
            assert all((Path(one) / "config.json").is_file() for one in both), preset.name
            continue
        assert all(hub.HUB_ID.fullmatch(str(one)) for one in both), preset.name
        assert str(preset.drafter) == f"{preset.target}-assistant"
