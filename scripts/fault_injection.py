"""Faults at every seam: no committed token may be lost, no wrong one come, nothing may hang.

    python scripts/fault_injection.py [--only WORD ...] [--list]

Builds tiny pairs of every drafting method (``tests/small_vocabulary.py``), exports them, and
generates the same texts again and again, each time with one fault planted: engine files that are
damaged, runs of an engine that raise or answer with NaN, at the first run, in the middle of the
prompt and later; drafters that lie; callbacks that raise; PyTorch failing too; disks that are full
or cannot be read while a folder is written; processes that are killed. What must come of it::

    torch      the right text, PyTorch standing in for the target's engine
    plain      the right text, the drafter given up
    same       the right text, however
    refused    an error of ours before anything is generated
    error      an error, with all that was committed before it a beginning of the right text
    nothing    an export that fails leaves no folder, and an older one as it was

and after each, with the fault gone, the same engine gives the right text again where it is open.
The right text is transformers' own greedy one. A table for people, one JSON line last; exit status
1 where anything was not so. About four minutes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from faults import Bench, Fault, Seen, make_bench
from faults_callers import callback_faults, drafter_faults
from faults_files import child_faults, disk_faults, load_faults
from faults_runs import run_faults

HANGS_AFTER = 60  # seconds


def all_faults() -> list[Fault]:
    """Every fault there is, none twice."""
    found = [
        *run_faults(),
        *load_faults(),
        *drafter_faults(),
        *callback_faults(),
        *disk_faults(),
        *child_faults(),
    ]
    twice = [title for title, count in Counter(fault.title for fault in found).items() if count > 1]
    assert not twice, twice
    return found


def try_fault(fault: Fault, bench: Bench, place: Path) -> Seen:
    """What came of it; what it raises is wrong too."""
    place.mkdir(parents=True)
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = fault.try_it(bench, place)
    except Exception as error:
        seen = Seen("raised", [f"{type(error).__name__}: {error}"])
    finally:
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(place, ignore_errors=True)
    if seen.outcome not in fault.expected:
        seen.wrong.append(f"expected {' or '.join(fault.expected)}")
    return seen


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="faults that have one of these words")
    parser.add_argument("--list", action="store_true", help="show them and do nothing")
    given = parser.parse_args()
    faults = [f for f in all_faults() if not given.only or any(w in f.title for w in given.only)]
    if given.list:
        print("\n".join(fault.title for fault in faults))
        return
    counts: dict[str, Counter[str]] = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as root:
        bench = make_bench(Path(root) / "pairs")
        for number, fault in enumerate(faults):
            seen = try_fault(fault, bench, Path(root) / f"fault{number}")
            counts.setdefault(fault.seam, Counter())[seen.outcome] += 1
            if seen.wrong:
                wrong += 1
                print(f"WRONG {fault.title}: {seen.outcome}; {'; '.join(seen.wrong)}", flush=True)
    for seam, outcomes in counts.items():
        listed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(f"{seam:<18}{sum(outcomes.values()):>4}  {listed}")
    print(f"{len(faults)} faults, {wrong} wrong")
    seams = {seam: dict(outcomes) for seam, outcomes in counts.items()}
    print(json.dumps({"faults": len(faults), "wrong": wrong, "seams": seams}))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
