"""Tiles: their corners and names, the same pixels as Pillow's crop, each file decoded once."""

import errno
import os
import shutil
from collections import Counter

import numpy as np
import pytest
from mmengine.dataset import Compose
from PIL import Image

from mapet_mm import LoadPicture
from mapet_mm.datasets import StoredImages, reading, tiles
from mapet_mm.datasets.copies import first_copies
from mapet_mm.datasets.groups import groups_of
from mapet_mm.datasets.pictures import Picture, PictureError, size_of
from mapet_mm.datasets.reading import ImageReader, UndecodableError
from mapet_mm.datasets.tiles import corners, tile_names
from mapet_mm.registry import TRANSFORMS
from mapet_mm.structures import TokenStore
from mapet_mm.structures.image_files import file_digests, file_of
from mapet_mm.tokenizers.squares import SquareLoader, store_images
from mapet_mm.utils.errors import UserError

RANDOM = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path):
    """A scene, one on its side, one that is smaller than a tile, and one of 16 bits."""
    pixels = RANDOM.integers(0, 256, (230, 310, 3), np.uint8)
    lying = Image.Exif()
    lying[274] = 6
    Image.fromarray(pixels).save(tmp_path / "scene.png")
    Image.fromarray(pixels).save(tmp_path / "lying.jpg", exif=lying, quality=95)
    Image.fromarray(pixels[:50, :120]).save(tmp_path / "small.png")
    Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 16).save(tmp_path / "deep.png")
    return tmp_path


CORNERS = [
    ((400, 200, 200, 0), [(0, 0), (200, 0)]),
    ((401, 200, 200, 0), [(0, 0), (200, 0), (201, 0)]),
    ((400, 150, 200, 50), [(0, 0), (150, 0), (200, 0)]),
    ((100, 401, 200, 100), [(0, 0), (0, 100), (0, 200), (0, 201)]),
    ((100, 100, 200, 0), [(0, 0)]),
]


@pytest.mark.parametrize(("layout", "expected"), CORNERS)
def test_tiles_cover_a_picture_and_the_last_one_is_moved_inward(layout, expected):
    assert corners(*layout) == expected


def test_tiles_are_the_pixels_that_pillow_crops(folder, monkeypatch):
    """Each file is decoded once, as its tiles come one after the other; upright, as OpenMMLab reads it."""
    decoded = Counter()
    plain = LoadPicture._whole
    monkeypatch.setattr(LoadPicture, "_whole", lambda self, results: count(decoded, plain, self, results))
    names, largest = tile_names(folder, ["lying.jpg", "scene.png", "small.png"], 100, 20)
    assert Counter(map(file_of, names)) == {"lying.jpg": 12, "scene.png": 12, "small.png": 2}
    assert largest == 230 * 310
    # Of a JPEG, two decoders give two pictures.
    loads = {"jpg": LoadPicture(tile=100, imdecode_backend="pillow"), "png": LoadPicture(tile=100)}
    upright = Image.open(folder / "lying.jpg").transpose(Image.Transpose.ROTATE_270)
    for name in names:
        x, y = map(int, name.partition("#")[2].split(","))
        picture = upright if name.startswith("lying") else Image.open(folder / file_of(name))
        crop = picture.crop((x, y, min(x + 100, picture.width), min(y + 100, picture.height)))
        tile = loads[file_of(name)[-3:]](dict(img_path=str(folder / name)))
        assert np.array_equal(tile["img"][:, :, ::-1], np.asarray(crop))
        assert tile["img_shape"] == tile["ori_shape"] == tile["img"].shape[:2]
    assert set(decoded.values()) == {1}


def count(decoded, plain, load, results):
    decoded[results["img_path"]] += 1
    return plain(load, results)


def test_tiles_are_rows_of_a_store_whose_squares_are_made_file_by_file(folder, monkeypatch):
    decoded = Counter()
    plain = LoadPicture._whole
    monkeypatch.setattr(LoadPicture, "_whole", lambda self, results: count(decoded, plain, self, results))
    names, _ = tile_names(folder, ["lying.jpg", "scene.png", "small.png"], 100)
    store = TokenStore.create(folder / "tokens", names, (2, 2), 8, "digest", data_root=folder)
    store.write(range(len(names)), np.zeros((len(names), 2, 2), int))
    load = dict(type="mapet_mm.LoadPicture", tile=100)
    resize = dict(type="mmpretrain.ResizeEdge", scale=16)
    steps = [load, resize, dict(type="mmpretrain.CenterCrop", crop_size=16)]
    loader = SquareLoader(store, steps, str(folder), Compose([TRANSFORMS.build(step) for step in steps]))
    _, num_written = store_images(loader)
    assert num_written == len(names) == 26
    assert set(decoded.values()) == {1}
    images = StoredImages(str(store.path), size=16, square=steps)
    scene = np.asarray(Image.open(folder / "scene.png"))[:, :, ::-1]
    row = names.index("scene.png#200,100")
    expected = loader.steps.transforms[1](dict(img=scene[100:200, 200:300].copy()))["img"]
    assert np.array_equal(images[row]["img"], expected)
    assert images[row]["img_path"] == str(folder / "scene.png#200,100")


