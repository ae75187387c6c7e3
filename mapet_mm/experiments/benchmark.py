"""What the scripts of tools/benchmarks share: the machine in words, and tables."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import faiss
import torch
from mmengine.dist import get_world_size

from mapet_mm.experiments.rendering import table_line


def machine() -> str:
    """The hardware and versions that a figure was measured with."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{processor()}, {torch.get_num_threads()} threads in each of {get_world_size()} processes"
    return (
        f"{device}; Python {platform.python_version()}, torch {torch.__version__}, faiss {faiss.__version__}"
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, numbers to the right."""
    lines = [
        table_line(headings),
        table_line(["---", *["---:"] * (len(headings) - 1)]),
        *map(table_line, rows),
    ]
    return "\n".join(lines)


def processor() -> str:
    """The CPU's model."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
