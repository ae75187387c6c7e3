"""The decisions of `mapet-mm pretrain`: which images, which tokenizer, and how many tokens."""

from __future__ import annotations

import argparse
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmengine.fileio import list_dir_or_file
from mmpretrain.models.backbones import VisionTransformer

from mapet_mm.datasets.formats import EXTENSIONS
from mapet_mm.interop.convert import as_start, sizes_of
from mapet_mm.models.target_generators.kclip import weights_file
from mapet_mm.models.target_generators.tokenizer import TokenizerError
from mapet_mm.utils.errors import UserError
from mapet_mm.weight_files import read_weights, write_weights

ARCHS = ("tiny", "small", "base")
INIT = "init.pth"
GRID = 14  # tokens per side: 224 pixels in patches of 16
SQUARE_BYTES = (16 * GRID) ** 2 * 3
GIGABYTE = 10**9
ROWS_A_CENTROID = 39  # the minimum that faiss advises
LARGEST_K = 8192  # the paper's
CLIP_STATISTICS = ([122.7709383, 116.7460125, 104.09373615], [68.5005327, 66.6321579, 70.32316305])
IMAGENET_STATISTICS = ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])


@dataclass
class Tokens:
    """A tokenizer: description, config, and its images' side in pixels, mean and standard deviation."""

    words: str
    config: dict[str, Any]
    image_size: int
    statistics: tuple[list[float], list[float]]


@dataclass
class Choices:
    """Decisions for the two configs, and the lines that tell the user about them."""

    arch: str
    tokens: Tokens
    k: int
    positions: int
    stores_squares: bool
    names: list[str]
    words: list[str]


def choose(args: argparse.Namespace) -> Choices:
    """Count the images and decide; weights to start from become RUN/init.pth."""
    names, others = find_images(args.images)
    count = len(names)
    words = [f"images: {count}"]
    left_out = ", ".join(f"{number} {kind}" for kind, number in sorted(others.items()))
    if left_out:
        words.append(f"other files, left out: {left_out}")
    if not names:
        raise UserError(
            f"{args.images} holds no images ({', '.join(EXTENSIONS)}) but {left_out or 'no files'}"
        )

    arch = args.arch or "small"
    if args.init:
        arch, start = take_weights(args.init, args.out / INIT, args.arch)
        words.append(start)
    tokens = choose_tokens(args.tokenizer, arch, bool(args.init))
    positions, k = vocabulary(count)
    words.append(f"tokens: {tokens.words}; {k} centroids, from {positions} of {GRID**2} positions per image")
    words.append(f"model: ViT-{arch}, {args.epochs} epochs of {count} images, {args.batch_size} per step")
    stores_squares, squares = choose_squares(count, args.epochs, args.out)
    words.append(squares)
    return Choices(arch, tokens, k, positions, stores_squares, names, words)


def find_images(folder: Path) -> tuple[list[str], Counter[str]]:
    """Names of the images in a folder, and how many other files there are of each kind."""
    root = str(folder.absolute())
    names: list[str] = []
    others: Counter[str] = Counter()
    for name in list_dir_or_file(folder, list_dir=False, recursive=True):
        if "/." in f"/{name}":  # hidden, or in a hidden folder
            continue
        if re.search("[\n\r\udc80-\udcff]", f"{root}/{name}"):
            others["with a line break or no UTF-8 in their names"] += 1
        elif name.lower().endswith(EXTENSIONS):
            names.append(name)
        else:
            others[Path(name).suffix or "no suffix"] += 1
    return sorted(names), others


