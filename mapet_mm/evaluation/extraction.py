"""Features of an image set into files, by any number of processes, going on where earlier ones stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from mapet_mm.evaluation.adapters import LayerTokens, TokenBackbone
from mapet_mm.evaluation.features import CachedFeatures, bytes_per_image
from mapet_mm.evaluation.file_contents import known_digest_of_files
from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError
from mapet_mm.evaluation.models import Checkpoint
from mapet_mm.utils.atomic_files import replace_file, replace_json
from mapet_mm.utils.dist import choose_dtype, is_first_process, print_once
from mapet_mm.utils.errors import UserError, reason_of
from mapet_mm.utils.shared_work import SharedTasks

# Draws of the first image: a pipeline that flips half of them is found out with probability 0.99.
DRAWS = 8
# Images at the start of which one has to be readable.
TRIED = 16
NAMED = 10
# Largest mean square of what rounding to float16 changes, as a share of the variance in a block; usual
# are 1e-7 to 1e-5. Measured on this many images or patches.
LARGEST_ERROR, ERROR_ROWS = 0.01, 1024


class Unreadable(NamedTuple):
    """An image that cannot be read, and why."""

    path: str
    reason: str


def take_features(
    checkpoint: Checkpoint,
    images: ImageSet,
    cache: Path,
    kinds: Sequence[str] = ("pooled",),
    amp: bool | None = None,
) -> CachedFeatures:
    """The features of an image set, computed unless they are in the cache.

    Any number of processes and machines may do this at a time; each returns when all features are there.

    Args:
        checkpoint: the backbone.
        images: the images.
        cache: folder of all features; those of one checkpoint and image set have a folder in it, named by a
            digest of weights, normalisation, pipeline, images, what their files hold, and precision.
        kinds: of 'pooled' and 'tokens' (see `Features`).
        amp: autocast; by default on CUDA only.

    Raises:
        UserError: images that cannot be read or that the backbone does not take, or no room for the features.
    """
    backbone = checkpoint.backbone
    device = backbone.device.type
    dtype = choose_dtype(device) if (device == "cuda" if amp is None else amp) else None
    inputs = _Inputs(images)
    tokens = _look(backbone, inputs)
    known = {
        "layers": backbone.layers,
        "poolings": ["class token"] * backbone.has_class_token + ["mean"] * bool(len(tokens.patches[-1][0])),
        "dim": tokens.patches[-1].shape[-1],
        "grid": backbone.grid,
        "size": len(images),
    }
    identity = {"weights": checkpoint.digest, "images": images.digest, "autocast": str(dtype), **known}
    folder = _folder(cache, images.name, identity)
    if contents := known_digest_of_files(images.paths, images.stats, cache):
        before, folder = folder, _folder(cache, images.name, identity := identity | {"contents": contents})
        _take_over(before, folder, images)
    features = CachedFeatures(folder, name=images.name, labels=images.labels, **known)
    if missing := features.missing(kinds):
        _announce(features, kinds, missing)
        features.folder.mkdir(parents=True, exist_ok=True)
        replace_json(features.folder / "meta.json", {"model": checkpoint.name, **identity})
        _fill(features, backbone, inputs, kinds, missing, dtype)
    return features


def _folder(cache: Path, name: str, identity: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache / f"{name}-{digest[:16]}"


def _take_over(before: Path, folder: Path, images: ImageSet) -> None:
    """Rename features of the version that knew files by their sizes, unless a file has changed since."""
    blocks = [] if folder.exists() else [path.stat().st_mtime_ns for path in before.glob("*/*.safetensors")]
    if blocks and min(blocks) > images.stats[:, 1].max():
        with suppress(OSError):  # another process has done it
            before.rename(folder)


def _look(backbone: TokenBackbone, inputs: _Inputs) -> LayerTokens:
    """What the backbone gives of the first image, which has to be the same each time that it is read."""
    tried = []
    for index in range(min(TRIED, len(inputs))):
        if isinstance(image := inputs[index], Tensor):
            break
        tried.append(image)
    else:  # as where the paths are wrong: the others are not tried
        raise _unreadable(inputs.images.name, tried)
    first = [image, *(inputs[index] for _ in range(DRAWS - 1))]
    if any(not torch.equal(first[0], other) for other in first[1:]):
        raise ImageSetError(
            f"the pipeline of the `{inputs.images.name}` images draws at random: features are taken of each "
            "image once, so give the set a test pipeline"
        )
    with torch.no_grad():
        return backbone(backbone.normalise(first[:1]))


def _announce(features: CachedFeatures, kinds: Sequence[str], missing: Sequence[int]) -> None:
    """Say how large the features are; refuse a disk that has no room for them."""
    sizes = {kind: len(features) * bytes_per_image(kind, features) for kind in kinds}
    folder = next(parent for parent in features.folder.parents if parent.exists())
    needed = sum(sizes.values()) * len(missing) / features.num_blocks
    if needed > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"the features of the `{features.name}` images take {needed / 1e9:.1f} GB, and {folder} has "
            f"{free / 1e9:.1f} GB left: choose another --cache, or protocols that need less"
        )
    listed = ", ".join(f"{kind} {size / 1e9:.2g} GB" for kind, size in sizes.items())
    print_once(f"features of {len(features)} `{features.name}` images ({listed}) into {features.folder}")


def _fill(
    features: CachedFeatures,
    backbone: TokenBackbone,
    inputs: _Inputs,
    kinds: Sequence[str],
    missing: Sequence[int],
    dtype: torch.dtype | None,
) -> None:
    """Compute the missing blocks; from the first unreadable image on, images are only tried."""

    def done(blocks: Sequence[int]) -> set[int]:
        return {block for block in blocks if all(features.path(kind, block).exists() for kind in kinds)}

    tasks = SharedTasks(features.folder / "claims", missing, done)
    for kind in kinds:
        (features.folder / kind).mkdir(exist_ok=True)
    bar = tqdm(
        total=len(missing), desc=f"features of {features.name}", unit="block", disable=not is_first_process()
    )
    unreadable: list[Unreadable] = []
    # Of the backbone alone: autocast on a CPU refuses to join parts in float16.
    autocast = torch.autocast(backbone.device.type, dtype, enabled=dtype is not None)
    with bar, torch.no_grad():
        for block, batches in groupby(_load(features, inputs, tasks), key=lambda batch: batch[0]):
            parts = []
            for _, batch in batches:
                if not isinstance(batch, Tensor):
                    unreadable += batch
                elif not unreadable:  # their repair changes the folder: features would be lost
                    with autocast:
                        tokens = backbone(backbone.normalise(batch))
                    parts.append(_stored(tokens, kinds))
            if not unreadable:
                _write(features, kinds, block, parts)
                bar.update()
    if unreadable:
        raise _unreadable(features.name, unreadable)
    if not features.missing(kinds):
        tasks.clear()


def _write(features: CachedFeatures, kinds: Sequence[str], block: int, parts: list[list[Tensor]]) -> None:
    """Write a block of each kind, from what `_stored` gives of its batches."""
    for kind, values in zip(kinds, zip(*parts, strict=True), strict=True):
        joined = torch.cat(values, dim=2 if kind == "pooled" else 0)
        replace_file(features.path(kind, block), save({kind: _narrowed(kind, joined).contiguous()}))


def _narrowed(kind: str, values: Tensor) -> Tensor:
    """A block's features in float16; as they are if that does not tell a layer's apart."""
    half = values.half()
    # Those of each pooling and layer, or the patch tokens of all images: S R D.
    sets = [one.flatten(0, 1) if kind == "pooled" else one.flatten(0, 1)[None] for one in (values, half)]
    some, rounded = (one[:, :: max(1, one.shape[1] // ERROR_ROWS)] for one in sets)
    errors = (rounded - some).square().mean(1).sum(1)
    enough = errors <= LARGEST_ERROR * some.var(1, correction=0).sum(1)
    return half if half.isfinite().all() and enough.all() else values


def _unreadable(name: str, images: Sequence[Unreadable]) -> ImageSetError:
    listed = ", ".join(f"`{path}` ({reason})" for path, reason in images[:NAMED])
    more = f" and {len(images) - NAMED} more" if len(images) > NAMED else ""
    return ImageSetError(
        f"{len(images)} of the `{name}` images cannot be read: {listed}{more}; repair them, or take them out "
        "of the dataset: none is left out here"
    )


def _stored(tokens: LayerTokens, kinds: Sequence[str]) -> list[Tensor]:
    """Of a batch what a block holds: pooled `(2, L, b, D)`, patch tokens `(b, N, D)`, in float32."""
    found = []
    for kind in kinds:
        if kind == "tokens":
            values = tokens.patches[-1].float()
        else:
            poolings = [] if tokens.class_token is None else [tokens.class_token.transpose(0, 1).float()]
            if tokens.patches[-1].shape[1]:
                poolings.append(torch.stack([one.float().mean(1) for one in tokens.patches]))
            values = torch.stack(poolings)
        if not values.isfinite().all():
            raise UserError(
                "the backbone gives features that are NaN or infinite: its weights are, or --amp is on and "
                "its numbers are too large for it"
            )
        found.append(values.cpu())
    return found


class _Inputs(Dataset):
    """Images as the pipeline gives them.

    Args:
        images: the image set.
    """

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor | Unreadable:
        try:
            return self.images.dataset[index]["inputs"]
        except Exception as error:  # what a broken image raises depends on where it is broken
            return Unreadable(self.images.path(index), reason_of(error))


def _load(
    features: CachedFeatures, inputs: _Inputs, tasks: Iterable[int]
) -> Iterator[tuple[int, Tensor | list[Unreadable]]]:
    """Batches of the tasks' blocks, with the block's number; of one with unreadable images these alone."""
    order: deque[int] = deque()

    def batches() -> Iterator[list[int]]:
        for block in tasks:
            rows = features.rows(block)
            for start in range(rows.start, rows.stop, inputs.images.batch_size):
                order.append(block)
                yield list(range(start, min(start + inputs.images.batch_size, rows.stop)))

    loader = DataLoader(
        inputs, batch_sampler=batches(), num_workers=inputs.images.num_workers, collate_fn=_stack
    )
    for batch in loader:
        yield order.popleft(), batch


def _stack(images: Sequence[Tensor | Unreadable]) -> Tensor | list[Unreadable]:
    if unreadable := [image for image in images if isinstance(image, Unreadable)]:
        return unreadable
    sizes = {tuple(image.shape) for image in images}
    if len(sizes) > 1:
        listed = " and ".join(f"{h} x {w}" for _, h, w in sorted(sizes)[:2])
        raise ImageSetError(
            f"the pipeline gives images of {listed} pixels: end it with one size before packing"
        )
    return torch.stack(list(images))
