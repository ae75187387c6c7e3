"""The part of an image that tokens cover is the one that the tokenizer saw, whatever its pipeline."""

import mmcv
import numpy as np
import pytest
from PIL import Image

from mapet_mm.structures.store import TokenStore, TokenStoreError
from mapet_mm.visualization.codebook_sheet import Patch, SheetRow, crop_around, draw_codebook_sheet
from mapet_mm.visualization.covered_part import CoveredParts

LOAD, PACK = dict(type="LoadImageFromFile"), dict(type="PackInputs")
SQUARE = dict(type="EfficientNetCenterCrop", crop_size=64, crop_padding=0, backend="pillow")
STRETCH = dict(type="Resize", scale=(64, 64))
GRID = (4, 4)


@pytest.fixture
def store(tmp_path):
    """Makes a store that records these steps between loading and packing; None: it records nothing."""

    def make(steps: list | None, load: dict = LOAD) -> TokenStore:
        record = None if steps is None else dict(pipeline=[load, *steps, PACK], data_preprocessor={})
        made = TokenStore.create(tmp_path / "tokens", ["a.png"], GRID, 8, "test", str(tmp_path), record)
        made.write([0], np.zeros((1, *GRID), int))
        return made

    return make


def save(path, size: tuple[int, int], orientation: int = 1) -> np.ndarray:
    """Write an image of random pixels, `(width, height)` as it lies in its file; returns them."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, exif=exif)
    return pixels


@pytest.mark.parametrize(
    ("size", "steps", "part"),
    [
        ((128, 64), None, (32, 0, 64, 64)),
        ((128, 64), [SQUARE], (32, 0, 64, 64)),
        ((128, 64), [STRETCH], (0, 0, 128, 64)),
        ((64, 128), [STRETCH], (0, 0, 64, 128)),
        ((128, 64), [dict(type="CenterCrop", crop_size=56)], (36, 4, 56, 56)),
        ((128, 64), [dict(type="Pad", size=(128, 160), pad_val=114)], (0, 0, 128, 160)),
        ((128, 64), [SQUARE, dict(type="Normalize", mean=[120.0] * 3, std=[-60.0] * 3)], (32, 0, 64, 64)),
        ((128, 64), [dict(type="NumpyToPIL"), dict(type="torchvision/Resize", size=32)], (0, 0, 128, 64)),
        ((24, 24), [SQUARE], (0, 0, 24, 24)),
        ((500, 375), [dict(SQUARE, crop_size=224)], (62, 0, 375, 375)),
    ],
    ids=str,
)  # fmt: skip
def test_the_part_covered_is_found_to_a_fraction_of_a_pixel(size, steps, part, store, tmp_path):
    save(tmp_path / "a.png", size)
    image, found = CoveredParts(store(steps)).open(tmp_path / "a.png")
    assert image.size == size
    assert found == pytest.approx(part, abs=0.2)


def test_a_patch_of_a_stretched_image_has_the_pixels_that_it_covers(store, tmp_path):
    pixels = save(tmp_path / "a.png", (128, 64))
    image, part = CoveredParts(store([STRETCH])).open(tmp_path / "a.png")
    crop, frame = crop_around(image, Patch("a.png", 1, 2), GRID, 0, part)
    np.testing.assert_array_equal(crop, pixels[16:32, 64:96])
    assert frame == pytest.approx((0, 0, 32, 16), abs=0.2)


@pytest.mark.parametrize("color_type", ["color", "unchanged"])
def test_photos_are_turned_as_the_tokenizer_saw_them(color_type, store, tmp_path):
    """Orientation 3 is upside down: token (0, 0) shows the lower right of the pixels as they lie."""
    pixels = save(tmp_path / "a.png", (120, 80), orientation=3)
    image, part = CoveredParts(store([SQUARE], dict(LOAD, color_type=color_type))).open(tmp_path / "a.png")
    crop, _ = crop_around(image, Patch("a.png", 0, 0), GRID, 0, part)
    seen = dict(color=pixels[::-1, ::-1], unchanged=pixels)[color_type]
    np.testing.assert_array_equal(crop, seen[:20, 20:40])


def test_a_patch_of_a_16_bit_image_is_as_bright_as_the_tokenizer_saw_it(store, tmp_path):
    """Before: white."""
    grey = np.random.default_rng(0).integers(0, 2**16, (64, 64), dtype=np.uint16)
    Image.fromarray(grey).save(tmp_path / "a.png")
    image, part = CoveredParts(store([SQUARE])).open(tmp_path / "a.png")
    crop, _ = crop_around(image, Patch("a.png", 1, 2), GRID, 0, part)
    seen = mmcv.imread(str(tmp_path / "a.png"))
    np.testing.assert_array_equal(seen, np.repeat(grey[..., None] >> 8, 3, axis=2))
    np.testing.assert_array_equal(crop, seen[16:32, 32:48])


def test_photos_are_upright_where_the_store_records_nothing(store, tmp_path):
    pixels = save(tmp_path / "a.png", (120, 80), orientation=6)
    image, part = CoveredParts(store(None)).open(tmp_path / "a.png")
    assert part == (0, 20, 80, 80)
    np.testing.assert_array_equal(image, np.rot90(pixels, -1))


def test_a_sheet_shows_what_the_tokenizer_saw(store, tmp_path):
    pixels = save(tmp_path / "a.png", (128, 64), orientation=3)
    row = SheetRow("token 0", [Patch("a.png", 3, 0)])
    (axes,) = draw_codebook_sheet([row], tmp_path, store([STRETCH]), context=0).axes
    np.testing.assert_array_equal(axes.images[0].get_array(), pixels[::-1, ::-1][48:, :32])


@pytest.mark.parametrize("direction", ["horizontal", "vertical"])
def test_a_pipeline_that_shows_no_upright_rectangle_is_refused(direction, store, tmp_path):
    save(tmp_path / "a.png", (128, 64))
    covered = CoveredParts(store([STRETCH, dict(type="RandomFlip", prob=1.0, direction=direction)]))
    with pytest.raises(TokenStoreError) as error:
        covered.open(tmp_path / "a.png")
    assert str(error.value) == (
        f"the pipeline that token store `{tmp_path}/tokens` records does not say which part of "
        f"`{tmp_path}/a.png` its tokens cover (ValueError: it shows no upright rectangle of an image): such "
        "patches cannot be drawn"
    )
