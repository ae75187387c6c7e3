"""Batches of images and token grids."""

import numpy as np
import pytest
import torch
from mmengine.dataset import default_collate, pseudo_collate
from mmpretrain.structures import DataSample
from torch.utils._python_dispatch import TorchDispatchMode

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
    with pytest.raises(ValueError, match=r"token grids of one batch differ in shape: \[\(2, 2\), \(2, 3\)\]"):
        preprocessor(default_collate([sample(1), sample(2, (2, 3))]))


@pytest.mark.parametrize("collate", [default_collate, pseudo_collate])
@pytest.mark.parametrize("views", [1, 2])
def test_views_are_refused(preprocessor, collate, views):
    """However they are collated, also one in a list, as MultiView hands it on."""
    batch = collate([{"inputs": [torch.zeros(3, 8, 8)] * views, "data_samples": DataSample()}] * 2)
    with pytest.raises(ValueError, match="one view of each image"):
        preprocessor(batch)


class CopiesToDevice(TorchDispatchMode):
    """Counts what is copied from the host to the meta device: shape, and whether the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[tuple, bool]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if source is not None and source.device.type == "cpu" and result.device.type == "meta":
            self.copies.append((tuple(source.shape), not (kwargs or {}).get("non_blocking", False)))
        return result


@pytest.mark.parametrize("collate", [default_collate, pseudo_collate])
@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_goes_to_the_device_in_one_copy_of_each_kind(preprocessor, collate, masked):
    """Whatever the number of images, unattended; labels stay, and masks arrive, which BEiT and CAE stack."""
    samples = [sample(value) for value in range(6)]
    for each in samples:
        each["data_samples"].set_gt_label(3)
        if masked:
            each["data_samples"].set_mask(torch.ones(2, 2))
    batch = collate(samples)
    preprocessor(batch)  # the first batch is looked at
    preprocessor.to("meta")
    with CopiesToDevice() as counted:
        images, grids = preprocessor(batch)["inputs"]
    expected = [(6, 3, 8, 8), (6, 2, 2)] + [(6, 2, 2)] * masked
    assert counted.copies == [(shape, False) for shape in expected]
    assert images.device.type == grids.device.type == "meta"
    assert all(each.gt_label.device.type == "cpu" for each in batch["data_samples"])
    if masked:
        assert torch.stack([each.mask for each in batch["data_samples"]]).device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("collate", [default_collate, pseudo_collate])
def test_a_gpu_gets_the_same_batch(preprocessor, collate):
    batch = [sample(40), sample(7)]
    expected = preprocessor(collate(batch))["inputs"]
    for found, value in zip(preprocessor.to("cuda")(collate(batch))["inputs"], expected, strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), value)


def test_a_blocking_copy_can_be_asked_for():
    preprocessor = MODELS.build(dict(type="mapet_mm.TokenGridDataPreprocessor", non_blocking=False))
    with CopiesToDevice() as counted:
        preprocessor.to("meta")(default_collate([sample(1)]))
    assert [waits for _, waits in counted.copies] == [True, True]


def test_images_of_different_shapes_are_refused(preprocessor):
    other = {**sample(1), "inputs": torch.zeros(3, 8, 9)}
    with pytest.raises(
        ValueError, match=r"images of one batch differ in shape: \[\(3, 8, 8\), \(3, 8, 9\)\]"
    ):
        preprocessor(pseudo_collate([sample(1), other]))
