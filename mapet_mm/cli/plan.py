"""Make two configs from the choices, and the stages that run them."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import shlex
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.registry import init_default_scope

from mapet_mm.cli.choices import EXTENSIONS, Choices
from mapet_mm.cli.main import tool_command
from mapet_mm.cli.results import codebook_there, export_there, note_export, tokens_there, training_there
from mapet_mm.cli.stages import Stage
from mapet_mm.registry import MODELS
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.config import PACKAGE, read_config
from mapet_mm.utils.dist import choose_dtype
from mapet_mm.utils.errors import UserError

CONFIGS = ("tokenizer.py", "pretrain.py")
CODEBOOK = "codebook.safetensors"
PAPERS_RATE, PAPERS_BATCH = 1.5e-3, 2048
TRIAL = 2  # images of a trial step on CPU, where an image takes about as long in any batch

TOKENIZER = """\
# Written by `mapet-mm pretrain`, yours to edit: images -> codebook -> tokens.
data_root = {data_root!r}
token_store = {store!r}
tokenizer = {tokenizer}
data_preprocessor = dict(type="SelfSupDataPreprocessor", mean={mean}, std={std}, to_rgb=True)

images = dict(
    type="CustomDataset",
    data_root=data_root,
    data_prefix="",
    with_label=False,
    extensions={extensions},
    pipeline=[
        dict(type="LoadImageFromFile"),
        dict(type="ResizeEdge", scale={size}, edge="short", backend="pillow", interpolation="bicubic"),
        dict(type="CenterCrop", crop_size={size}),
        dict(type="PackInputs"),
    ],
)
dataset = [images]
codebook = dict(dataset=images, positions_per_image={positions}, k={k}, seed={seed})
dataloader = dict(num_workers={workers})
on_error = "skip"  # images that cannot be decoded are left out, and listed in the token store
next_config = {next_config!r}
"""
PRETRAINING = """\
# Written by `mapet-mm pretrain`, yours to edit: images and tokens -> pre-trained ViT.
_base_ = {base!r}

work_dir = {work_dir!r}
vocab_size = {k}
model = dict(
    backbone=dict(init_cfg={init}),
    head=dict(vocab_size=vocab_size),
    target_generator=dict(vocab_size=vocab_size),
)
load_tokens = dict(type="mapet_mm.LoadTokenGrid", store={store!r})
train_dataloader = dict(
    batch_size={batch_size},
    num_workers={workers},
    persistent_workers={persistent},
    dataset=dict(
        _delete_=True,
        type="CustomDataset",
        data_root={data_root!r},
        data_prefix="",
        with_label=False,
        extensions={extensions},
        pipeline=[*_base_.load_square, _base_.color_jitter, load_tokens, _base_.pack],
    ),
)
val_cfg = val_dataloader = val_evaluator = None
test_cfg = test_dataloader = test_evaluator = None

