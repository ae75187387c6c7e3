"""Fashion-MNIST's files: read in every form they come in, refused when broken, written balanced and whole."""

import gzip
import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mapet_mm.datasets import fashion_mnist
from mapet_mm.datasets.fashion_mnist import (
    CLASSES,
    FILES,
    GarmentsOptions,
    SourceError,
    find_source,
    read_garments,
    write_garments,
)
from mapet_mm.datasets.fashion_mnist_scenes import (
    GarmentScenesOptions,
    write_garment_scenes,
    write_unlabelled_scenes,
)

ROOT = Path(__file__).parents[2]
COUNTS = {"train": 60, "val": 30}
SCENES = GarmentScenesOptions(image_size=48, training=12, validation=6)


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.astype(np.uint8).tobytes()


def garment(rng: np.random.Generator) -> np.ndarray:
    """A light rectangle on black, with specks around it."""
    image = rng.integers(0, 10, (28, 28))
    top, left, height, width = rng.integers([2, 2, 10, 10], [6, 6, 20, 20])
    image[top : top + height, left : left + width] = rng.integers(100, 255, (height, width))
    return image


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    """The four files of a small Fashion-MNIST, by name."""
    rng = np.random.default_rng(0)
    made = {}
    for part, count in COUNTS.items():
        arrays = np.stack([garment(rng) for _ in range(count)]), rng.permutation(np.arange(count) % 10)
        made |= {name: idx(array) for name, array in zip(FILES[part], arrays, strict=True)}
    return made


@pytest.fixture
def source(contents, tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, content in contents.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


def read_list(path: Path) -> list[tuple[str, int]]:
    return [(name, int(label)) for name, label in map(str.split, path.read_text().splitlines())]


@pytest.mark.parametrize("form", ["{}.gz", "{}", "dotted", "plain in .gz", "FashionMNIST/raw/{}"])
def test_the_files_are_found_and_read_in_every_form(form, contents, source, tmp_path):
    """Debian's and the publisher's, unpacked, another site's name, unpacked by a browser, torchvision's."""
    expected = read_garments(source)
    for name, content in contents.items():
        path = (
            tmp_path
            / "other"
            / {"dotted": "{}.gz", "plain in .gz": "{}.gz"}.get(form, form).format(
                name.replace("-idx", ".idx") if form == "dotted" else name
            )
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if form in ("{}.gz", "dotted") else content)
    read = read_garments(find_source(tmp_path / "other"))
    assert read.digest == expected.digest
    assert (read.train.images.shape, read.val.labels.shape) == ((60, 28, 28), (30,))
    assert Counter(read.train.labels.tolist()) == dict.fromkeys(range(10), 6)


def test_without_a_folder_debians_package_comes_first_and_torchvisions_next(source, tmp_path, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "PACKAGE_FOLDER", source)
    assert find_source() == source
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    raw.parent.mkdir(parents=True)
    raw.symlink_to(source)
    monkeypatch.setattr(fashion_mnist, "PACKAGE_FOLDER", tmp_path / "none")
    assert find_source(download=tmp_path / "data") == raw
    with pytest.raises(
        SourceError, match=r"there are no IDX files .* package dataset-.*--source.*--download"
    ):
        find_source(download=tmp_path)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda content: content[:-1], r"truncated or damaged: 29 bytes of data, its head says 30: fetch"),
        (lambda content: content[:6], r"is no IDX file of bytes in 1 dimensions \(it starts with 00000801\)"),
        (lambda content: b"", "is no IDX file of bytes"),
        (lambda content: b"<html>" + content, r"starts with 3c68746d\): fetch it again"),
        (lambda content: gzip.compress(content)[:-9], "truncated or damaged .*: fetch it again"),
        (lambda content: gzip.compress(content)[:12] + b"\xff" * 20, "truncated or damaged"),
        (lambda content: idx(np.full(30, 10)), "with labels up to 10, that is not Fashion-MNIST"),
        (lambda content: idx(np.zeros(7)), r"\(30, 28, 28\) and t10k-labels-idx1-ubyte \(7,\)"),
    ],
)
def test_a_broken_file_is_one_line_with_its_name(broken, message, contents, source):
    name = FILES["val"][1]
    (source / f"{name}.gz").write_bytes(broken(contents[name]))
    with pytest.raises(SourceError, match=message) as error:
        read_garments(source)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_line_with_what_to_do(source):
    (source / f"{FILES['train'][0]}.gz").unlink()
    with pytest.raises(SourceError, match=r"has no IDX files .*train-images-idx3-ubyte.*--source"):
        find_source(source)
    with pytest.raises(SourceError, match=r"`.*train-images-idx3-ubyte` does not exist"):
        read_garments(source)


