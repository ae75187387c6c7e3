"""An evaluation's memory, measured by the benchmark that the docs name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "tools" / "benchmarks" / "feature_evaluation.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["--val-images", "512"], ["--images", "512", "--classes", "250", "--rates", "13"]],
    ids=["200,000 images", "two parts of classifiers"],
)
def test_features_wider_than_memory_stay_under_four_gigabytes(arguments):
    """12 layers x 2 x 768: 7.4 GB in float16 of 200,000 images."""
    run = subprocess.run(
        [sys.executable, BENCHMARK, *arguments], capture_output=True, text=True, check=True, timeout=3600
    )
    peaks = [float(peak) for peak in re.findall(r"\| ([\d.]+) \|$", run.stdout, re.MULTILINE)]
    assert len(peaks) == 3
    assert max(peaks) < 4 / 1.0737
