"""Pictures that are no photographs of 8 bits: what a file holds, and how it is read."""

from io import BytesIO
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmcv.transforms import LoadImageFromFile
from pictures import dicom
from PIL import Image, ImageOps

from mapet_mm import LoadPicture
from mapet_mm.datasets.building import build_dataset
from mapet_mm.datasets.look import look
from mapet_mm.datasets.pictures import (
    PHOTOGRAPHS,
    PictureError,
    Reading,
    look_at,
    look_at_path,
    size_of,
    spread,
)
from mapet_mm.datasets.pixels import Pixels
from mapet_mm.datasets.reading import ImageReader, UndecodableError
from mapet_mm.registry import TRANSFORMS
from mapet_mm.utils.errors import UserError

RANDOM = np.random.default_rng(0)
COLOURS = RANDOM.integers(0, 256, (20, 30, 3), np.uint8)
DEEP = RANDOM.integers(0, 4096, (20, 30), np.uint16)  # of a sensor of 12 bits
BANDS = RANDOM.integers(0, 4096, (20, 30, 5), np.uint16)


def png(path: Path, values: np.ndarray) -> Path:
    cv2.imwrite(str(path), values)
    return path


def tiff(path: Path, values: np.ndarray, **options) -> Path:
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(path, values, **options)
    return path


def loaded(path: Path, **options) -> np.ndarray:
    return LoadPicture(**options)(dict(img_path=str(path)))["img"]


