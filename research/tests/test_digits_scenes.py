"""Scenes of digits: labelled where the ink is, by the split's own digits; unlabelled ones are others."""

from pathlib import Path

import numpy as np
import pytest
from converters.digits_scenes import digit_things, write_scenes
from converters.scenes import compose_scenes
from dataset_converters.digits import load_source, render_ink, split_source
from PIL import Image
from toy_data import read_scenes

INK_LEVEL = 128  # at or above this, of 255, a pixel is labelled


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    assert write_scenes(folder / "scenes", training=24, validation=12)
    assert write_scenes(folder / "unlabelled", training=24, validation=12, labels=False)
    return folder


@pytest.mark.parametrize(("part", "count"), [("training", 24), ("validation", 12)])
def test_pixel_labels_are_exactly_the_ink_of_the_scenes_digits(written, part, count):
    seen = list(read_scenes(written / "scenes", part, "digits"))
    assert len(seen) == count
    for image, label, digits in seen:
        assert image.shape == (64, 64, 3)
        expected = np.zeros((64, 64), np.uint8)
        for digit in digits:
            left, top, side = digit["box"]
            ink = render_ink(digit["row"], side) >= INK_LEVEL
            expected[top : top + side, left : left + side][ink] = load_source().labels[digit["row"]] + 1
        np.testing.assert_array_equal(label, expected)
    own = getattr(split_source(), "train" if part == "training" else "val")
    assert {digit["row"] for *_, digits in seen for digit in digits} <= set(own.tolist())


def test_unlabelled_scenes_are_other_ones_of_the_same_split(written):
    folder = written / "unlabelled"
    assert {path.name for path in folder.iterdir()} == {"digits.json", "meta", "train", "val"}
    for part, (name, count) in zip(("training", "validation"), (("train", 24), ("val", 12)), strict=True):
        names = (folder / f"meta/{name}.txt").read_text().splitlines()
        assert names == sorted(path.name for path in (folder / name).iterdir())
        assert len(names) == count
        for file, scene in zip(names, compose_scenes(digit_things(), part, count, 1), strict=True):
            image = np.asarray(Image.open(folder / name / file))
            np.testing.assert_array_equal(image, scene.image)
            assert (image != np.asarray(Image.open(written / "scenes/images" / part / file))).any()


def test_a_folder_with_other_scenes_is_not_replaced(tmp_path):
    folder = tmp_path / "scenes"
    assert write_scenes(folder, 2, 1)
    assert not write_scenes(folder, 2, 1)
    with pytest.raises(FileExistsError, match=r"training: 2, now 3"):
        write_scenes(folder, 3, 1)
