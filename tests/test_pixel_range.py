"""Images and the numbers that normalise them have the same range, or nothing is computed."""

import re

import pytest
import torch
from few_images import few_images_config
from mmpretrain.structures import DataSample

from mapet_mm.models.utils.pixel_range import PixelRangeError, check_pixel_range
from mapet_mm.registry import MODELS
from mapet_mm.tokenizers.run import run_fit_codebook

BYTES = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
UNITS = dict(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
PIXELS = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 16, 16)
DIVIDED = PIXELS / 255
ARE_UNITS = re.escape(
    "the images have values from 0 to 1, and the data preprocessor's mean=[123.675, 116.28, 103.53] and "
    "std=[58.395, 57.12, 57.375] are for 0 to 255: leave out the pipeline's step that divides by 255 "
    "(ToTensor), or divide both by 255"
)
ARE_BYTES = re.escape(
    "the images have values up to 255, and the data preprocessor's mean=[0.485, 0.456, 0.406] and "
    "std=[0.229, 0.224, 0.225] are for 0 to 1: multiply both by 255"
)


def check(images: torch.Tensor, mean: list[float], std: list[float]) -> None:
    check_pixel_range(images, torch.tensor(mean), torch.tensor(std))


@pytest.mark.parametrize(
    ("images", "numbers"),
    [
        (PIXELS, BYTES),
        (PIXELS.float(), BYTES),
        (DIVIDED, UNITS),
        (PIXELS, dict(mean=[0.0], std=[255.0])),
        (PIXELS, dict(mean=[-31.875], std=[318.75])),  # the discrete VAE's
        (PIXELS // 255, BYTES),  # bytes of dark images
        (torch.zeros(1, 3, 4, 4), BYTES),
        (DIVIDED * 2 - 1, dict(mean=[0.0], std=[1.0])),  # normalised by the pipeline
        (PIXELS[:0], UNITS),
    ],
)
def test_images_of_the_range_that_is_meant_are_taken(images, numbers):
    check(images, **numbers)
    check_pixel_range(images, None, None)


@pytest.mark.parametrize(
    ("images", "numbers", "message"), [(DIVIDED, BYTES, ARE_UNITS), (PIXELS, UNITS, ARE_BYTES)]
)
def test_images_of_another_range_are_refused(images, numbers, message):
    with pytest.raises(PixelRangeError, match=f"^{message}$"):
        check(images, **numbers)


@pytest.mark.parametrize(
    ("images", "numbers", "message"), [(DIVIDED, BYTES, ARE_UNITS), (PIXELS, UNITS, ARE_BYTES)]
)
def test_the_first_batch_of_a_pre_training_is_looked_at(images, numbers, message):
    preprocessor = MODELS.build(dict(type="mapet_mm.TokenGridDataPreprocessor", **numbers))
    sample = DataSample()
    sample.set_field(torch.zeros(2, 2), "token_grid")
    with pytest.raises(PixelRangeError, match=message):
        preprocessor(dict(inputs=images, data_samples=[sample]), training=True)


@pytest.mark.parametrize("wrong", [0, 1])
def test_both_views_of_the_first_batch_are_looked_at(wrong):
    numbers = [BYTES, BYTES]
    numbers[wrong] = UNITS
    names = ("mean", "std"), ("second_mean", "second_std")
    options = {
        name: one[key]
        for one, keys in zip(numbers, names, strict=True)
        for key, name in zip(("mean", "std"), keys, strict=True)
    }
    preprocessor = MODELS.build(dict(type="mapet_mm.TwoViewDataPreprocessor", **options))
    with pytest.raises(PixelRangeError, match=ARE_BYTES):
        preprocessor(dict(inputs=[PIXELS, PIXELS], data_samples=[DataSample()]), training=True)


def test_the_images_of_a_codebook_are_looked_at(tmp_path):
    cfg = few_images_config(tmp_path)
    cfg.data_preprocessor.update(UNITS)
    with pytest.raises(PixelRangeError, match=ARE_BYTES):
        run_fit_codebook(cfg)
    assert not list((tmp_path / "out").glob("*.safetensors"))
