"""scripts/check_serve.py on toys: a small one is right, and what is wrong is seen."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import TOY
from toys import Toy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import check_serve  # pyright: ignore[reportMissingImports]

import specrun

ToyFolder = Callable[[Toy], Path]


def test_many_clients(toy_folder: ToyFolder) -> None:
    """Twenty at once, twice: all texts are those of single runs, and a tenth leaves."""
    folder = toy_folder(TOY)
    report = check_serve.check(folder, requests=20, waves=2, tokens=16, seed=1, batch=2)
    assert report.wrong == []
    assert (report.asked, report.completed + report.left) == (48, 48)
    assert 1 <= report.left <= 4 and report.refused >= 1 and len(report.memory) == 2
    assert report.methods == dict.fromkeys(("plain", "prompt-lookup", "mtp-drafter", "draft"), 12)
    assert json.loads(json.dumps(report.as_dict()))["completed"] == report.completed
    assert "refused by a short queue" in check_serve.table(report)


def test_what_is_wrong_is_seen(toy_folder: ToyFolder) -> None:
    with specrun.load(toy_folder(TOY), threads=1) as engine:
        wishes = check_serve.draw(engine, 20, 8, random.Random(0))
    assert sum(wish.leaves is not None for wish in wishes) == 2
    stays = [wish for wish in wishes if wish.leaves is None]
    leaver = next(wish for wish in wishes if wish.leaves is not None)
    texts = {check_serve.wish_key(wish): "1234" for wish in wishes}
    right = [("1234", True), ("12", False)]
    cases: tuple[tuple[list[Any], int], ...] = (
        (right, 0),
        ([("1235", True), ("12", False)], 1),
        ([("123", True), ("13", False)], 2),
        ([("1234", False), ("12", False)], 1),
        ([RuntimeError("x"), ("", False)], 1),
    )
    for came, count in cases:
        report = check_serve.Report()
        check_serve.compare(report, [stays[0], leaver], came, texts)
        assert len(report.wrong) == count, came
        assert report.right == (count == 0)
    grown = check_serve.Report(memory=[900, 1000, 1101])
    assert not grown.right and check_serve.Report(memory=[900, 1000, 1099]).right


def test_errors_of_the_client_are_told_apart(toy_folder: ToyFolder) -> None:
    with specrun.load(toy_folder(TOY), threads=1) as engine:
        (wish,) = check_serve.draw(engine, 1, 8, random.Random(0))
    answer: Any
    for headers, wrong in (({"retry-after": "1"}, 0), ({}, 1)):
        answer = httpx.Response(429, headers=headers, request=httpx.Request("POST", "http://h"))
        report = check_serve.Report()
        error = openai.RateLimitError("full", response=answer, body=None)
        check_serve.compare(report, [wish], [error], {})
        assert (report.refused, len(report.wrong)) == (1, wrong)


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the server did not start"):
        check_serve.Server(tmp_path)
