"""Images of every kind: what tokens are made of is what training sees, or both refuse it in the same way."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from config_building import ROOT, read
from mmengine.registry import DATASETS, TRANSFORMS
from PIL import Image
from torch.utils.data import DataLoader

from mapet_mm import LoadPicture
from mapet_mm.datasets import reading
from mapet_mm.datasets.samplers import PipelineError, SeededDataset, SeededIndex
from mapet_mm.tokenizers.images import NamedImages

IMAGENET = ROOT / "configs/_base_/datasets"


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def make(kind: str, path: Path) -> None:
    """An image file of a kind; its patches differ from each other."""
    levels = cv2.resize(np.random.default_rng(0).integers(0, 256, (32, 28), np.uint8), (280, 320))
    colours = np.stack([levels, np.roll(levels, 7, 1) // 2 + 60, 255 - levels // 2], -1)
    image, alpha = Image.fromarray(colours), np.full((320, 280), 255, np.uint8)
    alpha[:100] = 0
    transparent = Image.fromarray(np.dstack([colours, alpha]))
    animated = dict(save_all=True, append_images=[image.rotate(180)], duration=50)
    if kind.startswith("exif"):
        image.save(path, exif=exif(int(kind[4])))
    elif kind.startswith("animated"):
        image.save(path, **animated)
    elif kind in ("zero.jpg", "text.jpg"):
        path.write_bytes(b"" if kind == "zero.jpg" else b"no image at all")
    elif kind.startswith("cut"):
        image.save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "link.png":
        make("plain.png", path.with_name("target.png"))
        path.symlink_to("target.png")
    elif kind == "circle.png":
        path.symlink_to("circle.png")
    else:
        kinds = {
            "cmyk.jpg": image.convert("CMYK"),
            "grey.png": Image.fromarray(levels),
            "bits.png": Image.fromarray(levels > 100),
            "grey_alpha.png": Image.fromarray(np.dstack([levels, alpha])),
            "alpha.png": transparent,
            "palette.png": image.quantize(64),
            "palette_alpha.png": transparent.quantize(64),
            "lab.tif": image.convert("LAB"),
            "one.png": Image.new("RGB", (1, 1), (9, 8, 7)),
            "line.png": Image.new("RGB", (1, 300), (9, 8, 7)),
            "long.png": Image.new("RGB", (20_000, 30), (9, 8, 7)),
            "huge.png": Image.new("L", (20_000, 20_000)) if kind == "huge.png" else None,
        }
        kinds.get(kind, image).save(path)


READABLE = [*(f"exif{number}.jpg" for number in range(1, 9)), "exif6.png", "exif6.webp"]
READABLE += ["cmyk.jpg", "grey.png", "bits.png", "grey_alpha.png"]
READABLE += ["alpha.png", "palette.png", "palette_alpha.png", "animated.png", "animated.webp"]
READABLE += ["animated.gif"] * (tuple(map(int, cv2.__version__.split(".")[:2])) >= (4, 12))
READABLE += ["lab.tif", "link.png", "a name with spaces.png", "new\nline.png", "üñí 日本 \U0001f600.png"]
READABLE += ["one.png", "line.png", "long.png", pytest.param("huge.png", marks=pytest.mark.slow)]
UNREADABLE = ["zero.jpg", "text.jpg", "cut.jpg", "cut.png", "circle.png"]


def tokenized(path: Path):
    """What a tokenizer of ImageNet is given of an image: pixels, or why there are none."""
    cfg = read(IMAGENET / "imagenet_images.py")
    square = read(IMAGENET / "imagenet_tokens.py").load_square[1:]
    config = dict(type="CustomDataset", pipeline=[cfg.load, *square, cfg.pack])
    images = NamedImages(config | _files(path), None)
    return images[0][1]


def trained(path: Path) -> SeededDataset:
    """The training set of ImageNet with one image, without jitter."""
    cfg = read(IMAGENET / "imagenet_tokens.py")
    pipeline = [*cfg.load_square, cfg.pack]
    config = dict(type="mmpretrain.CustomDataset", pipeline=pipeline)
    return SeededDataset(DATASETS.build(config | _files(path)))


def _files(path: Path) -> dict:
    """A dataset of the image and of the good ones beside it, by a list, which takes no newline."""
    if "\n" in path.name:
        return dict(data_prefix=path.parent.name, data_root=str(path.parents[1]), with_label=False)
    others = sorted(one.name for one in path.parent.glob("good_*.png"))
    path.with_name("list.txt").write_text("".join(f"{one} 0\n" for one in [path.name, *others]))
    return dict(data_prefix="", data_root=str(path.parent), ann_file="list.txt")


@pytest.mark.parametrize("kind", READABLE)
def test_tokens_and_training_see_the_same_patches(kind, tmp_path):
    make(kind, tmp_path / kind)
    assert np.array_equal(tokenized(tmp_path / kind), trained(tmp_path / kind)[0]["inputs"])


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_refused_by_name_in_both(kind, tmp_path):
    path = tmp_path / kind
    make(kind, path)
    assert isinstance(tokenized(path), str)
    with pytest.raises(PipelineError, match="ignore_empty=True") as raised:
        trained(path)[0]
    assert f"image `{path}`" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_picture_that_does_not_suit_its_options_is_named(tmp_path):
    make("plain.png", tmp_path / "plain.png")
    dataset = trained(tmp_path / "plain.png")
    dataset.pipeline.transforms[0] = LoadPicture(bands=(1, 2, 3, 4))
    with pytest.raises(PipelineError, match=r"plain\.png`: PictureError: --bands 4: there are bands 1 to 3"):
        dataset[0]


def test_mmcvs_own_option_leaves_unreadable_images_out(tmp_path):
    make("plain.png", tmp_path / "good_0.png")
    make("zero.jpg", tmp_path / "zero.jpg")
    dataset = trained(tmp_path / "zero.jpg")
    dataset.pipeline.transforms[0].ignore_empty = True
    assert dataset[SeededIndex(0, 5)]["data_samples"].img_path == str(tmp_path / "good_0.png")


def test_a_file_that_vanishes_or_is_cut_in_mid_run_is_named_from_its_worker(tmp_path):
    make("plain.png", tmp_path / "there.png")
    dataset = trained(tmp_path / "there.png")
    assert dataset[0]["inputs"].shape == (3, 224, 224)
    make("cut.png", tmp_path / "there.png")
    with pytest.raises(PipelineError, match=r"there\.png`"):
        dataset[0]
    os.remove(tmp_path / "there.png")
    with pytest.raises(PipelineError, match=r"there\.png`: FileNotFoundError"):
        next(iter(DataLoader(dataset, 1, num_workers=1, collate_fn=list)))


class Hiccup:
    """A step at which the storage gives errors, a number of times."""

    def __init__(self, errors: int) -> None:
        self.errors = errors

    def __call__(self, results: dict) -> dict:
        if self.errors:
            self.errors -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return results


def test_an_error_of_the_storage_is_tried_again_with_the_same_draws_after_a_while(tmp_path, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(reading, "time", SimpleNamespace(sleep=waits.append))
    make("plain.png", tmp_path / "plain.png")
    dataset = trained(tmp_path / "plain.png")
    jitter = TRANSFORMS.build(dict(type="ColorJitter", brightness=0.4))
    dataset.pipeline.transforms.insert(2, jitter)
    expected = dataset[SeededIndex(0, 5)]
    dataset.pipeline.transforms.insert(3, Hiccup(errors=3))
    assert torch.equal(dataset[SeededIndex(0, 5)]["inputs"], expected["inputs"])
    assert waits == [0.5, 2.0, 8.0]
    dataset.pipeline.transforms[3] = Hiccup(errors=4)
    message = r"plain\.png` cannot be read .*Input/output error.*look at the storage.*continues$"
    with pytest.raises(PipelineError, match=message):
        dataset[SeededIndex(0, 5)]


def test_a_mistake_in_the_pipeline_names_the_image_too(tmp_path):
    make("plain.png", tmp_path / "plain.png")
    dataset = trained(tmp_path / "plain.png")
    dataset.pipeline.transforms.insert(1, lambda results: results["no such entry"])
    with pytest.raises(PipelineError, match=r"plain\.png`: KeyError: 'no such entry'") as raised:
        dataset[0]
    assert isinstance(raised.value.__cause__, KeyError)
