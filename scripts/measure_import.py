"""Measures `import specrun`: how long it takes, and that nothing heavy comes with it.

    python scripts/measure_import.py

Prints the best of five fresh interpreters. Exit 1 if torch, transformers, onnx, onnxruntime or
numpy is loaded: importing specrun must stay free of them until they are needed.
"""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "numpy")
RUNS = 5


def imported() -> dict[str, float]:
    """Module -> milliseconds, its own imports included, of one `import specrun`."""
    command = [sys.executable, "-X", "importtime", "-c", "import specrun"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split("|") for line in run.stderr.splitlines() if line.startswith("import time:")]
    return {row[2].strip(): int(row[1]) / 1000 for row in rows[1:]}


def main() -> int:
    """Measure and print; returns the exit status."""
    runs = [imported() for _ in range(RUNS)]
    print(f"import specrun: {min(run['specrun'] for run in runs):.1f} ms (best of {RUNS})")
    heavy = [name for name in HEAVY if name in runs[0]]
    print(f"loaded with it: {', '.join(heavy) or 'none of ' + ', '.join(HEAVY)}")
    return 1 if heavy else 0


if __name__ == "__main__":
    raise SystemExit(main())
