"""Batches of images and token grids, or of two views; images and the numbers that normalise them agree."""

import numpy as np
import pytest
import torch
from few_images import few_images_config
from mmengine.dataset import default_collate, pseudo_collate
from mmpretrain.models import TwoNormDataPreprocessor
from mmpretrain.structures import DataSample
from torch.utils._python_dispatch import TorchDispatchMode

from mapet_mm.models.data_preprocessors.color_jitter import BatchColorJitter
from mapet_mm.models.data_preprocessors.data_preprocessor import (
    PixelRange,
    PixelRangeError,
    TokenGridDataPreprocessor,
)
from mapet_mm.registry import MODELS
from mapet_mm.tokenizers.fit_and_extract import run_fit_codebook

MEAN, STD = [10.0, 20.0, 30.0], [2.0, 4.0, 8.0]


def sample(value: int, grid=(2, 2)) -> dict:
    data_sample = DataSample()
    data_sample.set_field(np.full(grid, value), "token_grid")
    return {"inputs": torch.full((3, 8, 8), value, dtype=torch.uint8), "data_samples": data_sample}


JITTER = dict(brightness=0.4, contrast=0.4, saturation=0.4)


def build_preprocessor(color_jitter: dict | None = None) -> TokenGridDataPreprocessor:
    return TokenGridDataPreprocessor(mean=MEAN, std=STD, to_rgb=True, color_jitter=color_jitter)


@pytest.fixture
def preprocessor():
    return MODELS.build(dict(type="mapet_mm.TokenGridDataPreprocessor", mean=MEAN, std=STD, to_rgb=True))


def seeded_sample(seed: int) -> dict:
    """An image with colours, and the seed of its draws."""
    seeded = sample(seed)
    generator = torch.Generator().manual_seed(seed)
    seeded["inputs"] = torch.randint(256, (3, 8, 8), dtype=torch.uint8, generator=generator)
    seeded["data_samples"].set_metainfo(dict(draw_seed=2**62 + seed))
    return seeded


@pytest.mark.parametrize("collate", [default_collate, pseudo_collate])
def test_a_batch_becomes_normalised_images_and_their_grids(preprocessor, collate):
    batch = preprocessor(collate([sample(40), sample(7)]))
    images, grids = batch["inputs"]
    assert images.shape == (2, 3, 8, 8)
    assert images[:, :, 0, 0].tolist() == [[15.0, 5.0, 1.25], [-1.5, -3.25, -2.875]]
    assert grids.tolist() == [[[40, 40], [40, 40]], [[7, 7], [7, 7]]]
    assert grids.dtype == torch.int64
    assert [int(each.token_grid[0, 0]) for each in batch["data_samples"]] == [40, 7]


@pytest.mark.parametrize("collate", [default_collate, pseudo_collate])
def test_outside_of_training_a_batch_without_grids_is_its_images(preprocessor, collate):
    """What MMPretrain's FeatureExtractor hands over; one grid missing among others is still refused."""
    without = {"inputs": torch.full((3, 8, 8), 40, dtype=torch.uint8), "data_samples": DataSample()}
    images = preprocessor(collate([without, without]))["inputs"]
    assert images.shape == (2, 3, 8, 8)
    assert images[0, :, 0, 0].tolist() == [15.0, 5.0, 1.25]
    with pytest.raises(ValueError, match="without token_grid"):
        preprocessor(collate([without, sample(7)]))
    with pytest.raises(ValueError, match="without token_grid"):
        preprocessor(collate([without]), training=True)


