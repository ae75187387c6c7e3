"""An image's name is its path relative to the data root, computed in the same way for writing and reading."""

from __future__ import annotations

import os
from pathlib import Path


def relative_name(img_path: str | os.PathLike, root: str | os.PathLike) -> str | None:
    """Path of an image relative to a folder, '/'-separated, or None if it is not under it.

    Symbolic links below the folder are not resolved: their own names count. Where the paths alone do not lead
    from one to the other, or go up (`link/..` is not the folder of the link), both are resolved.
    """
    path = os.fspath(img_path)
    name = os.path.relpath(path, root)
    if _leaves(name) or os.pardir in path.split(os.sep):
        name = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
    return None if _leaves(name) else name.replace(os.sep, "/")


def read_lines(file: str | os.PathLike) -> list[str]:
    """The lines of a list of images, without empty ones.

    A name may hold U+2028 and other characters at which `str.splitlines` would end a line.
    """
    return [line for line in Path(file).read_text().split("\n") if line]


def _leaves(name: str) -> bool:
    """True if a relative path is the folder itself or leads out of it."""
    return name.split(os.sep)[0] in (os.curdir, os.pardir)
