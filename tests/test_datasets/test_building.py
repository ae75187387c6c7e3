"""A dataset that lacks files says which, and what to do, in one line."""

import numpy as np
import pytest
from mmengine.registry import DefaultScope
from PIL import Image

from mapet_mm.datasets.building import DatasetError, build_dataset

VOC = dict(
    type="mmseg.PascalVOCDataset",
    data_prefix=dict(img_path="images", seg_map_path="labels"),
    ann_file="ImageSets/Segmentation/train.txt",
)
PART = dict(type="ImageNet", data_prefix="classes")


@pytest.fixture
def folder(tmp_path):
    """A folder with three class folders, and a folder of images without classes."""
    image = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    for name in ("classes/n01", "classes/n02", "classes/n03", "images"):
        (tmp_path / name).mkdir(parents=True)
        image.save(tmp_path / name / "0.jpg")
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield tmp_path


LACKING = {
    "lists": (
        VOC,
        "PascalVOCDataset: its list of images `FOLDER/ImageSets/Segmentation/train.txt` is missing",
    ),
    "ending": (
        dict(VOC, type="mmseg.BaseSegDataset", ann_file="", img_suffix=".png"),
        r"BaseSegDataset: `FOLDER/images` has no image whose name ends with `img_suffix` \(.png\)",
    ),
    "classes": (PART, r"ImageNet: .*subfolders \(3\).*\(1000\): for a part of the classes give .*`classes`"),
    "others": (dict(PART, extensions=[".gif"], classes=list("abc")), "ImageNet: Found 0 files"),
}


@pytest.mark.parametrize("kind", LACKING)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_is_missing_is_named(folder, kind, is_wrapped):
    config, message = LACKING[kind]
    config = dict(config, data_root=str(folder))
    if is_wrapped:
        config = dict(type="RepeatDataset", times=2, dataset=config)
    with pytest.raises(DatasetError, match=message.replace("FOLDER", str(folder))):
        build_dataset(config)


def test_a_folder_of_a_system_among_the_classes_is_named(folder):
    (folder / "classes/.ipynb_checkpoints").mkdir()
    with pytest.raises(DatasetError, match=r"\(4\).* with `\.ipynb_checkpoints`, which a system left"):
        build_dataset(dict(PART, data_root=str(folder), classes=["n01", "n02", "n03"]))


def test_the_remedies_help(folder):
    """Those of the messages: the folders' names as `classes`, and all images of a folder."""
    (folder / "classes.txt").write_text("n01\nn02\nn03\n")
    part = build_dataset(dict(PART, data_root=str(folder), classes=str(folder / "classes.txt")))
    assert part.metainfo["classes"] == ("n01", "n02", "n03")
    assert part.get_gt_labels().tolist() == [0, 1, 2]
    whole = dict(VOC, type="mmseg.BaseSegDataset", data_root=str(folder))
    whole.pop("ann_file")
    assert len(build_dataset(whole)) == 1


def test_an_error_of_another_kind_stays_as_it_is(folder):
    with pytest.raises(AssertionError, match="must be specified") as found:
        build_dataset(dict(type="CustomDataset"))
    assert not isinstance(found.value, DatasetError)
