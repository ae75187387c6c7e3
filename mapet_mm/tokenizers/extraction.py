"""Tokenise images into a token store, in any number of processes, continuing where earlier ones stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from mmengine import fileio
from torch import Tensor

from mapet_mm.models.target_generators.base import Tokenizer
from mapet_mm.structures.store import TokenStore, TokenStoreError, extend_store
from mapet_mm.tokenizers.image_groups import GroupLoader, ImageGroup
from mapet_mm.tokenizers.image_tasks import ImageTasks
from mapet_mm.tokenizers.images import NOT_FINITE, NamedImages
from mapet_mm.utils.config import with_type_names

CLAIMS = "claims"
GONE = "no longer there"  # why an image has no tokens; if it comes back, it gets them
# Most images in a block, and fewest blocks of a dataset; a block is a whole number of groups.
BLOCK_IMAGES, LEAST_BLOCKS = 1024, 64


@dataclass
class Extraction:
    """What a run of `extract_tokens` did in this process.

    Args:
        images: images tokenised.
        seconds: time since the first image.
        waited: seconds spent waiting for decoded images.
        skipped: images of the store without tokens: they could not be decoded or encoded, or are gone.
        others: images of the store that have no tokens yet and are not in this run's dataset.
    """

    images: int
    seconds: float
    waited: float
    skipped: int = 0
    others: int = 0

    def __str__(self) -> str:
        rest = left_out(self.skipped)
        if self.others:
            rest += f"; {self.others} images of the store that the dataset lacks have no tokens yet"
        if not self.images:
            return "all images had their tokens" + rest
        return (
            f"tokenised {self.images} images in {self.seconds:.0f} s: {self.images / self.seconds:.1f} "
            f"images/s, {self.waited / self.seconds:.0%} of the time waiting for data{rest}"
        )


def left_out(images: int) -> str:
    """The end of a message about images that could not be encoded; empty if there are none."""
    return f"; left {images} out that could not be decoded or encoded" if images else ""


def open_or_create(
    path: str | os.PathLike, tokenizer: Tokenizer, images: NamedImages, preprocessing: Mapping[str, Any]
) -> tuple[TokenStore, np.ndarray]:
    """Open the token store at a path; create it if absent, extend it if images are new; locate its images.

    Any number of processes may do this at once.

    Returns:
        The store, and for each of its rows the index of the image in `images`, -1 if it is not there.

    Raises:
        TokenStoreError: the store was made by another tokenizer, for another grid, with other preprocessing
            or from images in another folder.
    """
    if not Path(path).exists():
        names = images.places("reading names")
        identity = (tokenizer.grid, tokenizer.vocab_size, tokenizer.digest, images.data_root, preprocessing)
        try:
            TokenStore.create(path, names, *identity)
        except TokenStoreError:
            if not Path(path).exists():
                raise  # else another process was faster
    store = TokenStore.open(path)
    _check_identity(store, tokenizer, images, preprocessing)
    place_of_row = np.full(len(store), -1, dtype=np.int64)
    new: dict[str, None] = {}
    for place, name in images.numbered_names("looking names up"):
        row = store.row(name)
        if row is None:
            new[name] = None
        elif place_of_row[row] < 0:
            place_of_row[row] = place
    if not new:
        return store, place_of_row
    try:
        extend_store(path, sorted(new))
    except TokenStoreError:
        if all(name not in TokenStore.open(path) for name in new):
            raise  # else another process was faster
    return open_or_create(path, tokenizer, images, preprocessing)


def _check_identity(
    store: TokenStore, tokenizer: Tokenizer, images: NamedImages, preprocessing: Mapping[str, Any]
) -> None:
    store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
    if store.grid != tokenizer.grid:
        raise TokenStoreError(
            f"token store `{store.path}` has grids of {store.grid}, the tokenizer gives {tokenizer.grid}: "
            "choose another `token_store`"
        )
    recorded, found = with_type_names(store.preprocessing), with_type_names(preprocessing)
    if different := differences(recorded, found):
        raise TokenStoreError(
            f"token store `{store.path}` is of images preprocessed in another way ({different}): choose "
            "another `token_store`"
        )
    if not _same_folder(store.data_root, images.data_root):
        raise TokenStoreError(
            f"token store `{store.path}` is of images in `{store.data_root}`, the config's are in "
            f"`{images.data_root}`: choose another `token_store`, or, if this is the same folder "
            "moved, leave a link to it in its old place"
        )


def differences(recorded: Any, found: Any, where: str = "") -> str:
    """Description of the first difference between two config values; empty if they are equal."""
    if isinstance(recorded, Mapping) and isinstance(found, Mapping):
        pairs = [(key, recorded.get(key), found.get(key)) for key in {**recorded, **found}]
    elif (
        isinstance(recorded, list | tuple) and isinstance(found, list | tuple) and len(recorded) == len(found)
    ):
        pairs = [(index, *pair) for index, pair in enumerate(zip(recorded, found, strict=True))]
    else:
        return "" if recorded == found else f"{where}: {recorded}, now {found}"
    inner = (differences(one, other, f"{where}.{key}".lstrip(".")) for key, one, other in pairs)
    return next(filter(None, inner), "")


def _same_folder(recorded: str | None, found: str) -> bool:
    return recorded is None or recorded == found or os.path.realpath(recorded) == os.path.realpath(found)


def extract_tokens(
    tokenizer: Tokenizer,
    loader: GroupLoader,
    store: TokenStore,
    place_of_row: np.ndarray,
    on_error: str = "raise",
    retry_skipped: bool = False,
) -> Extraction:
    """Write the token grids missing in the store, and seal it once it is complete.

    Any number of processes and machines may do this at once: each claims blocks of rows, and at the end
    repeats blocks that were claimed but not finished.

    Args:
        tokenizer: computes the tokens on its own device.
        loader: loads the images.
        store: receives the tokens; all processes must see it.
        place_of_row: index of each row's image in the loader's dataset, -1 if it is not there.
        on_error: 'raise' leaves images missing that cannot be decoded, or for which the network gives NaN or
            infinity, and raises at the end; 'skip' records them in the store, which can then be sealed.
        retry_skipped: try the images that were skipped again.

    Raises:
        UnreadableImagesError: after the tokens of all other images are written.
    """
    start = time.perf_counter()
    work = _Rows(tokenizer, store, place_of_row, retry_skipped, loader.group_size)
    kept = f"the tokens of all others are in `{store.path}`"
    unreadable = work.run(loader, "extracting tokens", on_error, kept)
    seconds = time.perf_counter() - start
    missing = store.missing()
    others = missing[place_of_row[missing] < 0]
    if others.size == missing.size and _gone(others, store, place_of_row, loader.images.data_root):
        nothing = np.empty((0, *store.grid), dtype=np.int64)
        store.write([], nothing, dict.fromkeys(others.tolist(), GONE))
        others = others[:0]
    if not store.missing().size:
        store.seal()
        work.shared.clear()
    return Extraction(work.total - unreadable, seconds, loader.waited, len(store.skipped), others.size)


def _gone(
    rows: Int64[np.ndarray, " rows"], store: TokenStore, place_of_row: np.ndarray, data_root: str
) -> bool:
    """Whether these images, which the dataset lacks, have been removed since the store was made.

    Where not even an image of the dataset is found by its path, images are read in another way: nothing is
    known then.
    """
    exists = lambda row: fileio.exists(fileio.join_path(data_root, store.names[row]))  # noqa: E731
    present = np.flatnonzero(place_of_row >= 0)
    return bool(rows.size and present.size) and exists(present[0]) and not any(map(exists, rows))


class _Rows(ImageTasks):
    """The rows that an extraction has to write; a task is one block."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        store: TokenStore,
        place_of_row: np.ndarray,
        retry_skipped: bool,
        group_size: int,
    ) -> None:
        self.tokenizer, self.store, self.place_of_row = tokenizer, store, place_of_row
        self.retry_skipped = retry_skipped
        groups = max(1, min(BLOCK_IMAGES, len(place_of_row) // LEAST_BLOCKS) // group_size)
        self.block = groups * group_size
        numbers, counts = np.unique(self._left() // self.block, return_counts=True)
        super().__init__(store.path / CLAIMS, dict(zip(numbers.tolist(), counts.tolist(), strict=True)))

    def _left(self) -> Int64[np.ndarray, " rows"]:
        """Rows of the images that no process has written yet."""
        missing = self.store.missing(with_skipped=True)
        if not self.retry_skipped:
            skipped = [self.store.row(name) for name, why in self.store.skipped.items() if why != GONE]
            missing = np.setdiff1d(missing, skipped)
        return missing[self.place_of_row[missing] >= 0]

    def done(self, tasks: Sequence[int]) -> set[int]:
        return set(tasks) - set((self._left() // self.block).tolist())

    def lacking(self, task: int) -> dict[int, int]:
        rows = self._left()
        rows = rows[rows // self.block == task]
        return dict(zip(self.place_of_row[rows].tolist(), rows.tolist(), strict=True))

    def encode(self, group: ImageGroup) -> Iterable[Tensor]:
        # Results stay on the device until the task is complete, because copying waits for the device.
        return self.tokenizer(group.inputs)

    def checked(self, results: Mapping[int, Tensor]) -> dict[int, np.ndarray | str]:
        if not results:
            return {}
        tokens = torch.stack(list(results.values())).cpu().numpy()
        finite = (tokens >= 0).all(axis=1)
        return {
            place: row if good else NOT_FINITE
            for place, row, good in zip(results, tokens, finite, strict=True)
        }

    def write(self, task: int, results: Mapping[int, np.ndarray], skipped: Mapping[int, str]) -> None:
        grids = np.array(list(results.values()), dtype=np.int64).reshape(-1, *self.store.grid)
        self.store.write(list(results), grids, skipped)
