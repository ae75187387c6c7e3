"""Label files that are no class indices are refused by a line that names the file; others are read."""

import shlex
import subprocess
import sys

import numpy as np
import pytest
from mmengine.registry import DATASETS, DefaultScope
from PIL import Image

from mapet_mm.datasets.label_files import (
    SAMPLE,
    Classes,
    LabelFileError,
    LabelReader,
    OneClassError,
    check_label_files,
    read_grey_labels,
)

LOAD, LABELS = dict(type="LoadImageFromFile"), dict(type="LoadAnnotations")
CROP, PACK = dict(type="RandomCrop", crop_size=(8, 8)), dict(type="PackSegInputs")
INDICES = np.array([[0, 1, 2], [2, 1, 0]], np.uint8).repeat(8, 0).repeat(8, 1)  # 16 x 24 pixels
COLOURS = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0]], np.uint8)


def palette(indices: np.ndarray) -> Image.Image:
    image = Image.fromarray(indices).convert("P")
    image.putdata(indices.ravel().tolist())
    image.putpalette(COLOURS.ravel().tolist())
    return image


def of_values(*values: int) -> np.ndarray:
    """Labels with these values in the place of 0, 1 and 2."""
    return np.array(values)[INDICES]


def grey(indices: np.ndarray) -> np.ndarray:
    return np.repeat(indices[..., None], 3, axis=2)


@pytest.fixture
def dataset(tmp_path):
    """Makes a dataset of `count` images, of which all or the one at `index` have these labels."""

    def make(labels, count=3, index=None, file="png", pipeline=(LOAD, LABELS, CROP, PACK), **options):
        for folder in ("images", "labels"):
            (tmp_path / folder).mkdir(exist_ok=True)
        for number in range(count):
            own = labels if index in (None, number) else INDICES
            own = Image.fromarray(own) if isinstance(own, np.ndarray) else own
            if own is not None:
                own.save(tmp_path / f"labels/{number:03d}.png", format=file)
            Image.fromarray(grey(INDICES * 100)).save(tmp_path / f"images/{number:03d}.jpg")
        folders = dict(img_path="images", seg_map_path="labels")
        known = dict(type="BaseSegDataset", data_root=str(tmp_path), data_prefix=folders)
        with DefaultScope.overwrite_default_scope("mmseg"):
            return DATASETS.build(dict(known, pipeline=list(pipeline)) | options)

    return make


