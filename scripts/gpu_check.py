"""Proves on a machine with a GPU what a machine without one cannot, part by part.

    python scripts/gpu_check.py                   prepares itself, where the extra export is there
    python scripts/gpu_check.py --prepare kit/    anywhere: what has to be carried to the GPU
    python scripts/gpu_check.py --from kit/       there

Tiny models of every kind that drafting needs run through PyTorch, ONNX Runtime and both TensorRT:
prefill, decoding, drafting and rollback, by every method, compared with what ONNX Runtime says on
the CPU. A model of middle size is timed. Each part runs in a process of its own and ends as
``passed``, ``failed`` or ``not available here``, with the reason; one that crashes or hangs has
failed, and the others go on. The exit status is 1 if a part failed. A table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Also where nothing is installed; what is installed comes first.
sys.path += [str(ROOT / name) for name in ("runtime", "graphs", "export")]
sys.path.append(str(ROOT / "scripts"))

from gpu_kit import KIT  # noqa: E402
from gpu_open import Machine, lacking  # noqa: E402
from gpu_parts import PARTS, Part, Place  # noqa: E402
from gpu_verdict import FAILED, NOT_HERE, Found, NotHere, Verdict  # noqa: E402

LIMIT = 480.0  # seconds
LAST_WORDS = 400  # characters of a process that ended without a verdict
EXPORTS = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "safetensors")


def check(
    folder: Path | None, machine: Machine, names: Sequence[str], limit: float, *, keep: Path
) -> list[Verdict]:
    """Every part of ``names``, in order. ``folder``: a kit; None: one is made in ``keep``, if any
    part can run. ``limit``: seconds for all."""
    end = time.monotonic() + limit
    missing = {name: PARTS[name].missing(machine) for name in names}
    unprepared: Verdict | None = None
    if folder is None and any(PARTS[n].needs_kit and missing[n] is None for n in names):
        folder = keep / "kit"
        unprepared = _prepare_here(folder, end - time.monotonic())
    verdicts = []
    for name in names:
        part, why = PARTS[name], missing[name]
        if why is None and part.needs_kit and unprepared is not None:
            verdicts.append(replace(unprepared, part=name))
        elif why is not None:
            notes = (machine.why_none,) if machine.why_none and not part.needs_kit else ()
            verdicts.append(Verdict(name, NOT_HERE, (why,), notes))
        else:
            verdicts.append(_guarded(part, folder, machine, end - time.monotonic(), keep))
        print(line(verdicts[-1]), file=sys.stderr, flush=True)
    return verdicts


def _prepare_here(folder: Path, seconds: float) -> Verdict | None:
    """Make a kit on this machine; what to say of every part that needs one where that fails."""
    if (why := lacking(EXPORTS)) is not None:
        hint = "give --from with a folder that --prepare made"
        return Verdict("", NOT_HERE, (f"nothing to run: {why}; {hint}",))
    words, how = _run([sys.executable, __file__, "--prepare", str(folder)], seconds)
    if how is None:
        return None
    return Verdict("", FAILED, (f"preparing {how}: {words or 'it said nothing'}",))


def _guarded(
    part: Part, folder: Path | None, machine: Machine, seconds: float, keep: Path
) -> Verdict:
    """The verdict of a part that runs in a process of its own."""
    start = time.monotonic()
    if seconds < 1:
        return Verdict(part.name, FAILED, ("not run: the time for all parts is used up (--limit)",))
    answer = keep / "verdict.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--part", part.name, "--answer", str(answer)]
    command += ["--device", machine.device, "--work", str(keep)]
    command += [] if folder is None else ["--from", str(folder)]
    words, how = _run(command, min(seconds, part.seconds))
    if how is None and answer.is_file():
        return Verdict.of_json(json.loads(answer.read_text(encoding="utf-8")))
    reason = f"the process {how or 'gave no verdict'}: {words or 'it said nothing'}"
    return Verdict(part.name, FAILED, (reason,), seconds=time.monotonic() - start)


def _run(command: Sequence[str], seconds: float) -> tuple[str, str | None]:
    """The last words of a command, and how it ended where that was not well."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    try:
        _, error = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the builders that it started
        _, error = process.communicate()
        return _last(error), f"did not end within {seconds:.0f} seconds"
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    code = process.returncode
    how = f"crashed with signal {-code}" if code < 0 else f"ended with exit status {code}"
    return _last(error), how if code else None


def _last(error: bytes) -> str:
    return " ".join(error.decode(errors="replace").split())[-LAST_WORDS:]


