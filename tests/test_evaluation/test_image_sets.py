"""Image sets: what tells one from another, and class indices that mean the same in both of a pair."""

from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mapet_mm.evaluation.content import content
from mapet_mm.evaluation.declared_images import differs_in_pipeline, read_image_sets
from mmengine.config import Config
from mmengine.dataset import BaseDataset

from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError, check_labels
from mapet_mm.registry import DATASETS

LOAD, PACK = dict(type="LoadImageFromFile"), dict(type="PackInputs")
# Of the version that knew of paths and labels alone.
GOLDEN = "7356fffa7a9f8c3ae05e4e6d1262235816eac2e83a3f021ca51027d2e1ff428d"
FLIP = dict(type="RandomFlip", prob=1.0)


@pytest.fixture
def root(tmp_path) -> Path:
    """Folders `train` and `val` with two images of each class, a, b and c."""
    for split in ("train", "val"):
        for name in "abc":
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(2):
                cv2.imwrite(str(tmp_path / split / name / f"{index}.png"), np.zeros((16, 16, 3), np.uint8))
    return tmp_path


def folder(root: Path, split: str = "val", **options) -> dict:
    return dict(
        type="mmpretrain.CustomDataset",
        data_root=str(root),
        data_prefix=split,
        **{"pipeline": [LOAD, PACK], **options},
    )


def digest(dataset: dict) -> str:
    return ImageSet("val", dict(dataset=dataset)).digest


@DATASETS.register_module()
class SaidImages(BaseDataset):
    """Images of which the config says all that is known."""

    def __init__(self, infos: list, **kwargs) -> None:
        self.infos = infos
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict]:
        return list(self.infos)  # which the base class empties


def said(*infos: dict, pipeline: tuple = (), **kwargs) -> dict:
    return dict(type=SaidImages, infos=list(infos), pipeline=list(pipeline), **kwargs)


def test_the_digest_of_paths_and_labels_is_that_of_stored_features():
    """Features of ImageNet stay where they are; computed by the version before there were other fields."""
    infos = [dict(img_path="a/0.png", gt_label=0), dict(img_path="b/1.png", gt_label=1)]
    pipeline = [dict(type="mmpretrain.PackInputs")]
    assert digest(said(*infos, pipeline=pipeline)) == GOLDEN
    named = said(*infos, pipeline=pipeline, metainfo=dict(classes=["a", "b"]))
    assert digest(named) == GOLDEN  # class names decide nothing there


