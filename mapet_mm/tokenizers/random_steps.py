"""Find steps of a pipeline that draw random numbers: an image would have other tokens each time."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

Step = Callable[[Any], Any]


@dataclass
class Run:
    """One run of a pipeline on an image.

    Args:
        drawing: number and name of each step that moved a random generator.
        images: number and name of each step, and a checksum of the image after it.
        complete: whether the image could be decoded.
    """

    drawing: list[str] = field(default_factory=list)
    images: list[tuple[str, int | None]] = field(default_factory=list)
    complete: bool = False


def first_random_step(first: Run, later: Run) -> str | None:
    """The first step that moved a generator in a run, or after which two runs on an image differ, or None."""
    pairs = zip(first.images, later.images, strict=False)
    differing = (name for (name, image), (_, other) in pairs if image != other)
    return next(chain(first.drawing, later.drawing, differing), None)


def watched(steps: Sequence[Step], run: Run) -> list[Step]:
    """The same steps, which note in `run` what they do when run."""
    named = [(f"step {number}, {_name(step)}", step) for number, step in enumerate(steps, 1)]
    return [partial(_watch, name, step, run) for name, step in named]


def _watch(name: str, step: Step, run: Run, results: Any) -> Any:
    before = _states()
    try:
        results = step(results)
    finally:
        if _states() != before:
            run.drawing.append(name)
    run.images.append((name, _checksum(results)))
    return results


def _checksum(results: Any) -> int | None:
    """Of the image that a step hands on, None if it hands on none."""
    image = results.get("inputs", results.get("img")) if isinstance(results, Mapping) else None
    if isinstance(image, torch.Tensor):
        image = image.contiguous().view(torch.uint8).numpy()
    return zlib.crc32(np.ascontiguousarray(image)) if isinstance(image, np.ndarray) else None


def _name(step: Step) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _states() -> tuple[Any, ...]:
    """States of the random generators of Python, NumPy and PyTorch, in comparable types."""
    _, keys, *position = np.random.get_state()
    return random.getstate(), keys.tobytes(), position, torch.get_rng_state().numpy().tobytes()


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the random generators of Python, NumPy and PyTorch (CPU) as they were."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
