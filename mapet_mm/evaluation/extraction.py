"""Take a backbone's features of an image set into files, once, in any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from mapet_mm.evaluation.adapters import LayerTokens
from mapet_mm.evaluation.features import FeatureBank
from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError
from mapet_mm.evaluation.models import Checkpoint
from mapet_mm.utils.dist import is_first_process, print_once
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import digest, require_settings
from mapet_mm.utils.loader_workers import tensor_bytes, usable_workers
from mapet_mm.utils.shared_work import my_blocks

DRAWS = 8  # of the first image: a pipeline that flips half of the images is found with probability 0.99


def take_features(
    checkpoint: Checkpoint, images: ImageSet, cache: Path, kinds: Sequence[str] = ("pooled",)
) -> FeatureBank:
    """The features of an image set, computed unless they are in the cache.

    Args:
        checkpoint: the backbone.
        images: the images.
        cache: folder of all features.
        kinds: of 'pooled' and 'tokens' (see `Features`); a backbone without patches has no tokens.

    Raises:
        UserError: a pipeline that draws at random, or features that are not finite.
    """
    bank = open_bank(checkpoint, images, cache)
    fill(bank, checkpoint, images, kinds)
    return bank


def open_bank(checkpoint: Checkpoint, images: ImageSet, cache: Path) -> FeatureBank:
    """The features of an image set as far as they are in the cache; their sizes are those of one image.

    Those of one checkpoint and image set have a folder in the cache, named by a digest of weights,
    normalisation, pipeline, images and precision.

    Raises:
        ImageSetError: the pipeline draws at random.
    """
    backbone = checkpoint.backbone
    tokens: LayerTokens = backbone(backbone.normalise(first_image(images)[None]))
    bank = FeatureBank(
        cache,
        name=images.name,
        layers=tokens.names,
        poolings=tokens.poolings,
        dim=tokens.pooled().shape[2] // len(tokens.poolings),
        grid=tokens.grid,
        labels=images.labels,
        size=len(images),
    )
    bank.folder = cache / f"{images.name}-{digest(identity_of(bank, checkpoint, images))[:16]}"
    return bank


def first_image(images: ImageSet) -> Float[Tensor, "channel height width"]:
    """The first image of a set; ImageSetError if its pipeline gives another one each time."""
    first = images.dataset[0]["inputs"]
    for _ in range(DRAWS - 1):
        if not torch.equal(images.dataset[0]["inputs"], first):
            raise ImageSetError(
                f"the pipeline of the `{images.name}` images draws at random, and features are taken of "
                "each image once: give the set a test pipeline"
            )
    return first


def identity_of(bank: FeatureBank, checkpoint: Checkpoint, images: ImageSet) -> dict[str, Any]:
    """All that decides the features."""
    return {
        "weights": checkpoint.digest,
        "images": images.digest,
        "autocast": str(checkpoint.backbone.autocast),
        "layers": bank.layers,
        "poolings": bank.poolings,
        "grid": bank.grid,
        "size": bank.size,
        "dim": bank.dim,
    }


def fill(bank: FeatureBank, checkpoint: Checkpoint, images: ImageSet, kinds: Sequence[str]) -> None:
    """Compute those features of some kinds that are not in the cache.

    Any number of processes and machines may do this at a time, and a later one goes on where a killed one
    stopped; each returns when all features are there.

    Raises:
        UserError: features that are not finite.
    """
    if bank.grid == (0, 0):  # vectors
        kinds = ["pooled"]
    num_missing = sum(not bank.has(kinds, block) for block in range(bank.num_blocks))
    if num_missing:
        identity = identity_of(bank, checkpoint, images)
        require_settings(bank.folder, identity, "feature cache", "remove it")
        print_once(f"{', '.join(kinds)} features of {len(bank)} `{bank.name}` images into {bank.folder}")
        fill_blocks(bank, checkpoint, images, kinds, num_missing)


def fill_blocks(
    bank: FeatureBank, checkpoint: Checkpoint, images: ImageSet, kinds: Sequence[str], num_missing: int
) -> None:
    """Compute this process's blocks, then blocks that others have left."""
    backbone = checkpoint.backbone
    batches = missing_batches(bank, kinds, images.batch_size)
    reader = _Reader(images)
    num_workers = usable_workers(images.num_workers, lambda: images.batch_size * tensor_bytes(reader[0]))
    loader = DataLoader(reader, batch_sampler=batches, num_workers=num_workers)
    bar = tqdm(
        total=num_missing, desc=f"features of {bank.name}", unit="block", disable=not is_first_process()
    )
    with bar:
        for block, parts in groupby(loader, key=lambda batch: bank.block_of(int(batch[0][0]))):
            found: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
            for _, batch in parts:
                tokens = backbone(backbone.normalise(batch))
                for kind in kinds:
                    values = tokens.pooled() if kind == "pooled" else tokens.patches[-1]
                    found[kind].append(values.half().cpu())
            for kind in kinds:
                images_at = 1 if kind == "pooled" else 0  # L n W, or n N D
                values = torch.cat(found[kind], dim=images_at)
                check_finite(values, checkpoint)
                bank.write(kind, block, values)
            bar.update()


def missing_batches(bank: FeatureBank, kinds: Sequence[str], batch_size: int) -> Iterator[range]:
    """Indices of images in batches, each of one block, of blocks that this process is to compute."""
    seen = set()  # workers read ahead of what is written
    for block in my_blocks(bank.num_blocks, lambda block: bank.has(kinds, block)):
        if block in seen:
            continue
        seen.add(block)
        rows = bank.rows(block)
        for start in range(rows.start, rows.stop, batch_size):
            yield range(start, min(start + batch_size, rows.stop))


def check_finite(values: Tensor, checkpoint: Checkpoint) -> None:
    """Raise UserError if features are NaN or infinite."""
    if values.isfinite().all():
        return
    reason = "its weights are, or they are beyond float16"
    if checkpoint.missing:
        reason = f"the checkpoint lacks {len(checkpoint.missing)} weights, `{checkpoint.missing[0]}`, ..."
    raise UserError(f"the backbone of {checkpoint.name} gives NaN or infinite features: {reason}")


class _Reader(Dataset):
    """Images with their index, as the pipeline gives them."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.images.dataset[index]["inputs"]
