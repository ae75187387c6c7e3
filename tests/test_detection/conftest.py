"""Recipes of detection and pose estimation, run on a few scenes that stand where they look for their data.

All of it needs MMDetection, MMRotate, MMPose and MMCV's compiled operators: `make test-detection`.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from config_building import ROOT, second_of_its_own
from mmengine.runner import Runner
from PIL import Image

from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_training, load_config

SIDE = 64  # pixels of a scene
BOXES = 3
DOTA_NAMES = ("plane", "ship", "harbor", "bridge", "helicopter", "roundabout", "storage-tank")
SHORT = {
    "train_cfg.max_epochs": 1,
    "train_cfg.val_interval": 2,
    "param_scheduler": None,
    "auto_scale_lr": None,
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
    """A folder with a few scenes of bright boxes, in the layouts of COCO and DOTA."""
    folder = tmp_path_factory.mktemp("detection")
    draw = np.random.default_rng(0)
    for name, count in (("train", 4), ("val", 2)):
        images = folder / f"data/coco/{name}2017"
        labels = folder / f"data/split_ss_dota/{name}/annfiles"
        for made in (images, labels):
            made.mkdir(parents=True)
        scenes = _write_scenes(images, count, draw)
        (labels.parent / "images").symlink_to(images, target_is_directory=True)
        _write_coco(folder / "data/coco/annotations", name, scenes)
        _write_dota(labels, scenes)
    return folder


def _write_scenes(folder: Path, count: int, draw: np.random.Generator) -> dict:
    """Images of three boxes each; their annotations, as COCO has them, with the corners as key points."""
    images = []
    annotations = []
    for index in range(count):
        pixels = draw.integers(0, 80, (SIDE, SIDE, 3), dtype=np.uint8)
        for _ in range(BOXES):
            left, top = (int(value) for value in draw.integers(2, SIDE - 26, 2))
            width, height = (int(value) for value in draw.integers(12, 24, 2))
            pixels[top : top + height, left : left + width] = draw.integers(150, 255, 3)
            corners = [left, top, left + width, top, left + width, top + height, left, top + height]
            visible = [[*corners[i : i + 2], 2] for i in range(0, 8, 2)]
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=index,
                    category_id=1 + len(annotations) % 3,
                    bbox=[left, top, width, height],
                    area=width * height,
                    segmentation=[corners],
                    keypoints=[value for point in visible for value in point] + [0] * 3 * 13,
                    iscrowd=0,
                )
            )
        name = f"{index}.png"
        Image.fromarray(pixels).save(folder / name)
        images.append(dict(id=index, file_name=name, width=SIDE, height=SIDE))
    return dict(images=images, annotations=annotations)


def _write_dota(folder: Path, scenes: dict) -> None:
    """A file for each image: four corners, class name and difficulty of each box."""
    for image in scenes["images"]:
        lines = []
        for one in scenes["annotations"]:
            if one["image_id"] == image["id"]:
                corners = " ".join(map(str, one["segmentation"][0]))
                lines.append(f"{corners} {DOTA_NAMES[one['category_id'] % 7]} 0")
        (folder / Path(image["file_name"]).with_suffix(".txt").name).write_text("\n".join(lines))


def _write_coco(folder: Path, part: str, scenes: dict) -> None:
    """COCO's two files: boxes and masks of its first classes, and persons with 17 key points."""
    from mmdet.datasets import CocoDataset

    folder.mkdir(parents=True, exist_ok=True)
    categories = [dict(id=i + 1, name=name) for i, name in enumerate(CocoDataset.METAINFO["classes"])]
    (folder / f"instances_{part}2017.json").write_text(json.dumps(scenes | dict(categories=categories)))
    names = [f"point {i}" for i in range(17)]
    persons = [one | dict(category_id=1, num_keypoints=4) for one in scenes["annotations"]]
    category = dict(id=1, name="person", keypoints=names, skeleton=[])
    text = json.dumps(scenes | dict(annotations=persons, categories=[category]))
    (folder / f"person_keypoints_{part}2017.json").write_text(text)


@pytest.fixture
def train_and_evaluate(data, tmp_path, monkeypatch):
    """Train a recipe, changed by options, on the scenes for two steps, and evaluate it."""
    monkeypatch.chdir(data)

    def run(recipe: str, options: dict | None = None) -> tuple[Runner, dict[str, float]]:
        cfg = load_config(str(ROOT / "configs" / recipe), SHORT | (options or {}), str(tmp_path / "run"))
        configure_training(cfg)
        with second_of_its_own():
            runner = build_runner(cfg, "none")
        runner.train()
        return runner, runner.val()

    return run
