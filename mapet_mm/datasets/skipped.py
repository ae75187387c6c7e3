"""Images that a token store skipped: the next image takes the place of each, so that no length changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int64
from mmengine.logging import MMLogger, print_log
from torch.utils.data import Dataset

from mapet_mm.datasets.pipelines import find_step, image_paths, leaf_datasets, path_of
from mapet_mm.datasets.stored_images import StoredImages
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.structures import MissingTokensError
from mapet_mm.structures.names import relative_name, relative_names


def replace_by_neighbours(num_images: int, skipped: Sequence[int]) -> Int64[np.ndarray, " image"]:
    """The image to show at each index: itself, or in place of a skipped one the next that is not.

    The last ones are replaced by the first. Not all images may be skipped.

    Examples:
        >>> replace_by_neighbours(5, [1, 2, 4]).tolist()
        [0, 3, 3, 3, 0]
    """
    order = np.arange(num_images)
    kept = np.delete(order, skipped)
    order[skipped] = kept[np.searchsorted(kept, skipped) % len(kept)]
    return order


def replace_skipped(dataset: Dataset, load: LoadTokenGrid) -> None:
    """Replace each image that the store skipped by the next one. Any other without tokens is an error.

    Raises:
        MissingTokensError: images without tokens, with their number and the first one's path.
        TokenStoreError: stored images lack squares.
    """
    if isinstance(dataset, StoredImages):  # it has left them out
        dataset.require_complete()
        return

    def path(index: int) -> str:
        return path_of(dataset.get_data_info(index), dataset)

    rows = load.store.rows(names_in_store(image_paths(dataset), load))
    without_tokens = np.flatnonzero((rows < 0) | ~load.store.written()[rows]).tolist()
    if not without_tokens:
        print_log(f"token store `{load.path}` has tokens for all {len(dataset)} images", logger="current")
        return
    reasons = load.store.skipped
    skipped = []
    pending = []
    for index in without_tokens:
        if reasons and load.name_of(path(index)) in reasons:
            skipped.append(index)
        else:
            pending.append(index)
    kind = type(dataset).__name__
    if pending:
        raise MissingTokensError(
            f"token store `{load.path}` has no tokens for {len(pending)} of {len(dataset)} images of "
            f"{kind}, the first `{path(pending[0])}`: run `mapet-mm extract-tokens`"
        )
    MMLogger.get_current_instance().warning(
        f"token store `{load.path}` skipped {len(skipped)} of {len(dataset)} images of {kind}, which could "
        f"not be decoded: the next image takes the place of each; the first is `{path(skipped[0])}`"
    )
    leave_out(dataset, skipped, load)


def replace_skipped_as_in(trained_on: Dataset, dataset: Dataset) -> None:
    """Drop from `dataset`, which loads no tokens, the images that the training set's stores skipped."""
    for trained in leaf_datasets(trained_on):
        load = find_step(getattr(trained, "pipeline", None), LoadTokenGrid)
        reasons = load.store.skipped if load is not None else {}
        if not reasons:
            continue
        root = load.data_root or load.store.data_root
        for leaf in leaf_datasets(dataset):
            names = [relative_name(path, root) for path in image_paths(leaf)]
            skipped = [index for index, name in enumerate(names) if name in reasons]
            leave_out(leaf, skipped, load)


def leave_out(dataset: Dataset, skipped: list[int], load: LoadTokenGrid) -> None:
    """Put the next image in the place of each of these."""
    if not skipped:
        return
    if len(skipped) == len(dataset):
        raise MissingTokensError(
            f"token store `{load.path}` skipped all images of {type(dataset).__name__}: correct its data, "
            "and run `mapet-mm extract-tokens --retry-skipped`"
        )
    dataset.get_subset_(replace_by_neighbours(len(dataset), skipped).tolist())


def names_in_store(paths: Iterable[str], load: LoadTokenGrid) -> Iterator[str]:
    """Names of images in a store."""
    return relative_names(paths, load.data_root or load.store.data_root, load.name_of)
