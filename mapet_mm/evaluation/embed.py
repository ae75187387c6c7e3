"""Features of a folder of images as two files, for whatever comes after."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mapet_mm.evaluation.extraction import open_bank, require_few_left_out, take_features
from mapet_mm.evaluation.features import FeatureBank
from mapet_mm.evaluation.image_sets import images_of_folder
from mapet_mm.evaluation.models import Model
from mapet_mm.utils.atomic_files import new_file, replace_file
from mapet_mm.utils.dist import is_first_process
from mapet_mm.utils.errors import UserError


def embed(
    model: Model, folder: Path, out: Path, cache: Path, patches: bool = False, workers: int | None = None
) -> list[Path]:
    """Write the features of all images in a folder, in float16, and their names in the same order.

    `features.npy` has the last layer's class token and patch mean side by side `(n, 2 D)`, or the one that
    there is. Images that cannot be decoded are left out, and named.

    Args:
        model: any that is evaluated.
        folder: of images, searched recursively.
        out: gets `features.npy` and `names.txt`, names relative to the folder.
        cache: folder of all features, by which a killed run goes on.
        patches: write the patch tokens, too: `patches.npy`, `(n, H, W, D)`.
        workers: see `read_image_sets`.

    Returns:
        The files.

    Raises:
        UserError: patches of a backbone without any, or more than 5 % of the images cannot be decoded.
    """
    images = images_of_folder(model.config, folder, workers)
    if patches and open_bank(model, images, cache).grid == (0, 0):
        raise UserError(f"--patches: {model.name} has no patch tokens")
    bank = take_features(model, images, cache, ["pooled", "tokens"] if patches else ["pooled"])
    require_few_left_out([images])
    if not is_first_process():
        return []
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "features.npy", out / "names.txt"]
    _write_blocks(written[0], bank, "pooled", (len(bank.poolings) * bank.dim,))
    if patches:
        written.append(out / "patches.npy")
        _write_blocks(written[2], bank, "tokens", (*bank.grid, bank.dim))
    names = [os.path.relpath(images.path(index), folder) for index in range(len(images))]
    replace_file(written[1], b"".join(os.fsencode(name) + b"\n" for name in names))
    return written


def _write_blocks(file: Path, bank: FeatureBank, kind: str, shape: tuple[int, ...]) -> None:
    """Write the features of one kind as one array, a block at a time."""
    with new_file(file) as partial:
        values = np.lib.format.open_memmap(partial, "w+", np.float16, (len(bank), *shape))
        for block in range(bank.num_blocks):
            own = bank.read(kind, block).numpy()
            values[bank.rows(block)] = own.reshape(len(own), *shape)
        values.flush()