def test_lists_are_balanced_and_each_is_in_the_longer_ones(source, tmp_path):
    garments = read_garments(source)
    out = tmp_path / "garments"
    assert write_garments(out, garments, GarmentsOptions(lists=(10, 30)))
    lists = {path.stem: read_list(path) for path in (out / "meta").iterdir()}
    assert {name: len(items) for name, items in lists.items()} == {
        "train": 60,
        "val": 30,
        "train_10": 10,
        "train_30": 30,
    }
    assert set(lists["train_10"]) < set(lists["train_30"]) < set(lists["train"])
    assert Counter(label for _, label in lists["train_30"]) == dict.fromkeys(range(10), 3)
    for part in ("train", "val"):
        images, labels = getattr(garments, part)
        assert {name for name, _ in lists[part]} == {
            path.relative_to(out / part).as_posix() for path in (out / part).rglob("*.png")
        }
        for name, label in lists[part]:
            row = int(Path(name).stem)
            assert name.split("/")[0] == f"{label}_{CLASSES[label].replace(' ', '-')}"
            assert label == labels[row]
            np.testing.assert_array_equal(np.asarray(Image.open(out / part / name)), images[row])
    assert not write_garments(out, garments, GarmentsOptions(lists=(10, 30)))
    with pytest.raises(FileExistsError, match=r"lists \[10, 30\] -> \[10\].*--overwrite"):
        write_garments(out, garments, GarmentsOptions(lists=(10,)))
    other = garments._replace(val=garments.val._replace(images=255 - garments.val.images))
    with pytest.raises(FileExistsError, match=r"written with other options .source"):
        write_garments(out, other, GarmentsOptions(lists=(10, 30)))
    with pytest.raises(ValueError, match="a list of 70 needs 7 garments of every class, there are 6"):
        write_garments(tmp_path / "more", garments, GarmentsOptions(lists=(70,)))
    with pytest.raises(ValueError, match="a list of 15 cannot have as many of each of 10"):
        GarmentsOptions(lists=(15,))


def test_scenes_are_labelled_where_the_garments_are(source, tmp_path):
    garments = read_garments(source)
    assert write_garment_scenes(tmp_path / "scenes", garments, SCENES)
    for part, own in (("training", garments.train), ("validation", garments.val)):
        seen = 0
        for line in (tmp_path / "scenes" / "meta" / f"{part}.jsonl").read_text().splitlines():
            scene = json.loads(line)
            image, label = (
                np.asarray(Image.open(tmp_path / "scenes" / kind / part / scene["name"]))
                for kind in ("images", "annotations")
            )
            assert image.shape == (48, 48, 3)
            expected = np.zeros((48, 48))
            for one in scene["garments"]:
                row, (left, top, side) = one["row"] - (60 if part == "validation" else 0), one["box"]
                assert own.labels[row] == one["garment"]
                covered = Image.fromarray(255 * (own.images[row] >= 16).astype(np.uint8))
                covered = np.asarray(covered.resize((side, side), Image.Resampling.BICUBIC)) >= 128
                expected[top : top + side, left : left + side][covered] = one["garment"] + 1
            np.testing.assert_array_equal(label, expected)
            seen += 1
        assert seen == getattr(SCENES, part)


def test_unlabelled_scenes_are_named_and_are_other_ones(source, tmp_path):
    garments = read_garments(source)
    options = GarmentScenesOptions(image_size=48, training=4, validation=2, seed=1)
    write_unlabelled_scenes(tmp_path / "unlabelled", garments, options)
    assert (tmp_path / "unlabelled" / "meta" / "train.txt").read_text().splitlines() == [
        f"{index:05d}.png" for index in range(4)
    ]
    write_garment_scenes(tmp_path / "scenes", garments, SCENES)
    scenes = [np.asarray(Image.open(path)) for path in (tmp_path / "scenes" / "images").rglob("*.png")]
    others = [np.asarray(Image.open(path)) for path in (tmp_path / "unlabelled").rglob("*.png")]
    assert (len(scenes), len(others)) == (18, 6)
    assert not any(np.array_equal(one, other) for one in scenes for other in others)


def test_an_interrupted_run_leaves_nothing_half(source, tmp_path, monkeypatch):
    saved, save = [], Image.Image.save

    def interrupted(image, path, **options):
        if len(saved) == 40:
            raise KeyboardInterrupt
        saved.append(path)
        save(image, path, **options)

    monkeypatch.setattr(Image.Image, "save", interrupted)
    arguments = ["--source", str(source), "--out", str(tmp_path / "data"), "--lists", "10"]
    arguments += ["--train-scenes", "2", "--val-scenes", "1", "--unlabelled-scenes", "2"]
    monkeypatch.setattr(sys, "argv", ["fashion_mnist.py", *arguments])
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path(str(ROOT / "tools/dataset_converters/fashion_mnist.py"), run_name="__main__")
    assert list((tmp_path / "data").iterdir()) == []
    monkeypatch.setattr(Image.Image, "save", save)
    runpy.run_path(str(ROOT / "tools/dataset_converters/fashion_mnist.py"), run_name="__main__")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "fashion_mnist",
        "fashion_mnist_scenes",
        "fashion_mnist_scenes_unlabelled",
    ]


def test_torchvision_fetches_both_halves_into_the_folder(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(
        "torchvision.datasets.FashionMNIST",
        lambda root, train, download: fetched.append((root, train, download)),
    )
    fashion_mnist.download_source(tmp_path)
    assert fetched == [(str(tmp_path), True, True), (str(tmp_path), False, True)]
