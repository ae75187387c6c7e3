"""Shared by the benchmarks: description of the machine, timing, tables, and fresh processes."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[2]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def machine() -> str:
    """The hardware and versions that a figure was measured with."""
    about = Path("/proc/cpuinfo")  # of Linux
    names = re.findall(r"model name\s*: (.*)", about.read_text() if about.is_file() else "")
    cpu = f"{(names or [platform.machine()])[0]}, {torch.get_num_threads()} threads"
    device = torch.cuda.get_device_name() if ON_GPU else cpu
    return f"{device}; Python {platform.python_version()}, torch {torch.__version__}"


def time_call(call: Callable[[], object], repeats: int, warm_up: int) -> list[float]:
    """Seconds of each of several calls, after some that do not count."""
    taken = []
    for _ in range(warm_up + repeats):
        start = time.perf_counter()
        call()
        if ON_GPU:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken[warm_up:]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with numbers aligned right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def in_fresh_process(call: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Return what a module's function returns in a fresh process with these environment variables."""
    with patch.dict(os.environ, environment), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()
