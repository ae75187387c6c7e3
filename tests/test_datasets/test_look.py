"""What is said of a folder's images before anything is computed, and how their pipelines follow."""

from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import DefaultScope
from pictures import dicom
from PIL import Image

from mapet_mm.datasets.look import (
    Look,
    as_in_training,
    look,
    measured_statistics,
    picture_pipeline,
    size_words,
)
from mapet_mm.datasets.pictures import PictureError, Reading

RESIZE = dict(type="ResizeEdge", scale=8, edge="short", backend="pillow", interpolation="bicubic")
STEPS = [
    dict(type="LoadImageFromFile"),
    RESIZE,
    dict(type="CenterCrop", crop_size=8),
    dict(type="PackInputs"),
]


def tiffs(folder: Path, count: int = 4, bands: int = 4) -> list[str]:
    """Pictures of 16 bits, the values of whose bands begin at 0, 1,000, 2,000, ..."""
    tifffile = pytest.importorskip("tifffile")
    random = np.random.default_rng(0)
    paths = [folder / f"{number}.tif" for number in range(count)]
    for path in paths:
        values = random.integers(0, 1001, (20, 24, bands)) + 1000 * np.arange(bands)
        values[0, :2] = np.array([[0], [1000]]) + 1000 * np.arange(bands)
        tifffile.imwrite(path, values.astype(np.uint16), photometric="minisblack", planarconfig="contig")
    return [str(path) for path in paths]


def test_of_photographs_near_the_networks_size_nothing_is_said(tmp_path):
    Image.new("RGB", (500, 375)).save(tmp_path / "a.jpg")
    found = look([str(tmp_path / "a.jpg")])
    assert found == Look(dict(type="LoadImageFromFile"), 3, [(500, 375)], [])
    assert size_words(found.sizes, 224) == []
    (tmp_path / "broken.jpg").write_bytes(b"broken")
    assert look([str(tmp_path / "broken.jpg")]).sizes == []


@pytest.mark.parametrize(
    ("size", "side", "words"),
    [
        (
            (4000, 3000),
            224,
            "4,000 x 3,000 px (median); the square of 224 px keeps 75% of it and shrinks it 13 times",
        ),
        ((10000, 2000), 224, "keeps 20% of it and shrinks it 8.9 times"),
        (
            (32, 32),
            224,
            "keeps 100% of it and enlarges it 7 times, at 49 times the pixels of --image-size 32",
        ),
        ((32, 32), 32, ""),
    ],
)
def test_what_the_square_keeps_and_how_it_is_scaled_is_said(size, side, words):
    assert words in " ".join(size_words([size] * 3, side))


def test_percentiles_become_numbers_for_each_band(tmp_path):
    found = look(tiffs(tmp_path), Reading(("0%", "100%"), bands=(1, 3)))
    assert found.load["range"] == ((0, 1000), (2000, 3000))
    assert found.load["bands"] == (1, 3)
    assert found.num_bands == 2
    assert "16 bits in 4 of 4" in found.words[0]
    assert found.words[1] == "bands: 1 3 of 4"
    cut = look(tiffs(tmp_path), Reading((0, 500), bands=(1,)))
    assert "become 0 to 255, 50." in cut.words[0] or "become 0 to 255, 49." in cut.words[0]


def test_what_is_not_said_is_refused_with_the_values_that_there_are(tmp_path):
    paths = tiffs(tmp_path)
    with pytest.raises(PictureError, match=r"16 bits.*4 bands.*--bands 1 2 3 4.*go from 0 to 4,000 in 4"):
        look(paths)
    with pytest.raises(PictureError, match="4 bands"):
        look(paths, Reading((0, 4000)))
    with pytest.raises(PictureError, match="--bands 5: there are bands 1 to 4"):
        look(paths, Reading((0, 4000), (1, 5)))
    with pytest.raises(PictureError, match="--page 1: there are pages 0 to 0"):
        look(paths, Reading((0, 4000), (1, 2), page=1))


