"""Computing on CPU without asking the system for the same memory again and again."""

import ctypes
import sys

from mmengine.device import get_device

# The numbers in glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_INT = 2**31 - 1
# One arena: the heaps that other threads (autograd's) would open are given back whole at any threshold.
SETTINGS = {M_MMAP_THRESHOLD: LARGEST_INT, M_TRIM_THRESHOLD: LARGEST_INT, M_ARENA_MAX: 1}


def keep_freed_memory() -> bool:
    """From now on this process keeps the memory that it frees, where it computes on CPU and has glibc.

    glibc hands large freed blocks back to the system. A training step frees all its activations, and the next
    one would get them back page by page, zeroed: up to a third of the time (docs/performance.md).

    Returns:
        Whether it does so.
    """
    if get_device() != "cpu" or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return all(mallopt(option, value) == 1 for option, value in SETTINGS.items())
