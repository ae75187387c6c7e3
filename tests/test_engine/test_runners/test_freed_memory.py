"""Freed memory is kept where a run computes on CPU with glibc, and nowhere else."""

from types import SimpleNamespace

import pytest

from mapet_mm.engine.runners import freed_memory


@pytest.mark.parametrize(
    ("device", "library", "kept"),
    [
        ("cpu", SimpleNamespace(mallopt=lambda option, value: 1), True),
        ("cpu", SimpleNamespace(), False),  # another C library
        ("cuda", SimpleNamespace(mallopt=lambda option, value: 1 / 0), False),
    ],
)
def test_freed_memory_is_kept_on_cpu_with_glibc(device, library, kept, monkeypatch):
    monkeypatch.setattr(freed_memory.sys, "platform", "linux")
    monkeypatch.setattr(freed_memory, "get_device", lambda: device)
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: library)
    assert freed_memory.keep_freed_memory() is kept
