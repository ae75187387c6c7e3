"""Features in the cache: those of the model, computed once; killed and resumed; bad input in one line."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from frozen_features import save, take
from mapet_mm.evaluation.declared_images import read_image_sets
from mapet_mm.evaluation.extraction import _folder
from mmengine.dataset import BaseDataset
from PIL import Image

from mapet_mm.evaluation import extraction
from mapet_mm.evaluation import features as feature_module
from mapet_mm.evaluation.image_sets import ImageSetError
from mapet_mm.evaluation.models import load_checkpoint
from mapet_mm.registry import DATASETS
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.shared_work import SharedTasks


def test_features_are_the_models(config, root):
    """Class token, patch mean and tokens of every layer, of each image in the dataset's order."""
    features = take(config, root / "cache")
    checkpoint = load_checkpoint(config, str(root / "weights.pth"))
    images = read_image_sets(config)["train"]
    assert (len(features), features.layers, features.grid) == (24, ["1", "2", "output"], (4, 4))
    assert features.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    inputs = checkpoint.backbone.normalise([images.dataset[index]["inputs"] for index in range(24)])
    with torch.no_grad():
        tokens = checkpoint.backbone(inputs)
        output = checkpoint.backbone.model.backbone(inputs)[-1]
    for place in range(3):
        close = dict(atol=2e-3, rtol=2e-3)  # float16 on disk
        torch.testing.assert_close(
            features.pooled("class token", place), tokens.class_token[:, place], **close
        )
        torch.testing.assert_close(features.pooled("mean", place), tokens.patches[place].mean(1), **close)
    both = torch.cat([output[:, 0], output[:, 1:].mean(1)], 1)
    torch.testing.assert_close(features.pooled("both"), both, **close)
    ((rows, stored),) = features.blocks("tokens")
    assert (rows, stored.shape) == (slice(0, 24), (24, 16, 16))
    torch.testing.assert_close(stored, output[:, 1:], **close)


@DATASETS.register_module()
class ImagesInMemory(BaseDataset):
    """As CIFAR: the images are in no files of their own."""

    def load_data_list(self) -> list[dict]:
        images = np.random.default_rng(self.metainfo["seed"]).integers(0, 255, (6, 16, 16, 3), np.uint8)
        return [dict(img=image, gt_label=index % 2) for index, image in enumerate(images)]


def test_other_images_in_memory_are_not_taken_for_those_before(config, root):
    """An image without a path is known by what it is."""
    features = []
    for seed in (0, 1, 0):
        config.evaluation.train.dataset = dict(
            type=ImagesInMemory, metainfo=dict(seed=seed), pipeline=[dict(type="PackInputs")]
        )
        features.append(take(config, root / "cache").pooled("mean"))
    assert torch.equal(features[0], features[2])
    assert (features[0] - features[1]).abs().amax() > 0.01
    assert len([*(root / "cache").iterdir()]) == 2
    assert read_image_sets(config)["train"].path(3) == "number 3"


def test_a_killed_run_goes_on_and_gives_the_same(config, root, monkeypatch):
    """What is there is not computed again; claims of the dead hold nobody up."""
    monkeypatch.setattr(feature_module, "BLOCK", 7)  # four blocks
    whole = take(config, root / "whole")
    seen = []
    original = SharedTasks._claim

    def claim_and_die(tasks, task, attempt):
        if len(seen) == 3:  # the first is of the files
            seen.append(original(tasks, task, attempt))
            raise KeyboardInterrupt
        seen.append(original(tasks, task, attempt))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(SharedTasks, "_claim", claim_and_die)
        with pytest.raises(KeyboardInterrupt):
            take(config, root / "killed")
    (folder,) = (root / "killed").glob("train-*")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*.safetensors")}
    assert 0 < len(before) < 8
    killed = take(config, root / "killed")
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert not (folder / "claims").exists()
    for kind in ("pooled", "tokens"):
        for block in range(4):
            assert whole.path(kind, block).read_bytes() == killed.path(kind, block).read_bytes()


