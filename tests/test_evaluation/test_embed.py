"""Features of a folder in two files: each row is its image's, in the order of the names."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from config_building import run_tool

import mapet_mm
from mapet_mm.evaluation.image_sets import images_of_folder, read_image_sets
from mapet_mm.evaluation.images import Data
from mapet_mm.evaluation.models import load_model
from mapet_mm.utils.errors import UserError


def test_rows_are_the_features_of_the_named_images(config, root, monkeypatch, capsys):
    """A broken image is left out and named, and one of whose name a line break would make two."""
    (root / "data/train/b/3.png").write_bytes(b"no image")
    shutil.copy(root / "data/train/b/1.png", root / "data/train/b/one\ntwo.png")
    words = [root / "data", "--model", root / "config.py", root / "weights.pth", "--cache", root / "cache"]
    run_tool(monkeypatch, "embed.py", *words, "--out", root / "out", "--patches")
    printed = capsys.readouterr().out
    assert "train/b/3.png" in printed
    assert "1 with a line break" in printed
    names = (root / "out/names.txt").read_text().splitlines()
    features = np.load(root / "out/features.npy")
    patches = np.load(root / "out/patches.npy")
    assert len(names) == len(features) == len(patches) == 3 * (8 + 3) - 1
    assert "train/b/3.png" not in names
    assert (features.dtype, features.shape[1:], patches.shape[1:]) == (np.float16, (32,), (4, 4, 16))

    model = load_model(str(root / "config.py"), str(root / "weights.pth"))
    images = images_of_folder(model.config, Data(str(root / "data/val/c")))
    for index in range(3):
        tokens = model.backbone(model.backbone.normalise(images.dataset[index]["inputs"][None]))
        row = names.index(f"val/c/{index}.png")
        close = dict(atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(torch.from_numpy(features[row]).float(), tokens.pooled()[0], **close)
        stored = torch.from_numpy(patches[row]).float().flatten(0, 1)
        torch.testing.assert_close(stored, tokens.patches[-1][0], **close)

    monkeypatch.setattr("mapet_mm.evaluation.extraction.fill", None)  # nothing is computed again
    run_tool(monkeypatch, "embed.py", *words, "--out", root / "again")
    assert (root / "again/features.npy").read_bytes() == (root / "out/features.npy").read_bytes()


@pytest.fixture
def deep(config, root) -> Path:
    """The images in 16 bits, of values 16 times as large."""
    for path in sorted((root / "data").rglob("*.png")):
        copy = root / "deep" / path.relative_to(root / "data")
        copy.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(copy), cv2.imread(str(path)).astype(np.uint16) * 16)
    return root / "deep"


def test_images_of_16_bits_have_the_features_of_8_bits_by_their_range(deep, root, monkeypatch):
    words = ["--model", root / "config.py", root / "weights.pth", "--cache", root / "cache"]
    run_tool(monkeypatch, "embed.py", root / "data", *words, "--out", root / "of 8")
    with pytest.raises(SystemExit, match=r"values of 16 bits.*--range LOW HIGH"):
        run_tool(monkeypatch, "embed.py", deep, *words, "--out", root / "of 16")
    run_tool(monkeypatch, "embed.py", deep, *words, "--out", root / "of 16", "--range", 0, 4080)
    for name in ("features.npy", "names.txt"):
        assert (root / "of 16" / name).read_bytes() == (root / "of 8" / name).read_bytes()


def test_images_of_16_bits_have_the_figures_of_8_bits_by_their_range(deep, root, monkeypatch):
    words = [root / "config.py", root / "weights.pth", "--cache", root / "cache", "--no-random"]
    words += ["--protocols", "NearestNeighbours"]
    figures = {}
    for data, given in ((root / "data", ()), (deep, ("--range", 0, 4080)), (deep, ("--range", 0, 4e6))):
        run_tool(monkeypatch, "evaluate_features.py", *words, "--data", data, "--out", root / "out", *given)
        figures[given] = json.loads((root / "out/results.json").read_text())
    of_8, of_16, of_black = figures.values()
    assert of_16 == of_8
    assert of_black != of_8


def test_percentiles_are_those_of_the_folders_images(deep, root, monkeypatch):
    """Of images that all have the least and the largest value, all values lie between."""
    for path in deep.rglob("*.png"):
        pixels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        pixels[0, :2] = [[0] * 3, [4080] * 3]
        cv2.imwrite(str(path), pixels)
    words = ["--model", root / "config.py", root / "weights.pth", "--cache", root / "cache"]
    for name, given in (("numbers", (0, 4080)), ("percentiles", ("0%", "100%"))):
        run_tool(monkeypatch, "embed.py", deep, *words, "--out", root / name, "--range", *given)
    features = [(root / name / "features.npy").read_bytes() for name in ("numbers", "percentiles")]
    assert features[0] == features[1]
    with pytest.raises(SystemExit, match="percentiles are of the images of a folder"):
        run_tool(monkeypatch, "evaluate_features.py", root / "config.py", "--range", "1%", "99%")
    with pytest.raises(SystemExit, match="or two percentiles"):
        run_tool(monkeypatch, "embed.py", deep, *words, "--out", root / "out", "--range", "1%", 4080)


@pytest.fixture
def pictures(config, root) -> Path:
    """Four images of a class side by side, two in a row: six pictures of 32 pixels, of two of each class."""
    for name in "abc":
        (root / "pictures" / name).mkdir(parents=True)
        images = [cv2.imread(str(root / f"data/train/{name}/{index}.png")) for index in range(8)]
        for number in (0, 4):
            rows = [np.hstack(images[number : number + 2]), np.hstack(images[number + 2 : number + 4])]
            cv2.imwrite(str(root / f"pictures/{name}/{number}.png"), np.vstack(rows))
    return root / "pictures"


def test_each_tile_has_the_features_of_its_part(pictures, root, monkeypatch):
    words = ["--model", root / "config.py", root / "weights.pth", "--cache", root / "cache"]
    run_tool(monkeypatch, "embed.py", root / "data/train", *words, "--out", root / "whole")
    run_tool(monkeypatch, "embed.py", pictures, *words, "--out", root / "tiles", "--tiles", 16)
    names = (root / "tiles/names.txt").read_text().splitlines()
    assert names[:4] == ["a/0.png#0,0", "a/0.png#0,16", "a/0.png#16,0", "a/0.png#16,16"]
    whole, tiles = (np.load(root / name / "features.npy") for name in ("whole", "tiles"))
    assert len(names) == len(tiles) == len(whole) == 24
    for part, index in enumerate((0, 2, 1, 3)):
        np.testing.assert_allclose(tiles[part], whole[index], atol=2e-3)


def test_tiles_of_a_picture_are_on_one_side(pictures, config, root):
    images = read_image_sets(config, str(pictures), tiles=(16, 0))
    files = {
        name: {one.path(index).partition("#")[0] for index in range(len(one))} for name, one in images.items()
    }
    assert not files["train"] & files["val"]
    assert {name: len(one) % 4 for name, one in images.items()} == {"train": 0, "val": 0}
    assert len(images["train"]) + len(images["val"]) == 24
    assert images["val"].groups.bincount().tolist() == [4] * len(files["val"])
    assert images["train"][0]["inputs"].shape == (3, 16, 16)


def test_python_takes_the_same_tiles(pictures, root):
    model = dict(checkpoint=root / "weights.pth", cache=root / "cache", protocols=["NearestNeighbours"])
    rows = mapet_mm.evaluate(root / "config.py", pictures, tiles=16, **model)
    assert [row.setting for row in rows] == ["class token", "mean", "both"]
    assert mapet_mm.evaluate(root / "config.py", pictures, tiles="16,0", **model) == rows
    with pytest.raises(UserError, match="overlap below the side"):
        mapet_mm.evaluate(root / "config.py", pictures, tiles=(16, 16), **model)


def test_a_folder_that_is_not_there_is_refused(root, monkeypatch):
    with pytest.raises(SystemExit, match="no such folder"):
        run_tool(monkeypatch, "embed.py", root / "nowhere", "--model", "any", "--out", root / "out")
