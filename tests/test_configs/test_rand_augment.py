"""The RandAugment of fine-tuning is timm's `rand-m9-mstd0.5`: its arguments at each level, its pixels."""

from copy import copy

import numpy as np
import pytest
from config_building import ROOT, in_scope, load
from imagenet_folder import PHOTOGRAPH
from mmengine.registry import TRANSFORMS
from PIL import Image
from timm.data import auto_augment as timm_augment

FINE_TUNING = ROOT / "configs/mapet/benchmarks/vit-tiny-p16_4xb256-amp-coslr-300e_in1k.py"
PLAIN = timm_augment._RAND_TRANSFORMS
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
LOOKUPS = ("Posterize", "Solarize", "SolarizeAdd")
# 9 is the recipe's. Around it and at the bound: whole and broken numbers of bits, thresholds, additions.
LEVELS = (5.0, 7.2, 7.5, 9.0, 9.99, 10.0)
RAMP = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
SQUARE = np.ascontiguousarray(PHOTOGRAPH[:224, 100:324])


def rand_augment(cfg):
    (step,) = (step for step in cfg.train_dataloader.dataset.pipeline if step.type == "RandAugment")
    with in_scope(cfg):
        return TRANSFORMS.build(step)


@pytest.fixture(scope="module")
def plain() -> dict:
    """The recipe's operations by timm's names."""
    return dict(zip(PLAIN, rand_augment(load(FINE_TUNING)).transforms, strict=True))


def ours(operation, level: float, negative: bool, image: np.ndarray) -> np.ndarray:
    """The image, RGB, after one operation at a level; the pipeline's images are BGR."""
    operation = copy(operation)
    operation.prob, operation.magnitude_level, operation.magnitude_std = 1.0, level, 0.0
    if operation.random_negative_prob:  # only then is there a sign to draw
        operation.random_negative_prob = float(negative)
    return operation.transform(dict(img=np.ascontiguousarray(image[..., ::-1])))["img"][..., ::-1]


def theirs(name: str, level: float, negative: bool, image: np.ndarray, monkeypatch) -> np.ndarray:
    monkeypatch.setattr(timm_augment, "_randomly_negate", lambda value: -value if negative else value)
    hparams = dict(img_mean=(124, 116, 104), interpolation=Image.Resampling.BICUBIC)
    operation = timm_augment.AugmentOp(name, prob=1.0, magnitude=level, hparams=hparams)
    return np.asarray(operation(Image.fromarray(image)))


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_pixels_of_a_photograph_are_timms_at_level_9(name, negative, plain, monkeypatch):
    # A positive shear, translation or rotation of MMPretrain's is a negative one of timm's.
    theirs_negative = negative != (name in GEOMETRIC)
    expected = theirs(name, 9.0, theirs_negative, SQUARE, monkeypatch).astype(int)
    difference = np.abs(ours(plain[name], 9.0, negative, SQUARE) - expected)
    if name in GEOMETRIC:  # OpenCV's bicubic kernel and border are not Pillow's; the other sign gives 32
        assert difference.mean() < 1.5
    else:  # OpenCV rounds a blend, Pillow cuts it; the sharpened border differs
        assert difference[1:-1, 1:-1].max() <= 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOOKUPS)
def test_each_grey_value_goes_where_timm_puts_it(name, level, plain, monkeypatch):
    expected = theirs(name, level, False, RAMP, monkeypatch)
    np.testing.assert_array_equal(ours(plain[name], level, False, RAMP), expected)