def run_part(name: str, place: Place) -> Verdict:
    """One part, in this process. Whatever it raises is its failure."""
    found, start = Found(), time.monotonic()
    try:
        PARTS[name].run(place, found)
    except NotHere as missing:
        return Verdict(name, NOT_HERE, (str(missing),), seconds=time.monotonic() - start)
    except Exception as error:
        hint = getattr(error, "hint", None)
        said = f"{type(error).__name__}: {error}" + (f" ({hint})" if hint else "")
        found.failures.append(said)
    return found.verdict(name, time.monotonic() - start)


def line(verdict: Verdict) -> str:
    """A row of the table, with every reason below it."""
    word, reasons = str(verdict.verdict), verdict.reasons
    if verdict.verdict == NOT_HERE:
        word, reasons = f"{word} ({'; '.join(reasons)})", ()
    head = f"{verdict.part:36} {verdict.seconds:4.0f} s  {word}"
    return "\n".join([head, *(f"{'':44}{reason}" for reason in reasons)])


def table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The verdicts, then notes and figures of the parts that have some."""
    for verdict in verdicts:
        yield line(verdict)
    for verdict in verdicts:
        if verdict.notes or verdict.figures:
            yield f"\n{verdict.part}"
            yield from (f"  {note}" for note in verdict.notes)
            yield from (f"  {name}: {value:.4g}" for name, value in verdict.figures.items())
    yield from _times([v for v in verdicts if v.part.endswith("times") and v.figures])


def _times(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """What was timed by several, side by side, and how many times as long as by the fastest."""
    if len(verdicts) < 2:
        return
    yield "\n" + f"{'':24}" + "".join(f"{v.part.removesuffix('times'):>24}" for v in verdicts)
    for name in verdicts[0].figures:
        values = [v.figures[name] for v in verdicts if name in v.figures]
        if name.endswith(" ms") and len(values) == len(verdicts):
            least = min(values)
            row = "".join(f"{f'{x:.3g} ({x / least:.1f}x)':>24}" for x in values)
            yield f"{name:24}{row}"


def _child(given: argparse.Namespace) -> None:
    """A part, for the process that started this one."""
    place = Place(Machine.here(given.device), given.folder or Path(), given.work)
    verdict = run_part(given.part, place)
    given.answer.write_text(json.dumps(verdict.json()), encoding="utf-8")


def _prepare(given: argparse.Namespace) -> None:
    """A kit in a folder. Graphs only, unless plans are asked for: they are built where they run."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import gpu_kit
    import gpu_mid

    gpu_kit.prepare(given.prepare, plans=tuple(given.compute_capability))
    gpu_mid.prepare(gpu_mid.Mid(), given.prepare)
    size = sum(path.stat().st_size for path in given.prepare.rglob("*") if path.is_file())
    print(f"{given.prepare}: {size / 1e6:.1f} MB", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        epilog="parts: " + "; ".join(PARTS),
    )
    add = parser.add_argument
    add("--prepare", type=Path, metavar="DIR", help="make what the check needs, and stop")
    add(
        "--compute-capability",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="with --prepare: plans of TensorRT-RTX for such GPUs too, 89 for example; repeatable,"
        " some 250 MB each; without, they are built where they run",
    )
    add("--from", dest="folder", type=Path, metavar="DIR", help="a folder that --prepare made")
    add("--only", action="append", metavar="WORDS", help="parts whose names begin so; repeatable")
    add("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for everything (480)")
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: the same checks without a GPU, which shows that they can fail",
    )
    for name in ("--part", "--answer", "--work"):  # of the processes that it starts
        add(name, type=str if name == "--part" else Path, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.part:
        _child(given)
        return 0
    if given.prepare:
        _prepare(given)
        return 0
    names = [n for n in PARTS if not given.only or n.startswith(tuple(given.only))]
    if not names:
        parser.error(f"--only: no part begins with {', '.join(given.only)}")
    if given.folder is not None and not (given.folder / KIT).is_file():
        parser.error(f"--from: {given.folder} has no {KIT}; make one with --prepare {given.folder}")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as keep:
        machine = Machine.here(given.device)
        verdicts = check(given.folder, machine, names, given.limit, keep=Path(keep))
    print("\n".join(table(verdicts)))
    failed = any(verdict.verdict == FAILED for verdict in verdicts)
    said: dict[str, Any] = {"failed": failed, "parts": [v.json() for v in verdicts]}
    print(json.dumps(said))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
