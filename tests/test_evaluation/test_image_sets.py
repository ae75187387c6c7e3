"""Image sets: labels that can be learnt from, one identity for the same images, declared sets."""

import shutil
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from dense_folders import write_dense
from frozen_features import PIPELINE
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import DefaultScope
from PIL import Image
from stored_squares import CROP, LOAD, SIZE, make_store, stored
from stored_squares import config as squares_config

from mapet_mm.evaluation.image_sets import DeclaredSets, read_image_sets
from mapet_mm.evaluation.images import Data, ImageSet, ImageSetError
from mapet_mm.evaluation.pixel_labels import PixelLabels
from mapet_mm.evaluation.protocols.classification import answers, check_labels
from mapet_mm.registry import DATASETS
from mapet_mm.tokenizers.squares import SquareLoader, store_images


@DATASETS.register_module()
class SaidImages(BaseDataset):
    """Images that are never read: only their infos count."""

    def __init__(self, infos: list[dict], **kwargs) -> None:
        self.infos = infos
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict]:
        return list(self.infos)  # which the base class empties


def image_set(labels: list, name: str = "val", classes: tuple = (), **options) -> ImageSet:
    infos = [dict(img_path=f"{place}.png", gt_label=label) for place, label in enumerate(labels)]
    said = dict(infos=infos, metainfo=dict(classes=classes) if classes else None)
    return ImageSet(name, dict(dataset=dict(type="mapet_mm.SaidImages", **said, **options)))


@pytest.mark.parametrize("labels", [[3, 1], [[3], [1]], [np.array([3]), torch.tensor(1)]], ids=str)
def test_labels_are_numbers_however_the_dataset_says_them(labels):
    assert image_set(labels, serialize_data=False).labels.tolist() == [3, 1]


@pytest.mark.parametrize("labels", [[[3], [0, 1]], [3, None], [[], [1]]], ids=str)
def test_there_are_no_labels_unless_each_image_has_one(labels):
    assert image_set(labels).labels is None


def test_paths_labels_and_class_names_are_the_datasets(config, root):
    images = read_image_sets(config)["val"]
    assert (len(images), images.class_names) == (9, ["a", "b", "c"])
    assert images.path(3) == str(root / "data/val/b/0.png")
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


REFUSED = [
    # labels and class names of `train`, of `val`, a noun of the message
    ([0, None], (), [0, 1], (), "`train` images have no labels"),
    ([0, 1], (), [0, None], (), "`val` images have no labels"),
    ([0, -1], (), [0, 1], (), "no labels"),
    ([3, 3], (), [3], (), "only class 3"),
    ([0, 1], (), [2], (), "no image of class 2"),
    ([0, 1], ("a", "b", "c"), [0], (), "no image of class 2"),
    ([0, 1, 2], ("a", "b", "c"), [0, 1], ("a", "c"), "class 1 is `b`"),
]


@pytest.mark.parametrize(("train", "classes", "val", "others", "message"), REFUSED)
def test_labels_that_cannot_be_learnt_from_are_refused(train, classes, val, others, message):
    sets = image_set(train, "train", classes), image_set(val, "val", others)
    with pytest.raises(ImageSetError, match=message):
        check_labels(*sets)


def test_the_number_of_classes_and_last_classes_that_val_lacks():
    val = image_set([1], classes=("a", "b"))
    assert check_labels(image_set([0, 1, 2], classes=("a", "b", "c")), val) == 3
    assert check_labels(image_set([0, 1]), image_set([1, 0])) == 2


def test_a_folder_of_images_takes_the_place_of_the_configs(config, root):
    shutil.copytree(root / "data", root / "other")
    images = read_image_sets(config, str(root / "other"))
    assert (len(images["train"]), len(images["val"])) == (24, 9)
    assert images["val"].path(0).startswith(str(root / "other"))
    for split in ("train", "val"):  # no folder per class: no labels
        shutil.copytree(root / "data" / split / "a", root / "flat" / split)
    images = read_image_sets(config, str(root / "flat"))
    assert (len(images["train"]), images["train"].labels) == (8, None)
    shutil.rmtree(root / "other" / "val")
    with pytest.raises(ImageSetError, match="no folder `val`"):
        read_image_sets(config, str(root / "other"))


