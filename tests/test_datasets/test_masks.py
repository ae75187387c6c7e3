"""Folders of masks: which image each belongs to, and what their values are taken for, by value."""

from pathlib import Path

import numpy as np
import pytest
from mmengine.registry import DATASETS, DefaultScope
from PIL import Image

from mapet_mm.datasets.label_files import LabelFileError
from mapet_mm.datasets.masks import MaskedImages, endings_of, match_masks, read_masks, take_values
from mapet_mm.datasets.transforms.labels import MapLabels
from mapet_mm.utils.errors import UserError

LOAD = dict(type="LoadImageFromFile")
INDICES = np.array([[0, 1, 2], [2, 1, 0]], np.uint8).repeat(8, 0).repeat(8, 1)  # 16 x 24 pixels


def of_values(*values: int) -> np.ndarray:
    """Masks with these values in the place of 0, 1 and 2."""
    return np.array(values, np.uint8)[INDICES]


def palette(values: np.ndarray) -> Image.Image:
    image = Image.fromarray(values).convert("P")
    image.putdata(values.ravel().tolist())
    image.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 128])
    return image


def three_channels(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=2)


def write(folder: Path, *masks: object, suffix: str = ".png", **options: object) -> tuple[Path, Path]:
    """Write masks, and an image for each."""
    for part in ("images", "masks"):
        (folder / part).mkdir(exist_ok=True)
    for number, mask in enumerate(masks):
        picture = Image.fromarray(mask) if isinstance(mask, np.ndarray) else mask
        picture.save(folder / f"masks/{number}{suffix}", **options)
        Image.fromarray(three_channels(100 * INDICES)).save(folder / f"images/{number}.jpg")
    return folder / "images", folder / "masks"


