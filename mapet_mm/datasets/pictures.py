"""Pictures of any bit depth and number of bands: what a file holds, and what of it would be lost.

OpenCV, which reads photographs for OpenMMLab, cuts 16 bits to the upper 8, and drops a fourth band and all
pages but the first. TIFF is read by tifffile here and DICOM by pydicom, both of the extra `pictures`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
from jaxtyping import Shaped
from mmcv.transforms import LoadImageFromFile
from PIL import Image

from mapet_mm.utils.errors import UserError, printable

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

PNG = b"\x89PNG"
PNG_BANDS = {0: 1, 2: 3, 3: 3, 4: 1, 6: 3}  # by the colour type in the header, without alpha
PNM = {b"P2": 1, b"P3": 3, b"P5": 1, b"P6": 3}  # bands of grey and colour maps, in text and in bytes
HEAD = 1024  # bytes of a file, of which its kind is seen
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
TIFF_BITS = 258  # the tag of bits per sample
# Bands of what OpenCV reads as a photograph, by the TIFF's photometric interpretation.
TIFF_COLOURS = {
    "MINISBLACK": 1,
    "MINISWHITE": 1,
    "PALETTE": 1,
    "RGB": 3,
    "YCBCR": 3,
    "CIELAB": 3,
    "SEPARATED": 4,
}
ORIENTATION = 274  # the tag of EXIF
LYING = (5, 6, 7, 8)  # its values for a picture on its side
EIGHT_BITS = np.dtype(np.uint8)
DICOM = b"DICM"  # after 128 bytes of any content
MASK_SHARE = 0.5  # of a band's values that are 0 or 255, from which on it is a mask
MOST_NUMBERS = 6  # in a message
LOOKED_AT = 200  # images of a data set, before anything is computed
IN_CONFIGS = "`type='mapet_mm.LoadPicture'` takes the same options"
Item = TypeVar("Item")


class PictureError(UserError, ValueError):
    """A picture that would not arrive as it is; the message says what would be lost, and what to do."""


@dataclass(frozen=True)
class Picture:
    """What a file holds.

    Attributes:
        kind: "photograph" for what OpenCV reads without a loss, else "PNG", "PNM", "TIFF" or "DICOM".
        dtype: of the values.
        bands: how many, without alpha.
        pages: of a TIFF, or frames of a DICOM file.
        size: width and height in pixels, of a TIFF or a DICOM file; Pillow knows that of the others.
        white: the value that is white, of 8 bits.
    """

    kind: str = "photograph"
    dtype: np.dtype = EIGHT_BITS
    bands: int = 3
    pages: int = 1
    size: tuple[int, int] | None = None
    white: int = 255

    @property
    def is_deep(self) -> bool:
        """True if the values need a map to 8 bits."""
        return self.dtype not in (np.uint8, np.bool_)

    @property
    def depth(self) -> str:
        """'16 bits', or 'float32', 'int8'."""
        return f"{8 * self.dtype.itemsize} bits" if self.dtype.kind == "u" else str(self.dtype)


@dataclass(frozen=True)
class Reading:
    """How pictures are read: the options `--range`, `--bands` and `--page`.

    Attributes:
        range: the values that become 0 and 255, or a pair of them for each band.
        bands: that are taken, from 1; None for all, of which a network takes one or three.
        page: that is taken, from 0; None where there is to be one, or where pages of one band are the bands.
        knows_white: False of readers that do not ask a file which of its values is white.
    """

    range: Sequence[Any] | None = None
    bands: Sequence[int] | None = None
    page: int | None = None
    knows_white: bool = True

    def losses(self, picture: Picture) -> list[str]:
        """What of a picture would be lost in silence, each with the option that prevents it."""
        lost = []
        if picture.kind == "DICOM" and not self.knows_white:
            lost.append("DICOM, of which a reader has to know the values (--range LOW HIGH)")
        elif picture.white < 255 and not self.knows_white:
            white = picture.white
            lost.append(f"white is {white}, where a photograph's is 255 (--range 0 {white})")
        elif picture.is_deep and self.range is None and picture.kind != "DICOM":
            lost.append(depth_loss(picture))
        if picture.pages > 1 and self.page is None:
            is_band = picture.bands == 1
            as_bands = f"; or, if they are bands, --bands {numbers(picture.pages)}" if is_band else ""
            if not (is_band and self.bands):
                lost.append(f"{picture.pages} pages, of which one is taken (--page N, from 0{as_bands})")
        if picture.bands not in (1, 3) and not self.bands:
            bands = numbers(picture.bands)
            lost.append(f"{picture.bands} bands, where a photograph has 3 (those to take: --bands {bands})")
        return lost


PHOTOGRAPHS = Reading(knows_white=False)  # as OpenMMLab's loaders read them


def depth_loss(picture: Picture) -> str:
    """What 8 bits would lose of a picture's values, with the remedy."""
    return (
        f"values of {picture.depth}, where a photograph has 8 bits (those that become 0 and 255: "
        "--range LOW HIGH, or percentiles: --range 1% 99%)"
    )


