"""What a folder takes in memory with all its engines open, and what a step touches of its tables.

    python scripts/measure_memory.py FOLDER [--method mtp-drafter] [--tokens 32]

Opens the folder as an app does, generates, and reads the process's own figures: resident memory
against the bytes of the folder's weights (each stored once) and its KV; how much of the data file
is mapped and resident, at the start and for each token more. Pages of a file that two engines map
count twice in the resident memory of a process and once in its proportional share (Pss), which is
given too. One line per figure, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import specrun
from specexport.datafile import DATA_FILE
from specrun import manifest as manifests


def memory() -> dict[str, int]:
    """Bytes: resident, anonymous, proportional, and of the data file."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = {
        name: int(re.search(rf"^{name}: +(\d+) kB", rollup, re.M)[1]) * 1024  # type: ignore[index]
        for name in ("Rss", "Pss", "Anonymous")
    }
    mapped = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(DATA_FILE)
        elif inside and line.startswith("Rss:"):
            mapped += int(line.split()[1]) * 1024
    return found | {"Data": mapped}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", default="mtp-drafter")
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    made = manifests.read(given.folder)
    weights = next(entry.size for entry in made.files if entry.path == DATA_FILE)
    before = memory()
    common: dict[str, Any] = {"method": given.method, "eos_token_ids": (), "do_sample": False}
    with specrun.load(given.folder) as engine:
        prompt = list(range(2, 18))
        engine.generate(prompt, max_new_tokens=1, **common)
        first = memory()
        engine.generate(prompt, max_new_tokens=given.tokens, **common)
        last = memory()
        kv = sum(spec.kv_bytes_per_token for spec in made.engines.values())
    bound = weights + kv * (len(prompt) + given.tokens)
    result = {
        "weights": weights,
        "kv_bytes_per_token": kv,
        "resident": last["Rss"],
        "proportional": last["Pss"],
        "anonymous": last["Anonymous"],
        "before_loading": before["Rss"],
        "resident_over_weights_and_kv": round(last["Rss"] / bound, 3),
        "data_file_resident_first": first["Data"],
        "data_file_resident_last": last["Data"],
        "data_file_per_token": (last["Data"] - first["Data"]) // max(1, given.tokens - 1),
    }
    for name, value in result.items():
        print(f"{name:32} {value:,}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
