"""Test-time augmentation of the segmentation recipes (tools/test.py --tta)."""

import numpy as np
import pytest
from config_building import RECIPES, in_scope, label, load
from imagenet_folder import PHOTOGRAPH
from mmengine.dataset import pseudo_collate
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS, MODELS
from PIL import Image
from shrunk_recipes import shrunk

from mapet_mm.engine.runners.launch import configure_test

SEGMENTATION = [path for path in RECIPES if path.parent.name == "segmentation"]
DATA = {data: next(p for p in SEGMENTATION if data in p.stem) for data in ("ade20k", "voc12", "cityscapes")}


@pytest.fixture
def ade(tmp_path):
    """A scene of 100 x 150 pixels whose labels are 0 to 150."""
    labels = np.arange(100 * 150, dtype=np.uint32).reshape(100, 150) % 151
    for folder, pixels, suffix in (
        ("images", PHOTOGRAPH[:100, :150], "jpg"),
        ("annotations", labels.astype(np.uint8), "png"),
    ):
        (tmp_path / folder / "validation").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / folder / "validation" / f"cat.{suffix}")
    return tmp_path


@pytest.mark.parametrize("path", SEGMENTATION, ids=label)
def test_every_segmentation_recipe_can_be_augmented(path):
    cfg = load(path)
    segmentor = cfg.model
    configure_test(cfg, "https://x/y.pth", tta=True)
    assert (cfg.model.type, cfg.model.module) == ("SegTTAModel", segmentor)
    assert cfg.test_dataloader.dataset.pipeline[1].type == "TestTimeAug"
    assert cfg.val_dataloader.dataset.pipeline[1].type == "Resize"


@pytest.mark.parametrize("data", DATA)
def test_an_image_is_shown_at_six_scales_of_the_tests_flipped_and_not(data):
    """Its labels are those of the dataset's test."""
    cfg = load(DATA[data])
    usual = cfg.test_dataloader.dataset.pipeline
    _, (scales, flips, (labels,), _) = (step.get("transforms") for step in cfg.tta_pipeline)
    height = usual[1].scale[1]
    assert [tuple(step.scale) for step in scales] == [
        (int(2048 * by), int(height * by)) for by in (0.5, 0.75, 1, 1.25, 1.5, 1.75)
    ]
    assert all(step.type == "Resize" and step.keep_ratio for step in scales)
    assert [step.prob for step in flips] == [0, 1]
    assert labels == usual[2]


def test_an_augmented_test_gives_labels_at_the_images_own_size(ade):
    cfg = shrunk(next(p for p in SEGMENTATION if "tiny-p16_upernet" in p.stem))
    cfg.tta_pipeline[1].transforms[0] = [
        dict(type="Resize", scale=(512, size), keep_ratio=True) for size in (64, 128)
    ]
    configure_test(cfg, "https://x/y.pth", tta=True)
    with in_scope(cfg):
        views = DATASETS.build(dict(cfg.test_dataloader.dataset, data_root=str(ade)))[0]
        model = revert_sync_batchnorm(MODELS.build(cfg.model))
    assert [tuple(view.shape) for view in views["inputs"]] == [(3, 64, 96)] * 2 + [(3, 128, 192)] * 2
    assert [sample.flip for sample in views["data_samples"]] == [False, True] * 2
    (result,) = model.eval().test_step(pseudo_collate([views]))
    assert tuple(result.pred_sem_seg.data.shape) == tuple(result.gt_sem_seg.data.shape) == (1, 100, 150)
