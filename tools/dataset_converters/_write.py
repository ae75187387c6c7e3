"""Folders of written datasets: complete or absent, and identified by the options that made them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
