"""The decisions of `mapet-mm pretrain`: which images, which tokenizer, and how many tokens."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mmengine.fileio import list_dir_or_file
from mmpretrain.models.backbones import VisionTransformer
from PIL import Image

from mapet_mm.interop.convert import sizes_of
from mapet_mm.interop.initial_weights import as_start
from mapet_mm.models.target_generators.clip_tower import TowerError, weights_file
from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.errors import UserError
from mapet_mm.weight_files import read_weights, write_weights

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
OPTIONS = "options.json"
GRID = 14  # tokens per side: 224 pixels in patches of 16
LOOKED_AT = 500  # number of images whose headers are read
ROWS_A_CENTROID = 39  # the minimum that faiss advises
LARGEST_K = 8192  # the paper's
WIDTHS = {192: "tiny", 384: "small", 768: "base"}
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
    """Everything that goes into the two configs."""

    images: Path
    out: Path
    arch: str
    init: Path | None
    count: int
    tokens: Tokens
    k: int
    positions: int
    options: argparse.Namespace
    words: list[str] = field(default_factory=list)


def choose(args: argparse.Namespace) -> Choices:
    """Look at the images and decide.

    Raises:
        UserError: no images, or unsuitable weights.
    """
    count, words = look_at(args.images)
    init, arch = None, args.arch or "small"
    if args.init:
        init = args.out / "init.pth"
        arch, told = take_weights(args.init, init, args.arch)
        words.append(told)
    tokens = choose_tokens(args.tokenizer, init, arch)
    positions, k = vocabulary(count)
    words.append(f"tokens: {tokens.words}; {k} centroids, from {positions} of {GRID**2} positions per image")
    words.append(f"model: ViT-{arch}, {args.epochs} epochs of {count} images, {args.batch_size} per step")
    return Choices(args.images, args.out, arch, init, count, tokens, k, positions, args, words)


def remember(args: argparse.Namespace) -> None:
    """Save the options that decide the results."""
    options = {
        name: str(value) if isinstance(value, Path) else value for name, value in decisive(args).items()
    }
    replace_json(args.out / OPTIONS, options)


def require_same_options(args: argparse.Namespace) -> None:
    """Raise UserError if other options were saved before; the same folder may be written in several ways."""
    file = args.out / OPTIONS
    before = json.loads(file.read_text()) if file.exists() else {}
    changed = []
    for name, value in decisive(args).items():
        was = before.get(name)
        same = Path(was).resolve() == value.resolve() if was and isinstance(value, Path) else was == value
        if before and not same:
            option = "DIR" if name == "images" else f"--{name.replace('_', '-')}"
            changed.append(f"{option} was {'not given' if was is None else was}")
    if changed:
        raise UserError(f"{args.out} was begun with other options ({', '.join(changed)}): take another --out")


def decisive(args: argparse.Namespace) -> dict[str, Any]:
    """The options that decide the results, by name."""
    return {name: value for name, value in vars(args).items() if name not in ("out", "workers", "processes")}


def find_images(folder: Path) -> list[Path]:
    """The images in a folder and its subfolders, links among them: those that a dataset of MMPretrain lists.

    Raises:
        UserError: there are none.
    """
    names = list_dir_or_file(folder, list_dir=False, recursive=True)
    files = [folder / name for name in names if name.lower().endswith(EXTENSIONS)]
    if not files:
        raise UserError(f"{folder} holds no images ({', '.join(EXTENSIONS)})")
    return files


def look_at(folder: Path) -> tuple[int, list[str]]:
    """Number of images in a folder, and a line about them.

    Raises:
        UserError: there are none, or none can be opened.
    """
    files = find_images(folder)
    step = -(-len(files) // LOOKED_AT)
    sides = sorted(filter(None, map(short_side, files[::step])))
    unreadable = len(files[::step]) - len(sides)
    if not sides:
        raise UserError(f"{folder}: none of {len(files[::step])} images can be opened")
    told = f"images: {len(files)}, median short side {sides[len(sides) // 2]} pixels"
    if unreadable:
        told += f"; {unreadable} of {len(files[::step])} cannot be opened and will be left out"
    return len(files), [told]


def short_side(path: Path) -> int | None:
    """An image's shorter side in pixels, from its header; None if it cannot be opened."""
    try:
        with Image.open(path) as image:
            return min(image.size)
    except Exception:  # Pillow raises many types of error
        return None


