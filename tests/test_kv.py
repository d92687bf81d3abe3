"""KV buffers and the target over them: lengths, growth, rows of their own per sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from toys import LAYER, Toy

from specrun import ContextFull
from specrun.contract import DType, Part, Role, past
from specrun.kv import KvBuffers
from specrun.manifest import read
from specrun.ort import open_session
from specrun.runner import Run
from specrun.target import Target

KEY = past(0, Part.KEY)


def buffers(**options: Any) -> KvBuffers:
    sizes: dict[str, Any] = {"max_context": 20, "initial_capacity": 4} | options
    return KvBuffers((LAYER,), DType.FLOAT32, **sizes)


def test_a_version_counts_also_where_there_are_no_buffers() -> None:
    """What PyTorch keeps beside them grows with the capacity too."""
    kv = KvBuffers((), DType.FLOAT32, max_context=20, initial_capacity=4)
    kv.reserve(5)
    assert (kv.capacity, kv.version) == (8, 1)


def test_start_small_and_double_up_to_the_context() -> None:
    kv = buffers()
    assert (kv.capacity, kv.length, kv.nbytes) == (4, 0, 2 * 4 * 2 * 4)
    capacities = []
    for _ in range(20):
        kv.reserve(1)
        kv.advance(1)
        capacities.append(kv.capacity)
    assert sorted(set(capacities)) == [4, 8, 16, 20]
    with pytest.raises(ContextFull, match="21 tokens do not fit into the context of 20"):
        kv.reserve(1)
    assert kv.length == 20


def test_growth_keeps_valid_rows_and_only_those() -> None:
    kv = buffers(batch=2)
    kv.reserve(4)
    kv.advance(4)
    kv.arrays[KEY][:] = 7.0
    kv.truncate([3, 1])
    old = kv.version
    kv.reserve(3)
    assert (kv.capacity, kv.version) == (8, old + 1)
    assert kv.arrays[KEY][0, 0, :, 0].tolist() == [7, 7, 7, 0, 0, 0, 0, 0]
    assert kv.arrays[KEY][1, 0, :, 0].tolist() == [7, 0, 0, 0, 0, 0, 0, 0]
    # The buffer is the array, not a copy of it.
    kv.arrays[KEY][0, 0, 0, 0] = 5.0
    assert kv.buffers[KEY].read()[0, 0, 0, 0] == 5.0


def test_truncate_reaches_the_length_or_raises() -> None:
    kv = buffers(batch=2)
    kv.advance(4)
    kv.truncate(3)
    assert kv.length == 3
    kv.truncate([2, 3])
    for wrong in (3, -1, [2, 4]):
        with pytest.raises(ValueError, match=r"cannot truncate from \[2, 3\]"):
            kv.truncate(wrong)
    with pytest.raises(ValueError, match="different lengths"):
        _ = kv.length


def test_integrity_is_checked() -> None:
    kv = buffers()
    with pytest.raises(RuntimeError, match="in capacity 4"):
        kv.advance(5)


def target(tmp_path: Path, toy: Toy, **options: int) -> Target:
    folder = toys.write_folder(tmp_path / "toy", toy)
    spec = read(folder).engines[Role.TARGET]
    session = open_session(folder / spec.file, spec, threads=1)
    return Target(session, spec, max_context=64, **options)


def test_rows_logits_and_hidden(tmp_path: Path) -> None:
    one = target(tmp_path, Toy())
    rows = one.prefill(np.array([[1, 2, 3]]), want_logits=True)
    assert rows.argmax.tolist() == [[4]]
    assert rows.hidden.tolist() == [[[2.0, 3.0]]]
    assert rows.logits is not None and rows.logits.shape == (1, 1, 10)
    assert rows.logits.argmax(-1).tolist() == [[4]]
    rows = one.verify(np.array([[4, 5]]))
    assert rows.argmax.tolist() == [[5, 6]]
    assert rows.logits is None


def test_sequences_with_lengths_of_their_own(tmp_path: Path) -> None:
    """Two sequences, rolled back differently, equal to each alone."""
    toy = Toy(history_weight=3, modulus=7)
    both = target(tmp_path, toy, batch=2)
    prompts = [[1, 2, 3, 4], [6, 5, 4, 3]]
    both.prefill(np.array(prompts))
    both.kv.truncate([4, 2])
    rows = both.verify(np.array([[0, 1], [2, 2]]))
    histories = [[1, 2, 3, 4, 0, 1], [6, 5, 2, 2]]
    for got, history in zip(rows.argmax.tolist(), histories, strict=True):
        assert got == [toy.next(history[:-1]), toy.next(history)]
    assert both.kv.lengths.tolist() == [6, 4]


def test_runs_are_prepared_once_per_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = target(tmp_path, Toy(), initial_capacity=32)
    made: list[int] = []
    prepare = one._prepare

    def noted(rows: int, first_row: int, want_logits: int) -> Run:
        made.append(rows)
        return prepare(rows, first_row, want_logits)

    monkeypatch.setattr(one, "_prepare", noted)
    one.prefill(np.array([[1, 2, 3]]))
    for _ in range(5):
        one.verify(np.array([[4, 5]]))
        one.verify(np.array([[4]]))
        one.truncate(3)
    assert made == [3, 2, 1]


def test_half_precision_buffers_come_from_the_session(tmp_path: Path) -> None:
    one = target(tmp_path, Toy(kv_dtype=DType.FLOAT16))
    assert one.kv.arrays[KEY].dtype == np.float16
    assert one.prefill(np.array([[1, 2]])).hidden.dtype == np.float16