def test_stored_tokens_are_left_out_of_a_folders_pipeline(config, root):
    pipeline = config.evaluation.val.dataset.pipeline
    pipeline.insert(1, dict(type="mapet_mm.LoadTokenGrid", store="nowhere"))
    pipeline[-1].algorithm_keys = ["token_grid"]
    images = read_image_sets(config, str(root / "data"))["train"]
    assert images.dataset[0]["inputs"].shape == (3, 16, 16)


def test_without_a_section_images_are_the_probes_and_pipelines_the_tests(config, root):
    loaders = config.pop("evaluation")
    with pytest.raises(ImageSetError, match="names no images"):
        read_image_sets(config)
    with pytest.raises(ImageSetError, match="no pipeline"):
        read_image_sets(config, str(root / "data"))
    config.test_dataloader = loaders.val
    assert len(read_image_sets(config, str(root / "data"))["train"]) == 24
    of_pixels = Config(dict(config, default_scope="mmseg"))
    with pytest.raises(ImageSetError, match="no pipeline"):
        read_image_sets(of_pixels, str(root / "data"))
    config.knn_probe = dict(train_dataloader=loaders.train, val_dataloader=loaders.val)
    assert [len(read_image_sets(config)[name]) for name in ("train", "val")] == [24, 9]


def test_another_config_declares_the_images(config, root):
    other = Config(dict(model=config.model, data_preprocessor=dict()))
    with DefaultScope.overwrite_default_scope("mmengine"):
        assert len(read_image_sets(other, str(root / "config.py"))["train"]) == 24


@pytest.mark.parametrize(("kind", "classes"), [("ade20k", 150), ("voc", 21), ("cityscapes", 19)])
def test_a_folder_with_pixel_labels_is_known_by_its_layout(config, root, kind, classes):
    """Images are squashed to the model's size, labels keep their own."""
    config.evaluation.val.dataset.pipeline.insert(1, dict(type="CenterCrop", crop_size=16))
    images = read_image_sets(config, str(write_dense(root / kind, kind)))
    assert {name: len(one) for name, one in images.items()} == {"dense_train": 10, "dense_val": 3}
    train = images["dense_train"]
    assert len(train.class_names) == classes
    assert train.dataset[0]["inputs"].shape == (3, 16, 16)
    labels = PixelLabels(train)
    assert labels[0].shape == (24, 32)
    ignored = any((one == 255).any() for one in labels)
    assert ignored == (kind == "ade20k")  # whose 0 means unlabelled


def test_other_classes_in_ade20ks_folders_are_refused(config, root):
    """They would be taken for ADE20K's 150, and label 0 for none."""
    (write_dense(root / "own", "ade20k") / "objectInfo150.txt").unlink()
    with pytest.raises(ImageSetError, match="objectInfo150"):
        read_image_sets(config, str(root / "own"))


def test_a_folder_per_class_is_divided(config, root, capsys):
    images = read_image_sets(config, str(root / "data/train"))
    assert images["train"].labels.tolist() == [0] * 7 + [1] * 7 + [2] * 7
    assert images["val"].labels.tolist() == [0, 1, 2]
    assert not {images["train"].path(index) for index in range(21)} & {images["val"].path(0)}
    assert "every fifth image" in capsys.readouterr().out


def test_a_folder_with_too_few_images_of_each_class_to_test_is_refused(config, root):
    for path in (root / "data/train").glob("*/*"):
        few = root / "few" / path.parent.name
        few.mkdir(parents=True, exist_ok=True)
        if len(list(few.iterdir())) < 4:
            (few / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ImageSetError, match=r"few: no class has 5 images that are not copies"):
        read_image_sets(config, str(root / "few"))


LITTER = (".ipynb_checkpoints", "__MACOSX", "@eaDir", "#recycle")


