"""Take a backbone's features of an image set, once, in any number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from mapet_mm.datasets.reading import UndecodableError
from mapet_mm.evaluation.features import TOKENS, Features, LayerParts
from mapet_mm.evaluation.images import ImageSet, ImageSetError
from mapet_mm.evaluation.models import Model
from mapet_mm.evaluation.tokens import LayerTokens
from mapet_mm.tokenizers.fill import ImageGroup, fill
from mapet_mm.tokenizers.images import LARGEST_SKIPPED
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import digest, require_settings
from mapet_mm.utils.loader_workers import tensor_bytes, usable_workers

DRAWS = 8  # of the first image: a pipeline that flips half of the images is found with probability 0.99


def take_features(
    model: Model, images: ImageSet, cache: Path, kinds: Sequence[str | int] = ("pooled",)
) -> Features:
    """The features of an image set, computed unless they are in the cache.

    Args:
        model: the backbone.
        images: the images. Those that cannot be decoded are left out, and named.
        cache: folder of all features.
        kinds: of the last layer 'pooled', a number of last layers, all 'layers', patch 'tokens', which a
            backbone without patches has not.

    Raises:
        UserError: a pipeline that draws at random, or features that are not finite.
    """
    features = open_features(model, images, cache)
    fill_features(features, model, kinds)
    return features


def open_features(model: Model, images: ImageSet, cache: Path) -> Features:
    """The features of an image set as far as they are in the cache; their sizes are those of one image.

    Those of one model and image set have a folder in the cache, named by a digest of weights,
    normalisation, pipeline, images and precision.

    Raises:
        ImageSetError: the pipeline draws at random.
    """
    backbone = model.backbone
    tokens: LayerTokens = backbone(backbone.normalise(first_image(images)[None]))
    known = dict(
        layers=tokens.names,
        poolings=tokens.poolings,
        dim=tokens.pooled().shape[1] // len(tokens.poolings),
        grid=tokens.grid,
    )
    identity = dict(
        weights=model.digest,
        images=images.digest,
        autocast=str(backbone.autocast),
        files="parts of one layer each",
        **known,
    )
    folder = cache / f"{images.name}-{digest(identity)[:16]}"
    return Features(folder, images, **known, identity=identity)


def first_image(images: ImageSet) -> Float[Tensor, "channel height width"]:
    """The first image of a set that can be decoded; ImageSetError if its pipeline draws, or without one."""
    if not images.files:
        raise ImageSetError(f"there are no `{images.name}` images")
    numbers = range(len(images.files))
    number = next((number for number in numbers if isinstance(decoded(images, number), Tensor)), None)
    if number is None:
        raise ImageSetError(f"no image of the `{images.name}` images can be decoded ({decoded(images, 0)})")
    first = decoded(images, number)
    for _ in range(DRAWS - 1):
        if not torch.equal(decoded(images, number), first):
            raise ImageSetError(
                f"the pipeline of the `{images.name}` images draws at random, and features are taken of "
                "each image once: give the set a test pipeline"
            )
    return first


def decoded(images: ImageSet, number: int) -> Tensor | str:
    """An image of a set as its pipeline gives it, or why it cannot be decoded."""
    try:
        return images.dataset[number]["inputs"]
    except UndecodableError as error:
        return str(error)


def fill_features(features: Features, model: Model, kinds: Sequence[str | int]) -> None:
    """Compute those features of some kinds that are not in the cache.

    Any number of processes and machines may do this at a time, and a later one goes on where a killed one
    stopped; each returns when all features are there.

    Raises:
        UserError: features that are not finite.
    """
    features.look()
    names = [name for name in features.names(kinds) if features.missing(name)]
    if not names:
        return
    images = features.images
    require_settings(features.folder, features.identity, "feature cache", "remove it")
    (features.folder / "parts").mkdir(exist_ok=True)
    shown = "all layers" if names[: len(features.layers)] == features.layers else ", ".join(names)
    print_once(f"features ({shown}) of {len(images.files)} `{images.name}` images into {features.folder}")

    def encode(group: ImageGroup) -> Float16[Tensor, "image value"]:
        if not group.indices:
            return torch.empty(0, 0)
        tokens = model.backbone(model.backbone.normalise(group.inputs))
        values = []  # of a layer class token and patch mean, or all patch tokens
        for name in names:
            of_name = tokens.patches[-1] if name == TOKENS else tokens.pooled(tokens.names.index(name))
            values.append(of_name.half().flatten(1))
        return torch.cat(values, dim=1)

    def require_finite(values: Float16[np.ndarray, " value"]) -> None:
        if np.isfinite(values).all():
            return
        reason = "its weights are, or they are beyond float16"
        if model.missing:
            reason = f"the model lacks {len(model.missing)} weights, `{model.missing[0]}`, ..."
        raise UserError(f"the backbone of {model.name} gives NaN or infinite features: {reason}")

    fill(
        SideBySide([features.parts[name] for name in names]),
        np.arange(len(images.files)),
        Batches(images, max(features.missing(name) for name in names)),
        encode,
        f"features of {images.name}",
        require_finite,
        skips=True,
    )
    features.look()
    if images.left_out:
        listing = features.folder / "left_out.txt"
        lines = [f"{images.files[number]}\t{reason}\n" for number, reason in images.left_out.items()]
        replace_file(listing, "".join(lines).encode("utf-8", "surrogateescape"))
        print_once(f"all that were left out: {listing}")


def require_few_left_out(sets: Iterable[ImageSet]) -> None:
    """Raise UserError if more than 5 % of some sets' images could not be decoded."""
    left_out = {}
    num_images = 0
    for images in sets:
        left_out.update({images.files[number]: reason for number, reason in images.left_out.items()})
        num_images += len(images) + len(images.left_out)
    if len(left_out) > LARGEST_SKIPPED * num_images:
        path, reason = next(iter(left_out.items()))
        raise UserError(
            f"{len(left_out)} of {num_images} images could not be decoded, such as `{path}` ({reason}): that "
            f"is more than {LARGEST_SKIPPED:.0%}; repair or remove them, then run the same command again"
        )


