"""Folders of written datasets: complete or absent, and identified by the options that made them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mapet_mm.utils.atomic_files import new_folder
from mapet_mm.utils.identity import explain

# Raised whenever the files written for the same options change, so that old folders are noticed.
FORMAT = 1


def write_folder(out: Path, marker: str, options: dict[str, Any], fill: Callable[[Path], None]) -> bool:
    """Make a folder, unless it is there with the same options, and print what was done.

    Args:
        out: the folder.
        marker: name of the file in it that keeps the options.
        options: everything that decides the content, as JSON.
        fill: writes the content into an empty folder.

    Returns:
        True if the folder was written.

    Raises:
        FileExistsError: `out` holds data of other options, or something that this tool did not write.
    """
    if written := not out.exists():
        with new_folder(out) as partial:
            fill(partial)
            libraries = {name: version(name) for name in ("scikit-learn", "numpy", "pillow")}
            kept = {"format": FORMAT, "options": options, "libraries": libraries}
            (partial / marker).write_text(json.dumps(kept, indent=2) + "\n")
    elif not (out / marker).is_file():
        raise FileExistsError(f"{out} was not written by this tool (no {marker}): take another --out")
    else:
        kept = json.loads((out / marker).read_text())
        if changed := explain((kept["format"], kept["options"]), (FORMAT, options)):
            raise FileExistsError(f"{out} was written with other options ({changed}): remove it first")
    print(f"{out}: {'written' if written else 'already there, left as it is'}", flush=True)
    return written


def write_list(path: Path, images: Iterable[tuple[str, int]]) -> None:
    """Write a list for MMPretrain's `CustomDataset`: one image path and class per line."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{name} {label}\n" for name, label in images))


def fill_labelled(
    folder: Path, part: str, images: Iterable[tuple[np.ndarray, np.ndarray, list[dict]]], noun: str
) -> None:
    """Write images with pixel labels as ADE20K's are, and the things in each to `meta/<part>.jsonl`.

    Args:
        folder: gets `{images,annotations}/<part>/<number>.png`.
        part: "training" or "validation".
        images: image (H, W, 3) uint8, label (H, W) uint8, 0 = background, and what is in it.
        noun: names a thing in the list.
    """
    images_folder = folder / "images" / part
    labels_folder = folder / "annotations" / part
    for made in (images_folder, labels_folder, folder / "meta"):
        made.mkdir(parents=True, exist_ok=True)
    with (folder / "meta" / f"{part}.jsonl").open("w") as meta:
        for index, (image, label, things) in enumerate(images):
            name = f"{index:05d}.png"
            Image.fromarray(image).save(images_folder / name)
            Image.fromarray(label).save(labels_folder / name)
            meta.write(json.dumps({"name": name, f"{noun}s": things}) + "\n")
