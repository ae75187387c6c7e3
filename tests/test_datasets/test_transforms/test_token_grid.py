"""Token-grid transforms: image and grid stay aligned, checked by value, or the transform refuses."""

import os
from pathlib import Path

import numpy as np
import pytest

from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid, RandomCropTokenGrid, RandomFlipTokenGrid
from mapet_mm.registry import TRANSFORMS
from mapet_mm.structures import MissingTokensError, TokenStore

PATCH = 4
NAMES = ["train/0/a.png", "train/1/a.png", "val/1/b.png"]


@pytest.fixture
def store(tmp_path) -> TokenStore:
    store = TokenStore.create(tmp_path / "tokens", NAMES, (2, 3), 10, "ab" * 32, data_root="data/digits")
    store.write([0, 1], np.arange(12).reshape(2, 2, 3) % 10)
    return store


def aligned(height: int, width: int) -> dict:
    """An image of which every patch is painted with its own token."""
    grid = np.arange(height * width).reshape(height, width)
    image = np.repeat(np.repeat(grid, PATCH, axis=0), PATCH, axis=1)[..., None].repeat(3, axis=2)
    return {"img": image.astype(np.uint8), "token_grid": grid, "img_path": "x.png"}


def is_aligned(results: dict) -> bool:
    painted = results["img"].reshape(results["token_grid"].shape[0], PATCH, -1, PATCH, 3)
    return bool((painted == results["token_grid"][:, None, :, None, None]).all())


def grid_of(store: TokenStore, img_path, data_root=None) -> list:
    config = dict(type="mapet_mm.LoadTokenGrid", store=str(store.path), data_root=data_root)
    grid = TRANSFORMS.build(config)({"img_path": img_path})["token_grid"]
    assert grid.dtype == np.int64
    return grid.tolist()


@pytest.mark.parametrize(
    ("img_path", "data_root"),
    [
        ("data/digits/train/1/a.png", None),  # under the data root that the store recorded
        ("./data//digits/../digits/train/1/a.png", None),
        (Path("data/digits/train/1/a.png"), None),
        ("/mnt/copy/train/1/a.png", "/mnt/copy"),  # moved
        ("/mnt/copy/train/1/a.png", "/mnt/copy/"),
        ("/mnt/copy/train/1/a.png", Path("/mnt/other/../copy")),
        ("train/1/a.png", "."),
        ("../a/train/1/a.png", "../a"),
        ("s3://bucket/train/1/a.png", "s3://bucket"),
    ],
)
def test_an_image_path_leads_to_its_own_grid(store, img_path, data_root):
    assert grid_of(store, img_path, data_root) == [[6, 7, 8], [9, 0, 1]]


def test_the_recorded_data_root_is_found_from_another_working_folder(store, tmp_path, monkeypatch):
    img_path = os.path.abspath("data/digits/train/1/a.png")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingTokensError, match="set LoadTokenGrid's data_root"):
        grid_of(store, img_path)
    root = os.path.relpath(Path(img_path).parents[2])
    assert grid_of(store, img_path, root) == [[6, 7, 8], [9, 0, 1]]


def test_a_data_root_may_be_reached_through_symbolic_links(store, tmp_path):
    """An image keeps the name that it has below the data root."""
    (tmp_path / "disk" / "classes").mkdir(parents=True)
    (tmp_path / "disk" / "classes" / "a.png").touch()
    (tmp_path / "real" / "train").mkdir(parents=True)
    (tmp_path / "real" / "train" / "1").symlink_to(tmp_path / "disk" / "classes")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for root in ("link", "./link", "real/../link"):
        grid = grid_of(store, tmp_path / "link" / "train" / "1" / "a.png", tmp_path / root)
        assert grid == [[6, 7, 8], [9, 0, 1]], root
    (tmp_path / "real" / "train" / "1").unlink()
    (tmp_path / "real" / "train" / "1").mkdir()
    for root, spelled in (("real", "link"), ("link", "real"), ("link/../real", "link")):
        grid = grid_of(store, tmp_path / spelled / "train" / "1" / "a.png", tmp_path / root)
        assert grid == [[6, 7, 8], [9, 0, 1]], (root, spelled)


def test_the_folder_above_a_symbolic_link_is_its_targets(store, tmp_path):
    """`link/..` is another folder than the one that holds the link, and has other images."""
    (tmp_path / "far" / "images").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "images")
    with pytest.raises(MissingTokensError, match=r"no image `far/train/1/a\.png`"):
        grid_of(store, tmp_path / "link" / ".." / "train/1/a.png", tmp_path)
    assert grid_of(store, tmp_path / "link" / ".." / "train/1/a.png", tmp_path / "far")


