"""Features of a folder in two files: each row is its image's, in the order of the names."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from config_building import run_tool

from mapet_mm.evaluation.image_sets import images_of_folder
from mapet_mm.evaluation.models import load_model


def test_rows_are_the_features_of_the_named_images(config, root, monkeypatch, capsys):
    """A broken image is left out and named; labels and folders do not matter."""
    (root / "data/train/b/3.png").write_bytes(b"no image")
    words = [root / "data", "--model", root / "config.py", root / "weights.pth", "--cache", root / "cache"]
    run_tool(monkeypatch, "embed.py", *words, "--out", root / "out", "--patches")
    assert "train/b/3.png" in capsys.readouterr().out
    names = (root / "out/names.txt").read_text().splitlines()
    features = np.load(root / "out/features.npy")
    patches = np.load(root / "out/patches.npy")
    assert len(names) == len(features) == len(patches) == 3 * (8 + 3) - 1
    assert "train/b/3.png" not in names
    assert (features.dtype, features.shape[1:], patches.shape[1:]) == (np.float16, (32,), (4, 4, 16))

    model = load_model(str(root / "config.py"), str(root / "weights.pth"))
    images = images_of_folder(model.config, root / "data/val/c")
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


@pytest.mark.parametrize("tool", ["embed.py", "evaluate_features.py"])
def test_a_range_in_percentiles_is_refused(tool, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_tool(monkeypatch, tool, "any", "--range", "1%", "99%")
    assert "`1%` is no number: percentiles are for mapet-mm pretrain" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_folder_that_is_not_there_is_refused(root, monkeypatch):
    with pytest.raises(SystemExit, match="no such folder"):
        run_tool(monkeypatch, "embed.py", root / "nowhere", "--model", "any", "--out", root / "out")
