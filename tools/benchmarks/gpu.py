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
    """A part of the page.

    Args:
        title: heading of the part.
        command: script or module to run with Python.
        full: the arguments on a GPU.
        small: the arguments without a GPU, for seconds of work.
        minutes: time limit.
    """

    title: str
    command: str
    full: str
    small: str
    minutes: float


PARTS = {
    "exactness": Part(
        "Exactness",
        "-m pytest -q -p no:cacheprovider --no-header -W ignore -rf",
        "-m gpu",
        "tests/test_models/test_two_stream.py -k authors_code[cpu-plain]",
        2.5,
    ),
    "step": Part(
        "A pre-training step",
        "tools/benchmarks/pretrain_throughput.py",
        "",
        "--cases tiny:float32 --variants mim --batch 1 --rounds 1 --repeats 1",
        4,
    ),
}


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("work_dirs/gpu.md"), help="the page")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--small", action="store_true", help="a try that takes seconds, also without a GPU")
    return parser.parse_args()


def device() -> str:
    """GPU, driver, versions, date and commit, for the page's second paragraph."""
    told = [machine(), f"{datetime.now(timezone.utc):%Y-%m-%d}"]
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader --id=0"
        told += [f"driver {output_of(query)}", f"{memory:.0f} GiB", f"CUDA {torch.version.cuda}"]
    return "; ".join([*told, f"commit {output_of('git rev-parse --short HEAD') or 'unknown'}"])


def output_of(command: str) -> str:
    """The output of a command, empty if it cannot be run."""
    try:
        return subprocess.run(
            command.split(), cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def run_part(part: Part, small: bool) -> tuple[str, bool]:
    """Run a part; returns its section of the page and whether it succeeded."""
    arguments = f"{part.command} {part.small if small else part.full}".split()
    print(f"{part.title}: python {' '.join(arguments)}", flush=True)
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *([] if arguments[0] == "-m" else ["-W", "ignore"]), *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60 * part.minutes,
        )
        printed, failure = done.stdout, f"exit code {done.returncode}" if done.returncode else ""
        errors = done.stderr
    except subprocess.TimeoutExpired as late:
        printed, errors = ((told or b"").decode(errors="replace") for told in (late.stdout, late.stderr))
        failure = f"stopped after its limit of {part.minutes:g} minutes"
    seconds = time.monotonic() - start
    print(f"  {failure or 'done'}, {seconds:.0f} s", flush=True)
    section = f"## {part.title}\n\n`python {' '.join(arguments)}`, {seconds:.0f} s\n\n{printed.strip()}\n"
    if failure:
        last = "\n".join(errors.strip().splitlines()[-TAIL:])
        section += f"\n**Not complete: {failure}.**\n\n```\n{last}\n```\n"
    return section, not failure


@one_line_errors
def main() -> None:
    """Run the parts in turn, and write the page after each."""
    args = parse_args()
    if not args.small and not torch.cuda.is_available():
        raise UserError("no GPU was found: `--small` tries this script on a CPU, with sizes that say nothing")
    sections, complete = [f"# Measured on a GPU\n\n{device()}\n"], True
    if args.small:
        sections[0] = f"# A trial at small sizes, whose figures say nothing\n\n{device()}\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in args.parts:
        section, measured = run_part(PARTS[name], args.small)
        complete &= measured
        sections.append(section)
        replace_file(args.out, "\n".join(sections).encode())
    print(f"wrote `{args.out}`")
    sys.exit(not complete)


if __name__ == "__main__":
    main()
