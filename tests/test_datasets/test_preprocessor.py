"""Batches of images and token grids."""

import numpy as np
import pytest
import torch
from mmengine.dataset import default_collate, pseudo_collate
from mmpretrain.structures import DataSample

from mapet_mm.registry import MODELS

MEAN, STD = [10.0, 20.0, 30.0], [2.0, 4.0, 8.0]


def sample(value: int, grid=(2, 2)) -> dict:
    data_sample = DataSample()
    data_sample.set_field(np.full(grid, value), "token_grid")
    return {"inputs": torch.full((3, 8, 8), value, dtype=torch.uint8), "data_samples": data_sample}


@pytest.fixture
def preprocessor():
    return MODELS.build(dict(type="mapet_mm.TokenGridDataPreprocessor", mean=MEAN, std=STD, to_rgb=True))


@pytest.mark.parametrize("collate", [default_collate, pseudo_collate])
def test_a_batch_becomes_normalised_images_and_their_grids(preprocessor, collate):
    batch = preprocessor(collate([sample(40), sample(7)]))
    images, grids = batch["inputs"]
    assert images.shape == (2, 3, 8, 8)
    assert images[:, :, 0, 0].tolist() == [[15.0, 5.0, 1.25], [-1.5, -3.25, -2.875]]
    assert grids.tolist() == [[[40, 40], [40, 40]], [[7, 7], [7, 7]]]
    assert grids.dtype == torch.int64
    assert [int(each.token_grid[0, 0]) for each in batch["data_samples"]] == [40, 7]


def test_samples_without_a_grid_are_refused(preprocessor):
    batch = [{"inputs": torch.zeros(3, 8, 8), "data_samples": DataSample()}]
    with pytest.raises(
        ValueError, match=r"without token_grid: put LoadTokenGrid .* algorithm_keys=\['token_grid'\]"
    ):
        preprocessor(default_collate(batch), training=True)


@pytest.mark.parametrize("collate", [default_collate, pseudo_collate])
def test_outside_of_training_a_batch_without_grids_is_its_images(preprocessor, collate):
    """What MMPretrain's FeatureExtractor hands over; one grid missing among others is still refused."""
    without = {"inputs": torch.full((3, 8, 8), 40, dtype=torch.uint8), "data_samples": DataSample()}
    images = preprocessor(collate([without, without]))["inputs"]
    assert images.shape == (2, 3, 8, 8)
    assert images[0, :, 0, 0].tolist() == [15.0, 5.0, 1.25]
    with pytest.raises(ValueError, match="without token_grid"):
        preprocessor(collate([without, sample(7)]))


def test_grids_of_different_shapes_are_refused(preprocessor):
    with pytest.raises(ValueError, match=r"differ in shape: \[\(2, 2\), \(2, 3\)\]"):
        preprocessor(default_collate([sample(1), sample(2, (2, 3))]))


def test_several_views_are_refused(preprocessor):
    batch = {"inputs": [torch.zeros(2, 3, 8, 8)] * 2, "data_samples": [DataSample(), DataSample()]}
    with pytest.raises(ValueError, match="one view of each image"):
        preprocessor(batch)