@pytest.mark.parametrize("folder", ["data", "data/train", "sets.py"])
def test_folders_of_systems_are_no_classes_and_a_line_names_them(config, root, monkeypatch, capsys, folder):
    """In both sets, where they would be a class that is told apart."""
    monkeypatch.chdir(root)
    (root / "sets.py").write_text('evaluation = dict(train="data/train", val="data/val")')
    before = {name: len(one) for name, one in read_image_sets(config, folder).items()}
    for name in LITTER:
        for split in ("train", "val"):
            shutil.copytree(root / "data" / split / "a", root / "data" / split / name)
    images = read_image_sets(config, folder)
    assert {name: len(one) for name, one in images.items()} == before
    assert images["train"].class_names == images["val"].class_names == ["a", "b", "c"]
    printed = capsys.readouterr().out
    assert "other files, left out: 1 `#recycle`, 1 `@eaDir`, 1 `__MACOSX`" in printed
    assert "3 classes (`a`, `b`, `c`)" in printed


def test_all_formats_are_taken_where_a_config_names_folders(config, root):
    for name in ("train/a/0", "val/b/1"):
        Image.open(root / f"data/{name}.png").save(root / f"data/{name}.webp")
        (root / f"data/{name}.png").unlink()
    config.evaluation = dict(train=str(root / "data/train"), val=str(root / "data/val"))
    config.test_dataloader = dict(dataset=dict(pipeline=PIPELINE))
    assert {name: len(one) for name, one in read_image_sets(config).items()} == {"train": 24, "val": 9}


def test_both_sets_number_the_classes_alike_where_one_lacks_some(config, root):
    shutil.rmtree(root / "data/val/a")
    for data in (str(root / "data"), str(root / "sets.py")):
        (root / "sets.py").write_text(f'evaluation = dict(train="{root}/data/train", val="{root}/data/val")')
        images = read_image_sets(config, data)
        assert images["val"].labels.tolist() == [1, 1, 1, 2, 2, 2]
        assert check_labels(images["train"], images["val"]) == 3


def test_classes_of_a_folder_may_be_of_another_level_or_of_a_file(config, root):
    names = [f"{folder}/{number}.png" for folder in "abc" for number in range(8)]
    (root / "labels.txt").write_text("".join(f"{name}\t{int(name[2]) % 2}\n" for name in names))
    images = read_image_sets(config, str(root / "data/train"), labels=str(root / "labels.txt"))
    assert images["train"].class_names == ["0", "1"]
    assert len(images["train"]) + len(images["val"]) == 24
    for index in range(len(images["val"])):
        assert images["val"].labels[index] == int(images["val"].path(index)[-5]) % 2
    assert set(read_image_sets(config, str(root / "data/train"), class_level=0)) == {"val", "view"}
    shutil.move(root / "data/train", root / "years/2020")
    shutil.copytree(root / "years/2020", root / "years/2021")
    years, kinds = (read_image_sets(config, str(root / "years"), class_level=level) for level in (None, 2))
    assert (years["train"].class_names, kinds["train"].class_names) == (["2020", "2021"], ["a", "b", "c"])
    with pytest.raises(ImageSetError, match="--labels, --class-level, --groups and --tiles"):
        read_image_sets(config, class_level=1)


def test_copies_are_on_one_side_of_a_division_and_counted_between_two_sets(config, root, capsys):
    for file in sorted((root / "data/train").glob("*/*.png")):
        shutil.copy(file, file.with_name(f"{file.stem} (1).png"))
    images = read_image_sets(config, str(root / "data/train"))
    contents = {}
    for name, one in images.items():
        contents[name] = {Path(one.path(index)).read_bytes() for index in range(len(one))}
    assert (len(images["train"]), len(images["val"])) == (42, 6)
    assert not contents["train"] & contents["val"]
    shutil.copy(root / "data/train/a/0.png", root / "data/val/b/9.png")
    read_image_sets(config, str(root / "data"))
    assert "1 of 10 `val` images are copies of `train` images" in capsys.readouterr().out


def write_patients(root: Path, side: str = "") -> Path:
    """Two classes of 15 patients with four slices each."""
    for patient in range(30):
        for number in range(4):
            pixels = np.full((8, 8, 3), 8 * patient + number, np.uint8)
            file = root / side / ("ill", "well")[patient % 2] / f"p{patient:02d}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(file), pixels)
    return root


def patients_of(images: ImageSet) -> set[str]:
    return {Path(images.path(index)).parent.name for index in range(len(images))}


