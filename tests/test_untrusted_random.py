"""Inputs made at random from valid ones, as ``scripts/fuzz.py`` makes them by the thousands."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun import SpecrunError
from specrun.text import Tokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import fuzz_cases  # noqa: E402  # pyright: ignore[reportMissingImports]

EXAMPLES = {"manifest": 150, "template": 100, "prompt": 60, "tokenizer": 100}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def make(kind: str) -> Any:
        if kind not in made:
            made[kind] = fuzz_cases.KINDS[kind](tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


@pytest.mark.parametrize("kind", [kind for kind in fuzz_cases.KINDS if kind != "engine"])
def test_changed_at_random(kind: str, cases: Callable[[str], Any]) -> None:
    """Anything but an error raised on purpose, with a message, fails here."""
    found = cases(kind)

    @settings(max_examples=EXAMPLES.get(kind, 300), derandomize=True, database=None, deadline=None)
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        try:
            found.run(random.Random(seed))
        except SpecrunError as error:
            assert str(error)

    run()


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(st.lists(st.sampled_from(fuzz_cases.PIECES), max_size=12).map("".join))
def test_parts_with_nothing_plain_are_the_text(text: str) -> None:
    if not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text):
        return
    ids = TINY.encode(text, add_special_tokens=False)
    assert TINY.encode_parts(text, []) == ids
    spans = TINY.special_spans(text)
    plain = TINY.encode(text, add_special_tokens=False, parse_special=False)
    assert TINY.encode_parts(text, spans) == plain
    assert not TINY.special_ids & set(plain)
    if not spans:
        assert plain == ids


TINY = Tokenizer(fuzz_cases.TINY / "tokenizer.json")


def test_the_fuzzer_sees_what_is_opened_elsewhere(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import fuzz; from pathlib import Path;"
        "watch = fuzz.Watch(Path(sys.argv[2])); open(sys.argv[2] + '/a', 'w').close();"
        "assert not watch.seen, watch.seen; open('/etc/passwd').close();"
        "assert watch.seen == ['/etc/passwd'], watch.seen"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT / "scripts"), str(tmp_path)], check=True)


def test_the_fuzzer_runs() -> None:
    script = [
        sys.executable,
        str(ROOT / "scripts" / "fuzz.py"),
        "--count",
        "30",
        "--only",
        "tuning",
    ]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    counts = last["kinds"]["tuning"]
    assert counts["accepted"] + counts["refused"] == 30
    assert np.sum(list(counts.values())) == 30