def vocabulary(images: int) -> tuple[int, int]:
    """Positions to sample per image, and the number of centroids for these rows: a power of two."""
    enough = LARGEST_K * ROWS_A_CENTROID
    positions = min(GRID**2, max(4, -(-enough // images)))
    k = 2
    while 2 * k <= LARGEST_K and 2 * k * ROWS_A_CENTROID <= images * positions:
        k *= 2
    return positions, k


def choose_squares(images: int, epochs: int, out: Path) -> tuple[bool, str]:
    """Whether to decode each image once and store its square in a folder, and a line that says why.

    It pays from the second epoch on. Half of the free disk stays for checkpoints and other users.
    """
    needed = images * SQUARE_BYTES
    free = shutil.disk_usage(out).free
    cost = f"{needed / GIGABYTE:.3g} GB; {free / GIGABYTE:.3g} GB are free"
    if epochs == 1:
        return False, "squares: not stored, because one epoch decodes each image once"
    if needed > free / 2:
        return False, f"squares: not stored, because they need {cost}: each epoch decodes all images"
    return True, f"squares: each image is decoded once and stored, in {cost}"


def take_weights(source: Path, target: Path, arch: str | None) -> tuple[str, str]:
    """Convert weights to start from; returns their ViT size and a line about them."""
    try:
        weights, told = as_start(read_weights(source))
    except ValueError as error:
        raise UserError(f"--init {source}: {error}") from error
    sizes = sizes_of(weights)
    patch = weights["backbone.patch_embed.projection.weight"].shape[-1]

    # The sizes that the pre-training has recipes for; with --arch only that one.
    known = {}
    for name in [arch] if arch else ARCHS:
        settings = VisionTransformer.arch_zoo[f"deit-{name}"]
        known[name] = {key: settings[key] for key in sizes}
    if sizes not in known.values() or patch != 16 or "backbone.cls_token" not in weights:
        raise UserError(
            f"--init {source}: a ViT with {sizes} and patches of {patch}; the pre-training needs a class "
            f"token, patches of 16, and one of {known}"
        )
    write_weights(target, weights)
    (found,) = (name for name in known if known[name] == sizes)
    return found, f"start: {source}, {told}"


def choose_tokens(wish: str, arch: str, has_init: bool) -> Tokens:
    """The tokenizer for a wish: 'auto', 'clip', 'init' or 'random'; TowerError without CLIP's weights."""
    if wish == "auto":
        try:
            return clip_tokens()
        except TokenizerError as error:
            # The rest of the message is for those who write a config.
            print(f"no CLIP weights: {str(error).partition(': check the network')[0]}", flush=True)
        wish = "init" if has_init else "random"
    if wish == "clip":
        return clip_tokens()
    if wish == "init":
        return init_tokens(arch)
    return random_tokens()


def clip_tokens() -> Tokens:
    """The paper's k-CLIP, in float16; without a GPU, k-CLIP with the smallest CLIP ResNet, in float32."""
    has_gpu = torch.cuda.is_available()
    name = "RN50x64" if has_gpu else "RN50"
    weights_file(name, "openai")
    config = dict(type="mapet_mm.KCLIP", clip_model=name, pretrained="openai", image_size=32 * GRID)
    if has_gpu:
        config["precision"] = "float16"
    return Tokens(f"k-CLIP of {name}", config, 32 * GRID, CLIP_STATISTICS)


def init_tokens(arch: str) -> Tokens:
    """Clusters of the features of the initial weights."""
    weights = dict(type="Pretrained", checkpoint=INIT, prefix="backbone.")
    encoder = dict(type="mapet_mm.MaPeTViT", arch=f"deit-{arch}", img_size=16 * GRID, out_type="featmap")
    config = dict(type="mapet_mm.GridKMeans", encoder=dict(**encoder, init_cfg=weights))
    return Tokens("clusters of the features of --init", config, 16 * GRID, IMAGENET_STATISTICS)


def random_tokens() -> Tokens:
    """Clusters of the features of a small random CLIP ResNet, which capture colours and textures only."""
    tower = dict(layers=[1, 1, 1, 1], width=16, image_size=16 * GRID)
    config = dict(type="mapet_mm.KCLIP", clip_model=tower, pretrained=dict(type="random", seed=0), stride=16)
    words = (
        "clusters of a random network's features, which know colours and textures only (better ones: "
        "--tokenizer clip or init)"
    )
    return Tokens(words, config, 16 * GRID, CLIP_STATISTICS)