def test_pages_of_one_band_are_bands_if_several_are_asked_for(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    pages = np.arange(5, dtype=np.uint8)[:, None, None] + np.zeros((5, 20, 24), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", pages, photometric="minisblack")
    paths = [str(tmp_path / "a.tif")]
    with pytest.raises(
        PictureError, match=r"5 pages.*--page N, from 0; or, if they are bands, --bands 1 2 3 4 5"
    ):
        look(paths)
    as_bands = look(paths, Reading(bands=(5, 1)))
    assert as_bands.load == dict(type="mapet_mm.LoadPicture", bands=(5, 1), page=None)
    assert as_bands.words == ["pages: 5, the pages are bands", "bands: 5 1 of 5"]
    assert look(paths, Reading(page=2)).load == dict(type="mapet_mm.LoadPicture", page=2)


def test_dicom_files_are_read_by_their_own_windows_unless_a_range_is_given(tmp_path):
    values = np.arange(480, dtype=np.int16).reshape(20, 24)
    paths = [str(dicom(tmp_path / "a.dcm", values, WindowCenter=100, WindowWidth=50))]
    own = look(paths)
    assert own.load == dict(type="mapet_mm.LoadPicture")
    assert "each DICOM file's own window" in own.words[0]
    assert look(paths, Reading((0, 400))).load["range"] == (0, 400)
    dicom(tmp_path / "a.dcm", values)
    with pytest.raises(PictureError, match="--range LOW HIGH"):
        look(paths)


def test_a_teacher_sees_three_bands_with_their_own_ranges():
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    load = dict(type="mapet_mm.LoadPicture", bands=(1, 2, 4, 8), range=pairs)
    four = Look(load, 4, [], [])
    assert four.rendition() == dict(load, bands=[1, 2, 4], range=pairs[:3])
    assert four.rendition((8, 2, 1)) == dict(load, bands=[8, 2, 1], range=((6, 7), (2, 3), (0, 1)))
    with pytest.raises(PictureError, match="--teacher-bands 3"):
        four.rendition((3, 2, 1))
    one = Look(dict(load, bands=(2,), range=(0, 9)), 1, [], [])
    assert one.rendition() == dict(load, bands=[2, 2, 2], range=(0, 9))
    rgb = Look(dict(type="LoadImageFromFile"), 3, [], [])
    assert rgb.rendition() == dict(type="LoadImageFromFile")


def test_pictures_of_other_bands_are_resized_band_by_band_and_measured(tmp_path):
    paths = tiffs(tmp_path)
    load = dict(type="mapet_mm.LoadPicture", range=(0, 4000), bands=[1, 2, 3, 4])
    steps = picture_pipeline(STEPS, load, num_bands=4)
    assert [step["type"] for step in steps[:2]] == ["mapet_mm.LoadPicture", "mapet_mm.EachBand"]
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        pipeline = Compose(steps)
    squares = np.stack([pipeline(dict(img_path=path))["inputs"].numpy() for path in paths])
    assert squares.shape == (4, 4, 8, 8)
    mean, std = measured_statistics(steps[:-1], paths)
    np.testing.assert_allclose(mean, squares.mean((0, 2, 3)), atol=0.01)
    np.testing.assert_allclose(std, squares.std((0, 2, 3)), atol=0.01)
    assert picture_pipeline(STEPS, dict(type="LoadImageFromFile")) == STEPS


def test_a_test_reads_pictures_as_the_training_does():
    load = dict(type="mapet_mm.LoadPicture", range=(0, 4000), bands=[1, 2])
    for entry in ("square", "pipeline"):
        config = Config(dict(train_dataloader=dict(dataset={"type": "x", entry: [load, RESIZE]})))
        steps = as_in_training(STEPS, config)
        assert steps[0] == load
        assert steps[1]["type"] == "mapet_mm.EachBand"
    assert as_in_training(STEPS, Config(dict(train_dataloader=dict(dataset=dict(pipeline=STEPS))))) == STEPS
    assert as_in_training(STEPS, Config(dict(train_dataloader=None))) == STEPS
