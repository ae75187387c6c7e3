"""Find steps of a pipeline that draw random numbers: an image would have other tokens each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

Step = Callable[[Any], Any]


def watched(steps: Sequence[Step], drawing: list[str]) -> list[Step]:
    """The same steps, which add number and name of each that draws random numbers to `drawing` when run."""
    named = [(f"step {number}, {_name(step)}", step) for number, step in enumerate(steps, 1)]
    return [partial(_run, name, step, drawing) for name, step in named]


def _run(name: str, step: Step, drawing: list[str], results: Any) -> Any:
    before = _states()
    try:
        return step(results)
    finally:
        if _states() != before:
            drawing.append(name)


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