def expected(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return ((values.astype(np.float64) - low) / (high - low) * 255).clip(0, 255).round().astype(np.uint8)


def losses(path: Path) -> str:
    return "; ".join(PHOTOGRAPHS.losses(look_at_path(str(path))))


@pytest.mark.parametrize("kind", ["png", "tif", "pgm", "float"])
def test_deep_grey_pictures_come_by_the_stated_map(kind, tmp_path):
    """As three equal bands, as OpenMMLab reads grey."""
    path = tmp_path / f"deep.{kind}"
    if kind in ("png", "pgm"):
        png(path, DEEP)
    elif kind == "tif":
        tiff(path, DEEP)
    else:
        path = tiff(tmp_path / "float.tif", DEEP.astype(np.float32))
    assert "--range LOW HIGH" in losses(path)
    image = loaded(path, range=(100, 4000))
    assert image.shape == (20, 30, 3)
    for band in range(3):
        assert np.array_equal(image[:, :, band], expected(DEEP, 100, 4000))
    with pytest.raises(PictureError, match="--range LOW HIGH"):
        loaded(path)


def test_deep_colours_come_blue_first_as_from_openmmlabs_loaders(tmp_path):
    colours = BANDS[:, :, :3]
    path = png(tmp_path / "deep.png", colours[:, :, ::-1])  # OpenCV writes blue first
    assert np.array_equal(loaded(path, range=(0, 4095)), expected(colours[:, :, ::-1], 0, 4095))
    transparent = png(tmp_path / "alpha.png", np.dstack([colours[:, :, ::-1], DEEP]))
    assert np.array_equal(loaded(transparent, range=(0, 4095)), loaded(path, range=(0, 4095)))


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_bands_come_in_the_order_that_is_asked_for(planar, tmp_path):
    values = BANDS if planar == "contig" else np.moveaxis(BANDS, 2, 0)
    path = tiff(tmp_path / "bands.tif", values, photometric="minisblack", planarconfig=planar)
    assert "5 bands, where a photograph has 3" in losses(path)
    image = loaded(path, range=(0, 4095), bands=(5, 1))
    assert np.array_equal(image, expected(BANDS[:, :, [4, 0]], 0, 4095))
    one = loaded(path, range=(0, 4095), bands=(2,))
    assert np.array_equal(one, expected(BANDS[:, :, [1]], 0, 4095))
    pairs = [(0, 1000), (1000, 2000), (0, 4095)]
    rgb = loaded(path, range=pairs, bands=(1, 2, 3))
    for band, pair in enumerate(pairs):
        assert np.array_equal(rgb[:, :, 2 - band], expected(BANDS[:, :, band], *pair))
    assert loaded(path, range=(0, 4095)).shape == (20, 30, 5)
    with pytest.raises(PictureError, match="--bands 6: there are bands 1 to 5"):
        loaded(path, range=(0, 1), bands=(1, 6))


def test_a_page_is_taken_or_all_pages_are_bands(tmp_path):
    path = tiff(tmp_path / "pages.tif", np.moveaxis(BANDS, 2, 0), photometric="minisblack")
    assert "5 pages" in losses(path)
    assert np.array_equal(loaded(path, range=(0, 4095), page=3)[:, :, 0], expected(BANDS[:, :, 3], 0, 4095))
    as_bands = loaded(path, range=(0, 4095), bands=(1, 2, 3, 4), page=None)
    assert np.array_equal(as_bands, expected(BANDS[:, :, :4], 0, 4095))
    with pytest.raises(PictureError, match="--page 5: there are pages 0 to 4"):
        loaded(path, range=(0, 4095), page=5)


def test_a_fourth_band_is_a_loss_and_alpha_is_none(tmp_path):
    near_infrared = RANDOM.integers(1, 255, (20, 30), np.uint8)
    mask = np.where(COLOURS[:, :, 0] > 100, 255, 0).astype(np.uint8)
    four = tiff(tmp_path / "nir.tif", np.dstack([COLOURS, near_infrared]), photometric="rgb")
    assert "--bands 1 2 3 4" in losses(four)
    assert np.array_equal(loaded(four, bands=(4,))[:, :, 0], near_infrared)
    transparent = tiff(tmp_path / "alpha.tif", np.dstack([COLOURS, mask]), photometric="rgb")
    assert losses(transparent) == ""
    as_today = LoadImageFromFile()(dict(img_path=str(transparent)))["img"]
    assert np.array_equal(loaded(transparent), as_today)


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("RGB", f"a.{kind}") for kind in ("jpg", "tif", "webp", "bmp", "ppm")),
        *((mode, "a.png") for mode in ("1", "L", "LA", "P", "RGBA")),
        *((mode, "a.tif") for mode in ("1", "L", "P", "LAB", "CMYK")),
        ("CMYK", "a.jpg"),
        ("L", "a.pgm"),
    ],
)
def test_photographs_come_as_from_mmcvs_loader(mode, name, tmp_path):
    path = tmp_path / name
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(COLOURS).convert(mode).save(path, **(dict(exif=exif) if name == "a.jpg" else {}))
    assert losses(path) == ""
    with_loader = LoadImageFromFile()(dict(img_path=str(path)))
    with_picture = LoadPicture()(dict(img_path=str(path)))
    assert np.array_equal(with_picture["img"], with_loader["img"])
    assert with_picture["ori_shape"] == with_loader["ori_shape"]
    assert np.array_equal(loaded(path, bands=(1, 2, 3)), with_loader["img"])
    assert np.array_equal(loaded(path, range=(0, 4095)), with_loader["img"])  # not meant for 8 bits


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["png", "tif"])
def test_deep_pictures_are_turned_as_photographs_are(kind, orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    photograph = Image.fromarray((DEEP >> 4).astype(np.uint8))
    photograph.save(tmp_path / "8.png", exif=exif)
    path = tmp_path / f"16.{kind}"
    if kind == "png":
        Image.fromarray(DEEP).save(path, exif=exif)
    else:
        tiff(path, DEEP, extratags=[(0x0112, "H", 1, orientation, True)])
    upright = ImageOps.exif_transpose(Image.open(tmp_path / "8.png"))
    image = loaded(path, range=(0, 4095), bands=(1,))[:, :, 0]
    assert np.abs(image.astype(int) - np.asarray(upright)).max() <= 1  # of 255, by rounding
    assert size_of(str(path), look_at_path(str(path))) == upright.size


def test_deep_grey_in_text_is_no_photograph(tmp_path):
    values = " ".join(map(str, DEEP.ravel().tolist()))
    (tmp_path / "text.pgm").write_text(f"P2\n# {'made by a program ' * 20}\n30 20\n4095\n{values}\n")
    assert "16 bits" in losses(tmp_path / "text.pgm")
    assert np.array_equal(loaded(tmp_path / "text.pgm", range=(0, 4095))[:, :, 0], expected(DEEP, 0, 4095))


def portable_map(path: Path, values: np.ndarray, white: int) -> Path:
    """A PGM or PPM in bytes, whose header says which value is white."""
    height, width, *bands = values.shape
    kind = "P6" if bands else "P5"
    content = values.astype(np.uint8 if white < 256 else ">u2").tobytes()
    path.write_bytes(f"{kind}\n{width} {height}\n{white}\n".encode() + content)
    return path


@pytest.mark.parametrize("white", [1, 100, 127, 254])
def test_eight_bits_whose_header_says_what_is_white_come_as_from_pillow(white, tmp_path):
    """OpenCV passes over it: they would come dark."""
    grey = portable_map(tmp_path / "a.pgm", COLOURS[:, :, 0] % (white + 1), white)
    colours = portable_map(tmp_path / "a.ppm", COLOURS % (white + 1), white)
    for path in (grey, colours):
        assert f"white is {white}, where a photograph's is 255 (--range 0 {white})" in losses(path)
        by_pillow = np.asarray(Image.open(path).convert("RGB"))[:, :, ::-1]
        assert by_pillow.max() == 255
        for options in ({}, dict(range=(0, 4095)), dict(range=(0, white)), dict(bands=(1, 2, 3))):
            if path == colours or "bands" not in options:
                assert np.array_equal(loaded(path, **options), by_pillow)
    found = look([str(grey), str(png(tmp_path / "b.png", COLOURS))])
    assert found.load == dict(type="mapet_mm.LoadPicture")


@pytest.mark.parametrize("white", [256, 1023, 4095, 65535])
def test_sixteen_bits_keep_the_values_of_the_file_whatever_is_white(white, tmp_path):
    values = np.minimum(DEEP, white)
    path = portable_map(tmp_path / "a.pgm", values, white)
    assert "16 bits" in losses(path)
    assert np.array_equal(LoadPicture().values(str(path)).values[:, :, 0], values)
    assert np.array_equal(loaded(path, range=(0, 200))[:, :, 0], expected(values, 0, 200))
    colours = np.dstack([values, values // 2, values // 3])
    in_colours = portable_map(tmp_path / "a.ppm", colours, white)
    assert np.array_equal(LoadPicture().values(str(in_colours)).values, colours)


def test_white_of_255_and_text_are_photographs(tmp_path):
    """OpenCV scales the values of text itself."""
    assert losses(portable_map(tmp_path / "a.ppm", COLOURS, 255)) == ""
    (tmp_path / "text.pgm").write_text("P2\n3 1\n100\n0 50 100\n")
    assert losses(tmp_path / "text.pgm") == ""
    assert loaded(tmp_path / "text.pgm")[0, :, 0].tolist() == [0, 127, 255]


def test_animations_are_photographs(tmp_path):
    frames = [Image.fromarray(COLOURS), Image.fromarray(COLOURS[::-1].copy())]
    for name in ("a.webp", "a.png"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        assert losses(tmp_path / name) == ""


def test_dicom_values_are_rescaled_and_mapped_by_the_files_window(tmp_path):
    stored = RANDOM.integers(-1000, 1000, (20, 30)).astype(np.int16)
    tags = dict(RescaleSlope=2, RescaleIntercept=-10)
    path = dicom(tmp_path / "ct.dcm", stored, WindowCenter=40, WindowWidth=400, **tags)
    assert "DICOM" in losses(path)
    assert not Reading(range=(0, 1)).losses(look_at_path(str(path)))
    assert np.array_equal(loaded(path)[:, :, 1], expected(stored * 2.0 - 10, -160, 239))
    assert np.array_equal(loaded(path, range=(-500, 500))[:, :, 1], expected(stored * 2.0 - 10, -500, 500))
    negative = dicom(tmp_path / "x.dcm", stored, PhotometricInterpretation="MONOCHROME1", **tags)
    assert np.array_equal(loaded(negative, range=(-500, 500)), 255 - loaded(path, range=(-500, 500)))
    with pytest.raises(PictureError, match="--range LOW HIGH"):
        loaded(negative)
    frames = dicom(tmp_path / "frames.dcm", np.stack([stored, -stored]), **tags)
    assert "2 pages" in losses(frames)
    second = loaded(frames, range=(-500, 500), page=1)
    assert np.array_equal(second[:, :, 0], expected(-stored * 2.0 - 10, -500, 500))


def test_what_is_no_number_is_black_and_what_is_beyond_is_cut():
    values = np.array([[[np.nan], [-np.inf], [np.inf], [0.5], [-3.0], [7.0]]], np.float32)
    image = LoadPicture(range=(0, 1), bands=(1,)).mapped(Pixels(values))
    assert image.ravel().tolist() == [0, 0, 255, 128, 0, 255]


def test_wide_integers_keep_their_differences():
    values = np.array([[[2**30], [2**30 + 255]]], np.int32)
    image = LoadPicture(range=(2**30, 2**30 + 255), bands=(1,)).mapped(Pixels(values))
    assert image.ravel().tolist() == [0, 255]


@pytest.mark.parametrize("values", [(5, 5), (5, 1), (1, 2, 3), ((0, 1), (1, 0)), ((0, 1), 2), ("1%", "99%")])
def test_a_range_without_an_order_is_refused(values):
    with pytest.raises(PictureError, match="low < high"):
        LoadPicture(range=values)


def test_broken_files_are_left_to_their_decoder(tmp_path):
    whole = BytesIO()
    Image.fromarray(DEEP).save(whole, "tiff")
    for content in (b"", b"\x89PNG", b"P5 x", b"II*\0", whole.getvalue()[:60]):
        assert look_at(BytesIO(content)).kind == "photograph"
    pytest.importorskip("pydicom")
    assert look_at(BytesIO(bytes(128) + b"DICM")).kind == "photograph"


def test_bands_go_through_pillows_resizing_one_by_one():
    """As a whole it would take the fourth for alpha, and refuse five."""
    step = dict(type="ResizeEdge", scale=10, edge="short", backend="pillow", interpolation="bicubic")
    picture = RANDOM.integers(0, 256, (20, 30, 5), np.uint8)
    picture[:, :, 3] = 0
    each = TRANSFORMS.build(
        dict(type="mapet_mm.EachBand", transforms=[dict(step, type="mmpretrain.ResizeEdge")])
    )
    resized = each(dict(img=picture))
    assert resized["img"].shape == (10, 15, 5)
    assert resized["img_shape"] == (10, 15)
    for band in range(5):
        by_pillow = Image.fromarray(picture[:, :, band]).resize((15, 10), Image.Resampling.BICUBIC)
        assert np.array_equal(resized["img"][:, :, band], np.asarray(by_pillow))


@pytest.fixture
def deep_folder(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        png(folder / f"{number}.png", DEEP if number == 3 else COLOURS)
    return folder


def config(folder: Path, load: dict) -> dict:
    return dict(type="mapet_mm.ImageFolder", data_prefix=str(folder), with_label=False, pipeline=[load])


def test_a_data_set_that_would_lose_something_is_refused_when_it_is_built(deep_folder):
    """By whatever command, with the option, an image's name and the transform's."""
    message = r"^1 of 4 images .*3\.png`: values of 16 bits.*--range LOW HIGH.*mapet_mm\.LoadPicture"
    with pytest.raises(UserError, match=message):
        build_dataset(config(deep_folder, dict(type="LoadImageFromFile")))
    known = build_dataset(config(deep_folder, dict(type="mapet_mm.LoadPicture", range=(0, 4095))))
    assert np.array_equal(known[3]["img"][:, :, 0], expected(DEEP, 0, 4095))
    build_dataset(config(deep_folder, dict(type="LoadImageFromFile", color_type="unchanged")))


def test_an_image_that_was_not_looked_at_is_no_better_than_a_broken_one(deep_folder):
    read = ImageReader(LoadImageFromFile())
    assert np.array_equal(read(dict(img_path=str(deep_folder / "0.png")))["img"], COLOURS)
    with pytest.raises(UndecodableError, match="16 bits"):
        read(dict(img_path=str(deep_folder / "3.png")))


def test_those_that_are_looked_at_are_spread_over_all():
    assert spread("abc") == ["a", "b", "c"]
    assert spread([]) == []
    chosen = spread(range(1_000_000))
    assert len(chosen) == 200
    assert (chosen[0], chosen[-1]) == (0, 999_999)


def test_pages_with_a_palette_come_in_its_colours(tmp_path):
    pytest.importorskip("tifffile")
    pages = [Image.fromarray(values).quantize(16) for values in (COLOURS, COLOURS[::-1])]
    path = tmp_path / "pages.tif"
    pages[0].save(path, save_all=True, append_images=pages[1:])
    assert losses(path) == "2 pages, of which one is taken (--page N, from 0)"
    for number, page in enumerate(pages):
        assert np.array_equal(loaded(path, page=number), np.asarray(page.convert("RGB"))[:, :, ::-1])


def test_signed_values_are_named(tmp_path):
    path = tiff(tmp_path / "signed.tif", (COLOURS[:, :, 0].astype(int) - 128).astype(np.int8))
    assert losses(path).startswith("values of int8, where a photograph has 8 bits (")
