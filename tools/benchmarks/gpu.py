"""Make all measurements for a GPU on one page: exactness and training steps.

Each part runs in its own process with a time limit, and writes to the page itself, so a failed part or a lost
machine does not affect earlier measurements.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from harness import ROOT, machine

from mapet_mm.utils.errors import UserError, one_line_errors


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


def run_part(part: Part, small: bool, page: TextIO) -> bool:
    """Run a part with the page as its output; returns whether it succeeded."""
    words = f"{part.command} {part.small if small else part.full}".split()
    print(f"{part.title}: python {' '.join(words)}", flush=True)
    page.write(f"\n## {part.title}\n\n`python {' '.join(words)}`\n\n")
    page.flush()  # before the part writes
    command, limit = [sys.executable, "-W", "ignore", *words], 60 * part.minutes
    try:
        subprocess.run(command, cwd=ROOT, stdout=page, stderr=page, timeout=limit, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        page.write(f"\n**Not complete: {error}**\n")
        return False
    return True


@one_line_errors
def main() -> None:
    """Run the parts in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("work_dirs/gpu.md"), help="the page")
    parser.add_argument("--small", action="store_true", help="a try that takes seconds, also without a GPU")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        raise UserError("no GPU was found: `--small` tries this script on a CPU, with sizes that say nothing")
    title = "A trial at small sizes, whose figures say nothing" if args.small else "Measured on a GPU"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit, date = git.stdout.strip() or "unknown", datetime.now(timezone.utc).date()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as page:
        page.write(f"# {title}\n\n{machine()}; {date}; commit {commit}\n")
        complete = [run_part(part, args.small, page) for part in PARTS]
    print(f"wrote `{args.out}`")
    sys.exit(not all(complete))


if __name__ == "__main__":
    main()
