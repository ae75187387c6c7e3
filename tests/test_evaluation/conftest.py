"""The images and the config that evaluations of features are tested on."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from frozen_features import ARCH, PIPELINE, PROTOCOLS, save
from mmengine.config import Config

from mapet_mm.evaluation.checkpoints import load_checkpoint


@pytest.fixture
def root(tmp_path) -> Path:
    """Folders `train` and `val` of three classes: random images of 16 px, of another grey each."""
    rng = np.random.default_rng(0)
    for split, number in (("train", 8), ("val", 3)):
        for label, name in enumerate("abc"):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                image = rng.integers(0, 60, (16, 16, 3)) + 80 * label
                cv2.imwrite(str(folder / f"{index}.png"), image.astype(np.uint8))
    return tmp_path


@pytest.fixture
def config(root) -> Config:
    def loader(split: str) -> dict:
        dataset = dict(
            type="CustomDataset", data_root=str(root / "data"), data_prefix=split, pipeline=PIPELINE
        )
        return dict(batch_size=5, num_workers=0, dataset=dataset)

    backbone = dict(type="mapet_mm.MaPeTViT", arch=ARCH, img_size=16, patch_size=4, out_type="raw")
    content = dict(
        default_scope="mmpretrain",
        model=dict(type="ImageClassifier", backbone=backbone),
        data_preprocessor=dict(mean=[127.5] * 3, std=[60.0] * 3, to_rgb=True),
        evaluation=dict(train=loader("train"), val=loader("val"), protocols=PROTOCOLS),
    )
    Config(content).dump(root / "config.py")
    backbone = load_checkpoint(Config.fromfile(root / "config.py"), None).backbone.model
    save({f"backbone.{name}": value for name, value in backbone.state_dict().items()}, root)
    return Config.fromfile(root / "config.py")
