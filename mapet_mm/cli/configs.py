"""Write the two configs of `mapet-mm pretrain`, with paths relative to RUN, where the tools run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.runner import Runner

from mapet_mm.cli.change import set_aside
from mapet_mm.cli.choices import Choices
from mapet_mm.cli.continuing import write_config
from mapet_mm.cli.held_out import FEWEST_VOTING, image_sets, write_lines, write_lists
from mapet_mm.cli.network_config import after_square, of_tiles, set_bands, set_network, square_steps
from mapet_mm.cli.options import PretrainOptions
from mapet_mm.datasets.look import picture_pipeline
from mapet_mm.evaluation.image_sets import SECTION
from mapet_mm.evaluation.metrics.neighbours import suiting_k
from mapet_mm.structures.names import read_lines
from mapet_mm.utils.commands import PACKAGE
from mapet_mm.utils.config import type_name
from mapet_mm.utils.run_folder import (
    CODEBOOK,
    EXPORTS,
    HELD_OUT,
    IMAGES,
    PRETRAINING,
    STORED,
    TOKENIZER,
    TOKENS,
    TRAINED,
    VOTING,
    Run,
)

PAPERS_RATE = 1.5e-3
# A training that continues from --init: the highest rate, for 64 images a step, and the share of it that each
# layer has of the next one's. By trials with narrow ViTs (docs/pretrain.md names them); wider ones, of which
# none was tried, learn more slowly, because best rates usually fall with the width.
CONTINUING_NARROW = (1.5e-3, 1.0)
NARROW = 192  # at most
CONTINUING_WIDE = (3e-4, 0.75)
CONTINUING_BATCH = 64
MAX_SKIPPED = 0.05  # share of the images that may be left out
PROBES = 10  # of k-NN, during the training
MOST_PROBED = 2_000  # images


def write_configs(args: PretrainOptions, choices: Choices) -> None:
    """Write the lists of images and the two configs into RUN; configs that exist are kept."""
    write_lines(args.run / IMAGES, choices.labels.names)
    print(write_lists(args, choices.labels), flush=True)
    if args.change == "knn":
        print(set_aside(args, choices.labels.groups), flush=True)
    if choices.tokens and not (args.run / TOKENIZER).exists():
        write_config(args.run / TOKENIZER, tokenizer_config(args, choices))
    if not (args.run / PRETRAINING).exists():
        write_config(args.run / PRETRAINING, pretraining_config(args, choices))


def process_count(args: PretrainOptions) -> int:
    """Number of processes: as asked for, else one for each GPU."""
    return args.processes or max(1, torch.cuda.device_count())


def images_config(images: Path, pipeline: list) -> dict[str, Any]:
    """A dataset of the listed images in a folder."""
    folder = dict(data_prefix=str(images.absolute()), ann_file=IMAGES, with_label=False)
    return dict(type="mapet_mm.ImageFolder", **folder, pipeline=pipeline)


def tokenizer_config(args: PretrainOptions, choices: Choices) -> Config:
    """Images -> codebook -> tokens; images that cannot be decoded are left out and listed in the store."""
    tokens = choices.tokens
    fit = choices.vocabulary
    mean, std = tokens.statistics
    resampling = dict(backend="pillow", interpolation="bicubic")
    resize = dict(type="ResizeEdge", edge="short", scale=tokens.image_size, **resampling)
    crop = dict(type="CenterCrop", crop_size=tokens.image_size)
    pipeline = [dict(type="LoadImageFromFile"), resize, crop, dict(type="PackInputs")]
    if choices.start and choices.start.images:  # the part of each image that the start's ViT sees
        pipeline = choices.start.images.at(tokens.image_size).pipeline
    pipeline = of_tiles(picture_pipeline(pipeline, choices.teacher.load), args.tiles)
    images = images_config(choices.teacher.folder, pipeline)
    return Config(
        dict(
            data_root=images["data_prefix"],
            token_store=TOKENS,
            tokenizer=dict(tokens.config, codebook=CODEBOOK),
            data_preprocessor=dict(type="SelfSupDataPreprocessor", mean=mean, std=std, to_rgb=True),
            dataset=[images],
            codebook=dict(
                dataset=images,
                positions_per_image=fit.positions,
                k=fit.k,
                niter=fit.niter,
                nredo=fit.nredo,
                seed=args.seed,
            ),
            dataloader=dict(num_workers=args.workers),
            on_error="skip",
            max_skipped=MAX_SKIPPED,
            next_config=PRETRAINING,
        )
    )


def pretraining_config(args: PretrainOptions, choices: Choices) -> Config:
    """Images and tokens -> pre-trained ViT: the package's recipe for this size with these images."""
    (recipe,) = (PACKAGE / "configs").glob(args.about_method.recipe.format(choices.arch or "small"))
    cfg = Config.fromfile(recipe)
    load_square = set_network(cfg, args, choices)
    if args.train != "all":
        cfg.model.train_backbone = args.train
    if choices.look.num_bands != 3:
        set_bands(cfg, load_square, args, choices)
    pipeline = [*load_square, *after_square(cfg, args, choices)]
    cfg.train_dataloader.dataset = images_config(args.images, pipeline)
    set_schedule(cfg, args, choices)

    # The images have no labels, so there is nothing to validate with.
    for name in ("val", "test"):
        for part in ("cfg", "dataloader", "evaluator"):
            cfg[f"{name}_{part}"] = None
    # The recipe's k-NN is of ImageNet's images.
    checks = [hook for hook in cfg.custom_hooks if type_name(hook.type) != "KNNProbeHook"]
    cfg.custom_hooks = [*checks, dict(type="mapet_mm.ProgressHook")]
    kept = {*signature(Runner).parameters, "custom_hooks", "max_skipped", EXPORTS}
    pretraining = Config({name: value for name, value in cfg.items() if name in kept})
    if args.run.held_out:
        leave_out(pretraining, args.run, load_square)
    if choices.stores_squares:
        square = square_steps(cfg, args, choices, choices.stored_side)
        train_on_squares(pretraining, square, choices, args.run)
    return pretraining


