"""Test-time augmentation of the segmentation recipes (tools/test.py --tta)."""

import pytest
from config_building import RECIPES, label, load

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
