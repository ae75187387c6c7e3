"""Computing on CPU without asking the system for the same memory again and again."""

import ctypes
import sys

from mmengine.device import get_device

# M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX in glibc's malloc.h. One arena: the heaps that other
# threads (autograd's) would open are given back whole at any threshold.
SETTINGS = {-1: 2**31 - 1, -3: 2**31 - 1, -8: 1}


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees, where it computes on CPU and has glibc.

    glibc hands large freed blocks back to the system. A training step frees all its activations, and the next
    one would get them back page by page, zeroed: up to a third of the time (docs/performance.md).

    Returns:
        True if it does so.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is None or get_device() != "cpu":
        return False
    return all(mallopt(option, value) == 1 for option, value in SETTINGS.items())
