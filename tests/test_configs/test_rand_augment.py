"""The RandAugment of fine-tuning is timm's `rand-m9-mstd0.5`: its arguments at each level, its pixels."""

from copy import copy
from math import ceil

import numpy as np
import pytest
from config_building import ROOT, in_scope, load
from imagenet_folder import PHOTOGRAPH
from mmengine.registry import TRANSFORMS
from PIL import Image
from timm.data import auto_augment as timm_augment

FINE_TUNING = [
    ROOT / f"configs/mapet/benchmarks/vit-{name}_in1k.py"
    for name in (
        "tiny-p16_4xb256-amp-coslr-300e",
        "small-p16_4xb256-amp-coslr-200e",
        "base-p16_16xb64-amp-coslr-100e",
    )
]
PLAIN = timm_augment._RAND_TRANSFORMS
INCREASING = timm_augment._RAND_INCREASING_TRANSFORMS
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
    return dict(zip(PLAIN, rand_augment(load(FINE_TUNING[0])).transforms, strict=True))


@pytest.fixture(scope="module")
def increasing() -> dict:
    """Those of BEiT and DeiT, one option away."""
    cfg = load(FINE_TUNING[0])
    cfg.merge_from_dict({"train_dataloader.dataset.pipeline.3.policies": "timm_increasing"})
    return dict(zip(INCREASING, rand_augment(cfg).transforms, strict=True))


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


# From what MMPretrain draws to what the operation does with it.
ARGUMENT = dict(Posterize=ceil, Solarize=ceil, SolarizeAdd=int)
ARGUMENT |= {name: lambda drawn: 1 + drawn for name in ("Color", "Contrast", "Brightness", "Sharpness")}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name in PLAIN if timm_augment.LEVEL_TO_ARG[name]])
def test_argument_is_timms(name, level, plain, monkeypatch):
    """All operations with a magnitude: rotation 27 degrees, 3 bits, threshold 230, factor 1.72 at level 9."""
    monkeypatch.setattr(timm_augment, "_randomly_negate", lambda value: value)
    (expected,) = timm_augment.LEVEL_TO_ARG[name](level, {})
    operation = copy(plain[name])
    operation.magnitude_level, operation.magnitude_std = level, 0.0
    argument = ARGUMENT.get(name, float)(operation.random_magnitude())
    assert argument == pytest.approx(expected, abs=2e-6)
    # Half of the rotations, shears and translations go the other way; nothing else has a sign.
    assert operation.random_negative_prob == (0.5 if name in GEOMETRIC else 0.0)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_pixels_of_a_photograph_are_timms_at_level_9(name, negative, plain, monkeypatch):
    assert_same_pixels(name, plain[name], negative, monkeypatch)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("name", INCREASING)
def test_pixels_of_the_variant_of_beit_are_timms_inc1(name, negative, increasing, monkeypatch):
    """`--cfg-options train_dataloader.dataset.pipeline.3.policies=timm_increasing`."""
    assert_same_pixels(name, increasing[name], negative, monkeypatch)


def assert_same_pixels(name: str, operation, negative: bool, monkeypatch) -> None:
    # A positive shear, translation or rotation of MMPretrain's is a negative one of timm's.
    theirs_negative = negative != (name in GEOMETRIC)
    expected = theirs(name, 9.0, theirs_negative, SQUARE, monkeypatch).astype(int)
    difference = np.abs(ours(operation, 9.0, negative, SQUARE) - expected)
    if name in GEOMETRIC:  # OpenCV's bicubic kernel and border are not Pillow's; the other sign gives 32
        assert difference.mean() < 1.5
    else:  # OpenCV rounds a blend, Pillow cuts it; the sharpened border differs
        assert difference[1:-1, 1:-1].max() <= 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOOKUPS)
def test_each_grey_value_goes_where_timm_puts_it(name, level, plain, monkeypatch):
    expected = theirs(name, level, False, RAMP, monkeypatch)
    np.testing.assert_array_equal(ours(plain[name], level, False, RAMP), expected)


@pytest.mark.parametrize("path", FINE_TUNING, ids=lambda path: path.stem)
def test_two_of_fifteen_operations_are_drawn_with_timms_noise(path):
    """Each is applied in half of the cases, at a level of 9 +- 0.5, cut at 10 as 2.3 % of the draws are."""
    augment = rand_augment(load(path))
    assert (augment.num_policies, len(augment.transforms)) == (2, 15)
    assert {operation.prob for operation in augment.transforms} == {0.5}
    np.random.seed(0)
    rotation = augment.transforms[3]
    levels = np.array([rotation.random_magnitude() for _ in range(5000)]) / 30 * 10
    assert levels.mean() == pytest.approx(9.0, abs=0.03)
    assert levels.std() == pytest.approx(0.5, abs=0.03)
    assert (levels == 10).mean() == pytest.approx(0.0228, abs=0.01)
    assert levels.max() == 10
