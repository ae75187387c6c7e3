"""Which runs of the tests may use a GPU."""

from collections.abc import Sequence
from itertools import pairwise


def is_gpu_run(words: Sequence[str]) -> bool:
    """True if pytest's command line asks for the tests marked `gpu`; all others compare bits of a CPU."""
    expressions = [after for word, after in pairwise(words) if word == "-m"]
    return any("gpu" in one and "not gpu" not in one for one in expressions)
