"""Functions that the scripts in tools/benchmarks share: a description of the machine, timing, and tables."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence

import faiss
import torch
from mmengine.dist import get_world_size


def machine() -> str:
    """The hardware and versions that a figure was measured with."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{processor()}, {torch.get_num_threads()} threads in each of {get_world_size()} processes"
    return (
        f"{device}; Python {platform.python_version()}, torch {torch.__version__}, faiss {faiss.__version__}"
    )


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, warm_up: int
) -> dict[str, list[float]]:
    """Time every call once per round and return its seconds by round, without the warm-up rounds.

    Args:
        calls: the functions to time, by name.
        rounds: number of rounds that count.
        warm_up: number of rounds before them.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warm_up + rounds):
        for name, call in calls.items():
            _wait()
            start = time.perf_counter()
            call()
            _wait()
            if number >= warm_up:
                taken[name].append(time.perf_counter() - start)
    return taken


def _wait() -> None:
    """Wait until the GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with numbers aligned right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def processor() -> str:
    """The model name of the CPU."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