class SideBySide:
    """Parts of the same images, filled in one pass: a row has the values of all, one after another."""

    def __init__(self, parts: Sequence[LayerParts]) -> None:
        self.parts = parts
        self.folder = parts[0].folder
        self.part_range = parts[0].part_range
        self.shape = (sum(prod(one.shape) for one in parts),)

    def __len__(self) -> int:
        return len(self.parts[0])

    def states(self, part: int) -> UInt8[np.ndarray, " rows"]:
        """PENDING, the least of the states, where anything is pending."""
        return np.minimum.reduce([one.states(part) for one in self.parts])

    def update(
        self, part: int, slots: Sequence[int], values: Sequence[np.ndarray], reasons: Mapping[int, str]
    ) -> None:
        """As `Parts.update`."""
        start = 0
        for one in self.parts:
            stop = start + prod(one.shape)
            one.update(part, slots, [row[start:stop].reshape(one.shape) for row in values], reasons)
            start = stop


class Batches(Dataset):
    """Batches of an image set, as its pipeline gives them, for `fill`.

    Args:
        images: the set.
        num_images: that will be loaded.
    """

    def __init__(self, images: ImageSet, num_images: int) -> None:
        self.images = images
        self.num_images = num_images
        self.group_size = images.batch_size

    def load(self, groups: Iterable[tuple[int, Sequence[int]]]) -> Iterator[ImageGroup]:
        """Load batches: pairs of a part's index and the numbers of its images."""
        num_workers = usable_workers(
            self.images.useful_workers(self.num_images),
            lambda: tensor_bytes(self.__getitems__((0, range(min(self.group_size, len(self.images)))))),
        )
        yield from DataLoader(self, batch_sampler=groups, num_workers=num_workers, collate_fn=as_it_is)

    def __getitems__(self, group: tuple[int, Sequence[int]]) -> ImageGroup:
        part, numbers = group
        found = {number: decoded(self.images, number) for number in map(int, numbers)}
        reasons = {number: one for number, one in found.items() if isinstance(one, str)}
        images = {number: one for number, one in found.items() if number not in reasons}
        inputs = default_collate(list(images.values())) if images else None
        return ImageGroup(part, list(images), inputs, reasons)


def as_it_is(group: ImageGroup) -> ImageGroup:
    """A batch is put together where it is loaded."""
    return group