WRAPPERS = {
    "repeated": lambda inner: dict(type="RepeatDataset", times=1, dataset=inner),
    "joined": lambda inner: dict(type="ConcatDataset", datasets=[dict(inner), inner]),
    "a fold": lambda inner: dict(type="mmpretrain.KFoldDataset", dataset=inner, num_splits=3),
    "balanced": lambda inner: dict(type="ClassBalancedDataset", oversample_thr=1e-3, dataset=inner),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_another_pipeline_within_a_wrapper_is_another_image_set(root, wrapper):
    wrap, flipped = WRAPPERS[wrapper], folder(root, pipeline=[LOAD, FLIP, PACK])
    assert digest(wrap(folder(root))) != digest(wrap(flipped))
    assert digest(wrap(folder(root))) == digest(wrap(folder(root)))


def test_joined_sets_know_which_pipeline_an_image_goes_through():
    a, b, c = (dict(img_path=name, gt_label=0) for name in "abc")
    first, second = [dict(type="mmpretrain.PackInputs")], [FLIP, dict(type="mmpretrain.PackInputs")]

    def joined(*parts: list) -> str:
        datasets = [said(*infos, pipeline=steps) for infos, steps in zip(parts, (first, second), strict=True)]
        return digest(dict(type="ConcatDataset", datasets=datasets))

    assert joined([a, b], [c]) != joined([a], [b, c])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (dict(box=[0, 0, 16, 16]), dict(box=[16, 16, 32, 32])),
        (dict(box=np.zeros(4)), dict(box=np.ones(4))),
        (dict(box=torch.zeros(4)), dict(box=torch.ones(4))),
        (dict(instances=[dict(bbox=[0, 1, 2, 3])]), dict(instances=[])),
        (dict(flip=False), dict(flip=None)),
        (dict(gt_label=[0, 1]), dict(gt_label=[1, 0])),
        (dict(gt_label=np.arange(2000)), dict(gt_label=np.arange(2000) + (np.arange(2000) == 1000))),
    ],
)
def test_whatever_a_dataset_says_of_an_image_tells_it_from_others(before, after):
    """A custom transform may crop by it; arrays count by what they hold."""
    one, other = (said(dict(img_path="a.png", **fields)) for fields in (before, after))
    assert digest(one) != digest(other)
    assert digest(one) == digest(said(dict(img_path="a.png", **before)))


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def test_the_digest_of_a_content_is_the_same_in_every_process():
    """Whichever strings are one object, and in whatever order a set gives its members."""
    name = "".join(["b", "ox"])
    value = {name: np.arange(3, dtype="<i8"), "names": {"c", "a", "b"}, "twice": (name, "box"), 3: b"x"}
    value |= {"tensor": torch.ones(2, 0), "path": Path("a/b"), "none": None, "float": np.float32(0.5)}
    assert content(value) == "e680a036463c2f85dbeaaa042bbe069f196ddd041cb518b270f89b54396b01c5"
    assert content(dict(a=1, b=[2])) == content(dict(b=(2,), a=1))
    assert content(Point(1)) == content(Point(1)) != content(Point(2))
    values = [1, True, 1.0, "1", b"1", None, np.int64(1), np.int32(1), torch.tensor(1), [1], [[1]], {1}]
    values += [[1, 12], [11, 2], np.zeros((2, 3)), np.zeros((3, 2)), torch.ones(2).bfloat16(), torch.ones(2)]
    values += [np.array([None, 1]), np.array([None, 2]), Point, Path, {"a": {"b": 1}}, {"b": {"a": 1}}]
    assert len({content(value) for value in values}) == len(values)


def test_what_cannot_be_compared_is_one_line():
    dataset = said(dict(img_path="a.png", gt_label=0), serialize_data=False)
    images = ImageSet("val", dict(dataset=dataset))
    images.dataset.get_data_info = lambda index: dict(img_path="a.png", lines=(line for line in "ab"))
    message = (
        "`val` images: what the dataset says of `a.png` cannot be compared (cannot pickle 'generator' "
        "object): let it give plain values, arrays or tensors"
    )
    with pytest.raises(ImageSetError) as error:
        images.digest  # noqa: B018
    assert str(error.value) == message


def dense(root: Path, **options) -> dict:
    known = dict(type="mmseg.BaseSegDataset", data_root=str(root), img_suffix=".png", pipeline=[LOAD])
    known["data_prefix"] = dict(img_path="images", seg_map_path="annotations")
    return known | dict(metainfo=dict(classes=("a", "b", "c"))) | options


def test_class_names_and_reduce_zero_label_and_label_maps_tell_dense_sets_apart(root):
    """The results name the classes, so those of other names are not shown."""
    (root / "images").mkdir()
    cv2.imwrite(str(root / "images/0.png"), np.zeros((16, 16, 3), np.uint8))
    ade = dict(type="mmseg.ADE20KDataset", metainfo=dict(classes=("wall", "door")))
    sets = [
        dense(root),
        dense(root, metainfo=dict(classes=("a", "b", "C"))),
        dense(root, reduce_zero_label=True),
        dense(root, metainfo=dict(classes=("a", "b", "c"), palette=[[0, 0, 0], [1, 1, 1], [2, 2, 2]])),
        dense(root, **ade),
        dense(root, **ade | dict(metainfo=dict(classes=("door", "wall")))),
    ]
    assert len({digest(one) for one in sets}) == len(sets)
    assert digest(dense(root)) == digest(dense(root))


def names(root: Path, train: dict, val: dict) -> None:
    sets = {name: ImageSet(name, dict(dataset=one)) for name, one in (("train", train), ("val", val))}
    assert check_labels(sets["train"], sets["val"]) == 3


