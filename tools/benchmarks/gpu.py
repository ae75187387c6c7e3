"""Make all measurements for a GPU on one page: exactness and training steps.

Each part runs in its own process with a time limit, and is written to the page as soon as it is done, so a
failed part or a lost machine does not affect earlier measurements.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import torch
from harness import ROOT, machine

from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError, one_line_errors

TAIL = 20  # number of lines of a part's errors on the page


class Part(NamedTuple):
    """A part of the page: a script or module, with its arguments on a GPU and for a short trial."""

    title: str
    command: str
    full: str
    small: str
    minutes: float  # time limit


PARTS = [
    Part(
        "Exactness",
        "-m pytest -q -p no:cacheprovider --no-header -W ignore -rf",
        "-m gpu",
        "tests/test_models/test_backbones/test_two_stream.py -k authors_code[cpu-plain]",
        5,
    ),
    Part(
        "A pre-training step",
        "tools/benchmarks/pretrain_throughput.py",
        "",
        "--cases tiny:float32 --variants mim --batch 1 --rounds 1 --repeats 1",
        8,
    ),
]


def device() -> str:
    """GPU, driver, versions, date and commit, for the page's second paragraph."""
    told = [machine(), f"{datetime.now(timezone.utc):%Y-%m-%d}"]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        told += [f"driver {driver}", f"{memory:.0f} GiB", f"CUDA {torch.version.cuda}"]
    return "; ".join([*told, f"commit {git.stdout.strip() or 'unknown'}"])


def run_part(part: Part, small: bool) -> tuple[str, bool]:
    """Run a part; returns its section of the page and whether it succeeded."""
    words = f"{part.command} {part.small if small else part.full}".split()
    print(f"{part.title}: python {' '.join(words)}", flush=True)
    start, command = time.monotonic(), [sys.executable, "-W", "ignore", *words]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * part.minutes)
        printed, errors = done.stdout, done.stderr
        failure = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        printed, errors = ((told or b"").decode(errors="replace") for told in (late.stdout, late.stderr))
        failure = f"stopped after its limit of {part.minutes:g} minutes"
    seconds = time.monotonic() - start
    print(f"  {failure or 'done'}, {seconds:.0f} s", flush=True)
    section = f"## {part.title}\n\n`python {' '.join(words)}`, {seconds:.0f} s\n\n{printed.strip()}\n"
    if failure:
        last = "\n".join(errors.strip().splitlines()[-TAIL:])
        section += f"\n**Not complete: {failure}.**\n\n```\n{last}\n```\n"
    return section, not failure


@one_line_errors
def main() -> None:
    """Run the parts in turn, and write the page after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("work_dirs/gpu.md"), help="the page")
    parser.add_argument("--small", action="store_true", help="a try that takes seconds, also without a GPU")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        raise UserError("no GPU was found: `--small` tries this script on a CPU, with sizes that say nothing")
    title = "A trial at small sizes, whose figures say nothing" if args.small else "Measured on a GPU"
    sections, complete = [f"# {title}\n\n{device()}\n"], True
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        section, measured = run_part(part, args.small)
        complete &= measured
        sections.append(section)
        replace_file(args.out, "\n".join(sections).encode())
    print(f"wrote `{args.out}`")
    sys.exit(not complete)


if __name__ == "__main__":
    main()