REFUSED_PATHS = [
    ("/mnt/inverted/train/0/a.png", None, "is not under the data root `data/digits`"),
    ("data/digits_inverted/train/0/a.png", None, "is not under the data root"),
    ("data/digits", None, "is not under the data root"),
    ("/other/train/0/a.png", "/mnt", "is not under the data root `/mnt`"),
    ("data/digits/val/1/b.png", None, "no tokens for image `val/1/b.png` yet"),
    ("data/digits/train/9/z.png", None, "has no image `train/9/z.png`"),
]


@pytest.mark.parametrize(("img_path", "data_root", "noun"), REFUSED_PATHS)
def test_an_image_without_tokens_gets_none_of_a_namesake(store, img_path, data_root, noun):
    with pytest.raises(MissingTokensError, match=noun) as error:
        grid_of(store, img_path, data_root)
    assert "\n" not in str(error.value)


def test_a_store_without_a_data_root_asks_for_one(tmp_path):
    store = TokenStore.create(tmp_path / "rootless", NAMES, (2, 3), 10, "ab" * 32)
    store.write(range(3), np.zeros((3, 2, 3), int))
    with pytest.raises(MissingTokensError, match="no data root"):
        grid_of(store, "train/0/a.png")
    assert grid_of(store, "train/0/a.png", ".") == [[0, 0, 0], [0, 0, 0]]


def test_pixels_without_a_path_have_no_tokens(store):
    """What an inferencer hands over: refused, or let through where tokens are optional."""
    pixels = {"img": np.zeros((8, 12, 3), np.uint8)}
    with pytest.raises(MissingTokensError, match="`img_path`"):
        LoadTokenGrid(str(store.path))(dict(pixels))
    load = LoadTokenGrid(str(store.path), optional=True)
    assert load(dict(pixels)).keys() == {"img"}
    found = load(pixels | {"img_path": "data/digits/train/0/a.png"})["token_grid"]
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_flip_mirrors_image_and_grid_or_neither():
    np.random.seed(0)
    flips = 0
    for _ in range(40):
        results = RandomFlipTokenGrid()(aligned(3, 5))
        assert is_aligned(results)
        mirrored = results["token_grid"][0].tolist() == [4, 3, 2, 1, 0]
        assert mirrored == results["flip"] == (results["flip_direction"] == "horizontal")
        flips += mirrored
    assert 10 <= flips <= 30
    assert RandomFlipTokenGrid(prob=1.0)(aligned(3, 5))["flip"]


def test_crop_cuts_image_and_grid_to_the_same_window_at_every_place():
    np.random.seed(0)
    crop, corners = RandomCropTokenGrid(crop_size=(8, 12), patch_size=PATCH), set()
    for _ in range(200):
        results = crop(aligned(4, 5))
        assert results["img"].shape == (8, 12, 3)
        assert results["img_shape"] == (8, 12)
        assert results["token_grid"].shape == crop.grid == (2, 3)
        assert is_aligned(results)
        corners.add(int(results["token_grid"][0, 0]))
    assert corners == {row * 5 + column for row in range(3) for column in range(3)}


def test_crop_takes_oblong_patches():
    """Patches of 8 x 16 px: each stays under its token."""
    np.random.seed(0)
    tokens, corners = np.arange(12).reshape(4, 3), set()
    image = np.repeat(np.repeat(tokens, 8, 0), 16, 1)[..., None]
    crop = RandomCropTokenGrid(crop_size=(24, 32), patch_size=(8, 16))
    for _ in range(60):
        results = crop(dict(img=image, token_grid=tokens))
        assert results["token_grid"].shape == crop.grid == (3, 2)
        expected = np.repeat(np.repeat(results["token_grid"], 8, 0), 16, 1)
        assert np.array_equal(results["img"][..., 0], expected)
        corners.add(int(results["token_grid"][0, 0]))
    assert corners == {0, 1, 3, 4}


REFUSED = [
    (lambda: RandomCropTokenGrid(10, PATCH), "multiple of patch_size"),
    (lambda: RandomCropTokenGrid((32, 24), (8, 16)), "multiple of patch_size"),
    (lambda: RandomCropTokenGrid(8, PATCH)(aligned(3, 3) | {"img": np.zeros((11, 12, 3))}), "do not match"),
    (lambda: RandomCropTokenGrid((16, 8), PATCH)(aligned(3, 3)), "high <= 0"),
    (lambda: RandomCropTokenGrid((8, 16), PATCH)(aligned(3, 3)), "high <= 0"),
    (lambda: RandomCropTokenGrid(8, PATCH)({"img": np.zeros((8, 8, 3))}), "token_grid"),
    (lambda: RandomFlipTokenGrid(0.0)({"img": np.zeros((8, 8, 3))}), "token_grid"),
]


@pytest.mark.parametrize(("do", "noun"), REFUSED, ids=[noun for _, noun in REFUSED])
def test_what_cannot_be_aligned_is_refused(do, noun, unchecked_types):
    with pytest.raises((ValueError, KeyError), match=noun):
        do()
