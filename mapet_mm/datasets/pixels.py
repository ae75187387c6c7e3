"""The values of pictures: decoded, turned upright, mapped to 8 bits."""

from __future__ import annotations

from io import BytesIO
from typing import Any, NamedTuple

import cv2
import numpy as np
from jaxtyping import Shaped, UInt8

from mapet_mm.datasets.pictures import LYING, Picture, PictureError, orientation_of, pages_of, values_of

# And for one whose rows, or columns, are in the other order, once it no longer lies on its side.
UPSIDE_DOWN = (3, 4, 7, 8)
MIRRORED = (2, 3, 6, 7)


class Pixels(NamedTuple):
    """Values of a picture, with what its file says about them.

    Args:
        values: with the bands in the file's order.
        window: the values that are black and white, if a file says that.
        is_negative: True if the smallest value is white.
    """

    values: Shaped[np.ndarray, "height width band"]
    window: tuple[float, float] | None = None
    is_negative: bool = False


def read_pixels(content: bytes, picture: Picture, page: int | None) -> Pixels:
    """The values of a picture.

    Args:
        content: of its file.
        picture: what `look_at` says of it.
        page: see `Reading`.

    Raises:
        PictureError: no such page, or a file that cannot be decoded.
    """
    if page is not None and not 0 <= page < picture.pages:
        raise PictureError(f"--page {page}: there are pages 0 to {picture.pages - 1}")
    if picture.kind == "TIFF":
        return _read_tiff(content, page)
    if picture.kind == "DICOM":
        return _read_dicom(content, picture, page)
    is_photograph = picture.kind == "photograph"
    # The others too come without alpha, and turned as their EXIF data say.
    flags = cv2.IMREAD_COLOR if is_photograph else cv2.IMREAD_ANYDEPTH | cv2.IMREAD_ANYCOLOR
    values = cv2.imdecode(np.frombuffer(content, np.uint8), flags)
    if values is None:
        raise PictureError(f"OpenCV cannot decode the {picture.kind}")
    values = np.atleast_3d(values)[:, :, ::-1][:, :, : picture.bands]  # blue is OpenCV's first band
    return Pixels(values, window=None if picture.is_deep else (0, picture.white))


def to_8_bits(
    values: Shaped[np.ndarray, "height width"], low: float, high: float
) -> UInt8[np.ndarray, "height width"]:
    """One band with `low` and what is below it as 0, `high` and what is above as 255, rounded between them.

    NaN becomes 0.
    """
    levels = np.subtract(values, low, dtype=np.float64)
    levels /= high - low
    levels *= 255
    return np.nan_to_num(levels.clip(0, 255)).round().astype(np.uint8)


def _read_tiff(content: bytes, page: int | None) -> Pixels:
    from tifffile import TiffFile

    with TiffFile(BytesIO(content)) as tiff:
        pages = pages_of(tiff)
        if page is not None:
            pages = [pages[page]]
        values = np.concatenate([values_of(one) for one in pages], axis=2)
        values = _upright(values, orientation_of(pages[0]))
        return Pixels(values, is_negative=pages[0].photometric.name == "MINISWHITE")


def _upright(
    values: Shaped[np.ndarray, "height width band"], orientation: int
) -> Shaped[np.ndarray, "rows columns band"]:
    """A picture turned and mirrored as the orientation of EXIF says, as OpenCV does it with photographs."""
    if orientation in LYING:
        values = values.transpose(1, 0, 2)
    if orientation in UPSIDE_DOWN:
        values = values[::-1]
    if orientation in MIRRORED:
        values = values[:, ::-1]
    return values


def _read_dicom(content: bytes, picture: Picture, page: int | None) -> Pixels:
    from pydicom import dcmread
    from pydicom.pixels import apply_rescale, pixel_array

    dataset = dcmread(BytesIO(content))
    if picture.pages == 1 or page is not None:
        values = np.atleast_3d(apply_rescale(pixel_array(dataset, index=page or 0), dataset))
    else:
        values = np.moveaxis(apply_rescale(pixel_array(dataset), dataset), 0, 2)
    return Pixels(values, _window_of(dataset), dataset.PhotometricInterpretation == "MONOCHROME1")


def _window_of(dataset: Any) -> tuple[float, float] | None:
    """The values that a DICOM file's first window shows as black and white; None without one."""
    center, width = dataset.get("WindowCenter"), dataset.get("WindowWidth")
    if center in (None, "") or width in (None, ""):
        return None
    center, width = float(np.atleast_1d(center)[0]), float(np.atleast_1d(width)[0])
    if width <= 1:
        return None
    return center - width / 2, center + width / 2 - 1  # DICOM PS3.3, C.11.2.1.2.1
