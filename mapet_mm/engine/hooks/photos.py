"""Photos that lie turned in their files, and whether a loading step shows them upright, as EXIF asks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from mapet_mm.engine.hooks.alignment_patterns import grey, matching_share, pattern, views_of

ORIENTATION, UPRIGHT, ON_ITS_SIDE = 0x0112, 1, 6  # a tag of EXIF, and two of its values
# Of the photo that loading steps are tried on: patches, and pixels per side of each.
PATCHES, SIDE = (6, 8), 16


def turns_photos(load: Callable[[dict], dict | None], info: Mapping[str, Any]) -> bool | None:
    """Whether a loading step shows a photo upright; None if it does not read photos from files.

    It gets a JPEG that EXIF says to turn by a quarter. What becomes of its colours and size does not matter.

    Args:
        load: reads `img_path` into `img`.
        info: what a dataset says of an image.
    """
    lying = pattern((PATCHES[0] * SIDE, PATCHES[1] * SIDE), SIDE)
    exif = Image.Exif()
    exif[ORIENTATION] = ON_ITS_SIDE
    with TemporaryDirectory() as folder:
        path = Path(folder, "photo.jpg")
        Image.fromarray(lying).save(path, exif=exif)
        try:
            read = grey(_of_local_files(load)({**info, "img_path": str(path)})["img"])
        except Exception:
            return None
    for turns, expected, patches in (True, np.rot90(lying, -1), PATCHES[::-1]), (False, lying, PATCHES):
        ids = np.arange(PATCHES[0] * PATCHES[1]).reshape(patches)
        share = matching_share(read, ids, views_of(expected, patches))
        if share is not None and share > 0.9:
            return turns
    return None


def first_turned(paths: Iterable[str]) -> str | None:
    """The first image that EXIF says to turn, or that cannot be looked into, in words; None without one."""
    for path in paths:
        exif = Image.Exif()
        try:
            with Image.open(path) as image:
                exif.load(image.info.get("exif", b""))  # `getexif` would decode PNGs
        except Exception as error:
            return f"`{path}` may be one ({type(error).__name__} on looking into it)"
        if (orientation := exif.get(ORIENTATION, UPRIGHT)) != UPRIGHT:
            return f"`{path}` is one (orientation {orientation})"
    return None


def _of_local_files(load: Callable) -> Callable:
    """A copy of a loading step that does not look into another storage, as MMCV's can."""
    load = copy.copy(load)
    for option in ("backend_args", "file_client_args"):
        if getattr(load, option, None) is not None:
            setattr(load, option, None)
    return load
