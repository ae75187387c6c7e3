"""Tokenise images into a token store, by any number of processes, continuing where an earlier run stopped."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mmengine.dist import all_gather_object, barrier, get_rank, get_world_size, is_main_process
from torch import Tensor, nn
from tqdm import tqdm

from mapet_mm.tokenizers.encoding import GROUP_SIZE, GroupedImages, ImageGroup, split
from mapet_mm.tokenizers.frozen import FrozenTokenizer
from mapet_mm.tokenizers.images import NamedImages, UnreadableImagesError
from mapet_mm.tokenizers.kclip import KCLIP
from mapet_mm.tokenizers.token_store import TokenStore, TokenStoreError
from mapet_mm.tokenizers.token_store_changes import extend_store

Tokenizer = KCLIP | FrozenTokenizer
# Groups computed and not yet on disk: enough to keep the device busy through a slow write.
QUEUED_GROUPS = 4


@dataclass
class Extraction:
    """What a run of `extract_tokens` did, over all processes.

    Args:
        images: images tokenised.
        seconds: from the first image on.
        waited: seconds, of the mean process, spent waiting for decoded images.
    """

    images: int
    seconds: float
    waited: float

    def __str__(self) -> str:
        if not self.images:
            return "all images had their tokens"
        return (
            f"tokenised {self.images} images in {self.seconds:.0f} s: {self.images / self.seconds:.1f} "
            f"images/s, {self.waited / self.seconds:.0%} of the time waiting for data"
        )


def open_or_create(path: str | os.PathLike, tokenizer: Tokenizer, images: NamedImages) -> TokenStore:
    """The token store at a path, made if absent, extended if images are new; by the main process for all.

    Raises:
        TokenStoreError: it was made by another tokenizer or for another grid, or new images are in
            another folder.
    """
    if is_main_process():
        _prepare(path, tokenizer, images)
    barrier()
    return TokenStore.open(path)


def _prepare(path: str | os.PathLike, tokenizer: Tokenizer, images: NamedImages) -> None:
    if not Path(path).exists():
        TokenStore.create(
            path, images.names, tokenizer.grid, tokenizer.vocab_size, tokenizer.digest, images.data_root
        )
        return
    store = TokenStore.open(path)
    store.require_tokenizer(tokenizer.digest, "the config's tokenizer")
    if store.grid != tokenizer.grid:
        raise TokenStoreError(
            f"token store `{path}` has grids of {store.grid}, the tokenizer gives {tokenizer.grid}: choose "
            "another `token_store`"
        )
    if new := [name for name in images.names if name not in store]:
        if store.data_root != images.data_root:
            raise TokenStoreError(
                f"token store `{path}` is of images in `{store.data_root}`, the config's are in "
                f"`{images.data_root}`: choose another `token_store`"
            )
        extend_store(path, new)


def extract_tokens(
    tokenizer: Tokenizer,
    preprocessor: nn.Module,
    images: NamedImages,
    store: TokenStore,
    group_size: int = GROUP_SIZE,
    batch_size: int = 32,
    num_workers: int = 2,
) -> Extraction:
    """Write the token grids of the images that the store misses, and seal it once it misses none.

    Processes take images in turn and write rows of their own. Tokens are copied from the device and written
    by a thread, while the encoder goes on.

    Args:
        tokenizer: gives the tokens, on its own device.
        preprocessor: MMPretrain data preprocessor with the tokenizer's mean and standard deviation.
        images: the images; all have a row in the store.
        store: where the tokens go; all processes must see it.
        group_size: images of one pass of the tokenizer.
        batch_size: images that a loader's worker hands over at a time.
        num_workers: of the loader, in each process.

    Raises:
        UnreadableImagesError: after the tokens of all other images are written.
    """
    rows = np.array([store.row(name) for name in images.names], dtype=np.int64)
    missing = np.flatnonzero(~store.written()[rows])
    # No process looks for what is missing when another is writing already.
    barrier()
    mine = missing[get_rank() :: get_world_size()]
    groups = split(mine.tolist(), group_size)
    # As many in each process, because a tokenizer may talk to the others in its forward (VQ-KD does).
    most = math.ceil(math.ceil(len(missing) / get_world_size()) / group_size)
    groups += [[]] * (most - len(groups))
    encoded = GroupedImages(
        images, groups, group_size, tokenizer.image_size, preprocessor, batch_size, num_workers
    )
    start = time.perf_counter()
    unreadable = _write_groups(tokenizer, encoded, rows, store, len(mine))
    seconds = time.perf_counter() - start
    unreadable = [(images.path(position), reason) for position, reason in unreadable]
    gathered = all_gather_object((seconds, encoded.waited, unreadable))
    if unreadable := [image for _, _, images_of_rank in gathered for image in images_of_rank]:
        raise UnreadableImagesError(unreadable, f"the tokens of all others are in `{store.path}`")
    if is_main_process() and not store.missing().size:
        store.seal()
    barrier()
    slowest = max(seconds for seconds, _, _ in gathered)
    waited = sum(waited for _, waited, _ in gathered) / len(gathered)
    return Extraction(len(missing), slowest, waited)


def _write_groups(
    tokenizer: Tokenizer, encoded: GroupedImages, rows: np.ndarray, store: TokenStore, total: int
) -> list[tuple[int, str]]:
    """Tokenise and write all groups; positions of the images that could not be read."""
    unreadable: list[tuple[int, str]] = []
    queue: deque[Future] = deque()
    start = time.perf_counter()
    bar = tqdm(total=total, desc=_describe(), unit="image", disable=not is_main_process())
    with bar, ThreadPoolExecutor(1) as writer:
        for group in encoded:
            queue.append(writer.submit(_write, store, rows, group, tokenizer(group.inputs)))
            while len(queue) > QUEUED_GROUPS or (queue and queue[0].done()):
                bar.update(queue.popleft().result())
            unreadable += group.unreadable
            share = encoded.waited / (time.perf_counter() - start)
            bar.set_postfix_str(f"{share:.0%} of the time waiting for data", refresh=False)
        while queue:
            bar.update(queue.popleft().result())
    return unreadable


def _write(store: TokenStore, rows: np.ndarray, group: ImageGroup, tokens: Tensor) -> int:
    """Copy a group's tokens from the device and write them; the number of images done with."""
    if group.positions.size:
        grids = tokens.cpu().numpy()[group.slots].reshape(-1, *store.grid)
        store.write(rows[group.positions], grids)
    return len(group.positions) + len(group.unreadable)


def _describe() -> str:
    others = f" (first of {get_world_size()} processes)" if get_world_size() > 1 else ""
    return f"extracting tokens{others}"