def test_another_kind_joins_and_a_complete_cache_is_only_read(config, root):
    first = take(config, root / "cache", ["pooled"])
    stamp = first.path("pooled", 0).stat().st_mtime_ns
    second = take(config, root / "cache")
    assert first.folder == second.folder
    assert second.path("pooled", 0).stat().st_mtime_ns != stamp or second.path("tokens", 0).exists()
    times = {path: path.stat().st_mtime_ns for path in (root / "cache").rglob("*")}
    take(config, root / "cache")
    assert times == {path: path.stat().st_mtime_ns for path in (root / "cache").rglob("*")}


def test_whatever_decides_the_features_gives_them_another_folder(config, root):
    folders = {take(config, root / "cache", ["pooled"]).folder}
    weights = torch.load(root / "weights.pth")["state_dict"]
    weights["backbone.layers.0.ln1.bias"] += 1
    torch.save(weights, root / "weights.pth")
    folders.add(take(config, root / "cache", ["pooled"]).folder)
    config.data_preprocessor.std = [30.0] * 3
    folders.add(take(config, root / "cache", ["pooled"]).folder)
    config.evaluation.train.dataset.pipeline.insert(1, dict(type="Resize", scale=20))
    folders.add(take(config, root / "cache", ["pooled"]).folder)
    cv2.imwrite(str(root / "data/train/a/0.png"), np.zeros((16, 16, 3), np.uint8))
    folders.add(take(config, root / "cache", ["pooled"]).folder)
    (root / "data/train/a/0.png").rename(root / "data/train/b/9.png")
    folders.add(take(config, root / "cache", ["pooled"]).folder)
    assert len(folders) == 6


def test_an_image_edited_in_place_is_another_though_its_size_is_the_same(config, root, monkeypatch):
    """And one that was only copied is not; before, features and results of the old image were shown."""
    path = root / "data/train/a/0.png"
    Image.new("RGB", (16, 16)).save(path, "bmp")
    before = take(config, root / "cache")
    size, time = path.stat().st_size, path.stat().st_mtime_ns
    Image.new("RGB", (16, 16), "red").save(path, "bmp")
    os.utime(path, ns=(time, time + 10**9))
    assert path.stat().st_size == size
    after = take(config, root / "cache")
    assert after.folder != before.folder
    changed = (after.pooled("mean") != before.pooled("mean")).any(1)
    assert changed.nonzero().flatten().tolist() == [0]
    os.utime(path, ns=(time, time + 2 * 10**9))
    with monkeypatch.context() as patch:
        patch.setattr("mapet_mm.evaluation.extraction._fill", None)
        assert take(config, root / "cache").folder == after.folder
        patch.setattr("mapet_mm.evaluation.file_contents.digest_of_file", None)  # nothing is read again
        assert take(config, root / "cache").folder == after.folder
    (memory,) = (root / "cache/files").glob("*/*.npy")
    memory.write_bytes(memory.read_bytes()[:50])  # damaged: all files are read
    assert take(config, root / "cache").folder == after.folder


def test_features_of_the_version_that_knew_files_by_their_sizes_are_taken_over(config, root):
    """Unless a file is younger than the features."""
    new = take(config, root / "cache").folder
    identity = json.loads((new / "meta.json").read_text())
    known = {name: value for name, value in identity.items() if name not in ("model", "contents")}
    old = _folder(root / "cache", "train", known)
    blocks = {path.name: path.read_bytes() for path in new.glob("*/*.safetensors")}
    new.rename(old)
    assert take(config, root / "cache").folder == new
    assert not old.exists()
    assert {path.name: path.read_bytes() for path in new.glob("*/*.safetensors")} == blocks
    new.rename(old)
    later = (old / "pooled/000000.safetensors").stat().st_mtime_ns + 10**9
    os.utime(root / "data/train/c/7.png", ns=(later, later))
    assert take(config, root / "cache").folder == new
    assert old.exists()