def numbers(count: int) -> str:
    """'1 2 3 4'."""
    listed = [str(number) for number in range(1, count + 1)]
    return " ".join(listed if count <= MOST_NUMBERS else [*listed[:3], "...", listed[-1]])


def reads_photographs(step: Any) -> bool:
    """True for a pipeline's step that reads three bands of 8 bits, whatever a file holds."""
    return type(step) is LoadImageFromFile and step.color_type == "color"


def require_kept(pictures: Mapping[str, Picture], reading: Reading = PHOTOGRAPHS) -> None:
    """Raise PictureError if information of some pictures, by their names, would be lost in silence."""
    lost = {}
    for name, picture in pictures.items():
        losses = reading.losses(picture)
        if losses:
            lost[name] = "; ".join(losses)
    if lost:
        first = next(iter(lost))
        count = f"{len(lost)} of {len(pictures)} images looked at, such as " if len(pictures) > 1 else ""
        raise PictureError(f"{count}`{printable(first)}`: {lost[first]}; in configs {IN_CONFIGS}")


def look_at_path(path: str) -> Picture:
    """What the file at a path holds; a photograph, if that is elsewhere than on a disk."""
    if not os.path.isfile(path):
        return Picture()
    with open(path, "rb") as file:
        return look_at(file)


def size_of(path: str, picture: Picture) -> tuple[int, int]:
    """Width and height in pixels of a picture as it is decoded, upright; OSError if its file is broken."""
    if picture.size:
        return picture.size
    with of_any_size(), Image.open(path) as image:
        width, height = image.size
        lies = image.getexif().get(ORIENTATION, 1) in LYING
    return (height, width) if lies else (width, height)