def test_training_images_are_jittered_in_rgb_by_their_seeds():
    samples = [seeded_sample(seed) for seed in range(6)]
    batch = default_collate(samples)
    rgb = batch["inputs"].flip(1).float()
    seeds = torch.tensor([each["data_samples"].draw_seed for each in samples])
    jittered = BatchColorJitter(**JITTER)(rgb, seeds)
    assert (jittered - rgb).abs().flatten(1).amax(1).min() > 5  # each image changes
    expected = (jittered - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    preprocessor = build_preprocessor(JITTER)
    images, _ = preprocessor(default_collate(samples), training=True)["inputs"]
    assert torch.equal(images, expected)
    # The same of stored images, whose channels are last, in the same layout.
    batch = default_collate(samples)
    batch["inputs"] = batch["inputs"].contiguous(memory_format=torch.channels_last)
    images, _ = preprocessor(batch, training=True)["inputs"]
    assert torch.equal(images, expected)
    assert images.is_contiguous()
    # The same in the autocast of a training, which rounds products of matrices.
    with torch.autocast("cpu", torch.bfloat16):
        images, _ = preprocessor(default_collate(samples), training=True)["inputs"]
    assert torch.equal(images, expected)


def test_images_are_jittered_in_training_only():
    batch = default_collate([seeded_sample(seed) for seed in range(6)])
    plain, _ = build_preprocessor()(batch, training=True)["inputs"]
    images, _ = build_preprocessor(JITTER)(batch, training=False)["inputs"]
    assert torch.equal(images, plain)


def test_without_seeds_images_are_jittered_by_the_generator_of_pytorch():
    batch = default_collate([sample(40), sample(40)])
    preprocessor = build_preprocessor(JITTER)
    torch.manual_seed(0)
    first, _ = preprocessor(batch, training=True)["inputs"]
    second, _ = preprocessor(batch, training=True)["inputs"]
    torch.manual_seed(0)
    assert torch.equal(preprocessor(batch, training=True)["inputs"][0], first)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


def test_floats_are_not_jittered():
    batch = default_collate([seeded_sample(0)])
    batch["inputs"] = batch["inputs"].float()
    with pytest.raises(ValueError, match="uint8"):
        build_preprocessor(JITTER)(batch, training=True)


class CopiesToDevice(TorchDispatchMode):
    """Counts what is copied from the host to the meta device: shape, and whether the host waits.

    An index by a list or a mask is copied, and waited for, inside the operation: none may be there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[tuple, bool]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten.index.Tensor
        result = function(*args, **(kwargs or {}))
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if source is not None and source.device.type == "cpu" and result.device.type == "meta":
            self.copies.append((tuple(source.shape), not (kwargs or {}).get("non_blocking", False)))
        return result


@pytest.mark.parametrize("collate", [default_collate, pseudo_collate])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("jittered", [False, True])
def test_a_batch_goes_to_the_device_in_one_copy_of_each_kind(collate, masked, jittered):
    """Whatever the number of images, unattended; labels stay, and masks arrive, which BEiT and CAE stack."""
    preprocessor = build_preprocessor(JITTER if jittered else None)
    samples = [seeded_sample(value) for value in range(6)]
    for each in samples:
        each["data_samples"].set_gt_label(3)
        if masked:
            each["data_samples"].set_mask(torch.ones(2, 2))
    batch = collate(samples)
    preprocessor(batch)  # the first batch is looked at
    preprocessor.to("meta")
    with CopiesToDevice() as counted:
        images, grids = preprocessor(batch, training=True)["inputs"]
    expected = [(6, 3, 8, 8)] + [(6, 2, 2)] * masked + [(6,)] * jittered + [(6, 2, 2)]
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


TWO_VIEWS = dict(mean=MEAN, std=STD, second_mean=[1.0] * 3, second_std=[5.0] * 3, to_rgb=True)


def test_two_views_are_normalised_as_by_mmpretrain():
    views = [torch.randint(256, (2, 3, side, side), dtype=torch.uint8) for side in (8, 16)]
    batch = dict(inputs=views, data_samples=[DataSample(), DataSample()])
    preprocessor = MODELS.build(dict(type="mapet_mm.TwoViewDataPreprocessor", **TWO_VIEWS))
    theirs = TwoNormDataPreprocessor(**TWO_VIEWS)(batch, True)["inputs"]
    mine = preprocessor(dict(batch, inputs=[list(view) for view in views]), True)["inputs"]
    assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
    assert mine.shape == (2, 3, 8, 8)  # FeatureExtractor asks
    assert torch.equal(preprocessor(dict(batch, inputs=views[0]))["inputs"], theirs[0])


BYTES = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
UNITS = dict(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
PIXELS = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 16, 16)
DIVIDED = PIXELS / 255


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
    preprocessor = torch.nn.Module()
    preprocessor.mean, preprocessor.std = map(torch.tensor, numbers.values())
    PixelRange().check(images, preprocessor)
    PixelRange().check(images, torch.nn.Identity())


@pytest.mark.parametrize(
    ("images", "numbers", "message"), [(DIVIDED, BYTES, "from 0 to 1"), (PIXELS, UNITS, "up to 255")]
)
def test_the_first_batch_of_a_pre_training_is_looked_at(images, numbers, message):
    preprocessor = MODELS.build(dict(type="mapet_mm.TokenGridDataPreprocessor", **numbers))
    sample = DataSample()
    sample.set_field(torch.zeros(2, 2), "token_grid")
    with pytest.raises(PixelRangeError, match=message):
        preprocessor(dict(inputs=images, data_samples=[sample]), training=True)


@pytest.mark.parametrize("wrong", [0, 1])
def test_both_views_of_the_first_batch_are_looked_at(wrong):
    first, second = (UNITS if view == wrong else BYTES for view in (0, 1))
    options = dict(first, second_mean=second["mean"], second_std=second["std"])
    preprocessor = MODELS.build(dict(type="mapet_mm.TwoViewDataPreprocessor", **options))
    with pytest.raises(PixelRangeError, match="up to 255"):
        preprocessor(dict(inputs=[PIXELS, PIXELS], data_samples=[DataSample()]), training=True)


def test_the_images_of_a_codebook_are_looked_at(tmp_path):
    cfg = few_images_config(tmp_path)
    cfg.data_preprocessor.update(UNITS)
    with pytest.raises(PixelRangeError, match="up to 255"):
        run_fit_codebook(cfg)
    assert not list((tmp_path / "out").glob("*.safetensors"))
