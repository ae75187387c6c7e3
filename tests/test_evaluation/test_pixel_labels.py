"""Labels of patches are the labels of the pixels that they cover, and go back to the image's own size."""

import numpy as np
import pytest
from PIL import Image

import mapet_mm
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.pixel_labels import (
    Areas,
    PixelLabels,
    join_cells,
    label_cells,
    majority,
    pixel_labels,
)
from mapet_mm.utils.errors import UserError

SIZES = ((24, 36), (30, 20))
LOAD, LABELS = dict(type="LoadImageFromFile"), dict(type="mmseg.LoadAnnotations")
CROP = dict(type="CenterCrop", crop_size=(16, 16))
PACK = dict(type="mmseg.PackSegInputs")


def test_a_patch_has_the_labels_that_it_covers_at_any_image_size():
    quarters = np.array([[0, 1], [2, 255]])
    for labels in (quarters, quarters.repeat(9, 0).repeat(6, 1)):
        cells = label_cells(labels, (2, 2), 3)
        assert cells.tolist() == [[0] * 9, [1] * 9, [2] * 9, [255] * 9]
        np.testing.assert_array_equal(join_cells(cells, (2, 2), labels.shape), labels)


def test_each_pixel_gets_the_label_at_the_middle_of_the_part_that_stands_for_it(config, root):
    """The model sees 16 x 16 pixels, the labels have 48 x 48: each of its pixels stands for 3 x 3 of them.

    Tested are the images that are learnt from, so each patch is its own nearest neighbour.
    """
    rng = np.random.default_rng(0)
    for kind in ("images", "annotations"):
        (root / kind).mkdir()
    shown, predicted = [], []
    for index in range(4):
        labels = rng.integers(0, 3, (10, 10), np.uint8).repeat(5, 0).repeat(5, 1)[:48, :48]
        Image.fromarray(labels).save(root / f"annotations/{index}.png")
        Image.fromarray(rng.integers(0, 256, (48, 48, 3), np.uint8)).save(root / f"images/{index}.png")
        shown.append(labels)
        predicted.append(labels[1::3, 1::3].repeat(3, 0).repeat(3, 1))
    ious = []
    for label in range(3):
        right, found = np.equal(shown, label), np.equal(predicted, label)
        ious.append(100 * (right & found).sum() / (right | found).sum())

    dataset = dict(
        type="mmseg.BaseSegDataset",
        data_root=str(root),
        data_prefix=dict(img_path="images", seg_map_path="annotations"),
        img_suffix=".png",
        seg_map_suffix=".png",
        metainfo=dict(classes=("a", "b", "c")),
        pipeline=[LOAD, dict(type="mmseg.Resize", scale=(16, 16), keep_ratio=False), LABELS, PACK],
    )
    config.evaluation = dict(
        dense_train=dict(dataset=dataset),
        dense_val=dict(dataset=dataset),
        protocols=[dict(type="SegmentationByNeighbours", ks=[1])],
    )
    config.dump(root / "config.py")
    rows = mapet_mm.evaluate(root / "config.py", checkpoint=root / "weights.pth", cache=root / "cache")
    assert rows[0].value == pytest.approx(np.mean(ious), abs=1e-4)


def test_a_patch_is_what_most_of_it_is_and_ignored_where_that_is_ignored():
    cells = np.array([[1, 1, 2, 3], [255, 255, 255, 1], [3, 2, 2, 3]], np.uint8)
    assert majority(cells, 4).tolist() == [1, 255, 2]


def test_areas_are_those_of_the_iou_metric():
    areas = Areas(4)
    assert np.isnan(areas.miou)
    areas.add(np.array([[0, 1, 1], [2, 2, 2]]), np.array([[0, 1, 2], [2, 255, 255]]))
    # Class 0: 1 pixel of 1, class 1: 1 of 2, class 2: 1 of 2, no class 3.
    assert areas.ious[:3].tolist() == [100, 50, 50]
    assert np.isnan(areas.ious[3])
    assert areas.miou == pytest.approx(200 / 3)


@pytest.fixture
def images(tmp_path):
    """Makes a set of two images of two sizes with labels 0 (unlabelled) to 3, read by a pipeline."""
    for kind in ("images", "annotations"):
        (tmp_path / kind).mkdir()
    for index, (height, width) in enumerate(SIZES):
        labels = np.array([[1, 2], [0, 3]], np.uint8).repeat(height // 2, 0).repeat(width // 2, 1)
        Image.fromarray(labels).save(tmp_path / f"annotations/{index}.png")
        Image.fromarray(60 * labels).convert("RGB").save(tmp_path / f"images/{index}.png")

    def make(*pipeline, **options) -> ImageSet:
        folders = dict(img_path="images", seg_map_path="annotations")
        known = dict(data_root=str(tmp_path), data_prefix=folders, img_suffix=".png", seg_map_suffix=".png")
        known |= dict(metainfo=dict(classes=("a", "b", "c")), pipeline=list(pipeline))
        dataset = dict(type="mmseg.BaseSegDataset", reduce_zero_label=True, **known)
        return ImageSet("dense_train", dict(dataset=dataset | options))

    return make


def test_labels_are_read_at_their_own_size_and_unlabelled_pixels_are_ignored(images):
    resize = dict(type="mmseg.Resize", scale=(16, 16), keep_ratio=False)
    labels = PixelLabels(images(LOAD, resize, LABELS, PACK))
    assert [each.shape for each in labels] == [*SIZES]
    assert [labels[1][y, x] for y in (0, -1) for x in (0, -1)] == [0, 1, 255, 2]
    assert [each.shape for each in PixelLabels(images(LOAD, LABELS, CROP, PACK))] == [(16, 16)] * 2


def test_labels_are_read_once_for_all_models(images):
    """Each model has sets of its own; those of other images are others."""
    labels = pixel_labels(images(LOAD, LABELS, PACK))
    assert pixel_labels(images(LOAD, LABELS, PACK)) is labels
    assert pixel_labels(images(LOAD, LABELS, CROP, PACK))[0].shape != labels[0].shape


REFUSED = [
    ([LOAD, LABELS, PACK], dict(reduce_zero_label=False), "0 to 3: classes are 0 to 2.*reduce_zero_label"),
    ([LOAD, CROP, LABELS, PACK], {}, "16 x 16 pixels"),
]


@pytest.mark.parametrize(("pipeline", "options", "noun"), REFUSED)
def test_wrong_labels_are_refused(images, pipeline, options, noun):
    with pytest.raises(UserError, match=noun):
        PixelLabels(images(*pipeline, **options))