@contextmanager
def of_any_size() -> Iterator[None]:
    """Let Pillow open larger pictures than it takes for harmless, to read their headers."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def spread(items: Sequence[Item], most: int = LOOKED_AT) -> list[Item]:
    """At most so many of some items, evenly spread over all of them."""
    last = len(items) - 1
    indices = np.linspace(0, last, min(len(items), most)).round().astype(int)
    return [items[index] for index in np.unique(indices).tolist()]


def look_at(file: BinaryIO) -> Picture:
    """What an open file holds, by its header. What is broken counts as a photograph: its decoder says why.

    Raises:
        ImportError: a file that only the extra `pictures` reads.
    """
    head = file.read(HEAD)
    file.seek(0)
    try:
        if head[128:132] == DICOM:  # the bytes before may be a TIFF's
            return _look_at_dicom(file)
        if head.startswith(PNG):
            return _look_at_png(head)
        if head[:2] in PNM:
            return _look_at_pnm(head)
        if head.startswith(TIFF):
            return _look_at_tiff(file)
    except ImportError:
        raise
    except Exception:  # of any library
        pass
    finally:
        file.seek(0)
    return Picture()


def _look_at_png(head: bytes) -> Picture:
    bits, colour = head[24], head[25]
    if bits <= 8:
        return Picture()
    return Picture("PNG", np.dtype(np.uint16), PNG_BANDS[colour])


def _look_at_pnm(head: bytes) -> Picture:
    """A grey or colour map. OpenCV passes over the white of 8 bits in bytes, not of those in text."""
    words = re.sub(rb"#.*", b"", head).split()
    kind = words[0]
    white = int(words[3])  # after width and height
    if white > 255:
        return Picture("PNM", np.dtype(np.uint16), PNM[kind])
    if white == 255 or kind in (b"P2", b"P3"):
        return Picture()
    return Picture("PNM", EIGHT_BITS, PNM[kind], white=white)


def _look_at_tiff(file: BinaryIO) -> Picture:
    try:
        from tifffile import TiffFile
    except ImportError:
        if _is_plain_tiff(file):
            return Picture()
        raise
    with TiffFile(file) as tiff:
        pages = pages_of(tiff)
        first = pages[0]
        size = first.imagewidth, first.imagelength
        if orientation_of(first) in LYING:
            size = first.imagelength, first.imagewidth
        num_bands = 3 if first.colormap is not None else first.samplesperpixel
        picture = Picture("TIFF", first.dtype, num_bands, len(pages), size)
        is_photograph = not picture.is_deep and len(pages) == 1 and _has_colours(first)
        return Picture() if is_photograph else picture


def _is_plain_tiff(file: BinaryIO) -> bool:
    """True if Pillow says of a TIFF that OpenCV loses nothing of it."""
    with Image.open(file) as image:
        bits = set(image.tag_v2.get(TIFF_BITS, (1,)))
        return image.mode in ("1", "L", "P", "RGB", "CMYK") and image.n_frames == 1 and bits <= {1, 8}


def _has_colours(page: TiffPage) -> bool:
    """True if the bands of a page are the colours of a photograph, perhaps with alpha."""
    num_colours = TIFF_COLOURS.get(page.photometric.name)
    if page.samplesperpixel == num_colours:
        return True
    if page.samplesperpixel - 1 != num_colours or len(page.extrasamples) != 1 or not page.extrasamples[0]:
        return False
    # Programs for measurements call their fourth band alpha, too. A mask has few values besides 0 and 255.
    alpha = values_of(page)[:, :, -1]
    return np.isin(alpha, (0, 255)).mean() >= MASK_SHARE


def pages_of(tiff: TiffFile) -> list[TiffPage]:
    """The pages without thumbnails and smaller copies."""
    return [page for page in tiff.pages if not page.is_reduced] or [tiff.pages[0]]


def values_of(page: TiffPage) -> Shaped[np.ndarray, "height width band"]:
    try:
        values = page.asarray()
    except ValueError as error:
        if "imagecodecs" in str(error):
            raise ImportError(f"this TIFF is compressed: {error}", name="imagecodecs") from error
        raise
    if page.colormap is not None:  # of 16 bits for each colour of a palette
        return np.moveaxis(page.colormap[:, values] >> 8, 0, 2).astype(np.uint8)
    if page.axes == "SYX":
        return np.moveaxis(values, 0, 2)
    if page.axes not in ("YX", "YXS"):
        raise PictureError(f"a TIFF's page with axes {page.axes} is not one picture")
    return np.atleast_3d(values)


def orientation_of(page: TiffPage) -> int:
    """How a page's values lie, as EXIF numbers it; 1 is upright."""
    tag = page.tags.get(ORIENTATION)
    return 1 if tag is None else int(tag.value)


def _look_at_dicom(file: BinaryIO) -> Picture:
    from pydicom import dcmread

    header = dcmread(file, stop_before_pixels=True)
    dtype = np.dtype(f"u{header.BitsAllocated // 8}")
    num_frames = int(header.get("NumberOfFrames") or 1)
    return Picture("DICOM", dtype, header.SamplesPerPixel, num_frames, (header.Columns, header.Rows))
