"""The images that a config, a folder or a list names."""

import shutil
from pathlib import Path

import pytest
from mapet_mm.evaluation.declared_images import read_image_sets
from mmengine.config import Config
from mmengine.registry import DefaultScope

from mapet_mm.evaluation.image_sets import ImageSetError, check_labels


def test_a_folder_of_images_takes_the_place_of_the_configs(config, root):
    shutil.copytree(root / "data", root / "other")
    images = read_image_sets(config, str(root / "other"))
    assert (len(images["train"]), len(images["val"])) == (24, 9)
    assert images["val"].path(0).startswith(str(root / "other"))
    flat = root / "flat"
    for split in ("train", "val"):
        shutil.copytree(root / "data" / split / "a", flat / split)
    images = read_image_sets(config, str(flat))
    assert (len(images["train"]), images["train"].labels) == (8, None)
    shutil.rmtree(root / "other" / "val")
    with pytest.raises(ImageSetError, match="has no folder `val`"):
        read_image_sets(config, str(root / "other"))


def test_images_listed_with_their_classes_are_taken_as_listed(config, root):
    (root / "data/meta").mkdir()
    (root / "data/meta/val.txt").write_bytes(b"b/0.png 1\r\na/2.png 0\r\n")  # as Windows writes it
    images = read_image_sets(config, str(root / "data"))
    assert images["val"].labels.tolist() == [1, 0]
    assert [Path(images["val"].path(index)).name for index in (0, 1)] == ["0.png", "2.png"]
    assert len(images["train"]) == 24
    (root / "data/meta/val.txt").write_text("b/0.png\na/2.png\n")
    images = read_image_sets(config, str(root / "data"))
    assert (images["train"].labels is None, images["val"].labels) == (False, None)
    (root / "data/meta/val.txt").write_text("\n")
    with pytest.raises(ImageSetError, match=r"meta/val\.txt is empty: it takes a line `PATH CLASS`"):
        read_image_sets(config, str(root / "data"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("b/0.png 1\n\na/2.png 0\n", "2 is ''"),
        ("b/0.png\na/2.png\n\n", "3 is ''"),
        ("b/0.png 1\na/2.png\n", "2 is 'a/2.png'"),
        ("b/0.png 1\na/2.png -1\n", "2 is 'a/2.png -1'"),
        ("b/0.png\t1\na/2.png\t0\n", r"1 is 'b/0.png\\t1'"),
        ("\ufeffb/0.png 1\na/2.png 0\n", r"1 is '\\ufeffb/0.png 1'"),
    ],
)
def test_a_line_of_a_list_that_is_not_as_the_others_is_named(text, line, config, root):
    (root / "data/meta").mkdir()
    (root / "data/meta/val.txt").write_text(text)
    takes = r": it takes a line `PATH CLASS`, or `PATH`, an image, all alike, with a space between"
    with pytest.raises(ImageSetError, match=rf"meta/val\.txt, line {line}{takes}$"):
        read_image_sets(config, str(root / "data"))


def test_images_are_those_of_the_probe_or_pipelines_those_of_the_test_where_no_section_names_them(
    config, root
):
    loaders = config.pop("evaluation")
    with pytest.raises(ImageSetError, match=r"names no images to evaluate on: give it a section"):
        read_image_sets(config)
    with pytest.raises(ImageSetError, match=r"has no pipeline for the images in .*data: give it a section"):
        read_image_sets(config, str(root / "data"))
    config.test_dataloader = loaders.val
    assert len(read_image_sets(config, str(root / "data"))["train"]) == 24
    of_pixels = Config(dict(config, default_scope="mmseg"), filename=config.filename)
    with pytest.raises(ImageSetError, match=r"has no pipeline for the images in .*data: give it a section"):
        read_image_sets(of_pixels, str(root / "data"))
    config.knn_probe = dict(train_dataloader=loaders.train, val_dataloader=loaders.val)
    assert [len(read_image_sets(config)[name]) for name in ("train", "val")] == [24, 9]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(data_prefix="gone"), "`train` images: .*gone"),
        (dict(indices=0, serialize_data=False), "`train` images: CustomDataset has none"),
    ],
)
def test_a_set_without_images_is_one_line(config, options, match):
    config.evaluation.train.dataset.update(options)
    with pytest.raises(ImageSetError, match=match):
        read_image_sets(config)


def test_image_sets_are_found_whatever_library_the_model_is_of(config):
    with DefaultScope.overwrite_default_scope("mmengine"):
        assert len(read_image_sets(config)["train"]) == 24


def test_labels_that_cannot_be_learnt_from_are_one_line(config, root):
    def check(match: str) -> None:
        images = read_image_sets(config)
        with pytest.raises(ImageSetError, match=match):
            check_labels(images["train"], images["val"])

    config.evaluation.val.dataset.with_label = False
    check("`val` images have no labels")
    config.evaluation.val.dataset.with_label = True
    shutil.rmtree(root / "data/train/c")
    (root / "data/train/c").mkdir()
    check(r"`train` images have none of class 2( \(c\))?: add some")
    for split in ("train", "val"):
        for name in "bc":
            shutil.rmtree(root / "data" / split / name)
    check("`train` images are all of one class")
