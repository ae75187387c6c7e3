"""What the converters of toy data write, read back."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image


def read_list(path: Path) -> list[tuple[str, int]]:
    return [(name, int(label)) for name, label in map(str.split, path.read_text().splitlines())]


def read_scenes(scenes: Path, part: str, things: str) -> Iterator[tuple[np.ndarray, np.ndarray, list[dict]]]:
    """Image, pixel labels and things of each scene."""
    for line in (scenes / "meta" / f"{part}.jsonl").read_text().splitlines():
        meta = json.loads(line)
        image, label = (scenes / kind / part / meta["name"] for kind in ("images", "annotations"))
        yield np.asarray(Image.open(image)), np.asarray(Image.open(label)), meta[things]