RIGHT = {
    "indices": INDICES,
    "palette": palette(INDICES),
    "16 bits": INDICES.astype(np.uint16),
    "32 bits, TIFF": INDICES.astype(np.int32),
    "three equal channels": grey(INDICES),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_class_indices_are_read_however_they_are_saved(dataset, kind):
    images = dataset(RIGHT[kind], file="tiff" if "TIFF" in kind else "png", pipeline=[LOAD, LABELS, PACK])
    check_label_files(images, Classes(3))
    np.testing.assert_array_equal(LabelReader(images).labels(0), INDICES)
    read_grey_labels(images)
    np.testing.assert_array_equal(images[0]["data_samples"].gt_sem_seg.data, INDICES[None])


TYPES = {"16 bits": np.uint16, "below 0": np.int32}
WRONG = {
    "above": (
        of_values(0, 3, 6),
        "labels of `LABEL` go from 0 to 6: classes are 0 to 2, and 255 is ignored$",
    ),
    "from 1": (of_values(1, 2, 3), "go from 1 to 3: .* if 0 means unlabelled, set `reduce_zero_label=True`"),
    "16 bits": (of_values(256, 257, 258), "numbers from 256 to 258, which MMSegmentation cuts to 8 bits"),
    "below 0": (of_values(-1, 0, 1), "numbers from -1 to 1, which MMSegmentation cuts"),
    "colours": (COLOURS[INDICES], "`LABEL` has colours: save a class index of each pixel"),
    "alpha": (np.dstack([INDICES, INDICES * 0 + 255]), "`LABEL` has 2 channels"),
    "half": (INDICES[::2, ::2], "`LABEL` has 8 x 12 pixels and its image `IMAGE` 16 x 24"),
    "turned": (np.ascontiguousarray(INDICES.T), "`LABEL` has 24 x 16 pixels and its image `IMAGE` 16 x 24"),
    "missing": (None, "`LABEL` of image `IMAGE` is missing: add it, or correct `seg_map_path`"),
}


@pytest.mark.parametrize("index", [None, 2], ids=["all", "last"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_file_that_is_no_class_indices_is_named(dataset, tmp_path, kind, index):
    labels, message = WRONG[kind]
    if labels is not None:
        labels = labels.astype(TYPES.get(kind, np.uint8))
    images = dataset(labels, index=index, file="tiff" if kind == "below 0" else "png")
    for word, path in {"LABEL": "labels/{}.png", "IMAGE": "images/{}.jpg"}.items():
        message = message.replace(word, str(tmp_path / path.format("002" if index else "000")))
    with pytest.raises(LabelFileError, match=message):
        check_label_files(images, Classes(3))


def test_a_jpeg_and_a_file_that_is_no_image_are_refused(dataset, tmp_path):
    images = dataset(INDICES, file="jpeg")
    with pytest.raises(LabelFileError, match="is a JPEG, which changes labels: save it as PNG"):
        check_label_files(images, Classes(3))
    (tmp_path / "labels/000.png").write_bytes(b"not an image")
    with pytest.raises(LabelFileError, match="cannot be read: UnidentifiedImageError"):
        check_label_files(images, Classes(3))


def test_labels_that_pillow_would_stretch_are_refused(dataset, tmp_path):
    by_cv2 = dict(LABELS, imdecode_backend="cv2")
    images = dataset(INDICES, count=1)
    (tmp_path / "labels/000.png").write_bytes(b"P5 24 16 2\n" + INDICES.tobytes())
    with pytest.raises(LabelFileError, match="says that 2 is white, and Pillow stretches its labels"):
        check_label_files(images, Classes(256))
    check_label_files(dataset(None, count=1, pipeline=[LOAD, by_cv2, PACK]), Classes(3))


def test_a_palette_is_not_read_as_colours(dataset):
    by_cv2 = dict(LABELS, imdecode_backend="cv2")
    with pytest.raises(LabelFileError, match=r"has a palette, .*`imdecode_backend='pillow'`"):
        check_label_files(dataset(palette(INDICES), pipeline=[LOAD, by_cv2, PACK]), Classes(3))


def test_the_config_says_which_labels_are_classes(dataset):
    from_one = of_values(0, 1, 2).astype(np.uint8) + 1
    check_label_files(dataset(from_one, reduce_zero_label=True), Classes(3))
    with pytest.raises(LabelFileError, match="`reduce_zero_label=True` has made each lower by 1"):
        check_label_files(dataset(from_one, reduce_zero_label=True), Classes(2, reduce_zero_label=True))
    check_label_files(dataset(from_one), Classes(4))
    check_label_files(dataset(of_values(0, 1, 9).astype(np.uint8)), Classes(2, ignored=9))
    with pytest.raises(LabelFileError, match="and 9 is ignored"):
        check_label_files(dataset(of_values(0, 1, 255).astype(np.uint8)), Classes(2, ignored=9))


def test_masks_of_0_and_255_are_refused_and_the_command_that_is_named_mends_them(dataset, tmp_path):
    images = dataset(of_values(0, 255, 255).astype(np.uint8))
    with pytest.raises(
        OneClassError, match=r"3 label files .* have class 0 alone, because 255 is ignored"
    ) as found:
        check_label_files(images, Classes(2))
    command = str(found.value).partition("python ")[2]
    subprocess.run([sys.executable, *shlex.split(command)], cwd=tmp_path / "labels", check=True)
    check_label_files(images, Classes(2))
    assert LabelReader(images).labels(0).tolist() == np.minimum(INDICES, 1).tolist()


@pytest.mark.parametrize(
    ("value", "message"), [(255, "have no class in any pixel: all is 255"), (1, "have class 1 alone$")]
)
def test_files_with_nothing_to_learn_are_refused(dataset, value, message):
    only = np.full_like(INDICES, value)
    with pytest.raises(OneClassError, match=message):
        check_label_files(dataset(only), Classes(3))


def test_a_rare_class_is_looked_for_in_all_files_and_a_common_one_in_some(dataset, monkeypatch):
    """Of 90 images every third or so is looked at; only number 1 has a second class."""
    images = dataset(np.zeros_like(INDICES), count=90)
    Image.fromarray(INDICES).save(LabelReader(images).path(1))
    read = []
    labels = LabelReader.labels
    monkeypatch.setattr(LabelReader, "labels", lambda self, index: read.append(index) or labels(self, index))
    check_label_files(images, Classes(3))
    assert read[:SAMPLE][:3] == [0, 2, 5]
    assert read[:SAMPLE][-1] == 89
    assert read[SAMPLE:] == [0, 1]
    read.clear()
    check_label_files(dataset(INDICES, count=90), Classes(3))
    assert len(read) == SAMPLE


class HalfOf255:
    """A step of one's own, which makes classes of masks that are saved as 0 and 255."""

    def __call__(self, results: dict) -> dict:
        results["gt_seg_map"] = results["gt_seg_map"] // 128
        return results


def test_labels_count_behind_steps_of_ones_own(dataset):
    images = dataset(of_values(0, 255, 255).astype(np.uint8), pipeline=[LOAD, LABELS, HalfOf255(), PACK])
    before = np.random.get_state()[1].tolist()
    check_label_files(images, Classes(2))
    assert np.random.get_state()[1].tolist() == before
    images = dataset(INDICES.astype(np.uint16) + 256, pipeline=[LOAD, LABELS, HalfOf255(), PACK])
    with pytest.raises(LabelFileError, match="which MMSegmentation cuts to 8 bits"):
        check_label_files(images, Classes(2))
