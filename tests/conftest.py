"""Shared fixtures. Nothing here or below reaches for a network."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import needs
import pytest
import toys

import specrun

if TYPE_CHECKING:
    from exported import Exported, Pair
    from fake_gpu import Gpu
    from onnx_plans import Workshop
    from playwright.sync_api import Browser, Page

    from specrun.manifest import Precision


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    with needs.integer_products():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    with needs.integer_products():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def shared_traces(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Equal traces of tiny models are made once, where a module of tests loads what makes them."""
    if "torch" in sys.modules:
        import traces

        traces.install(shared_root(tmp_path_factory) / "traces")


def shared_root(factory: pytest.TempPathFactory) -> Path:
    """The folder of this run of the tests, the same one for all workers of pytest-xdist."""
    root = factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """For tests of the trace itself: none is taken from an earlier one."""
    import traces

    with traces.anew():
        yield


@pytest.fixture
def open_toy(tmp_path: Path) -> Iterator[Callable[..., specrun.Engine]]:
    """``open_toy(toy, **engine_options)``: write the toy's folder and open it."""
    engines: list[specrun.Engine] = []

    def make(toy: toys.Toy | None = None, **options: Any) -> specrun.Engine:
        folder = toys.write_folder(tmp_path / f"toy{len(engines)}", toy or toys.Toy())
        engines.append(specrun.load(folder, **{"threads": 1, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium without a window. While it is there, asyncio.run() does not work."""
    import browser

    with browser.launched() as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page as wide as a desktop's; see ``browser.opened`` for what holds at the end."""
    from browser import opened

    with opened(browser) as found:
        yield found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpu]:
    """A GPU with TensorRT-RTX, of which nothing is real, and on which nothing is done wrong."""
    from fake_gpu import Gpu

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    installed = Gpu.installed(monkeypatch)
    yield installed
    if not installed.cuda.broken:
        assert not installed.cuda.mistakes


@pytest.fixture
def toy_folder(tmp_path: Path) -> Callable[[toys.Toy], Path]:
    """``toy_folder(toy)``: write the toy's folder."""

    def make(toy: toys.Toy) -> Path:
        return toys.write_folder(tmp_path / "engines", toy)

    return make


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``once(name, make)``: a folder that ``make(folder)`` filled, once per run of the tests.

    Workers of pytest-xdist share it, whoever comes first makes it. Nobody changes it afterwards.
    """
    root = shared_root(tmp_path_factory)

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        folder = root / f"once-{name}"
        with (root / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                partial = root / f"once-{name}.partial"
                shutil.rmtree(partial, ignore_errors=True)  # of an attempt that failed
                partial.mkdir()
                make(partial)
                partial.rename(folder)
        return folder

    return make_once


@pytest.fixture(scope="session")
def exported_pair(once: Callable[..., Path]) -> Callable[..., Exported]:
    """``exported_pair(pair, precision="fp32", check=True)``: a tiny pair, exported at first use;
    ``check``: compared with transformers."""
    import exported  # torch and transformers, which most tests do without

    def make(pair: Pair, precision: Precision = "fp32", *, check: bool = True) -> Exported:
        def export(folder: Path) -> None:
            exported.make(pair, folder, precision, check=check)

        name = f"{exported.name_of(pair)}-{precision}{'' if check else '-unchecked'}"
        return exported.read(pair, once(name, export))

    return make


@pytest.fixture
def integer_products() -> None:
    """For tests of the arithmetic of w8a8, which not every processor can do."""
    needs.integer_arithmetic()


@pytest.fixture
def small_folder(once: Callable[..., Path]) -> Callable[[str], Path]:
    """``small_folder(name)``: the checkpoints and engines of one of small_vocabulary.FOLDERS, or
    else of PAIRS."""
    import small_vocabulary

    def make(name: str) -> Path:
        def export(path: Path) -> None:
            pair = (small_vocabulary.PAIRS | small_vocabulary.FOLDERS)[name]
            small_vocabulary.export(pair, path, check=False)

        return once(f"small-vocabulary-{name}", export)

    return make


@pytest.fixture
def trt_folder(once: Callable[..., Path]) -> Callable[[str], Path]:
    """``trt_folder(name)``: checkpoints, and engines in the dialect of TensorRT without plans, of
    one of small_vocabulary.FOLDERS or PAIRS, whose drafters draft 8 tokens."""
    import small_vocabulary

    from specexport.trt import building

    def make(name: str) -> Path:
        pair = (small_vocabulary.PAIRS | small_vocabulary.FOLDERS)[name]

        def export(path: Path) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(building, "can_build", lambda asked: "plans come later")
                small_vocabulary.export(
                    pair, path, check=False, num_draft=8, backend="tensorrt-rtx"
                )

        return once(f"small-vocabulary-trt-{name}", export)

    return make


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Builds plans of the fake TensorRT."""
    from onnx_plans import Workshop

    return Workshop(monkeypatch)


@pytest.fixture
def planned(
    trt_folder: Callable[[str], Path], workshop: Workshop, tmp_path: Path
) -> Callable[..., Path]:
    """``planned(name, rows=None, drafts=None)``: a copy of a small folder with plans for SM 86."""

    def make(name: str, **sizes: int) -> Path:
        out = tmp_path / "-".join(map(str, ("planned", name, *sizes.values())))
        if not out.exists():
            workshop.with_plans(trt_folder(name) / "engines", out, **sizes)
        return out

    return make


@pytest.fixture
def on_gpu(gpu: Gpu) -> Iterator[Callable[..., specrun.Engine]]:
    """``on_gpu(folder, **engine_options)``: opened on the GPU, where nothing is left in the end."""
    engines: list[specrun.Engine] = []

    def make(folder: Path, **options: Any) -> specrun.Engine:
        given: dict[str, Any] = {"threads": 1, "device": "tensorrt-rtx"} | options
        engines.append(specrun.load(folder, **given))
        return engines[-1]

    yield make
    while engines:
        engines.pop().close()
    gc.collect()  # what pytest.raises kept
    if not gpu.cuda.broken:
        gpu.cuda.check_clean()


@pytest.fixture
def open_small(small_folder: Callable[[str], Path]) -> Iterator[Callable[..., specrun.Engine]]:
    """``open_small(name, **engine_options)``: the engines of one of them, opened."""
    import small_vocabulary

    engines: list[specrun.Engine] = []

    def make(name: str, **options: Any) -> specrun.Engine:
        folder = small_folder(name) / small_vocabulary.ENGINES
        engines.append(specrun.load(folder, **{"threads": 1, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
