"""Squares beside tokens: the pixels of each image of a token store, as a pre-training sees them first.

They lie in `<store>/squares/<size>`, in parts of 1,024 rows like the tokens. `manifest.json` has the store's
id and the steps that made the squares. Once all parts are there, it also has the file of names that they
belong to, so that squares which are not complete, or not of these images, are never read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8

from mapet_mm.structures.manifest import new_store_folder
from mapet_mm.structures.names import name_hashes
from mapet_mm.structures.parts import PENDING, SKIPPED, WRITTEN, Part, Parts
from mapet_mm.structures.tensor_file import TokenStoreError, damage_error
from mapet_mm.structures.token_store import NO_TOKENIZER, PART_ROWS, TokenStore
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.identity import explain

SQUARES_FORMAT = {"format": "mapet_mm.squares", "version": 1}
SQUARES = "squares"
CHANNELS = 3  # unless a manifest names another number
STORE = "run `mapet-mm store-images` with the pre-training's config"


def find_manifest(store: TokenStore, size: int) -> dict[str, Any] | None:
    """The manifest of a store's squares of a size; None if there are none yet."""
    path = store.path / SQUARES / str(size) / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else None


class Squares(Parts):
    """The squares of a token store's images: uint8 `(size, size, 3)`, BGR, as MMCV's loaders give them.

    Images of another number of bands have squares of as many. There is one set of squares for each size.
    Another pipeline for the same size is refused.

    Args:
        store: the token store.
        size: side in pixels.
        pipeline: configs of the steps that make the squares; None takes those of the squares that are there.
        channels: of the squares, unless they are there.

    Raises:
        TokenStoreError: the squares are of another store or pipeline, or there are none and no `pipeline`.
    """

    refuses_others = False

    def __init__(
        self,
        store: TokenStore,
        size: int,
        pipeline: Sequence[Mapping[str, Any]] | None = None,
        channels: int = CHANNELS,
    ) -> None:
        self.store = store
        self.size = size
        self.manifest = find_manifest(store, size)
        if self.manifest is None:
            if pipeline is None:
                raise TokenStoreError(f"token store `{store.path}` has no squares of {size} px: {STORE}")
            self.manifest = {**SQUARES_FORMAT, "store": store.id, "pipeline": list(pipeline), "names": None}
            if channels != CHANNELS:
                self.manifest["channels"] = channels
        folder = store.path / SQUARES / str(size)
        shape = (size, size, self.manifest.get("channels", CHANNELS))
        super().__init__(folder, store.id, SQUARES, shape, np.uint8, store.names, PART_ROWS)
        self._require_same(self.manifest["pipeline"] if pipeline is None else pipeline)

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

    def has_square(self, prefix: str = "") -> Bool[np.ndarray, " rows"]:
        """For each row of the store, whether it has a square and its name begins with a prefix."""
        self.require_complete()
        has_square = np.zeros(len(self.store), bool)
        for start, stop in self.store.names.ranges_under(prefix, self.manifest["ascending_from"]):
            has_square[start:stop] = True
        for start, stop in self.manifest["without"]:
            has_square[start:stop] = False
        return has_square

    def read(self, rows: Sequence[int] | np.ndarray) -> UInt8[np.ndarray, "rows size size channel"]:
        """Squares of many rows, in one array; TokenStoreError if one has none."""
        squares = np.empty((len(rows), *self.shape), np.uint8)
        for row, square in zip(rows, squares, strict=True):
            if not self.read_row(int(row), square):
                name = self.store.names[int(row)]
                raise TokenStoreError(f"image `{name}` has no square in `{self.folder}`: {STORE}")
        return squares

    # What follows is for those who write and check squares.

    def require_unreplaced(self) -> None:
        """Raise TokenStoreError if another store was made in the place of this one."""
        self.store.require_unreplaced()

    def empty(self, part: int) -> Part:
        """Black squares, and no room for further images; those that the store skipped have none."""
        names = self.names_in(part)
        content = Part.empty(len(names), self.shape, self.dtype)
        content.names[:] = name_hashes(names)
        content.states[self.store.parts.states(part) == SKIPPED] = SKIPPED
        return content

    def states(self, part: int) -> UInt8[np.ndarray, " rows"]:
        """As of all parts; a row that another image had when its square was made is pending."""
        states = super().states(part)
        file = self.open(part)
        if file is not None:
            hashes = name_hashes(self.names_in(part))
            stored = file.rows("names", 0, len(hashes))
            is_other = stored != hashes[: len(stored)]
            states[: len(stored)][is_other] = PENDING
        return states

    def begin(self) -> None:
        """Make the folder, if it is not there."""
        (self.folder / "parts").mkdir(parents=True, exist_ok=True)
        if not (self.folder / "manifest.json").exists():
            replace_json(self.folder / "manifest.json", self.manifest)

    def missing_in(self, part: int) -> Bool[np.ndarray, " rows"]:
        """For each row of a part, whether its image has tokens and no square."""
        return (self.store.parts.states(part) == WRITTEN) & (self.states(part) != WRITTEN)

    def finish(self) -> None:
        """Count the parts, which are all there: from now on the squares can be read."""
        without = np.zeros(len(self.store) + 2, bool)  # one more on either side, for the ends of ranges
        without[1:-1] = self.all_states() != WRITTEN
        ranges = np.flatnonzero(np.diff(without)).reshape(-1, 2).tolist()
        self.manifest = {
            **self.manifest,
            "names": self.store.manifest["names"],
            "ascending_from": self.store.names.ascending_stretches(),
            "without": ranges,
        }
        replace_json(self.folder / "manifest.json", self.manifest)

    def verify(self) -> None:
        """Raise TokenStoreError if a part has changed since it was written, or lacks a square."""
        self.require_complete()
        super().verify()
        for part in range(len(self)):
            if self.missing_in(part).any():
                raise damage_error(self.file(part), "it is gone or lacks squares")


def images_store(path: str | os.PathLike, names: Sequence[str], data_root: str | os.PathLike) -> TokenStore:
    """Open the store of images that get no tokens; make it if there is none.

    Its grids are empty. It says which images can be decoded, all of them at first, and has their squares. Any
    number of processes may call this at once.
    """
    identity = dict(grid=(0, 0), vocab_size=0, tokenizer=NO_TOKENIZER, preprocessing=None)
    identity["data_root"] = str(data_root)
    if not Path(path).exists():
        try:
            with new_store_folder(Path(path), names, identity) as folder:
                TokenStore(folder).write(range(len(names)), np.empty((len(names), 0, 0), np.uint16))
        except TokenStoreError:  # another process was faster
            if not Path(path).exists():
                raise
    return TokenStore.open(path)
