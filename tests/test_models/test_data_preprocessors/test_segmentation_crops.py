"""Segmentors' batches: MMSegmentation's numbers, bit for bit, and no wait for a GPU in training."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from step_counts import StepCounts, fake_gpu

OPTIONS = dict(mean=[10.0, 20.0, 30.0], std=[2.0, 4.0, 8.0], bgr_to_rgb=True, size=(32, 32), seg_pad_val=255)


def preprocessors() -> list[torch.nn.Module]:
    """Ours and MMSegmentation's."""
    with DefaultScope.overwrite_default_scope("mmseg"):
        kinds = ("mapet_mm.SegDataPreProcessor", "SegDataPreProcessor")
        return [MODELS.build(dict(type=kind, test_cfg=dict(size=(40, 40)), **OPTIONS)) for kind in kinds]


def crops(*sides: int) -> dict:
    rng = np.random.default_rng(0)
    images, samples = [], []
    for side in sides:
        images.append(torch.from_numpy(rng.integers(256, size=(3, side, side), dtype=np.uint8)))
        sample = SegDataSample(metainfo=dict(img_shape=(side, side)))
        sample.gt_sem_seg = PixelData(data=torch.from_numpy(rng.integers(5, size=(1, side, side))))
        samples.append(sample)
    return dict(inputs=images, data_samples=samples)


@pytest.mark.parametrize(
    ("sides", "training"), [((32, 32), True), ((20, 20), True), ((20, 32), True), ((32,), False)]
)
def test_crops_labels_and_their_sizes_are_mmsegmentations(sides, training):
    ours, theirs = (one(deepcopy(crops(*sides)), training) for one in preprocessors())
    assert ours["inputs"].equal(theirs["inputs"])
    for sample, expected in zip(ours["data_samples"], theirs["data_samples"], strict=True):
        assert sample.metainfo == expected.metainfo
        assert sample.gt_sem_seg.data.equal(expected.gt_sem_seg.data)


def test_a_batch_of_crops_waits_for_no_gpu():
    """MMSegmentation's waits for each image, each label and each order of the channels."""
    waits = []
    for index in (0, 1):
        batch = crops(32, 32)
        with fake_gpu(), torch.device("cpu"):
            preprocessor = preprocessors()[index].to("cuda")
            with StepCounts() as counts:
                data = preprocessor(batch, training=True)
        waits.append(counts.waits.total())
        assert data["inputs"].device.type == "cuda"
        assert data["data_samples"][0].gt_sem_seg.data.device.type == "cuda"
    assert waits == [0, 6]
