"""The network of a pre-training's config, and what its images go through: a recipe's, or those of a start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mmengine.config import Config

from mapet_mm.cli.choices import Choices
from mapet_mm.cli.options import PretrainOptions
from mapet_mm.cli.start_models import SIDE
from mapet_mm.cli.starts import GRID, Start, context_patches
from mapet_mm.datasets.look import measured_statistics, picture_pipeline
from mapet_mm.utils.run_folder import EXPORTS, INIT, TOKENS


def set_network(cfg: Config, args: PretrainOptions, choices: Choices) -> list[dict[str, Any]]:
    """Give a recipe the network that was chosen; returns the steps that make a square of an image."""
    if choices.start and choices.start.network:
        set_vit(cfg, choices.start)
    elif (choices.side, choices.grid) != (SIDE, GRID):
        set_size(cfg, choices)
    if choices.tokens:
        init = dict(type="Pretrained", checkpoint=INIT, prefix="backbone.") if args.init else None
        cfg.model.backbone.init_cfg = init
        cfg.model.head.vocab_size = choices.vocabulary.k
        cfg.model.target_generator.vocab_size = choices.vocabulary.k
    return square_steps(cfg, args, choices, choices.side)


def square_steps(cfg: Config, args: PretrainOptions, choices: Choices, side: int) -> list[dict[str, Any]]:
    """The steps that read an image and make a square of so many pixels; a start has its own."""
    steps = [dict(step) for step in cfg.load_square]
    steps[1]["scale"] = side
    if choices.start and choices.start.network:
        steps = choices.start.images.pipeline[:-1]
    return of_tiles(picture_pipeline(steps, choices.look.load, choices.look.num_bands), args.tiles)


def after_square(cfg: Config, args: PretrainOptions, choices: Choices) -> list[dict[str, Any]]:
    """The steps of a training's pipeline that follow the square."""
    if not choices.tokens:
        crop = [dict(step) for step in cfg.crop]
        crop[0]["scale"] = choices.side
        return picture_pipeline(crop, {}, choices.look.num_bands)
    load_tokens = dict(type="mapet_mm.LoadTokenGrid", store=TOKENS)
    if args.teacher_images:  # the store has its names from there
        load_tokens["data_root"] = str(args.images.absolute())
    # Other bands than three are jittered on the device: see `set_bands`.
    jitter = [cfg.color_jitter] if choices.look.num_bands == 3 else []
    return [*jitter, load_tokens, cfg.pack]


def set_vit(cfg: Config, start: Start) -> None:
    """Give a recipe the network of a start, and its images' mean and standard deviation."""
    width = start.vit.sizes["embed_dims"]
    options = dict(objective="mapet", drop_path_rate=cfg.model.backbone.drop_path_rate)
    if "neck" in cfg.model:  # VisibleMIM's predictor, with heads of 64 dimensions if the width allows it
        cfg.model.neck.embed_dims = width
        cfg.model.neck.num_heads = width // math.gcd(width, 64)
        options["objective"] = "context"
        # As in the recipes, half of the patches are seen.
        options["cutting_point"] = start.vit.sizes["num_extra_tokens"] + start.grid**2 // 2
    cfg.model.backbone = {**start.network, **options}
    cfg.model.head.embed_dims = width
    for name in ("mean", "std"):
        cfg.data_preprocessor[name] = [255 * value for value in getattr(start.images, name)]
    cfg[EXPORTS] = asdict(start.vit)


def set_size(cfg: Config, choices: Choices) -> None:
    """Give a recipe's own ViT another size of images and patches, with the same share of them as context."""
    backbone = cfg.model.backbone
    backbone.img_size = choices.side
    backbone.patch_size = choices.side // choices.grid
    if not choices.tokens:  # MAE's decoder and head have to know, too
        cfg.model.neck.update(num_patches=choices.grid**2, patch_size=backbone.patch_size)
        cfg.model.head.patch_size = backbone.patch_size
        return
    num_context = context_patches(choices.grid, cfg.model.head.embed_dims)
    if "neck" in cfg.model:  # VisibleMIM's, half of the patches
        num_context = choices.grid**2 // 2
    backbone.cutting_point = 1 + num_context


def set_bands(cfg: Config, load_square: list, args: PretrainOptions, choices: Choices) -> None:
    """Give a recipe a network of the images' bands, normalised by what is measured, and their jitter."""
    paths = [str(args.images / name) for name in choices.labels.names]
    mean, std = measured_statistics(load_square, paths)
    num_bands = choices.look.num_bands
    cfg.data_preprocessor.update(mean=mean, std=std, to_rgb=False)
    if not choices.tokens:
        cfg.model.backbone.patch_cfg = dict(in_channels=num_bands)
        cfg.model.neck.in_chans = num_bands
        cfg.model.head.in_channels = num_bands
        return
    jitter = {name: cfg.color_jitter[name] for name in ("brightness", "contrast")}
    cfg.data_preprocessor.color_jitter = jitter
    cfg.model.backbone.in_channels = num_bands
    if choices.start and choices.start.vit:
        shares = [[value / 255 for value in values] for values in (mean, std)]
        cfg[EXPORTS] = asdict(choices.start.vit.with_bands(*shares))


def of_tiles(steps: Sequence[dict[str, Any]], tiles: tuple[int, int] | None) -> list[dict[str, Any]]:
    """The steps of a pipeline, which loads tiles if there are any."""
    load, *others = steps
    if tiles:
        load = dict(load, type="mapet_mm.LoadPicture", tile=tiles[0])
    return [load, *others]
