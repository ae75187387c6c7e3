"""The memory that a process frees stays with it: no page faults when it is asked for again."""

import subprocess
import sys

import pytest

from mapet_mm.engine import freed_memory

TOUCHED_AGAIN = """
import resource, sys
import torch
from mapet_mm.engine.freed_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # 128 MiB: 32,768 pages of 4 KiB, of which a system may bring several at a fault.
    blocks = [torch.ones(2**24, dtype=torch.uint8) for _ in range(8)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del blocks
print(faults)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own")
@pytest.mark.parametrize(("mode", "least", "most"), [("keep", 0, 100), ("default", 1000, 40_000)])
def test_freed_blocks_are_used_again_without_page_faults(mode, least, most):
    command = [sys.executable, "-W", "ignore", "-c", TOUCHED_AGAIN, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert least <= int(done.stdout.splitlines()[-1]) <= most


def test_with_a_gpu_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(freed_memory, "get_device", lambda: "cuda")
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: pytest.fail("asked the C library"))
    assert not freed_memory.keep_freed_memory()