def test_two_readers_do_not_take_each_others_pictures(folder):
    path = str(folder / "deep.png#200,100")
    low, high = (LoadPicture(tile=100, range=(0, top))(dict(img_path=path))["img"] for top in (2040, 4080))
    assert low.mean() > high.mean() + 30
    with pytest.raises(PictureError, match="--range"):
        LoadPicture(tile=100)(dict(img_path=path))


def test_a_picture_that_was_replaced_by_a_smaller_one_is_named(folder):
    reader = ImageReader(LoadPicture(tile=100))
    shutil.copy(folder / "small.png", folder / "scene.png")
    with pytest.raises(UndecodableError, match="outside of the picture, which has 120 x 50 pixels"):
        reader(dict(img_path=str(folder / "scene.png#200,100")))


def test_tiles_of_a_file_are_one_group_unless_others_are_named(folder, tmp_path):
    names = ["a/1.png#0,0", "a/1.png#0,100", "a/2.png#0,0", "b/3.png#0,0"]
    found, words = groups_of(None, names)
    assert list(found.values()) == ["a/1.png", "a/1.png", "a/2.png", "b/3.png"]
    assert words == "tiles of one file are one group"
    assert list(groups_of(1, names)[0].values()) == ["a", "a", "a", "b"]
    assert list(groups_of(2, names)[0].values()) == list(found.values())
    (tmp_path / "groups.txt").write_text("a/1.png x\na/2.png y\nb/3.png y\n")
    assert list(groups_of(tmp_path / "groups.txt", names)[0].values()) == ["x", "x", "y", "y"]
    assert groups_of(None, names[:2])[0] is not None  # of one file alone


def test_the_identity_and_the_copies_of_tiles_are_those_of_their_files(folder):
    shutil.copy(folder / "scene.png", folder / "copy.png")
    names, _ = tile_names(folder, ["copy.png", "scene.png"], 200)
    assert set(file_digests(folder, names)) == {"copy.png", "scene.png"}
    first = first_copies([str(folder / name) for name in names])
    assert first == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_picture_may_be_larger_than_pillow_takes_for_harmless(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    names, largest = tile_names(folder, ["scene.png"], 200)
    assert (len(names), largest, Image.MAX_IMAGE_PIXELS) == (4, 230 * 310, 1000)
    assert size_of(str(folder / "scene.png"), Picture()) == (310, 230)


def test_a_broken_file_is_one_tile(folder):
    (folder / "broken.png").write_bytes(b"nothing")
    assert tile_names(folder, ["broken.png"], 100)[0] == ["broken.png#0,0"]
    with pytest.raises(UndecodableError):
        ImageReader(LoadPicture(tile=100))(dict(img_path=str(folder / "broken.png#0,0")))


def test_a_name_with_a_number_sign_is_no_tile():
    for name in ("a#1.png", "a#1,2.png", "#1,x", "a.png#", "a#b,1"):
        assert file_of(name) == name
    assert file_of("a#1,2.png#3,4") == "a#1,2.png"


@pytest.mark.parametrize(("errors", "stops"), [(3, False), (4, True)])
def test_a_storage_that_gives_errors_makes_no_single_tile_of_a_picture(folder, monkeypatch, errors, stops):
    monkeypatch.setattr(reading, "RETRIES", (0.0, 0.0, 0.0))
    left = [errors]
    size_of = tiles.size_of

    def size_in_the_end(path: str, picture: Picture) -> tuple[int, int]:
        if path.endswith("scene.png") and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return size_of(path, picture)

    monkeypatch.setattr(tiles, "size_of", size_in_the_end)
    if stops:
        with pytest.raises(UserError, match=r"scene\.png` cannot be read .*look at the storage"):
            tile_names(folder, ["scene.png"], side=100)
    else:
        assert len(tile_names(folder, ["scene.png"], side=100)[0]) > 1
