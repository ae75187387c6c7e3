"""Shared by the benchmarks: description of the machine, timing, tables, and work in a fresh process."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def time_call(call: Callable[[], object], rounds: int, warm_up: int) -> list[float]:
    """Seconds of each of several calls, after some that do not count."""
    taken = []
    for _ in range(warm_up + rounds):
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


def fresh(script: str, arguments: Sequence[Any], environment: Mapping[str, str] | None = None) -> Any:
    """Run a script in a fresh process, and return the last line that it prints, parsed as JSON."""
    words = [sys.executable, "-W", "ignore", script, *map(str, arguments)]
    environment = {**os.environ, **(environment or {})}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
    return json.loads(done.stdout.splitlines()[-1])
