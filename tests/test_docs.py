"""The documents say what is so: commands parse, examples run, what they name exists."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import click
import documents
import pytest
from documents import calls

from specexport import cli as specexport
from specexport.presets import PRESETS
from specrun import cli as specrun
from specrun import cli_errors
from specrun.options import METHODS, SCHEDULES, GenerateOptions, Method
from specrun.stats import Stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import gen_reference  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
README = documents.read("README.md")
# What users read: the README and the pages it leads to.
PAGES = "\n".join(documents.read(page) for page in documents.documents() if "docs/" in page)
PAGES = f"{README}\n{PAGES}"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GROUPS: dict[str, Any] = {"specrun": specrun.main, "specexport": specexport.main}


SHELL_LINES = [
    command.text
    for block in documents.all_blocks("sh", "console")
    for command in documents.commands(block)
]


def help_lines(group: click.Group) -> list[str]:
    """The examples in the help texts of a command and its sub-commands."""
    helps = [group.help or "", *(command.help or "" for command in group.commands.values())]
    examples = [text.partition("Examples:")[2] for text in helps]
    return [
        line.strip() for text in examples for line in text.splitlines() if line.startswith("  ")
    ]


def parses(group: click.Group, program: str, arguments: list[str]) -> None:
    """Assert that the sub-command exists and takes these arguments. Nothing is run."""
    known = arguments and arguments[0] in group.commands
    assert isinstance(group, specrun.DefaultGroup)
    name, *rest = arguments if known else [group.default, *arguments]
    # With the group above it: a command keeps the help option it was first asked for.
    parent = click.Context(group, info_name=program, **group.context_settings)
    try:
        group.commands[name].make_context(name, rest, parent=parent)
    except click.ClickException as error:
        pytest.fail(f"{program} {shlex.join(arguments)}: {error.format_message()}")
    except click.exceptions.Exit as leave:
        assert leave.exit_code == 0


EXAMPLES = [
    pytest.param(program, arguments, id=shlex.join([program, *arguments]))
    for program, group in GROUPS.items()
    for line in dict.fromkeys([*SHELL_LINES, *help_lines(group)])
    for arguments in calls(line, program)
]


@pytest.mark.parametrize(("program", "arguments"), EXAMPLES)
def test_examples_parse(program: str, arguments: list[str]) -> None:
    if arguments == ["--version"]:
        return
    parses(GROUPS[program], program, arguments)


def test_an_example_that_is_wrong_is_found() -> None:
    assert len(EXAMPLES) > 20
    for wrong in (["engines/", "--bogus"], ["inspect"], ["engines/", "--method", "magic"]):
        with pytest.raises(pytest.fail.Exception):
            parses(specrun.main, "specrun", wrong)
    assert calls('echo "a | b" | specrun e/ -p "x y" > out.json', "specrun") == [
        ["e/", "-p", "x y"]
    ]


def test_every_sub_command_has_examples() -> None:
    for group in GROUPS.values():
        for name, command in group.commands.items():
            if [parameter for parameter in command.params if parameter.name != "as_json"]:
                assert "Examples:" in (command.help or ""), name


def test_the_command_reference_is_current() -> None:
    page = gen_reference.PAGE.read_text(encoding="utf-8")
    assert gen_reference.with_reference(page) == page, "python scripts/gen_reference.py"
    documented = {(program, name) for _, program, names in gen_reference.COMMANDS for name in names}
    there = {(program, name) for program, group in GROUPS.items() for name in group.commands}
    assert documented == there - {("specexport", "inspect")}  # the same as specrun's


def test_scripts_and_their_options_exist() -> None:
    names = [re.findall(r"\bscripts/[\w/]+(?:\.py)?", line) for line in SHELL_LINES]
    called = {script for found in names for script in found}
    assert {"scripts/demo", "scripts/test"} <= called
    for script in called:
        assert (ROOT / script).is_file(), script
    for name in ("scripts/demo", "scripts/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), f"{name} is not executable"
    assert "scripts/test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["scripts/setup.sh", "scripts/demo", "scripts/test", ".ci/run"])
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_the_readme_names_every_method_and_schedule() -> None:
    for method in METHODS:
        assert f"`{method}`" in README, method
    table = README.partition("| `--method` |")[2].partition("\n\n")[0]
    assert {*re.findall(r"^\| `([\w-]+)` \|", table, re.M), "auto"} == set(get_args(Method))
    assert f"`--schedule {SCHEDULES[1]}`" in PAGES


def test_the_readme_explains_every_statistic() -> None:
    table = PAGES.partition("## Statistics")[2].partition("## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    explained = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    derived = {"acceptance", "acceptance_by_position", "exact"}
    derived |= {"tokens_per_target_step", "tokens_per_second"}
    assert sorted(explained) == sorted(
        {field.name for field in dataclasses.fields(Stats)} | derived
    )


def test_the_readme_lists_extras_and_presets() -> None:
    table = README.partition("| extra |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    listed = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])
    for line in SHELL_LINES:
        for extra in re.findall(r'pip install "?\.\[([\w,-]+)\]', line):
            assert set(extra.split(",")) <= set(listed)
    for preset in PRESETS:
        assert f"`{preset}`" in PAGES, preset


def test_flags_in_the_text_exist() -> None:
    """``--flag`` between backticks is an option of some command or script."""
    options = {
        option
        for group in GROUPS.values()
        for command in group.commands.values()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for script in (ROOT / "scripts").rglob("*.py"):
        options |= set(re.findall(r'"(--[a-z][a-z-]*)"', script.read_text(encoding="utf-8")))
    prose = re.sub(r"^```.*?^```", "", PAGES, flags=re.M | re.S)
    for code in re.findall(r"`([^`]+)`", prose):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code):
            assert flag in options, f"`{code}`"


@pytest.mark.parametrize("name", documents.documents())
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path if not file else (path.parent / file).resolve()
        assert target.exists(), f"{name}: {link}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{name}: {link}"


def modules(folder: str) -> list[str]:
    """Paths of a folder's Python files, ``__init__`` left out."""
    found = (ROOT / folder).rglob("*.py")
    names = (path.relative_to(ROOT / folder).as_posix() for path in found)
    return sorted(name for name in names if not name.endswith("__init__.py"))


@pytest.mark.parametrize(
    ("document", "folder"),
    [
        ("graphs/README.md", "graphs/specgraphs"),
        ("export/README.md", "export/specexport"),
        ("scripts/README.md", "scripts"),
    ],
)
def test_pages_name_exactly_the_files_there_are(document: str, folder: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", text, re.M)
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    for name in named:
        assert (ROOT / folder / name).exists(), f"{document}: {name} is not there"
    for name in modules(folder):
        assert name in named, f"{document}: {name} is missing"


def test_entry_points_load() -> None:
    commands = PROJECT["scripts"]
    assert set(commands) == set(GROUPS)
    for name, value in commands.items():
        assert importlib.metadata.EntryPoint(name, value, "console_scripts").load() is GROUPS[name]


@pytest.mark.parametrize("program", sorted(GROUPS))
def test_commands_start(program: str) -> None:
    module = PROJECT["scripts"][program].partition(":")[0]
    command = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Examples:" in shown
    assert all(name in shown for name in GROUPS[program].commands)


def test_options_in_messages_are_flags() -> None:
    """Every option of the API has a flag, so that an error can name it."""
    for field in dataclasses.fields(GenerateOptions):
        assert field.name in cli_errors.FLAGS


def test_importing_is_light() -> None:
    script = ROOT / "scripts" / "measure_import.py"
    assert subprocess.run([sys.executable, str(script)], capture_output=True).returncode == 0


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"
