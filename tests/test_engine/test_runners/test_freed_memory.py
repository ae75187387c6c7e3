"""A process that computes on CPU keeps what it frees; with a GPU nothing is changed."""

from types import SimpleNamespace

import pytest

from mapet_mm.engine.runners import freed_memory


def test_glibc_is_told_to_keep_all_of_it(monkeypatch):
    """M_MMAP_THRESHOLD (-3) and M_TRIM_THRESHOLD (-1) at the largest int, M_ARENA_MAX (-8) at one."""
    told = {}
    library = SimpleNamespace(mallopt=lambda option, value: told.update({option: value}) or 1)
    monkeypatch.setattr(freed_memory.sys, "platform", "linux")
    monkeypatch.setattr(freed_memory, "get_device", lambda: "cpu")
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: library)
    assert freed_memory.keep_freed_memory()
    assert told == {-3: 2**31 - 1, -1: 2**31 - 1, -8: 1}


def test_a_c_library_without_the_setting_is_left_alone(monkeypatch):
    monkeypatch.setattr(freed_memory, "get_device", lambda: "cpu")
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert not freed_memory.keep_freed_memory()


def test_with_a_gpu_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(freed_memory, "get_device", lambda: "cuda")
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: pytest.fail("asked the C library"))
    assert not freed_memory.keep_freed_memory()
