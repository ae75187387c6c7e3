"""Recipes of detection and pose estimation, run on a few images that lie where they look for their data.

All of it needs MMDetection, MMRotate, MMPose and MMCV's compiled operators: `make test-detection`.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from config_building import ROOT, second_of_its_own
from mmengine.runner import Runner
from PIL import Image

from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_training, load_config

PARTS = dict(train=4, val=2)
SIDE = 64  # of an image
Rectangle = tuple[int, int, int, int]  # left, top, width, height
DOTA_NAMES = ("plane", "ship", "harbor", "bridge", "helicopter", "roundabout", "storage-tank")
SHORT = {
    "train_cfg.max_epochs": 1,
    "train_cfg.val_interval": 2,
    "param_scheduler": None,
    "model.backbone.init_cfg": None,
    "train_dataloader.batch_size": 2,
    **{f"{part}_dataloader.num_workers": 0 for part in ("train", "val", "test")},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in ("mmcv._ext", "mmdet", "mmpose", "mmrotate") if find_spec(name) is None]
    mark = pytest.mark.skip(reason=f"without {', '.join(missing)}: make test-detection sets it up")
    for item in items:
        rotated = "rotated" in item.name or "oriented" in item.name
        if Path(__file__).parent in item.path.parents and (rotated or missing != ["mmrotate"]) and missing:
            item.add_marker(mark)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder with images of light rectangles, and what they are in the layouts of COCO and DOTA."""
    folder = tmp_path_factory.mktemp("detection")
    rng = np.random.default_rng(0)
    for part, count in PARTS.items():
        drawn = list(draw_images(rng, folder / f"data/coco/{part}2017", count))
        write_coco(folder / "data/coco/annotations", part, drawn)
        write_dota(folder / f"data/split_ss_dota/{part}", folder / f"data/coco/{part}2017", drawn)
    return folder


def draw_images(rng: np.random.Generator, folder: Path, count: int) -> Iterator[list[Rectangle]]:
    """Write images with a rectangle in the left and one in the right half, and yield these."""
    folder.mkdir(parents=True)
    for index in range(count):
        image = rng.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
        rectangles = []
        for left_edge in (2, SIDE // 2 + 2):
            left = left_edge + int(rng.integers(4))
            top = int(rng.integers(2, 20))
            width, height = map(int, rng.integers(12, 24, 2))
            image[top : top + height, left : left + width] += 150
            rectangles.append((left, top, width, height))
        Image.fromarray(image).save(folder / f"{index:05d}.png")
        yield rectangles


def write_coco(folder: Path, part: str, drawn: list[list[Rectangle]]) -> None:
    """COCO's two files: boxes and masks of its first classes, and persons with 17 key points."""
    from mmdet.datasets import CocoDataset

    folder.mkdir(exist_ok=True)
    images = [
        dict(id=index, file_name=f"{index:05d}.png", width=SIDE, height=SIDE) for index in range(len(drawn))
    ]
    things, persons = [], []
    for index, rectangles in enumerate(drawn):
        for kind, rectangle in enumerate(rectangles):
            common = dict(id=len(things) + 1, image_id=index, iscrowd=0, bbox=list(rectangle))
            common |= dict(area=rectangle[2] * rectangle[3], segmentation=[outline(rectangle)])
            things.append(common | dict(category_id=kind + 1))
            persons.append(common | dict(category_id=1, num_keypoints=17, keypoints=key_points(rectangle)))
    categories = [dict(id=i + 1, name=name) for i, name in enumerate(CocoDataset.METAINFO["classes"])]
    person = dict(id=1, name="person", keypoints=[f"point {i}" for i in range(17)], skeleton=[])
    for name, annotations, kinds in (
        ("instances", things, categories),
        ("person_keypoints", persons, [person]),
    ):
        content = dict(images=images, annotations=annotations, categories=kinds)
        (folder / f"{name}_{part}2017.json").write_text(json.dumps(content))


def outline(rectangle: Rectangle) -> list[int]:
    """The corners of a rectangle, x and y, clockwise."""
    left, top, width, height = rectangle
    return [left, top, left + width, top, left + width, top + height, left, top + height]


def key_points(rectangle: Rectangle) -> list[float]:
    """17 visible key points along a rectangle's diagonal: x, y, 2."""
    left, top, width, height = rectangle
    points = [(left + width * step / 17, top + height * step / 17, 2) for step in range(17)]
    return [number for point in points for number in point]


def write_dota(folder: Path, images: Path, drawn: list[list[Rectangle]]) -> None:
    """DOTA's layout: a link to the images, and a text file with the corners and class of each thing."""
    (folder / "annfiles").mkdir(parents=True)
    (folder / "images").symlink_to(images, target_is_directory=True)
    for index, rectangles in enumerate(drawn):
        lines = [
            " ".join([*map(str, outline(rectangle)), DOTA_NAMES[kind], "0"])
            for kind, rectangle in enumerate(rectangles)
        ]
        (folder / "annfiles" / f"{index:05d}.txt").write_text("\n".join(lines))


@pytest.fixture
def train_and_evaluate(data, tmp_path, monkeypatch):
    """Train a recipe, changed by options, on the images for two steps, and evaluate it."""
    monkeypatch.chdir(data)

    def run(recipe: str, options: dict | None = None) -> tuple[Runner, dict[str, float]]:
        cfg = load_config(str(ROOT / "configs" / recipe), SHORT | (options or {}), str(tmp_path / "run"))
        configure_training(cfg)
        with second_of_its_own():
            runner = build_runner(cfg, "none")
        runner.train()
        return runner, runner.val()

    return run
