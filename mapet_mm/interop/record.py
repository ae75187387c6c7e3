"""What a training recorded in its checkpoint beside the weights."""

from argparse import Namespace
from pathlib import Path

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
        if name not in entries:
            lines.append(f"{name}: not saved")
            continue
        value = entries.pop(name)
        if isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, dict):
            lines += [f"{name}.{option}: {value[option]!r}" for option in sorted(value, key=str)]
        else:
            number = value.item() if isinstance(value, np.generic) else value
            lines.append(f"{name}: {number!r}")
    lines.append(f"other entries: {', '.join(sorted(map(str, entries))) or 'none'}")
    # Without characters by which a file's texts could steer the terminal.
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)
