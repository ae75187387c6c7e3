"""An image's name is its path relative to the data root, computed in the same way for writing and reading."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np

from mapet_mm.utils.errors import UserError


def path_of(info: Mapping[str, Any], dataset: object) -> str:
    """Path of a dataset's image, from its `get_data_info`; UserError if the dataset holds images itself."""
    if path := info.get("img_path"):
        return path
    raise UserError(
        f"images of {type(dataset).__name__} have no `img_path`: tokens are stored by an image's path, so "
        "write the images into a folder first"
    )


def label_of(info: Mapping[str, Any]) -> int | None:
    """Class index of an image of a dataset, from what its `get_data_info` says; None unless it is one."""
    labels = np.atleast_1d(info.get("gt_label"))
    return int(labels[0]) if labels.size == 1 and labels.dtype.kind in "iu" else None


def relative_name(img_path: str | os.PathLike, root: str | os.PathLike) -> str | None:
    """Path of an image relative to a folder, '/'-separated, or None if it is not under it.

    The folder may be given in several spellings (relative, with `..`, through a symbolic link). Symbolic
    links below it are not resolved: their own names count.
    """
    working_folder = os.getcwd()
    path, folder = _absolute(img_path, working_folder), _folder(os.fspath(root), working_folder)
    if not path.startswith(folder):
        folder = _same_folder(os.path.dirname(path), folder)
    return None if folder is None else path[len(folder) :].replace(os.sep, "/")


@cache
def _folder(root: str, working_folder: str) -> str:
    return os.path.join(_absolute(os.path.join(root, ""), working_folder), "")


def _absolute(path: str | os.PathLike, working_folder: str) -> str:
    """Absolute path without `..`; the parent of a symbolic link is its target's parent."""
    path = os.path.join(working_folder, path)
    above, dots, rest = path.rpartition(f"{os.sep}{os.pardir}{os.sep}")
    return os.path.normpath(os.path.join(os.path.realpath(above + dots), rest) if dots else path)


@cache
def _same_folder(path: str, root: str) -> str | None:
    """The prefix of a path that is the root in another spelling, ending in a separator, or None."""
    for folder in (path, *map(str, PurePath(path).parents)):
        if os.path.exists(root) and os.path.exists(folder) and os.path.samefile(folder, root):
            return os.path.join(folder, "")
    return None
