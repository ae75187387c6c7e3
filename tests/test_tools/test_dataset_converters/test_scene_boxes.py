"""Boxes, masks and key points of scenes: each thing's own pixels, in the formats of COCO and DOTA."""

import json

import numpy as np
import pytest
from dataset_converters.digits import write_scenes
from dataset_converters.scene_boxes import (
    key_points,
    masks_of,
    read_things,
    rectangle,
    run_lengths,
    write_scene_boxes,
)
from PIL import Image

from mapet_mm.utils.errors import UserError


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "scenes"
    write_scenes(folder, training=6, validation=3)
    return folder


def test_every_labelled_pixel_is_of_one_thing_of_its_class(scenes):
    for name, things in read_things(scenes, "training"):
        label = np.asarray(Image.open(scenes / "annotations/training" / name))
        assert len(things) >= 1
        np.testing.assert_array_equal(sum(thing.mask * (thing.kind + 1) for thing in things), label)


def test_a_pixel_in_two_boxes_is_of_the_later_thing():
    """The later one is painted where the earlier one's box had room; both are of one class."""
    label = np.zeros((6, 6), np.uint8)
    label[0:2, 0:2] = label[3:5, 3:5] = 1
    first, second = masks_of(label, [[0, 0, 5], [2, 2, 4]])
    assert np.argwhere(first).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert np.argwhere(second).tolist() == [[3, 3], [3, 4], [4, 3], [4, 4]]


def test_run_lengths_go_down_the_columns_and_start_with_zeros():
    mask = np.array([[0, 1, 1], [0, 0, 1]], bool)
    assert run_lengths(mask) == [2, 1, 1, 2]
    assert run_lengths(~mask) == [0, 2, 1, 1, 2]


def test_key_points_are_the_centre_and_the_middles_of_the_outermost_lines():
    mask = np.zeros((8, 8), bool)
    mask[2, 3:6] = mask[3:7, 4] = True
    assert key_points(mask) == [(4.0, 3.43), (4.0, 2.0), (4.0, 6.0), (3.0, 2.0), (5.0, 2.0)]


def test_the_rectangle_turns_with_the_thing():
    """Pixels on a diagonal, two wide: the smallest upright box has three times the area."""
    mask = np.eye(8, dtype=bool) | np.eye(8, k=1, dtype=bool)
    corners = rectangle(mask)
    sides = np.linalg.norm(corners - np.roll(corners, 1, axis=0), axis=1)
    assert sides.prod() ** 0.5 < 64 / 2
    assert np.sort(sides)[-1] == pytest.approx(15 / 2**0.5 + 2**-0.5, abs=0.01)


def test_coco_and_dota_files_hold_every_thing(scenes, tmp_path):
    out = tmp_path / "boxes"
    assert write_scene_boxes(scenes, out)
    coco = json.loads((out / "validation.json").read_text())
    things = [(name, thing) for name, things in read_things(scenes, "validation") for thing in things]
    assert len(coco["annotations"]) == len(things)
    for entry, (name, thing) in zip(coco["annotations"], things, strict=True):
        assert coco["images"][entry["image_id"]]["file_name"] == name
        assert entry["category_id"] == thing.kind + 1
        left, top, width, height = entry["bbox"]
        assert thing.mask[top : top + height, left : left + width].sum() == entry["area"] == thing.mask.sum()
        assert thing.mask[:, [left, left + width - 1]].any(axis=0).all()
        assert thing.mask[[top, top + height - 1]].any(axis=1).all()
    assert [(one["id"], one["name"]) for one in coco["categories"]] == [(k + 1, str(k)) for k in range(10)]
    lines = [line for file in sorted((out / "rotated/validation").iterdir()) for line in file.open()]
    assert [int(line.split()[8]) for line in lines] == [thing.kind for _, thing in things]


def test_other_scenes_are_noticed_and_the_same_ones_left(scenes, tmp_path):
    out = tmp_path / "boxes"
    assert write_scene_boxes(scenes, out)
    assert not write_scene_boxes(scenes, out)
    other = tmp_path / "other"
    write_scenes(other, training=2, validation=1)
    with pytest.raises(FileExistsError, match="other options"):
        write_scene_boxes(other, out)
    with pytest.raises(UserError, match="holds no scenes"):
        write_scene_boxes(tmp_path, out)
