"""Store the square of each image of a token store, in any number of processes that may be killed."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope

from mapet_mm.datasets.reading import ImageReader, UndecodableError
from mapet_mm.structures import TokenStore, TokenStoreError
from mapet_mm.structures.names import read_lines
from mapet_mm.structures.parts import PENDING, WRITTEN
from mapet_mm.structures.squares import Squares, images_store
from mapet_mm.tokenizers.fill import GROUP_SIZE, ImageGroup, fill
from mapet_mm.tokenizers.images import LARGEST_SKIPPED, note_skipped
from mapet_mm.utils.config import require_entries, scope_of, type_name
from mapet_mm.utils.disk import require_room
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.utils.identity import as_json

# The square is what comes before the first of these in a pipeline.
ENDS = ("ColorJitter", "LoadTokenGrid", "PackInputs")


@dataclass(frozen=True)
class SquareLoader:
    """Makes the square of an image of a token store.

    Attributes:
        store: the token store, or one without tokens, whose images are left out if they cannot be decoded.
        pipeline: configs of the steps that make a square.
        data_root: folder of the names in the store.
        steps: the steps themselves.
        max_skipped: largest share of the images that may be left out.
        group_size: squares that are made between two looks at what other processes have written.
    """

    store: TokenStore
    pipeline: list[dict[str, Any]]
    data_root: str
    steps: Compose
    max_skipped: float = LARGEST_SKIPPED
    group_size: int = GROUP_SIZE

    @classmethod
    def from_config(cls, cfg: Config) -> SquareLoader:
        """Find store and steps in a pre-training's config, of decoded or of stored images.

        Raises:
            UserError: the training set has no LoadTokenGrid, or no step before its jitter.
        """
        require_entries(
            cfg, "train_dataloader", remedy="give the config of a pre-training, not of a tokenizer"
        )
        dataset = cfg.train_dataloader.dataset
        while "dataset" in dataset:  # inside a wrapper, as RepeatDataset
            dataset = dataset.dataset
        if type_name(dataset.type) == "StoredImages":
            load, square = dataset, dataset.get("square")
        else:
            pipeline = dataset.get("pipeline", [])
            load = next((step for step in pipeline if type_name(step.type) == "LoadTokenGrid"), None)
            square = list(takewhile(lambda step: type_name(step.type) not in ENDS, pipeline))
        if load is None or not square:
            raise UserError(
                f"the training set of `{cfg.filename}` does not say which images to store: its pipeline has "
                "to begin with the steps that make the square and have LoadTokenGrid, or it is StoredImages "
                "with `square` and `store`"
            )
        init_default_scope(scope_of(cfg))
        if load.get("names"):
            store = images_store(load["store"], read_lines(load["names"]), load["data_root"])
        else:
            store = TokenStore.open(load["store"])
        steps = Compose(list(square))
        steps.transforms[0] = ImageReader(steps.transforms[0])
        root = str(load.get("data_root") or store.data_root)
        return cls(store, as_json(square), root, steps, cfg.get("max_skipped", LARGEST_SKIPPED))

    def path(self, row: int) -> str:
        """Path of an image."""
        return os.path.join(self.data_root, self.store.names[row])

    def load(self, groups: Iterable[tuple[int, Sequence[int]]]) -> Iterator[ImageGroup]:
        """Squares of images in groups: pairs of a part's index and rows of the store."""
        for part, rows in groups:
            squares, reasons = {}, {}
            for row in map(int, rows):
                try:
                    squares[row] = self.square(row)
                except UndecodableError as error:
                    reasons[row] = str(error)
            yield ImageGroup(part, list(squares), list(squares.values()), reasons)

    def square(self, row: int) -> UInt8[np.ndarray, "height width channel"]:
        """The square of an image; UndecodableError if its file cannot be decoded."""
        image = self.steps({"img_path": self.path(row)})["img"]
        if image.ndim != 3 or image.dtype != np.uint8 or image.shape[0] != image.shape[1]:
            shape = " x ".join(map(str, image.shape))
            raise UserError(
                f"the pipeline makes {image.dtype} of {shape} from `{self.path(row)}`: the steps before "
                f"{', '.join(ENDS[:-1])} have to make squares of 8 bit, of one size"
            )
        return image

    def first(self) -> UInt8[np.ndarray, "height width channel"]:
        """The square of the first image that can be decoded.

        Raises:
            TokenStoreError: the store has not got tokens for all its images.
            UserError: no image can be decoded.
        """
        missing = self.store.missing().size
        written = np.flatnonzero(self.store.written())
        if missing or not written.size:
            raise TokenStoreError(
                f"token store `{self.store.path}` has no tokens for {missing} of {len(self.store)} images: "
                "run `mapet-mm extract-tokens` first"
            )
        for row in written.tolist():
            with suppress(UndecodableError):
                return self.square(row)
        raise UserError(f"none of the {len(written)} images in {self.data_root} can be decoded")

    def squares(self) -> Squares:
        """All squares, of the shape of the first image's; UserError if the steps draw random numbers."""
        before = random_states()
        image = self.first()
        if random_states() != before:
            raise UserError(
                "the steps that make the square draw random numbers, so it would not be the same in every "
                f"epoch: put such a step after {' or '.join(ENDS[:-1])}"
            )
        size, _, channels = image.shape
        return Squares(self.store, size, self.pipeline, channels)