def test_a_damaged_block_is_one_line(config, root):
    features = take(config, root / "cache")
    path = features.path("pooled", 0)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Exception, match=r"is damaged or gone .* remove it and run the same command again"):
        features.pooled("mean")


@pytest.mark.parametrize(("factor", "offset"), [(1e6, 0), (1e-9, 0), (1, 1e4)])
def test_features_that_float16_does_not_hold_are_kept_in_float32(config, root, factor, offset):
    """As infinity, as 0, and rounded to multiples of 8."""
    usual = take(config, root / "cache")
    weights = torch.load(root / "weights.pth")["state_dict"]
    weights["backbone.ln1.weight"] *= factor
    weights["backbone.ln1.bias"] += offset
    save(weights, root)
    others = take(config, root / "cache")
    for pooling in ("class token", "mean"):
        found = (others.pooled(pooling) - offset) / factor
        torch.testing.assert_close(found, usual.pooled(pooling), rtol=2e-3, atol=3e-3)
    tokens = [torch.cat([part for _, part in one.blocks("tokens")]) for one in (others, usual)]
    torch.testing.assert_close((tokens[0] - offset) / factor, tokens[1], rtol=2e-3, atol=3e-3)
    assert usual.read("pooled", 0).dtype == usual.read("tokens", 0).dtype == torch.float16


def test_features_that_are_no_numbers_are_one_line(config, root):
    weights = torch.load(root / "weights.pth")["state_dict"]
    weights["backbone.ln1.weight"] *= float("inf")
    save(weights, root)
    with pytest.raises(UserError, match=r"the backbone gives features that are NaN or infinite: its weights"):
        take(config, root / "cache")


def test_images_of_several_sizes_are_one_line(config, root):
    cv2.imwrite(str(root / "data/train/a/1.png"), np.zeros((20, 16, 3), np.uint8))
    with pytest.raises(ImageSetError, match="images of 16 x 16 and 20 x 16 pixels: end it with one size"):
        take(config, root / "cache")


def test_a_random_pipeline_is_one_line(config, root):
    config.evaluation.train.dataset.pipeline.insert(1, dict(type="RandomCrop", crop_size=8))
    with pytest.raises(ImageSetError, match="pipeline of the `train` images draws at random"):
        take(config, root / "cache")


@pytest.mark.parametrize("workers", [0, 1])
def test_all_images_that_cannot_be_read_are_named_in_one_line(config, root, monkeypatch, workers):
    """Before: the first one ended the pass. Nothing is computed behind it: a repair makes other features."""
    monkeypatch.setattr(feature_module, "BLOCK", 7)
    config.evaluation.train.num_workers = workers
    broken = [str(root / "data/train" / name) for name in ("a/0.png", "b/3.png", "b/4.png")]
    for path in broken:
        Path(path).write_bytes(b"no image")
    listed = ", ".join(f"`{path}` (AssertionError: failed to load image: {path})" for path in broken)
    with pytest.raises(ImageSetError) as error:
        take(config, root / "cache")
    assert str(error.value) == (
        f"3 of the `train` images cannot be read: {listed}; repair them, or take them out of the dataset: "
        "none is left out here"
    )
    assert not list((root / "cache").glob("train-*/tokens/*"))


def test_where_no_image_can_be_read_not_all_are_tried(config, root, monkeypatch):
    monkeypatch.setattr(extraction, "TRIED", 12)
    for path in (root / "data/train").glob("*/*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(ImageSetError, match=r"^12 of the `train` images cannot be .* and 2 more; repair"):
        take(config, root / "cache")


def test_no_room_is_said_before_it_is_needed(config, root, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(Exception, match=r"take 0\.0 GB, and .* has 0\.0 GB left: choose another --cache"):
        take(config, root / "cache")