def test_a_folder_is_divided_by_whole_groups(config, root, capsys):
    """Whatever says them; a copy of another patient's slice is on one side alone."""
    folder = write_patients(root / "scans")
    names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*.png"))]
    (root / "groups.txt").write_text("".join(f"{name}\tpatient {name[-9:-6]}\n" for name in names))
    for groups in ("2", str(root / "groups.txt")):
        images = read_image_sets(config, str(folder), groups=groups)
        learnt, tested = patients_of(images["train"]), patients_of(images["val"])
        assert not learnt & tested
        assert (len(learnt), len(tested)) == (24, 6)
        assert images["val"].labels.bincount().tolist() == [12, 12]
        assert images["val"].groups.bincount().tolist() == [4] * 6
        assert "30 groups" in capsys.readouterr().out
    assert read_image_sets(config, str(folder))["val"].groups is None
    black = (folder / "ill/p00/0.png").read_bytes()
    for file in folder.glob("*/*/0.png"):
        file.write_bytes(black)
    images = read_image_sets(config, str(folder), groups="2")
    slices = [Path(images[name].path(i)).name for name in ("train", "val") for i in range(len(images[name]))]
    assert slices.count("0.png") == 1


def test_groups_on_both_sides_of_a_given_division_are_refused(config, root):
    write_patients(root / "scans", "train")
    write_patients(root / "scans", "val")
    with pytest.raises(ImageSetError, match="`train` and `val` both have images of 30, such as `p00`"):
        read_image_sets(config, str(root / "scans"), groups="3")
    for name in ("train", "val"):  # as a config says them
        folder = dict(type="mapet_mm.ImageFolder", data_prefix=str(root / "scans" / name), groups=2)
        folder["pipeline"] = PIPELINE
        config.evaluation[name] = dict(dataset=folder)
    with pytest.raises(ImageSetError, match="both have images of 30"):
        read_image_sets(config)
    config.evaluation.val.dataset.groups = 1  # ill and well, which no patient is called
    assert set(read_image_sets(config)) == {"train", "val"}
    with pytest.raises(ImageSetError, match="--groups and --tiles are for images of folders"):
        read_image_sets(config, groups="1")


def test_an_image_beside_the_classes_is_left_out_and_said(config, root, capsys):
    shutil.copy(root / "data/train/a/0.png", root / "data/train/cover.png")
    images = read_image_sets(config, str(root / "data/train"))
    assert len(images["train"]) + len(images["val"]) == 24
    assert "1 outside of them, such as `cover.png`" in capsys.readouterr().out


def test_a_folder_without_classes_is_measured_without_labels_in_all_formats(config, root):
    """Also formats that MMPretrain's datasets pass over unless they are told."""
    for name, new in (("0.png", "0.webp"), ("1.png", "1.TIFF")):
        picture = Image.open(root / "data/train/a" / name)
        picture.save(root / "data/train/a" / new)
        (root / "data/train/a" / name).unlink()
    images = read_image_sets(config, str(root / "data/train/a"))
    assert set(images) == {"val", "view"}
    assert (len(images["val"]), images["val"].labels) == (8, None)
    for index in range(8):
        first, view = (images[name].dataset[index]["inputs"] for name in ("val", "view"))
        assert torch.equal(first.flip(2), view)
    assert len(read_image_sets(config, str(root / "data"))["train"]) == 24


def test_a_pre_training_that_names_no_images_is_measured_on_those_it_trains_on(config, root, monkeypatch):
    """Their list is beside the config, from whatever folder the evaluation is started.

    There may be another list of this name, as in another RUN.
    """
    (root / "images.txt").write_text("a/0.png\nb/1.png\n")
    (root / "data/images.txt").write_text("c/2.png\n")
    listed = dict(type="CustomDataset", data_prefix=str(root / "data/train"), ann_file="images.txt")
    config.evaluation = None
    config.train_dataloader = dict(dataset=dict(listed, with_label=False, pipeline=["none of these"]))
    config.test_dataloader = dict(dataset=dict(pipeline=PIPELINE))
    monkeypatch.chdir(root / "data")
    (images,) = read_image_sets(config).values()
    assert (images.name, len(images), images.labels) == ("val", 2, None)
    assert images.path(1).endswith("data/train/b/1.png")
    assert images.dataset[1]["inputs"].shape == (3, 16, 16)


