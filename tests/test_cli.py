"""The command: data on stdout, talk on stderr, exit codes, messages, options that do something."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from toys import Toy

from specrun.cli import main
from specrun.cli_errors import with_flags
from specrun.manifest import FORMAT
from specrun.options import EngineOptions, GenerateOptions

ToyFolder = Callable[[Toy], Path]

DIGITS = Path(__file__).parent / "data" / "digits.lark"
CHAT = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking %}7{% endif %}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
)


def call(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


@pytest.fixture
def folder(toy_folder: ToyFolder) -> Path:
    return toy_folder(Toy(drafter=True, max_context=64, chat_template=CHAT, eos=(9,)))


def test_text_on_stdout_and_nothing_else(folder: Path) -> None:
    result = call(folder, "--prompt", "12", "-n", 5)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "34567\n", "")
    assert call("run", folder, "--prompt", "12", "-n", 5).stdout == "34567\n"
    assert call("--prompt", "12", "-n", 5, folder).stdout == "34567\n"


def test_prompt_from_file_and_stdin(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("12", encoding="utf-8")
    assert call(folder, "--prompt-file", tmp_path / "prompt.txt", "-n", 2).stdout == "34\n"
    assert call(folder, "--prompt-file", "-", "-n", 2, stdin="12").stdout == "34\n"


def test_structured_output(folder: Path, tmp_path: Path) -> None:
    """The 9 is the end id, and an integer may end with it."""
    schema = '{"type": "integer", "minimum": 700, "maximum": 999}'
    (tmp_path / "schema.json").write_text(schema, encoding="utf-8")
    for given in (["--json-schema", tmp_path / "schema.json"], ["--json-schema", schema]):
        assert call(folder, "--prompt", "6", *given).stdout == "789\n"
    assert call(folder, "--prompt", "6", "--json-schema", "-", stdin=schema).stdout == "789\n"
    assert call(folder, "--prompt", "6", "--regex", "[1-4]{3}9").stdout == "1239\n"
    rules = tmp_path / "rules.lark"
    rules.write_text('start: "44" "9"', encoding="utf-8")
    assert call(folder, "--prompt", "6", "--grammar", rules).stdout == "449\n"


def test_a_structure_that_is_cut(folder: Path) -> None:
    result = call(folder, "--prompt", "6", "--regex", "[1-4]{3}9", "-n", 2)
    assert result.stdout == "12\n"
    assert "warning: the text is not complete" in result.stderr


def test_stats_on_stderr(folder: Path) -> None:
    result = call(folder, "--prompt", "12", "-n", 5, "--stats")
    assert result.stdout == "34567\n"
    assert "mtp-drafter (speculative) on CPUExecutionProvider" in result.stderr
    assert "drafted                 3, accepted 3 (100%)" in result.stderr
    assert "sampling                greedy" in result.stderr.splitlines()


def test_json(folder: Path) -> None:
    result = call(folder, "--prompt", "12", "-n", 5, "--json")
    data = json.loads(result.stdout)
    assert set(data) == {
        "text",
        "tokens",
        "finish_reason",
        "stats",
        "options",
        "logprobs",
    }
    assert (data["text"], data["tokens"]) == ("34567", [3, 4, 5, 6, 7])
    assert data["finish_reason"] == "length"
    stats = data["stats"]
    assert stats["accepted"] + stats["rejected"] == stats["drafted"] == 3
    assert stats["emitted"] == stats["accepted"] + stats["rounds"] + 1 == 5
    assert set(stats["seconds"]) == {"prefill", "draft", "verify", "other"}


@pytest.mark.parametrize(
    ("arguments", "code", "says", "hint"),
    [
        ([], 2, "no prompt given", "--prompt-file FILE (- for stdin)"),
        (["--prompt", "1", "--prompt-file", "-"], 2, "--prompt and --prompt-file exclude", "one"),
        (["--prompt-file", "/nowhere"], 2, "/nowhere: No such file", None),
        (["--prompt", ""], 2, "prompt: is empty, and this model has no beginning", "one token"),
        (["--prompt", "1", "-k", "-1"], 2, "--num-assistant-tokens: must be a whole number", "0"),
        (["--prompt", "1", "-n", "-1"], 2, "--max-new-tokens: must be a whole number", "0"),
        (["--prompt", "1", "--threads", "0"], 2, "--threads: must be a whole number", "1"),
        (["--prompt", "1", "--max-context", "65"], 2, "--max-context: the engine was", "64"),
        (["--prompt", "1", "--system", "x", "--raw"], 2, "--system: got 'x' together", "one"),
        (["--prompt", "1", "--stop", ""], 2, "--stop: must be strings that are not", "string"),
        (["--prompt", "1", "--ignore-eos", "--eos-token-id", "3"], 2, "exclude each other", "one"),
        (["--prompt", "1", "--regex", "(?=1)"], 2, "--regex: look-around, including", "Rust"),
        (["--prompt", "1", "--regex", "("], 2, "--regex: unclosed group, got '('", "Rust"),
        (["--prompt", "1", "--json-schema", "{"], 2, "--json-schema: not JSON", "{} for any JSON"),
        (["--prompt", "1", "--json-schema", "[]"], 2, "--json-schema: []: No", 'begins with "{"'),
        (["--prompt", "1", "--json-schema", "true"], 2, "--json-schema: true: No", "- for stdin"),
        (["--prompt", "1", "--grammar", "/nowhere"], 2, "--grammar: /nowhere: No such", "rules"),
        (["--prompt", "1", "--regex", "1", "--json-schema", "{}"], 2, "--regex: excludes", "one"),
        (["--prompt-file", "-", "--json-schema", "-"], 2, "stdin is read once", "a file"),
        (["--prompt", "1", "--exact", "-k", "16"], 2, "--num-assistant-tokens: in exact", "15"),
        (["--prompt", "1", "--exact-width", "4"], 2, "--exact-width: has no effect", "--exact"),
        (["--prompt", "1" * 64], 1, "64 tokens do not fit into the context of 64", "shorten"),
        (
            ["--prompt", "1", "--device", "cuda"],
            1,
            "--device: 'cuda' is not",
            "pip install onnxruntime-gpu",
        ),
        (["--prompt", "1", "--device-id", "1"], 2, "--device-id: has no effect", "--device-id out"),
        (
            ["--prompt", "1", "--device", "tensorrt"],
            1,
            "written for ONNX Runtime",
            "--backend tensorrt",
        ),
        (
            ["--prompt", "1", "--device", "cuda", "--cuda-graph"],
            2,
            "--cuda-graph: records",
            "exact",
        ),
        (
            ["--prompt", "1", "--device", "plugin:X", "--provider-library", "no.so"],
            1,
            "--provider-library: no.so: there is no such file",
            "--device cpu",
        ),
    ],
)
def test_errors(folder: Path, arguments: list[str], code: int, says: str, hint: str | None) -> None:
    result = call(folder, *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("Error: ")
    assert says in result.stderr.splitlines()[0]
    if hint is not None:
        assert result.stderr.splitlines()[1].startswith("hint: ")
        assert hint in result.stderr.splitlines()[1]
    assert len(result.stderr.splitlines()) <= 2


def test_unknown_options_and_choices(folder: Path) -> None:
    for arguments in (["--bogus"], ["--method", "magic"], ["-k", "many"]):
        result = call(folder, "--prompt", "1", *arguments)
        assert result.exit_code == 2
        assert "Usage: " in result.stderr


def test_a_folder_that_is_not_one(tmp_path: Path) -> None:
    result = call(tmp_path / "nowhere", "--prompt", "1")
    assert result.exit_code == 1
    assert "Error: " in result.stderr and "no such folder" in result.stderr
    assert "hint: give the folder specexport wrote" in result.stderr


def test_a_missing_method_is_an_error(toy_folder: ToyFolder) -> None:
    result = call(toy_folder(Toy()), "--prompt", "1", "--method", "mtp-drafter")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--method: 'mtp-drafter' needs a drafter engine" in result.stderr


def test_a_drafter_that_is_gone(folder: Path) -> None:
    (folder / "mtp_drafter.onnx").unlink()
    result = call(folder, "--prompt", "12", "-n", 5)
    assert (result.exit_code, result.stdout) == (0, "34567\n")
    assert result.stderr.count("warning: the drafter failed: ") == 1
    assert "mtp_drafter.onnx" in result.stderr
    assert call(folder, "--prompt", "12", "-n", 5, "--quiet").stderr == ""
    stats = json.loads(call(folder, "--prompt", "12", "-n", 5, "--json", "-q").stdout)["stats"]
    assert (stats["mode"], stats["drafted"]) == ("fallback", 0)
    strict = call(folder, "--prompt", "12", "-n", 5, "--strict")
    assert strict.exit_code == 1
    assert "Error: the drafter failed: " in strict.stderr


VALUES: dict[str, tuple[list[str], list[str]]] = {
    "prompt": (["--prompt", "1"], ["--prompt", "2"]),
    "system": ([], ["--system", "3"]),
    "enable_thinking": (["--thinking"], ["--no-thinking"]),
    "raw": ([], ["--raw"]),
    "parse_special": ([], ["--parse-special"]),
    "method": (["--method", "plain"], ["--method", "prompt-lookup"]),
    "num_assistant_tokens": (["-k", "1"], ["-k", "2"]),
    "num_assistant_tokens_schedule": (
        ["--schedule", "constant"],
        ["--schedule", "heuristic"],
    ),
    "max_matching_ngram_size": ([], ["--max-matching-ngram-size", "3"]),
    "max_new_tokens": (["-n", "3"], ["-n", "4"]),
    "assistant_confidence_threshold": ([], ["--confidence-threshold", "0.5"]),
    "ensemble_weight": (["--ensemble-weight", "1"], ["--ensemble-weight", "0.5"]),
    "do_sample": (["--greedy"], ["--sample"]),
    "temperature": (["--temperature", "0.5"], ["--temperature", "0.6"]),
    "top_k": (["--top-k", "1"], ["--top-k", "2"]),
    "top_p": (["--top-p", "0.5"], ["--top-p", "0.6"]),
    "min_p": (["--min-p", "0.1"], ["--min-p", "0.2"]),
    "typical_p": (["--typical-p", "0.5"], ["--typical-p", "0.6"]),
    "seed": (["--sample", "--seed", "1"], ["--sample", "--seed", "2"]),
    "repetition_penalty": ([], ["--repetition-penalty", "1.5"]),
    "no_repeat_ngram_size": ([], ["--no-repeat-ngram-size", "3"]),
    "min_new_tokens": ([], ["--min-new-tokens", "2"]),
    "bad_words": ([], ["--bad-word", "9"]),
    "logit_bias": ([], ["--logit-bias", "3:-100", "--logit-bias", "4:1.5"]),
    "logprobs": ([], ["--logprobs", "2"]),
    "eos_token_ids": ([], ["--eos-token-id", "3", "--eos-token-id", "4"]),
    "stop": ([], ["--stop", "ab", "--stop", "c"]),
    "json_schema": ([], ["--json-schema", '{"type": "integer"}']),
    "regex": ([], ["--regex", "[0-9]*"]),
    "grammar": ([], ["--grammar", str(DIGITS)]),
    "threads": (["--threads", "1"], ["--threads", "2"]),
    "max_context": ([], ["--max-context", "32"]),
    "prefill_chunk": ([], ["--prefill-chunk", "2"]),
    "integrity": ([], ["--integrity", "full"]),
    "verify": ([], ["--verify", "engine"]),
    "spin": ([], ["--spin"]),
    "exact": ([], ["--exact"]),
    "exact_width": (["--exact"], ["--exact", "--exact-width", "4"]),
    "strict": ([], ["--strict"]),
    "timeout": (["--timeout", "50"], ["--timeout", "60"]),
    "stats": ([], ["--stats"]),
    "quiet": ([], ["--quiet"]),
}
# Only the CPU is certain to be there, see test_devices; ids are for programs, the command has
# --bad-word. PyTorch needs a checkpoint, which toys do not have; see test_verification. A trace is
# a file of its own, see test_trace.
DEVICES = {"device", "device_id", "provider_library", "user_compute_stream", "cuda_graph"}
NO_SECOND_VALUE = {"folder", "bad_words_ids", "tuning", "target", "tools", "trace", *DEVICES}


@pytest.mark.parametrize("name", VALUES)
def test_every_option_takes_effect(folder: Path, name: str) -> None:
    dumps: list[dict[str, Any]] = []
    for arguments in VALUES[name]:
        given = [] if name == "prompt" else ["--prompt", "1"]
        result = call(folder, *given, *arguments, "--json")
        assert result.exit_code == 0, result.stderr
        dumps.append(json.loads(result.stdout)["options"])
    changed = {key for key in dumps[0] if dumps[0][key] != dumps[1][key]}
    assert name in changed
    # Plain decoding drafts none, and a text that is sampled has another seed each time.
    follow = {"num_assistant_tokens", "seed", "temperature"}
    assert changed <= {name} | follow


def test_tools_of_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text('[{"name": "5"}]', encoding="utf-8")
    data = json.loads(call(folder, "--prompt", "1", "-n", 2, "--tools", file, "--json").stdout)
    assert (data["text"], data["options"]["tools"]) == ("67", [{"name": "5"}])
    for content, says in (("[1]", "--tools: must be a list of objects"), ("{", "--tools: ")):
        file.write_text(content, encoding="utf-8")
        result = call(folder, "--prompt", "1", "--tools", file)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"Error: {says}")
    assert "No such file" in call(folder, "--prompt", "1", "--tools", tmp_path / "no").stderr


def test_no_option_is_left_out_of_that() -> None:
    fields = {*EngineOptions.__dataclass_fields__, *GenerateOptions.__dataclass_fields__}
    assert fields <= VALUES.keys() | NO_SECOND_VALUE
    run = main.commands["run"]
    names = {parameter.name for parameter in run.params}
    aliases = {"schedule", "eos_token_id", "ignore_eos", "prompt_file", "as_json", "bad_word"}
    aliases.add("tools_file")
    assert names - aliases <= VALUES.keys() | NO_SECOND_VALUE


def test_ignore_eos(folder: Path) -> None:
    assert call(folder, "--prompt", "7", "-n", 5).stdout == "89\n"
    assert call(folder, "--prompt", "7", "-n", 5, "--ignore-eos").stdout == "89012\n"
    assert call(folder, "--prompt", "7", "-n", 5, "--eos-token-id", "0").stdout == "890\n"


def test_flags_in_messages() -> None:
    """An option's name at the beginning is its flag, the name of an engine's file is not."""
    assert with_flags("target: must be a text") == "--target: must be a text"
    for message in ("target.onnx: does not load", "target.hidden differs from transformers"):
        assert with_flags(message) == with_flags(message, request=False) == message


def test_a_prompt_without_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrun.cli.MAX_PROMPT_BYTES", 1000)
    result = call(folder, "--prompt-file", "/dev/zero")
    assert result.exit_code == 2
    assert "--prompt-file: /dev/zero: more than 1000 bytes" in result.stderr


def test_inspect(folder: Path) -> None:
    result = call("inspect", folder)
    assert result.exit_code == 0
    assert "engine mtp_drafter" in result.stdout
    assert "drafts up to 16 tokens" in result.stdout
    assert "answers" not in result.stdout  # whose parts nobody knows how to tell apart
    assert json.loads(call("inspect", folder, "--json").stdout)["format"] == FORMAT
    (folder / "target.onnx").write_bytes(b"")
    assert call("inspect", folder).exit_code == 1


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("doctor")
    assert result.exit_code == 0
    assert "CPUExecutionProvider" in result.stdout
    monkeypatch.setattr("specrun.doctor._version", lambda package: "1.0")
    both = call("doctor")
    assert both.exit_code == 1
    assert "onnxruntime and onnxruntime-gpu are both installed" in both.stderr
    assert json.loads(call("doctor", "--json").stdout)["versions"]["onnxruntime-gpu"] == "1.0"


@pytest.mark.parametrize("command", [[], ["run"], ["inspect"], ["doctor"]])
def test_every_help_has_examples(command: list[str]) -> None:
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout


def test_version() -> None:
    assert call("--version").stdout.startswith("specrun, version ")


def test_a_byte_order_mark_is_no_part_of_the_prompt(
    toy_folder: Callable[[Toy], Path], tmp_path: Path
) -> None:
    """Editors put one in front of UTF-8 files."""
    folder = toy_folder(Toy())
    texts = []
    for encoding in ("utf-8", "utf-8-sig"):
        file = tmp_path / encoding
        file.write_text("1", encoding=encoding)
        done = CliRunner().invoke(
            main, [str(folder), "--prompt-file", str(file), "--raw", "--json"]
        )
        assert done.exit_code == 0, done.stderr
        texts.append(json.loads(done.stdout)["tokens"])
    assert texts[0] == texts[1]


def test_names_of_options_in_any_place() -> None:
    """Names of several words anywhere, others where an option is meant."""
    said = {
        "exact_width: has no effect without exact, got 8": (
            "--exact-width: has no effect without --exact, got 8"
        ),
        "or open the folder with a larger exact_width": (
            "or open the folder with a larger --exact-width"
        ),
        "mtp-drafter 40: num_assistant_tokens: at most 16": (
            "mtp-drafter 40: --num-assistant-tokens: at most 16"
        ),
        "the text is exact, the seed is not": "the text is exact, the seed is not",
        "give --exact-width": "give --exact-width",
    }
    for message, shown in said.items():
        assert with_flags(message) == shown


def test_fields_of_files_are_no_flags() -> None:
    for message in (
        "manifest.json: generation.max_context: must be at least 2, got 1",
        "drafters.mtp: field 'num_assistant_tokens' is missing",
        "x: generation_config.json: max_new_tokens: must be at least 1, got 0",
    ):
        assert with_flags(message, request=False) == message
