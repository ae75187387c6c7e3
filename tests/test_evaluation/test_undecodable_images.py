"""Images that cannot be decoded are left out of an evaluation by name, as `mapet-mm pretrain` does it."""

import os
import shutil

import numpy as np
import pytest
import torch
from frozen_features import rows_of
from PIL import Image

from mapet_mm.evaluation.checkpoints import load_checkpoint
from mapet_mm.evaluation.extraction import take_features
from mapet_mm.evaluation.image_sets import read_image_sets
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.utils.errors import UserError

BROKEN = {
    "zero": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("<html>404 not found</html>"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "link": lambda path: (path.unlink(), path.symlink_to("/nowhere/1.png")),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_the_others_have_the_features_that_they_have_alone(config, root, capsys, kind):
    whole = root / "data/train"
    shutil.copytree(whole, root / "broken/train")
    BROKEN[kind](root / "broken/train/b/1.png")
    os.remove(whole / "b/1.png")
    checkpoint = load_checkpoint(config, str(root / "weights.pth"))
    alone = read_image_sets(config, str(whole / "b"))["val"]
    with_broken = read_image_sets(config, str(root / "broken/train/b"))["val"]
    expected = take_features(checkpoint, alone, root / "cache")
    found = take_features(checkpoint, with_broken, root / "cache")
    assert (len(found), len(with_broken)) == (7, 7)
    assert torch.equal(found.pooled("both"), expected.pooled("both"))
    assert [with_broken.path(index)[-5:] for index in range(2)] == ["0.png", "2.png"]
    printed = capsys.readouterr().out
    assert "left 1 of 8 `val` images out that could not be decoded" in printed
    assert "broken/train/b/1.png (" in printed
    (line,) = (found.folder / "left_out.txt").read_text().splitlines()
    assert line.startswith(f"{root}/broken/train/b/1.png\t")


def test_what_was_computed_beside_a_broken_image_is_kept(config, root, monkeypatch, capsys):
    """Of blocks of two images, those without a broken one are written once; a second run finds all."""
    monkeypatch.setattr("mapet_mm.evaluation.features.BLOCK", 2)
    for name in ("4.png", "5.png"):  # the third block as a whole
        (root / "data/train/a" / name).write_bytes(b"")
    checkpoint = load_checkpoint(config, str(root / "weights.pth"))
    given = []
    normalise = checkpoint.backbone.normalise
    monkeypatch.setattr(
        checkpoint.backbone, "normalise", lambda images: given.append(len(images)) or normalise(images)
    )
    images = read_image_sets(config, str(root / "data/train/a"))["val"]
    found = take_features(checkpoint, images, root / "cache", ["pooled", "tokens"])
    assert len(found) == 6
    assert sum(given) == 6 + 1  # and the first image, from which sizes are read
    again = read_image_sets(config, str(root / "data/train/a"))["val"]
    assert torch.equal(take_features(checkpoint, again, root / "cache").pooled(), found.pooled())
    assert sum(given) == 6 + 2
    assert capsys.readouterr().out.count("left 2 of 8 `val` images out") == 2


def test_the_share_of_all_image_sets_counts(config, root):
    """One of the three images of a class in `val` is one of 33."""
    checkpoint = load_checkpoint(config, str(root / "weights.pth"))
    (root / "data/val/c/1.png").write_bytes(b"")
    images = read_image_sets(config, str(root / "data"))
    rows = rows_of(checkpoint, images, [NearestNeighbours()], root / "cache")
    assert len(rows) == 3
    assert images["val"].labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    (root / "data/train/a/1.png").write_bytes(b"")
    images = read_image_sets(config, str(root / "data"))
    with pytest.raises(
        UserError, match=r"2 of 33 images could not be decoded, such as `.*a/1\.png`.* than 5%"
    ):
        rows_of(checkpoint, images, [NearestNeighbours()], root / "cache")


def test_a_set_without_an_image_that_can_be_decoded_is_refused(config, root):
    checkpoint = load_checkpoint(config, str(root / "weights.pth"))
    for file in (root / "data/train/a").iterdir():
        file.write_bytes(b"")
    images = read_image_sets(config, str(root / "data/train/a"))["val"]
    with pytest.raises(UserError, match="no image of the `val` images can be decoded"):
        take_features(checkpoint, images, root / "cache")


def test_names_that_are_no_utf_8_are_evaluated(config, root, capsys):
    name = os.path.join(os.fsencode(root), b"data/train/a/caf\xe9.png")
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(os.fsdecode(name))
    os.rename(root / "data/train/b", os.path.join(os.fsencode(root), b"data/train/\xe9t\xe9"))
    checkpoint = load_checkpoint(config, str(root / "weights.pth"))
    images = read_image_sets(config, str(root / "data/train"))
    assert len(images["train"]) + len(images["val"]) == 25
    assert len(rows_of(checkpoint, images, [NearestNeighbours()], root / "cache")) == 3
    assert r"`\udce9t\udce9`" in capsys.readouterr().out