# Masks, --ignore; then the values that are classes, and what a training gets in the place of 0, 1 and 2.
TRAPS = {
    "indices": (of_values(0, 1, 2), None, [0, 1, 2], (0, 1, 2)),
    "palette": (palette(of_values(0, 1, 2)), None, [0, 1, 2], (0, 1, 2)),
    "three equal channels": (three_channels(of_values(0, 1, 2)), None, [0, 1, 2], (0, 1, 2)),
    "255": (of_values(0, 255, 1), None, [0, 1], (0, 255, 1)),
    "255 is a class": (of_values(0, 255, 1), (), [0, 1, 255], (0, 2, 1)),
    "0 and 255": (of_values(0, 255, 255), None, [0, 255], (0, 1, 1)),
    "0, 255, and what is between": (of_values(0, 255, 128), (128,), [0, 255], (0, 1, 255)),
    "void is 11": (of_values(0, 1, 11), (255, 11), [0, 1], (0, 1, 255)),
    "0 is unlabelled": (of_values(0, 1, 2), (0,), [1, 2], (255, 0, 1)),
    "0 and 255 are unlabelled": (of_values(0, 2, 255), (0, 255), [1, 2], (255, 1, 255)),
    "0 is unlabelled, three channels": (three_channels(of_values(0, 1, 2)), (0,), [1, 2], (255, 0, 1)),
    "from 1": (of_values(1, 2, 3), None, [1, 2, 3], (0, 1, 2)),
    "gaps": (of_values(7, 50, 200), None, [7, 50, 200], (0, 1, 2)),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_masks_are_taken_for_class_indices(trap, tmp_path):
    mask, ignore, values, expected = TRAPS[trap]
    folders = write(tmp_path, mask, of_values(*values[:2], values[-1]))  # with all classes
    pairs, _ = match_masks(*folders)
    classes = take_values(read_masks(pairs, *folders, LOAD), ignore)
    assert classes.values == values

    (pair,) = pairs
    (tmp_path / "list.txt").write_text("\n".join(pair.names))
    options = dict(ann_file=str(tmp_path / "list.txt"), reduce_zero_label=classes.reduces_zero)
    with DefaultScope.overwrite_default_scope("mmseg"):
        dataset = DATASETS.build(pair.dataset(*folders, pipeline=[LOAD, *classes.steps], **options))
    assert np.array_equal(dataset[0]["gt_seg_map"], np.array(expected)[INDICES])


def test_unrelated_names_make_few_endings():
    """Each costs a look at all names: with all of them, two folders of 100,000 files would take hours."""
    images = [f"scene_{'abcdefghij'[number % 10]}{number}.jpg" for number in range(100)]
    masks = [f"scene_{'klmnopqrst'[number % 10]}{number}.png" for number in range(100)]
    plain, others = endings_of(images, masks)
    assert plain == [(".jpg", ".png")]
    assert len(others) <= 20
    related = [name.replace(".jpg", "_mask.png") for name in images]
    assert endings_of(images, [*masks, *related])[1][0] == (".jpg", "_mask.png")


def test_steps_of_ones_own_are_written_only_where_mmsegmentation_has_none(tmp_path):
    for number, (mask, ignore, has_own) in enumerate(
        [
            (of_values(0, 1, 2), None, False),
            (of_values(0, 1, 255), None, False),
            (of_values(0, 1, 2), (0,), False),
            (of_values(0, 1, 11), (11,), True),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        folders = write(tmp_path / str(number), mask)
        classes = take_values(read_masks(match_masks(*folders)[0], *folders, LOAD), ignore)
        assert ("mapet_mm.MapLabels" in str(classes.steps)) == has_own


def test_lines_say_what_each_value_is_taken_for(tmp_path):
    folders = write(tmp_path, of_values(0, 1, 11), palette(of_values(0, 1, 1)))
    words = take_values(read_masks(match_masks(*folders)[0], *folders, LOAD), (255, 11)).words
    assert words[0] == "masks: 2 (1 grey, 1 with a palette), values 0 to 11"
    assert words[1] == "  class 0: value 0 in 2 masks, 33 % of the pixels"
    assert words[3] == "  ignored: value 11 in 1 masks, 17 % of the pixels"
    assert "--ignore 0" in words[4]


DEEP = Image.fromarray(np.array([[0, 300]], np.uint16).repeat(16, 0).repeat(12, 1))
SHADES = np.arange(16 * 24, dtype=np.uint16).reshape(16, 24).clip(max=254).astype(np.uint8)
REFUSED = {
    "colours": ([three_channels(INDICES) * np.array([1, 2, 3], np.uint8)], {}, "has colours"),
    "16 bits": ([DEEP], {}, "numbers from 0 to 300"),
    "JPEG": ([of_values(0, 1, 2)], dict(suffix=".jpg"), "is a JPEG"),
    "another size": ([np.ones((8, 12), np.uint8)], {}, r"8 x 12 pixels and its image .* 16 x 24"),
    "shades": ([SHADES], {}, "have 255 values: grey levels"),
    "one class": ([of_values(3, 3, 255)], {}, "3 in 1 masks, 67 % .*: that is 1 class"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_mask_is_refused_by_a_line(case, tmp_path):
    masks, options, message = REFUSED[case]
    folders = write(tmp_path, *masks, **options)
    with pytest.raises(UserError, match=message) as raised:
        take_values(read_masks(match_masks(*folders)[0], *folders, LOAD), None)
    assert "\n" not in str(raised.value)


def touch(folder: Path, names: str) -> Path:
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


MATCHED = {
    "names": ("a.jpg b.jpg", "a.png b.png", [(".jpg", ".png", ["a", "b"])], []),
    "same endings": ("train/a.png", "train/a.png", [(".png", ".png", ["train/a"])], []),
    "several endings": ("a.jpg b.JPG", "a.png b.png", [(".JPG", ".png", ["b"]), (".jpg", ".png", ["a"])], []),
    "an ending of masks": (
        "1.jpg 12.jpg",
        "1_mask.png 12_mask.png",
        [(".jpg", "_mask.png", ["1", "12"])],
        [],
    ),
    "Cityscapes": (
        "t/t_0_leftImg8bit.png t/t_1_leftImg8bit.png",
        "t/t_0_gtFine_labelTrainIds.png t/t_1_gtFine_labelTrainIds.png",
        [("_leftImg8bit.png", "_gtFine_labelTrainIds.png", ["t/t_0", "t/t_1"])],
        [],
    ),
    "without the other": (
        "a.jpg cat1.jpg",
        "a.png cat12.png",
        [(".jpg", ".png", ["a"])],
        ["images without a mask, left out: 1", "masks without an image, left out: 1"],
    ),
}


@pytest.mark.parametrize("case", MATCHED)
def test_a_mask_belongs_to_the_image_of_its_name(case, tmp_path):
    images, masks, expected, lines = MATCHED[case]
    pairs, words = match_masks(touch(tmp_path / "i", images), touch(tmp_path / "m", masks))
    assert pairs == [MaskedImages(*pair) for pair in expected]
    assert len(words) == len(lines)
    assert all(word.startswith(line) for word, line in zip(words, lines, strict=True))


def test_folders_without_a_common_name_are_refused(tmp_path):
    folders = touch(tmp_path / "i", "a.jpg"), touch(tmp_path / "m", "b.png")
    with pytest.raises(UserError, match=r"no image of .*/i has a mask in .*/m: .*a\.jpg.*b\.png"):
        match_masks(*folders)


def test_a_value_that_came_later_is_refused_and_not_ignored():
    labels = dict(gt_seg_map=np.array([[0, 3]], np.uint8), seg_map_path="new.png")
    with pytest.raises(LabelFileError, match=r"new.png` has the values \[3\]: classes are \[0, 1\]"):
        MapLabels(values=[0, 1], ignored=[255])(labels)
