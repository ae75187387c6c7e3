"""Dense protocols on datasets of MMSegmentation, as they lie on disk."""

import numpy as np
import pytest
import torch
from PIL import Image

from mapet_mm.evaluation.dense import DenseEvaluation
from mapet_mm.evaluation.dense_images import DenseImages
from mapet_mm.evaluation.dense_protocols import (
    PatchTokens,
    PixelLabels,
    SegmentationByNeighbours,
    SegmentationByRegression,
)
from mapet_mm.evaluation.features import BLOCK, MemoryFeatures
from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.utils.errors import UserError

CLASSES = ("left", "right", "below")
SIZES = ((24, 36), (30, 20))  # neither is the model's
LOAD, PACK = dict(type="LoadImageFromFile"), dict(type="mmseg.PackSegInputs")
RESIZE, LABELS = (
    dict(type="mmseg.Resize", scale=(16, 16), keep_ratio=False),
    dict(type="mmseg.LoadAnnotations"),
)


@pytest.fixture
def folder(tmp_path):
    """Six images of two sizes: colour and label change in the middle, and a quarter is unlabelled."""
    for kind in ("images", "annotations"):
        (tmp_path / kind).mkdir()
    rng = np.random.default_rng(0)
    for index in range(6):
        height, width = SIZES[index % 2]
        labels = np.ones((height, width), np.uint8)
        labels[:, width // 2 :] = 2
        labels[height // 2 :, : width // 2] = 3 if index % 2 else 0
        pixels = 60 * labels[..., None] + rng.integers(0, 9, (height, width, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"images/{index}.png")
        Image.fromarray(labels).save(tmp_path / f"annotations/{index}.png")
    return tmp_path


def image_set(folder, name="dense_train", pipeline=(LOAD, RESIZE, LABELS, PACK), **options) -> ImageSet:
    dataset = dict(
        type="mmseg.BaseSegDataset",
        data_root=str(folder),
        data_prefix=dict(img_path="images", seg_map_path="annotations"),
        img_suffix=".png",
        seg_map_suffix=".png",
        metainfo=dict(classes=CLASSES),
        reduce_zero_label=True,
        pipeline=list(pipeline),
    )
    return ImageSet(name, dict(dataset={**dataset, **options}))


def features_of(images: ImageSet) -> MemoryFeatures:
    """Patch tokens of 4 x 4 pixels of what the pipeline gives: their mean colours."""
    inputs = torch.stack([images.dataset[i]["inputs"] for i in range(len(images))]).float()
    tokens = torch.nn.functional.avg_pool2d(inputs, 4).flatten(2).mT / 60  # n 16 3
    return MemoryFeatures(
        tokens.mean(1)[None, None],
        tokens.half(),
        name=images.name,
        layers=["1"],
        poolings=["mean"],
        grid=(4, 4),
        labels=None,
    )


def evaluated(folder, **options) -> Evaluated:
    images = {name: image_set(folder, name, **options) for name in ("dense_train", "dense_val")}
    features = {name: features_of(each) for name, each in images.items()}
    return Evaluated(None, features, images, torch.device("cpu"))


@pytest.mark.parametrize("protocol", [SegmentationByNeighbours(ks=[1]), SegmentationByRegression([100.0])])
def test_images_of_any_size_are_measured_at_their_labels_own(folder, protocol):
    rows = protocol.run(evaluated(folder))
    assert rows[0].value == pytest.approx(100, abs=9)  # patches of 4 x 4 pixels end beside the edges
    assert [row.setting for row in rows if row.setting.startswith("class")] == [
        f"class: {c}" for c in CLASSES
    ]
    assert not rows[0].detail
    assert all(row.detail for row in rows[1:])


def test_unlabelled_pixels_are_255_and_labels_keep_their_size(folder):
    labels = PixelLabels(image_set(folder))
    assert [each.shape for each in labels] == [*SIZES] * 3
    assert labels[0][-1, 0] == 255
    assert labels[1][-1, 0] == 2
    assert labels[0][0].tolist() == [0] * 18 + [1] * 18


@pytest.mark.parametrize("protocol", [SegmentationByNeighbours(), SegmentationByRegression()])
def test_results_are_of_the_labels_that_the_files_hold(folder, protocol):
    """A map with two classes exchanged may have as many bytes as before."""
    before, path = protocol.identity(evaluated(folder)), folder / "annotations/3.png"
    labels, size = np.asarray(Image.open(path)), path.stat().st_size
    Image.fromarray(np.array([0, 2, 1, 3], np.uint8)[labels]).save(path)
    assert path.stat().st_size == size
    assert not set(protocol.identity(evaluated(folder))) & set(before)
    Image.fromarray(labels).save(path)
    assert protocol.identity(evaluated(folder)) == before


def test_without_reduce_zero_label_the_classes_do_not_fit_and_it_says_so(folder):
    with pytest.raises(UserError, match=r"label 3 in the labels of `.*1\.png`.*reduce_zero_label=True"):
        SegmentationByNeighbours().run(evaluated(folder, reduce_zero_label=False))


def test_images_without_pixel_labels_are_left_out_with_a_word(folder, capsys, monkeypatch):
    assert SegmentationByNeighbours().run(evaluated(folder, pipeline=[LOAD, RESIZE, PACK])) == []
    assert "no k-NN segmentation: the `dense_train` images have no pixel labels" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert SegmentationByNeighbours().run(evaluated(folder, pipeline=[LOAD, RESIZE, PACK])) == []
    assert not capsys.readouterr().out  # the first process has said it


def test_labels_that_no_byte_holds_are_refused(folder):
    def many_classes(results: dict) -> dict:
        return results | {"gt_seg_map": results["gt_seg_map"].astype(np.int64) + 298}

    images = image_set(folder, pipeline=[LOAD, LABELS, many_classes, PACK])
    with pytest.raises(ImageSetError, match=r"labels of `.*0\.png` go from 298 to 553: classes are 0 to 254"):
        PixelLabels(images)


def test_labels_of_another_part_of_the_image_are_refused(folder):
    crop = dict(type="CenterCrop", crop_size=(16, 16))
    with pytest.raises(ImageSetError, match=r"the model sees 16 x 16 pixels, its labels are of 24 x 36"):
        PixelLabels(image_set(folder, pipeline=[LOAD, crop, LABELS, PACK]))


def test_labels_cropped_with_the_image_are_taken(folder):
    crop = dict(type="CenterCrop", crop_size=(16, 16))
    labels = PixelLabels(image_set(folder, pipeline=[LOAD, LABELS, crop, PACK]))
    assert labels[0].shape == (16, 16)


def test_classes_without_names_are_numbered(folder):
    rows = SegmentationByNeighbours(ks=[1]).run(evaluated(folder, metainfo=dict(palette=[])))
    assert [row.setting for row in rows if row.setting.startswith("class")] == [
        "class: 0",
        "class: 1",
        "class: 2",
    ]


def test_slices_of_tokens_cross_blocks():
    values = torch.arange(2 * BLOCK + 9).half().view(-1, 1, 1)
    known = dict(name="val", layers=["1"], poolings=["mean"], grid=(1, 1), labels=None)
    tokens = PatchTokens(MemoryFeatures(values.view(1, 1, -1, 1), values, **known))
    assert len(tokens) == len(values)
    for start, stop in ((0, 3), (BLOCK - 2, BLOCK + 2), (5, 2 * BLOCK + 7), (2 * BLOCK, 2 * BLOCK + 99)):
        assert torch.equal(tokens[start:stop].flatten(), values[start:stop].flatten())


@pytest.mark.parametrize(
    ("protocol", "options"),
    [
        (SegmentationByNeighbours, dict(ks=[0])),
        (SegmentationByNeighbours, dict(distances=["L1"])),
        (SegmentationByNeighbours, dict(distances=[])),
        (SegmentationByRegression, dict(strengths=[0.0])),
    ],
)
def test_settings_that_there_are_not_are_refused(protocol, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        protocol(**options)


def test_tokens_and_labels_of_other_numbers_of_images_are_refused():
    with pytest.raises(ValueError, match="2 images have tokens, 1 have labels"):
        DenseImages(np.zeros((2, 1, 1, 1)), [np.zeros((1, 1))])


def test_more_classes_than_a_byte_tells_apart_are_refused():
    images = DenseImages(np.zeros((2, 1, 1, 1)), [np.zeros((1, 1), int)] * 2)
    with pytest.raises(UserError, match="256 classes"):
        DenseEvaluation(images, [str(i) for i in range(256)])
