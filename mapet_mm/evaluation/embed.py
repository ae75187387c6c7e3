"""Features of a folder of images as two files, for whatever comes after."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mapet_mm.evaluation.extraction import open_features, require_few_left_out, take_features
from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import images_of_folder
from mapet_mm.evaluation.images import Data
from mapet_mm.evaluation.models import Model
from mapet_mm.utils.atomic_files import new_file, replace_file
from mapet_mm.utils.dist import is_first_process
from mapet_mm.utils.errors import UserError


def embed(model: Model, data: Data, out: Path, cache: Path, patches: bool = False) -> list[Path]:
    """Write the features of all images in a folder, in float16, and their names in the same order.

    `features.npy` has the last layer's class token and patch mean side by side `(n, 2 D)`, or the one that
    there is. Images that cannot be decoded are left out, and named.

    Args:
        model: any that is evaluated.
        data: a folder of images, searched recursively.
        out: gets `features.npy` and `names.txt`, names relative to the folder.
        cache: folder of all features, by which a killed run goes on.
        patches: write the patch tokens, too: `patches.npy`, `(n, H, W, D)`.

    Returns:
        The files.

    Raises:
        UserError: patches of a backbone without any, or more than 5 % of the images cannot be decoded.
    """
    images = images_of_folder(model.config, data)
    if patches and open_features(model, images, cache).grid == (0, 0):
        raise UserError(f"--patches: {model.name} has no patch tokens")
    out.mkdir(parents=True, exist_ok=True)  # before hours of work, if nothing can be written there
    features = take_features(model, images, cache, ["pooled", "tokens"] if patches else ["pooled"])
    require_few_left_out([images])
    if not is_first_process():
        return []
    written = [out / "features.npy", out / "names.txt"]
    _write_blocks(written[0], features, "pooled", (len(features.poolings) * features.dim,))
    if patches:
        written.append(out / "patches.npy")
        _write_blocks(written[2], features, "tokens", (*features.grid, features.dim))
    names = [os.path.relpath(images.path(index), data.path) for index in range(len(images))]
    replace_file(written[1], b"".join(os.fsencode(name) + b"\n" for name in names))
    return written


def _write_blocks(file: Path, features: Features, kind: str, shape: tuple[int, ...]) -> None:
    """Write the features of one kind as one array, a block at a time."""
    head = dict(descr="<f2", fortran_order=False, shape=(len(features), *shape))
    # Not into a map of memory: where the disk is full, that would kill the process without a word.
    with new_file(file) as partial, open(partial, "wb") as opened:
        np.lib.format.write_array_header_1_0(opened, head)
        for block in range(features.num_blocks):
            opened.write(features.read(kind, block).numpy().tobytes())