def test_a_pre_training_on_squares_is_measured_on_their_images(config, root, monkeypatch):
    """Their store, and the list of those that are left out, are beside the config."""
    squares = dict(type="mapet_mm.StoredImages", store="tokens", left_out="held_out.txt", size=SIZE)
    config.evaluation = None
    config.train_dataloader = dict(dataset=squares)
    config.test_dataloader = dict(dataset=dict(pipeline=PIPELINE))
    make_store(root, ["a.png", "b.png", "c.png"])
    store_images(SquareLoader.from_config(squares_config(stored(root, prefix="", square=[LOAD, CROP]))))
    (root / "held_out.txt").write_text("b.png\n")
    monkeypatch.chdir(root / "data")
    (images,) = read_image_sets(config).values()
    assert [images.path(index) for index in range(len(images))] == [
        str(root / "data" / name) for name in ("a.png", "c.png")
    ]


def test_a_list_names_the_classes_of_a_flat_folder(config, root):
    """As ImageNet's `val` comes."""
    for index, file in enumerate(sorted((root / "data/val").glob("*/*.png"))):
        file.rename(root / f"data/val/{index}.png")
    for name in "abc":
        (root / "data/val" / name).rmdir()
    (root / "data/meta").mkdir()
    (root / "data/meta/val.txt").write_text("".join(f"{index}.png {index // 3}\n" for index in range(9)))
    images = read_image_sets(config, str(root / "data"))
    assert images["val"].labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    shutil.rmtree(root / "data/train/b")
    (root / "data/train/b").mkdir()  # a class without images keeps its number
    assert read_image_sets(config, str(root / "data"))["train"].labels.tolist() == [0] * 8 + [2] * 8


def test_a_second_view_is_the_first_with_a_transform(config, root):
    config.evaluation.view = dict(type="RandomFlip", prob=1.0, direction="horizontal")
    images = read_image_sets(config)
    first, view = (images[name].dataset[0]["inputs"] for name in ("val", "view"))
    assert torch.equal(first.flip(2), view)


def test_a_class_that_training_lacks_is_refused():
    train = image_set([0, 1], classes=("a", "b"))
    for name in ("c", "2"):
        test = image_set([0], "other", classes=(name,))
        with pytest.raises(ImageSetError, match=f"no class `{name}` of the `other` images"):
            answers(train, test, 2)
    offered, right = answers(train, image_set([0, 0], "other", classes=("b",)), 2)
    assert (offered.tolist(), right.tolist()) == ([1], [[False, True]] * 2)


def test_images_in_a_tar_file_that_was_replaced_under_its_name_are_others(tmp_path):
    def digest() -> str:
        dataset = dict(type="mapet_mm.TarShards", data_root=str(tmp_path), pipeline=[])
        return ImageSet("val", dict(dataset=dataset)).digest

    def pack(content: bytes) -> None:
        (tmp_path / "image").write_bytes(content)
        with tarfile.open(tmp_path / "0.tar", "w") as file:
            file.add(tmp_path / "image", "1.png")

    pack(b"one")
    first = digest()
    assert digest() == first
    pack(b"two")
    assert digest() != first


def test_names_are_read_once_for_all_models(config, root, monkeypatch):
    """By whatever pipeline: the sets are those that each model alone has."""
    config.evaluation = dict(view=dict(type="RandomFlip", prob=1.0), folder=str(root / "data"))
    config.test_dataloader = dict(dataset=dict(pipeline=PIPELINE))
    cropped = [PIPELINE[0], dict(type="CenterCrop", crop_size=8), PIPELINE[1]]
    other = Config(dict(config, test_dataloader=dict(dataset=dict(pipeline=cropped))))
    alone = {name: read_image_sets(one) for name, one in (("first", config), ("other", other))}
    sets = DeclaredSets(config, Data())
    first = sets.of_model(config)
    monkeypatch.setattr(ImageSet, "_read_names", pytest.fail)
    for model, same in (("first", sets.of_model(config)), ("other", sets.of_model(other))):
        for name in ("train", "val", "view"):
            own = alone[model][name]
            assert same[name] == own
            assert same[name].path(2) == own.path(2)
            assert torch.equal(same[name].labels, own.labels)
            assert torch.equal(same[name][2]["inputs"], own[2]["inputs"])
    assert first["val"] != sets.of_model(other)["val"]
