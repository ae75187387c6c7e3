"""The RandAugment of fine-tuning is timm's `rand-m9-mstd0.5`: the same pixels at level 9."""

from copy import copy

import numpy as np
import pytest
from config_building import ROOT, in_scope, load
from imagenet_folder import PHOTOGRAPH
from mmengine.registry import TRANSFORMS
from PIL import Image
from timm.data import auto_augment as timm_augment

FINE_TUNING = ROOT / "configs/mapet/benchmarks/vit-tiny-p16_4xb256-amp-coslr-300e_in1k.py"
OPERATIONS = timm_augment.rand_augment_transform("rand-m9-mstd0.5", {}).ops
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
SQUARE = np.ascontiguousarray(PHOTOGRAPH[:224, 100:324])


@pytest.fixture(scope="module")
def operations() -> dict:
    """The recipe's operations by timm's names."""
    cfg = load(FINE_TUNING)
    (step,) = (step for step in cfg.train_dataloader.dataset.pipeline if step.type == "RandAugment")
    with in_scope(cfg):
        return dict(zip([op.name for op in OPERATIONS], TRANSFORMS.build(step).transforms, strict=True))


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("name", [op.name for op in OPERATIONS])
def test_pixels_of_a_photograph_are_timms_at_level_9(name, negative, operations, monkeypatch):
    ours = copy(operations[name])
    ours.prob, ours.magnitude_level, ours.magnitude_std = 1.0, 9.0, 0.0
    if ours.random_negative_prob:  # only then is there a sign to draw
        ours.random_negative_prob = float(negative)
    seen = ours.transform(dict(img=np.ascontiguousarray(SQUARE[..., ::-1])))["img"][..., ::-1]
    # A positive shear, translation or rotation of MMPretrain's is a negative one of timm's.
    timm_negative = negative != (name in GEOMETRIC)
    monkeypatch.setattr(timm_augment.random, "random", lambda: 0.9 if timm_negative else 0.1)
    hparams = dict(img_mean=(124, 116, 104), interpolation=Image.Resampling.BICUBIC)
    theirs = timm_augment.AugmentOp(name, prob=1.0, magnitude=9.0, hparams=hparams)
    difference = np.abs(seen - np.asarray(theirs(Image.fromarray(SQUARE))).astype(int))
    if name in GEOMETRIC:  # OpenCV's bicubic kernel and border are not Pillow's; the other sign gives 32
        assert difference.mean() < 1.5
    else:  # OpenCV rounds a blend, Pillow cuts it; the sharpened border differs
        assert difference[1:-1, 1:-1].max() <= 2