def vocabulary(images: int) -> tuple[int, int]:
    """Positions to sample per image, and the number of centroids for these rows: a power of two."""
    enough = LARGEST_K * ROWS_A_CENTROID
    positions = min(GRID**2, max(4, -(-enough // images)))
    k = 2
    while 2 * k <= LARGEST_K and 2 * k * ROWS_A_CENTROID <= images * positions:
        k *= 2
    return positions, k


def take_weights(source: Path, target: Path, arch: str | None) -> tuple[str, str]:
    """Convert weights to start from; returns their ViT size and a line about them.

    Raises:
        UserError: the weights are not a plain ViT's, or have another size.
    """
    try:
        weights, told = as_start(read_weights(source))
    except ValueError as error:
        raise UserError(f"--init {source}: {error}") from error
    sizes, patch = sizes_of(weights), weights["backbone.patch_embed.projection.weight"].shape[-1]
    width = sizes["embed_dims"]
    found = WIDTHS.get(width)
    if found is None or patch != 16:
        raise UserError(
            f"--init {source}: a ViT of width {width} with patches of {patch}; known are {WIDTHS}, 16"
        )
    if arch and arch != found:
        raise UserError(f"--init {source} is a ViT-{found}, --arch says {arch}")
    known = VisionTransformer.arch_zoo[f"deit-{found}"]
    for name, size in sizes.items():
        if size != known[name]:
            raise UserError(f"--init {source}: {name} is {size}, in a ViT-{found} it is {known[name]}")
    if "backbone.cls_token" not in weights:
        raise UserError(f"--init {source}: a ViT without class token, which the pre-training needs")
    write_weights(target, weights)
    return found, f"start: {source}, {told}"


def choose_tokens(wish: str, init: Path | None, arch: str) -> Tokens:
    """The tokenizer for a wish: 'auto' | 'clip' | 'init' | 'random' | 'timm:NAME'.

    Raises:
        UserError: the tokenizer is not available.
    """
    if wish.startswith("timm:"):
        return timm_tokens(wish.removeprefix("timm:"))
    if wish == "auto":
        return best_tokens(init, arch)
    if wish == "clip":
        return clip_tokens()
    if wish == "random":
        return random_tokens()
    if wish != "init":
        raise UserError(f"--tokenizer {wish}: auto, clip, init, random or timm:NAME")
    if init is None:
        raise UserError("--tokenizer init: --init names the weights")
    return init_tokens(init, arch)


def best_tokens(init: Path | None, arch: str) -> Tokens:
    """k-CLIP if its weights are there or can be downloaded, else clusters of --init's or random features."""
    try:
        return clip_tokens()
    except TowerError as error:
        # The rest of the message is for those who write a config.
        print(f"no CLIP weights: {str(error).partition(': check the network')[0]}", flush=True)
    return init_tokens(init, arch) if init else random_tokens()


def clip_tokens() -> Tokens:
    """The paper's k-CLIP; without a GPU, k-CLIP with the smallest CLIP ResNet."""
    name = "RN50x64" if torch.cuda.is_available() else "RN50"
    weights_file(name, "openai")
    config = dict(type="mapet_mm.KCLIP", clip_model=name, pretrained="openai", image_size=32 * GRID)
    return Tokens(f"k-CLIP of {name}", config, 32 * GRID, CLIP_STATISTICS)


def init_tokens(init: Path, arch: str) -> Tokens:
    """Clusters of the features of the initial weights."""
    weights = dict(type="Pretrained", checkpoint=str(init), prefix="backbone.")
    encoder = dict(type="mapet_mm.MaPeTViT", arch=f"deit-{arch}", img_size=16 * GRID, out_type="featmap")
    config = dict(type="mapet_mm.GridKMeans", encoder=dict(**encoder, init_cfg=weights))
    return Tokens("clusters of the features of --init", config, 16 * GRID, IMAGENET_STATISTICS)


def timm_tokens(name: str) -> Tokens:
    """Clusters of the features of a pre-trained ViT of timm."""
    import timm

    if not timm.is_model(name):
        raise UserError(f"--tokenizer timm:{name}: timm has no such model")
    model = timm.create_model(name, pretrained=False)
    if not hasattr(model, "patch_embed"):
        raise UserError(f"--tokenizer timm:{name}: no ViT, it has no patches")
    side = GRID * model.patch_embed.patch_size[0]
    statistics = tuple([255 * value for value in model.pretrained_cfg[each]] for each in ("mean", "std"))
    encoder = dict(type="TIMMBackbone", model_name=name, pretrained=True, img_size=side)
    config = dict(type="mapet_mm.GridKMeans", encoder=encoder, image_size=side)
    return Tokens(f"clusters of the features of timm's {name}", config, side, statistics)


def random_tokens() -> Tokens:
    """Clusters of the features of a small random CLIP ResNet, which capture colours and textures only."""
    tower = dict(layers=[1, 1, 1, 1], width=16, image_size=16 * GRID)
    config = dict(type="mapet_mm.KCLIP", clip_model=tower, pretrained=dict(type="random", seed=0), stride=16)
    return Tokens(
        "clusters of a random network's features, which know colours and textures only (better ones: "
        "--tokenizer clip, timm:NAME or init)",
        config,
        16 * GRID,
        CLIP_STATISTICS,
    )
