"""Shrunk folders in the layouts of ADE20K, Pascal VOC and Cityscapes."""

from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (24, 32)


def write_dense(root: Path, kind: str, train: int = 10, val: int = 3) -> Path:
    """Write images whose four quarters have a grey and a label each, and return the folder for `--data`."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for index in range(count):
            labels = rng.integers(0, 4, (2, 2)).repeat(SIZE[0] // 2, 0).repeat(SIZE[1] // 2, 1)
            for path, values in zip(paths(root, kind, part, index), (60 * labels, labels), strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                picture = Image.fromarray(values.astype(np.uint8))
                (picture if values is labels else picture.convert("RGB")).save(path)
        if kind == "ade20k":
            (root / "objectInfo150.txt").touch()
        if kind == "voc":
            listed = root / f"VOC2012/ImageSets/Segmentation/{part}.txt"
            listed.parent.mkdir(parents=True, exist_ok=True)
            listed.write_text("".join(f"{part}{index}\n" for index in range(count)))
    return root


def paths(root: Path, kind: str, part: str, index: int) -> tuple[Path, Path]:
    """An image and its labels."""
    if kind == "ade20k":
        name = {"train": "training", "val": "validation"}[part]
        return root / f"images/{name}/{index}.jpg", root / f"annotations/{name}/{index}.png"
    if kind == "voc":
        folder, name = root / "VOC2012", f"{part}{index}"
        return folder / f"JPEGImages/{name}.jpg", folder / f"SegmentationClass/{name}.png"
    names = root / f"leftImg8bit/{part}/town", root / f"gtFine/{part}/town"
    return names[0] / f"town_{index}_leftImg8bit.png", names[1] / f"town_{index}_gtFine_labelTrainIds.png"
