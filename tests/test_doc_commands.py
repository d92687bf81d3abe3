"""Every command and every Python block of the documents is run, on the bundled model.

The folder ``engines/`` that they speak of is made by the documented command. What cannot run here,
because it needs a network, a GPU or an hour, or never ends, stands in ``NOT_RUN`` with the reason;
of those at least every option must exist (``test_docs.py`` asks the commands' own parsers,
``test_scripts_take_their_options`` those of the scripts).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import pytest
from documents import Block, Command

pytestmark = pytest.mark.slow

ROOT = documents.ROOT
MADE_BY = "specexport gemma4-tiny --out engines/"

HUB = "downloads from the model hub"
PACKAGES = "takes a model of 93 MB from the package index; tests/test_real.py"
PEAK = "exports a model of some gigabytes"
PLACEHOLDER = "stands for a checkpoint of the reader's; tests/test_export_cli.py exports such"
ENVIRONMENT = "changes the environment that it runs in, or asks the package index"
BENCH = "times generations for minutes; a short one is run, and tests/test_bench.py"
TENSORRT = "builds for minutes, or needs a GPU; tests/test_trt_export.py, test_gpu_check.py"

# The beginning of a command, or with $ behind it all of it: why it is not run.
NOT_RUN = {
    "scripts/demo": "makes .venv of the checkout; .ci/run has made it when this runs",
    "scripts/test": "is what runs this",
    "pip ": ENVIRONMENT,
    "specexport gemma4 ": f"{HUB}, {PEAK}",
    "specexport plan gemma4 ": HUB,
    "specexport check engines/ gemma4": f"{HUB}, {PEAK}",
    "specexport org/": HUB,
    "python scripts/fetch_models.py": PACKAGES,
    "specexport .cache/models/": PACKAGES,
    "specrun smollm2/": PACKAGES,
    "specexport path/to/": PLACEHOLDER,
    "specexport model.gguf": PLACEHOLDER,
    'specrun engines/ --prompt "Write a joke" --target path/to/it': PLACEHOLDER,
    "specexport gemma4-tiny --out trt/": TENSORRT,
    "specrun inspect trt/": TENSORRT,
    "specrun trt/": TENSORRT,
    "python scripts/gpu_check.py": TENSORRT,
    "python scripts/bench_peers.py": "installs other runtimes for an hour",
    "specrun bench engines/$": BENCH,
    "specrun bench engines/ --workload copy-edit": BENCH,
    "specrun bench engines/ --prompt-file question.txt": BENCH,
    "python scripts/examples/fastapi_app.py": "serves until Ctrl-C; tests/test_examples.py",
    "specrun serve engines/$": "serves until Ctrl-C; tests/test_serve_limits.py",
    "curl ": "asks that server; tests/test_serve.py",
    "python scripts/ray_batch.py engines/ prompts.jsonl results.jsonl": "starts a Ray; test_ray.py",
    "python scripts/ray_serve.py": "starts a Ray, and serves until Ctrl-C; tests/test_ray.py",
    "specrun bench engines/ -k 1": BENCH,
    "specrun compare": "compares what two of those have measured; tests/test_bench_pages.py",
    "hf ": HUB,
    "specrun hf://": HUB,
    "specrun inspect hf://": HUB,
    "optimum-cli export speculative -m org/": HUB,
    "optimum-cli export speculative -m gemma4-tiny": "is specexport by another name; test_optimum",
    "specrun doctor": "looks at this machine, where two builds may be installed; test_doctor.py",
}


def not_run(command: str) -> str | None:
    """Why, or None for a command that is run."""
    if command == MADE_BY:
        return None
    return next((why for start, why in NOT_RUN.items() if f"{command}$".startswith(start)), None)


SHELL = list(documents.all_blocks("sh", "console"))
RUN = [
    block
    for block in SHELL
    if any(not not_run(command.text) for command in documents.commands(block))
]
PYTHON = sorted({block.document for block in documents.all_blocks("python")})


def test_every_block_says_what_it_is() -> None:
    for document in documents.documents():
        for block in documents.blocks(document):
            assert block.language in documents.LANGUAGES, block.where
    assert len(SHELL) > 10 and len(RUN) > 4 and PYTHON


def test_no_reason_is_left_over() -> None:
    """A reason whose command is no longer documented goes, and none covers a whole program."""
    texts = [command.text for block in SHELL for command in documents.commands(block)]
    for start in NOT_RUN:
        assert any(f"{text}$".startswith(start) for text in texts), f"{start!r}: nowhere"
        assert start.strip() not in ("specrun", "specexport", "python")


def test_a_new_command_is_run() -> None:
    assert not_run("specrun engines/ --prompt x") is None
    assert not_run("specexport gemma4-tiny --out engines/") is None
    block = Block("x", 1, "sh", 'specrun engines/ \\\n  -p "a # b"   # c\n\n# d\nls\n')
    assert documents.commands(block) == [Command('specrun engines/ -p "a # b"'), Command("ls")]
    block = Block("x", 1, "console", "$ ls  # c\na\nb\n$ pwd\n")
    assert documents.commands(block) == [Command("ls", "a\nb\n"), Command("pwd", "")]


@pytest.fixture(scope="module")
def made(once: Callable[..., Path]) -> Path:
    """The folder ``engines/``, made as the README says."""
    return once("documented", lambda folder: run_shell(Command(MADE_BY), folder)) / "engines"


@pytest.fixture
def work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what the documents speak of: engines, texts, the scripts."""
    shutil.copytree(made, tmp_path / "engines", copy_function=os.link)
    for name in ("scripts", "README.md", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "question.txt").write_text("Explain Dictionaries.\n")
    (tmp_path / "phrases.txt").write_text("And it came to pass, when the LORD spake unto Moses\n")
    (tmp_path / "prompts.txt").write_text("Read Psalms 103.\nExplain Dictionaries.\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Read Psalms 103."}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_shell(command: Command, folder: Path) -> str:
    """Run it as it stands there; what it wrote to stdout. It must succeed."""
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.text],
        cwd=folder,
        env=os.environ | {"PATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command.text}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("block", RUN, ids=[block.where for block in RUN])
def test_commands_run(block: Block, work: Path) -> None:
    for command in documents.commands(block):
        if command.text == MADE_BY or not_run(command.text):
            continue
        said = run_shell(command, work)
        if command.output:
            assert said == command.output, f"{block.where}: {command.text}"


def test_commands_in_the_text_run(work: Path) -> None:
    found = list(documents.inline_commands())
    assert len(found) >= 2
    for command in found:
        assert run_shell(command, work).strip(), command.text


@pytest.mark.parametrize("document", PYTHON)
def test_python_runs(document: str, work: Path) -> None:
    """The blocks of a page one after the other, each with the names of those before.

    A page that does not open a folder itself goes on from the README's quick start.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    found = [block for block in documents.blocks(document) if block.language == "python"]
    if "specrun.load(" not in found[0].text:
        start = [block for block in documents.blocks("README.md") if block.language == "python"]
        found = [*start, *found]
    for block in found:
        code = "\n" * block.line + block.text  # so that errors name the line of the page
        exec(compile(code, block.document, "exec"), names)
    if (engine := names.get("engine")) is not None:
        engine.close()


def scripts_called() -> list[tuple[str, list[str]]]:
    """Scripts with the arguments that some document gives them."""
    found = []
    for block in SHELL:
        for command in documents.commands(block):
            for script in re.findall(r"\bscripts/[\w/]+\.py", command.text):
                given = documents.calls(command.text, script)
                found += [(script, arguments) for arguments in given]
    return found


@pytest.mark.parametrize(("script", "arguments"), scripts_called())
def test_scripts_take_their_options(script: str, arguments: list[str]) -> None:
    code = (ROOT / script).read_text(encoding="utf-8")
    for argument in arguments:
        if argument.startswith("-"):
            option = argument.partition("=")[0]
            assert f'"{option}"' in code, f"{script} has no {option}: {shlex.join(arguments)}"
