"""Take a backbone's features of an image set into files, once, in any number of processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

from mapet_mm.evaluation.features import BLOCK, FeatureBank
from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError, useful_workers
from mapet_mm.evaluation.models import Model
from mapet_mm.evaluation.tokens import LayerTokens
from mapet_mm.tokenizers.images import LARGEST_SKIPPED, UndecodableError
from mapet_mm.utils.atomic_files import remove_stale, replace_json
from mapet_mm.utils.dist import is_first_process, print_once
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.utils.identity import digest, require_settings
from mapet_mm.utils.loader_workers import tensor_bytes, usable_workers
from mapet_mm.utils.shared_work import my_blocks

DRAWS = 8  # of the first image: a pipeline that flips half of the images is found with probability 0.99


def take_features(
    model: Model, images: ImageSet, cache: Path, kinds: Sequence[str] = ("pooled",)
) -> FeatureBank:
    """The features of an image set, computed unless they are in the cache.

    Args:
        model: the backbone.
        images: the images.
        cache: folder of all features.
        kinds: of 'pooled', 'layers' and 'tokens' (see `Features`); a backbone without patches has no tokens.

    Raises:
        UserError: a pipeline that draws at random, or features that are not finite.
    """
    return fill(open_bank(model, images, cache), model, images, kinds)


def open_bank(model: Model, images: ImageSet, cache: Path) -> FeatureBank:
    """The features of an image set as far as they are in the cache; their sizes are those of one image.

    Those of one model and image set have a folder in the cache, named by a digest of weights,
    normalisation, pipeline, images and precision. Images that could not be decoded before are left out.

    Raises:
        ImageSetError: the pipeline draws at random.
    """
    listing = broken_listing(images, cache)
    if listing.exists():
        leave_out(images, json.loads(listing.read_text()), listing)
    backbone = model.backbone
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
    bank.folder = cache / f"{images.name}-{digest(identity_of(bank, model, images))[:16]}"
    return bank


def first_image(images: ImageSet) -> Float[Tensor, "channel height width"]:
    """The first image of a set that can be decoded; ImageSetError if its pipeline draws, or without one."""
    decoded = (index for index in range(len(images)) if isinstance(_Reader(images)[index][1], Tensor))
    index = next(decoded, None)
    if index is None:
        reason = _Reader(images)[0][1] if len(images) else "there are none"
        raise ImageSetError(f"no image of the `{images.name}` images can be decoded ({reason})")
    first = images.dataset[index]["inputs"]
    for _ in range(DRAWS - 1):
        if not torch.equal(images.dataset[index]["inputs"], first):
            raise ImageSetError(
                f"the pipeline of the `{images.name}` images draws at random, and features are taken of "
                "each image once: give the set a test pipeline"
            )
    return first


def identity_of(bank: FeatureBank, model: Model, images: ImageSet) -> dict[str, Any]:
    """All that decides the features."""
    return {
        "weights": model.digest,
        "images": images.digest,
        "autocast": str(model.backbone.autocast),
        "layers": bank.layers,
        "poolings": bank.poolings,
        "grid": bank.grid,
        "size": bank.size,
        "dim": bank.dim,
    }


def fill(bank: FeatureBank, model: Model, images: ImageSet, kinds: Sequence[str]) -> FeatureBank:
    """Compute those features of some kinds that are not in the cache.

    Any number of processes and machines may do this at a time, and a later one goes on where a killed one
    stopped; each returns when all features are there.

    Returns:
        The bank; or, if images could not be decoded, one of the images without these, which are then left out
        of `images`, too.

    Raises:
        UserError: features that are not finite.
    """
    if bank.grid == (0, 0):  # vectors
        kinds = [kind for kind in kinds if kind != "tokens"]
    num_missing = sum(not bank.has(kinds, block) for block in range(bank.num_blocks))
    if not num_missing:
        return bank
    identity = identity_of(bank, model, images)
    for kind in kinds:
        remove_stale(bank.folder / kind)
    require_settings(bank.folder, identity, "feature cache", "remove it")
    print_once(f"{', '.join(kinds)} features of {len(bank)} `{bank.name}` images into {bank.folder}")
    broken = fill_blocks(bank, model, images, kinds, num_missing)
    if not broken:
        return bank
    cache = bank.folder.parent
    listing = broken_listing(images, cache)
    reasons = {images.path(index): reason for index, reason in broken.items()}
    replace_json(listing, reasons)
    kept = torch.tensor([index for index in range(len(images)) if index not in broken])
    leave_out(images, reasons, listing)
    smaller = open_bank(model, images, cache)
    take_over(bank, smaller, kinds, kept)
    return fill(smaller, model, images, kinds)


def broken_listing(images: ImageSet, cache: Path) -> Path:
    """The file that lists which images of a set could not be decoded."""
    return cache / f"{images.name}-{images.digest[:16]}.broken.json"


def leave_out(images: ImageSet, reasons: Mapping[str, str], listing: Path) -> None:
    """Drop images that could not be decoded, and name them."""
    few = [f"{path} ({reason})" for path, reason in reasons.items()]
    print_once(
        f"left {len(reasons)} of {len(images)} `{images.name}` images out that could not be decoded: "
        f"{listed(few, most=5)}; see {listing}"
    )
    images.leave_out(reasons)


def require_few_left_out(sets: Iterable[ImageSet]) -> None:
    """Raise UserError if more than 5 % of some sets' images could not be decoded."""
    sets = list(sets)
    left_out = {path: reason for one in sets for path, reason in one.left_out.items()}
    num_images = sum(len(one) + len(one.left_out) for one in sets)
    if len(left_out) > LARGEST_SKIPPED * num_images:
        path, reason = next(iter(left_out.items()))
        raise UserError(
            f"{len(left_out)} of {num_images} images could not be decoded, such as `{path}` ({reason}): that "
            f"is more than {LARGEST_SKIPPED:.0%}; repair or remove them, then run the same command again"
        )