def set_schedule(cfg: Config, args: PretrainOptions, choices: Choices) -> None:
    """Give a recipe the numbers of this training: epochs, images of a step, rates, seed."""
    total = args.batch_size * process_count(args)
    # Both rates are meant for a number of images: Adam's goes with its square root.
    if choices.start:
        is_narrow = cfg.model.head.embed_dims <= NARROW
        rate, decay = CONTINUING_NARROW if is_narrow else CONTINUING_WIDE
        rate *= math.sqrt(total / CONTINUING_BATCH)
        share = 10  # of the epochs warms up: head and mask token are new, and their gradients reach the rest
    else:
        papers_rate = cfg.optim_wrapper.optimizer.lr
        rate = papers_rate * math.sqrt(total / cfg.auto_scale_lr.base_batch_size)
        decay = 1.0
        share = args.about_method.warm_up
    if args.lr is not None:
        rate = args.lr
    if args.layer_decay is not None:
        decay = args.layer_decay
    if decay < 1:
        cfg.optim_wrapper.paramwise_cfg = dict(layer_decay_rate=decay)

    warm_up = min(max(1, args.epochs // share), args.epochs - 1)
    # In each iteration: the recipe's rate changes once an epoch, of which a folder may need only a few.
    unit = dict(by_epoch=True, convert_to_iter_based=True)
    warming = dict(type="LinearLR", start_factor=1e-6 / PAPERS_RATE, begin=0, end=warm_up, **unit)
    cooling = dict(
        type="CosineAnnealingLR", eta_min_ratio=1e-5 / PAPERS_RATE, begin=warm_up, end=args.epochs, **unit
    )
    if not choices.tokens:  # with tokens, the tokenizer's config has it
        cfg.max_skipped = MAX_SKIPPED
    cfg.merge_from_dict(
        {
            "work_dir": "training",
            "train_dataloader.batch_size": args.batch_size,
            "train_dataloader.num_workers": args.workers,
            "train_dataloader.drop_last": False,  # a folder may have fewer images than a batch
            "train_dataloader.persistent_workers": args.workers > 0,
            "train_cfg.max_epochs": args.epochs,
            "param_scheduler": [warming, cooling] if warm_up else [cooling],
            "optim_wrapper.optimizer.lr": float(f"{rate:.3g}"),
            "auto_scale_lr": dict(base_batch_size=total, processes=process_count(args)),  # see `share_batch`
            "default_hooks.logger.interval": 10,
            "default_hooks.checkpoint.interval": max(1, args.epochs // 20),
            "default_hooks.checkpoint.max_keep_ckpts": 2,
            "randomness.seed": args.seed,
        }
    )


def leave_out(cfg: Config, run: Run, square: Sequence[Mapping[str, Any]]) -> None:
    """Let a config train without the held-out images and validate on them, and name the verdict's images.

    Args:
        cfg: of the pre-training. One without tokens gets no validation.
        run: has the lists of images.
        square: the steps by which an image is read for the verdict.
    """
    loader = cfg.train_dataloader
    dataset = loader.dataset.to_dict()
    loader.dataset.ann_file = TRAINED
    options = {key: loader[key] for key in ("batch_size", "num_workers", "persistent_workers")}

    # Validate: token accuracy.
    interval = max(1, cfg.train_cfg.max_epochs // PROBES)
    steps = [step for step in dataset["pipeline"] if type_name(step["type"]) != "ColorJitter"]
    if any(type_name(step["type"]) == "LoadTokenGrid" for step in steps):
        cfg.train_cfg.val_interval = interval
        cfg.val_cfg = dict()
        cfg.val_evaluator = dict(type="mapet_mm.TokenAccuracy")
        ordered = dict(type="DefaultSampler", shuffle=False)
        held_out = dict(dataset, ann_file=HELD_OUT, pipeline=steps)
        cfg.val_dataloader = dict(options, sampler=ordered, dataset=held_out)

    # The images of the verdict, and k-NN on some of them during the training.
    read = dict(dataset, pipeline=[*square, dict(type="PackInputs")])
    sets = image_sets(dict(options, dataset=read), run.folder)
    cfg[SECTION] = sets
    num_voting = len(read_lines(run / VOTING))
    if num_voting:
        num_trained = len(read_lines(run / TRAINED))
        probe: dict[str, Any] = dict(type="mapet_mm.KNNProbeHook", interval=interval)
        probe["k"] = suiting_k(num_voting)
        probe["most_images"] = max(FEWEST_VOTING, min(MOST_PROBED, num_trained * interval // 20))
        for name in ("train", "val"):
            probe[f"{name}_dataloader"] = sets[name]
        cfg.custom_hooks = [*cfg.custom_hooks, probe]


def train_on_squares(pretraining: Config, square: list, choices: Choices, run: Run) -> None:
    """Read stored squares. A GPU jitters their colours; without one the loader does, as it would images'."""
    loader = pretraining.train_dataloader
    folder = loader.dataset.data_prefix
    following = loader.dataset.pipeline[len(square) :]
    loader.dataset = dict(type="mapet_mm.StoredImages", square=square, size=choices.stored_side)
    if run.held_out:
        loader.dataset.left_out = HELD_OUT
    if not choices.tokens:
        loader.dataset.update(store=STORED, names=IMAGES, data_root=folder, pipeline=following)
        return
    loader.dataset.store = TOKENS
    root = next(step for step in following if "store" in step).get("data_root")
    if root:
        loader.dataset.data_root = root
    jitter = [step for step in following if type_name(step["type"]) == "ColorJitter"]
    if torch.cuda.is_available():
        loader.collate_fn = dict(type="mapet_mm.whole_batch")
        for step in jitter:
            options = {name: value for name, value in step.items() if name != "type"}
            pretraining.data_preprocessor.color_jitter = options
    else:
        loader.dataset.pipeline = [*jitter, following[-1]]
