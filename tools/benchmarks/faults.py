"""Run the tests that cause faults in trainings, and print how many faults of each type were not survived.

    python tools/benchmarks/faults.py                  the short version, a few minutes
    python tools/benchmarks/faults.py --all            all of them, half an hour on two cores
    python tools/benchmarks/faults.py --only images    the types with this word in their name

A fault is survived if the run continues with the same result, or ends with one line that says what to do.
This script needs the tests' requirements (`pip install -e .[dev]`).
"""

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Types of faults and their tests; the first that fits counts.
KINDS = {
    "stopped after a step and resumed, bit for bit": "test_engine/test_epoch_seed.py::test_a_run_resumed",
    "other faults of a resumed run": "test_engine/test_epoch_seed.py",
    "SIGKILL, also while a checkpoint is written": "test_engine/test_kills.py",
    "SIGTERM, SIGUSR1, a full disk": "test_engine/test_interruption.py",
    "broken, foreign and missing checkpoints": "test_engine/test_checkpoints.py",
    "loss or gradients that are not finite": "test_engine/test_non_finite.py",
    "divergence, collapse, a slow loader": "test_engine/test_health.py::test_",
    "images of rare kinds": "test_datasets/test_bad_images.py::test_tokens_and_training",
    "images that cannot be read, vanish or change": "test_datasets/test_bad_images.py",
    "images that extraction cannot read": "test_tools/test_undecodable_images.py",
    "an image replaced after extraction": "test_tools/test_tokenizer_processes.py::test_an_image_that_was",
    "one of several processes dies or hangs": "test_engine/test_distributed.py::test_a_",
    "a changed number of processes": "test_engine/test_distributed.py",
    "damaged files": "test_fuzzed/test_files.py::test_a_damaged_file",
    "shapes and contents drawn at random": "test_fuzzed",
    "jobs that reach their time limit": "test_experiments/test_local.py::test_a_job_whose_time",
}


def kind_of(test: str) -> str | None:
    """Type of the faults that a test causes."""
    return next((kind for kind, place in KINDS.items() if place in test), None)


class Outcomes:
    """A pytest plugin that runs the tests of some types only, and counts their outcomes."""

    def __init__(self, only: str) -> None:
        self.only = only
        self.survived: Counter[str] = Counter()
        self.lost: defaultdict[str, list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kinds = map(kind_of, [item.nodeid for item in items])
        items[:] = [item for item, kind in zip(items, kinds, strict=True) if kind and self.only in kind]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.passed and report.when != "call"):
            return
        kind = kind_of(report.nodeid)
        if report.passed:
            self.survived[kind] += 1
        else:
            self.lost[kind].append(report.nodeid)

    def table(self) -> str:
        """A Markdown table with one line per type."""
        rows = [(kind, self.survived[kind], len(self.lost[kind])) for kind in KINDS]
        rows = [row for row in rows if row[1] + row[2]]
        rows.append(("**all**", sum(row[1] for row in rows), sum(row[2] for row in rows)))
        lines = ["| faults | tried | survived | lost |", "| --- | --- | --- | --- |"]
        lines += [f"| {kind} | {here + gone} | {here} | {gone} |" for kind, here, gone in rows]
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="run the slow tests too")
    parser.add_argument("--only", default="", help="only the types with this word in their name")
    args = parser.parse_args()
    places = [place for kind, place in KINDS.items() if args.only in kind]
    files = sorted({str(ROOT / "tests" / place.split("::")[0]) for place in places})
    words = ["-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *files]
    words += [] if args.all else ["-m", "not slow"]
    outcomes = Outcomes(args.only)
    code = pytest.main(words, plugins=[outcomes])
    print(f"\n{outcomes.table()}")
    for names in outcomes.lost.values():
        print("\n".join(f"lost: {name}" for name in names))
    sys.exit(int(code))


if __name__ == "__main__":
    main()
