"""Choose the learning rate, warm-up and layer decay with which `mapet-mm pretrain --init` continues.

    mapet-mm digits --out data
    python research/continuing_rate.py --data data --out work_dirs/continuing

A small ViT is pre-trained on the digits. It then continues on two other domains of them, turned and
inverted, with tokens of its own features, by the configs that the command writes. Every fifth training image
is held out: the figure is the percentage of these whose class the k-NN vote of the other training images
finds, in the mean of the patches. Settings whose figure is in figures.json are not run again.
"""

import argparse
import copy
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import timm
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from PIL import Image

from mapet_mm.cli.pretrain import deciding_options, parse_args, prepare, stages
from mapet_mm.evaluation.metrics.neighbours import knn_votes
from mapet_mm.utils.atomic_files import replace_json

SIZES = dict(img_size=24, patch_size=6, embed_dim=64, depth=3, num_heads=2)
DOMAINS = ("digits_rotated", "digits_inverted")
FIRST_EPOCHS = 30  # of the start
SHORT = 5  # epochs of the continued trainings
LONG = 20
SCRATCH_RATE = 1e-3  # of the start, at 64 images a step
RATES = (1e-4, 3e-4, 6e-4, 1.5e-3)
DECAYS = (1.0, 0.75)


def split(data: Path, out: Path, domain: str) -> tuple[list[str], list[str]]:
    """Copy four fifths of a domain's training images into a folder; the lines of these and of the others."""
    lines = (data / domain / "meta/train.txt").read_text().split("\n")
    lines = [line for line in lines if line]
    held_out = lines[::5]
    kept = [line for line in lines if line not in set(held_out)]
    for line in kept:
        name = line.split()[0]
        target = out / domain / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(data / domain / "train" / name, target)
    return kept, held_out


def configure(images: Path, run: Path, init: str, epochs: int, *more: str) -> Config:
    """The config that `mapet-mm pretrain` writes for a continued training, with its tokens made."""
    words = [str(images), "--out", str(run), "--init", init, "--epochs", str(epochs), "--workers", "0", *more]
    args = parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    prepare(args, deciding_options(args, epochs))
    for stage in stages(args)[:2]:
        subprocess.run(
            stage.command, cwd=run, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    return Config.fromfile(run / "pretrain.py")


def train(
    cfg: Config, run: Path, rate: float, decay: float, warm_up: float, seed: int, epochs: int
) -> torch.nn.Module:
    """The backbone after a training with these settings."""
    cfg = copy.deepcopy(cfg)
    cfg.work_dir = "settings/" + "_".join(map(str, (rate, decay, warm_up, seed, epochs)))
    cfg.experiment_name = str(run / cfg.work_dir)
    cfg.randomness.seed = seed
    cfg.optim_wrapper.type = "OptimWrapper"  # float32, which CPUs without bfloat16 compute faster
    cfg.log_level = "ERROR"
    cfg.custom_hooks = []  # the pipeline was checked before, and nobody watches
    cfg.optim_wrapper.optimizer.lr = rate
    cfg.optim_wrapper.paramwise_cfg = dict(layer_decay_rate=decay)
    cfg.train_cfg.max_epochs = epochs
    unit = dict(by_epoch=True, convert_to_iter_based=True)
    end = max(1, round(warm_up * epochs)) if warm_up else 0
    warming = dict(type="LinearLR", start_factor=1e-3, begin=0, end=end, **unit)
    cooling = dict(type="CosineAnnealingLR", eta_min_ratio=1e-2, begin=end, end=epochs, **unit)
    cfg.param_scheduler = [warming, cooling] if end else [cooling]
    cfg.default_hooks.checkpoint = dict(
        type="CheckpointHook", interval=-1, save_last=True, save_optimizer=False
    )
    before = os.getcwd()
    os.chdir(run)
    try:
        runner = Runner.from_cfg(cfg)
        runner.train()
    finally:
        os.chdir(before)
    return runner.model.backbone


@torch.no_grad()
def accuracy(vit: torch.nn.Module, folder: Path, kept: list[str], held_out: list[str]) -> float:
    """Percent of the held-out images whose class k-NN finds."""
    vit.eval()
    features = []
    labels = []
    for lines in (kept, held_out):
        names = [line.split()[0] for line in lines]
        pixels = np.stack([np.asarray(Image.open(folder / name).convert("RGB")) for name in names])
        images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        features.append(torch.cat([vit.encode(part)[0][:, 1:].mean(1) for part in images.split(256)]))
        labels.append(torch.tensor([int(line.split()[1]) for line in lines]))
    votes = knn_votes(features[1], [(features[0], labels[0])], num_classes=10)
    return 100 * (votes.argmax(1) == labels[1]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, required=True, help="folder for all files, and figures.json")
    args = parser.parse_args()
    out = args.out.absolute()
    file = out / "figures.json"
    figures = json.loads(file.read_text()) if file.exists() else {}

    # The start: random weights, then the digits.
    torch.manual_seed(0)
    images = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_pct=1.0, input_size=(3, 24, 24))
    random = timm.create_model("vit_tiny_patch16_224", pretrained_cfg_overlay=images, num_classes=0, **SIZES)
    timm.models.save_for_hf(random, str(out / "random"), safe_serialization=True)
    lines = {domain: split(args.data, out, domain) for domain in ("digits", *DOMAINS)}
    start = out / f"digits_run/training/epoch_{FIRST_EPOCHS}.pth"
    if not start.exists():
        cfg = configure(
            out / "digits", out / "digits_run", str(out / "random"), FIRST_EPOCHS, "--tokenizer", "random"
        )
        vit = train(cfg, out / "digits_run", SCRATCH_RATE, 1.0, 0.1, 0, FIRST_EPOCHS)
        print("digits:", accuracy(vit, args.data / "digits/train", *lines["digits"]), flush=True)
        made = next((out / "digits_run/settings").glob(f"*/{start.name}"))
        start.parent.mkdir(exist_ok=True)
        shutil.copy(made, start)

    # Learning rate, layer decay, share of the epochs that warms up, seed, epochs; first the start itself.
    settings = [(0.0, 1.0, 0.0, 0, SHORT)]
    settings += [(rate, 1.0, 0.1, 0, LONG) for rate in RATES[1:]]
    settings += [(rate, 0.75, 0.1, 0, LONG) for rate in RATES[1:]]
    settings += [(rate, 1.0, 0.0, 0, LONG) for rate in RATES[2:3]]
    settings += [(rate, decay, 0.1, 0, SHORT) for decay in DECAYS for rate in RATES]
    for domain in DOMAINS:
        run = out / f"{domain}_run"
        cfg = configure(out / domain, run, str(out / "digits_run"), SHORT)
        for setting in settings:
            key = f"{domain} " + " ".join(map(str, setting))
            if key not in figures:
                vit = train(cfg, run, *setting)
                figures[key] = accuracy(vit, args.data / domain / "train", *lines[domain])
                replace_json(file, figures)
            print(key, round(figures[key], 1), flush=True)


if __name__ == "__main__":
    main()
