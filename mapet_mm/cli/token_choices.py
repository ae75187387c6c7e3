"""The tokens of `mapet-mm pretrain`: by which tokenizer, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mapet_mm.cli.starts import GRID, PATCH, Start
from mapet_mm.models.target_generators.kclip import weights_file
from mapet_mm.models.target_generators.tokenizer import TokenizerError
from mapet_mm.utils.run_folder import INIT

ROWS_A_CENTROID = 39  # the minimum that faiss advises
LARGEST_K = 8192  # the paper's
# k-means may cost this for each epoch, in rows of an image times centroids times iterations. For a ViT-S it
# is about a tenth of the training: on two CPU cores, 10 iterations of 54 rows of 512 channels and 8,192
# centroids take 8 minutes for 6,000 images, and an epoch takes five.
COST_AN_EPOCH = 400_000
# Iterations and starts: the paper's, then fewer, of which starts matter least.
EFFORTS = ((20, 5), (20, 2), (20, 1), (10, 1))
CLIP_STATISTICS = ([122.7709383, 116.7460125, 104.09373615], [68.5005327, 66.6321579, 70.32316305])
IMAGENET_STATISTICS = ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])


@dataclass
class Tokens:
    """A tokenizer: description, config, and its images' side in pixels, mean and standard deviation."""

    words: str
    config: dict[str, Any]
    image_size: int
    statistics: tuple[list[float], list[float]]


class Vocabulary(NamedTuple):
    """How a codebook is fitted: positions to sample per image, centroids, iterations and starts."""

    positions: int
    k: int
    niter: int
    nredo: int


def vocabulary(images: int, grid: int = GRID, epochs: int | None = None) -> Vocabulary:
    """As many centroids as the images' positions and the training can carry: a power of two.

    A centroid needs `ROWS_A_CENTROID` rows, and k-means may cost `COST_AN_EPOCH`; anything without `epochs`.
    """
    budget = float("inf") if epochs is None else COST_AN_EPOCH * epochs
    k = LARGEST_K
    while k > 2:
        positions = min(grid**2, max(4, -(-k * ROWS_A_CENTROID // images)))
        for niter, nredo in EFFORTS:
            affordable = positions * k * niter * nredo <= budget
            if affordable and k * ROWS_A_CENTROID <= images * positions:
                return Vocabulary(positions, k, niter, nredo)
        k //= 2
    return Vocabulary(grid**2, k, *EFFORTS[0])


def choose_tokens(wish: str, start: Start | None, grid: int = GRID) -> Tokens:
    """The tokenizer for a wish: 'auto', 'clip', 'init' or 'random'; TokenizerError without CLIP's weights."""
    if wish == "auto" and start:
        wish = "init"
    if wish == "auto":
        try:
            return clip_tokens(grid)
        except TokenizerError as error:
            # The rest of the message is for those who write a config.
            print(f"no CLIP weights: {str(error).partition(': check the network')[0]}", flush=True)
        wish = "random"
    if wish == "clip":
        return clip_tokens(grid)
    if wish == "init":
        return init_tokens(start)
    return random_tokens(grid)


def clip_tokens(grid: int = GRID) -> Tokens:
    """The paper's k-CLIP, in float16; without a GPU, k-CLIP with the smallest CLIP ResNet, in float32."""
    has_gpu = torch.cuda.is_available()
    name = "RN50x64" if has_gpu else "RN50"
    weights_file(name, "openai")
    config = dict(type="mapet_mm.KCLIP", clip_model=name, pretrained="openai", image_size=32 * grid)
    if has_gpu:
        config["precision"] = "float16"
    return Tokens(f"k-CLIP of {name}", config, 32 * grid, CLIP_STATISTICS)


def init_tokens(start: Start) -> Tokens:
    """Clusters of the features of the patches that the initial weights give, after the final norm."""
    weights = dict(type="Pretrained", checkpoint=INIT, prefix="backbone.")
    words = "clusters of the features of --init"
    if start.network:
        left_out = ("type", "cutting_point", "norm_eps")  # of the pre-training's class
        options = {name: value for name, value in start.network.items() if name not in left_out}
        encoder = dict(type="TIMMBackbone", **options, init_cfg=weights)
        side = start.images.img_size[0]
        statistics = tuple([255 * value for value in part] for part in (start.images.mean, start.images.std))
        config = dict(type="mapet_mm.GridKMeans", encoder=encoder, image_size=side)
        return Tokens(words, config, side, statistics)
    side = PATCH * start.grid
    encoder = dict(type="mapet_mm.MaPeTViT", arch=f"deit-{start.arch}", img_size=side, out_type="featmap")
    config = dict(type="mapet_mm.GridKMeans", encoder=dict(**encoder, init_cfg=weights))
    return Tokens(words, config, side, IMAGENET_STATISTICS)


def random_tokens(grid: int = GRID) -> Tokens:
    """Clusters of the features of a small random CLIP ResNet, which capture colours and textures only."""
    tower = dict(layers=[1, 1, 1, 1], width=16, image_size=16 * grid)
    config = dict(type="mapet_mm.KCLIP", clip_model=tower, pretrained=dict(type="random", seed=0), stride=16)
    words = (
        "clusters of a random network's features, which know colours and textures only (better: --tokenizer "
        "clip or init, or --method mae)"
    )
    return Tokens(words, config, 16 * grid, CLIP_STATISTICS)
