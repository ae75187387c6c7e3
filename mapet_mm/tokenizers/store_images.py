"""Store the square of each image of a token store, in any number of processes that may be killed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope
from tqdm import tqdm

from mapet_mm.structures import TokenStore, TokenStoreError
from mapet_mm.structures.squares import CHANNELS, Squares
from mapet_mm.structures.store_files import WRITTEN, Part
from mapet_mm.tokenizers.fit_and_extract import as_json
from mapet_mm.tokenizers.images import ImageReader, UndecodableError
from mapet_mm.utils.atomic_files import remove_stale
from mapet_mm.utils.config import require_entries, scope_of, type_name
from mapet_mm.utils.disk import require_room
from mapet_mm.utils.dist import process_number
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.utils.shared_work import my_blocks

# The square is what comes before the first of these in a pipeline.
ENDS = ("ColorJitter", "LoadTokenGrid", "PackInputs")


@dataclass(frozen=True)
class SquareLoader:
    """Makes the square of an image of a token store.

    Attributes:
        store: the token store.
        pipeline: configs of the steps that make a square.
        data_root: folder of the names in the store.
        steps: the steps themselves.
    """

    store: TokenStore
    pipeline: list[dict[str, Any]]
    data_root: str
    steps: Compose

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
        store = TokenStore.open(load["store"])
        steps = Compose(list(square))
        steps.transforms[0] = ImageReader(steps.transforms[0])
        return cls(store, as_json(square), str(load.get("data_root") or store.data_root), steps)

    def path(self, row: int) -> str:
        """Path of an image."""
        return os.path.join(self.data_root, self.store.names[row])

    def load(self, row: int) -> UInt8[np.ndarray, "height width 3"]:
        """The square of an image; UndecodableError if its file cannot be decoded."""
        image = self.steps({"img_path": self.path(row)})["img"]
        if image.ndim != 3 or image.dtype != np.uint8 or image.shape[0] != image.shape[1]:
            shape = " x ".join(map(str, image.shape))
            raise UserError(
                f"the pipeline makes {image.dtype} of {shape} from `{self.path(row)}`: the steps before "
                f"{', '.join(ENDS[:-1])} have to make squares of {CHANNELS} channels of 8 bit, of one size"
            )
        return image

    def first(self) -> int:
        """The first row with tokens; TokenStoreError unless the store has tokens for all its images."""
        missing = self.store.missing().size
        written = np.flatnonzero(self.store.written())
        if missing or not written.size:
            raise TokenStoreError(
                f"token store `{self.store.path}` has no tokens for {missing} of {len(self.store)} images: "
                "run `mapet-mm extract-tokens` first"
            )
        return int(written[0])

    def size(self) -> int:
        """Side of a square in pixels, of the first image; UserError if the steps draw random numbers."""
        before = random_states()
        image = self.load(self.first())
        if random_states() != before:
            raise UserError(
                "the steps that make the square draw random numbers, so it would not be the same in every "
                f"epoch: put such a step after {' or '.join(ENDS[:-1])}"
            )
        return len(image)


def random_states() -> tuple[object, ...]:
    """The state of each generator that a transform may draw from."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def store_images(loader: SquareLoader) -> tuple[Squares, int]:
    """Store the squares that are missing; returns them all, and how many images were decoded here.

    Any number of processes and machines may do this at once. Each writes whole parts; a kill costs the part
    that is being made, a few seconds.

    Raises:
        UserError: the disk has no room for the squares, or an image cannot be decoded.
        TokenStoreError: the squares that are there are of other steps, or the store lacks tokens.
    """
    squares = Squares(loader.store, loader.size(), loader.pipeline)
    squares.begin()
    remove_stale(squares.folder / "parts")
    parts = [part for part in range(loader.store.parts) if not squares.is_whole(part)]
    missing = sum(len(squares.rows_of(part)) for part in parts)
    what = f"{len(squares.store):,} squares of {squares.size} x {squares.size} px"
    remedy = "make the folder a link to another disk"
    require_room(squares.folder, missing * squares.size**2 * CHANNELS, what, remedy)
    num_decoded = write_parts(loader, squares, missing)
    squares.finish()
    return squares, num_decoded


def write_parts(loader: SquareLoader, squares: Squares, num_missing: int) -> int:
    """Write the parts of this process, then those that others have left; returns the number of images."""
    rank, num_processes = process_number()
    failed: dict[int, dict[str, str]] = {}
    num_decoded = 0
    with tqdm(total=num_missing, desc="storing squares", unit="image", disable=rank > 0) as bar:

        def advance() -> None:
            bar.update(min(num_processes, num_missing - bar.n))  # the others are about as fast

        for part in my_blocks(loader.store.parts, lambda part: part in failed or squares.is_whole(part)):
            content, reasons = make_part(loader, squares, part, advance)
            num_decoded += len(content.states)
            if reasons:
                failed[part] = reasons
            elif not squares.is_whole(part):  # another process may have been faster
                squares.write(part, content)
    reasons = {path: reason for by_path in failed.values() for path, reason in by_path.items()}
    if reasons:
        path = next(iter(reasons))
        raise UserError(
            f"{len(reasons)} images with tokens could not be decoded ({listed(list(reasons), most=3)}; the "
            f"first: {reasons[path]}): restore them and run the same command again; all parts without them "
            f"are in `{squares.folder}`"
        )
    return num_decoded


def make_part(
    loader: SquareLoader, squares: Squares, part: int, advance: Callable[[], None]
) -> tuple[Part, Mapping[str, str]]:
    """The squares of a part, and by path why images could not be decoded."""
    content = squares.empty_part(part)
    reasons = {}
    for slot, row in enumerate(squares.rows_of(part)):
        if content.states[slot] == WRITTEN:
            try:
                content.values[slot] = square_of_size(loader, row, squares.size)
            except UndecodableError as error:
                reasons[loader.path(row)] = str(error)
        advance()
    return content, reasons


def square_of_size(loader: SquareLoader, row: int, size: int) -> UInt8[np.ndarray, "size size 3"]:
    """The square of an image; UserError if it has another size than the first image's."""
    square = loader.load(row)
    if len(square) != size:
        raise UserError(
            f"the pipeline makes {len(square)} px from `{loader.path(row)}` and {size} px from the first "
            "image: resize all images to one size"
        )
    return square


def verify_images(loader: SquareLoader, count: int = 256) -> tuple[Squares, str]:
    """Check the files of the squares, and `count` random ones against newly decoded images.

    Raises:
        TokenStoreError: a file has changed, or an image is not the square's any more.
    """
    squares = Squares(loader.store, loader.size(), loader.pipeline)
    squares.verify()
    rows = np.flatnonzero(squares.rows())
    drawn = np.sort(np.random.default_rng(0).permutation(rows)[:count])
    for row in drawn.tolist():
        if not np.array_equal(squares.read([row])[0], loader.load(row)):
            raise TokenStoreError(
                f"image `{loader.path(row)}` is not what its square in `{squares.folder}` was made of: give "
                "it another name, so that it counts as new, or remove the folder and run "
                "`mapet-mm store-images` again"
            )
    return squares, f"{len(drawn)} squares are those of their images"