def random_states() -> tuple[object, ...]:
    """The state of each generator that a transform may draw from."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def store_images(loader: SquareLoader, retry_skipped: bool = False) -> tuple[Squares, int]:
    """Store the squares that are missing; returns them all, and how many images were decoded here.

    Any number of processes and machines may do this at once. Each writes whole parts; a kill costs the part
    that is being made, a few seconds.

    Args:
        loader: of the images.
        retry_skipped: try images without tokens again that were left out; without it, only if they are too
            many.

    Raises:
        UserError: the disk has no room for the squares, or an image with tokens cannot be decoded, or more
            than `max_skipped` of those without.
        TokenStoreError: the squares that are there are of other steps, or the store lacks tokens.
    """
    store = loader.store
    squares = loader.squares()
    squares.begin()
    has_tokens = store.has_tokens
    is_to_have = store.written() if has_tokens else np.ones(len(store), bool)
    retry_skipped = has_tokens or retry_skipped or len(store.skipped) > loader.max_skipped * len(store)
    image_of_row = np.where(is_to_have, np.arange(len(store)), -1)
    states = squares.all_states()
    is_pending = states != WRITTEN if retry_skipped else states == PENDING
    missing = int((is_to_have & is_pending).sum())
    what = f"{len(store):,} squares of {squares.size} x {squares.size} px"
    remedy = "make the folder a link to another disk"
    require_room(squares.folder, missing * math.prod(squares.shape), what, remedy)

    def of_one_size(group: ImageGroup) -> list[UInt8[np.ndarray, "size size channel"]]:
        for row, square in zip(group.indices, group.inputs, strict=True):
            require_shape(square, squares.shape, loader.path(row))
        return group.inputs

    num_written, failed = fill(
        squares,
        image_of_row,
        loader,
        of_one_size,
        "storing squares",
        skips=not has_tokens,
        retry_skipped=retry_skipped,
    )
    if not has_tokens:
        leave_out(squares, loader)
    elif failed:
        paths = list(map(loader.path, failed))
        raise UserError(
            f"{len(failed)} images with tokens could not be decoded ({listed(paths, most=3)}; the first: "
            f"{next(iter(failed.values()))}): restore them and run the same command again; the squares of "
            f"all others are in `{squares.folder}`"
        )
    squares.finish()
    return squares, num_written


def leave_out(squares: Squares, loader: SquareLoader) -> None:
    """Note in a store without tokens which images can be decoded.

    Raises:
        UserError: too many cannot.
    """
    store = squares.store
    has_square = squares.all_states() == WRITTEN
    repaired = np.flatnonzero(has_square & ~store.written())
    skipped = dict(zip(store.rows(squares.skipped).tolist(), squares.skipped.values(), strict=True))
    store.write(repaired, np.empty((len(repaired), *store.grid), store.dtype), skipped)
    reasons = {loader.path(row): reason for row, reason in skipped.items()}
    note = note_skipped(reasons, len(store), store.path / "skipped.txt", loader.max_skipped)
    if note:
        print_once(note.removeprefix("; "))


def require_shape(
    square: UInt8[np.ndarray, "height width channel"], shape: tuple[int, ...], path: str
) -> None:
    """Raise UserError if a square has another size or number of bands than the first image's."""
    if square.shape != tuple(shape):
        raise UserError(
            f"the pipeline makes {len(square)} px in {square.shape[2]} bands from `{path}`, and "
            f"{shape[0]} px in {shape[2]} bands from the first image: resize all images to one size"
        )


def verify_images(loader: SquareLoader, count: int = 256) -> tuple[Squares, str]:
    """Check the files of the squares, and `count` random ones against newly decoded images.

    Raises:
        TokenStoreError: a file has changed, or an image is not the square's any more.
    """
    squares = loader.squares()
    squares.verify()
    rows = np.flatnonzero(squares.has_square())
    drawn = np.sort(np.random.default_rng(0).permutation(rows)[:count])
    for row in drawn.tolist():
        if not np.array_equal(squares.read([row])[0], loader.square(row)):
            raise TokenStoreError(
                f"image `{loader.path(row)}` is not what its square in `{squares.folder}` was made of: give "
                "it another name, so that it counts as new, or remove the folder and run "
                "`mapet-mm store-images` again"
            )
    return squares, f"{len(drawn)} squares are those of their images"
