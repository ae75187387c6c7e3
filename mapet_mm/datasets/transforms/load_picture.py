"""Pipeline steps for pictures of any bit depth and number of bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import mmcv
import numpy as np
from jaxtyping import Shaped, UInt8
from mmcv.transforms import BaseTransform, LoadImageFromFile
from mmengine import fileio
from mmengine.dataset import Compose

from mapet_mm.datasets.pictures import Picture, PictureError, depth_loss, look_at
from mapet_mm.datasets.pixels import Pixels, read_pixels, to_8_bits
from mapet_mm.datasets.tiles import cut_tile
from mapet_mm.registry import TRANSFORMS
from mapet_mm.structures.image_files import file_of

# The picture that was decoded last in this process: its tiles come one after the other.
LAST_PICTURE: dict[tuple[LoadPicture, str], np.ndarray] = {}


@TRANSFORMS.register_module()
class LoadPicture(LoadImageFromFile):
    """Load a picture of any bit depth and number of bands as uint8 `(H, W, N)`, by a stated map.

    Reads what OpenCV reads, TIFF of all kinds and DICOM. A photograph without `range` and `bands` comes as
    `LoadImageFromFile` gives it. Three bands come in OpenMMLab's order, blue first, other numbers in that of
    `bands`. The values of a DICOM file are rescaled as it says, and without `range` mapped by its own window;
    those of a PGM or PPM of 8 bits by what its header calls white.

    Args:
        range: `(low, high)`, the values that become 0 and 255, or such a pair for each band. Values between
            them are mapped linearly and rounded, values beyond them are cut, NaN becomes 0. Needed for
            anything but 8 bits; pictures of 8 bits stay as they are if `high` is above 255.
        bands: that are taken, in this order, from 1. None: all; a grey picture becomes three equal bands, as
            OpenMMLab reads it.
        page: of a file with several, from 0. None: pages of one band each are taken as bands.
        tile: side in pixels of the part that a path `FILE#x,y` names, from its upper left corner. The file is
            decoded once for tiles that come one after the other, and stays in memory until another one is.
        **kwargs: arguments of `LoadImageFromFile`.

    Raises:
        PictureError: no such band or page, or values of more than 8 bits without a range.
        ImportError: a TIFF or DICOM file that needs the extra `pictures`.

    Examples:
        >>> load = LoadPicture(range=(0, 510), bands=(1,))
        >>> load.mapped(Pixels(np.array([[[0], [255], [510]]], np.uint16)))[0, :, 0].tolist()
        [0, 128, 255]
    """

    def __init__(
        self,
        range: Sequence[Any] | None = None,
        bands: Sequence[int] | None = None,
        page: int | None = 0,
        tile: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pairs = None
        if range is not None:
            try:
                pairs = np.atleast_2d(np.asarray(range, np.float64))
            except ValueError:  # percentiles, or some pairs and some numbers
                pairs = np.empty(0)
            if pairs.shape[1:] != (2,) or not (pairs[:, 0] < pairs[:, 1]).all():
                raise PictureError(
                    f"range={range}: give numbers (low, high) with low < high, or such a pair per band"
                )
            self.pairs = pairs.tolist()
        self.bands = None if bands is None else list(bands)
        self.page = page
        self.tile = tile

    def transform(self, results: dict[str, Any]) -> dict[str, Any] | None:
        """Add `img`, `img_shape` and `ori_shape`."""
        try:
            image = self._tile(results) if self.tile else self._whole(results)
        except Exception:
            if self.ignore_empty:
                return None
            raise
        if self.to_float32:
            image = image.astype(np.float32)
        results["img"] = image
        results["img_shape"] = image.shape[:2]
        results["ori_shape"] = image.shape[:2]
        return results

    def _tile(self, results: dict[str, Any]) -> Shaped[np.ndarray, "height width band"]:
        """The tile that a path names, or the whole picture of another path."""
        path = str(results["img_path"])
        file = file_of(path)
        if path == file:
            return self._whole(results)
        if (self, file) not in LAST_PICTURE:
            LAST_PICTURE.clear()  # frees the memory before the next one takes it
            LAST_PICTURE[self, file] = self._whole({**results, "img_path": file})
        return cut_tile(LAST_PICTURE[self, file], path, self.tile)

    def _whole(self, results: dict[str, Any]) -> Shaped[np.ndarray, "height width band"]:
        """The whole picture of a file."""
        content = self.content(results)
        picture = look_at(BytesIO(content))
        if picture.kind == "photograph" and self.reads_plainly:
            image = mmcv.imfrombytes(content, flag=self.color_type, backend=self.imdecode_backend)
            if image is None:
                path = results["img_path"]
                raise PictureError(f"image `{path}` cannot be decoded: repair it, or leave it out")
            return image
        return self.mapped(self.taken(read_pixels(content, picture, self.page)))

    @property
    def reads_plainly(self) -> bool:
        """True if no option says how pictures are read that are no photographs."""
        return self.pairs is None and self.bands is None and not self.page

    def content(self, results: dict[str, Any]) -> bytes:
        """The bytes of an image's file."""
        return fileio.get(results["img_path"], backend_args=self.backend_args)

    def values(self, path: str) -> Pixels:
        """The values of the bands that are taken, before their map to 8 bits."""
        content = self.content(dict(img_path=path))
        return self.taken(read_pixels(content, look_at(BytesIO(content)), self.page))

    def taken(self, pixels: Pixels) -> Pixels:
        """The values of the bands that are taken."""
        if self.bands is None:
            return pixels
        num_bands = pixels.values.shape[2]
        wrong = [band for band in self.bands if not 1 <= band <= num_bands]
        if wrong:
            raise PictureError(f"--bands {wrong[0]}: there are bands 1 to {num_bands}")
        indices = [band - 1 for band in self.bands]
        return pixels._replace(values=pixels.values[:, :, indices])

    def mapped(self, pixels: Pixels) -> UInt8[np.ndarray, "height width band"]:
        """The picture in 8 bits, of the bands that are taken."""
        num_bands = pixels.values.shape[2]
        pairs = self._pairs_of(pixels)
        if len(pairs) == 1:
            pairs = pairs * num_bands
        if len(pairs) != num_bands:
            raise PictureError(f"{num_bands} bands with {len(pairs)} pairs of values in the range")
        levels = []
        for band, (low, high) in enumerate(pairs):
            levels.append(to_8_bits(pixels.values[:, :, band], low, high))
        # OpenMMLab's order and number of bands: grey is three equal ones, and of three, blue is the first.
        if self.bands is None and num_bands == 1:
            levels = levels * 3
        if len(levels) == 3:
            levels.reverse()
        image = np.stack(levels, axis=2)
        if pixels.is_negative:
            image = 255 - image
        return image

    def _pairs_of(self, pixels: Pixels) -> list[Sequence[float]]:
        """The values that become 0 and 255, once for all bands or for each of them."""
        picture = Picture(dtype=pixels.values.dtype)
        if picture.dtype == np.bool_:
            return [(0, 1)]
        if picture.is_deep and self.pairs is None and pixels.window is None:
            raise PictureError(depth_loss(picture))
        pairs = self.pairs or [pixels.window or (0, 255)]
        if not picture.is_deep and max(high for _, high in pairs) > 255:  # a range for deeper pictures
            return [pixels.window or (0, 255)]
        return pairs


@TRANSFORMS.register_module()
class EachBand(BaseTransform):
    """Apply transforms to the bands of a picture one by one, and put them together again.

    For those that take grey or RGB only: Pillow's resizing takes a fourth band for alpha, which blackens the
    others where it is 0, and refuses two or five. Transforms that draw random numbers would draw for each.

    Args:
        transforms: configs of the transforms.

    Examples:
        >>> resize = dict(type="Resize", scale=(4, 4), backend="pillow")
        >>> EachBand([resize])(dict(img=np.zeros((8, 8, 5), np.uint8)))["img"].shape
        (4, 4, 5)
    """

    def __init__(self, transforms: Sequence[Mapping[str, Any]]) -> None:
        self.steps = Compose(list(transforms))

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Transform `img`; other entries are those of the first band."""
        bands = [self.steps({**results, "img": band}) for band in np.moveaxis(results["img"], 2, 0)]
        image = np.stack([band["img"] for band in bands], axis=2)
        return {**bands[0], "img": image}
