"""The patches of a token whose features are nearest to its centroid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from mapet_mm.tokenizers import GridKMeans
from mapet_mm.tokenizers.image_groups import GROUP_SIZE, GroupLoader, split
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.visualization.codebook_sheet import Patch


def nearest_members(
    tokenizer: GridKMeans,
    preprocessor: nn.Module,
    images: NamedImages,
    candidates: Mapping[int, Sequence[Patch]],
    count: int,
    group_size: int = GROUP_SIZE,
    num_workers: int = 2,
) -> dict[int, list[Patch]]:
    """Find each token's `count` candidates nearest to its centroid (L2), nearest first.

    The store has no features, so the candidates' images are encoded again.

    Args:
        tokenizer: k-CLIP or another k-means tokenizer, with the codebook of the tokens.
        preprocessor: the tokenizer's data preprocessor.
        images: must include those of all candidates.
        candidates: patches of each token.
        count: number to keep.
    """
    patches = [(token, patch) for token, members in candidates.items() for patch in members]
    wanted: dict[str, list[tuple[int, Patch]]] = {}
    for token, patch in patches:
        wanted.setdefault(patch.name, []).append((token, patch))
    name_of_place = {place: name for name, place in images.places("reading names").items() if name in wanted}
    groups = split(sorted(name_of_place), group_size)
    loader = GroupLoader(images, tokenizer.image_size, preprocessor, group_size, num_workers)
    centroids = tokenizer.codebook.centroids
    distances: dict[tuple[int, Patch], float] = {}
    loaded = loader.load((0, group) for group in groups)
    for group in tqdm(loaded, desc="nearest members", unit="group", total=len(groups)):
        features = tokenizer.features(group.inputs).cpu()
        for place, grid in zip(group.places, features, strict=False):
            for token, patch in wanted[name_of_place[place]]:
                feature = grid[patch.row * tokenizer.grid[1] + patch.col]
                distances[token, patch] = float(torch.dist(feature, centroids[token]))
    return {token: _smallest(token, members, distances, count) for token, members in candidates.items()}


def _smallest(
    token: int, members: Sequence[Patch], distances: Mapping[tuple[int, Patch], float], count: int
) -> list[Patch]:
    found = [patch for patch in members if (token, patch) in distances]  # without undecodable images
    order = np.argsort([distances[token, patch] for patch in found], kind="stable")[:count]
    return [found[place] for place in order]
