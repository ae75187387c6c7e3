"""Squares beside tokens: the pixels of each image of a token store, as a pre-training sees them first.

They lie in `<store>/squares/<size>`, in parts of 1,024 rows like the tokens. `manifest.json` has the store's
id and the steps that made the squares. Once all parts are there, it also has the file of names that they
belong to, so that squares which are not complete, or not of these images, are never read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8

from mapet_mm.structures import store_files as files
from mapet_mm.structures.open_parts import OpenParts
from mapet_mm.structures.store_files import PART_ROWS, SQUARES, WRITTEN, Part, TokenStoreError, part_file
from mapet_mm.structures.stored_names import name_hashes
from mapet_mm.structures.tensor_file import TensorFile
from mapet_mm.structures.token_store import TokenStore
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.identity import explain

SQUARES_FORMAT = {"format": "mapet_mm.squares", "version": 1}
CHANNELS = 3
STORE = "run tools/store_images.py with the pre-training's config"


def find_manifest(store: TokenStore, size: int) -> dict[str, Any] | None:
    """The manifest of a store's squares of a size; None if there are none yet."""
    path = store.path / SQUARES / str(size) / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else None


class Squares:
    """The squares of a token store's images: uint8 `(size, size, 3)`, BGR, as MMCV's loaders give them.

    There is one set of squares for each size. Another pipeline for the same size is refused.

    Args:
        store: the token store.
        size: side in pixels.
        pipeline: configs of the steps that make the squares; None takes those of the squares that are there.

    Raises:
        TokenStoreError: the squares are of another store or pipeline, or there are none and no `pipeline`.
    """

    def __init__(
        self, store: TokenStore, size: int, pipeline: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self.store = store
        self.size = size
        self.folder = store.path / SQUARES / str(size)
        self.manifest = find_manifest(store, size)
        if self.manifest is None:
            if pipeline is None:
                raise TokenStoreError(f"token store `{store.path}` has no squares of {size} px: {STORE}")
            self.manifest = {**SQUARES_FORMAT, "store": store.id, "pipeline": list(pipeline), "names": None}
        self._require_same(self.manifest["pipeline"] if pipeline is None else pipeline)
        self._open_parts = OpenParts(self._open_part, SQUARES, store.require_unreplaced)

    def _require_same(self, pipeline: Sequence[Mapping[str, Any]]) -> None:
        before = {key: self.manifest[key] for key in (*SQUARES_FORMAT, "store", "pipeline")}
        now = {**SQUARES_FORMAT, "store": self.store.id, "pipeline": pipeline}
        difference = explain(before, now)
        if difference:
            raise TokenStoreError(
                f"the squares in `{self.folder}` were made otherwise ({difference}): remove the folder and "
                f"{STORE}, or restore the config"
            )

    @property
    def pipeline(self) -> list[dict[str, Any]]:
        """Configs of the steps that made the squares."""
        return self.manifest["pipeline"]

    def require_complete(self) -> None:
        """Raise TokenStoreError unless each image of the store that has tokens has a square."""
        if self.manifest["names"] != self.store.manifest["names"]:
            raise TokenStoreError(
                f"not all images of `{self.store.path}` have a square in `{self.folder}`: {STORE}"
            )

    def rows(self, prefix: str = "") -> Bool[np.ndarray, " rows"]:
        """For each row of the store, whether it has a square and its name begins with a prefix."""
        self.require_complete()
        has_square = np.zeros(len(self.store), bool)
        for start, stop in self.store.names.ranges_under(prefix, self.manifest["ascending_from"]):
            has_square[start:stop] = True
        for start, stop in self.manifest["without"]:
            has_square[start:stop] = False
        return has_square

    def read(self, rows: Sequence[int] | np.ndarray) -> UInt8[np.ndarray, "rows size size 3"]:
        """Squares of many rows, in one array; TokenStoreError if one has none."""
        squares = np.empty((len(rows), self.size, self.size, CHANNELS), np.uint8)
        for row, square in zip(rows, squares, strict=True):
            if not self._open_parts.read(int(row), square):
                name = self.store.names[int(row)]
                raise TokenStoreError(f"image `{name}` has no square in `{self.folder}`: {STORE}")
        return squares

    # What follows is for those who write and check squares.

    def begin(self) -> None:
        """Make the folder, if it is not there."""
        (self.folder / "parts").mkdir(parents=True, exist_ok=True)
        if not (self.folder / "manifest.json").exists():
            replace_json(self.folder / "manifest.json", self.manifest)

    def rows_of(self, part: int) -> range:
        """The store's rows in a part."""
        return range(part * PART_ROWS, min((part + 1) * PART_ROWS, len(self.store)))

    def empty_part(self, part: int) -> Part:
        """A part with the names and states that the store has now, and black squares."""
        rows = self.rows_of(part)
        content = files.empty_part((self.size, self.size, CHANNELS), np.dtype(np.uint8), len(rows))
        content.names[:] = name_hashes(self.store.names[rows.start : rows.stop])
        content.states[:] = self.store.states(part)
        return content

    def write(self, part: int, content: Part) -> None:
        """Write a part in one step."""
        self.store.require_unreplaced()
        files.write_part(self._part_file(part), content, SQUARES)

    def is_whole(self, part: int) -> bool:
        """Whether a part is there and has a square for each image that has tokens now."""
        file = self._open_part(part)
        if file is None:
            return False
        rows = self.rows_of(part)
        hashes = name_hashes(self.store.names[rows.start : rows.stop])
        has_names = np.array_equal(file.rows("names"), hashes)
        return has_names and np.array_equal(file.rows("states"), self.store.states(part))

    def finish(self) -> None:
        """Count the parts, which are all there: from now on the squares can be read."""
        without = np.zeros(len(self.store) + 2, bool)  # one more on either side, for the ends of ranges
        for part in range(self.store.parts):
            rows = self.rows_of(part)
            without[rows.start + 1 : rows.stop + 1] = self._open_part(part).rows("states") != WRITTEN
        ranges = np.flatnonzero(np.diff(without)).reshape(-1, 2).tolist()
        self.manifest = {
            **self.manifest,
            "names": self.store.manifest["names"],
            "ascending_from": self.store.names.ascending_stretches(),
            "without": ranges,
        }
        replace_json(self.folder / "manifest.json", self.manifest)

    def verify(self) -> None:
        """Raise TokenStoreError if a part has changed since it was written, or has other images."""
        self.require_complete()
        for part in range(self.store.parts):
            path = self._part_file(part)
            if not self.is_whole(part):
                raise files.damage_error(path, "it is gone or has other images")
            with files.open_file(path) as file:
                files.read_part(file, path, SQUARES)

    def _part_file(self, part: int) -> Path:
        return part_file(self.folder / "parts", part, self.store.id)

    def _open_part(self, part: int) -> TensorFile | None:
        return self.store.open_tensors(self._part_file(part))