def test_a_class_index_means_the_same_class_in_both_sets(root):
    """k-NN of `val` without the folder b would take its class c for train's b."""
    names(root, folder(root, "train"), folder(root, "val"))
    names(root, folder(root, "train"), folder(root, "val") | dict(metainfo=dict(classes=["a", "b", "c"])))
    (root / "val/b").rename(root / "val/z")
    with pytest.raises(ImageSetError) as error:
        names(root, folder(root, "train"), folder(root, "val"))
    assert str(error.value) == (
        "class 1 is `b` in the `train` images and `c` in the `val` images: add the class folder that is "
        "missing, or give both sets the same `metainfo=dict(classes=[...])`"
    )


def test_classes_that_only_one_set_names_and_last_ones_that_it_lacks_are_no_difference(root):
    (root / "val/c").rename(root / "gone")
    names(root, folder(root, "train"), folder(root, "val"))  # 0 and 1 mean the same
    (root / "val.txt").write_text("a/0.png 0\nb/0.png 2\n")
    names(root, folder(root, "train"), folder(root, "val", ann_file="val.txt"))


def test_a_dense_pair_names_its_classes_alike(root):
    """The protocols read the names of one set only, and take the other's indices for the same."""
    (root / "images").mkdir()
    cv2.imwrite(str(root / "images/0.png"), np.zeros((16, 16, 3), np.uint8))
    sets = dict(dense_train=dict(dataset=dense(root)), dense_val=dict(dataset=dense(root)))
    assert [*read_image_sets(Config(dict(evaluation=sets)))] == ["dense_train", "dense_val"]
    sets["dense_val"] = dict(dataset=dense(root, metainfo=dict(classes=("a", "c", "b"))))
    with pytest.raises(ImageSetError, match=r"class 1 is `b` in the `dense_train` images and `c` in the"):
        read_image_sets(Config(dict(evaluation=sets)))


def test_pipelines_differ_by_what_they_do_to_pixels(root):
    """Not by the names of classes, by stored tokens, or by what is packed."""
    used = dict(train=dict(dataset=folder(root, "train")), val=dict(dataset=folder(root)))
    images = read_image_sets(Config(dict(evaluation=used)))

    def differing(*steps: dict, key: str = "evaluation") -> str | None:
        val = dict(dataset=folder(root, pipeline=list(steps)))
        other = dict(val=val) if key == "evaluation" else val
        return differs_in_pipeline(Config({key: other}), images)

    tokens = dict(type="mapet_mm.LoadTokenGrid", store="nowhere")
    assert differing(LOAD, dict(type="Resize", scale=32), PACK) == "val"
    assert differing(LOAD, dict(type="Resize", scale=32), PACK, key="test_dataloader") == "val"
    assert differing(dict(type="mmpretrain.LoadImageFromFile"), PACK, key="test_dataloader") is None
    assert differing(LOAD, tokens, dict(PACK, algorithm_keys=["token_grid"])) is None
    assert differs_in_pipeline(Config(dict(model=dict())), images) is None


def test_an_image_marked_as_without_label_is_refused():
    """By -1, as of STL-10's: it had been a class of its own, or an index beyond all classes."""
    sets = {
        name: SimpleNamespace(name=name, labels=torch.tensor(labels), class_names=None)
        for name, labels in (("train", [0, -1, 1, -1]), ("val", [0, 1]))
    }
    with pytest.raises(ImageSetError, match=r"2 of the `train` images have the label -1: leave images"):
        check_labels(sets["train"], sets["val"])
    with pytest.raises(ImageSetError, match=r"2 of the `train` images have the label -1"):
        check_labels(sets["val"], sets["train"])


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([[3], [0, 1]], None),  # as VOC says them
        ([[3], [1]], [3, 1]),
        ([np.array([3]), torch.tensor(1)], [3, 1]),
        ([3, None], None),
        ([[], [1]], None),
    ],
)
def test_lists_of_classes_are_labels_where_each_has_one(labels, classes):
    infos = [dict(img_path=f"{index}.png", gt_label=label) for index, label in enumerate(labels)]
    images = ImageSet("val", dict(dataset=said(*infos, serialize_data=False)))
    assert (None if images.labels is None else images.labels.tolist()) == classes
    assert len(images.digest) == 64
