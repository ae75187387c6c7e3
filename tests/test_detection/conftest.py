"""Recipes of detection and pose estimation, run on a few scenes that stand where they look for their data.

All of it needs MMDetection, MMRotate, MMPose and MMCV's compiled operators: `make test-detection`.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from config_building import ROOT, second_of_its_own
from dataset_converters.digits import write_scenes
from dataset_converters.scene_boxes import write_scene_boxes
from mmengine.runner import Runner

from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_training, load_config

PARTS = dict(training="train", validation="val")
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
    """A folder with `data/digits_scenes`, and the same scenes in the layouts of COCO and DOTA."""
    folder = tmp_path_factory.mktemp("detection")
    scenes, boxes = folder / "data/digits_scenes", folder / "data/digits_scenes_boxes"
    write_scenes(scenes, training=4, validation=2)
    write_scene_boxes(scenes, boxes)
    for part, name in PARTS.items():
        _link(folder / f"data/coco/{name}2017", scenes / "images" / part)
        _link(folder / f"data/split_ss_dota/{name}/images", scenes / "images" / part)
        _write_coco(folder / "data/coco/annotations", name, json.loads((boxes / f"{part}.json").read_text()))
        target = folder / f"data/split_ss_dota/{name}/annfiles"
        target.mkdir()
        for file in (boxes / "rotated" / part).iterdir():
            lines = [line.split() for line in file.read_text().splitlines()]
            named = [" ".join([*line[:8], DOTA_NAMES[int(line[8]) % 7], "0"]) for line in lines]
            (target / file.name).write_text("\n".join(named))
    return folder


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target, target_is_directory=True)


def _write_coco(folder: Path, part: str, scenes: dict) -> None:
    """COCO's two files: boxes and masks of its first classes, and persons with 17 key points."""
    from mmdet.datasets import CocoDataset

    folder.mkdir(exist_ok=True)
    categories = [dict(id=i + 1, name=name) for i, name in enumerate(CocoDataset.METAINFO["classes"])]
    (folder / f"instances_{part}2017.json").write_text(json.dumps(scenes | dict(categories=categories)))
    names = [f"point {i}" for i in range(17)]
    persons = [
        one | dict(category_id=1, keypoints=(one["keypoints"] * 4)[: 17 * 3], num_keypoints=17)
        for one in scenes["annotations"]
    ]
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
