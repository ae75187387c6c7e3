"""Folders of images: what systems leave in them is no image and no class, on every road."""

import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mapet_mm.datasets.building import note_other_rules
from mapet_mm.datasets.image_folder import EXTENSIONS, ImageFolder, image_names
from mapet_mm.datasets.tar_shards import list_images
from mapet_mm.registry import DATASETS
from mapet_mm.utils.errors import UserError

LITTER = [
    *(".ipynb_checkpoints", "@eaDir", "#recycle", "__MACOSX", "$RECYCLE.BIN", "System Volume Information"),
    *("lost+found", ".Trash-1000", "Thumbs", ".thumbnails"),
]


def picture(path: Path, level: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two classes, with litter beside them and in one."""
    for name in ("cat/1.jpg", "cat/2.webp", "dog/3.TIFF", "dog/deep/4.png"):
        picture(tmp_path / "photos" / name)
    for name in LITTER:
        picture(tmp_path / "photos" / name / "left.jpg")
        picture(tmp_path / "photos/cat" / name / "left.jpg")
    (tmp_path / "photos/cat/._1.jpg").write_bytes(b"what macOS leaves")
    return tmp_path / "photos"


NAMES = ["cat/1.jpg", "cat/2.webp", "dog/3.TIFF", "dog/deep/4.png"]


def test_folders_of_systems_hold_no_images_and_are_named(folder):
    names, others = image_names(folder)
    assert names == NAMES
    assert set(others) == {f"`{name}`" for name in LITTER if not name.startswith(".")}
    assert set(others.values()) == {2}
    assert image_names(folder, "dog")[0] == NAMES[2:]


def test_folders_of_systems_are_no_classes(folder):
    dataset = DATASETS.build(dict(type="mapet_mm.ImageFolder", data_prefix=str(folder)))
    assert dataset.metainfo["classes"] == ("cat", "dog")
    assert dataset.get_gt_labels().tolist() == [0, 0, 1, 1]
    unlabelled = ImageFolder(data_prefix=str(folder), with_label=False)
    assert [os.path.relpath(info["img_path"], folder) for info in unlabelled] == NAMES


def test_folders_of_systems_in_tar_files_hold_no_images(folder):
    with tarfile.open(folder.parent / "photos.tar", "w") as file:
        file.add(folder, "./photos")
    names = sorted(name for name, *_ in list_images(folder.parent / "photos.tar"))
    assert [name.removeprefix("./") for name in names] == [f"photos/{name}" for name in NAMES]


def test_a_broken_link_is_listed_and_a_folder_that_cannot_be_read_is_an_error(folder):
    (folder / "cat/0.jpg").symlink_to("/nowhere/0.jpg")
    (folder / "dog/9.jpg").mkdir()
    names, others = image_names(folder)
    assert names == ["cat/0.jpg", *NAMES]
    assert others["empty folder `9.jpg`"] == 1
    with pytest.raises(OSError, match="gone"):
        image_names(folder / "gone")


def test_a_link_to_a_folder_that_it_is_in_is_not_followed(folder):
    (folder / "cat/all").symlink_to("..")
    (folder / "dog/deep/dogs").symlink_to("../../dog")
    (folder / "more").symlink_to("cat")  # to another folder: its images count again, but for those of `all`
    names, others = image_names(folder)
    assert names == [*NAMES, "more/1.jpg", "more/2.webp"]
    assert others["link `all` to a folder that it is in"] == 2
    assert others["link `dogs` to a folder that it is in"] == 1
    assert image_names(folder, "dog")[0] == NAMES[2:]


def test_names_in_a_list_may_begin_with_white_space(tmp_path):
    names = [" cats/1 2.jpg", "\u3000dogs/3.jpg"]
    (tmp_path / "list.txt").write_text("".join(f"{name} {label}\r\n" for label, name in enumerate(names)))
    listed = ImageFolder(data_prefix=str(tmp_path), ann_file=str(tmp_path / "list.txt"))
    assert [info["img_path"] for info in listed] == [f"{tmp_path}/{name}" for name in names]
    assert listed.get_gt_labels().tolist() == [0, 1]
    (tmp_path / "list.txt").write_text("\n".join(["", *names, " ", ""]))
    listed = ImageFolder(data_prefix=str(tmp_path), ann_file=str(tmp_path / "list.txt"), with_label=False)
    assert [info["img_path"] for info in listed] == [f"{tmp_path}/{name}" for name in names]


def test_images_without_a_class_are_left_out_of_the_labelled_ones(folder):
    picture(folder / "cover.png")
    assert len(ImageFolder(data_prefix=str(folder))) == 4
    assert len(ImageFolder(data_prefix=str(folder), with_label=False)) == 5
    with pytest.raises(UserError, match="no folder per class"):
        ImageFolder(data_prefix=str(folder), class_level=5)


def test_classes_may_be_of_another_level_or_of_a_file(folder, tmp_path):
    shutil.move(folder / "cat", folder / "dog/cat")
    deeper = ImageFolder(data_prefix=str(folder), class_level=2)
    assert deeper.metainfo["classes"] == ("cat", "deep")
    (tmp_path / "labels.txt").write_text("cat/1.jpg x\ncat/2.webp y\n3.TIFF y\ndeep/4.png x\n")
    named = ImageFolder(data_prefix=str(folder / "dog"), labels=str(tmp_path / "labels.txt"))
    assert named.metainfo["classes"] == ("x", "y")
    assert named.get_gt_labels().tolist() == [0, 0, 1, 1]


def test_a_folder_without_images_says_what_it_holds(tmp_path):
    (tmp_path / "a.heic").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds no images .* but 1 \.heic"):
        ImageFolder(data_prefix=str(tmp_path))


def test_where_mmpretrains_dataset_follows_other_rules_a_line_says_so(folder, capsys):
    note_other_rules(DATASETS.build(dict(type="mmpretrain.CustomDataset", data_prefix=str(folder))))
    printed = capsys.readouterr().out
    assert "1 .TIFF, 1 .webp left out, which CustomDataset does not take" in printed
    assert "`#recycle`" in printed
    shutil.rmtree(folder / "dog")
    for name in (*LITTER, *(f"cat/{name}" for name in LITTER), "cat/2.webp"):
        path = folder / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    note_other_rules(DATASETS.build(dict(type="mmpretrain.CustomDataset", data_prefix=str(folder))))
    assert not capsys.readouterr().out
    assert ".webp" in EXTENSIONS