def take_over(old: FeatureBank, new: FeatureBank, kinds: Sequence[str], rows: Int64[Tensor, " row"]) -> None:
    """Write the blocks of a bank of fewer images that another has already.

    Args:
        old: the other.
        new: the bank.
        kinds: of features.
        rows: for each image of `new`, its row in `old`.
    """
    for block in range(new.num_blocks):
        wanted = rows[new.rows(block)]
        sources = (wanted // BLOCK).unique()
        if not all(old.has(kinds, source) for source in sources.tolist()):
            continue
        places = BLOCK * torch.searchsorted(sources, wanted // BLOCK) + wanted % BLOCK
        for kind in kinds:
            stored = [old.stored(kind, source) for source in sources.tolist()]
            if kind == "pooled":
                stored = [values[-1:] for values in stored]
            new.write(kind, block, torch.cat(stored, images_at(kind)).index_select(images_at(kind), places))


def fill_blocks(
    bank: FeatureBank, model: Model, images: ImageSet, kinds: Sequence[str], num_missing: int
) -> dict[int, str]:
    """Compute this process's blocks, then blocks that others have left.

    Returns:
        Why images could not be decoded, by their indices; their blocks are not written.
    """
    backbone = model.backbone
    batches = missing_batches(bank, kinds, images.batch_size)
    reader = _Reader(images)
    num_workers = useful_workers(images, min(len(bank), num_missing * BLOCK))
    num_workers = usable_workers(num_workers, lambda: images.batch_size * tensor_bytes(reader[0]))
    loader = DataLoader(reader, batch_sampler=batches, num_workers=num_workers, collate_fn=_collate)
    bar = tqdm(
        total=num_missing, desc=f"features of {bank.name}", unit="block", disable=not is_first_process()
    )
    all_broken: dict[int, str] = {}
    with bar:
        for block, parts in groupby(loader, key=lambda batch: bank.block_of(batch[0])):
            found: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
            num_broken = len(all_broken)
            for _, batch, broken in parts:
                all_broken |= broken
                if len(all_broken) > num_broken:
                    continue
                tokens = backbone(backbone.normalise(batch))
                for kind in kinds:
                    found[kind].append(values_of(tokens, kind).half().cpu())
            bar.update()
            if len(all_broken) > num_broken:
                continue
            for kind in kinds:
                values = torch.cat(found[kind], dim=images_at(kind))
                check_finite(values, model)
                bank.write(kind, block, values)
    return all_broken


def values_of(tokens: LayerTokens, kind: str) -> Tensor:
    """Features of one kind."""
    if kind == "tokens":
        return tokens.patches[-1]
    return tokens.pooled(last=1 if kind == "pooled" else 0)


def images_at(kind: str) -> int:
    """The dimension of the images: `(n, N, D)` or `(L, n, S D)`."""
    return 0 if kind == "tokens" else 1


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


def check_finite(values: Tensor, model: Model) -> None:
    """Raise UserError if features are NaN or infinite."""
    if values.isfinite().all():
        return
    reason = "its weights are, or they are beyond float16"
    if model.missing:
        reason = f"the model lacks {len(model.missing)} weights, `{model.missing[0]}`, ..."
    raise UserError(f"the backbone of {model.name} gives NaN or infinite features: {reason}")


class _Reader(Dataset):
    """Images with their index, as the pipeline gives them, or the reason why one cannot be decoded."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __getitem__(self, index: int) -> tuple[int, Tensor | str]:
        try:
            return index, self.images.dataset[index]["inputs"]
        except UndecodableError as error:
            return index, str(error)


def _collate(samples: Sequence[tuple[int, Tensor | str]]) -> tuple[int, Tensor | None, dict[int, str]]:
    """The first index, the images and, by index, why some cannot be decoded: then there are no images."""
    broken = {index: inputs for index, inputs in samples if isinstance(inputs, str)}
    images = None if broken else default_collate([inputs for _, inputs in samples])
    return samples[0][0], images, broken
