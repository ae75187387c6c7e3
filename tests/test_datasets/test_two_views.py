"""Batches with a second view for a tokenizer in the model."""

import pytest
import torch
from mmengine.dataset import default_collate, pseudo_collate
from mmpretrain.models import TwoNormDataPreprocessor
from mmpretrain.structures import DataSample

from mapet_mm.registry import MODELS

OPTIONS = dict(
    mean=[10.0, 20.0, 30.0], std=[2.0, 4.0, 8.0], second_mean=[1.0] * 3, second_std=[5.0] * 3, to_rgb=True
)


@pytest.fixture
def preprocessor():
    return MODELS.build(dict(type="mapet_mm.TwoViewDataPreprocessor", **OPTIONS))


@pytest.fixture
def views() -> list[torch.Tensor]:
    return [torch.randint(256, (2, 3, side, side), dtype=torch.uint8) for side in (8, 16)]


@pytest.mark.parametrize("training", [True, False])
def test_two_views_are_normalised_as_by_mmpretrain(preprocessor, views, training):
    batch = dict(inputs=views, data_samples=[DataSample(), DataSample()])
    mine = preprocessor(batch, training)["inputs"]
    theirs = TwoNormDataPreprocessor(**OPTIONS)(batch, training)["inputs"]
    assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
    if not training:
        assert mine.shape == (2, 3, 8, 8)  # the ViT's view: FeatureExtractor asks


def test_batches_are_collated_in_any_way(preprocessor, views):
    """`Runner.from_cfg` leaves images in lists where a config does not say otherwise."""
    one, two = ([view[image] for image in range(2)] for view in views)
    samples = [dict(inputs=list(pair), data_samples=DataSample()) for pair in zip(one, two, strict=True)]
    stacked, listed = (
        preprocessor(collate(samples), True)["inputs"] for collate in (default_collate, pseudo_collate)
    )
    assert all(torch.equal(*pair) for pair in zip(stacked, listed, strict=True))
    single = [dict(inputs=image, data_samples=DataSample()) for image in one]
    stacked, listed = (
        preprocessor(collate(single))["inputs"] for collate in (default_collate, pseudo_collate)
    )
    assert torch.equal(stacked, listed)


def test_one_view_is_normalised_by_the_first_mean_and_refused_in_training(preprocessor, views):
    batch = dict(inputs=views[0], data_samples=[DataSample(), DataSample()])
    images = preprocessor(batch)["inputs"]
    expected = (views[0].flip(1).float() - torch.tensor([10.0, 20, 30]).view(3, 1, 1)) / torch.tensor(
        [2.0, 4, 8]
    ).view(3, 1, 1)
    torch.testing.assert_close(images, expected)
    with pytest.raises(ValueError, match="no view of the images: put MultiView in the pipeline"):
        preprocessor(batch, training=True)
