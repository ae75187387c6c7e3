"""Which images a RUN was pre-trained on: figures on these may be better than on new ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache

from mapet_mm.structures.image_files import file_of
from mapet_mm.structures.names import read_lines
from mapet_mm.utils.run_folder import IMAGES, TRAINED, Run

WARNING = "in the pre-training, without labels: on new images figures may be lower"


def pretrained_on(run: Run, paths: Iterable[str]) -> set[str]:
    """Those of some images that a RUN was pre-trained on: the same files; of copies it knows nothing.

    Args:
        run: the folder. One without a list of its images says none.
        paths: of the images. Those of tiles count as their file.
    """
    listed = run / (TRAINED if run.held_out else IMAGES)
    if not listed.is_file():
        return set()
    resolved = cache(os.path.realpath)  # of folders, which are few

    def place(path: str) -> str:
        folder, name = os.path.split(file_of(path))
        return os.path.join(resolved(folder), name)

    root = os.path.join(run, run.trained_images)
    trained = {place(os.path.join(root, name)) for name in read_lines(listed)}
    return {path for path in paths if place(path) in trained}
