"""Run an engine folder on the least ONNX Runtime that its manifest allows, and compare.

    python scripts/check_min_runtime.py ENGINES [--prompt TEXT]

Makes a throw-away environment with only the lean half of the package and onnxruntime at exactly
that version, generates with every method there and here, and compares the tokens. Exits 1 where
they differ. Needs the package index.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from specrun.contract import Role
from specrun.manifest import Manifest, read

CHECKOUT = Path(__file__).resolve().parent.parent
TOKENS = 96


def least_version(manifest: Manifest) -> str:
    """The onnxruntime that every engine of the folder can do with."""
    found = {engine.requires.onnxruntime for engine in manifest.engines.values()}
    return max(found, key=lambda version: [int(part) for part in version.split(".")])


def generate(python: Path, engines: Path, method: str, prompt: str) -> list[int]:
    """The tokens that ``specrun`` writes, run by ``python``."""
    command = [str(python), "-m", "specrun.cli", str(engines), "--prompt", prompt, "--json"]
    command += ["--method", method, "-n", str(TOKENS), "--strict", "--threads", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python} failed with {method}:\n{done.stderr}")
    tokens: list[int] = json.loads(done.stdout)["tokens"]
    return tokens


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--prompt", default="In the beginning")
    given = parser.parse_args()
    manifest = read(given.engines)
    methods = ["plain", "prompt-lookup"]
    methods += ["mtp-drafter"] if Role.MTP_DRAFTER in manifest.engines else []
    version = least_version(manifest)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        wanted = [f"onnxruntime=={version}.*", str(CHECKOUT)]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        differing = 0
        for method in methods:
            there = generate(python, given.engines, method, given.prompt)
            here = generate(Path(sys.executable), given.engines, method, given.prompt)
            differing += there != here
            print(f"onnxruntime {version}, {method}: {'same' if there == here else 'OTHER'} tokens")
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
