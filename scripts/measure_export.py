"""Peak memory and time of an export, of everything the command does.

    python scripts/measure_export.py OUT -- SOURCE [specexport options]

Runs ``specexport SOURCE --out OUT ...`` as a child and samples its memory: anonymous memory is
what the machine must really have; the resident peak also counts clean pages of mapped files, which
the system drops when it needs the room. One line for people, one JSON line last.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

SAMPLE_SECONDS = 0.05


def measure(command: list[str]) -> dict[str, float]:
    """Run ``command``; returns seconds and peaks in GB. Raises CalledProcessError on failure."""
    start = time.monotonic()
    child = subprocess.Popen(command)
    anonymous = resident = 0
    while child.poll() is None:
        rss_anon, rss = _memory(child.pid)
        anonymous, resident = max(anonymous, rss_anon), max(resident, rss)
        time.sleep(SAMPLE_SECONDS)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return {
        "seconds": round(time.monotonic() - start, 1),
        "peak_anonymous_gb": round(anonymous / 1e9, 3),
        "peak_resident_gb": round(resident / 1e9, 3),
    }


def _memory(pid: int) -> tuple[int, int]:
    """(anonymous, resident) bytes of a process; zeros once it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    found = dict(re.findall(r"^(RssAnon|VmRSS):\s+(\d+) kB", text, re.MULTILINE))
    return int(found.get("RssAnon", 0)) * 1024, int(found.get("VmRSS", 0)) * 1024


def main() -> None:
    """Command line."""
    if len(sys.argv) < 4 or sys.argv[2] != "--":
        raise SystemExit(__doc__)
    out, arguments = Path(sys.argv[1]), sys.argv[3:]
    command = [sys.executable, "-m", "specexport.cli", *arguments, "--out", str(out), "--quiet"]
    result = measure(command)
    result["folder_gb"] = round(sum(p.stat().st_size for p in out.iterdir()) / 1e9, 3)
    print(
        f"{result['seconds']} s, {result['peak_anonymous_gb']} GB of anonymous memory"
        f" ({result['peak_resident_gb']} GB with clean file pages), wrote"
        f" {result['folder_gb']} GB"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