# A thirtieth of the epochs to warm up, as the paper's ten of 300.
train_cfg = dict(max_epochs={epochs})
param_scheduler = [
    {{**_base_.param_scheduler[0], "end": {warm_up}}},
    {{**_base_.param_scheduler[1], "begin": {warm_up}, "end": {epochs}}},
]
# The recipe's rate is meant for 2048 images a step, these are {total}: Adam's rate goes with the square root.
optim_wrapper = dict(optimizer=dict(lr={rate:.3g}))
auto_scale_lr = dict(base_batch_size={total})
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval={keep_every}, max_keep_ckpts=2))
randomness = dict(seed={seed})
"""


def write_configs(choices: Choices) -> None:
    """Write the two configs into RUN; files that exist are kept."""
    tokenizer, pretraining = (choices.out / name for name in CONFIGS)
    for file, text in (
        (tokenizer, tokenizer_config(choices, pretraining)),
        (pretraining, pretraining_config(choices)),
    ):
        if not file.exists():
            replace_file(file, text.encode())


def plan(args: argparse.Namespace, images: int) -> list[Stage]:
    """The stages that run the configs in RUN.

    Args:
        args: the command line.
        images: number of images, for the estimate of the time.
    """
    out, processes = args.out, process_count(args)
    tokenizer, pretraining = (out / name for name in CONFIGS)
    tokens, cfg = read_config(tokenizer), read_config(pretraining)
    codebook, store = Path(tokens.tokenizer.get("codebook", out / CODEBOOK)), Path(tokens.token_store)
    training = Path(cfg.work_dir)
    checkpoint = training / f"epoch_{cfg.train_cfg.max_epochs}.pth"

    def stage(title: str, result: Path, tool: str, *arguments: Path | str, **options: Any) -> Stage:
        several = processes if tool in ("train", "fit-codebook", "extract-tokens") else 1
        words = [str(each) for each in arguments]
        shown = ["mapet-mm", *(["--processes", str(several)] if several > 1 else []), tool, *words]
        return Stage(title, tool_command(tool, words, several), shlex.join(shown), result, **options)

    def export(title: str, target: str, folder: Path) -> Stage:
        there, made = partial(export_there, folder, checkpoint), partial(note_export, folder, checkpoint)
        return stage(title, folder, "convert", "mm", target, checkpoint, folder, there=there, made=made)

    has_codebook = partial(codebook_there, codebook, tokenizer, store, training)
    has_tokens = partial(tokens_there, store, tokenizer, checkpoint)
    is_trained = partial(training_there, checkpoint, pretraining)
    # Of a training that was begun, the log says how long it still takes.
    seconds = None if training.exists() else estimated_seconds(pretraining, images, processes)
    return [
        stage("codebook", codebook, "fit-codebook", tokenizer, there=has_codebook),
        stage("tokens", store, "extract-tokens", tokenizer, there=has_tokens),
        stage("pre-training", checkpoint, "train", pretraining, there=is_trained, seconds=seconds),
        export("for timm", "timm", out / "timm"),
        export("for Hugging Face", "hf", out / "huggingface"),
    ]


def process_count(args: argparse.Namespace) -> int:
    """Number of processes: as asked for, else one for each GPU."""
    return args.processes or max(1, torch.cuda.device_count())


def tokenizer_config(choices: Choices, next_config: Path) -> str:
    """The text of the tokenizer config."""
    tokens, out = choices.tokens, choices.out
    return TOKENIZER.format(
        data_root=str(choices.images),
        store=str(out / "tokens"),
        tokenizer=_written({**tokens.config, "codebook": str(out / CODEBOOK)}),
        mean=tokens.statistics[0],
        std=tokens.statistics[1],
        extensions=EXTENSIONS,
        size=tokens.image_size,
        positions=choices.positions,
        k=choices.k,
        seed=choices.options.seed,
        workers=choices.options.workers,
        next_config=str(next_config),
    )


def pretraining_config(choices: Choices) -> str:
    """The text of the pre-training's config, derived from the package's recipe for this ViT size."""
    (recipe,) = (PACKAGE / "configs/mapet").glob(f"mapet_vit-{choices.arch}-p16_kclip_*_in1k.py")
    options, epochs = choices.options, choices.options.epochs
    total = options.batch_size * process_count(options)
    init = choices.init and dict(type="Pretrained", checkpoint=str(choices.init), prefix="backbone.")
    return PRETRAINING.format(
        base=str(recipe.resolve()),
        work_dir=str(choices.out / "training"),
        init=init and _written(init),
        store=str(choices.out / "tokens"),
        k=choices.k,
        batch_size=options.batch_size,
        total=total,
        rate=PAPERS_RATE * math.sqrt(total / PAPERS_BATCH),
        workers=options.workers,
        persistent=options.workers > 0,
        data_root=str(choices.images),
        extensions=EXTENSIONS,
        epochs=epochs,
        warm_up=min(max(1, epochs // 30), max(1, epochs - 1)),
        keep_every=max(1, epochs // 20),
        seed=options.seed,
    )


def _written(value: Any) -> str:
    """A value as config source text: `dict(type=...)`."""
    if isinstance(value, dict):
        return f"dict({', '.join(f'{name}={_written(each)}' for name, each in value.items())})"
    return repr(value)


def estimated_seconds(config: Path, images: int, processes: int) -> float:
    """`training_seconds`; of a GPU in a process of its own, which leaves the GPU's memory to the stages.

    Raises:
        UserError: the GPU's memory does not hold a step.
    """
    if get_device() == "cpu":
        return training_seconds(config, images, processes)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(training_seconds, config, images, processes).result()
    except torch.OutOfMemoryError as error:
        size = read_config(config).train_dataloader.batch_size
        raise UserError(
            f"{config}: a step of {size} images does not fit into the GPU's memory: give a smaller "
            "--batch-size"
        ) from error


def training_seconds(config: Path, images: int, processes: int) -> float:
    """Estimate the pre-training's time on this machine from forward and backward passes of a few images.

    Args:
        config: of the pre-training.
        images: number per epoch.
        processes: number that share the images.
    """
    cfg = read_config(config)
    device = get_device()
    cfg.model.backbone.init_cfg = None
    init_default_scope("mmpretrain")
    model = MODELS.build(cfg.model).to(device).train()
    size = TRIAL if device == "cpu" else cfg.train_dataloader.batch_size
    batch = [torch.randn(size, 3, 224, 224, device=device), torch.zeros(size, 14, 14, dtype=torch.int64)]
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        with torch.autocast(device, choose_dtype(device, None)):
            loss = model.loss([part.to(device) for part in batch], [])["loss"]
        loss.backward()
        loss.item()  # waits for the device
        taken.append(time.perf_counter() - start)
    return min(taken) / size * images / processes * cfg.train_cfg.max_epochs
