"""Batches to classify: MMPretrain's numbers, bit for bit, without waits or launches for each image."""

from copy import deepcopy

import mmpretrain.models
import numpy as np
import pytest
import torch
from mmengine.dataset import default_collate, pseudo_collate
from mmpretrain.structures import DataSample
from step_counts import StepCounts, fake_gpu

from mapet_mm.models.data_preprocessors.data_preprocessor import ClsDataPreprocessor

NORMALISED = dict(mean=[10.0, 20.0, 30.0], std=[2.0, 4.0, 8.0], to_rgb=True, num_classes=5)
MIXED = dict(batch_augments=dict(augments=[dict(type="Mixup", alpha=0.8), dict(type="CutMix", alpha=1.0)]))
KINDS = {
    "labels": {},
    "one-hot": dict(to_onehot=True),
    "mixed": MIXED,
    "padded": dict(pad_size_divisor=32, to_onehot=True),
}


def images_with(labels: list) -> list[dict]:
    rng = np.random.default_rng(0)
    samples = []
    for label in labels:
        image = torch.from_numpy(rng.integers(256, size=(3, 24, 24), dtype=np.uint8))
        samples.append(dict(inputs=image, data_samples=DataSample().set_gt_label(label)))
    return samples


def results_of(kind: type, options: dict, batch: dict, training: bool) -> list[torch.Tensor]:
    preprocessor = kind(**NORMALISED, **options)
    results = []
    for seed in range(4):  # of which some draw Mixup, and some CutMix
        torch.manual_seed(seed)
        np.random.seed(seed)
        data = preprocessor(deepcopy(batch), training)
        results.append(data["inputs"])
        for sample in data["data_samples"]:
            results += [sample.gt_label, sample.get("gt_score", torch.zeros(0))]
    return results


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("collate", [default_collate, pseudo_collate])
@pytest.mark.parametrize("labels", [[3, 0, 4, 3], [[3], [0, 1], [4], [2]]], ids=["one", "several"])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_images_labels_and_scores_are_mmpretrains(options, labels, collate, training):
    batch = collate(images_with(labels))
    kinds = (ClsDataPreprocessor, mmpretrain.models.ClsDataPreprocessor)
    ours, theirs = (results_of(kind, options, batch, training) for kind in kinds)
    assert len(ours) == len(theirs)
    assert all(one.dtype is other.dtype and one.equal(other) for one, other in zip(ours, theirs, strict=True))


def test_images_without_labels_are_normalised():
    batch = dict(inputs=torch.full((2, 3, 8, 8), 30, dtype=torch.uint8))
    expected = torch.tensor([10.0, 2.5, 0.0]).view(1, 3, 1, 1).expand(2, 3, 8, 8)
    data = ClsDataPreprocessor(**NORMALISED)(batch)
    assert data["inputs"].equal(expected)
    assert data["data_samples"] is None


def operations_on_a_gpu(num_images: int, seed: int) -> tuple[int, int]:
    """Waits of the host, and operations that are no views, of one batch that is mixed."""
    with torch.device("cpu"):
        batch = default_collate(images_with([1] * num_images))
    with fake_gpu(), torch.device("cpu"):
        preprocessor = ClsDataPreprocessor(**NORMALISED, **MIXED).to("cuda")
        np.random.seed(seed)
        with StepCounts() as counts:
            data = preprocessor(batch, training=True)
    assert data["data_samples"][0].gt_score.device.type == "cuda"
    return counts.waits.total(), counts.operations.total()


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_batch_waits_for_no_gpu_and_takes_as_many_operations_as_any_other(seed):
    few, many = (operations_on_a_gpu(count, seed) for count in (2, 64))
    assert few == many
    assert few[0] == 0
    assert few[1] < 25
