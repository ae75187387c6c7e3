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


@pytest.mark.parametrize("path", SEGMENTATION, ids=label)
def test_every_segmentation_recipe_can_be_augmented(path):
    """An image at six scales, flipped and not; its labels are read as in the data set's test."""
    cfg = load(path)
    segmentor, usual = cfg.model, cfg.test_dataloader.dataset.pipeline
    _, (scales, flips, (labels,), _) = (step.get("transforms") for step in cfg.tta_pipeline)
    factors = (0.5, 0.75, 1, 1.25, 1.5, 1.75)
    assert [tuple(step.scale) for step in scales] == [
        (int(2048 * by), int(usual[1].scale[1] * by)) for by in factors
    ]
    assert all(step.type == "Resize" and step.keep_ratio for step in scales)
    assert ([step.prob for step in flips], labels) == ([0, 1], usual[2])
    configure_test(cfg, "https://x/y.pth", tta=True)
    assert (cfg.model.type, cfg.model.module) == ("SegTTAModel", segmentor)
    assert cfg.test_dataloader.dataset.pipeline[1].type == "TestTimeAug"
    assert cfg.val_dataloader.dataset.pipeline[1].type == "Resize"


def test_an_augmented_test_gives_labels_at_the_images_own_size(tmp_path):
    labels = np.arange(100 * 150, dtype=np.uint32).reshape(100, 150) % 151
    for name, pixels in (("images", PHOTOGRAPH[:100, :150]), ("annotations", labels.astype(np.uint8))):
        file = tmp_path / name / "validation" / ("cat.jpg" if name == "images" else "cat.png")
        file.parent.mkdir(parents=True)
        Image.fromarray(pixels).save(file)
    cfg = shrunk(next(p for p in SEGMENTATION if "tiny-p16_upernet" in p.stem))
    cfg.tta_pipeline[1].transforms[0] = [
        dict(type="Resize", scale=(512, size), keep_ratio=True) for size in (64, 128)
    ]
    configure_test(cfg, "https://x/y.pth", tta=True)
    with in_scope(cfg):
        views = DATASETS.build(dict(cfg.test_dataloader.dataset, data_root=str(tmp_path)))[0]
        model = revert_sync_batchnorm(MODELS.build(cfg.model))
    assert [tuple(view.shape) for view in views["inputs"]] == [(3, 64, 96)] * 2 + [(3, 128, 192)] * 2
    assert [sample.flip for sample in views["data_samples"]] == [False, True] * 2
    (result,) = model.eval().test_step(pseudo_collate([views]))
    assert tuple(result.pred_sem_seg.data.shape) == tuple(result.gt_sem_seg.data.shape) == (1, 100, 150)
