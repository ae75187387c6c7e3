"""What a training recorded in its checkpoint beside the weights."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mapet_mm.weight_files import read_entries

RECORDED = ("epoch", "metric", "args")
NUM_IMAGES = "num_images"  # in a checkpoint's `meta`: of the training set


def training_record(path: str | Path) -> str:
    """Lines with the `epoch`, `metric` and `args` that timm's saver wrote, as in the authors' released files.

    Nothing that the file holds is run. Each of the three is one line, or one line for each argument.

    Raises:
        WeightFileError: the file cannot be read, or holds an object that is not read.
    """
    entries = read_entries(path)
    lines = []
    for name in RECORDED:
        if name in entries:
            lines += _lines(name, entries[name])
        else:
            lines.append(f"{name}: not saved")
    others = sorted(str(name) for name in entries if name not in RECORDED)
    lines.append(f"other entries: {', '.join(others) or 'none'}")
    return "\n".join(map(_printable, lines))


def _lines(name: str, value: Any) -> Iterator[str]:
    """One entry; parsed arguments and dicts in a line for each of theirs, by name."""
    options = vars(value) if isinstance(value, Namespace) else value
    if isinstance(options, dict):
        for option in sorted(options, key=str):
            yield f"{name}.{option}: {options[option]!r}"
    else:
        number = value.item() if isinstance(value, np.generic) else value
        yield f"{name}: {number!r}"


def _printable(line: str) -> str:
    """A line without characters by which a file's texts could steer the terminal."""
    return "".join(character if character.isprintable() else "?" for character in line)
