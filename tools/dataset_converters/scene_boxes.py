"""Write boxes, masks, key points and rotated boxes of scenes, for detection and pose recipes.

    python tools/dataset_converters/digits.py
    python tools/dataset_converters/scene_boxes.py [data/digits_scenes]

makes `data/digits_scenes_boxes` from the labels: `{training,validation}.json` in COCO's format, and
`rotated/{training,validation}/*.txt` in DOTA's. The images stay where they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parents[1]))
from command_line import described_parser
from dataset_converters._scenes import PARTS
from dataset_converters._write import write_folder

from mapet_mm.utils.errors import UserError, one_line_errors

NUM_CLASSES = 10
MARKER = "scene_boxes.json"
KEYPOINTS = ("centre", "top", "bottom", "left", "right")


class Thing(NamedTuple):
    """One thing of a scene: its `kind`, a class from 0, and its `mask` (H, W) of bool."""

    kind: int
    mask: np.ndarray


def write_scene_boxes(scenes: Path, out: Path) -> bool:
    """Write the boxes, masks and key points of the things in `scenes`, a folder of `write_scenes`, to `out`.

    `{training,validation}.json` are COCO files, `rotated/<part>/<id>.txt` DOTA files of the smallest
    rectangles around the masks. Result and errors are `write_folder`'s.

    Raises:
        UserError: `scenes` is another folder.
    """
    markers = list(scenes.glob("*.json"))
    if len(markers) != 1 or not (scenes / "meta/validation.jsonl").is_file():
        raise UserError(f"{scenes} holds no scenes: write them first")
    options = json.loads(markers[0].read_text())["options"] | {"num_classes": NUM_CLASSES}

    def fill(folder: Path) -> None:
        for part in PARTS:
            _fill_part(folder, scenes, part)

    return write_folder(out, MARKER, options, fill)


def _fill_part(folder: Path, scenes: Path, part: str) -> None:
    images, annotations = [], []
    rotated = folder / "rotated" / part
    rotated.mkdir(parents=True)
    for name, things in read_things(scenes, part):
        with Image.open(scenes / "images" / part / name) as image:
            width, height = image.size
        images.append(dict(id=len(images), file_name=name, width=width, height=height))
        for thing in things:
            numbers = dict(id=len(annotations) + 1, image_id=images[-1]["id"])
            annotations.append(numbers | coco_annotation(thing))
        lines = [f"{' '.join(f'{x:.2f}' for x in rectangle(t.mask).flat)} {t.kind} 0\n" for t in things]
        (rotated / name).with_suffix(".txt").write_text("".join(lines))
    # All of them, seen in this part or not: detectors number their classes by them.
    categories = [dict(id=k + 1, name=str(k), keypoints=KEYPOINTS, skeleton=[]) for k in range(NUM_CLASSES)]
    text = json.dumps(dict(images=images, annotations=annotations, categories=categories))
    (folder / f"{part}.json").write_text(text)


def read_things(scenes: Path, part: str) -> Iterator[tuple[str, list[Thing]]]:
    """Yield the name and the things of each scene of a part."""
    for line in (scenes / "meta" / f"{part}.jsonl").read_text().splitlines():
        scene = json.loads(line)
        (plural,) = scene.keys() - {"name"}
        with Image.open(scenes / "annotations" / part / scene["name"]) as image:
            label = np.asarray(image)
        boxes = [thing["box"] for thing in scene[plural]]
        kinds = [thing[plural.removesuffix("s")] for thing in scene[plural]]
        things = [Thing(kind, mask) for kind, mask in zip(kinds, masks_of(label, boxes), strict=True)]
        yield scene["name"], [thing for thing in things if thing.mask.any()]


def masks_of(label: np.ndarray, boxes: list[list[int]]) -> list[np.ndarray]:
    """The pixels (H, W) of each thing, in the order of painting.

    A box (left, top, side) was free of labels when its thing was painted, so what it shows is of that thing
    or of one painted later.
    """
    masks, left_over = [], label > 0
    for left, top, side in reversed(boxes):
        window = np.zeros_like(left_over)
        window[top : top + side, left : left + side] = True
        masks.append(left_over & window)
        left_over = left_over & ~window
    return masks[::-1]


def coco_annotation(thing: Thing) -> dict:
    """COCO's entries of a thing: box, mask in run lengths, and the `KEYPOINTS`, all of them visible."""
    rows, columns = np.nonzero(thing.mask)
    left, top = int(columns.min()), int(rows.min())
    width, height = int(columns.max()) - left + 1, int(rows.max()) - top + 1
    return dict(
        category_id=thing.kind + 1,
        bbox=[left, top, width, height],
        area=len(rows),
        iscrowd=0,
        segmentation=dict(size=list(thing.mask.shape), counts=run_lengths(thing.mask)),
        num_keypoints=len(KEYPOINTS),
        keypoints=[number for x, y in key_points(thing.mask) for number in (x, y, 2)],
    )


def run_lengths(mask: np.ndarray) -> list[int]:
    """COCO's uncompressed run lengths of a mask, down its columns: how many 0, how many 1, how many 0, ..."""
    runs = [(value, len(list(run))) for value, run in groupby(mask.ravel(order="F").tolist())]
    return [0] * runs[0][0] + [length for _, length in runs]


def key_points(mask: np.ndarray) -> list[tuple[float, float]]:
    """(x, y) of the `KEYPOINTS`: the centre of mass, and the middles of the outermost rows and columns."""
    y, x = np.nonzero(mask)
    ends = [y == y.min(), y == y.max(), x == x.min(), x == x.max()]
    return [(round(float(x[at].mean()), 2), round(float(y[at].mean()), 2)) for at in [y >= 0, *ends]]


def rectangle(mask: np.ndarray) -> np.ndarray:
    """The four corners (4, 2), x and y, of the smallest rectangle of any angle around a mask's pixels."""
    y, x = np.nonzero(mask)
    corners = [np.stack([x + dx, y + dy], axis=1) for dx in (0, 1) for dy in (0, 1)]
    return cv2.boxPoints(cv2.minAreaRect(np.concatenate(corners).astype(np.float32)))


@one_line_errors
def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("scenes", type=Path, nargs="?", default=Path("data/digits_scenes"))
    scenes = parser.parse_args().scenes
    write_scene_boxes(scenes, scenes.with_name(f"{scenes.name}_boxes"))
    print("next: .venv-detection/bin/python tools/train.py configs/micro/detection/... (docs/mixing.md)")


if __name__ == "__main__":
    main()
