"""Fashion-MNIST: read from a folder of published files, and written balanced; scenes of it."""

import gzip
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from converters import fashion_mnist, scenes
from converters.fashion_mnist import (
    CLASSES,
    LISTS,
    PACKAGE,
    read_photographs,
    write_photographs,
    write_scenes,
)
from PIL import Image
from toy_data import read_list, read_scenes

FILES = {"train": 60, "t10k": 30}


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.astype(np.uint8).tobytes()


def photograph(rng: np.random.Generator) -> np.ndarray:
    """A light rectangle on black, with specks around it."""
    image = rng.integers(0, 10, (28, 28))
    top, left, height, width = rng.integers([2, 2, 10, 10], [6, 6, 20, 20])
    image[top : top + height, left : left + width] = rng.integers(100, 255, (height, width))
    return image


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The four published files of a small Fashion-MNIST."""
    folder, rng = tmp_path_factory.mktemp("source"), np.random.default_rng(0)
    for name, count in FILES.items():
        images = np.stack([photograph(rng) for _ in range(count)])
        labels = rng.permutation(np.arange(count) % 10)
        for kind, array in (("images-idx3-ubyte.gz", images), ("labels-idx1-ubyte.gz", labels)):
            (folder / f"{name}-{kind}").write_bytes(gzip.compress(idx(array)))
    return folder


@pytest.fixture(scope="module")
def photographs(source):
    return read_photographs(source)


def test_files_that_are_not_there_are_named(photographs, tmp_path):
    assert (photographs.train.images.shape, photographs.val.labels.shape) == ((60, 28, 28), (30,))
    assert Counter(photographs.train.labels.tolist()) == dict.fromkeys(range(10), 6)
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\.gz"):
        read_photographs(tmp_path)


def test_lists_are_balanced_and_those_held_out_are_in_no_other(photographs, tmp_path):
    out, places = tmp_path / "written", {"train_10": [0, 1], "train_30": [0, 3], "held_out": [3, 5]}
    assert write_photographs(out, photographs, places)
    lists = {path.stem: read_list(path) for path in (out / "meta").iterdir()}
    assert {name: len(items) for name, items in lists.items()} == dict(
        train=60, val=30, train_10=10, train_30=30, held_out=20
    )
    assert set(lists["train_10"]) < set(lists["train_30"]) < set(lists["train"])
    assert set(lists["held_out"]) < set(lists["train"]) - set(lists["train_30"])
    assert Counter(label for _, label in lists["train_30"]) == dict.fromkeys(range(10), 3)
    for part in ("train", "val"):
        images, labels = getattr(photographs, part)
        files = {path.relative_to(out / part).as_posix() for path in (out / part).rglob("*.png")}
        assert {name for name, _ in lists[part]} == files
        for name, label in lists[part]:
            row = int(Path(name).stem)
            assert (name.split("/")[0], label) == (f"{label}_{CLASSES[label]}", labels[row])
            np.testing.assert_array_equal(np.asarray(Image.open(out / part / name)), images[row])
    assert not write_photographs(out, photographs, places)
    other = photographs._replace(val=photographs.val._replace(images=255 - photographs.val.images))
    with pytest.raises(FileExistsError, match=r"written with other options .*source"):
        write_photographs(out, other, places)


def test_the_shipped_lists_choose_rates_on_images_that_nothing_trains_on():
    """1 %, 10 % and a third of each class's 6,000, one inside the other, and 500 others."""
    taken = {name: set(range(*places)) for name, places in LISTS.items()}
    held_out = taken.pop("held_out")
    assert {name: len(places) for name, places in taken.items()} == dict(
        train_600=60, train_6000=600, train_20000=2000
    )
    assert taken["train_600"] < taken["train_6000"] < taken["train_20000"]
    assert len(held_out) == 500
    assert not held_out & taken["train_20000"]


@pytest.mark.skipif(not PACKAGE.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_no_published_image_is_there_twice():
    """So images of two lists differ, and none is a validation image."""
    images = np.concatenate([part.images for part in read_photographs()])
    assert len({image.tobytes() for image in images}) == len(images) == 70_000


def test_scenes_are_labelled_where_the_things_are(photographs, tmp_path):
    folder = tmp_path / "scenes"
    assert write_scenes(folder, photographs, 12, 6)
    for part, own, count in (("training", photographs.train, 12), ("validation", photographs.val, 6)):
        made = list(read_scenes(folder, part, "garments"))
        assert len(made) == count
        for image, label, things in made:
            assert image.shape == (64, 64, 3)
            expected = np.zeros((64, 64))
            for one in things:
                row, (left, top, side) = one["row"] - (60 if part == "validation" else 0), one["box"]
                assert own.labels[row] == one["garment"]
                covered = Image.fromarray(255 * (own.images[row] >= 16).astype(np.uint8))
                covered = np.asarray(covered.resize((side, side), Image.Resampling.BICUBIC)) >= 128
                expected[top : top + side, left : left + side][covered] = one["garment"] + 1
            np.testing.assert_array_equal(label, expected)


def test_one_command_writes_the_images_and_two_kinds_of_scenes(source, tmp_path, monkeypatch):
    compose = scenes.compose_scenes
    monkeypatch.setattr(scenes, "compose_scenes", lambda t, p, n, s: compose(t, p, n // 250, s))
    monkeypatch.setattr(sys, "argv", ["fashion_mnist.py", "--source", str(source), "--out", str(tmp_path)])
    fashion_mnist.main()
    names = ["fashion_mnist", "fashion_mnist_scenes", "fashion_mnist_scenes_unlabelled"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    labelled = [np.asarray(Image.open(path)) for path in (tmp_path / names[1] / "images").rglob("*.png")]
    others = [np.asarray(Image.open(path)) for path in (tmp_path / names[2]).rglob("*.png")]
    assert (len(labelled), len(others)) == (8 + 2, 80 + 2)
    assert not any(np.array_equal(one, other) for one in labelled for other in others)
    listed = (tmp_path / names[2] / "meta/train.txt").read_text().splitlines()
    assert listed == [f"{index:05d}.png" for index in range(80)]
