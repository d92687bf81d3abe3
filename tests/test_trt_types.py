"""The code that calls TensorRT, against types made from the real bindings.

The project's own type check runs where TensorRT is not installed, and knows nothing of it there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import needs
import pytest

needs.tensorrt_rtx()

ROOT = Path(__file__).parents[1]
MODULE = "tensorrt_rtx_bindings.tensorrt_rtx"
BUILDER = sorted((ROOT / "export/specexport/trt").glob("*.py"))
RUNNER = sorted((ROOT / "runtime/specrun").glob("trt_*.py"))
SETTINGS = """
[mypy]
strict = true
python_version = 3.11
namespace_packages = true
explicit_package_bases = true
mypy_path = {stubs}:{root}/runtime:{root}/graphs:{root}/export
follow_imports = silent
# Some calls have no signature in the bindings.
disallow_untyped_calls = false
# Where TensorRT is not installed its classes are Any, and that needs to be ignored.
warn_unused_ignores = false

[mypy-tensorrt_rtx_bindings.*]
ignore_errors = true

[mypy-cuda.*]
follow_imports = skip
ignore_missing_imports = true
"""
PROTOCOLS = {
    "Dims": "def __iter__(self) -> typing.Iterator[int]: ...",
    "IHostMemory": "def __buffer__(self, flags: int, /) -> memoryview: ...",
}
MISUSES = {
    "attribute": "trt.Builder(log).create_netwerk(0)",
    "argument": "trt.OnnxParser(log, log)",
    "result": "size: str = trt.Builder(log).create_network(0).num_inputs",
    "dims": "trt.Builder(log).create_optimization_profile().set_shape('x', 1, 2, 3)",
}


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the types of tensorrt_rtx, as its binary module tells them."""
    folder = tmp_path_factory.mktemp("stubs")
    code = "import sys; from mypy.stubgen import main; main(sys.argv[1:])"
    options = ["--inspect-mode", "-q", "-m", MODULE, "-o", str(folder)]
    subprocess.run([sys.executable, "-c", code, *options], check=True, cwd=folder)
    path = folder / f"{MODULE.replace('.', '/')}.pyi"
    path.write_text(repaired(path.read_text(encoding="utf-8")), encoding="utf-8")
    (path.parent / "__init__.pyi").write_text("", encoding="utf-8")
    package = folder / "tensorrt_rtx"
    package.mkdir()
    text = f"from {MODULE} import *\n__version__: str\n"
    (package / "__init__.pyi").write_text(text, encoding="utf-8")
    return folder


def repaired(text: str) -> str:
    """Stubs without a module variable that hides ``bool``, without defaults before required
    parameters, and with the protocols that a binary class has without saying so."""
    text = re.sub(r"^bool: DataType\n", "", text, flags=re.M)
    for name, methods in PROTOCOLS.items():
        text, count = re.subn(rf"^(class {name}:)$", rf"\1\n    {methods}", text, flags=re.M)
        assert count == 1, name
    # That of C++; a class in Python is given bytes, as its documentation and the builder show.
    written = r"(class IStreamWriter:\n.*\n    def write)\(.*\) -> int"
    text, count = re.subn(written, r"\1(self, data: bytes) -> int", text)
    assert count == 1
    lines = [re.sub(r" = \.\.\.(?=.*, \w+: [^=]*\) ->)", "", line) for line in text.splitlines()]
    return "\n".join(lines) + "\n"


def errors(stubs: Path, files: list[Path]) -> list[str]:
    """What mypy finds in these files."""
    settings = stubs / "mypy.ini"
    settings.write_text(SETTINGS.format(stubs=stubs, root=ROOT), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings)]
    command += ["--cache-dir", str(stubs / "cache"), "--no-error-summary", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if ": error: " in line]


@pytest.mark.slow
def test_the_builder_uses_tensorrt_as_it_is(stubs: Path) -> None:
    assert len(BUILDER) > 5
    assert not (found := errors(stubs, BUILDER)), "\n".join(found)


@pytest.mark.slow
def test_the_runner_uses_tensorrt_as_it_is(stubs: Path) -> None:
    assert len(RUNNER) > 5
    assert not (found := errors(stubs, RUNNER)), "\n".join(found)


def test_sizes_are_iterable() -> None:
    """As the stubs are told above."""
    import tensorrt_rtx as trt

    assert list(trt.Dims((2, 3))) == [2, 3]


@pytest.mark.slow
def test_a_misuse_is_found(stubs: Path, tmp_path: Path) -> None:
    head = "import tensorrt_rtx as trt\nlog = trt.Logger()\n"
    right = "count: int = trt.Builder(log).create_network(0).num_inputs"
    files = {name: tmp_path / f"{name}.py" for name in ("right", *MISUSES)}
    for name, line in ({"right": right} | MISUSES).items():
        files[name].write_text(f"{head}{line}\n", encoding="utf-8")
    found = errors(stubs, list(files.values()))
    wrong = {name for name in files if any(f"{name}.py:3: error: " in line for line in found)}
    assert wrong == set(MISUSES)
    assert all(".py:3: error: " in line for line in found)
